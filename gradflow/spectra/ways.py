"""The four ways behind one interface: a network in, logs of singular values with their errors out."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import precision
from gradflow.spectra import compact, dense, krylov, lyapunov
from gradflow.spectra.check import log_error, widened
from gradflow.spectra.network import Network

Progress = Callable[[int, int], None] | None
LARGEST = 4096  # width at which a learned gain's whole spectrum is still worth an SVD


@dataclass(frozen=True)
class Options:
    """What the ways may be told."""

    top: int | None
    pairs: int
    probes: int
    trace: str
    every: int | None
    chunk: int | None

    def largest(self, network: Network) -> int:
        """How many values Krylov spaces are asked for."""
        return min(8 if self.top is None else self.top, network.x.size)

    def frame(self, network: Network) -> int:
        """How many directions go through depth together by Lyapunov."""
        return network.columns if self.top is None else min(self.top, network.columns)


@dataclass(frozen=True)
class Found:
    """One network's spectrum (fields as of `gradflow.spectra.result.Spectrum`, of one seed)."""

    logs: np.ndarray
    log_error: np.ndarray | None
    exponent_error: np.ndarray | None
    log_rms: float
    log_rms_error: float
    facts: dict[str, Any]


def _logs(values: Any, exponent: float, size: int) -> np.ndarray:
    """Natural logs; −inf at or below rounding's share of the largest, n·eps·σ₁."""
    host = np.asarray(values)
    floor = host.max(initial=0) * size * np.finfo(host.dtype).eps
    with np.errstate(divide="ignore"):
        return np.where(host > floor, np.log(host.astype(np.float64)), -np.inf) + exponent * math.log(2)


def _whole(logs: np.ndarray, error: float, facts: dict[str, Any]) -> Found:
    """All singular values, with one absolute error for all."""
    top = logs.max()
    if not np.isfinite(top):
        return Found(logs, np.full(logs.shape, error), None, -np.inf, 0.0, facts)
    log_rms = top + 0.5 * math.log(np.sum(np.exp(2 * (logs - top))) / logs.size)
    return Found(logs, np.full(logs.shape, error), None, log_rms, math.exp(error - log_rms) / logs.size**0.5, facts)


def by_dense(network: Network, key: jax.Array, o: Options, progress: Progress = None) -> Found:
    """`dense.whole`, its error by `check`."""
    found = dense.whole(network, o.chunk, progress)
    exponent = float(found.exponent)
    error = log_error(network, functools.partial(dense.times, network.blocks, found.matrix), exponent, key)
    facts = {} if o.chunk is None else {"chunk": o.chunk}
    return _whole(_logs(found.values, exponent, network.columns), error, facts)


def by_compact(network: Network, key: jax.Array, o: Options, progress: Progress = None) -> Found:
    """`compact.low_rank` of every token; a learned gain has a route of its own: an SVD, or Lanczos on diag(D) − A Bᵀ if wide."""
    size = compact.columns(network)
    assert size is not None
    parts, logs = [], []
    for token in range(network.x.shape[0]):
        found = compact.low_rank(network, token)
        plain = float(jnp.ptp(jnp.abs(found.diagonal))) == 0
        if not plain and network.x.shape[1] > LARGEST:
            raise ValueError(
                f"method: a learned gain leaves no degenerate part, and a whole spectrum of {network.x.shape[1]} costs d³; "
                "give method='matrix-free' for the largest values"
            )
        values = compact.spectrum(found, plain, plain and network.path == "trunk")
        logs.append(_logs(values, float(found.log_scale) / math.log(2), network.x.shape[1]))
        parts.append(found)
        if progress is not None:
            progress(token + 1, network.x.shape[0])
    scale = max(float(p.log_scale) for p in parts)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    error = log_error(network, functools.partial(compact.times, stacked, scale), scale / math.log(2), key)
    return _whole(
        np.sort(np.concatenate(logs))[::-1], error, {"rank of the correction": size, "learned gain": not plain}
    )


def by_krylov(network: Network, key: jax.Array, o: Options, progress: Progress = None) -> Found:
    """`krylov.ritz`."""
    with jax.enable_x64(network.x.dtype == np.float64):  # matfree allocates in the default dtype
        found = krylov.ritz(network, key, o.largest(network), o.pairs, o.probes, o.trace)
    exponent = float(found.exponent)
    values, residuals = np.asarray(found.values, np.float64), np.asarray(found.residuals, np.float64)
    there = np.isfinite(values)
    with np.errstate(divide="ignore"):
        logs, errors = (np.log(a[there]) + exponent * math.log(2) for a in (values, residuals))
    power, spread = float(found.power), float(found.power_error)
    log_rms = 0.5 * (math.log(power / network.x.size) + 2 * exponent * math.log(2)) if power > 0 else -math.inf
    facts = {"pairs": o.pairs, "probes": o.probes, "trace": o.trace}
    return Found(logs, errors, None, log_rms, 0.5 * spread / power if power > 0 else math.nan, facts)


def by_lyapunov(network: Network, key: jax.Array, o: Options, progress: Progress = None) -> Found:
    """`lyapunov.exponents` at a spacing that a pilot in float64 chooses; the pilot is also what the rounding is measured on."""
    stack: Any = network.model
    top, dtype, wide = o.frame(network), str(network.x.dtype), widened(network)
    blocks = min(stack.depth, lyapunov.PILOT)
    with precision.scope(wide.x.dtype):
        reference = lyapunov.exponents(wide, key, top, 1, blocks)
    size = network.x.shape[1] if network.blocks else network.x.size
    every = o.every or lyapunov.spacing(float(reference.spread), dtype, size)
    with precision.scope(dtype):
        found = lyapunov.exponents(network, key, top, every)
        while (
            every > 1 and o.every is None and lyapunov.thinly_lost(found)
        ):  # the depth holds a worse layer than the pilot
            every //= 2
            found = lyapunov.exponents(network, key, top, every)
        trial = lyapunov.exponents(network, key, top, every, blocks)
    layers = blocks * len(stack.block)
    one, two = (np.asarray(each.logs, np.float64) for each in (reference, trial))
    both = np.isfinite(one) & np.isfinite(two)
    gap = np.abs(one[both] - two[both])
    least = 4 * float(np.finfo(dtype).eps)
    rounding = max(float(gap.max(initial=0)) / layers, least)
    logs = np.asarray(found.logs, np.float64)
    error = _along_depth(np.asarray(found.marks, np.float64), network.layers) + rounding
    error = (
        error + np.asarray(found.lost, np.float64) / every
    )  # a QR that lost an entry counts it too high, by an e or so
    log_rms = float(found.log_frobenius) - 0.5 * math.log(size_of(network, top))
    drift = abs(float(trial.log_frobenius) - float(reference.log_frobenius)) / layers
    facts = {"qr_every": every, "spread_per_layer": float(reference.spread), "rounding_per_layer": rounding}
    return Found(
        logs, None, np.where(np.isfinite(logs), error, np.nan), log_rms, max(drift, least) * network.layers, facts
    )


def size_of(network: Network, top: int) -> int:
    """Directions in the frame, over all tokens."""
    return top * (network.x.shape[0] if network.blocks else 1)


def _along_depth(marks: np.ndarray, layers: int) -> np.ndarray:
    """Standard error of each exponent, from its spread over equal parts of the depth."""
    if not marks.any(axis=-1).all():  # fewer QRs than parts
        return np.full(marks.shape[-1], np.nan)
    parts = np.diff(marks, axis=0, prepend=0)
    return np.std(parts, axis=0, ddof=1) * len(parts) ** 0.5 / layers


WAYS: dict[str, Callable[..., Found]] = {
    "dense": by_dense,
    "compact": by_compact,
    "matrix-free": by_krylov,
    "lyapunov": by_lyapunov,
}
