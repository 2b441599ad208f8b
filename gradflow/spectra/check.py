"""The error of a Jacobian as computed, measured: its products with random vectors against autodiff's transposed ones.

For Gaussian v and z, ⟨z, M v⟩ − ⟨Jᵀz, v⟩ has the mean square ‖M − J‖_F², and no singular value of M is farther than that from
one of J (Weyl; Mirsky for all together). Jᵀz goes another way, in float64 whatever M was computed in.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import precision
from gradflow.spectra.network import Chain, Network

States = Float[Array, "m tokens d"]
PROBES = 8


def widened(network: Network) -> Network:
    """The same network in float64 (in float32 where the device has no other); a list of functions stays as it is."""
    if isinstance(network.model, Chain) or (dtype := precision.resolve("float64")) == str(network.x.dtype):
        return network

    def wide(leaf: Any) -> Any:
        floating = not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    with precision.scope(dtype):
        weights, x = jax.tree.map(wide, (network.weights, network.x))
        return replace(network, weights=weights, x=x, model=replace(network.model, dtype=dtype))


@jax.jit
def _pulled(network: Network, key: Array, z: Float[Array, "k tokens d"]) -> tuple[Array, Array]:
    scales = network.scales(key)
    pull = jax.linear_transpose(network.linear(scales), network.x)
    return jax.lax.map(lambda g: pull(g)[0], z), network.exponent(scales)


def log_error(network: Network, apply: Callable[[States], States], exponent: float, key: Array) -> float:
    """log of ‖M − J‖_F, from `PROBES` pairs of vectors.

    Parameters
    ----------
    apply : callable
        v ↦ M v over 2^exponent, for several v at once.
    """
    shape, dtype = network.x.shape, network.x.dtype
    k_v, k_z, k_scales = jax.random.split(key, 3)
    with precision.scope(dtype):
        v = precision.normal(k_v, (PROBES, *shape), dtype)
        ahead = np.asarray(apply(v), np.float64)
    wide = widened(network)
    with precision.scope(wide.x.dtype):
        z = precision.normal(k_z, ahead.shape, wide.x.dtype)
        back, own = _pulled(wide, k_scales, z)
    one = np.sum(np.asarray(z, np.float64) * ahead, (1, 2))
    two = np.sum(np.asarray(back, np.float64) * np.asarray(v, np.float64), (1, 2)) * 2.0 ** (float(own) - exponent)
    rms = float(np.sqrt(np.mean((one - two) ** 2)))
    return (np.log(rms) if rms else -np.inf) + exponent * np.log(2)
