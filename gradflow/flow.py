"""One backward sweep that yields every factor of every sub-layer (definitions: `gradflow.factors.Profile`).

Two vectors go back together: the true gradient, and the same cotangent on the trunk (F = 0). Both are rescaled to norm 1 at
each sub-layer and only ratios are kept, so nothing under- or overflows at any depth. Weights are drawn again, not stored.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gradflow.jacobian import SublayerJacobian
from gradflow.norms import AnyJacobian
from gradflow.scaling import frobenius, power_of_two, scaled
from gradflow.stack import Stack, Trajectory, Weights

Cotangents = Float[Array, "probes tokens d"]
Rows = dict[str, Any]  # figures by name: Array
ON_BRANCH = ("affine", "projection", "norm")  # what a norm inside the branch notes
Real = Bool[Array, " tokens"] | None  # False at padding, or another token, that no figure may count


class Passage(NamedTuple):
    """The way of k cotangents through one norm, their sizes before and after it, and the factors that each pays, (k,)."""

    out: Float[Array, "k *cotangent"]
    arrived: Array
    left: Array
    affine: Array
    projection: Array
    norm: Array
    alignment: Array
    mean_component: Array


def ratio(numerator: Array, denominator: Array) -> Array:
    """``numerator/denominator``, and 0 where nothing is left to divide by."""
    return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1), 0)


def through(jacobian: AnyJacobian | None, g: Float[Array, "k *cotangent"], real: Real = None) -> Passage:
    """Carry k cotangents back through a norm in the order affine, projection, 1/t; an empty slot costs nothing.

    Every token goes through; ``real`` says which of them the sizes and factors are of.
    """
    if jacobian is None:
        size = frobenius(kept(g, real)[0], 1)
        one, zero = jnp.ones_like(size), jnp.zeros_like(size)
        return Passage(g, size, size, one, one, one, zero, zero)
    gain, largest = scaled(jacobian.gain)
    largest = largest.reshape(())  # γ may have axes in front: of streams
    unit, power = scaled(g, g.ndim - 1)  # each vector by its own power: then one pass over it gives a length
    h = unit * gain
    tangent = jacobian.tangent(h)
    width = g.shape[-1] ** 0.5
    stretch = jacobian.inverse_length[None]
    lengths = [jnp.sqrt(jnp.sum(v**2, -1)) for v in (unit, h, tangent)]
    if stretch.shape[-1] == 1:  # one factor for a whole vector: its length follows
        lengths.append(lengths[-1] * stretch[..., 0])
    else:
        lengths.append(jnp.sqrt(jnp.sum((tangent * stretch) ** 2, -1)))
    lengths += [jnp.sum(v, -1) / width for v in (h * jacobian.direction, h)]
    found = jnp.stack(lengths) * power[..., 0]
    arrived, affine, projected, left, along, mean = frobenius(found if real is None else jnp.where(real, found, 0), 2)
    return Passage(
        tangent * (stretch * power * largest),
        arrived=arrived,
        left=left * largest,
        affine=ratio(affine, arrived) * largest,
        projection=ratio(projected, affine),
        norm=ratio(left, projected),
        alignment=ratio(along, affine),
        mean_component=ratio(mean, affine),
    )


def normalised(g: Cotangents) -> Cotangents:
    """``g`` over its Frobenius norm."""
    return ratio(g, frobenius(g))


def kept(state: Array, real: Real) -> tuple[Array, Array]:
    """The state with padding set to zero, and the number of its real tokens."""
    if real is None:
        return state, jnp.asarray(state.shape[-2], state.dtype)
    return jnp.where(real[:, None], state, 0), jnp.sum(real, dtype=state.dtype)


def token_cosine(state: Array, real: Real = None, size: Array | None = None) -> Array:
    """Mean inner product of two different tokens over the mean square: (‖Σx‖² − Σ‖x‖²)/((T − 1) Σ‖x‖²)."""
    state, tokens = kept(state, real)
    size = frobenius(state) if size is None else size
    power = power_of_two(size)
    total = ratio(frobenius(jnp.sum(state * (1 / power), -2)), size / power)
    return jnp.where(tokens > 1, jnp.where(size > 0, (total**2 - 1) / (tokens - 1), 0), jnp.nan)


def rms(state: Array, real: Real = None) -> Array:
    """Root mean square over the real tokens."""
    state, tokens = kept(state, real)
    return frobenius(state) / jnp.sqrt(tokens * state.shape[-1])


def forward_figures(x: Array, u: Array, added: Array, real: Real = None) -> Rows:
    """What the way forward says of a sub-layer; cos(x, u) is the mean over tokens: no outlier stands for all."""
    units, powers = zip(*(scaled(state, 1) for state in (x, u, added)), strict=True)  # of each token
    lengths = [jnp.sqrt(jnp.sum(unit**2, -1, keepdims=True)) for unit in units]
    cosines = ratio(jnp.sum(units[0] * units[1], -1, keepdims=True), lengths[0] * lengths[1])
    sizes = [length * power for length, power in zip(lengths, powers, strict=True)]
    (cosines, *each), (tokens, *_) = zip(*(kept(v, real) for v in (cosines, *sizes)), strict=True)
    totals = [frobenius(size) for size in each]
    names = ("stream_rms", "sum_rms", "branch_rms")
    return {name: total / jnp.sqrt(tokens * x.shape[-1]) for name, total in zip(names, totals, strict=True)} | {
        "stream_cosine": jnp.sum(cosines) / tokens,
        "token_cosine": token_cosine(x, real, totals[0]),
    }


def norm_row(
    jacobian: AnyJacobian | None, g: Cotangents, w: Cotangents, real: Real = None
) -> tuple[Cotangents, Cotangents, Rows]:
    """Carry gradient ``g`` and trunk vector ``w`` back through a norm on the identity path; both, and the factors.

    ``radius_gain`` is 1/‖u‖ as the article has it, rms over tokens: what a gradient spread evenly over tokens would pay.
    """
    passage = through(jacobian, jnp.stack([g, w]), real)  # the two at once: half the program
    radius_gain, degenerate = jnp.ones((), g.dtype), jnp.zeros((), jnp.int32)
    if jacobian is not None:
        radius_gain = rms(jacobian.inverse_length, real)
        degenerate = jnp.sum(jacobian.degenerate & (True if real is None else real), dtype=jnp.int32)
    row = {name: leaf[0] for name, leaf in passage._asdict().items() if name != "out"}
    row |= {
        "trunk_projection": passage.projection[1],
        "trunk_alignment": passage.alignment[1],
        "trunk_norm_gain": (passage.affine * passage.projection * passage.norm)[1],
        "radius_gain": radius_gain,
        "degenerate": degenerate,
        "gradient_cosine": token_cosine(g, real, passage.arrived[0]),
    }
    return passage.out[0], passage.out[1], row


def sublayer_row(row: Rows, alpha: Array, back: Array, returned: Array) -> Rows:
    """Complete a `norm_row` by skip, branch and net.

    Parameters
    ----------
    back, returned : ()
        Size of the gradient at the input, and of the branch's share of it.
    """
    row = dict(row)
    arrived, left = row.pop("arrived"), row.pop("left")
    # α = 0 (a pure branch) has no skip to be compared with: then the branch's own gain stands there.
    skip = jnp.where(alpha == 0, 1, jnp.abs(alpha))
    return row | {
        "skip": skip,
        "branch": ratio(back, skip * left),
        "branch_return": ratio(returned, left),
        "net": ratio(back, arrived),
        "trunk_net": row.pop("trunk_norm_gain") * jnp.abs(alpha),
    }


def backward(
    step: SublayerJacobian, g: Cotangents, w: Cotangents, real: Real = None
) -> tuple[Cotangents, Cotangents, Rows]:
    """Carry gradient and trunk vector back through one sub-layer; returns both, normalised, and the factors."""
    exact, trunk, row = norm_row(step.norm_out, g, w, real)
    after_branch = through(step.norm_branch, (step.beta * exact)[None], real)
    before_branch = through(step.norm_in, jax.vmap(step.branch_pullback())(after_branch.out[0])[None], real)
    returned = before_branch.out[0]
    back = step.alpha * exact + returned

    row = sublayer_row(row, step.alpha, frobenius(kept(back, real)[0]), before_branch.left[0])
    for slot, passage in (("in", before_branch), ("out", after_branch)):
        row |= {f"branch_{slot}_{name}": getattr(passage, name)[0] for name in ON_BRANCH}
    row |= forward_figures(step.x, step.u, step.added, real)
    return normalised(back), normalised(step.alpha * trunk), row


def bare_row(row: Rows, x: Array, real: Real = None) -> Rows:
    """Complete the `norm_row` of a norm that stands by itself and ``x`` enters: no branch beside it."""
    last = dict.fromkeys(("stream_cosine", "skip", "branch"), 1.0) | {"branch_rms": 0.0, "branch_return": 0.0}
    last |= {f"branch_{slot}_{name}": 1.0 for slot in ("in", "out") for name in ON_BRANCH}
    last |= {"stream_rms": rms(x, real), "sum_rms": rms(x, real), "token_cosine": token_cosine(x, real)}
    row = dict(row)
    trunk_net, *_ = (row.pop(name) for name in ("trunk_norm_gain", "arrived", "left"))
    return last | row | {"net": row["affine"] * row["projection"] * row["norm"], "trunk_net": trunk_net}


def append(rows: Rows, row: Rows) -> Rows:
    """Add one row at the output's end."""
    return {name: jnp.append(leaf, jnp.asarray(row.get(name, 0), leaf.dtype)) for name, leaf in rows.items()}


def arriving(
    stack: Stack, weights: Weights, out: Array, cotangents: Cotangents, real: Real
) -> tuple[Cotangents, Cotangents, Rows | None]:
    """Gradient and trunk vector behind the last sub-layer, normalised, and the final norm's row where there is one."""
    g = w = normalised(cotangents)
    if not stack.final_norm:
        return g, w, None
    norm = weights.final(stack)
    exact, trunk, row = norm_row(None if norm is None else norm.jacobian(out), g, w, real)
    return normalised(exact), normalised(trunk), bare_row(row, out, real)


def through_block(
    steps: Sequence[SublayerJacobian], g: Cotangents, w: Cotangents, real: Real = None
) -> tuple[Cotangents, Cotangents, Rows]:
    """Carry both back through a block's sub-layers; rows of shape (sub-layers,)."""
    rows: list[Rows] = []
    for step in reversed(steps):
        g, w, row = backward(step, g, w, real)
        rows.insert(0, row)
    return g, w, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


@functools.partial(jax.jit, static_argnums=0)
def flow(stack: Stack, weights: Weights, trajectory: Trajectory, cotangents: Cotangents, counted: Real = None) -> Rows:
    """Sweep back from the output once and return every factor.

    Parameters
    ----------
    cotangents : (probes, tokens, d)
        dLoss/d(output); every figure is a ratio of Frobenius norms over all three axes.
    counted : (tokens,) of bool, optional
        Tokens that figures are over, by default all real ones. The gradient itself is that of the whole network, in which
        the others take part.

    Returns
    -------
    dict of (S,) arrays, or (S + 1,) with a final norm, from input to output; ``input_gradient_cosine`` is one number
    """
    assert trajectory.x is not None, "a trajectory without record has no states to sweep back through"
    real = weights.mask if counted is None else counted
    g, w, last = arriving(stack, weights, trajectory.out, cotangents, real)

    def block(part: Stack, carry: tuple[Cotangents, Cotangents], inputs: tuple) -> tuple[tuple, Rows]:
        piece, alphas, betas, xs = inputs
        layer = weights.layer(part, piece)
        steps = [stack.sublayer(layer, k, alphas[k], betas[k], xs[k]) for k in range(len(stack.block))]
        g, w, rows = through_block(steps, *carry, real)
        return (g, w), rows

    xs = trajectory.x.reshape(stack.depth, len(stack.block), *trajectory.x.shape[1:])
    inputs = (weights.along_depth(stack), *weights.multipliers(stack)[:2], xs)
    (g, _), rows = stack.over_depth(block, (g, w), inputs, reverse=True)
    rows = {name: leaf.reshape(stack.sublayers) for name, leaf in rows.items()}
    rows = rows if last is None else append(rows, last)
    return rows | {"input_gradient_cosine": token_cosine(g, real)}
