"""Scalars of a model's output whose gradients an audit sends back: the pooled embedding, and the loss at chosen places.

The places are masked tokens, whose labels are what they were, or all of a causal model's but the last, whose labels follow them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from gradflow import cotangents, precision
from gradflow.checkpoints import tokens
from gradflow.checkpoints.families import family_of
from gradflow.checkpoints.memory import SLICE
from gradflow.checkpoints.model import Checkpoint, Head
from gradflow.stack import State

SHARE = 0.15  # of a text's tokens are masked, as in BERT's training


def unit_mean(out: State, real: Bool[Array, " tokens"]) -> Float[Array, " d"]:
    """The sentence embedding: mean over real tokens, at length 1."""
    mean = jnp.sum(jnp.where(real[:, None], out, 0), 0) / jnp.sum(real)
    return mean / jnp.linalg.norm(mean)


def pooled_gradient(out: State, real: np.ndarray, key: int) -> np.ndarray:
    """Gradient of ⟨v, m/‖m‖⟩ in the output; m is the mean over real tokens, v one standard Gaussian of ``key``."""
    with precision.scope("float64"):
        v = cotangents.gaussian(key, out.shape[-1:], out.dtype)
        return np.asarray(jax.grad(lambda out: v @ unit_mean(out, jnp.asarray(real)))(out))


def gaussian(states: np.ndarray, real: np.ndarray, key: int) -> np.ndarray:
    """A standard Gaussian at real tokens, (texts, tokens, d), as `gradflow.profile` draws it."""
    with precision.scope("float64"):
        drawn = cotangents.gaussian(key, (len(states), 1, *states.shape[1:]), "float64")
        return np.where(real[..., None], np.asarray(drawn[:, 0]), 0)


def masked(checkpoint: Checkpoint, ids: np.ndarray, key: int, row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mask 15 % of a text's tokens, at least one, never a special one.

    Parameters
    ----------
    ids : (tokens,)
    key, row : int
        The choice hangs on these and on the number of tokens alone.

    Returns
    -------
    ids : (tokens,)
        With the tokenizer's mask at the chosen places.
    places : (n,)
        Those places, ascending.

    Raises
    ------
    ValueError
        If the tokenizer has no mask token, or the text nothing to mask.
    """
    word = str(family_of(checkpoint.config).mask)
    around = tokens.encode(checkpoint.path, word)  # start, mask, end
    if around.size != 3:
        raise ValueError(f"cotangent: 'mlm' needs the mask token {word!r}, which this tokenizer does not know")
    free = np.flatnonzero(~np.isin(ids, around))
    if not free.size:
        raise ValueError("text: has no token that could be masked; write a sentence")
    chosen = np.random.default_rng([key, row]).choice(free, max(1, round(SHARE * free.size)), replace=False)
    places = np.sort(chosen)
    hidden = ids.copy()
    hidden[places] = around[1]
    return hidden, places


def at_places(
    checkpoint: Checkpoint, outs: Float[Array, "texts tokens d"], places: list[np.ndarray], labels: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The head's mean cross-entropy at some places of each text, (texts,), and its gradient in that text's output.

    The decoder is taken some rows at a time: with total = log Σ e^logit over those read, and its slope, more rows give
    log(e^total + e^theirs), and the mean of both slopes weighted by e^total and e^theirs.
    """
    assert checkpoint.head is not None, "asked of a checkpoint without a head"
    head, shape = checkpoint.head, (len(places), max(where.size for where in places))
    at, wanted, weight = np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape)
    for row, (where, label) in enumerate(zip(places, labels, strict=True)):
        at[row, : where.size], wanted[row, : where.size], weight[row, : where.size] = where, label, 1 / where.size

    def sums(picked: State, wanted: Array, decoder: Array, bias: Array | None, first: Array) -> tuple[Array, Array]:
        """Of each place, log Σ e^logit over these rows, and the label's logit if it is among them, else 0."""
        rows = first + jnp.arange(len(decoder))
        logits = replace(head, decoder=decoder, bias=bias)(picked)  # token by token
        own = jnp.sum(jnp.where(rows == wanted[:, None], logits, 0), -1)
        return jax.nn.logsumexp(jnp.where(rows < head.decoder.shape[0], logits, -jnp.inf), -1), own

    @jax.jit
    def slopes(picked: Array, wanted: Array, *piece: Any) -> Any:  # a piece is large: no constant of the program
        def one(row: tuple[State, Array]) -> Any:
            (total, own), pull = jax.vjp(lambda picked: sums(picked, row[1], *piece), row[0])
            one, zero = jnp.ones_like(own), jnp.zeros_like(own)
            return total, *pull((one, zero)), own, *pull((zero, one))

        return jax.lax.map(one, (picked, wanted))

    total, own = np.full(shape, -np.inf), np.zeros(shape)
    slope = own_slope = np.zeros(())
    with precision.scope("float64"):
        picked = jnp.take_along_axis(jnp.asarray(outs), jnp.asarray(at)[..., None], 1)
        for piece in _pieces(head):
            more, towards, label, label_slope = map(np.asarray, slopes(picked, wanted, *piece))
            both = np.logaddexp(total, more)
            slope = np.exp(total - both)[..., None] * slope + np.exp(more - both)[..., None] * towards
            total, own, own_slope = both, own + label, own_slope + label_slope
    gradients, each = np.zeros(outs.shape), weight[..., None] * (slope - own_slope)
    for row, where in enumerate(at):
        np.add.at(gradients[row], where, each[row])
    return np.sum(weight * (total - own), 1), gradients


def _pieces(head: Head) -> Iterator[tuple[np.ndarray, Array | None, int]]:
    """Rows of the decoder, the biases there, and the first one's number; all of one shape, the last one's end is filled up."""
    vocab, width = head.decoder.shape
    number = -(-vocab * width // SLICE)
    rows = -(-vocab // number)
    for first in range(0, vocab, rows):
        lacking = max(0, first + rows - vocab)
        bias = None if head.bias is None else jnp.pad(head.bias[first : first + rows], (0, lacking))
        yield np.pad(head.decoder[first : first + rows], ((0, lacking), (0, 0))), bias, first
