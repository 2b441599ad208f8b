"""`trainability`: a run of `gradflow.warmup` for every point of a map, and what the first step said of it beforehand."""

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradflow import checks
from gradflow.schemes import Scheme
from gradflow.training.boundaries import Place
from gradflow.training.data import text_of
from gradflow.training.first_step import PREDICTORS, first_step
from gradflow.training.maps import Cell, TrainabilityMap
from gradflow.training.run import Progress
from gradflow.training.run import warmup as train
from gradflow.training.settings import Settings, product

AXES = ("scheme", "depth", "warmup", "lr")
OWN = (*AXES, "key", "name", "equation", "labels", "normed")  # of one run, not of the map


def trainability(
    scheme: str | Scheme | Sequence[str | Scheme] = ("post-ln", "pre-ln", "admin", "deepnorm", "sandwich"),
    depth: int | Sequence[int] = (3, 6, 12),
    lr: float | Sequence[float] = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    warmup: int | Sequence[int] = (0, 100),
    *,
    steps: int = 300,
    every: int = 50,
    d: int = 64,
    heads: int = 4,
    tokens: int = 32,
    batch: int = 8,
    fit: Place | None = None,
    text: str | Path | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> TrainabilityMap:
    """Map where training works: final held-out loss over learning rate × depth × warm-up, the boundary seen and predicted.

    Every point is a run of `gradflow.warmup`, a file in ``out`` of the same kind: a map that was killed goes on bit for bit where
    it was, grows when an axis is given more values, and its runs open with `gradflow.training.read`. Learning rates are run from
    coarse to fine and shallow networks first, so that the outline is there early.

    Beside it stand predictions made at initialisation, without training (`gradflow.training.first_step.PREDICTORS`): each
    is a slope B, the boundary C/B, and C read off one boundary alone.

    Parameters
    ----------
    scheme, depth, lr, warmup
        The axes, as for `gradflow.warmup`; learning rates above 0.
    steps, every, d, heads, tokens, batch, text, out
        As for `gradflow.warmup`; small, as there are many runs.
    fit : (scheme, depth), optional
        The boundary that C is read off; by default the first that has learning rates on both sides.
    progress : callable, optional
        Called with (done, in all), in steps times blocks, which is what time goes with.
    **options
        Further ones of `gradflow.warmup`: key, block, norm, init, optimizer, schedule, eps, b1, b2, weight_decay, dtype.

    Returns
    -------
    TrainabilityMap

    Raises
    ------
    ValueError
        As `gradflow.warmup`; for a ``fit`` that is not on the map.
    """
    sizes = {"steps": steps, "every": every, "d": d, "heads": heads, "tokens": tokens, "batch": batch}
    given = inspect.signature(train).bind(
        **dict(zip(AXES, (scheme, depth, warmup, lr), strict=True)), **sizes, **options
    )
    given.apply_defaults()
    settings, varied = product({name: given.arguments[name] for name in Settings.__dataclass_fields__}, 1)
    _check(settings, varied, fit)
    found = text_of(text, 2 * tokens)
    total, done = sum(each.steps * each.depth for each in settings), 0
    cells: dict[str, Cell] = {}
    for each in _in_order(settings):
        own = {f.name: getattr(each, f.name) for f in dataclasses.fields(each)}
        shown = progress and (lambda at, _, each=each, start=done: progress(start + at * each.depth, total))
        run = train(**own, text=text, out=out, progress=shown)
        cells[each.name()] = Cell.of(run)  # type: ignore[arg-type]
        done += each.steps * each.depth
        if progress:  # a run that had ended before says nothing itself
            progress(done, total)
    slopes: dict[str, dict[Place, float]] = {name: {} for name in PREDICTORS}
    for each in {(s.row.name, s.depth): s for s in settings}.values():
        step = first_step(each, found)
        for name, slope in PREDICTORS.items():
            slopes[name][each.row.name, each.depth] = slope(step)
    shared = {name: value for name, value in run.settings.items() if name not in OWN}  # type: ignore[union-attr]
    return TrainabilityMap(
        shared | {"key": settings[0].key}, tuple(cells[each.name()] for each in settings), slopes, fit
    )


def _check(settings: Sequence[Settings], varied: Sequence[str], fit: Place | None) -> None:
    others = [name for name in varied if name not in AXES]
    if others:
        raise ValueError(f"{others[0]}: a map has one; its axes are {', '.join(AXES)}")
    for each in settings:
        if not each.lr > 0:
            raise ValueError(f"lr: needs numbers above 0, whose logarithm is an axis of the map, got {each.lr!r}")
    if fit is not None:
        names = [f"{each.row.name}, {each.depth}" for each in settings]
        checks.one_of("fit", ", ".join(map(str, fit)), names)


def _in_order(settings: Sequence[Settings]) -> list[Settings]:
    """Learning rates from coarse to fine (both halves, then theirs), within them shallow networks first."""
    rates = sorted({each.lr for each in settings})
    bits = max(len(rates) - 1, 1).bit_length()
    turn = {rate: int(f"{i:0{bits}b}"[::-1], 2) for i, rate in enumerate(rates)}
    return sorted(settings, key=lambda each: (turn[each.lr], each.depth))
