"""What `gradflow.what_if` returns: the network as it is, and every case of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradflow import checks
from gradflow.auditing.result import Audit, Worst, worst
from gradflow.counterfactuals.edits import Edit
from gradflow.factors import Profile, plain

SCHEMA, VERSION = "gradflow.what-if", 1


@dataclass(frozen=True)
class Case:
    """One placement or one edit.

    Attributes
    ----------
    name : str
        The row's name, or what was edited.
    equation : str
        Of every sub-layer.
    own : bool
        Whether it is the network as it is.
    edit : Edit or None
        The change, where it is one to a part.
    predicted, measured : Profile
        Along the own network's stream and gradient (`gradflow.counterfactuals.foretelling`); and of the changed network, exact.
    loss : tuple of float or None
        Of each text, where the model has a head that fits its cotangent.
    output_cosine : tuple of float
        Of each text: cosine of the last hidden state with that of the network as it is, mean over tokens.
    """

    name: str
    equation: str
    own: bool
    edit: Edit | None
    predicted: Profile
    measured: Profile
    loss: tuple[float, ...] | None
    output_cosine: tuple[float, ...]

    @property
    def worst(self) -> Worst:
        """The measured sub-layer that keeps least, and its smallest factor."""
        return worst(self.measured)

    @property
    def exact(self) -> tuple[float, float]:
        """Gain end to end, predicted and measured, geometric mean over texts."""
        return _mean(self.predicted.log_exact[:, 0]), _mean(self.measured.log_exact[:, 0])

    @property
    def first_to_last(self) -> float:
        """Gradient at the first block's input over that at the last one's, geometric mean over texts."""
        log, (_, last) = self.measured.log_exact, self._ends
        return _mean(log[:, 0] - log[:, last])

    @property
    def growth(self) -> float:
        """Rms of the stream as it enters the last block over that at the first, geometric mean over texts."""
        stream: Any = self.measured.stream_rms
        return _mean(np.log(stream[:, self._ends[1]] / stream[:, 0]))

    @property
    def _ends(self) -> tuple[int, int]:
        """Rows of the first and of the last block's first sub-layer."""
        settings = self.measured.settings
        sublayers = len(self.measured.labels) - bool(settings["final_norm"])
        return 0, sublayers - sublayers // settings["depth"]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready Python."""
        names = ("name", "equation", "own", "exact", "first_to_last", "growth", "loss", "output_cosine")
        found = {name: plain(getattr(self, name)) for name in names} | {"worst": self.worst._asdict()}
        return found | {name: getattr(self, name).to_dict() for name in ("predicted", "measured")}


@dataclass(frozen=True, repr=False)
class WhatIf:
    """A network as it is, and what it would be.

    Attributes
    ----------
    audit : Audit
        As it is.
    cases : tuple of Case
        The first one is the network as it is.
    settings : mapping
        What was asked.
    """

    audit: Audit
    cases: tuple[Case, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Case:
        """The case of that name."""
        names = [case.name for case in self.cases]
        return self.cases[names.index(checks.one_of("case", name, names))]

    @property
    def verdict(self) -> str:
        """One plain sentence."""
        from gradflow.counterfactuals import report as what_if_report

        return what_if_report.verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready Python; what is undefined is ``None``."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "settings": plain(dict(self.settings)),
            "cases": [case.to_dict() for case in self.cases],
            "verdict": self.verdict,
            "audit": self.audit.to_dict(),
        }

    def __str__(self) -> str:
        from gradflow import report
        from gradflow.counterfactuals import report as what_if_report

        return report.text(what_if_report.table(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report
        from gradflow.counterfactuals import report as what_if_report

        return report.html(what_if_report.table(self))


def _mean(logs: np.ndarray) -> float:
    return float(np.exp(np.mean(logs)))
