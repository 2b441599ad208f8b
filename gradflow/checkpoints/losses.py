"""Scalars of a model's output whose gradients an audit sends back: the pooled embedding, and the loss at chosen places.

The places are masked tokens, whose labels are what they were, or all of a causal model's but the last, whose labels follow them.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from gradflow import precision
from gradflow.checkpoints import tokens
from gradflow.checkpoints.families import family_of
from gradflow.checkpoints.model import Checkpoint
from gradflow.stack import State

SHARE = 0.15  # of a text's tokens are masked, as in BERT's training


def unit_mean(out: State, real: Bool[Array, " tokens"]) -> Float[Array, " d"]:
    """The sentence embedding: mean over real tokens, at length 1."""
    mean = jnp.sum(jnp.where(real[:, None], out, 0), 0) / jnp.sum(real)
    return mean / jnp.linalg.norm(mean)


def pooled_gradient(out: State, real: np.ndarray, key: int) -> np.ndarray:
    """Gradient of ⟨v, m/‖m‖⟩ in the output; m is the mean over real tokens, v one standard Gaussian of ``key``."""
    with precision.scope("float64"):
        v = precision.normal(jax.random.fold_in(jax.random.key(key), 1), out.shape[-1:], out.dtype)
        return np.asarray(jax.grad(lambda out: v @ unit_mean(out, jnp.asarray(real)))(out))


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
    """The head's mean cross-entropy at some places of each text, (texts,), and its gradient in that text's output."""
    assert checkpoint.head is not None, "asked of a checkpoint without a head"
    head, shape = checkpoint.head, (len(places), max(where.size for where in places))
    at, wanted, weight = np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape)
    for row, (where, label) in enumerate(zip(places, labels, strict=True)):
        at[row, : where.size], wanted[row, : where.size], weight[row, : where.size] = where, label, 1 / where.size

    def loss(out: State, decoder: Array, at: Array, wanted: Array, weight: Array) -> Array:
        logits = replace(head, decoder=decoder)(out[at])  # token by token
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[:, None], 1)
        return -jnp.sum(weight * picked[:, 0])

    @jax.jit
    def slopes(decoder: Array, *rows: Array) -> Any:  # the decoder is large: no constant of the program, but handed in
        return jax.lax.map(lambda row: jax.value_and_grad(loss)(row[0], decoder, *row[1:]), rows)

    with precision.scope("float64"):
        values, gradients = slopes(head.decoder, outs, at, wanted, weight)
        return np.asarray(values), np.asarray(gradients)
