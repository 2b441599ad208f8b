"""A branch's matrices: drawn, applied to every token, and, where asked for, the norm of their gradients.

Matrices are ``params["w…"]``, biases ``params["b…"]``; a dummy ``params["note…"]`` asks for ‖dL/dW‖ (`gradflow.probes`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow import precision

Params = dict[str, Array]
State = Float[Array, "tokens d"]
Basis = Float[Array, "tokens d k"]


def gaussian(key: Array, shape: tuple[int, ...], std: float, dtype: Any) -> Array:
    """Weights ~ N(0, std²)."""
    return std * precision.normal(key, shape, dtype)


def alike(key: Array, tokens: int, d: int, cosine: float, dtype: Any) -> State:
    """Gaussian vectors, every two of that cosine."""
    own = precision.normal(key, (tokens, d), dtype)
    if cosine == 0:
        return own
    # √(1 − c)·own + a·mean has the covariance c off the diagonal, whatever the sign of c
    common = (1 + (tokens - 1) * cosine) ** 0.5 - (1 - cosine) ** 0.5
    return (1 - cosine) ** 0.5 * own + common * jnp.mean(own, 0)


def linear(params: Params, name: str, x: Float[Array, "tokens k"]) -> Float[Array, "tokens n"]:
    """``W x + b`` for every token; W is ``params["wNAME"]``, (n, k), and b, where there is one, ``params["bNAME"]``, (n,)."""
    matrix, bias, note = params[f"w{name}"], params.get(f"b{name}"), params.get(f"note{name}")
    out = _times(matrix, x) if note is None else _watched(matrix, x, note)
    return out if bias is None else out + bias


def pushed(f: Callable[[State], State], x: State, basis: Basis) -> Basis:
    """The Jacobian of ``f`` at ``x`` by one linearisation, mapped over directions."""
    _, tangent = jax.linearize(f, x)
    return jax.vmap(tangent, -1, -1)(basis)


def _times(matrix: Float[Array, "n k"], x: Float[Array, "tokens k"]) -> Float[Array, "tokens n"]:
    # dot_general, not x @ W.T: a differentiated scan would stack the transposed weights as residuals
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))


@jax.custom_vjp
def _watched(matrix: Float[Array, "n k"], x: Float[Array, "tokens k"], note: Array) -> Float[Array, "tokens n"]:
    """``x Wᵀ``; on the way back ``note``'s gradient is ‖dL/dW‖ and ``matrix`` gets none."""
    return _times(matrix, x)


def _watched_back(residuals: tuple[Array, Array], g: Float[Array, "tokens n"]) -> tuple[None, Array, Array]:
    matrix, x = residuals
    (tokens, n), k = g.shape, x.shape[1]
    gram = tokens * (n + k) < n * k  # ‖GᵀX‖² = ⟨GGᵀ, XXᵀ⟩, where that is cheaper than forming GᵀX
    power = jnp.sum((g @ g.T) * (x @ x.T)) if gram else jnp.sum((g.T @ x) ** 2)
    return None, g @ matrix, jnp.sqrt(jnp.maximum(power, 0))


_watched.defvjp(lambda matrix, x, note: (_times(matrix, x), (matrix, x)), _watched_back)
