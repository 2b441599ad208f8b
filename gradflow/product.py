"""The whole-depth product of exact Jacobians, and its spectrum, by pushing a basis through the layers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gradflow.stack import Stack, State, Trajectory, Weights


class Product(NamedTuple):
    """J = ∂out/∂x of every token, over 2^exponent.

    Attributes
    ----------
    matrix : (tokens, d, k)
        Where branches act on tokens one by one, the whole Jacobian is block-diagonal and these are its blocks, k = d.
        Where a branch mixes tokens, k = tokens·d: the rows of the whole matrix, by token.
    exponent : ()
        Base-2 log-scale, common to all.
    singular_values : (tokens·d,)
        Of the whole Jacobian, descending, over 2^exponent.
    """

    matrix: Float[Array, "tokens d k"]
    exponent: Int[Array, ""]
    singular_values: Float[Array, " n"]

    @property
    def frobenius(self) -> Array:
        """‖J‖_F over 2^exponent."""
        return jnp.sqrt(jnp.sum(self.matrix**2))


def identity(stack: Stack, tokens: int) -> Float[Array, "tokens d k"]:
    """The basis that a whole product starts from: one for all tokens at once, k = d, unless tokens mix, k = tokens·d."""
    if stack.mixes:
        return jnp.eye(tokens * stack.d, dtype=stack.dtype).reshape(tokens, stack.d, tokens * stack.d)
    eye = jnp.eye(stack.d, dtype=stack.dtype)
    return jnp.broadcast_to(eye, (tokens, stack.d, stack.d))


def spectrum_of(stack: Stack, trajectory: Trajectory) -> Product:
    """The product that a trajectory has pushed an identity into."""
    basis = trajectory.basis
    assert basis is not None
    whole = basis.reshape(-1, basis.shape[-1]) if stack.mixes else basis
    values = jnp.linalg.svd(whole, compute_uv=False).reshape(-1)
    return Product(basis, trajectory.exponent, jnp.sort(values, descending=True))


@functools.partial(jax.jit, static_argnums=0)
def product(stack: Stack, weights: Weights, x: State) -> Product:
    """Multiply the exact Jacobians of all sub-layers at ``x``'s trajectory; memory is O(tokens·d²) at any depth.

    (O(tokens²·d²) where a branch mixes tokens.)

    Equivalent to ``jax.jacfwd`` of the whole network, block by token, with a running power-of-two scale that is exact.

    Parameters
    ----------
    x : (tokens, d)
        The input, in the stack's dtype.
    """
    return spectrum_of(stack, stack.trace(weights, x, identity(stack, x.shape[0]), False))
