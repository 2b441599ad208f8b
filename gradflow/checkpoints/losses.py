"""Scalars of an encoder's output whose gradients an audit sends back: the pooled embedding, and the masked-token loss."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from gradflow import precision
from gradflow.checkpoints import tokens
from gradflow.checkpoints.model import Checkpoint
from gradflow.stack import State

SHARE = 0.15  # of a text's tokens are masked, as in BERT's training
MASKS = {"roberta": "<mask>"}  # the other families write [MASK]


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
    word = MASKS.get(checkpoint.family, "[MASK]")
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


def masked_loss(checkpoint: Checkpoint, out: State, places: np.ndarray, labels: np.ndarray) -> Float[Array, ""]:
    """Mean cross-entropy of the masked-language-model head at the masked places."""
    logits = checkpoint.mlm_logits(out[places])  # the head acts on each token alone
    assert logits is not None, "asked of a checkpoint without a head"
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(labels)[:, None], 1))


def masked_gradient(checkpoint: Checkpoint, out: State, places: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Gradient of `masked_loss` in the output, (tokens, d)."""
    with precision.scope("float64"):
        # not jitted: the decoder, as large as the vocabulary, would become a constant of the program
        return np.asarray(jax.grad(lambda out: masked_loss(checkpoint, out, places, labels))(out))
