"""One network, measured: its stack is drawn or built, run, pushed through and swept back. Everything here is per seed."""

import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from gradflow import devices, precision
from gradflow.flow import Rows, flow
from gradflow.norms import BY_NAME
from gradflow.planar import planar
from gradflow.product import identity, spectrum_of
from gradflow.stack import Drawn, Stack


class Measurement(NamedTuple):
    """What one seed gives.

    Attributes
    ----------
    rows : dict of (S,) arrays
        The factors (`gradflow.flow.flow`).
    singular_values : (tokens·d,) or None
        Of the whole-depth product, descending, over 2^exponent.
    frobenius : () or None
        The product's Frobenius norm, over 2^exponent.
    exponent : () or None
        The base-2 log-scale of both.
    """

    rows: Rows
    singular_values: Float[Array, " n"] | None
    frobenius: Float[Array, ""] | None
    exponent: Array | None


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def measure(
    stack: Stack,
    tokens: int,
    cosine: float | None,
    probes: int,
    whole: bool,
    aligned: bool,
    seeds: Array,
    given: Float[Array, "tokens d"] | None,
) -> Measurement:
    """Measure one network a seed, spread over all devices; every leaf has a leading axis of seeds.

    Parameters
    ----------
    cosine : float or None
        1 − c of the planar stack (alignment reading); ``None`` draws iid weights.
    probes, whole : int, bool
        Number of Gaussian cotangents; whether the whole-depth product and its singular values are wanted.
    aligned : bool
        Whether the planar stack's own in-plane cotangent is used instead of Gaussians.
    given : (tokens, d) or None
        A cotangent from outside.
    """
    one = functools.partial(_one, stack, tokens, cosine, probes, whole, aligned, given=given)
    return devices.over(one, seeds)


def _one(
    stack: Stack,
    tokens: int,
    cosine: float | None,
    probes: int,
    whole: bool,
    aligned: bool,
    seed: Array,
    given: Float[Array, "tokens d"] | None,
) -> Measurement:
    k_input, k_weights, k_cotangent = jax.random.split(seed, 3)
    cotangents = precision.normal(k_cotangent, (probes, tokens, stack.d), stack.dtype)
    if cosine is None:
        unit = BY_NAME[stack.norm].init(stack.d, 0.0, stack.dtype)  # a stream as any norm would hand it over: rms 1
        x, weights = unit(precision.normal(k_input, (tokens, stack.d), stack.dtype)), Drawn(k_weights)
    else:
        weights, x, in_plane = planar(stack, k_weights, cosine)
        cotangents = in_plane[None] if aligned else cotangents
    if given is not None:
        cotangents = given[None]
    trajectory = stack.trace(weights, x, identity(stack, tokens) if whole else None)
    rows = flow(stack, weights, trajectory, cotangents)
    if not whole:
        return Measurement(rows, None, None, None)
    found = spectrum_of(stack, trajectory)
    return Measurement(rows, found.singular_values, found.frobenius, found.exponent)
