"""`sweep`: every case of a plan measured beside its law, one row at a time, from where a file of it left off."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array

import gradflow
from gradflow import checks, precision, profiles
from gradflow.comparing.comparisons import Progress, ends
from gradflow.comparing.ensembles import Ensemble, seeds_of
from gradflow.factors import FACTORS, Profile
from gradflow.sweeping import store as sweep_store
from gradflow.sweeping.axes import blocks_of, definition, schemes_of
from gradflow.sweeping.plan import AXES, Case, Plan
from gradflow.sweeping.result import Sweep
from gradflow.verdicts import per_layer

FAILURES = (ValueError, ArithmeticError, MemoryError, jax.errors.JaxRuntimeError)  # of one case, not of the program
KEPT = 8  # programs that stay compiled: each holds some 60 MB, and is not needed again


def sweep(
    schemes: Any,
    blocks: Any = ("mlp:relu",),
    depths: Any = (24,),
    widths: Any = (128,),
    seeds: int = 4,
    *,
    path: str | Path = "sweep.sqlite",
    norm: str = "layernorm",
    init: str = "unit",
    final_norm: bool = False,
    tokens: int = 1,
    token_cosine: float = 0.0,
    cotangent_cosine: float = 0.0,
    key: int = 0,
    dtype: str = "float64",
    retry: bool = False,
    progress: Progress | None = None,
) -> Sweep:
    """Measure scheme × block × depth × width × seed, each network a row in a file as soon as it is measured.

    A run that was stopped, at whatever moment, goes on when it is called again: no row is lost, none is there twice. A network's
    figures are those that `gradflow.compare` finds, and depend on its own case alone, not on what else was run or in which order;
    so a sweep may grow: with the same settings, any axis may be given more values later.

    Parameters
    ----------
    schemes : str, Scheme, StreamScheme, or a sequence of them
        As for `gradflow.compare`.
    blocks : str, Branch, or a sequence
        Each is a block: ``"attention,mlp:gelu"``, a branch, or a tuple of branches.
    depths, widths : int or sequence of int
        Blocks, and widths.
    seeds : int
        Networks of each; seed i is the i-th of `gradflow.compare`.
    path : str or Path
        The file, SQLite. One that holds a sweep of the same settings is gone on with, any other is refused.
    norm, init, final_norm, tokens, token_cosine, cotangent_cosine, key, dtype
        As for `gradflow.compare`, the same for all.
    retry : bool
        Whether cases that failed in an earlier run are run again.
    progress : callable, optional
        Called with (cases done, cases in all), those of earlier runs included.

    Returns
    -------
    Sweep
        All rows; a case that cannot be measured is a row with its ``error``.

    Raises
    ------
    ValueError
        For an argument out of range, a combination that cannot be built, or a file that is not this sweep's; nothing is run then.
    """
    rows, branches = schemes_of(schemes), blocks_of(blocks)
    number = checks.integer("tokens", tokens, 1)
    settings: dict[str, Any] = {"norm": norm, "init": init, "final_norm": bool(final_norm), "tokens": number}
    for name, value in (("token_cosine", token_cosine), ("cotangent_cosine", cotangent_cosine)):
        settings[name] = checks.cosine(name, value, number)
    settings["dtype"] = precision.resolve(dtype)
    deep, wide = checks.integers("depths", depths, 1), checks.integers("widths", widths, 2)
    stated = settings | {"key": checks.key(key), "device": jax.default_backend()}
    defined = {name: definition(each) for name, each in (*rows.items(), *branches.items())}
    plan = Plan(tuple(rows), tuple(branches), deep, wide, checks.integer("seeds", seeds, 1), stated, defined)
    ensembles = {}
    for place in itertools.product(*(getattr(plan, axis) for axis in AXES)):
        scheme, block, depth, d = place
        ensembles[place] = Ensemble.make(rows[scheme], branches[block], depth, d, **settings)
    with precision.scope(settings["dtype"]):
        keys = seeds_of(key, plan.seeds)
    with sweep_store.writing(path, plan, retry) as store:
        done = len(store.done)
        if progress:
            progress(done, len(plan))
        for ensemble, cases in _in_order(ensembles, plan.seeds):
            for case, row in _rows(ensemble, [case for case in cases if case not in store.done], keys):
                store.add(case, row)
                done += 1
                if progress:
                    progress(done, len(plan))
    return Sweep.open(path)


def _in_order(ensembles: Mapping[tuple, Ensemble], seeds: int) -> Iterator[tuple[Ensemble, list[Case]]]:
    """Ensembles with their cases; those that one compilation serves come together."""
    programs: dict[Any, list[tuple]] = {}
    for place, ensemble in ensembles.items():
        programs.setdefault(ensemble.program, []).append(place)
    for i, places in enumerate(programs.values()):
        for place in places:
            yield ensembles[place], [Case._make((*place, seed)) for seed in range(seeds)]
        if i % KEPT == KEPT - 1:
            jax.clear_caches()


def _rows(ensemble: Ensemble, cases: list[Case], keys: Array) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The rows of cases of one ensemble; one at a time, so that no figure depends on how many there are."""
    if not cases:
        return
    made_by = {"made_by": f"gradflow {gradflow.__version__}, jax {jax.__version__}"}
    law, why = ensemble.law()
    size, dtype = len(ensemble.stack.block), ensemble.stack.dtype
    lawful = {} if law is None else {f"law_{name}": value for name, value in figures(law, size).items()}
    for name in ("sd_exact", "sd_trunk"):
        if (sd := getattr(law, name, None)) is not None:
            lawful[f"law_{name}"] = float(sd[0])
    numbers = functools.cache(lambda: ensemble.numbers(keys[:1]))
    for case in cases:
        row = made_by | lawful | ({"no_law": why} if why else {})
        try:
            with precision.scope(dtype):
                measured = ensemble.measured(keys[case.seed : case.seed + 1], numbers())
            profiles.refuse_lost(measured, dtype)
            row |= figures(measured, size)
        except FAILURES as error:
            row["error"] = " ".join(str(error).split())[:300]
        yield case, row


def figures(p: Profile, size: int) -> dict[str, float]:
    """A network's row: ends, and each factor's geometric mean over sub-layers; ``size`` of them are a block."""
    factors = {f"factor_{name}": per_layer(p, name) for name in (*FACTORS, "net") if getattr(p, name) is not None}
    return {name: float(value) for name, value in (ends(p, size) | factors).items()}
