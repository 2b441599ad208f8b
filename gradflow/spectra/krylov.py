"""Matrix-free: the largest singular values by Golub–Kahan–Lanczos, the rms gain by Hutchinson, both through `matfree`.

One linearisation serves all products; J v and Jᵀ g each cost about half a gradient.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from matfree import decomp, stochtrace

from gradflow import devices, precision
from gradflow.spectra.network import Network
from gradflow.stack import State

TRACES = ("hutchinson", "xtrace")


class Ritz(NamedTuple):
    """What Krylov spaces know of J, over 2^exponent.

    Attributes
    ----------
    values : (top,)
        The largest Ritz values, descending: never above the singular values that they stand for.
    residuals : (top,)
        ‖Jᵀu − σv‖ of each; a singular value lies within that distance.
    power, power_error : ()
        ‖J‖_F² and its standard error over probes.
    exponent : ()
    """

    values: Float[Array, " top"]
    residuals: Float[Array, " top"]
    power: Array
    power_error: Array
    exponent: Array


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def ritz(network: Network, key: Array, top: int, pairs: int, probes: int, trace: str = "hutchinson") -> Ritz:
    """Run ``pairs`` steps (one J v and one Jᵀ g each, fully reorthogonalised), and ``probes`` vectors for the trace.

    Parameters
    ----------
    trace : {"hutchinson", "xtrace"}
        Of JᵀJ. Hutchinson takes one J v a probe and has the relative error √(2/probes)·‖JᵀJ‖_F/‖J‖_F²; XTrace takes
        four half-gradients a probe and gains where a few singular values hold most of the power (Epperly, Tropp, Webber
        2024, 2301.07825).
    """
    k_scales, k_start, k_probes = jax.random.split(key, 3)
    scales = network.scales(k_scales)
    tangent = network.linear(scales)
    start = precision.normal(k_start, network.x.shape, network.x.dtype)
    found = decomp.bidiag(pairs)(tangent, start)
    values, residuals = _triplets(jnp.asarray(found.J_small), jnp.linalg.norm(found.residual))
    power, error = _power(tangent, network.x, k_probes, probes, trace)
    return Ritz(values[:top], residuals[:top], power, error, network.exponent(scales))


def _triplets(upper: Float[Array, "m m"], beta: Array) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """Ritz values and residuals |β pₘ| of the bidiagonal B = PΣQᵀ.

    Where the Krylov space has closed (β = 0, hence 0/0 after it) what stands before is exact, and the rest is NaN.
    """
    size = len(upper)
    open_ = jnp.cumprod(jnp.isfinite(jnp.sum(upper, 0))).astype(bool)
    kept = jnp.sum(open_)
    left, values, _ = jnp.linalg.svd(jnp.where(open_[:, None] & open_, upper, 0))
    rounding = size * jnp.finfo(values.dtype).eps * values[0]
    residuals = jnp.maximum(jnp.where(kept == size, jnp.abs(beta * left[-1]), 0), rounding)
    there = jnp.arange(size) < kept
    return jnp.where(there, values, jnp.nan), jnp.where(there, residuals, jnp.nan)


def _power(tangent: Callable[[State], State], x: State, key: Array, probes: int, trace: str) -> tuple[Array, Array]:
    """‖J‖_F² and its standard error."""
    if trace == "hutchinson":
        signs, power = stochtrace.sampler_signs(x, num=probes)(key), stochtrace.monte_carlo_frobeniusnorm_squared()
        found = devices.over(lambda v: power(tangent, v), signs, together=True)
        return jnp.mean(found), jnp.std(found, ddof=1) / probes**0.5
    pull = jax.linear_transpose(tangent, x)
    sample = stochtrace.sampler_normal(x, num=probes)
    estimate = stochtrace.estimator_leave_one_out_mean_and_sem(stochtrace.leave_one_out_xtrace(), sample)
    return estimate(lambda v: pull(tangent(v))[0], key)
