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
    matrix : (tokens, d, d)
        Branches act on tokens one by one, so the whole Jacobian is block-diagonal and these are its blocks.
    exponent : ()
        Base-2 log-scale, common to all.
    singular_values : (tokens·d,)
        Of the whole Jacobian, descending, over 2^exponent.
    """

    matrix: Float[Array, "tokens d d"]
    exponent: Int[Array, ""]
    singular_values: Float[Array, " n"]

    @property
    def frobenius(self) -> Array:
        """‖J‖_F over 2^exponent."""
        return jnp.sqrt(jnp.sum(self.matrix**2))


def identity(stack: Stack, tokens: int) -> Float[Array, "tokens d d"]:
    """The basis that a whole product starts from."""
    eye = jnp.eye(stack.d, dtype=stack.dtype)
    return jnp.broadcast_to(eye, (tokens, stack.d, stack.d))


def spectrum_of(trajectory: Trajectory) -> Product:
    """The product that a trajectory has pushed an identity into."""
    assert trajectory.basis is not None
    values = jnp.linalg.svd(trajectory.basis, compute_uv=False).reshape(-1)
    return Product(trajectory.basis, trajectory.exponent, jnp.sort(values, descending=True))


@functools.partial(jax.jit, static_argnums=0)
def product(stack: Stack, weights: Weights, x: State) -> Product:
    """Multiply the exact Jacobians of all sub-layers at ``x``'s trajectory; memory is O(tokens·d²) at any depth.

    Equivalent to ``jax.jacfwd`` of the whole network, block by token, with a running power-of-two scale that is exact.

    Parameters
    ----------
    x : (tokens, d)
        The input, in the stack's dtype.
    """
    return spectrum_of(stack.trace(weights, x, identity(stack, x.shape[0]), False))
