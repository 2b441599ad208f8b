"""From a folder to a `Checkpoint`: every tensor by its family's name for it, its shape held against the config."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import precision
from gradflow.branches import MLP, Attention
from gradflow.checkpoints.config import Sizes, sizes
from gradflow.checkpoints.families import Family, family_of
from gradflow.checkpoints.folder import Folder, read
from gradflow.checkpoints.model import Checkpoint, Embedding, Head
from gradflow.norms import Norm
from gradflow.stack import Given, Stack

WORD = "embeddings.word_embeddings.weight"


@dataclass(frozen=True)
class _Reader:
    """Reads a family's modules; every shape is held against the config before the tensor is read."""

    folder: Folder
    family: Family
    size: Sizes

    @property
    def prefix(self) -> str:
        """What stands before the encoder's names in this file: the family's prefix, or nothing."""
        prefix = self.family.prefix
        return prefix if any(name.startswith(prefix) for name in self.folder.files) else ""

    def affine(self, module: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        """Weight and bias of a module; files from TensorFlow call a norm's gamma and beta."""
        files = self.folder.files
        old = f"{module}.weight" not in files and f"{module}.gamma" in files
        weight, bias = (f"{module}.{name}" for name in (("gamma", "beta") if old else ("weight", "bias")))
        return self.folder.tensor(weight, shape), self.folder.tensor(bias, shape[:1])

    def norm(self, module: str) -> Norm:
        """One norm."""
        return Norm(*map(jnp.asarray, self.affine(module, self.size.hidden)), row="layernorm", eps=self.size.eps)

    def along_depth(self, module: str, *shape: int) -> tuple[jax.Array, jax.Array]:
        """Weight and bias of a module in every block, stacked along depth."""
        name = self.prefix + self.family.layer + module
        blocks = [self.affine(name.format(l=l), *shape) for l in range(self.size.depth)]
        w, b = (jnp.asarray(np.stack(leaf)) for leaf in zip(*blocks, strict=True))
        return w, b

    def branch(self, modules: dict[str, tuple[str, int, int]]) -> dict[str, jax.Array]:
        """Parameters of a branch in every block: its name for each → (module, d_out, d_in)."""
        params = {}
        for name, (module, *shape) in modules.items():
            params[f"w_{name}"], params[f"b_{name}"] = self.along_depth(module, *shape)
        return params

    def weights(self) -> Given:
        """The encoder's."""
        d, inner = self.size.hidden, self.size.inner
        attention = self.branch({n: (m, d, d) for n, m in zip("qkvo", self.family.attention, strict=True)})
        first, second = self.family.mlp
        mlp = self.branch({"in": (first, inner, d), "out": (second, d, inner)})
        norms = (Norm(*self.along_depth(m, d), row="layernorm", eps=self.size.eps) for m in self.family.norms)
        return Given((attention, mlp), tuple((None, None, norm) for norm in norms))

    def embedding(self) -> Embedding:
        """Its tables and norm."""
        size, inside = self.size, self.prefix + "embeddings."
        kind = np.zeros(size.hidden)
        if self.family.types:
            kind = self.folder.tensor(f"{inside}token_type_embeddings.weight", (size.types, size.hidden))[0]
        word = self.folder.tensor(self.prefix + WORD, (size.vocab, size.hidden), None)
        position = self.folder.tensor(f"{inside}position_embeddings.weight", (size.table, size.hidden))
        return Embedding(word, position, kind, self.norm(f"{inside}LayerNorm"))

    def head(self, word: np.ndarray) -> Head | None:
        """The masked-language-model head, if the file has one; its decoder is the word table unless untied."""
        names, size = self.family.head, self.size
        if f"{names.dense}.weight" not in self.folder.files:
            return None
        w, b = map(jnp.asarray, self.affine(names.dense, size.hidden, size.hidden))
        order = (
            names.bias if size.tied else names.bias[::-1]
        )  # untied, the two may differ, and the decoder's own is used
        bias = next((name for name in order if name in self.folder.files), names.bias[0])
        decoder = word if size.tied else self.folder.tensor(names.decoder, (size.vocab, size.hidden), None)
        activation = names.activation or size.activation
        return Head(
            w, b, activation, self.norm(names.norm), decoder, jnp.asarray(self.folder.tensor(bias, (size.vocab,)))
        )


def load(path: str | Path) -> Checkpoint:
    """Read a model's folder (or the safetensors file in it).

    Raises
    ------
    ValueError
        One line that names the file, key or tensor which is missing, damaged or not read, and how to mend it.
    """
    folder = read(path)
    family = family_of(folder.config)
    size = sizes(family, folder.config)
    reader = _Reader(folder, family, size)
    more = reader.prefix + family.layer.format(l=size.depth)
    if any(name.startswith(more) for name in folder.files):
        raise ValueError(f"checkpoint: config.json's {family.depth!r} is {size.depth}, but the file holds {more!r} too")
    with precision.scope("float64"):
        embedding, weights = reader.embedding(), reader.weights()
        head = reader.head(embedding.word)
    block = (Attention(size.heads), MLP(size.activation, size.inner / size.hidden))
    stack = Stack.make("post-ln", block, size.depth, size.hidden, norm="layernorm", eps=size.eps)
    return Checkpoint(family.name, folder.path, folder.config, size, stack, weights, embedding, head)
