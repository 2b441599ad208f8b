"""One backward sweep that yields every factor of every sub-layer (definitions: `gradflow.factors.Profile`).

Two vectors go back together: the true gradient, and the same cotangent on the trunk (F = 0). Both are rescaled to norm 1 at
each sub-layer and only ratios are kept, so nothing under- or overflows at any depth. Weights are drawn again, not stored.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow.jacobian import SublayerJacobian, frobenius
from gradflow.norms import NormJacobian
from gradflow.stack import Stack, Trajectory, Weights

Cotangents = Float[Array, "probes tokens d"]
Rows = dict[str, Array]


class Passage(NamedTuple):
    """A cotangent's way through one norm, and the three factors it pays."""

    out: Cotangents
    affine: Array
    projection: Array
    norm: Array
    alignment: Array
    mean_component: Array


def ratio(numerator: Array, denominator: Array) -> Array:
    """``numerator/denominator``, and 0 where nothing is left to divide by."""
    return jnp.where(denominator > 0, numerator / jnp.where(denominator > 0, denominator, 1), 0)


def through(jacobian: NormJacobian | None, g: Cotangents) -> Passage:
    """Carry ``g`` back through a norm in the order affine, projection, 1/t; an empty slot costs nothing."""
    one, zero = jnp.ones((), g.dtype), jnp.zeros((), g.dtype)
    if jacobian is None:
        return Passage(g, one, one, one, zero, zero)
    h = g * jacobian.gain
    tangent = jax.vmap(jax.vmap(lambda j, v: j.tangent(v)), in_axes=(None, 0))(jacobian, h)
    out = tangent * jacobian.scale[:, None]
    width = g.shape[-1] ** 0.5
    along = jnp.sum(h * jacobian.direction, -1) / width
    mean = jnp.sum(h, -1) / width
    sizes = [frobenius(v) for v in (g, h, tangent, out, along, mean)]
    return Passage(
        out,
        affine=ratio(sizes[1], sizes[0]),
        projection=ratio(sizes[2], sizes[1]),
        norm=ratio(sizes[3], sizes[2]),
        alignment=ratio(sizes[4], sizes[1]),
        mean_component=ratio(sizes[5], sizes[1]),
    )


def normalised(g: Cotangents) -> Cotangents:
    """``g`` over its Frobenius norm."""
    return ratio(g, frobenius(g))


def token_cosine(state: Array) -> Array:
    """Mean inner product of two different tokens over the mean square: (‖Σx‖² − Σ‖x‖²)/((T − 1) Σ‖x‖²)."""
    tokens = state.shape[-2]
    if tokens == 1:
        return jnp.full((), jnp.nan, state.dtype)
    own = frobenius(state) ** 2
    return ratio(frobenius(state.sum(-2)) ** 2 - own, (tokens - 1) * own)


def radius_gain(jacobian: NormJacobian | None, dtype: jnp.dtype) -> Array:
    """1/‖u‖ as the article has it, rms over tokens: what a gradient spread evenly over tokens would pay."""
    return jnp.ones((), dtype) if jacobian is None else frobenius(jacobian.scale) / jacobian.scale.size**0.5


def stream_cosine(x: Array, u: Array) -> Array:
    """cos(x, u), mean over tokens, so that one outlier token does not stand for all."""
    inner, sizes = jnp.sum(x * u, -1), [jnp.linalg.norm(v, axis=-1) for v in (x, u)]
    return jnp.mean(ratio(inner, sizes[0] * sizes[1]))


def norm_row(jacobian: NormJacobian | None, g: Cotangents, w: Cotangents) -> tuple[Passage, Passage, Rows]:
    """Factors of a norm on the identity path, for the gradient ``g`` and the trunk vector ``w``."""
    exact, trunk = through(jacobian, g), through(jacobian, w)
    degenerate = jnp.zeros((), jnp.int32) if jacobian is None else jnp.sum(jacobian.degenerate, dtype=jnp.int32)
    row = {name: getattr(exact, name) for name in Passage._fields[1:]}
    row |= {
        "trunk_projection": trunk.projection,
        "trunk_alignment": trunk.alignment,
        "trunk_norm_gain": trunk.affine * trunk.projection * trunk.norm,
        "radius_gain": radius_gain(jacobian, g.dtype),
        "degenerate": degenerate,
        "gradient_cosine": token_cosine(g),
    }
    return exact, trunk, row


def backward(step: SublayerJacobian, g: Cotangents, w: Cotangents) -> tuple[Cotangents, Cotangents, Rows]:
    """Carry gradient and trunk vector back through one sub-layer; returns both, normalised, and the factors."""
    exact, trunk, row = norm_row(step.norm_out, g, w)
    after_branch = through(step.norm_branch, step.beta * exact.out)
    before_branch = through(step.norm_in, jax.vmap(step.branch_pullback())(after_branch.out))
    back = step.alpha * exact.out + before_branch.out

    # α = 0 (a pure branch) has no skip to be compared with: then the branch's own gain stands there.
    skip = jnp.where(step.alpha == 0, 1, jnp.abs(step.alpha))
    row |= {
        "skip": skip,
        "branch": ratio(frobenius(back), skip * frobenius(exact.out)),
        "net": ratio(frobenius(back), frobenius(g)),
        "trunk_net": row.pop("trunk_norm_gain") * jnp.abs(step.alpha),
        "stream_cosine": stream_cosine(step.x, step.u),
        "token_cosine": token_cosine(step.x),
    }
    for slot, passage in (("in", before_branch), ("out", after_branch)):
        row |= {f"branch_{slot}_{name}": getattr(passage, name) for name in Passage._fields[1:4]}
    rms = step.x.size**0.5
    row |= {"stream_rms": frobenius(step.x) / rms, "branch_rms": frobenius(step.added) / rms}
    return normalised(back), normalised(step.alpha * trunk.out), row


@functools.partial(jax.jit, static_argnums=0)
def flow(stack: Stack, weights: Weights, trajectory: Trajectory, cotangents: Cotangents) -> Rows:
    """Sweep back from the output once and return every factor.

    Parameters
    ----------
    cotangents : (probes, tokens, d)
        dLoss/d(output); every figure is a ratio of Frobenius norms over all three axes.

    Returns
    -------
    dict of (S,) arrays, or (S + 1,) with a final norm, from input to output
    """
    assert trajectory.x is not None, "a trajectory without record has no states to sweep back through"
    g = w = normalised(cotangents)
    tail: list[Rows] = []
    if stack.final_norm:
        exact, trunk, row = norm_row(jax.vmap(stack.layer.jacobian)(trajectory.out), g, w)
        tail.append(
            row | {"net": exact.affine * exact.projection * exact.norm, "trunk_net": row.pop("trunk_norm_gain")}
        )
        g, w = normalised(exact.out), normalised(trunk.out)

    def block(carry: tuple[Cotangents, Cotangents], inputs: tuple) -> tuple[tuple, Rows]:
        g, w = carry
        l, alphas, betas, xs = inputs
        rows: list[Rows] = []
        params = weights.at(stack, l)
        for k in reversed(range(len(stack.block))):
            step = stack.sublayer(k, params[k], alphas[k], betas[k], xs[k])
            g, w, row = backward(step, g, w)
            rows.insert(0, row)
        return (g, w), jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    xs = trajectory.x.reshape(stack.depth, len(stack.block), *trajectory.x.shape[1:])
    inputs = (jnp.arange(stack.depth), *stack.multipliers(), xs)
    _, rows = jax.lax.scan(block, (g, w), inputs, reverse=True)
    rows = {name: leaf.reshape(stack.sublayers) for name, leaf in rows.items()}
    for row in tail:
        rms = trajectory.out.size**0.5
        row |= {"stream_rms": frobenius(trajectory.out) / rms, "token_cosine": token_cosine(trajectory.out)}
        neutral = dict.fromkeys(("stream_cosine", "skip", "branch"), 1.0) | {"branch_rms": 0.0}
        rows = {
            name: jnp.append(leaf, jnp.asarray(row.get(name, neutral.get(name, 1.0)), leaf.dtype))
            for name, leaf in rows.items()
        }
    return rows
