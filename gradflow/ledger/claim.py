"""A claim as a row of data, a figure with its spread, and the rule that turns figures into a verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

HOLDS, PARTLY, FAILS, OPEN = "holds", "holds under conditions", "does not hold", "not measured yet"


@dataclass(frozen=True)
class Figure:
    """A measured number: its mean over ``n`` repetitions (``of`` says what these are), least and largest of them."""

    value: float
    low: float
    high: float
    n: int
    of: str

    @classmethod
    def over(cls, values: Any, of: str = "networks", geometric: bool = False) -> "Figure":
        """Of repetitions, any shape.

        Raises
        ------
        ValueError
            If there is none, or one is not finite.
        """
        found = np.asarray(values, np.float64).ravel()
        if not found.size or not np.isfinite(found).all():
            raise ValueError(f"values: a figure needs finite numbers, at least one, got {values!r}")
        mean = np.exp(np.mean(np.log(found))) if geometric else np.mean(found)
        return cls(float(mean), float(found.min()), float(found.max()), found.size, of)

    def to_dict(self) -> dict[str, Any]:
        """For the store."""
        return asdict(self)

    def __str__(self) -> str:
        if self.n == 1 or self.low == self.high:
            return short(self.value)
        return f"{short(self.value)} ({short(self.low)} … {short(self.high)})"


@dataclass(frozen=True)
class Case:
    """Circumstances in which the statement is put to the test: it holds there if the figure lies within the limits.

    Attributes
    ----------
    when : the circumstances, in words
    figure : what is looked at, by its name in the store
    least, most : limits that *all* repetitions must keep, both included
    missing : what there would have to be, where nothing is measured
    """

    when: str
    figure: str
    least: float = -math.inf
    most: float = math.inf
    missing: str = ""

    def outcome(self, figures: Mapping[str, Figure]) -> bool | None:
        """True where every repetition keeps the limits, False where none does, None where they disagree or there is none."""
        seen = figures.get(self.figure)
        if seen is None:
            return None
        if self.least <= seen.low and seen.high <= self.most:
            return True
        beside = seen.high < self.least or seen.low > self.most
        return False if beside or seen.n == 1 else None

    @property
    def limits(self) -> str:
        """As in ``0.5 … 2`` or ``≤ 0.01``."""
        if math.isinf(self.least):
            return f"≤ {short(self.most)}"
        return f"≥ {short(self.least)}" if math.isinf(self.most) else f"{short(self.least)} … {short(self.most)}"

    def why_open(self, figures: Mapping[str, Figure]) -> str:
        """What is missing for an answer."""
        seen = figures.get(self.figure)
        return (self.missing or "its figure") if seen is None else f"{seen.of} that agree: {seen}, limit {self.limits}"


@dataclass(frozen=True)
class Claim:
    """One statement.

    Attributes
    ----------
    name : what the shell calls it
    by : whose it is: ``"the article"`` or ``"the primer"``
    statement : in our own words
    command : what a reader types to see it
    found : a template of stored figures, ``{name}`` for the mean
    measure : ``"module:function"`` below `gradflow.ledger`; called with the repository's root, returns figures by name
    cases : the circumstances, each with its figure and limits
    quick : whether ``gradflow claims --check`` measures it again; the others read files of the repository
    """

    name: str
    by: str
    statement: str
    command: str
    found: str
    measure: str
    cases: tuple[Case, ...]
    quick: bool = True


class Verdict(NamedTuple):
    """The word, and the circumstances that made it."""

    word: str
    holds: tuple[Case, ...]
    fails: tuple[Case, ...]
    open: tuple[Case, ...]

    def __str__(self) -> str:
        number = len(self.holds) + len(self.fails) + len(self.open)
        return f"{self.word} ({len(self.holds)} of {number})" if self.word == PARTLY else self.word


def judge(cases: Sequence[Case], figures: Mapping[str, Figure]) -> Verdict:
    """The verdict of a claim, from its figures alone.

    It holds if it does in every case, and under conditions if it does in some. Where it does in none, it does not hold if it
    fails in any; if all are open, it is not measured yet.
    """
    sorted_: dict[bool | None, list[Case]] = {True: [], False: [], None: []}
    for case in cases:
        sorted_[case.outcome(figures)].append(case)
    holds, fails, unknown = (tuple(sorted_[outcome]) for outcome in (True, False, None))
    word = (PARTLY if fails or unknown else HOLDS) if holds else (FAILS if fails else OPEN)
    return Verdict(word, holds, fails, unknown)


def short(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"
