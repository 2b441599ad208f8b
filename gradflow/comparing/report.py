"""A `Comparison` as a table of at most 100 columns, and as one figure."""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from rich.console import Group
from rich.text import Text

from gradflow import plots
from gradflow.comparing.comparisons import Comparison, by_block, ends
from gradflow.factors import Profile
from gradflow.intervals import exp
from gradflow.report import grid, memory, number

MARKERS = "osD^vP*XhdpH<>"
ENDS = {"log_exact": "exact", "log_trunk": "trunk", "stream": "stream", "share": "share", "weight_grad_ratio": "dW"}
PANELS = {
    "stream": "stream: rms as it enters the block",
    "share": "share of the branches in the sum's power",
    "gradient": "gradient: ‖∂L/∂x_l‖ / ‖∂L/∂x_L‖",
    "weight_grad": "weight gradient of the block: ‖∂L/∂W‖",
}


def short(value: float) -> str:
    """Three digits in at most seven columns."""
    if not np.isfinite(value):
        return "–"
    text = f"{value:.3g}"
    return text if len(text) <= 7 else f"{value:.1e}"


def table(c: Comparison) -> Group:
    """One row a scheme, law and measurement (geometric mean over seeds) side by side."""
    s = c.settings
    shown = grid(
        "At initialisation: law, and beside it as seen (geometric mean over seeds)",
        ["", *(n for name in ENDS.values() for n in (name, "seen"))],
    )
    for entry in c.entries:
        measured, law = (
            dict.fromkeys(ENDS, np.nan) if p is None else ends(p, entry.size) for p in (entry.measured, entry.law)
        )
        for side in (measured, law):
            side |= {name: exp(side[name]) for name in ("log_exact", "log_trunk")}
        shown.add_row(entry.name, *(short(side[name]) for name in ENDS for side in (law, measured)))
    parts = [f"f = {s['branch']}", f"{s['norm']} (ε = {s['eps']:g})", f"init {s['init']}", f"L = {s['depth']} blocks"]
    parts += [
        f"d = {s['d']}",
        f"tokens = {s['tokens']}",
        *memory(s),
        f"{s['seeds']} seeds from key {s['key']}",
        s["dtype"],
    ]
    notes = [
        "exact, trunk: gain of the gradient, output to input. stream: rms as it enters the last block. share: the branches' "
        "part of the sum's power there. dW: largest over smallest ‖∂L/∂W‖ of two blocks.",
        *sorted({f"No law: {entry.why}." for entry in c.entries if entry.why}),
        *composites(c),
        verdict(c),
    ]
    return Group(Text(" · ".join(parts), style="dim"), "", shown, *(Text(note) for note in notes))


def composites(c: Comparison) -> list[str]:
    """What ∏R alone can do, beside the true gain, where several streams are mixed without a norm between."""
    said = []
    for e in c.entries:
        gains = e.measured.settings.get("composite")
        if gains:
            pair = f"{short(gains['forward'])} forward (largest |row sum|) and {short(gains['backward'])} back (column sum)"
            said.append(
                f"{e.name}: ∏R stretches by at most {pair}; the gradient's exact gain is {short(_gain(e.measured))}."
            )
    return said


def verdict(c: Comparison) -> str:
    """Which scheme keeps the gradient best and worst, and how far law and measurement are apart."""
    gains = {e.name: abs(np.mean(e.measured.log_exact[:, 0])) for e in c.entries}
    best, worst = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    gaps = {
        e.name: abs(np.mean(e.measured.log_exact[:, 0]) - e.law.log_exact[0, 0]) / e.measured.net.shape[1]
        for e in c.entries
        if e.law is not None
    }
    said = f"Verdict: the end-to-end gain is nearest to 1 in {best}"
    said += "." if best == worst else f", farthest from it in {worst} ({number(_gain(c[worst].measured), 3)})."
    if gaps:
        far = max(gaps, key=gaps.__getitem__)
        said += f" Law and measurement differ by at most {100 * np.expm1(gaps[far]):.2g} % per sub-layer ({far})."
    return said


def _gain(p: Profile) -> float:
    return float(np.exp(np.mean(p.log_exact[:, 0])))


def figure(c: Comparison) -> Figure:
    """Four panels over depth: forward on the left, backward on the right; laws as lines, measurements as markers."""
    picture = plots.Picture(figsize=(11.5, 7.2), layout="constrained")
    axes = picture.subplots(2, 2, sharex=True)
    panels = dict(zip(PANELS, (axes[0, 0], axes[1, 0], axes[0, 1], axes[1, 1]), strict=True))
    colours = mpl.colormaps["tab20" if len(c) > 10 else "tab10"].colors  # type: ignore[attr-defined]
    for i, entry in enumerate(c.entries):
        style: dict[str, Any] = {"color": colours[i % len(colours)]}
        for what, p in entry.both().items():
            for name, values in by_block(p, entry.size).items():
                drawn, x = np.where(values > 0, values, np.nan), np.arange(1, len(values) + 1)
                if what == "law":
                    panels[name].plot(x, drawn, lw=1.4, **style)
                else:
                    step = max(1, len(values) // 12)
                    marker, every = MARKERS[i % len(MARKERS)], (i % step, step)  # markers of equal curves side by side
                    panels[name].plot(x, drawn, marker, ms=4.5, markevery=every, label=entry.name, **style)
    for name, ax in panels.items():
        ax.set_title(PANELS[name], fontsize=10, loc="left")
        ax.set_yscale("log")
        plots.plain(ax)
    for ax in axes[1]:
        ax.set_xlabel("block")
    handles, names = axes[0, 0].get_legend_handles_labels()
    picture.legend(handles, names, loc="outside right center", fontsize=8.5, frameon=False)
    s = c.settings
    title = f"{s['branch']}, L = {s['depth']} blocks, d = {s['d']}, {s['norm']}: laws as lines, measured as markers"
    picture.suptitle(title, fontsize=11)
    return picture
