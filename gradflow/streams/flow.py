"""The backward sweep of several residual streams: every factor of every sub-layer, as `gradflow.flow` for one stream.

Ratios are of Frobenius norms over (probes, streams, tokens, d). A row has no one α: skip is ‖Rᵀv‖/‖v‖, branch is
‖(R + w ⊗ …⊗ rᵀ)ᵀv‖/‖Rᵀv‖. Where there are several streams, expansion and readout are rows of their own, the first and the last.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow.flow import (
    ON_BRANCH,
    Rows,
    append,
    bare_row,
    forward_figures,
    norm_row,
    normalised,
    ratio,
    rms,
    sublayer_row,
    through,
    token_cosine,
)
from gradflow.scaling import frobenius
from gradflow.stack import State, Weights
from gradflow.streams.jacobian import OnStreams, StreamJacobian, Streams, spread
from gradflow.streams.stack import StreamStack, StreamTrajectory

Gradient = Float[Array, "probes n tokens d"]


def live(state: Streams) -> Array:
    """Number of streams that hold anything: those at 0 count in no mean."""
    return jnp.sum(jnp.any(state != 0, (-2, -1)), dtype=state.dtype)


def stream_figures(x: Streams, kept: Streams, u: Streams, added: Streams) -> Rows:
    """`forward_figures` over the streams that are not 0; the cosine is that of RX and u."""
    flat = (state.reshape(-1, state.shape[-1]) for state in (kept, u, added))
    row, here = forward_figures(*flat), len(u) / jnp.maximum(live(u), 1)
    figures = {name: row[name] * jnp.sqrt(here) for name in ("sum_rms", "branch_rms")}
    return figures | {
        "kept_rms": row["stream_rms"] * jnp.sqrt(here),
        "stream_cosine": row["stream_cosine"] * here,
        **entering(x),
    }


def entering(x: Streams) -> Rows:
    """Rms and token cosine of the streams as they enter."""
    return {
        "stream_rms": frobenius(x) / jnp.sqrt(jnp.maximum(live(x), 1) * x.shape[-2] * x.shape[-1]),
        "token_cosine": token_cosine(x),
    }


def on_streams(jacobian: OnStreams | None, g: Gradient, w: Gradient) -> tuple[Gradient, Gradient, Rows]:
    """`norm_row`, with 1/‖u‖ as the rms over streams too (1 where no norm stands)."""
    exact, trunk, row = norm_row(jacobian, g, w)  # type: ignore[arg-type]
    if jacobian is not None:
        row["radius_gain"] = rms(jacobian.inverse_length) / len(jacobian.normed) ** 0.5
    return exact, trunk, row


def back_mix(residual: Float[Array, "n n"], g: Gradient) -> Gradient:
    """Rᵀ on the streams."""
    return jnp.einsum("ab,paij->pbij", residual, g)


def backward(
    step: StreamJacobian, g: Gradient, w: Gradient, notes: dict[str, Array]
) -> tuple[Gradient, Gradient, Rows]:
    """Carry gradient and trunk vector back through one sub-layer; returns both, normalised, and the factors."""
    exact, trunk, row = on_streams(step.norm_out, g, w)
    after_branch = through(step.norm_branch, jnp.einsum("a,paij->pij", step.post, exact)[None])
    pulled, noted = jax.vmap(step.branch_pullback(notes))(after_branch.out[0])
    before_branch = through(step.norm_in, pulled[None])
    skip, returned = back_mix(step.residual, exact), jnp.einsum("b,pij->pbij", step.pre, before_branch.out[0])
    back, trunk = skip + returned, back_mix(step.residual, trunk)

    row = sublayer_row(row, ratio(frobenius(skip), row["left"]), frobenius(back), frobenius(returned))
    row["trunk_net"] = ratio(frobenius(trunk), frobenius(w))  # R turns the trunk vector as it does not the gradient
    for slot, passage in (("in", before_branch), ("out", after_branch)):
        row |= {f"branch_{slot}_{name}": getattr(passage, name)[0] for name in ON_BRANCH}
    row |= stream_figures(step.x, step.kept, step.u, step.added)
    if notes:
        row["weight_grad"] = ratio(jnp.sqrt(sum(jnp.sum(note**2) for note in noted.values())), frobenius(g))
    return normalised(back), normalised(trunk), row


def ends_row(row: Rows, skip: Array, trunk: Array, x: Streams) -> Rows:
    """Complete a `norm_row` by a linear map of the streams, ``skip`` its gain: expansion, or readout."""
    trunk_norm = row["trunk_norm_gain"]
    done = bare_row(row, x[0]) | {"kept_rms": 0.0} | entering(x)
    net = done["affine"] * done["projection"] * done["norm"] * skip
    return done | {"skip": skip, "net": net, "trunk_net": trunk_norm * trunk, "sum_rms": done["stream_rms"]}


@functools.partial(jax.jit, static_argnums=(0, 4))
def flow(
    stack: StreamStack,
    weights: Weights,
    trajectory: StreamTrajectory,
    cotangents: Float[Array, "probes tokens d"],
    watched: bool = False,
) -> Rows:
    """Sweep back from the output once and return every factor.

    Parameters
    ----------
    cotangents : (probes, tokens, d)
        dLoss/d(output); every figure is a ratio of Frobenius norms over all axes.
    watched : bool
        Whether ``weight_grad`` is wanted: ‖dLoss/dW‖ over a sub-layer's matrices and all probes.

    Returns
    -------
    dict of (rows,) arrays, from input to output: S sub-layers; where there are several streams the expansion before them and the
    readout behind them; and a final norm
    """
    assert trajectory.x is not None, "a trajectory without record has no states to sweep back through"
    several, final = stack.scheme.streams > 1, None
    g = w = normalised(cotangents)
    if stack.final_norm:
        norm = weights.final(stack)  # type: ignore[arg-type]
        jacobian = None if norm is None else norm.jacobian(trajectory.out)
        exact, trunk, last = norm_row(jacobian, g, w)
        final = bare_row(last, trajectory.out) | {"kept_rms": 0.0}
        g, w = normalised(exact), normalised(trunk)
    _, reads, jacobian = stack.read(trajectory.last)
    g, w = (jnp.moveaxis(spread(reads, v), 0, 1) for v in (g, w))  # (probes, n, tokens, d)
    size = frobenius(g)
    g, w, row = on_streams(jacobian, normalised(g), normalised(w))
    readout = ends_row(row, size, size, trajectory.last) if several else None
    g, w = normalised(g), normalised(w)

    def block(carry: tuple[Gradient, Gradient], inputs: tuple) -> tuple[tuple, Rows]:
        g, w = carry
        piece, numbers, xs = inputs
        rows: list[Rows] = []
        layer = weights.layer(stack, piece)  # type: ignore[arg-type]
        for k in reversed(range(len(stack.block))):
            branch = stack.block[k]
            notes = {f"note{name}": jnp.zeros((), stack.dtype) for name in getattr(branch, "matrices", ()) if watched}
            g, w, row = backward(stack.sublayer(layer, k, numbers, xs[k]), g, w, notes)
            rows.insert(0, row | ({} if notes or not watched else {"weight_grad": jnp.zeros((), stack.dtype)}))
        return (g, w), jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    xs = trajectory.x.reshape(stack.depth, len(stack.block), *trajectory.x.shape[1:])
    inputs = (weights.along_depth(stack), stack.numbers(), xs)  # type: ignore[arg-type]
    (g, w), rows = jax.lax.scan(block, (g, w), inputs, reverse=True)
    rows = {name: leaf.reshape(stack.sublayers) for name, leaf in rows.items()}
    summed = [jnp.einsum("a,paij->pij", jnp.asarray(stack.scheme.expand, stack.dtype), v) for v in (g, w)]
    if several:
        *_, row = norm_row(None, g, w)  # type: ignore[arg-type]
        first = ends_row(row, frobenius(summed[0]), frobenius(summed[1]), trajectory.x[0])
        rows = {k: jnp.concatenate([jnp.asarray(first.get(k, 0), v.dtype)[None], v]) for k, v in rows.items()}
    for end in (readout, final):
        rows = rows if end is None else append(rows, end)
    if watched:
        after = jnp.append(jnp.cumsum(jnp.log(rows["net"])[::-1])[::-1][1:], 0)
        rows["weight_grad"] = rows["weight_grad"] * frobenius(cotangents) * jnp.exp(after)
    return rows | {"input_gradient_cosine": token_cosine(summed[0])}


def profile(
    stack: StreamStack, weights: Weights, x: State, cotangents: Array | Callable[[State], State], watched: bool = False
) -> Rows:
    """Run forward, then back once: `flow` at ``x``, for cotangents (probes, tokens, d) or what makes one from the output."""
    trajectory = stack.trace(weights, x)
    if callable(cotangents):
        final: Any = weights.final(stack) if stack.final_norm else None  # type: ignore[arg-type]
        cotangents = cotangents(trajectory.out if final is None else final(trajectory.out))[None]
    return flow(stack, weights, trajectory, cotangents, watched)
