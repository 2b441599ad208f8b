"""What a placement is foretold to do to the gradient, from one pass of the network in its own placement.

The directions of stream and gradient stay those of the network as it is; lengths, and with them every norm's Jacobian, are the
placement's, token by token: sub-layer s sees x̂_s at the length that the sub-layers before it leave, and its factors are those
that the own gradient pays there. In the own placement this is the measured profile, to rounding; in another one it leaves out
that directions turn.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow.flow import Rows, append, backward, bare_row, norm_row, normalised, ratio
from gradflow.stack import Stack, State, Weights

UNKNOWN = ("trunk_projection", "trunk_alignment", "trunk_net", "radius_gain")


class Way(NamedTuple):
    """One pass forward and back: what enters each sub-layer, the last stream, and the gradient that arrives at each sub-layer's
    output and at the network's, over its length.
    """

    x: Float[Array, "S tokens d"]
    out: State
    gradients: Float[Array, "S tokens d"]
    cotangent: State


@functools.partial(jax.jit, static_argnums=0)
def way(stack: Stack, weights: Weights, x: State, cotangent: State) -> Way:
    """Run the network and follow one cotangent back."""
    trajectory = stack.trace(weights, x)
    g = start = normalised(cotangent[None])
    if stack.final_norm and (norm := weights.final(stack)) is not None:
        g = normalised(norm_row(norm.jacobian(trajectory.out), g, g, weights.mask)[0])

    def block(part: Stack, g: Array, inputs: tuple) -> tuple[Array, Array]:
        piece, alphas, betas, xs = inputs
        layer, arriving = weights.layer(part, piece), []
        for k in reversed(range(len(stack.block))):
            arriving.insert(0, g[0])
            g, _, _ = backward(stack.sublayer(layer, k, alphas[k], betas[k], xs[k]), g, g, weights.mask)
        return g, jnp.stack(arriving)

    inputs = (weights.along_depth(stack), *weights.multipliers(stack)[:2], _by_block(stack, trajectory.x))
    _, gradients = stack.over_depth(block, g, inputs, reverse=True)
    assert trajectory.x is not None
    return Way(trajectory.x, trajectory.out, gradients.reshape(trajectory.x.shape), start[0])


@functools.partial(jax.jit, static_argnums=0)
def foretold(stack: Stack, weights: Weights, own: Way) -> Rows:
    """Rows of factors, as `gradflow.flow.flow` has them, of a placement along another one's `Way`; the trunk's are NaN."""
    real = weights.mask

    def block(part: Stack, lengths: Array, inputs: tuple) -> tuple[Array, Rows]:
        piece, alphas, betas, xs, gradients = inputs
        layer, rows = weights.layer(part, piece), []
        for k in range(len(stack.block)):
            step = stack.sublayer(layer, k, alphas[k], betas[k], _at_length(xs[k], lengths))
            rows.append(backward(step, gradients[k][None], gradients[k][None], real)[2])
            lengths = _lengths(step.out)
        return lengths, jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)

    along = (_by_block(stack, own.x), _by_block(stack, own.gradients))
    inputs = (weights.along_depth(stack), *weights.multipliers(stack)[:2], *along)
    lengths, rows = stack.over_depth(block, _lengths(own.x[0]), inputs)
    rows = {name: leaf.reshape(stack.sublayers) for name, leaf in rows.items()}
    if stack.final_norm and (norm := weights.final(stack)) is not None:
        out, g = _at_length(own.out, lengths), own.cotangent[None]
        rows = append(rows, bare_row(norm_row(norm.jacobian(out), g, g, real)[2], out, real))
    return rows | {name: jnp.full_like(rows["net"], jnp.nan) for name in UNKNOWN}


def _by_block(stack: Stack, states: Array | None) -> Array:
    assert states is not None
    return states.reshape(stack.depth, len(stack.block), *states.shape[1:])


def _lengths(state: State) -> Float[Array, "tokens 1"]:
    return jnp.linalg.norm(state, axis=-1, keepdims=True)


def _at_length(state: State, lengths: Float[Array, "tokens 1"]) -> State:
    return ratio(state, _lengths(state)) * lengths
