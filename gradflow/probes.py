"""Every factor of every sub-layer from one backward pass, at the price of one gradient.

A probe is the identity on the way forward. On the way back it notes what passes, as the "gradient" of a dummy input, and hands
the cotangent on. Two vectors go back together, as in `gradflow.flow`: the true gradient, and the trunk vector, whose forward
counterpart is a passenger that is zero and never computed. At each sub-layer both are divided by a power of two, which is
exact, so that nothing under- or overflows at any depth.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow.flow import (
    ON_BRANCH,
    Passage,
    Real,
    Rows,
    append,
    bare_row,
    forward_figures,
    norm_row,
    ratio,
    sublayer_row,
    through,
    token_cosine,
)
from gradflow.norms import AnyJacobian, AnyNorm
from gradflow.scaling import frobenius, rescale
from gradflow.stack import Layer, Stack, State, Weights

ON_NORM = (
    *Passage._fields[1:],
    *("trunk_projection", "trunk_alignment", "trunk_norm_gain", "radius_gain", "degenerate", "gradient_cosine"),
)
ON_SLOT = (*ON_BRANCH, "left")
ON_ENTRY = ("size", "exponent", "trunk_exponent")
Notes = Float[Array, " n"]


def _pack(row: Rows, names: tuple[str, ...], dtype: jnp.dtype) -> Notes:
    return jnp.stack([jnp.asarray(row[name], dtype) for name in names])


@jax.custom_vjp
def leave(
    u: State, w: State, notes: Notes, value: State, jacobian: AnyJacobian | None, real: Real
) -> tuple[State, State]:
    """The norm on the identity path (or none): ``value`` = N(u); notes `norm_row` on the way back."""
    return value, w


def _leave_back(residuals: tuple[AnyJacobian | None, Real], cotangents: tuple[State, State]) -> tuple:
    jacobian, real = residuals
    g, w = cotangents
    exact, trunk, row = norm_row(jacobian, g, w, real)
    return exact, trunk, _pack(row, ON_NORM, g.dtype), None, None, None


leave.defvjp(lambda u, w, notes, value, jacobian, real: ((value, w), (jacobian, real)), _leave_back)


@jax.custom_vjp
def pass_slot(x: State, notes: Notes, value: State, jacobian: AnyJacobian | None) -> State:
    """A norm inside the branch (or none): ``value`` = N(x); notes its factors."""
    return value


def _slot_back(jacobian: AnyJacobian | None, g: State) -> tuple:
    passage = through(jacobian, g[None])
    return passage.out[0], jnp.stack([getattr(passage, name)[0] for name in ON_SLOT]), None, None


pass_slot.defvjp(lambda x, notes, value, jacobian: (value, jacobian), _slot_back)


@jax.custom_vjp
def enter(x: State, w: State, notes: Notes) -> tuple[State, State]:
    """The stream as it enters a sub-layer; on the way back notes the gradient's size and takes a power of two out of it."""
    return x, w


def _enter_back(residuals: None, cotangents: tuple[State, State]) -> tuple:
    notes: list[Array] = [frobenius(cotangents[0])]
    scaled: list[Array] = []
    for g in cotangents:
        g, shift = rescale(g, jnp.zeros((), jnp.int32))
        scaled.append(g)
        notes.append(shift.astype(g.dtype))
    return *scaled, jnp.stack(notes)


enter.defvjp(lambda x, w, notes: ((x, w), None), _enter_back)


class SublayerNotes(NamedTuple):
    """The dummies of one sub-layer; leading axes for blocks and branches."""

    entry: Notes
    slot_in: Notes
    slot_out: Notes
    norm: Notes
    weights: dict[str, Array]


def blank(stack: Stack, watched: bool) -> tuple[SublayerNotes, ...]:
    """Zero notes, one `SublayerNotes` per branch with a leading axis of depth."""
    zeros = functools.partial(jnp.zeros, dtype=stack.dtype)
    sizes = [len(ON_ENTRY), len(ON_SLOT), len(ON_SLOT), len(ON_NORM)]
    entry, slot_in, slot_out, norm = (zeros((stack.depth, n)) for n in sizes)
    names = [getattr(branch, "matrices", ()) if watched else () for branch in stack.block]
    watch = [{f"note{name}": zeros(stack.depth) for name in each} for each in names]
    return tuple(SublayerNotes(entry, slot_in, slot_out, norm, each) for each in watch)


def at(norm: AnyNorm | None, state: State) -> tuple[State, AnyJacobian | None]:
    """Value and Jacobian as facts, not to be differentiated: the probes are told of them."""
    return jax.lax.stop_gradient((state, None) if norm is None else norm.at(state))


def sublayer(
    stack: Stack,
    layer: Layer,
    k: int,
    alpha: Array,
    beta: Array,
    stream: tuple[State, State],
    notes: SublayerNotes,
    real: Real,
) -> tuple[State, State, Rows]:
    """A block's k-th sub-layer with its probes; the forward figures come along."""
    norms, (x, w) = layer.norms[k], stream
    entering = x
    x, w = enter(x, w, notes.entry)
    fed = pass_slot(x, notes.slot_in, *at(norms[0], x))
    f = stack.block[k].apply(layer.params[k] | notes.weights, fed)
    added = beta * pass_slot(f, notes.slot_out, *at(norms[1], f))
    u = alpha * x + added
    out, w = leave(u, alpha * w, notes.norm, *at(norms[2], u), real)
    return out, w, jax.lax.stop_gradient(forward_figures(entering, u, added, real))


def profile(
    stack: Stack, weights: Weights, x: State, cotangent: State | Callable[[State], State], watched: bool = False
) -> tuple[State, State, Rows]:
    """Run forward, then back once.

    Parameters
    ----------
    x : (tokens, d)
    cotangent : (tokens, d), or callable
        dLoss/d(output), or what makes it from the output.
    watched : bool
        Whether ``weight_grad`` is wanted: the Frobenius norm of the gradient of all a sub-layer's matrices.

    Returns
    -------
    out, gradient : (tokens, d)
        The network's output; dLoss/dx over its largest power of two.
    rows : dict of (S,) arrays, or (S + 1,) with a final norm
        As from `gradflow.flow.flow`.
    """

    def network(x: State, w: State, notes: tuple[SublayerNotes, ...], last: Notes) -> tuple[tuple[State, State], Any]:
        def block(part: Stack, carry: tuple[State, State], inputs: tuple) -> tuple[tuple[State, State], list[Rows]]:
            piece, alphas, betas, notes = inputs
            layer = weights.layer(part, piece)
            figures = []
            for k in range(len(stack.block)):
                *stream, row = sublayer(stack, layer, k, alphas[k], betas[k], carry, notes[k], real)
                carry = (stream[0], stream[1])
                figures.append(row)
            return carry, figures

        inputs = (weights.along_depth(stack), *weights.multipliers(stack)[:2], notes)
        (x, w), figures = stack.over_depth(block, (x, w), inputs)
        out = x
        if stack.final_norm:
            out, w = leave(x, w, last, *at(weights.final(stack), x), real)
        return (out, w), (figures, x)

    real = weights.mask
    notes, last = blank(stack, watched), jnp.zeros(len(ON_NORM), stack.dtype)
    (out, _), pull, (figures, stream) = jax.vjp(network, x, jnp.zeros_like(x), notes, last, has_aux=True)
    cotangent = cotangent(out) if callable(cotangent) else cotangent
    start = ratio(cotangent, frobenius(cotangent))
    gradient, _, noted, last = pull((start, start))
    rows = _rows(weights.multipliers(stack).alpha, noted, figures, frobenius(cotangent))
    if stack.final_norm:
        rows = append(rows, bare_row(dict(zip(ON_NORM, last, strict=True)), stream, real))
    return out, gradient, rows | {"input_gradient_cosine": token_cosine(gradient, real)}


def _rows(alpha: Array, noted: tuple[SublayerNotes, ...], figures: list[Rows], size: Array) -> Rows:
    """Notes of all sub-layers to rows of figures, from input to output."""
    each = []
    for k, notes in enumerate(noted):
        entry, slot_in, slot_out, row = (
            dict(zip(names, array.T, strict=True))
            for names, array in zip((ON_ENTRY, ON_SLOT, ON_SLOT, ON_NORM), notes[:4], strict=True)
        )
        row = sublayer_row(row, jnp.asarray(alpha[:, k]), entry["size"], slot_in["left"])
        for slot, found in (("in", slot_in), ("out", slot_out)):
            row |= {f"branch_{slot}_{name}": found[name] for name in ON_BRANCH}
        row |= figures[k] | {"exponent": entry["exponent"], "degenerate": row["degenerate"].astype(jnp.int32)}
        if notes.weights:
            row["weight_grad"] = jnp.sqrt(sum(note**2 for note in notes.weights.values()))
        each.append(row)
    rows = {name: jnp.stack([row[name] for row in each], 1).reshape(-1) for name in each[0]}
    exponent = rows.pop("exponent")
    if "weight_grad" in rows:
        after = jnp.append(jnp.cumsum(exponent[::-1])[::-1][1:], 0)  # powers of two taken out above the sub-layer
        rows["weight_grad"] = rows["weight_grad"] * size * jnp.exp2(after)
    return rows
