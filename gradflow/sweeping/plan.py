"""What a sweep is to measure: axes whose product is its cases, and what all cases share; as the file of a sweep states it."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

AXES = ("schemes", "blocks", "depths", "widths")


class Case(NamedTuple):
    """One network: where it stands on every axis."""

    scheme: str
    block: str
    depth: int
    d: int
    seed: int


@dataclass(frozen=True)
class Plan:
    """A sweep by names and numbers.

    Attributes
    ----------
    schemes, blocks : tuple of str
        Names of rows, and of blocks: their branches' names, joined by commas.
    depths, widths : tuple of int
        Blocks, and widths.
    seeds : int
        Networks of each.
    settings : mapping
        What all cases share: norm, init, tokens, key, dtype, …
    definitions : mapping
        What each name stood for, in full: a row of one's own may change under its name.
    """

    schemes: tuple[str, ...]
    blocks: tuple[str, ...]
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    seeds: int
    settings: Mapping[str, Any]
    definitions: Mapping[str, str]

    def cases(self) -> Iterator[Case]:
        """All of them, the last axis first."""
        axes = itertools.product(*(getattr(self, name) for name in AXES), range(self.seeds))
        return (Case(*place) for place in axes)

    def __len__(self) -> int:
        size = self.seeds
        for name in AXES:
            size *= len(getattr(self, name))
        return size

    def to_json(self) -> str:
        """The plan as a file states it."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what `to_json` wrote; raises ``ValueError``, ``TypeError`` or ``KeyError`` for anything else."""
        held = json.loads(text)
        return cls(**held | {name: tuple(held[name]) for name in AXES})

    def grown_from(self, held: "Plan", file: str) -> "Plan":
        """This plan, with the axes in the order in which they grew from those that a file holds.

        Raises
        ------
        ValueError
            Where the file was made with other settings, by other definitions, or holds cases that this plan leaves out.
        """
        other = "or name another file"
        for name, was in held.settings.items():
            now = self.settings.get(name)
            if now != was:
                raise ValueError(f"{name}: {file!r} was made with {was!r}, this is {now!r}; give the same, {other}")
        for name, was in held.definitions.items():
            if self.definitions.get(name, was) != was:
                raise ValueError(
                    f"path: {file!r} holds networks of another {name!r} than this one; give that one, {other}"
                )
        grown: dict[str, Any] = {}
        for name in AXES:
            now, was = getattr(self, name), getattr(held, name)
            lost = [each for each in was if each not in now]
            if lost:
                raise ValueError(
                    f"{name}: {file!r} also holds {', '.join(map(str, lost))}; a sweep may grow, so ask for it too, {other}"
                )
            grown[name] = tuple(dict.fromkeys((*was, *now)))
        if self.seeds < held.seeds:
            raise ValueError(f"seeds: {file!r} has {held.seeds}; a sweep may grow, so ask for as many, {other}")
        return replace(self, **grown, definitions={**held.definitions, **self.definitions})
