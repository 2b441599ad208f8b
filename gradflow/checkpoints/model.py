"""A checkpoint: a transformer as a `Stack` with given weights, its embedding before it, its head behind it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import precision
from gradflow.auditing.streamed import Blocks
from gradflow.branches.cross_attention import CrossAttention
from gradflow.checkpoints import tokens
from gradflow.checkpoints.lazy import Table
from gradflow.checkpoints.plan import Plan
from gradflow.norms import Norm
from gradflow.numeric import to_jax
from gradflow.stack import Given, Stack, State
from gradflow.symbolic.moments import ACTIVATIONS, z


@dataclass(frozen=True, eq=False)
class Embedding:
    """N(scale·W word + position + type 0), as far as a family has these; words stay as stored, on the host or in the file."""

    word: np.ndarray | Table
    scale: float = 1.0
    matrix: np.ndarray | None = None
    position: np.ndarray | None = None
    kind: np.ndarray | None = None
    norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class Transform:
    """What a masked-language-model head does first: N(φ(W x + b))."""

    w: Array
    b: Array
    activation: str
    norm: Norm

    def __call__(self, x: State) -> State:
        """Token by token."""
        phi = to_jax([z], ACTIVATIONS[self.activation])
        return self.norm(phi(x @ self.w.T + self.b))


@dataclass(frozen=True, eq=False)
class Head:
    """Logits: decoder · scale·h + bias, soft-capped where the model says so; h is the last state's transform, or a matrix
    times it.
    """

    decoder: np.ndarray | Table
    bias: Array | None = None
    transform: Transform | None = None
    matrix: Array | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __call__(self, x: State) -> Float[Array, "tokens vocab"]:
        """Logits at the last hidden state."""
        h = x if self.transform is None else self.transform(x)
        h = h if self.matrix is None else h @ self.matrix.T
        logits = (self.scale * h) @ jnp.asarray(self.decoder[:], jnp.float64).T
        logits = logits if self.bias is None else logits + self.bias
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model from a folder.

    Attributes
    ----------
    family : str
        Name of its row in `FAMILIES`.
    path : Path
        Its folder, or its GGUF file.
    config : dict
        ``config.json`` as it is, or what the file's metadata make of one.
    plan : Plan
        What of it the forward pass depends on.
    stack : Stack
        The body: attention and MLP in ``plan.depth`` blocks, a norm behind the last where the family has one.
    weights : Given or Blocks
        Its weights and norms in float64, or what reads them block by block.
    embedding : Embedding
        What comes before the stack.
    head : Head or None
        What comes behind, where the folder has it.
    encoder : Checkpoint or None
        Whose last hidden state the stack's cross-attention asks, once `reading` has put it there.
    """

    family: str
    path: Path
    config: dict[str, Any]
    plan: Plan
    stack: Stack
    weights: Given | Blocks
    embedding: Embedding
    head: Head | None
    encoder: "Checkpoint | None" = None

    @property
    def activation(self) -> str:
        """The MLPs' φ, as `gradflow.branches.MLP` names it."""
        return self.plan.activation

    @property
    def causal(self) -> bool:
        """Whether a token sees itself and earlier ones only, and the next one is its label."""
        return self.plan.attention.causal

    @property
    def positions(self) -> int:
        """The most tokens of a text."""
        return self.plan.positions

    @property
    def whole(self) -> Given:
        """Its weights, all at once.

        Raises
        ------
        ValueError
            If they are read block by block.
        """
        if not isinstance(self.weights, Given):
            raise ValueError("weights: are streamed, and this needs them all at once; load with stream=False")
        return self.weights

    def ids(self, text: str) -> np.ndarray:
        """Token ids of a text, special tokens included, never truncated: (tokens,)."""
        return self._checked(tokens.encode(self.path, text))

    def _checked(self, ids: Any) -> np.ndarray:
        return tokens.checked(ids, self.plan.vocab, self.positions)

    def embed(self, ids: Any) -> State:
        """Embed token ids: what enters the first block, (tokens, d) in float64.

        Raises
        ------
        ValueError
            If an id is outside the table, or there are more tokens than positions.
        """
        ids, e = self._checked(ids), self.embedding
        out = e.scale * e.word[ids].astype(np.float64)
        out = out if e.matrix is None else out @ e.matrix.T
        if e.position is not None:
            places = np.arange(ids.size) + self.plan.skipped
            if self.plan.counted:
                real = ids != self.plan.pad
                places = np.cumsum(real) * real + self.plan.pad
            out = out + e.position[places]
        out = out if e.kind is None else out + e.kind
        return precision.as_array(out) if e.norm is None else e.norm(precision.as_array(out))

    def given(self, mask: Any = None) -> Given | Blocks:
        """The weights, with padding marked: ``mask`` (tokens,) is 0 at keys that attention must not see."""
        if mask is None:
            return self.weights
        seen = np.asarray(mask)
        if seen.ndim != 1 or seen.dtype.kind not in "biu" or not np.isin(seen, (0, 1)).all() or not seen.any():
            raise ValueError("mask: needs one row of 0 and 1, at least one of them 1")
        return replace(self.weights, mask=jnp.asarray(seen.astype(bool)))

    def reading(self, memory: State, mask: Any = None) -> "Checkpoint":
        """The decoder with what its cross-attentions ask: the encoder's last hidden state (memory, d), and 0 at its padding."""
        with precision.scope("float64"):
            each = {"memory": jnp.asarray(memory)} | ({} if mask is None else {"memory_mask": jnp.asarray(mask, bool)})
            along = {name: jnp.broadcast_to(leaf, (self.plan.depth, *leaf.shape)) for name, leaf in each.items()}
        pairs = zip(self.stack.block, self.whole.params, strict=True)
        params = tuple(p | along if isinstance(branch, CrossAttention) else p for branch, p in pairs)
        return replace(self, weights=replace(self.whole, params=params))

    def shifted(self, target: Any) -> np.ndarray:
        """What the decoder reads to foretell a target's ids: its start, and all of them but the last."""
        return np.concatenate([[self.plan.start], self._checked(target)[:-1]])

    def behind(self, out: State, weights: Given | Blocks | None = None) -> State:
        """The last hidden state: the stack's last stream behind its final norm, where it has one."""
        last = (weights or self.weights).final(self.stack) if self.stack.final_norm else None
        return out if last is None else last(out)

    def hidden_states(self, ids: Any, mask: Any = None) -> Float[Array, "layers tokens d"]:
        """What enters each block, and the last state behind a final norm, as transformers' ``hidden_states``."""
        with precision.scope("float64"):
            x, weights = self.embed(ids), self.given(mask)
            if weights.mask is not None and weights.mask.shape != x.shape[:1]:
                raise ValueError(f"mask: needs {x.shape[0]} entries, one for each id, got {weights.mask.size}")
            if isinstance(weights, Blocks):
                seen = None if weights.mask is None else weights.mask[None]
                ran = weights.run(self.stack, x[None], seen)
                return jnp.concatenate([*(ran.entered or ())[:-1], self.behind(jnp.asarray(ran.out))])
            path = self.stack.trace(weights, x)
            assert path.x is not None
            return jnp.concatenate([path.x[:: len(self.stack.block)], self.behind(path.out)[None]])

    def logits(self, x: State) -> Float[Array, "tokens vocab"] | None:
        """Logits of its own head at the last hidden state; ``None`` where there is no head."""
        if self.head is None:
            return None
        with precision.scope("float64"):
            return self.head(x)

    def mlm_logits(self, x: State) -> Float[Array, "tokens vocab"] | None:
        """Logits of a masked-language-model head at the last hidden state; ``None`` where there is none."""
        return None if self.head is None or self.head.transform is None else self.logits(x)
