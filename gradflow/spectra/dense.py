"""Dense: the identity pushed through every layer, in as many columns at a time as asked for, then one SVD."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from gradflow import devices
from gradflow.spectra.network import Basis, Network


class Whole(NamedTuple):
    """J over 2^exponent, block by token where tokens stay apart, and its singular values."""

    matrix: Basis
    values: Float[Array, " n"]
    exponent: Int[Array, ""]


@functools.partial(jax.jit, static_argnums=1)
def _push(network: Network, width: int, start: Array) -> tuple[Basis, Int[Array, ""]]:
    """J on ``width`` columns of the identity, an equal share on every device, each with a power of two of its own."""
    count = jax.device_count()
    if count == 1:
        return network.push(network.basis(start, width))

    def share(network: Network, start: Array) -> tuple[Basis, Int[Array, ""]]:
        mine = start + jax.lax.axis_index(devices.AXIS) * (width // count)
        pushed, exponent = network.push(network.basis(mine, width // count))
        common = jax.lax.pmax(exponent, devices.AXIS)
        return devices.joined(pushed * jnp.exp2((exponent - common).astype(pushed.dtype)), -1), common

    return devices.split(share, (network, start), PartitionSpec())


def whole(network: Network, chunk: int | None = None, progress: Callable[[int, int], None] | None = None) -> Whole:
    """All of J and its spectrum; memory is J itself, and O(tokens·d·chunk) on the way.

    Every chunk has a power of two of its own, so that the columns are those of one push of all, to the rounding of a matmul of
    another shape. Columns are spread over all devices.
    """
    width = network.columns
    chunk = min(chunk or width, width)
    padded = chunk + -chunk % jax.device_count()
    network, parts = devices.placed(network), []
    for start in range(0, width, chunk):
        pushed, exponent = devices.here(_push(network, padded, np.int32(start)))
        parts.append((pushed[..., : min(chunk, width - start)], exponent))
        if progress is not None:
            progress(min(start + chunk, width), width)
    return _joined(network.blocks, *zip(*parts, strict=True))


@functools.partial(jax.jit, static_argnums=0)
def _joined(blocks: bool, columns: tuple[Basis, ...], exponents: tuple[Array, ...]) -> Whole:
    exponent = jnp.max(jnp.stack(exponents))
    shifted = [c * jnp.exp2((e - exponent).astype(c.dtype)) for c, e in zip(columns, exponents, strict=True)]
    matrix = jnp.concatenate(shifted, -1)
    values = jnp.linalg.svd(matrix if blocks else matrix.reshape(-1, matrix.shape[-1]), compute_uv=False)
    return Whole(matrix, jnp.sort(values.reshape(-1), descending=True), exponent)


@functools.partial(jax.jit, static_argnums=0)
def times(blocks: bool, matrix: Basis, v: Float[Array, "m tokens d"]) -> Float[Array, "m tokens d"]:
    """The matrix times every v."""
    if blocks:
        return jnp.einsum("tij,mtj->mti", matrix, v)
    return jnp.einsum("tik,mk->mti", matrix, v.reshape(len(v), -1))
