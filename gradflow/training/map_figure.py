"""A trainability map as a figure: schemes across, warm-ups down; learning rate on a log axis × depth."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from gradflow import plots
from gradflow.training.maps import TrainabilityMap

# Okabe–Ito colours, and a marker each
LINES = {
    "eta·|h|_1": ("#0072B2", "o"),
    "first step": ("#E69F00", "^"),
    "update bound": ("#D55E00", "s"),
    "gradient ratio": ("#CC79A7", "D"),
}
COLOURS = "viridis_r"
DOTTED = {"color": "black", "lw": 3, "ls": ":", "label": "beyond the map"}


def figure(m: TrainabilityMap) -> plots.Picture:
    """A panel for each scheme and warm-up."""
    schemes, warmups = m.axis("scheme"), m.axis("warmup")
    size = (2.3 * len(schemes) + 1.6, 1.0 + (0.9 + 0.42 * len(m.axis("depth"))) * len(warmups) + 0.4)
    picture = plots.Picture(figsize=size, layout="constrained")
    axes = picture.subplots(len(warmups), len(schemes), sharex=True, sharey=True, squeeze=False)
    shades: Any = None
    for row, warmup in zip(axes, warmups, strict=True):
        for ax, scheme in zip(row, schemes, strict=True):
            shades = _panel(ax, m, scheme, warmup)
            ax.set_title(f"{scheme}, warm-up {warmup}", fontsize=9, loc="left")
        row[0].set_ylabel("depth (blocks)")
    for ax in axes[-1]:
        ax.set_xlabel("learning rate")
    picture.colorbar(shades, ax=axes, label="held-out loss (nats a byte)", pad=0.01)
    # a line that one panel's data do not allow may stand in another
    handles = {label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    picture.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8.5, frameon=False)
    s = m.settings
    picture.suptitle(
        f"{s['branch']}, d = {s['d']}, {s['optimizer']}, {s['steps']} steps\n×: does not learn (loss above {m.level:.2f})",
        fontsize=10,
    )
    return picture


def _panel(ax: Axes, m: TrainabilityMap, scheme: str, warmup: int) -> Any:
    rates, depths = m.axis("lr"), m.axis("depth")
    cells = [[m[scheme, depth, warmup, rate] for rate in rates] for depth in depths]
    losses = np.ma.masked_invalid([[c.held_out for c in row] for row in cells])
    rows = np.arange(len(depths) + 1) - 0.5
    worst = m.settings["unigram"] + 0.1
    best = min((c.held_out for c in m.cells if math.isfinite(c.held_out)), default=0.0)
    shades = ax.pcolormesh(_edges(rates), rows, losses, cmap=COLOURS, vmin=min(best, worst - 0.1), vmax=worst)
    for y, row in enumerate(cells):
        for c in row:
            if not c.learns:
                ax.plot(c.lr, y, "x", color="white", ms=5, mew=1.2)
    _boundary(ax, m, scheme, warmup)
    for name, (colour, marker) in LINES.items():
        x = [m.predictions[name].rate(scheme, depth, warmup) for depth in depths]
        if np.isfinite(x).any():
            ax.plot(x, range(len(depths)), f"-{marker}", color=colour, ms=4, lw=1.3, mec="white", mew=0.5, label=name)
    ax.set_xscale("log")
    ax.set_facecolor("0.75")  # shows where a run diverged
    ax.set_xlim(*_edges(rates)[[0, -1]])
    ax.set_yticks(range(len(depths)), map(str, depths))
    ax.yaxis.set_minor_locator(NullLocator())
    return shades


def _boundary(ax: Axes, m: TrainabilityMap, scheme: str, warmup: int) -> None:
    """As seen: a wall through each depth's row; dotted, at the edge of the map, where no rate was tried beyond."""
    edges = _edges(m.axis("lr"))
    for b in m.boundaries:
        if (b.scheme, b.warmup) != (scheme, warmup):
            continue
        x = b.rate if b.known else edges[-1] if b.low else edges[0]
        y = m.axis("depth").index(b.depth)
        style: dict[str, Any] = {"color": "black", "lw": 3, "label": "boundary as seen"} if b.known else DOTTED
        ax.plot([x, x], [y - 0.5, y + 0.5], solid_capstyle="butt", **style)


def _edges(rates: list[float]) -> np.ndarray:
    """Borders of columns on a log axis; half a decade where there is one rate alone."""
    logs = np.log10(rates)
    steps = np.diff(logs) if len(logs) > 1 else np.array([0.5])
    return 10 ** np.concatenate([[logs[0] - steps[0] / 2], logs[:-1] + np.diff(logs) / 2, [logs[-1] + steps[-1] / 2]])
