"""Training runs as one figure: losses, and what the lens saw over time."""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradflow import plots
from gradflow.training.results import TrainingRun, TrainingRuns

PANELS = {
    "loss": "loss (nats a byte; dashed: frequencies alone)",
    "radius_gain": "1/‖u‖, norms on the identity path",
    "exact": "exact: gain of the gradient, output to input",
    "token_cosine": "mean cosine of two tokens, last stream",
    "weight_grad": "weight gradient, first over last sub-layer",
    "stream_move": "what a step moves of the last stream",
}
LINEAR = ("loss", "token_cosine", "radius_gain")
SMOOTH = 10


def runs(c: TrainingRuns) -> Figure:
    """Six panels over steps on a log axis; runs that differ in their key alone share a colour."""
    picture = plots.Picture(figsize=(11.5, 6.4), layout="constrained")
    axes = dict(zip(PANELS, picture.subplots(2, 3, sharex=True).ravel(), strict=True))
    groups = list(c.groups)
    colours = mpl.colormaps["tab10" if len(groups) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    named: set[str] = set()
    for r in c.runs:
        group = r.setting
        style: dict[str, Any] = {"color": colours[groups.index(group) % len(colours)], "lw": 1.3}
        label = None if group in named else group
        named.add(group)
        _loss(axes["loss"], r, style | {"label": label})
        for name in [*PANELS][1:]:
            axes[name].plot(r.steps + 1, r.series[name], **style)
    axes["loss"].axhline(c[0].settings["unigram"], color="0.4", ls="--", lw=0.9)
    for name, ax in axes.items():
        ax.set_title(PANELS[name], fontsize=10, loc="left")
        ax.set_xscale("log")
        ax.set_yscale("linear" if name in LINEAR else "log")
        plots.plain(ax)
    for name in [*PANELS][3:]:
        axes[name].set_xlabel("step (from 1)")
    picture.legend(loc="outside lower center", ncols=min(len(groups), 4), fontsize=8.5, frameon=False)
    each = [_facts(r) for r in c.runs]
    picture.suptitle(", ".join(fact for fact in each[0] if all(fact in facts for facts in each)), fontsize=11)
    return picture


def _facts(r: TrainingRun) -> list[str]:
    s = r.settings
    return [s["branch"], f"{s['depth']} blocks", f"d = {s['d']}", s["scheme"], s["optimizer"], f"lr {s['lr']:g}"]


def _loss(ax: Axes, r: TrainingRun, style: dict[str, Any]) -> None:
    """Means over ten steps; a single step's loss hangs on its batch."""
    known = r.loss[np.isfinite(r.loss)]
    size = min(SMOOTH, max(known.size, 1))
    steps = np.arange(known.size)[: known.size // size * size].reshape(-1, size)
    if steps.size:
        ax.plot(steps.mean(1) + 1, known[steps].mean(1), **style)
