"""A profile as text: what was run, the block's equation with the rms at each of its arrows, one row a sub-layer."""

from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradflow.factors import ENDS, Profile
from gradflow.report import grid, memory, number, profile_table


def profile(p: Profile) -> Group:
    """Heading, annotated equation, table of sub-layers, remarks."""
    parts: list[Any] = []
    if p.settings.get("what") == "measured" and "reading" not in p.settings:
        parts += [heading(p), ""]
        if p.settings.get("equation"):
            parts += [arrows(p), ""]
    parts += [profile_table(p), *map(Text, remarks(p))]
    return Group(*parts)


def heading(p: Profile) -> Text:
    """What was run, in one or two lines."""
    s = p.settings
    if s["scheme"] == "chain":
        parts = [f"chain of {s['depth']} layers", f"tokens = {s['tokens']}"]
    else:
        parts = [
            *(s["scheme"], s["equation"], f"f = {s['branch']}", f"{s['norm']} (ε = {s['eps']:g})"),
            *(f"{s['depth']} blocks", f"d = {s['d']}", f"tokens = {s['tokens']}", *memory(s), s["init"]),
            "final norm" if s["final_norm"] else "no final norm",
        ]
    if s.get("detached"):
        parts.append("detached norms: σ held constant in every Jacobian")
    if s.get("batch"):
        parts.append(f"batch of {s['batch']}")
    elif s["seeds"] > 1:
        parts.append(f"{s['seeds']} networks")
    probes = f" × {s['probes']}" if s["probes"] > 1 else ""
    return Text(
        " · ".join([*parts, f"key {s['key']}", f"cotangent: {s['cotangent']}{probes}", s["dtype"]]), style="dim"
    )


def arrows(p: Profile) -> Table:
    """The block's equation with forward rms and gradient at x, f, u and x', geometric mean over blocks and seeds."""
    names = p.settings["branch"].split(" + ")
    columns = ("", "x", "f(x), as added", "u = αx + βf(x)", "x'")
    out = grid(f"{p.settings['equation']}: rms at each arrow, forward → and gradient ← (1 at x')", columns)
    inside = np.asarray([label not in ENDS for label in p.labels])
    entering = _column(p, "stream_rms")[inside]
    leaving = np.append(_column(p, "stream_rms")[1:], np.nan)[inside]  # what enters the next sub-layer
    at_u = np.prod([_column(p, name)[inside] for name in ("affine", "projection", "norm")], axis=0)
    ahead = [entering, _column(p, "branch_rms")[inside], _column(p, "sum_rms")[inside], leaving]
    back = [_column(p, "net")[inside], at_u * _column(p, "branch_return")[inside], at_u, np.ones(inside.sum())]
    for k, name in enumerate(names):
        rows = slice(k, None, len(names))
        out.add_row(name, *(f"→ {number(_mean(values[rows]))}" for values in ahead))
        out.add_row("", *(f"← {number(_mean(values[rows]))}" for values in back))
    out.caption, out.caption_justify = "← under f(x): what comes back through the branch alone", "left"
    return out


def _column(p: Profile, name: str) -> np.ndarray:
    """A figure's geometric mean over seeds, (S,)."""
    return p.summary(name).mean


def _mean(values: np.ndarray) -> float:
    """Geometric mean of what is known."""
    known = values[np.isfinite(values)]
    with np.errstate(divide="ignore"):
        return float(np.exp(np.mean(np.log(known)))) if known.size else float("nan")


def remarks(p: Profile) -> list[str]:
    """What a reader must know besides."""
    found = []
    if p.settings.get("reverse_only"):
        found.append(f"reverse mode only: {', '.join(p.settings['reverse_only'])} (custom_vjp; no forward products)")
    if p.degenerate is not None and p.degenerate.any():
        found.append(f"{int(p.degenerate.sum())} token states have no variance: their direction is undefined")
    if p.weight_grad is not None:
        sizes = _column(p, "weight_grad")
        where = int(np.argmax(sizes))
        found.append(f"‖dL/dW‖ from {number(sizes.min())} to {number(sizes.max())}, largest at {p.labels[where]}")
    return found
