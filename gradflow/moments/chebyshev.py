"""Chebyshev interpolation on [−1, 1]: NumPy's nodes and matrices, and a sum that JAX can trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.polynomial import chebyshev

SMALL = 1024


@functools.lru_cache
def nodes(order: int) -> np.ndarray:
    """The ``order`` roots of T_order."""
    return chebyshev.chebpts1(order)


@functools.lru_cache
def coefficients(order: int) -> np.ndarray:
    """The matrix that takes values at `nodes` to coefficients: on them the polynomials are orthogonal."""
    matrix = chebyshev.chebvander(nodes(order), order - 1).T * 2 / order
    matrix[0] /= 2
    return matrix


def evaluate(found: jax.Array, x: jax.Array) -> jax.Array:
    """Σ_k found[k] T_k(x); ``found[k]`` broadcasts against ``x``."""
    if jnp.size(x) <= SMALL:
        rank = max(found.ndim - 1, jnp.ndim(x))
        index = jnp.arange(len(found)).reshape(-1, *(1,) * rank)
        padded = found.reshape(len(found), *(1,) * (rank - found.ndim + 1), *found.shape[1:])
        return jnp.sum(padded * jnp.cos(index * jnp.arccos(jnp.clip(x, -1, 1))), 0)
    # Clenshaw's recurrence, unrolled: one pass over a large x, at the price of a longer program
    later, last = jnp.zeros(()), jnp.zeros(())
    for k in range(len(found) - 1, 0, -1):
        later, last = found[k] + 2 * x * later - last, later
    return found[0] + x * later - last
