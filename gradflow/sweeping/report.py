"""A `Sweep` as a table of at most 100 columns, and as one figure."""

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import LogLocator, NullLocator
from rich.console import Group
from rich.text import Text

from gradflow import checks, plots
from gradflow.comparing.report import MARKERS, short
from gradflow.intervals import exp
from gradflow.report import grid
from gradflow.sweeping.result import Pool, Sweep

ROWS_SHOWN = 200
ERRORS_SHOWN = 3


def table(s: Sweep) -> Group:
    """One row for each scheme, depth and width, a table for each block; what failed and what is missing is said below."""
    held, pools = s.plan.settings, s.pools()
    parts = [f"{held['norm']} (ε = 0)", f"init {held['init']}", f"tokens = {held['tokens']}"]
    parts += [f"{name.replace('_', ' ')} {held[name]:g}" for name in ("token_cosine", "cotangent_cosine") if held[name]]
    parts += ["final norm"] * held["final_norm"]
    parts += [f"{s.plan.seeds} seeds from key {held['key']}", held["dtype"], held["device"], str(s.path)]
    shown: list[Any] = [Text(" · ".join(parts), style="dim")]
    for block in s.plan.blocks:
        columns = ("scheme", "L", "d", "seeds", "exact", "seen", "seen/law", "sd", "seen", "trunk", "seen")
        rows = grid(f"f = {block.replace(',', ' + ')}: gain of the gradient, law and beside it as seen", columns)
        mine = [pool for pool in pools if pool.block == block]
        for pool in mine[:ROWS_SHOWN]:
            rows.add_row(*_cells(pool))
        shown += ["", rows] if len(shown) == 1 else [rows]
        if len(mine) > ROWS_SHOWN:
            shown.append(Text(f"{len(mine) - ROWS_SHOWN} more; all rows are in the file, and in --csv and --parquet."))
    return Group(*shown, *map(Text, _notes(s, pools)))


def _cells(pool: Pool) -> list[str]:
    cells = [pool.scheme, str(pool.depth), str(pool.d), str(len(pool.rows))]
    if not pool.rows:
        return [*cells, "failed"]
    exact, trunk = pool.seen("exact"), pool.seen("trunk")
    gap, error = gap_of(pool)
    ratio = short(float(exp(gap))) + (f" ± {float(exp(gap)) * error:.2g}" if np.isfinite(gap + error) else "")
    shown = [exp(pool.law("exact")), exp(exact), ratio, pool.law("exact", "law_sd"), pool.sd("exact")]
    shown += [exp(pool.law("trunk")), exp(trunk)]
    return cells + [each if isinstance(each, str) else short(float(each)) for each in shown]


def gap_of(pool: Pool) -> tuple[float, float]:
    """Mean measured log gain of the gradient less the law's, and the standard error of the mean."""
    return pool.seen("exact") - pool.law("exact"), pool.sd("exact") / len(pool.rows) ** 0.5


def _notes(s: Sweep, pools: list[Pool]) -> list[str]:
    """What the columns are, the verdict, and what is not in the table."""
    said = [
        "exact, trunk: end-to-end gain, with F = 0 the trunk's. seen: geometric mean over seeds; sd: standard deviation of the "
        "log gain over seeds; seen/law: with its standard error.",
        *sorted({f"No law: {row['no_law']}." for row in s if row["no_law"]}),
    ]
    told = [(pool, *gap_of(pool)) for pool in pools if pool.rows and np.isfinite(gap_of(pool)[0])]
    if told:
        far, gap, _ = max(told, key=lambda each: abs(each[1]) / each[0].depth)
        where = f"{far.scheme}, {far.block}, L = {far.depth}, d = {far.d}"
        words = f"Verdict: law and measurement differ by at most {100 * np.expm1(abs(gap) / far.depth):.2g} % per block ({where})"
        known = [(gap, error) for _, gap, error in told if np.isfinite(error)]
        near = sum(abs(gap) <= 2 * error for gap, error in known)
        said.append(words + (f"; {near} of {len(known)} means lie within two standard errors." if known else "."))
    if s.failed:
        errors = list(dict.fromkeys(row["error"] for row in s.failed))
        said.append(f"{len(s.failed)} of {len(s)} networks failed: {'; '.join(errors[:ERRORS_SHOWN])}.")
    if s.missing:
        said.append(
            f"{s.missing} of {len(s.plan)} cases are still to be run; the sweep that made {s.path} goes on there."
        )
    return said


def figure(s: Sweep, curve: str = "exact") -> plots.Picture:
    """Panels: blocks down, widths across; or blocks alone, over width, where there is one depth."""
    checks.one_of("curve", curve, ("exact", "trunk"))
    over_width = len(s.plan.depths) == 1 < len(s.plan.widths)
    x, across = ("d", s.plan.depths) if over_width else ("depth", s.plan.widths)
    size = (4.4 * len(across) + 2.0, 3.3 * len(s.plan.blocks) + 0.5)
    picture = plots.Picture(figsize=size, layout="constrained")
    axes = picture.subplots(len(s.plan.blocks), len(across), sharex=True, sharey="row", squeeze=False)
    pools = [pool for pool in s.pools() if pool.rows]
    for row, block in zip(axes, s.plan.blocks, strict=True):
        for ax, fixed in zip(row, across, strict=True):
            here = [pool for pool in pools if pool.block == block and (over_width or pool.d == fixed)]
            _panel(ax, here, s.plan.schemes, x, curve)
            ax.set_title(f"{block}, {'L' if over_width else 'd'} = {fixed}", fontsize=10, loc="left")
    for ax in axes[-1]:
        ax.set_xlabel("width d" if over_width else "depth L (blocks)")
    for ax in axes[:, 0]:
        ax.set_ylabel("gain ‖∂L/∂x_0‖ / ‖∂L/∂x_L‖" if curve == "exact" else "gain of the trunk (F = 0)")
    handles = {label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if handles:
        picture.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8.5, frameon=False)
    picture.suptitle(
        f"{curve}, {s.plan.settings['norm']}: laws as lines, measured as markers ± 1 sd over networks", fontsize=11
    )
    return picture


def _panel(ax: Any, pools: list[Pool], schemes: tuple[str, ...], x: str, curve: str) -> None:
    """A colour and a marker for each scheme; markers at one place stand side by side."""
    colours = mpl.colormaps["tab20" if len(schemes) > 10 else "tab10"].colors  # type: ignore[attr-defined]
    for i, scheme in enumerate(schemes):
        mine = sorted((pool for pool in pools if pool.scheme == scheme), key=lambda pool: getattr(pool, x))
        if not mine:
            continue
        at = np.array([getattr(pool, x) for pool in mine], float)
        law = np.array([pool.law(curve) for pool in mine])
        mean, sd = (np.array(each) for each in zip(*((p.seen(curve), p.sd(curve)) for p in mine), strict=True))
        gain, sd = exp(mean), np.nan_to_num(sd)
        style: dict[str, Any] = {"color": colours[i % len(colours)]}
        ax.plot(at, exp(law), lw=1.4, **style)
        beside = at * 1.03 ** (i - (len(schemes) - 1) / 2)
        error = np.abs(exp(mean + np.multiply.outer([-1, 1], sd)) - gain)
        ax.errorbar(beside, gain, error, fmt=MARKERS[i % len(MARKERS)], ms=5, capsize=2, lw=1, label=scheme, **style)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticks = sorted({getattr(pool, x) for pool in pools})
    ax.set_xticks(ticks, map(str, ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # a gain between 0.4 and 3 has a tick beside 1, too
    for formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        formatter(lambda gain, _: f"{gain:g}")
    plots.plain(ax)
