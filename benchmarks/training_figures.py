"""Figures of their own for questions that are not about the course of training; drawn from docs/training's files."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from gradflow.plots import Picture, plain

COLOURS = {"post-ln": "#D55E00", "pre-ln": "#0072B2"}
TOLERANCE = 0.1  # nats above the best


def by_setting(runs: list[dict[str, Any]], *names: str) -> dict[tuple, list[dict[str, Any]]]:
    """Runs by these settings, in the order that they first come."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for r in runs:
        found.setdefault(tuple(r[name] for name in names), []).append(r)
    return found


def rates(found: dict[str, Any]) -> Picture:
    """Held-out loss over the peak rate, every run a point; shaded: within .1 nats of the best mean."""
    picture = Picture(figsize=(6.5, 4), layout="constrained")
    ax = picture.subplots()
    for (scheme,), runs in by_setting(found["runs"], "scheme").items():
        _curve(ax, runs, scheme)
    ax.axhline(found["settings"]["unigram"], color="0.4", ls="--", lw=0.9, label="bytes' frequencies alone")
    ax.set_xscale("log")
    ax.set_xlabel("peak learning rate, behind 200 steps of warm-up")
    ax.set_ylabel("held-out loss, nats a byte")
    plain(ax)
    ax.legend(frameon=False, fontsize=9)
    return picture


def small_text(found: dict[str, Any]) -> Picture:
    """Held-out loss over training loss as a small text is learned, every run a curve, and the gap between them over steps."""
    picture = Picture(figsize=(9.5, 4), layout="constrained")
    both, gap = picture.subplots(1, 2)
    for (scheme,), runs in by_setting(found["runs"], "scheme").items():
        for i, r in enumerate(runs):
            steps, train, held = (np.array(r["evaluated"][name], float) for name in ("steps", "train", "held_out"))
            style = {"color": COLOURS[scheme], "lw": 1.2, "marker": "o", "ms": 3.5, "label": None if i else scheme}
            both.plot(train, held, **style)
            gap.plot(steps, held - train, **style)
    both.axline((2, 2), slope=1, color="0.5", ls="--", lw=0.9, label="held out = train")
    both.set_xlabel("training loss, nats a byte")
    both.set_ylabel("held-out loss, nats a byte")
    both.invert_xaxis()  # learning goes to the right
    gap.set_xlabel("step")
    gap.set_ylabel("held-out loss less training loss")
    for ax in (both, gap):
        plain(ax)
    both.legend(frameon=False, fontsize=9)
    return picture


def _curve(ax: Axes, runs: list[dict[str, Any]], scheme: str) -> None:
    means = {lr: np.mean([r["held_out"] for r in same]) for (lr,), same in sorted(by_setting(runs, "lr").items())}
    ax.plot([*means], [*means.values()], color=COLOURS[scheme], lw=1.4, label=scheme)
    ax.scatter([r["lr"] for r in runs], [r["held_out"] for r in runs], s=16, color=COLOURS[scheme])
    best = min(means.values())
    ax.axhspan(best, best + TOLERANCE, color=COLOURS[scheme], alpha=0.12, lw=0)


def norms(found: dict[str, Any]) -> Picture:
    """Held-out loss, and what each rounding of the weights adds to it, every run a point."""
    picture = Picture(figsize=(10, 3.8), layout="constrained")
    left, right = picture.subplots(1, 2, width_ratios=[1, 2])
    groups = by_setting(found["runs"], "scheme", "norm")
    kinds = [name for name in found["runs"][0]["rounded"] if name != "trained"]
    every = [r["rounded"][kind] - r["rounded"]["trained"] for r in found["runs"] for kind in kinds]
    for i, ((scheme, norm), runs) in enumerate(groups.items()):
        style = {"color": COLOURS[scheme], "marker": "o" if norm == "layernorm" else "^", "s": 26, "alpha": 0.85}
        left.scatter([i] * len(runs), [r["held_out"] for r in runs], **style)
        for j, kind in enumerate(kinds):
            added = [r["rounded"][kind] - r["rounded"]["trained"] for r in runs]
            where = np.full(len(runs), j + (i - (len(groups) - 1) / 2) * 0.16)
            right.scatter(where, added, label=f"{scheme}, {norm}" if j == 0 else None, **style)
    left.set_xticks(range(len(groups)), [f"{scheme}\n{norm}" for scheme, norm in groups], fontsize=8)
    left.set_xlim(-0.5, len(groups) - 0.5)
    left.set_title("held-out loss, nats a byte", fontsize=10, loc="left")
    right.set_xticks(range(len(kinds)), kinds)
    right.set_yscale("symlog", linthresh=1e-3)
    right.set_ylim(min(-1e-3, 2 * min(every)), 2 * max(every))
    right.axhline(0, color="0.5", lw=0.8)
    right.set_title("added by rounding the matrices: step size by row or tensor", fontsize=10, loc="left")
    right.legend(frameon=False, fontsize=8, loc="lower right")
    for ax in (left, right):
        plain(ax, "y")
    return picture
