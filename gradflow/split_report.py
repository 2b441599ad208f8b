"""A `Subspaces` as a table of at most 100 columns, and as one figure."""

from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from gradflow import plots
from gradflow.report import grid, number
from gradflow.splits import NAMES, Subspaces

COLOURS = {"consensus": ("#0072B2", "o"), "differences": ("#D55E00", "s")}


def _mean(gains: np.ndarray) -> np.ndarray:
    """Root of the mean power over seeds."""
    return np.sqrt(np.mean(gains**2, 0))


def table(s: Subspaces) -> Group:
    """The four gains at the input, law and measurement, and a sentence."""
    ends = (*NAMES, "total")
    shown = grid(
        f"Gain from output to input, root of the mean power{': law, and beside it as seen' if s.law else ''}",
        ["cotangent in", *(name for end in ends for name in ((f"to {end}", "seen") if s.law else (f"to {end}",)))],
    )
    for start in NAMES:
        cells = []
        for ends in (("consensus",), ("differences",), NAMES):
            for law in [True, False] if s.law else [False]:
                power = sum(_mean(s.gain(start, end, law))[0] ** 2 for end in ends)
                cells.append(number(float(np.sqrt(power))))
        shown.add_row(start, *cells)
    c = s.settings
    parts: list[Any] = [c["scheme"], f"f = {c['branch']}" if "branch" in c else "", f"{c['depth']} blocks"]
    tokens = c["tokens"] if isinstance(c["tokens"], int) else f"{min(c['tokens'])}–{max(c['tokens'])}"
    parts += [
        f"d = {c['d']}",
        f"tokens = {tokens}",
        f"{len(s.measured['consensus'].net)} networks or states",
        c["dtype"],
    ]
    notes = [] if s.law else [f"No law: {s.why}."]
    return Group(Text(" · ".join(filter(None, parts)), style="dim"), "", shown, *map(Text, [*notes, verdict(s)]))


def verdict(s: Subspaces) -> str:
    """Which of the two survives."""
    kept = {name: np.sqrt(sum(_mean(s.gain(name, end))[0] ** 2 for end in NAMES)) for name in NAMES}
    better, worse = sorted(kept, key=kept.__getitem__, reverse=True)
    return (
        f"Verdict: a cotangent that lies in the {better} reaches the input {kept[better] / kept[worse]:.3g} times as strong as "
        f"one that lies in the {worse}."
    )


def figure(s: Subspaces) -> Any:
    """A panel per start: what arrives in each subspace, over depth; the law as lines."""
    picture, axes = plots._axes(9.0, 3.6, len(NAMES))
    for ax, start in zip(axes, NAMES, strict=True):
        for end in NAMES:
            colour, marker = COLOURS[end]
            seen = s.gain(start, end)
            x = np.arange(seen.shape[1])
            step = max(1, x.size // 24)
            ax.plot(
                x,
                _hidden(_mean(seen)),
                marker,
                color=colour,
                ms=4,
                ls="",
                markevery=step,
                label=f"in the {end}, measured",
            )
            if s.law:
                ax.plot(x, _hidden(s.gain(start, end, True)[0]), color=colour, lw=1.4, label=f"in the {end}, law")
        ax.set_yscale("log")
        ax.set_title(f"cotangent in the {start}", fontsize=10)
        ax.set_xlabel("sub-layers below (the output at the right)")
    axes[0].set_ylabel("‖part of the gradient‖ / ‖cotangent‖")
    axes[-1].legend(fontsize=8, frameon=False)
    return picture


def _hidden(gains: np.ndarray) -> np.ndarray:
    """What is 0 to rounding has no place on a log axis."""
    return np.where(gains > 1e-7 * np.max(gains), gains, np.nan)
