"""The depth law of several residual streams at leading order: their Gram forward, the gradient's back, as a `Profile`.

The recursion is `gradflow.symbolic.streams`, lambdified; norms and branches enter as in `gradflow.laws.leading`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import checks, precision
from gradflow.branches import Branch
from gradflow.factors import Profile, backward_sum, safe_log
from gradflow.laws.depth import ASSUMPTIONS, about, blocks_of, with_weights
from gradflow.laws.leading import LENGTHS, branch_powers, norm_powers
from gradflow.numeric import to_jax
from gradflow.streams.rows import Place, StreamScheme
from gradflow.streams.stack import block_of
from gradflow.symbolic import depth as symbols
from gradflow.symbolic import streams as symbolic

Rows = dict[str, Any]


class Formulas(NamedTuple):
    """`gradflow.symbolic.streams.StreamLaw` as JAX functions; r and w are columns."""

    seen: Callable[..., Any]
    total: Callable[..., Any]
    after: Callable[..., Any]
    at_sum: Callable[..., Any]
    below: Callable[..., Any]


@functools.lru_cache
def formulas() -> Formulas:
    """Compile the expressions."""
    law, s = symbolic.StreamLaw(), symbolic
    passed = (s.G, s.R, s.pre, s.post, symbols.chi, symbols.fed, symbols.d_in, symbols.d_branch)
    return Formulas(
        to_jax((s.K, s.pre), law.seen),
        to_jax((s.K, s.R, s.post, symbols.n_branch), law.total),
        to_jax((s.K, s.D), law.after),
        to_jax((s.G, s.D), law.at_sum),
        to_jax(passed, (law.skip, law.back, law.to_branch)),
    )


def gains(norm: str, where: tuple[bool, ...], gram: jax.Array) -> jax.Array:
    """D: 1/rms of each stream that passes a norm, 1 of the others; also of a stream that is 0."""
    power = jnp.diag(gram)
    stands = np.asarray(where) & (norm in LENGTHS)
    return jnp.diag(jnp.where(stands & (power > 0), jnp.where(power > 0, power, 1) ** -0.5, 1.0))


def columns(numbers: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """R, and r and w as columns."""
    residual, pre, post = numbers
    return residual, pre[:, None], post[:, None]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _grams(
    places: tuple[Place, ...], branches: tuple[Branch, ...], norm: str, start: jax.Array, numbers: tuple[jax.Array, ...]
) -> tuple[jax.Array, list[Rows]]:
    """Forward over the blocks: the last Gram, and what the way back needs, (depth, …) for each branch."""
    one, of = jnp.ones(()), formulas()

    def block(K: jax.Array, numbers: tuple[jax.Array, ...]) -> tuple[jax.Array, list[Rows]]:
        rows = []
        for k, branch in enumerate(branches):
            place, (residual, pre, post) = places[k % len(places)], columns(tuple(a[k] for a in numbers))
            into, d_in = norm_powers(norm, place.norm_in, of.seen(K, pre)[0, 0])
            q, chi, weights = branch_powers(branch, into, one, one)
            n_branch, d_branch = norm_powers(norm, place.norm_branch, q)
            total, kept = (of.total(K, residual, post, added) for added in (n_branch, 0 * one))
            D = gains(norm, place.norm_out, total)
            rows.append(
                {"K": K, "total": total, "kept": kept, "D": D, "fed": into, "chi": chi, "weights": weights}
                | {"d_in": d_in, "d_branch": d_branch}
            )
            K = of.after(total, D)
        return K, rows

    return jax.lax.scan(block, start, numbers)


@jax.jit
def _gradients(G: jax.Array, numbers: tuple[jax.Array, ...], forward: list[Rows]) -> tuple[tuple, list[Rows]]:
    """Back over the blocks, of trace 1 at every sub-layer's output: the Grams at the input, and the factors' powers."""
    of = formulas()

    def block(state: tuple, inputs: tuple) -> tuple[tuple, list[Rows]]:
        numbers, forward = inputs
        rows = []
        for k in reversed(range(len(forward))):
            f, mine = forward[k], columns(tuple(a[k] for a in numbers))
            rest = (f["chi"], f["fed"], f["d_in"], f["d_branch"])
            (at_sum, skip, back, up), (trunk_sum, trunk, *_) = (
                (of.at_sum(G, f["D"]), *of.below(of.at_sum(G, f["D"]), *mine, *rest)) for G in state
            )
            row = {
                "norm": jnp.trace(at_sum),
                "skip": jnp.trace(skip),
                "net": jnp.trace(back),
                "trunk": jnp.trace(trunk),
            }
            rows.insert(0, row | {"trunk_norm": jnp.trace(trunk_sum), "weights": up[0, 0] * f["weights"]})
            state = back / row["net"], trunk / row["trunk"]
        return state, rows

    return jax.lax.scan(block, (G, G), (numbers, forward), reverse=True)


def law(
    row: StreamScheme,
    block: Any,
    depth: int,
    *,
    d: int | None = None,
    norm: str = "layernorm",
    final_norm: bool = False,
    tokens: int = 1,
) -> Profile:
    """The depth law of a row of several streams, at leading order; arguments as of `gradflow.law`.

    Raises
    ------
    ValueError
        For an unknown name, a bad size, a norm that is no length norm, or a branch without a law.
    """
    checks.integer("depth", depth, 1)
    tokens = checks.integer("tokens", tokens, 1)
    if norm == "dyt":
        raise ValueError("norm: the law of several streams is of layernorm, rms or none; gradflow.profile measures dyt")
    checks.one_of("norm", norm, (*LENGTHS, "none"))
    if d is not None:
        checks.integer("d", d, 2 + (norm == "layernorm"))
    branches = blocks_of(block_of(row, block, norm, 0.0), tokens)
    S = depth * len(branches)
    with precision.scope("float64"):
        numbers = tuple(jnp.asarray(a.reshape(depth, len(branches), *a.shape[1:])) for a in row.numbers(S))
        expand, readout = (jnp.asarray(v) for v in (row.expand, row.readout))
        last, forward = _grams(row.places, branches, norm, jnp.outer(expand, expand), numbers)
        D = gains(norm, row.readout_norm, last)
        read = D @ readout  # the gradient's Gram behind the last sub-layer is of rank one
        out = jnp.sum(jnp.outer(readout, readout) * (D @ last @ D))
        outer = norm_powers(norm, bool(final_norm), out)[1]
        (G, T), back = _gradients(jnp.outer(read, read) / (read @ read), numbers, forward)
        inside = [jax.tree.map(np.asarray, f | b) for f, b in zip(forward, back, strict=True)]
        rows = [{k: leaf[l] for k, leaf in place.items()} for l in range(depth) for place in inside]
        found = [_figures(r) for r in rows]
        if row.streams > 1:
            at_read = float(jnp.trace(jnp.outer(read, read)))
            found.insert(0, _ends(float(expand @ G @ expand), float(expand @ T @ expand), np.outer(expand, expand)))
            found.append(_ends(float(readout @ readout), float(readout @ readout), np.asarray(last), at_read))
        if final_norm:
            found.append(_ends(1.0, 1.0, np.asarray(out)[None, None], float(outer)))
    names = (*map(str, range(1, S + 1)),)
    names = ("expand", *names, "readout") if row.streams > 1 else names
    return _profile(
        found,
        (*names, "final norm") if final_norm else names,
        about(
            *(row, branches, depth, d, norm, final_norm, tokens),
            streams=row.streams,
            order="leading",
            assumptions=ASSUMPTIONS,
        ),
    )


def _rms(gram: np.ndarray, of: np.ndarray | None = None) -> float:
    """Over the streams that are not 0 (those of ``of``)."""
    alive = max(int(np.sum(np.diag(gram if of is None else of) > 0)), 1)
    return math.sqrt(max(float(np.trace(gram)), 0.0) / alive)


def _figures(r: Rows) -> Rows:
    """A sub-layer's powers as a profile's gains."""
    total, kept = r["total"], r["kept"]
    cosines = [math.sqrt(a / b) for a, b in zip(np.diag(kept), np.diag(total), strict=True) if b > 0]
    return {
        "norm": math.sqrt(r["norm"]),
        "skip": math.sqrt(r["skip"] / r["norm"]),
        "branch": math.sqrt(r["net"] / r["skip"]),
        "net": math.sqrt(r["net"]),
        "trunk": math.sqrt(r["trunk"]),
        "radius_gain": math.sqrt(r["trunk_norm"]),
        "stream_rms": _rms(r["K"]),
        "kept_rms": _rms(kept, total),
        "branch_rms": _rms(total - kept, total),
        "sum_rms": _rms(total),
        "stream_cosine": float(np.mean(cosines)),
        "weights": float(r["weights"]),
    }


def _ends(skip: float, trunk: float, gram: np.ndarray, through: float | None = None) -> Rows:
    """Expansion, readout or final norm, of power gains ``skip`` by itself and ``through`` in all."""
    net = skip if through is None else through
    whole = {"norm": math.sqrt(net / skip), "skip": math.sqrt(skip), "net": math.sqrt(net), "branch": 1.0}
    rms = {"stream_rms": _rms(gram), "sum_rms": _rms(gram), "kept_rms": 0.0, "branch_rms": 0.0, "stream_cosine": 1.0}
    return whole | rms | {"trunk": math.sqrt(trunk * net / skip), "radius_gain": math.sqrt(net / skip), "weights": 0.0}


def _profile(figures: list[Rows], names: tuple[str, ...], settings: Rows) -> Profile:
    rows = {name: np.asarray([r[name] for r in figures]) for name in figures[0]}
    trunk, weights = rows.pop("trunk"), rows.pop("weights")
    one = np.ones_like(trunk)
    rows |= {"affine": one, "projection": one, "trunk_projection": one}
    local = rows["norm"] * rows["skip"]
    curves = {"exact": rows["net"], "trunk": trunk, "local": local, "bound": rows["radius_gain"] * rows["skip"]}
    logs = {f"log_{name}": backward_sum(safe_log(gains)[None]) for name, gains in curves.items()}
    found = Profile(labels=names, settings=settings, **logs, **{name: values[None] for name, values in rows.items()})
    return with_weights(found, weights, settings["tokens"], settings["d"])
