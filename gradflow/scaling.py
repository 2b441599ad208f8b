"""Sizes of arrays, and powers of two taken out of them, so that nothing under- or overflows and no digit is lost."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def power_of_two(size: Array) -> Array:
    """The power of two nearest to ``size`` ≥ 0, and 1 for 0; to multiply by it or by its inverse is exact."""
    info = jnp.finfo(size.dtype)
    size = jnp.where(size > 0, jnp.minimum(size, info.max / 8), 1)  # 1/power stays normal
    return jax.lax.reduce_precision(size, info.nexp, 0)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def scaled(array: Array, keep: int = 0) -> tuple[Array, Array]:
    """``array`` over the power of two at its largest entry, now in [3/4, 3/2], and that power.

    Each slice along the first ``keep`` axes has a power of its own; the other axes stay, with length 1.
    """
    power = power_of_two(jnp.max(jnp.abs(array), tuple(range(keep, array.ndim)), keepdims=True))
    return array * (1 / power), power


@functools.partial(jax.jit, static_argnums=1, inline=True)
def frobenius(array: Array, keep: int = 0) -> Array:
    """Frobenius norm over all axes but the first ``keep``."""
    unit, power = scaled(array, keep)
    return power.reshape(power.shape[:keep]) * jnp.sqrt(jnp.sum(unit**2, tuple(range(keep, array.ndim))))


def rescale(basis: Array, exponent: Int[Array, ""]) -> tuple[Array, Int[Array, ""]]:
    """`scaled`, the power counted in the exponent of two."""
    unit, power = scaled(basis)
    return unit, exponent + jnp.round(jnp.log2(power.reshape(()))).astype(exponent.dtype)
