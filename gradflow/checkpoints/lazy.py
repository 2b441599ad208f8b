"""What stays in its file until it is needed: a table, of which rows are read, and a body, of which a block is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from gradflow.auditing.streamed import Blocks
from gradflow.stack import Layer

if TYPE_CHECKING:
    from gradflow.checkpoints.folder import Folder
    from gradflow.checkpoints.ggufs import Gguf
    from gradflow.checkpoints.loading import Reader


@dataclass(frozen=True, eq=False)
class Table:
    """A matrix in a file; like an array, as far as rows go.

    Attributes
    ----------
    folder : Folder or Gguf
    name : str
        The tensor's.
    shape : (int, int)
    """

    folder: Folder | Gguf
    name: str
    shape: tuple[int, int]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Consecutive rows, or those of an index (n,), as they are stored."""
        if isinstance(rows, slice):
            return self.folder.tensor(self.name, self.shape, None, rows)
        each, places = np.unique(rows, return_inverse=True)
        return np.concatenate([self[i : i + 1] for i in each.tolist()])[places]


def layer(reader: Reader, l: int) -> Layer:
    """Block ``l`` alone."""
    params, norms = reader.block(l)
    held = tuple(
        {name: jnp.asarray(own.pop(name)) for name in list(own)} for own in params
    )  # NumPy's copy goes at once
    return Layer(held, reader.slots(norms))


def blocks(reader: Reader) -> Blocks:
    """The body; what headers tell of all its blocks is held against the first block now.

    Raises
    ------
    ValueError
        If a block lacks a tensor that the first has, or has it in another shape.
    """
    known, stem = set(reader.used), reader.prefix + reader.family.layer
    reader.block(0)
    first = {name: shape for name, shape in reader.used.items() if name not in known}
    for l in range(1, reader.plan.depth):
        for name, shape in first.items():
            own = stem.format(l=l) + name.removeprefix(stem.format(l=0))
            reader.used[own] = shape
            with reader.folder.entry(own, shape):
                pass

    def read(l: int) -> Layer:
        return layer(reader, l)

    return Blocks(read, reader.last())
