"""What a spectrum is of: one network at one point, as something to run, to push directions through, and to linearise."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gradflow import chains, precision
from gradflow.scaling import frobenius, power_of_two, rescale
from gradflow.stack import Layer, Stack, State, Weights
from gradflow.streams.stack import StreamStack

PATHS = ("exact", "trunk")
Basis = Float[Array, "tokens d k"]


class Chain:
    """A list of functions as a static part of a `Network`: equal to itself alone, as functions are."""

    def __init__(self, items: tuple[chains.Item, ...], state: tuple[int, ...], reverse_only: bool) -> None:
        self.items, self.state, self.reverse_only = items, state, reverse_only
        self.mixes = True  # for all that one knows

    def forward(self, x: State) -> tuple[list[chains.Step], State]:
        """Every item at its point, and the output, (tokens, d)."""
        steps, out = chains.forward(self.items, x.reshape(self.state))
        return steps, chains.as_tokens(out)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Network:
    """A model with its weights at ``x``; J is the Jacobian of output by input, or of its identity path.

    Attributes
    ----------
    weights : Weights or None
        ``None`` for a list of functions.
    x : (tokens, d)
        The stream as it enters.
    model : Stack, StreamStack or Chain
    path : {"exact", "trunk"}
        The true product, or ∏ DN_out·α with F = 0.
    """

    weights: Weights | None
    x: State
    model: Stack | StreamStack | Chain = field(metadata={"static": True})
    path: str = field(default="exact", metadata={"static": True})

    @property
    def layers(self) -> int:
        """Residual sub-layers, or items of a list."""
        return len(self.model.items) if isinstance(self.model, Chain) else self.model.sublayers

    @property
    def blocks(self) -> bool:
        """Whether tokens stay apart, so that J is block-diagonal and one basis of k = d serves all of them."""
        return not self.model.mixes or (self.path == "trunk" and isinstance(self.model, Stack))

    @property
    def columns(self) -> int:
        """Width of the basis that the whole J takes."""
        return self.x.shape[1] if self.blocks else self.x.size

    def first(self) -> Layer:
        """Shapes of the first block's weights, without drawing them."""
        stack: Any = self.model
        assert self.weights is not None

        def layer(weights: Weights) -> Layer:
            return weights.layer(stack, jax.tree.map(lambda leaf: leaf[0], weights.along_depth(stack)))

        return jax.eval_shape(layer, self.weights)

    def basis(self, start: Any, width: int) -> Basis:
        """Columns of the identity from ``start`` on, zero beyond the last; those of one token where tokens stay apart."""
        rows, columns = jnp.arange(self.columns), start + jnp.arange(width)
        eye = (rows[:, None] == columns).astype(self.x.dtype)
        shape = (*self.x.shape, width)
        return jnp.broadcast_to(eye, shape) if self.blocks else eye.reshape(shape)

    def push(self, basis: Basis) -> tuple[Basis, Int[Array, ""]]:
        """``J @ basis`` over 2^exponent, layer by layer with a running power of two."""
        model = self.model
        if isinstance(model, Chain):
            if model.reverse_only:
                return rescale(jax.vmap(self.linear(None), -1, -1)(basis), jnp.zeros((), jnp.int32))
            return _push_chain(model, self.x, basis)
        if isinstance(model, StreamStack):
            found: Any = model.trace(self.weights, self.x, basis, False)
        else:
            found = model.trace(self.weights, self.x, basis, False, self.path == "trunk")
        return found.basis, found.exponent

    def run(self, x: State, scales: Float[Array, " S"] | None = None) -> State:
        """The output, to be differentiated; every layer's tangent is multiplied by its scale, where given."""
        model = self.model
        if isinstance(model, Chain):
            return model.forward(x)[1]
        if isinstance(model, StreamStack):
            return model.trace(self.weights, x, None, False).out  # type: ignore[arg-type]
        assert self.weights is not None
        return _run_stack(model, self.weights, self.path, x, scales)

    def scales(self, key: Array) -> Float[Array, " S"] | None:
        """Powers of two, one a layer, that keep a random direction's length near 1 throughout; multiplying by them is exact."""
        if not isinstance(self.model, Stack):
            return None
        direction = precision.normal(key, self.x.shape, self.x.dtype)
        return _scales(self.model, self.weights, self.path, self.x, direction)

    def linear(self, scales: Float[Array, " S"] | None) -> Callable[[State], State]:
        """``v ↦ J v``, times the scales, from one linearisation; JAX transposes it."""
        run = functools.partial(self.run, scales=scales)
        if not (isinstance(self.model, Chain) and self.model.reverse_only):
            return jax.linearize(run, self.x)[1]
        out, pull = jax.vjp(run, self.x)  # a custom_vjp has no jvp; the transpose of what it does have is one
        forward = jax.linear_transpose(lambda g: pull(g)[0], out)
        return lambda v: forward(v)[0]

    def exponent(self, scales: Float[Array, " S"] | None) -> Array:
        """J = 2^exponent · `linear`."""
        return jnp.zeros(()) if scales is None else -jnp.sum(jnp.log2(scales))


@jax.custom_jvp
def _times(x: State, scale: Array) -> State:
    """The identity, whose tangent is multiplied."""
    return x


@_times.defjvp
def _times_jvp(primals: tuple[State, Array], tangents: tuple[State, Array]) -> tuple[State, State]:
    return primals[0], primals[1] * tangents[0]


def _run_stack(stack: Stack, weights: Weights, path: str, x: State, scales: Array | None) -> State:
    """The stack's output, its derivatives those of the derived norms and of the branches as they stand."""
    shape = (stack.depth, len(stack.block))

    def block(part: Stack, x: State, inputs: tuple) -> tuple[State, None]:
        piece, alphas, betas, factors = inputs
        layer = weights.layer(part, piece)
        for k in range(len(stack.block)):
            step = stack.sublayer(layer, k, alphas[k], betas[k], x)
            out = step.out
            if path == "trunk":
                u, norm = alphas[k] * x + jax.lax.stop_gradient(step.added), layer.norms[k][2]
                out = u if norm is None else norm(u)
            x = out if factors is None else _times(out, factors[k])
        return x, None

    factors = None if scales is None else scales.reshape(shape)
    inputs = (weights.along_depth(stack), *weights.multipliers(stack)[:2], factors)
    out, _ = stack.over_depth(block, x, inputs)
    last = weights.final(stack) if stack.final_norm else None
    return out if last is None else last(out)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _scales(stack: Stack, weights: Weights, path: str, x: State, direction: State) -> Float[Array, " S"]:
    def block(part: Stack, carry: tuple[State, State], inputs: tuple) -> tuple[tuple[State, State], Array]:
        x, v = carry
        piece, alphas, betas = inputs
        layer, found = weights.layer(part, piece), []
        for k in range(len(stack.block)):
            step = stack.sublayer(layer, k, alphas[k], betas[k], x)
            v = (step.push_trunk if path == "trunk" else step.push)(v[..., None])[..., 0]
            factor = 1 / power_of_two(frobenius(v) / jnp.sqrt(v.size))
            x, v = step.out, v * factor
            found.append(factor)
        return (x, v), jnp.stack(found)

    inputs = (weights.along_depth(stack), *weights.multipliers(stack)[:2])
    return stack.over_depth(block, (x, direction), inputs)[1].reshape(-1)


def _push_chain(chain: Chain, x: State, basis: Basis) -> tuple[Basis, Int[Array, ""]]:
    exponent = jnp.zeros((), jnp.int32)
    for step in chain.forward(x)[0]:
        basis, exponent = rescale(step.push(basis), exponent)
    return basis, exponent
