"""Branches f of a residual sub-layer: parameters, value, exact Jacobian push, and the moments that the law needs.

A branch acts on one token, a vector (d,); the stack maps it over tokens. All weights are iid zero-mean Gaussians at unit gain
(Var W = 1/fan_in); ``gain`` multiplies the last matrix, so that q_f and χ_f carry gain².
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import sympy
from jaxtyping import Array, Float

from gradflow import checks, precision
from gradflow.numeric import to_jax
from gradflow.symbolic import moments as symbolic

Vector = Float[Array, " d"]
Params = dict[str, Array]


class Branch(Protocol):
    """What a stack needs of a branch; implementations are frozen (hashable) dataclasses.

    ``push(params, x, basis)`` is F(x) @ basis for a basis of shape (d, k), equivalent to
    ``jax.jacfwd(functools.partial(branch.apply, params))(x) @ basis``.
    """

    @property
    def gain(self) -> float:
        """Factor on the last matrix."""
        ...

    @property
    def name(self) -> str:
        """The name that `branch_of` knows it by."""
        ...

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """Draw weights for width ``d``."""
        ...

    def apply(self, params: Params, x: Vector) -> Vector:
        """``f(x)`` for one token."""
        ...

    def push(self, params: Params, x: Vector, basis: Float[Array, "d k"]) -> Float[Array, "d k"]:
        """``F(x) @ basis``."""
        ...

    def moments(self) -> symbolic.BranchMoments:
        """Its moments for a unit-rms input, gain included."""
        ...


def _gaussian(key: Array, shape: tuple[int, ...], std: float, dtype: Any) -> Array:
    return std * precision.normal(key, shape, dtype)


def _matvec(matrix: Float[Array, "n k"], x: Float[Array, " k"]) -> Float[Array, " n"]:
    # dot_general, not x @ W.T: a differentiated scan would stack the transposed weights as residuals
    return jax.lax.dot_general(matrix, x, (((1,), (0,)), ((), ())))


@dataclass(frozen=True)
class Linear:
    """f(x) = W x, W_ij ~ N(0, gain²/d): q_f = χ_f = gain²."""

    gain: float = 1.0
    name = "linear"

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W of shape (d, d)."""
        return {"w": _gaussian(key, (d, d), self.gain / math.sqrt(d), dtype)}

    def apply(self, params: Params, x: Vector) -> Vector:
        """``W x``."""
        return _matvec(params["w"], x)

    def push(self, params: Params, x: Vector, basis: Float[Array, "d k"]) -> Float[Array, "d k"]:
        """``W @ basis``."""
        return params["w"] @ basis

    def moments(self) -> symbolic.BranchMoments:
        """q_f = χ_f = gain²."""
        return symbolic.LINEAR.scaled(self.gain**2)


@dataclass(frozen=True)
class Bias:
    """f(x) = b, b_i ~ N(0, gain²), whatever x is: q_f = gain², F = 0, so that exact = trunk."""

    gain: float = 1.0
    name = "bias"

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """b of shape (d,)."""
        return {"b": _gaussian(key, (d,), self.gain, dtype)}

    def apply(self, params: Params, x: Vector) -> Vector:
        """``b``; the zero keeps b's dependence on the batch axis of x."""
        return params["b"] + jnp.zeros_like(x)

    def push(self, params: Params, x: Vector, basis: Float[Array, "d k"]) -> Float[Array, "d k"]:
        """Zero: a constant has no Jacobian."""
        return jnp.zeros_like(basis)

    def moments(self) -> symbolic.BranchMoments:
        """q_f = gain², χ_f = 0."""
        return symbolic.CONSTANT.scaled(self.gain**2)


@functools.lru_cache
def _activation(phi: sympy.Expr) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """φ and φ' as JAX functions, φ' being SymPy's derivative."""
    return to_jax([symbolic.z], phi), to_jax([symbolic.z], symbolic.slope(phi))


@dataclass(frozen=True)
class MLP:
    """f(x) = W₂ φ(W₁ x) with hidden width ``ratio``·d, W₁ ~ N(0, 1/d), W₂ ~ N(0, gain²/(ratio·d)).

    Attributes
    ----------
    activation : str or sympy.Expr
        A name in `gradflow.symbolic.moments.ACTIVATIONS`, or any expression in one symbol.
    """

    activation: str | sympy.Expr = "relu"
    ratio: int = 4
    gain: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.activation, sympy.Expr):
            checks.one_of("activation", self.activation, symbolic.ACTIVATIONS)
        elif len(self.activation.free_symbols) != 1:
            raise ValueError(f"activation: needs an expression in one symbol, got {self.activation}")

    @property
    def name(self) -> str:
        """``mlp:ACT``."""
        return f"mlp:{self.activation}"

    @property
    def phi(self) -> sympy.Expr:
        """φ(z) as a SymPy expression in `gradflow.symbolic.moments.z`."""
        if isinstance(self.activation, str):
            return symbolic.ACTIVATIONS[self.activation]
        renamed = {symbol: symbolic.z for symbol in self.activation.free_symbols}
        return self.activation.xreplace(renamed)  # type: ignore[return-value]

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W₁ of shape (ratio·d, d) and W₂ of shape (d, ratio·d)."""
        first, last = jax.random.split(key)
        m = self.ratio * d
        return {
            "w_in": _gaussian(first, (m, d), 1 / math.sqrt(d), dtype),
            "w_out": _gaussian(last, (d, m), self.gain / math.sqrt(m), dtype),
        }

    def apply(self, params: Params, x: Vector) -> Vector:
        """``W₂ φ(W₁ x)``."""
        phi, _ = _activation(self.phi)
        return _matvec(params["w_out"], phi(_matvec(params["w_in"], x)))

    def push(self, params: Params, x: Vector, basis: Float[Array, "d k"]) -> Float[Array, "d k"]:
        """``(W₂ ∘ φ') W₁ @ basis``; F is formed first where that is the cheaper order (k ≥ d)."""
        _, slope = _activation(self.phi)
        scaled = params["w_out"] * slope(_matvec(params["w_in"], x))
        if basis.shape[1] >= x.size:
            return (scaled @ params["w_in"]) @ basis
        return scaled @ (params["w_in"] @ basis)

    def moments(self) -> symbolic.BranchMoments:
        """q_f = gain² E φ², χ_f = gain² E φ'²."""
        return symbolic.mlp_moments(self.phi, float(self.ratio)).scaled(self.gain**2)


BRANCHES: dict[str, Branch] = {
    "linear": Linear(),
    "bias": Bias(),
    **{f"mlp:{name}": MLP(name) for name in symbolic.ACTIVATIONS},
}


def branch_of(spec: str | Branch) -> Branch:
    """Return the branch that a name stands for; a branch object is returned as it is."""
    if all(hasattr(spec, part) for part in ("name", "gain", "init", "apply", "push", "moments")):
        return spec  # type: ignore[return-value]
    return BRANCHES[checks.one_of("branch", spec, BRANCHES)]


def with_power(branch: Branch, q_f: float) -> Branch:
    """Return the branch rescaled so that E f_i² = q_f for a unit-rms input."""
    unit = branch.moments().q / branch.gain**2
    return replace(branch, gain=math.sqrt(q_f / unit))  # type: ignore[type-var]
