"""A checkpoint: a post-LN encoder as a `Stack` with given weights, its embeddings before it, its MLM head behind it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import precision
from gradflow.checkpoints import tokens
from gradflow.checkpoints.config import Sizes
from gradflow.norms import Norm
from gradflow.numeric import to_jax
from gradflow.stack import Given, Stack, State
from gradflow.symbolic.moments import ACTIVATIONS, z

_normed = jax.jit(lambda norm, x: norm(x))  # op by op it would be compiled op by op


@dataclass(frozen=True, eq=False)
class Embedding:
    """Token, position and type-0 embeddings, summed and normed; tables stay on the host as they were stored."""

    word: np.ndarray
    position: np.ndarray
    kind: np.ndarray
    norm: Norm


@dataclass(frozen=True, eq=False)
class Head:
    """Masked-language-model head: decoder · N(φ(W x + b)) + bias."""

    w: Array
    b: Array
    activation: str
    norm: Norm
    decoder: np.ndarray
    bias: Array


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model from a folder.

    Attributes
    ----------
    family : str
        Name of its row in `FAMILIES`.
    path : Path
        Its folder.
    config : dict
        ``config.json`` as it is.
    sizes : Sizes
        What of it the forward pass depends on.
    stack : Stack
        The encoder: post-LN, attention then MLP, ``sizes.depth`` blocks.
    weights : Given
        Its weights and norms in float64.
    embedding : Embedding
        What comes before the stack.
    head : Head or None
        What comes behind, where the folder has it.
    """

    family: str
    path: Path
    config: dict[str, Any]
    sizes: Sizes
    stack: Stack
    weights: Given
    embedding: Embedding
    head: Head | None

    @property
    def activation(self) -> str:
        """The MLPs' φ, as `gradflow.branches.MLP` names it."""
        return self.sizes.activation

    @property
    def positions(self) -> int:
        """The most tokens that the position table has room for."""
        return self.sizes.table - self.sizes.skipped

    def ids(self, text: str) -> np.ndarray:
        """Token ids of a text, special tokens included, never truncated: (tokens,)."""
        return self._checked(tokens.encode(self.path, text))

    def _checked(self, ids: Any) -> np.ndarray:
        try:
            given = np.asarray(ids)
        except ValueError:
            given = np.empty((0, 0))
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise ValueError("ids: needs one row of whole numbers, the token ids of one text")
        tokens.fits(given.size, self.positions)
        if given.min() < 0 or given.max() >= self.sizes.vocab:
            bad = given[(given < 0) | (given >= self.sizes.vocab)][0]
            raise ValueError(
                f"ids: {bad} is outside the embedding's {self.sizes.vocab} rows; is the tokenizer this model's?"
            )
        return given.astype(np.int64)

    def embed(self, ids: Any) -> State:
        """Embed token ids: the output of the embedding's norm, (tokens, d) in float64.

        Raises
        ------
        ValueError
            If an id is outside the table, or there are more tokens than positions.
        """
        ids, e = self._checked(ids), self.embedding
        places = np.arange(ids.size)
        if self.sizes.skipped:
            real = ids != self.sizes.pad
            places = np.cumsum(real) * real + self.sizes.pad
        summed = e.word[ids].astype(np.float64) + e.position[places] + e.kind
        return _normed(e.norm, precision.as_array(summed))

    def given(self, mask: Any = None) -> Given:
        """The weights, with padding marked: ``mask`` (tokens,) is 0 at keys that attention must not see."""
        if mask is None:
            return self.weights
        seen = np.asarray(mask)
        if seen.ndim != 1 or seen.dtype.kind not in "biu" or not np.isin(seen, (0, 1)).all() or not seen.any():
            raise ValueError("mask: needs one row of 0 and 1, at least one of them 1")
        return replace(self.weights, mask=jnp.asarray(seen.astype(bool)))

    def hidden_states(self, ids: Any, mask: Any = None) -> Float[Array, "layers tokens d"]:
        """The embedding's output and that of each block, as transformers' ``hidden_states``."""
        with precision.scope("float64"):
            x, weights = self.embed(ids), self.given(mask)
            if weights.mask is not None and weights.mask.shape != x.shape[:1]:
                raise ValueError(f"mask: needs {x.shape[0]} entries, one for each id, got {weights.mask.size}")
            path = self.stack.trace(weights, x)
            assert path.x is not None
            return jnp.concatenate([path.x[:: len(self.stack.block)], path.out[None]])

    def mlm_logits(self, x: State) -> Float[Array, "tokens vocab"] | None:
        """Logits of the masked-language-model head at the last hidden state; ``None`` where there is no head."""
        head = self.head
        if head is None:
            return None
        with precision.scope("float64"):
            phi = to_jax([z], ACTIVATIONS[head.activation])
            h = head.norm(phi(x @ head.w.T + head.b))
            return h @ jnp.asarray(head.decoder, jnp.float64).T + head.bias
