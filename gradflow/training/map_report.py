"""Trainability maps as tables of at most 100 columns, and in plain sentences."""

import itertools
import math
from typing import Any

from rich.console import Group
from rich.text import Text

from gradflow.report import grid, number
from gradflow.training.boundaries import Boundary
from gradflow.training.first_step import PREDICTORS
from gradflow.training.maps import Cell, TrainabilityMap


def table(m: TrainabilityMap) -> Group:
    """Losses for each warm-up; boundaries seen and predicted; errors of the predictors; the verdict."""
    parts: list[Any] = [_heading(m), ""]
    rates = m.axis("lr")
    for warmup in m.axis("warmup"):
        title = f"Held-out loss at the end, nats a byte, warm-up {warmup}, by learning rate"
        losses = grid(title, ("scheme", "L", *(f"{rate:g}" for rate in rates)))
        for scheme in m.axis("scheme"):
            for depth in m.axis("depth"):
                losses.add_row(scheme, str(depth), *(_loss(m[scheme, depth, warmup, rate]) for rate in rates))
        parts.append(losses)
    parts += [_boundaries(m), _errors(m), Text(_note(m)), "", Text(f"Verdict: {m.verdict}")]
    return Group(*parts)


def _heading(m: TrainabilityMap) -> Text:
    s = m.settings
    facts = [
        f"byte-level language model on {s['text']} ({s['text_digest']})",
        *(f"f = {s['branch']}", f"{s['norm']} (ε = {s['eps']:g})", f"init {s['init']}", f"d = {s['d']}"),
        *(
            f"{s['heads']} heads",
            f"{s['batch']} sequences of {s['tokens']}",
            f"{s['optimizer']}({s['b1']:g}, {s['b2']:g})",
        ),
        *(f"{s['schedule']} schedule", f"{s['steps']} steps", f"key {s['key']}", s["dtype"]),
    ]
    return Text(" · ".join(facts), style="dim")


def _loss(c: Cell) -> str:
    """Marked where it does not learn."""
    return "diverges" if c.outcome == "diverges" else f"{c.held_out:.3f}{' ' if c.learns else '×'}"


def _boundaries(m: TrainabilityMap) -> Any:
    columns = ("scheme", "L", "warm-up", "seen", *PREDICTORS)
    shown = grid("Boundary: learning rate up to which it learns, seen and predicted", columns)
    for b in m.boundaries:
        rates = (p.rate(*b.place, b.warmup) for p in m.predictions.values())
        star = "*" if any(b in p.fitted for p in m.predictions.values()) else ""
        shown.add_row(b.scheme, str(b.depth), str(b.warmup), _seen(b) + star, *(number(rate, 2) for rate in rates))
    return shown


def _seen(b: Boundary) -> str:
    if b.known:
        return number(b.rate, 2)
    return f"> {b.low:g}" if b.low else f"< {b.high:g}"


def _errors(m: TrainabilityMap) -> Any:
    shown = grid(
        "Error of the predictions, decades of learning rate", ("predictor", "median", "largest", "of", "wrong side")
    )
    for name, e in m.errors().items():
        ends = (number(e.get(end), 2) for end in ("median", "largest"))
        shown.add_row(name, *ends, str(e["known"]), f"{e['wrong_side']} of {e['one_sided']}")
    return shown


def _note(m: TrainabilityMap) -> str:
    rates = m.axis("lr")
    steps = [math.log10(b / a) for a, b in itertools.pairwise(rates)]
    grain = f"; as seen it is known to {max(steps) / 2:.2g} decades" if steps else ""
    return (
        f"×: does not learn, {m.level:.3f} or more, .15 under the bytes' frequencies alone. Boundary: geometric "
        f"mean of the largest rate that learns and the next one tried{grain}; > or <: no rate was tried on the other side. "
        "Predictions are C/B, B from initialisation; *: where C was read off, one a warm-up. wrong side: of the boundaries known "
        "from one side."
    )


def verdict(m: TrainabilityMap) -> str:
    """How many runs learn, and which predictors do better than one rate for all."""
    learn = sum(c.learns for c in m.cells)
    said = [f"{learn} of {len(m)} runs learn."]
    errors = {name: e for name, e in m.errors().items() if e["known"]}
    if not errors:
        said.append(
            "No two boundaries have rates on both sides: nothing to predict; try larger learning rates or more depths."
        )
        return " ".join(said)
    plain = errors.pop("one rate")
    better = [name for name, e in errors.items() if _rank(e) < _rank(plain)]
    best = min(errors, key=lambda name: _rank(errors[name]))
    said.append(
        f"Best prediction: {best}, {number(errors[best]['median'], 2)} decades off (median of {errors[best]['known']}), on the "
        f"wrong side of {errors[best]['wrong_side']} of {errors[best]['one_sided']}; one rate for all: "
        f"{number(plain['median'], 2)} and {plain['wrong_side']}."
    )
    worse = [name for name in errors if name not in better]
    if worse:
        said.append(f"No better than one rate for all: {', '.join(worse)}.")
    return " ".join(said)


def _rank(e: dict[str, float]) -> tuple[float, float]:
    return e["median"], e["wrong_side"]
