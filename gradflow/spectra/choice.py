"""`gradflow.spectrum`: which of the four ways, what it will cost, and its answer."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import chains, checks, laws, precision, profiles
from gradflow.spectra import compact, krylov, ways
from gradflow.spectra.forecast import Forecast, duration, forecast, memory_limit, size
from gradflow.spectra.network import PATHS, Chain, Network
from gradflow.spectra.result import Spectrum
from gradflow.stack import Drawn, Stack, Weights
from gradflow.streams.stack import StreamStack

METHODS = ("auto", *ways.WAYS)
DEEP = 200  # sub-layers beyond which a product in one piece loses its small singular values
PATIENCE = 30.0  # seconds that "auto" lets the whole spectrum take
SLOW = 3.0  # seconds beyond which a forecast is announced


def spectrum(
    model: Any,
    x: Any | None = None,
    *,
    method: str = "auto",
    path: str = "exact",
    top: int | None = None,
    weights: Weights | None = None,
    tokens: int = 1,
    seeds: int = 1,
    key: int = 0,
    pairs: int | None = None,
    probes: int = 16,
    trace: str = "hutchinson",
    every: int | None = None,
    chunk: int | None = None,
    limit_seconds: float = 600.0,
    limit_bytes: float | None = None,
    force: bool = False,
    announce: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Spectrum:
    """Singular values, or Lyapunov exponents, of the whole-depth Jacobian at any depth and width, with their errors.

    Parameters
    ----------
    model : Stack, StreamStack, checkpoint, or list
        As `gradflow.profile` takes it.
    x : (tokens, d), optional
        The stream as it enters; without one, ``tokens`` random ones of unit rms (random stacks only).
    method : {"auto", "dense", "compact", "matrix-free", "lyapunov"}
        *dense*: the identity pushed through depth, then an SVD: the whole spectrum.
        *compact*: I − A Bᵀ, where what stands beside the identity is of low rank (the trunk; branches with few hidden units):
        the whole spectrum in O(d R²).
        *matrix-free*: the ``top`` largest values by Golub–Kahan–Lanczos with their residuals, the rms gain by probes. A value
        of multiplicity m is seen once.
        *lyapunov*: a QR at every k-th sub-layer: all exponents at any depth.
        *auto* takes compact where it applies, Lyapunov beyond 200 sub-layers, dense up to 30 s and the limits, else
        matrix-free, and says why.
    path : {"exact", "trunk"}
        The true product, or the identity path alone (F = 0).
    top : int, optional
        Largest values wanted: 8 matrix-free, all by Lyapunov.
    weights, seeds, key
        As `gradflow.profile`: network i of a key is the same one there.
    pairs : int, optional
        Steps of Lanczos, one J v and one Jᵀ g each; 2·top + 12 by default.
    probes, trace
        Random vectors for the rms gain where the spectrum is not whole, and ``"hutchinson"`` or ``"xtrace"``.
    every : int, optional
        Sub-layers between two QRs; by default chosen from the spread of exponents that the first 32 blocks show.
    chunk : int, optional
        Columns pushed at a time (dense); the answer does not depend on it.
    limit_seconds, limit_bytes, force
        A forecast above a limit (600 s; half of the memory) is refused, unless forced.
    announce : callable, optional
        Is told the forecast where it is above 3 s; by default it is printed to stderr.

    Returns
    -------
    Spectrum

    Raises
    ------
    ValueError
        For an argument that does not fit the model, a method that does not apply to it, or a forecast above a limit.
    """
    checks.one_of("method", method, METHODS)
    checks.one_of("path", path, PATHS)
    checks.one_of("trace", trace, krylov.TRACES)
    seeds = checks.integer("seeds", seeds, 1)
    for name, value in {"pairs": pairs, "every": every, "chunk": chunk, "top": top}.items():
        if value is not None:
            checks.integer(name, value, 1)
    checks.integer("probes", probes, 2)
    networks, settings = _networks(model, x, weights, path, tokens, seeds, key)
    first = networks[0]
    with precision.scope(first.x.dtype):
        options = _options(first, top, pairs, probes, trace, every, chunk)
        limits = limit_seconds, memory_limit() if limit_bytes is None else limit_bytes
        name, why, cost = _choose(first, method, options, limits, seeds)
        if not force:
            _refuse(cost, *limits, first, options, seeds)
        if cost.seconds > SLOW:
            (announce or _say)(f"{name}: {cost}, {why}")
        if progress is not None:
            progress(0, seeds)
        start, found = time.perf_counter(), []
        root = jax.random.fold_in(jax.random.key(key), 3)
        for i, network in enumerate(networks):
            inner = progress if seeds == 1 else None
            found.append(ways.WAYS[name](network, jax.random.fold_in(root, i), options, inner))
            if progress is not None and seeds > 1:
                progress(i + 1, seeds)
        seconds = time.perf_counter() - start
    _finite(found, str(first.x.dtype))
    shared = dict(found[0].facts)
    if name == "lyapunov" and seeds > 1:
        shared["qr_every"] = sorted({each.facts["qr_every"] for each in found})
    return Spectrum(
        method=name,
        why=why,
        log_singular_values=_rows([each.logs for each in found]),
        log_error=None if found[0].log_error is None else _rows([each.log_error for each in found]),
        exponent_error=None if found[0].exponent_error is None else _rows([each.exponent_error for each in found]),
        log_rms_gain=np.array([each.log_rms for each in found]),
        log_rms_error=np.array([each.log_rms_error for each in found]),
        log_rms_law=_law(model, path, tokens) if x is None and weights is None else None,
        n=first.x.size,
        layers=first.layers,
        forecast=cost.to_dict(),
        seconds=seconds,
        settings=settings | shared,
    )


def _say(text: str) -> None:
    print(f"gradflow spectrum: {text}", file=sys.stderr)


def _rows(rows: Sequence[Any]) -> np.ndarray:
    """One row a network; where Krylov spaces closed early the rest is NaN."""
    width = max(len(row) for row in rows)
    return np.array([np.pad(row, (0, width - len(row)), constant_values=np.nan) for row in rows])


def _finite(found: Sequence[ways.Found], dtype: str) -> None:
    if any(np.isnan(each.logs).any() or math.isnan(each.log_rms) for each in found):
        raise ValueError(f"model: the stream or its Jacobian leaves the range of {dtype}, or holds NaN")


def _networks(
    model: Any, x: Any, weights: Weights | None, path: str, tokens: int, seeds: int, key: int
) -> tuple[list[Network], dict[str, Any]]:
    """One a seed, and what they are."""
    checks.key(key)
    about = {"path": path, "seeds": seeds, "key": key}
    if isinstance(model, Sequence) and not isinstance(model, str):
        return [_chain(model, x, weights, path, seeds)], {"scheme": "chain", "depth": len(model)} | about
    stack = getattr(model, "stack", model)
    if not isinstance(stack, Stack | StreamStack):
        raise ValueError(
            f"model: no spectrum of a {type(model).__name__}; needs a Stack, a checkpoint, or a list of functions "
            "(gradflow.adapters turns Equinox and Flax modules into one)"
        )
    if path == "trunk" and isinstance(stack, StreamStack):
        raise ValueError("path: several streams have no one identity path; leave path out")
    weights = weights or getattr(model, "weights", None)
    if weights is not None and seeds != 1:
        raise ValueError("seeds: given weights are one network; leave seeds out")
    if getattr(weights, "mask", None) is not None:
        raise ValueError("weights: carry a mask; leave padding out of x instead")
    if x is None:
        if weights is not None:
            raise ValueError("x: only a random stack is given an input; say what enters this network")
        state = profiles.gaussian_state(stack, tokens, key)
        state = state / np.sqrt(np.mean(state**2, -1, keepdims=True))
    else:
        state = checks.real_array("x:", x)
        if state.ndim != 2 or state.shape[-1] != stack.d or not state.size:
            raise ValueError(f"x: needs shape (tokens, {stack.d}), got {state.shape}")
    with precision.scope(stack.dtype):
        state = jnp.asarray(state, stack.dtype)
        given = [weights] if weights is not None else [Drawn(k) for k in jax.random.split(jax.random.key(key), seeds)]
        kind = {"init": "given weights" if weights is not None else "iid Gaussian, Var W = 1/fan_in"}
        networks = [Network(each, state, stack, path) for each in given]
    return networks, stack.settings() | kind | {"tokens": state.shape[0]} | about


def _chain(model: Sequence[Any], x: Any, weights: Any, path: str, seeds: int) -> Network:
    """A list of functions, in the dtype of ``x``."""
    chains.carries_its_own(weights=weights is None, seeds=seeds == 1, path=path == "exact")
    if x is None:
        raise ValueError("x: a list of functions needs the state that enters it")
    state = chains.state_of(x)
    items = chains.checked(tuple(model))
    with precision.scope(str(state.dtype)):
        state = jnp.asarray(state)
        _, reverse_only = chains.outline(items, state)
        return Network(None, chains.as_tokens(state), Chain(items, state.shape, bool(reverse_only)))


def _options(
    network: Network, top: int | None, pairs: int | None, probes: int, trace: str, every: int | None, chunk: int | None
) -> ways.Options:
    n = network.x.size
    if top is not None and top > n:
        raise ValueError(f"top: the Jacobian has {n} singular values, got {top}")
    if pairs is not None and pairs > n:
        raise ValueError(f"pairs: the Jacobian has {n} singular values, got {pairs}")
    few = min(8 if top is None else top, n)
    if pairs is not None and pairs < few:
        raise ValueError(f"pairs: the {few} largest values need at least as many, got {pairs}")
    if trace == "xtrace" and 2 * probes >= n:
        raise ValueError(f"probes: XTrace takes fewer than half of the {n} dimensions, got {probes}")
    return ways.Options(top, pairs or min(2 * few + 12, n), probes, trace, every, chunk)


def _applies(network: Network, method: str) -> str:
    """Why a method does not apply; empty where it does."""
    if method == "compact" and compact.columns(network) is None:
        return "needs a Stack whose tokens stay apart, α ≠ 0, and branches of low rank (or path='trunk')"
    if method == "lyapunov" and not isinstance(network.model, Stack):
        return "needs a Stack"
    return ""


def _choose(
    network: Network, method: str, o: ways.Options, limits: tuple[float, float], seeds: int
) -> tuple[str, str, Forecast]:
    """A way, why, and its cost."""

    def cost(name: str) -> Forecast:
        return forecast(network, name, o.frame(network), o.pairs, o.probes, o.every or 4).times(seeds)

    if method != "auto":
        if missing := _applies(network, method):
            raise ValueError(f"method: {method} {missing}")
        return method, "as asked", cost(method)
    columns, d = compact.columns(network), network.x.shape[1]
    if columns is not None and 4 * columns <= d:
        return "compact", f"what stands beside the identity has rank {columns} of {d}", cost("compact")
    if network.layers > DEEP and isinstance(network.model, Stack):
        found = cost("lyapunov")
        if found.seconds <= limits[0] and found.bytes <= limits[1]:
            return "lyapunov", f"{network.layers} sub-layers would cost one product its small values", found
    found = cost("dense")
    if found.seconds <= min(PATIENCE * seeds, limits[0]) and found.bytes <= limits[1]:
        return "dense", f"the whole spectrum of {network.x.size} costs {duration(found.seconds)}", found
    return "matrix-free", f"dense would take {found}", cost("matrix-free")


def _refuse(cost: Forecast, seconds: float, space: float, network: Network, o: ways.Options, seeds: int) -> None:
    if cost.seconds <= seconds and cost.bytes <= space:
        return
    other = forecast(network, "matrix-free", o.frame(network), o.pairs, o.probes).times(seeds)
    way = f", method='matrix-free' ({other})" if cost.method != "matrix-free" else ""
    raise ValueError(
        f"method: {cost.method} would take {cost}, above the limit of {duration(seconds)} and {size(space)}; give force=True"
        f"{way}, or raise the limit"
    )


def _law(stack: Any, path: str, tokens: int) -> float | None:
    """log of the law's rms gain over all directions, where there is a law."""
    if not isinstance(stack, Stack) or stack.sublayers > stack.d:  # an expansion in depth over width
        return None
    options = {"norm": stack.norm, "final_norm": stack.final_norm, "tokens": tokens}
    gains = []
    for width in (stack.d, None):
        try:
            found = laws.law(stack.scheme, stack.block, stack.depth, probes=math.inf, **options, d=width)
        except ValueError:
            return None
        gains.append(float((found.log_trunk if path == "trunk" else found.log_exact)[0, 0]))
    return gains[0] if abs(gains[0] - gains[1]) < 1 else None


def forecasts(
    model: Any, x: Any | None = None, *, path: str = "exact", top: int | None = None, **options: Any
) -> dict[str, Forecast]:
    """What each of the four ways that apply would cost (`spectrum`'s arguments), without running any."""
    tokens, seeds, key = options.pop("tokens", 1), options.pop("seeds", 1), options.pop("key", 0)
    networks, _ = _networks(model, x, options.pop("weights", None), path, tokens, seeds, key)
    with precision.scope(networks[0].x.dtype):
        o = _options(networks[0], top, options.pop("pairs", None), options.pop("probes", 16), "hutchinson", None, None)
        kinds = [name for name in ways.WAYS if not _applies(networks[0], name)]
        frame = o.frame(networks[0])
        return {name: forecast(networks[0], name, frame, o.pairs, o.probes).times(seeds) for name in kinds}
