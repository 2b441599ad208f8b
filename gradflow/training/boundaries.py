"""Where training ends on a map: the learning rate between the last that learns and the first that fails, seen and predicted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Place = tuple[str, int]  # scheme and depth


@dataclass(frozen=True)
class Boundary:
    """Of one scheme, depth and warm-up.

    Attributes
    ----------
    scheme, depth, warmup : str, int, int
    low, high : float
        The largest rate that learns, 0 where none does; the next one that was tried, infinite where there is none.
    """

    scheme: str
    depth: int
    warmup: int
    low: float
    high: float

    @property
    def place(self) -> Place:
        """Scheme and depth: all that a prediction from initialisation knows."""
        return self.scheme, self.depth

    @property
    def known(self) -> bool:
        """Whether rates were tried on both sides."""
        return self.low > 0 and math.isfinite(self.high)

    @property
    def rate(self) -> float:
        """The geometric mean of both sides; NaN where only one was tried."""
        return math.sqrt(self.low * self.high) if self.known else math.nan

    def error(self, predicted: float) -> float:
        """|log₁₀(predicted/seen)|; where one side alone is known, how far a prediction lies on the wrong side of it."""
        if self.known:
            return abs(math.log10(predicted / self.rate))
        if self.low > 0:
            return max(0.0, math.log10(self.low / predicted))
        return max(0.0, math.log10(predicted / self.high))


def seen(learns: Mapping[tuple[str, int, int], Mapping[float, bool]]) -> tuple[Boundary, ...]:
    """The boundary of every (scheme, depth, warm-up), from which of the rates that were tried learn."""
    found = []
    for (scheme, depth, warmup), at in learns.items():
        low = max((rate for rate, good in at.items() if good), default=0.0)
        found.append(Boundary(scheme, depth, warmup, low, min((rate for rate in at if rate > low), default=math.inf)))
    return tuple(found)


@dataclass(frozen=True)
class Prediction:
    """One predictor on a map: rate = C/B, the constant C read off one boundary, per warm-up.

    Attributes
    ----------
    name : str
        In `gradflow.training.first_step.PREDICTORS`.
    slopes : mapping from (scheme, depth) to float
        B.
    fitted : tuple of Boundary
        What C was read off, one a warm-up.
    """

    name: str
    slopes: Mapping[Place, float]
    fitted: tuple[Boundary, ...]

    def rate(self, scheme: str, depth: int, warmup: int) -> float:
        """The predicted boundary; NaN for a warm-up without a boundary to fit."""
        for at in self.fitted:
            if at.warmup == warmup:
                return at.rate * self.slopes[at.place] / self.slopes[scheme, depth]
        return math.nan

    def errors(self, boundaries: Sequence[Boundary], known: bool = False) -> np.ndarray:
        """In decades, over all boundaries but those that were fitted; ``known``: over those with both sides alone."""
        told = [b for b in boundaries if b not in self.fitted and (b.known or not known)]
        found = np.array([b.error(self.rate(*b.place, b.warmup)) for b in told])
        return found[np.isfinite(found)]


def fitted(boundaries: Sequence[Boundary], fit: Place | None) -> tuple[Boundary, ...]:
    """For every warm-up the boundary that constants are read off: the one asked for, or the first that is known."""
    found = []
    for warmup in dict.fromkeys(b.warmup for b in boundaries):
        known = [b for b in boundaries if b.warmup == warmup and b.known and fit in (None, b.place)]
        found += known[:1]
    return tuple(found)
