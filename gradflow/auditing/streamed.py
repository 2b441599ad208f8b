"""A network larger than memory: a block's weights are read, used and let go, from the first forward and from the last back.

The factors are those of `gradflow.flow`. What stays, on the host, is the state that enters each block; a block runs again on the
way back. One program forward and one back serve all blocks, text by text.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import precision
from gradflow.flow import Cotangents, Real, Rows, append, arriving, through_block, token_cosine
from gradflow.jacobian import SublayerJacobian
from gradflow.norms import AnyNorm
from gradflow.schemes import Multipliers
from gradflow.stack import Given, Layer, Stack, State

Progress = Callable[[int, int], None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Weights of a network that exists, in a file, with the interface of `gradflow.stack.Given` as far as one block allows.

    Attributes
    ----------
    read : callable
        Block's number → its `gradflow.stack.Layer`.
    last : Norm, optional
        The final norm.
    mask : (tokens,) or (batch, tokens) of bool, optional
        False at padding.
    entered : tuple of (batch, tokens, d), optional
        What enters each block, and the last stream, where they have been run already.
    progress : callable, optional
        Called with blocks done and blocks in all, forward and back.
    """

    read: Callable[[int], Layer] = field(metadata={"static": True})
    last: AnyNorm | None = None
    mask: Array | None = None
    entered: tuple[np.ndarray, ...] | None = None
    progress: Progress | None = field(default=None, metadata={"static": True})

    def multipliers(self, stack: Stack) -> Multipliers:
        """The scheme's."""
        return stack.multipliers()

    def along_depth(self, stack: Stack) -> NoReturn:
        """None: all blocks at once are what there is no room for."""
        raise ValueError(
            "weights: are read block by block, as only profile and audit can; load the checkpoint with stream=False"
        )

    def layer(self, stack: Stack, piece: Any) -> Layer:
        """Block ``piece``."""
        return self.read(piece)

    def final(self, stack: Stack) -> AnyNorm | None:
        """The network's own, or unit gain."""
        return stack.layer if self.last is None else self.last

    @property
    def out(self) -> np.ndarray:
        """The last stream, before a final norm: (batch, tokens, d)."""
        assert self.entered is not None, "asked of blocks that have not been run"
        return self.entered[-1]

    def run(self, stack: Stack, states: Float[Any, "batch tokens d"], real: Any = None) -> "Blocks":
        """Run forward, and keep what enters each block.

        Parameters
        ----------
        real : (batch, tokens) of bool, optional
            False at padding.
        """
        with precision.scope(stack.dtype):
            entered = [np.asarray(states, stack.dtype)]
            seen = None if real is None else jnp.asarray(real)
            for l in range(stack.depth):
                entered.append(np.asarray(_onward(stack, *self._block(stack, l), entered[-1], seen)))
                self._tell(stack, l + 1)
        return replace(self, entered=tuple(entered))

    def rows(
        self,
        stack: Stack,
        states: Float[Array, "batch tokens d"],
        cotangents: Float[Array, "batch probes tokens d"] | Callable[[State, Real], State],
        real: Array | None,
    ) -> Rows:
        """Run forward where that has not been done, sweep back once, and return every factor of every state.

        Parameters
        ----------
        cotangents : array, or callable
            dLoss/d(output), or what makes it from one state's output and its real tokens.

        Returns
        -------
        dict of (batch, S) arrays, or (batch, S + 1) with a final norm
            As from `gradflow.flow.flow`, stacked.
        """
        if real is None and self.mask is not None:
            real = jnp.broadcast_to(self.mask, states.shape[:2])
        ran = self if self.entered else self.run(stack, states, real)
        out, entered = jnp.asarray(ran.out), list(ran.entered or ())[:-1]
        if callable(cotangents):
            last = self.final(stack) if stack.final_norm else None
            cotangents = jax.vmap(cotangents)(out if last is None else last(out), real)[:, None]
        g, w, end = _arriving(stack, self.final(stack), out, cotangents, real)
        each: list[Rows] = []
        for l in reversed(range(stack.depth)):
            g, w, found = _back(stack, *self._block(stack, l), entered.pop(), real, g, w)
            each.insert(0, jax.tree.map(np.asarray, found))
            self._tell(stack, 2 * stack.depth - l)
        rows = {name: np.concatenate([found[name] for found in each], 1) for name in each[0]}
        rows = rows if end is None else jax.vmap(append)(rows, end)
        cosine = jax.vmap(token_cosine)(g, real) if real is not None else jax.vmap(token_cosine)(g)
        return rows | {"input_gradient_cosine": cosine}

    def _block(self, stack: Stack, l: int) -> tuple[Layer, np.ndarray, np.ndarray]:
        """A block's weights and its two multipliers, each (sub-layers,)."""
        alphas, betas = self.multipliers(stack)[:2]
        return self.layer(stack, l), np.asarray(alphas[l]), np.asarray(betas[l])

    def _tell(self, stack: Stack, done: int) -> None:
        if self.progress is not None:
            self.progress(done, 2 * stack.depth)


def _steps(stack: Stack, layer: Layer, alphas: Array, betas: Array, x: State, real: Real) -> list[SublayerJacobian]:
    """A block's sub-layers at one state, in order."""
    layer = Given(layer.params, layer.norms, mask=real, tied=True).layer(stack, None)
    steps = []
    for k in range(len(stack.block)):
        steps.append(stack.sublayer(layer, k, alphas[k], betas[k], x))
        x = steps[-1].out
    return steps


@functools.partial(jax.jit, static_argnums=0)
def _onward(stack: Stack, layer: Layer, alphas: Array, betas: Array, states: Array, real: Array | None) -> Array:
    """One block forward, state by state."""
    return jax.lax.map(lambda row: _steps(stack, layer, alphas, betas, *row)[-1].out, (states, real))


@functools.partial(jax.jit, static_argnums=0)
def _back(
    stack: Stack,
    layer: Layer,
    alphas: Array,
    betas: Array,
    states: Array,
    real: Array | None,
    g: Cotangents,
    w: Cotangents,
) -> tuple[Cotangents, Cotangents, Rows]:
    """One block back, state by state."""

    def one(row: tuple) -> tuple[Cotangents, Cotangents, Rows]:
        x, seen, g, w = row
        return through_block(_steps(stack, layer, alphas, betas, x, seen), g, w, seen)

    return jax.lax.map(one, (states, real, g, w))


@functools.partial(jax.jit, static_argnums=0)
def _arriving(stack: Stack, last: AnyNorm | None, out: Array, sent: Array, real: Array | None) -> tuple:
    """`gradflow.flow.arriving`, state by state."""
    return jax.lax.map(lambda row: arriving(stack, Given((), last=last), *row), (out, sent, real))
