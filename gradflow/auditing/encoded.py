"""A decoder beside its encoder: targets run with the source that each has, and the gradient that crosses to the encoder.

The encoder's last hidden state enters every block of the decoder, so that what arrives there on the way back is the sum over
the decoder's cross-attentions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from gradflow import precision, profiles
from gradflow.checkpoints import Checkpoint
from gradflow.checkpoints.plan import Plan
from gradflow.factors import Profile
from gradflow.stack import State

Batch = Float[np.ndarray, "texts tokens d"]


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """A decoder, and for each text what it asks.

    Attributes
    ----------
    decoder, encoder : Checkpoint
    sources : (texts, memory, d)
        What enters the encoder.
    memories : (texts, memory, d)
        The encoder's last hidden states.
    real : (texts, memory) or None
        False at their padding, where there is any.
    """

    decoder: Checkpoint
    encoder: Checkpoint
    sources: Batch
    memories: Float[Array, "texts memory d"]
    real: Bool[np.ndarray, "texts memory"] | None

    def run(self, states: Batch, real: Bool[np.ndarray, "texts tokens"]) -> tuple[Array, Callable[[Batch], Batch]]:
        """The decoder's last hidden states, and what takes a gradient there to the one at the encoder's, by plain autodiff."""

        def last(memory: State, seen: Array | None, x: State, own: Array) -> State:
            decoder = self.decoder.reading(memory, seen)
            weights = dataclasses.replace(decoder.weights, mask=None if real.all() else own)
            return decoder.behind(decoder.stack.trace(weights, x, None, False).out, weights)

        def crossing(sent: Batch) -> Batch:
            with precision.scope("float64"):
                return np.asarray(pull(jnp.asarray(sent))[0])

        with precision.scope("float64"):
            each = None if self.real is None else jnp.asarray(self.real), jnp.asarray(states), jnp.asarray(real)
            outs, pull = jax.vjp(lambda memories: jax.vmap(last)(memories, *each), self.memories)
        return outs, crossing

    def encoder_profile(self, arriving: Batch, key: int) -> Profile:
        """The encoder's profile, of what crossed over to it."""
        return profiles.profile(self.encoder, self.sources, arriving, mask=self.real, key=key)

    def profile(self, states: Batch, sent: Batch, mask: np.ndarray | None, key: int) -> Profile:
        """The decoder's profile, a row for each text."""
        each = []
        for row, (x, g) in enumerate(zip(states, sent, strict=True)):
            decoder = self.decoder.reading(self.memories[row], None if self.real is None else self.real[row])
            real = None if mask is None else mask[row : row + 1]
            each.append(profiles.profile(decoder, x[None], g[None], mask=real, key=key))
        return joined(each, memory_tokens=self.memories.shape[1], memory_cosine=None)


def joined(each: Sequence[Profile], **settings: Any) -> Profile:
    """Profiles of one stack, one below the other."""
    first = each[0]
    names = [f.name for f in dataclasses.fields(first) if isinstance(getattr(first, f.name), np.ndarray)]
    rows = {name: np.concatenate([getattr(p, name) for p in each]) for name in names}
    tokens = [p.settings["tokens"] for p in each]
    tokens = tokens[0] if isinstance(tokens[0], int) else [n for own in tokens for n in own]
    whole = {**first.settings, "batch": len(each), "tokens": tokens, **settings}
    return dataclasses.replace(first, **rows, settings=whole)


def refuse(plan: Plan, targeted: bool, cotangent: str | None, probes: int) -> None:
    """Refuse what an encoder–decoder lacks, and a target that goes to another model.

    Raises
    ------
    ValueError
        Naming the argument.
    """
    if plan.encoder is None:
        if targeted:
            raise ValueError("target: is what an encoder–decoder writes, and this model is none; leave it out")
        return
    if probes != 1:
        raise ValueError("probes: an encoder–decoder's gradient is followed for one cotangent; leave it out")
    if cotangent == "next-token" and not targeted:
        raise ValueError("target: 'next-token' is the loss of a target; say what the model is to write")
