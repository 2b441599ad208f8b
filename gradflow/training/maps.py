"""`TrainabilityMap`: final loss over learning rate, depth, warm-up and scheme, and the boundary beside predictions from init."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gradflow.factors import plain
from gradflow.training.boundaries import Boundary, Place, Prediction, fitted, seen
from gradflow.training.results import LEARNS, TrainingRun


@dataclass(frozen=True)
class Cell:
    """One run of a map.

    Attributes
    ----------
    scheme, depth, warmup, lr : str, int, int, float
    loss, held_out : float
        Mean of the last 50 steps; held out, at the end, on fixed batches. Nats a byte, not finite where the run diverged.
    first : float
        What the first step really moved of the last stream, relative, on four sequences.
    learns : bool
        Whether ``held_out`` is .15 nats or more below the bytes' frequencies alone.
    """

    scheme: str
    depth: int
    warmup: int
    lr: float
    loss: float
    held_out: float
    first: float
    learns: bool

    @classmethod
    def of(cls, run: TrainingRun) -> "Cell":
        """From a run that has ended."""
        s, held = run.settings, float(run.held_out[-1])
        learns = run.diverged is None and held < s["unigram"] - LEARNS
        facts = (s["scheme"], s["depth"], s["warmup"], s["lr"])
        return cls(*facts, run.final_loss, held, float(run.series["stream_move"][0]), learns)

    @property
    def outcome(self) -> str:
        """``"learns"``, ``"stuck"`` near the frequencies, or ``"diverges"``."""
        return "learns" if self.learns else "stuck" if math.isfinite(self.loss) else "diverges"


@dataclass(frozen=True, repr=False)
class TrainabilityMap:
    """A map; iterates over its cells, in the order of its axes.

    Attributes
    ----------
    settings : dict
        What all runs share.
    cells : tuple of Cell
    slopes : mapping from a predictor's name to a mapping from (scheme, depth) to float
        B of `gradflow.training.first_step.PREDICTORS`: the boundary is predicted at C/B.
    fit : (scheme, depth), optional
        Whose boundary C is read off; by default the first that has rates on both sides. One C a warm-up: what warm-up does is
        not predicted.
    """

    settings: dict[str, Any]
    cells: tuple[Cell, ...]
    slopes: Mapping[str, Mapping[Place, float]]
    fit: Place | None = None

    def __iter__(self) -> Any:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def __getitem__(self, place: tuple[str, int, int, float]) -> Cell:
        """By (scheme, depth, warm-up, lr)."""
        return self._cells[place]

    @cached_property
    def _cells(self) -> dict[tuple[str, int, int, float], Cell]:
        return {(c.scheme, c.depth, c.warmup, c.lr): c for c in self.cells}

    def axis(self, name: str) -> list[Any]:
        """Values of ``"scheme"``, ``"depth"``, ``"warmup"`` or ``"lr"``; numbers in rising order."""
        values = list(dict.fromkeys(getattr(c, name) for c in self.cells))
        return values if name == "scheme" else sorted(values)

    @property
    def level(self) -> float:
        """The held-out loss that parts learning from not: .15 nats below the entropy of the bytes' frequencies."""
        return self.settings["unigram"] - LEARNS

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        """Seen, one for each scheme, depth and warm-up: between the largest rate that learns and the next."""
        learns: dict[tuple[str, int, int], dict[float, bool]] = {}
        for c in self.cells:
            learns.setdefault((c.scheme, c.depth, c.warmup), {})[c.lr] = c.learns
        return seen(learns)

    @cached_property
    def predictions(self) -> dict[str, Prediction]:
        """By predictor."""
        at = fitted(self.boundaries, self.fit)
        return {name: Prediction(name, slopes, at) for name, slopes in self.slopes.items()}

    def errors(self) -> dict[str, dict[str, float]]:
        """Of each predictor, in decades of learning rate: median, largest and number over the boundaries that were not fitted
        and have both sides (``known``); and over those of which one side is known, how many are on the wrong one.
        """
        found = {}
        one_sided = [b for b in self.boundaries if not b.known]
        for name, prediction in self.predictions.items():
            known, wrong = prediction.errors(self.boundaries, known=True), prediction.errors(one_sided)
            ends = {"median": float(np.median(known)), "largest": float(known.max())} if known.size else {}
            found[name] = ends | {"known": known.size, "one_sided": wrong.size, "wrong_side": int((wrong > 0).sum())}
        return found

    @property
    def verdict(self) -> str:
        """What learns where, and which prediction holds."""
        from gradflow.training import map_report

        return map_report.verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Settings, cells, boundaries, predictions and their errors as JSON-ready Python; what is undefined is ``None``."""
        edges = []
        for b in self.boundaries:
            rates = {name: plain(p.rate(*b.place, b.warmup)) for name, p in self.predictions.items()}
            limits = {"low": b.low or None, "high": plain(b.high), "rate": plain(b.rate)}
            edges.append({"scheme": b.scheme, "depth": b.depth, "warmup": b.warmup} | limits | {"predicted": rates})
        slopes = {
            name: [{"scheme": scheme, "depth": depth, "slope": plain(value)} for (scheme, depth), value in each.items()]
            for name, each in self.slopes.items()
        }
        fit = [{"scheme": b.scheme, "depth": b.depth, "warmup": b.warmup} for b in fitted(self.boundaries, self.fit)]
        return {
            "settings": {name: plain(value) for name, value in self.settings.items()},
            "level": self.level,
            "cells": [{k: plain(v) for k, v in asdict(c).items()} | {"outcome": c.outcome} for c in self.cells],
            "boundaries": edges,
            "slopes": slopes,
            "fitted": fit,
            "errors": self.errors(),
            "verdict": self.verdict,
        }

    def plot(self, path: str | None = None) -> Any:
        """Draw a map for each scheme and warm-up: loss as colour, the boundary and its predictions as lines; written where
        ``path`` is given.
        """
        from gradflow import plots
        from gradflow.training import map_figure

        return plots.save(map_figure.figure(self), path)

    def __str__(self) -> str:
        from gradflow import report
        from gradflow.training import map_report

        return report.text(map_report.table(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report
        from gradflow.training import map_report

        return report.html(map_report.table(self), figure=self.plot())
