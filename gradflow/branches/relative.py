"""Relative positions as T5 has them: a number for each head, by how far the key stands from the query, added to the logits.

Near distances have a bucket each, the further ones share buckets that widen with the log of the distance (Raffel et al. 2020,
1910.10683). Here the buckets are spread over all offsets once, so that a network knows a table by offset and nothing else.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Buckets:
    """Which offsets share a number.

    Attributes
    ----------
    number : int
        How many buckets there are.
    furthest : int
        The distance from which all share the last one.
    both : bool
        Whether earlier keys have one half of them and later ones the other; else later ones share bucket 0.
    """

    number: int
    furthest: int
    both: bool

    def __post_init__(self) -> None:
        if self.near < 1 or self.furthest <= self.near:
            least = 4 if self.both else 2
            raise ValueError(
                f"relative: {self.number} buckets up to distance {self.furthest} leave none that widens; "
                f"needs at least {least}, and a distance above {max(self.near, 1)}"
            )

    @property
    def each(self) -> int:
        """Buckets of one side."""
        return self.number // 2 if self.both else self.number

    @property
    def near(self) -> int:
        """The distances below it have a bucket each."""
        return self.each // 2

    def at(self, offsets: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Buckets of offsets, key − query."""
        far = np.abs(offsets) if self.both else np.maximum(-offsets, 0)
        # in float32, as the models were trained: a distance on the edge of a bucket may fall on either side
        logs = np.log(np.maximum(far, self.near).astype(np.float32) / np.float32(self.near))
        widened = logs / np.float32(math.log(self.furthest / self.near)) * np.float32(self.each - self.near)
        found = np.where(far < self.near, far, np.minimum(self.near + widened.astype(int), self.each - 1))
        return found + self.each * (self.both & (offsets > 0))

    def by_offset(self, table: Float[np.ndarray, "number heads"]) -> Float[np.ndarray, "heads offsets"]:
        """The table that `added` takes: offsets from −furthest to furthest."""
        return table[self.at(np.arange(-self.furthest, self.furthest + 1))].T


def added(table: Float[Array, "heads offsets"], queries: int, keys: int) -> Float[Array, "heads queries keys"]:
    """What each head adds to its logits; offsets beyond the table's have its ends' numbers."""
    furthest = table.shape[-1] // 2
    offsets = jnp.subtract.outer(-jnp.arange(queries), -jnp.arange(keys))
    return table[:, jnp.clip(offsets, -furthest, furthest) + furthest]
