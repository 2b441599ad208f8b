"""`TrainingRun`: a run's losses, and every figure of the lens over time; `TrainingRuns`: several side by side."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gradflow import checks
from gradflow.factors import Profile, plain
from gradflow.training.store import Arrays, Store

LAST = 50  # steps that "the loss at the end" is a mean of
LEARNS = 0.15  # nats below the bytes' entropy from which on more than their frequencies has been learned
SPIKE = 20  # steps before, whose mean a spike stands out from
OF_PROFILE = {"seeds": 1, "probes": 1, "cotangent": "the batch's loss"}
STEP_FIGURES = (
    *("weight_norm", "update_norm", "update_rms", "update_ratio"),
    *("preactivation_rms", "preactivation_move", "preactivation_bound", "stream_move"),
)


@dataclass(frozen=True, repr=False)
class TrainingRun:
    """What training did, and what the lens saw; all arrays in the order of steps.

    Attributes
    ----------
    settings : what made it
    loss : (steps done,)
        Of each step's batch, before the step, in nats a byte.
    rate : (steps,)
        Learning rates.
    steps : (n,)
        The steps that were watched.
    profile : Profile
        Their factors, gains and forward figures: axis 0 of every array is the watched step, not a seed. ``weight_grad`` is that
        of the batch.
    figures : dict of (n, S) arrays, or (n, S + 1) with a final norm
        Per sub-layer ``weight_norm``, ``update_norm`` (Frobenius, over its matrices), ``update_ratio`` of the two, ``update_rms``
        (of the optimizer's direction, before the rate), ``preactivation_rms``, ``preactivation_move`` (rms change of what the
        first matrices give), ``preactivation_bound`` (η‖h‖₁, mean over tokens), ``stream_move`` (relative change of the stream
        behind the sub-layer).
    evaluated : (m,)
        Steps after which ``train`` and ``held_out``, losses on fixed batches of either part of the text, were taken.
    """

    settings: dict[str, Any]
    loss: np.ndarray
    rate: np.ndarray
    steps: np.ndarray
    profile: Profile
    figures: Mapping[str, np.ndarray]
    evaluated: np.ndarray
    train: np.ndarray
    held_out: np.ndarray

    @classmethod
    def from_log(cls, settings: dict[str, Any], log: Mapping[int, Arrays], rate: np.ndarray) -> "TrainingRun":
        """From a store's rows, at least one."""
        watched = [(step, row) for step, row in log.items() if "net" in row]
        figures = {name: np.stack([row[name] for _, row in watched]) for name in watched[0][1]}
        evaluated = [(step + len(row["loss"]), row) for step, row in log.items() if "held_out" in row]
        for name in ("loss", "held_out", "train"):
            figures.pop(name, None)
        own = {name: figures.pop(name) for name in STEP_FIGURES if name in figures}
        return cls(
            settings,
            np.concatenate([row["loss"] for row in log.values()]),
            rate,
            np.array([step for step, _ in watched], int),
            Profile.from_rows(figures, settings["labels"], settings | OF_PROFILE),
            own,
            np.array([step for step, _ in evaluated], int),
            *(np.array([row[name] for _, row in evaluated]) for name in ("train", "held_out")),
        )

    @property
    def name(self) -> str:
        """Its scheme, and what else tells runs apart."""
        return self.settings["name"]

    @property
    def setting(self) -> str:
        """The name without the key."""
        return ", ".join(part for part in self.name.split(", ") if not part.startswith("key "))

    @property
    def final_loss(self) -> float:
        """Mean of the last 50 steps' losses."""
        return float(np.mean(self.loss[-LAST:]))

    @property
    def gap(self) -> float:
        """Held-out loss less training loss at the end."""
        return float(self.held_out[-1] - self.train[-1]) if self.evaluated.size else float("nan")

    @property
    def diverged(self) -> int | None:
        """The first step whose loss is not finite; ``None`` where there is none."""
        bad = np.flatnonzero(~np.isfinite(self.loss))
        return int(bad[0]) if bad.size else None

    @property
    def learns(self) -> bool:
        """Whether the loss at the end is clearly below the entropy of the bytes' frequencies."""
        return self.diverged is None and self.final_loss < self.settings["unigram"] - LEARNS

    @cached_property
    def spikes(self) -> np.ndarray:
        """Steps whose loss is over the 20 losses before by more than 5 of their standard deviations, and by .3 nats."""
        found = []
        for step in range(SPIKE, self.loss.size):
            before = self.loss[step - SPIKE : step]
            if self.loss[step] > np.mean(before) + max(0.3, 5 * np.std(before)):
                found.append(step)
        return np.array(found, int)

    def at(self, step: int) -> Profile:
        """The profile of one watched step, or of the last one before it."""
        i = max(int(np.searchsorted(self.steps, checks.integer("step", step, 0), "right")) - 1, 0)
        rows = {f.name: getattr(self.profile, f.name) for f in fields(self.profile)}
        return replace(self.profile, **{k: v[i : i + 1] for k, v in rows.items() if isinstance(v, np.ndarray)})

    @cached_property
    def series(self) -> dict[str, np.ndarray]:
        """One number a watched step, (n,): what tables and figures show.

        ``radius_gain`` (geometric mean over the norms on the identity path), ``exact``, ``trunk`` and ``bound`` (end to end),
        ``token_cosine`` of the last stream, ``weight_grad`` (first sub-layer over the last), ``update_rms`` (mean),
        ``stream_move`` (last), ``preactivation`` (move over bound, mean).
        """
        p, f = self.profile, self.figures
        assert p.radius_gain is not None
        assert p.token_cosine is not None
        assert p.weight_grad is not None
        own = slice(0, self.settings["depth"] * self.settings["branches"])
        with np.errstate(divide="ignore", invalid="ignore"):
            normed = np.log(p.radius_gain[:, self.settings["normed"]])
            gains = {name: np.exp(getattr(p, f"log_{name}")[:, 0]) for name in ("exact", "trunk", "bound")}
            return gains | {
                "radius_gain": np.exp(normed.mean(1)) if normed.size else np.ones(len(self.steps)),
                "token_cosine": p.token_cosine[:, -1],
                "weight_grad": p.weight_grad[:, 0] / p.weight_grad[:, own][:, -1],
                "update_rms": f["update_rms"][:, own].mean(1),
                "stream_move": f["stream_move"][:, own][:, -1],
                "preactivation": (f["preactivation_move"] / f["preactivation_bound"])[:, own].mean(1),
            }

    @property
    def verdict(self) -> str:
        """Whether it learned, and what the factors say of why."""
        from gradflow.training import verdicts

        return verdicts.of_run(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it as lists; what is undefined is ``None``."""
        arrays = ("loss", "rate", "steps", "evaluated", "train", "held_out", "spikes")
        return {
            "settings": {name: plain(value) for name, value in self.settings.items()},
            **{name: plain(getattr(self, name)) for name in arrays},
            **{name: plain(getattr(self, name)) for name in ("final_loss", "gap", "diverged", "learns", "verdict")},
            "profile": self.profile.to_dict(),
            "figures": {name: plain(values) for name, values in self.figures.items()},
        }

    def plot(self, path: str | None = None) -> Any:
        """Draw loss and figures over time; returns the Matplotlib figure, and writes it where ``path`` is given."""
        return TrainingRuns((self,)).plot(path)

    def __str__(self) -> str:
        from gradflow import report
        from gradflow.training import tables

        return report.text(tables.run(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report
        from gradflow.training import tables

        return report.html(tables.run(self), figure=self.plot())


@dataclass(frozen=True, repr=False)
class TrainingRuns:
    """Runs of several settings; indexes and iterates like a tuple of `TrainingRun`, and by name."""

    runs: tuple[TrainingRun, ...]

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, which: int | str) -> TrainingRun:
        if isinstance(which, str):
            names = {run.name: run for run in self.runs}
            return names[checks.one_of("name", which, names)]
        return self.runs[which]

    @property
    def groups(self) -> "dict[str, tuple[TrainingRun, ...]]":
        """Runs that differ in their key alone, by setting."""
        found: dict[str, tuple[TrainingRun, ...]] = {}
        for run in self.runs:
            found[run.setting] = (*found.get(run.setting, ()), run)
        return found

    @property
    def verdict(self) -> str:
        """Which learn and which do not, and the figure that tells them apart."""
        from gradflow.training import verdicts

        return verdicts.of_runs(self)

    def to_dict(self) -> dict[str, Any]:
        """Every run, and the verdict."""
        return {"runs": [run.to_dict() for run in self.runs], "verdict": self.verdict}

    def plot(self, path: str | None = None) -> Any:
        """Draw all runs in the same panels; written where ``path`` is given."""
        from gradflow import plots
        from gradflow.training import figures

        return plots.save(figures.runs(self), path)

    def __str__(self) -> str:
        from gradflow import report
        from gradflow.training import tables

        return report.text(tables.runs(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report
        from gradflow.training import tables

        return report.html(tables.runs(self), figure=self.plot())


def read(path: str | Path) -> TrainingRun:
    """A stored run, finished or not.

    Raises
    ------
    ValueError
        If there is no such file, it is no run, or it has no steps yet.
    """
    from gradflow.training.schedules import rates

    file = Path(path)
    if not file.is_file():
        raise ValueError(f"path: no such file {str(path)!r}; runs are the .sqlite files in a folder that --out named")
    store = Store(file)
    s, log = store.settings, store.log()
    store.close()
    if not log:
        raise ValueError(f"path: {str(path)!r} has no steps yet")
    return TrainingRun.from_log(s, log, rates(s["schedule"], s["lr"], s["warmup"], s["steps"]))
