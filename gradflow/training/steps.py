"""The jitted work of a run: a stretch of steps with the lens on its first one, and losses on fixed batches."""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gradflow.stack import Stack
from gradflow.training import data, watch
from gradflow.training.library import optax
from gradflow.training.model import Model, loss
from gradflow.training.optimizers import Optimizer


class State(NamedTuple):
    """All that a run is made of: what a checkpoint holds."""

    model: Model
    moments: Any
    step: Array


@dataclass(frozen=True)
class Program:
    """What a compilation depends on; learning rates, keys and a scheme's numbers are arguments, so that runs share one.

    Attributes
    ----------
    stack : Stack
        By its shape alone.
    optimizer : Optimizer
    sequences, tokens : int
        Of a batch.
    every : int
        Steps of a stretch.
    lens : bool
        Whether its first step is watched.
    learned : bool
        Whether β is.
    """

    stack: Stack
    optimizer: Optimizer
    sequences: int
    tokens: int
    every: int
    lens: bool = True
    learned: bool = False

    def start(self, model: Model) -> State:
        """A model at step 0."""
        return State(model, self.optimizer.transformation.init(model), jnp.zeros((), jnp.int32))

    def batch(self, text: Array, key: Array, step: Array) -> Array:
        """The batch of a step."""
        return data.batch(text, key, step, self.sequences, self.tokens)

    def gradient(self, model: Model, batch: Array) -> tuple[Float[Array, ""], Model]:
        """Loss and its gradient in every weight; α, and β unless it is learned, are constants."""
        fixed = ("alpha",) if self.learned else ("alpha", "beta")

        def of(model: Model) -> Array:
            constants = {name: jax.lax.stop_gradient(getattr(model.weights, name)) for name in fixed}
            return loss(replace(model, weights=replace(model.weights, **constants)), self.stack, batch)

        return jax.value_and_grad(of)(model)

    def step(self, state: State, text: Array, key: Array, rates: Array) -> tuple[State, Array, Model, Model]:
        """One step: the new state, the loss before it, the gradient, and the direction that the optimizer takes."""
        value, grad = self.gradient(state.model, self.batch(text, key, state.step))
        direction, moments = self.optimizer.transformation.update(grad, state.moments, state.model)
        rate = rates[state.step].astype(self.stack.dtype)
        move = jax.tree.map(lambda leaf: -rate * leaf, direction)
        return State(optax().apply_updates(state.model, move), moments, state.step + 1), value, grad, direction

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def stretch(self, state: State, text: Array, key: Array, rates: Array, count: Array) -> tuple[State, Array, dict]:
        """``count`` ≤ every steps from a state; their losses, (every,) with NaN behind them; the first step's figures."""
        losses, figures = jnp.full(self.every, jnp.nan, self.stack.dtype), {}

        def one(i: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            state, losses = carry
            state, value, *_ = self.step(state, text, key, rates)
            return state, losses.at[i].set(value)

        first = 0
        if self.lens:
            before = state
            state, value, grad, direction = self.step(state, text, key, rates)
            batch = self.batch(text, key, before.step)
            figures = watch.figures(self.stack, before.model, state.model, grad, direction, batch, rates[before.step])
            losses, first = losses.at[0].set(value), 1
        # bounds are data: one compilation serves the last, shorter stretch too
        state, losses = jax.lax.fori_loop(first, count, one, (state, losses))
        return state, losses, figures

    @functools.partial(jax.jit, static_argnums=0)
    def loss(self, model: Model, batches: Int[Array, "n sequences tokens+1"]) -> Float[Array, ""]:
        """Mean loss over batches."""
        return jnp.mean(jax.lax.map(lambda each: loss(model, self.stack, each), batches))
