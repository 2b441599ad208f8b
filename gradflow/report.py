"""Results as tables: Rich for the shell (at most 100 columns), HTML with a picture for a notebook."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gradflow.contractions import Contraction, ContractionSweep
from gradflow.factors import FACTORS, Profile
from gradflow.intervals import Interval, gain_of, over_seeds
from gradflow.verdicts import per_layer

WIDTH = 100
ROWS_SHOWN = 12


def text(renderable: Any, width: int = WIDTH) -> str:
    """Render without colour to at most ``width`` columns."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False, force_jupyter=False, color_system=None)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())  # type: ignore[attr-defined]


def html(renderable: Any, figure: Any = None) -> str:
    """Render as HTML for a notebook, the figure below the table."""
    console = Console(width=WIDTH, file=io.StringIO(), record=True, force_jupyter=False, color_system=None)
    console.print(renderable)
    body = console.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>")
    if figure is None:
        return body
    from gradflow.plots import png  # Matplotlib loads only when a picture is wanted

    picture = base64.b64encode(png(figure)).decode()
    return f"{body}<img alt='cumulative gains over depth' src='data:image/png;base64,{picture}'/>"


def number(value: float | None, digits: int = 4) -> str:
    """A number in few columns; '–' where there is none."""
    if value is None or not np.isfinite(value):
        return "–"
    size = abs(value)
    return f"{value:.{digits - 1}e}" if size and not 1e-4 <= size < 1e5 else f"{value:.{digits}g}"


def span(interval: Interval | None) -> str:
    """The limits of an interval."""
    if interval is None or not np.isfinite(interval.low):
        return "–"
    return f"{number(interval.low, 3)} … {number(interval.high, 3)}"


def memory(settings: Mapping[str, Any]) -> list[str]:
    """What cross-attention asks, where a block has it."""
    if "memory_tokens" not in settings:
        return []
    return [f"memory of {settings['memory_tokens']}, cosine {settings['memory_cosine']:g}"]


def grid(title: str, columns: Sequence[str]) -> Table:
    """An empty table; the first column is text, the others are numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        min_width=min(len(title), WIDTH),
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def heading(settings: Any) -> Text:
    """What was run, in one or two lines."""
    parts = [settings["scheme"]]
    if settings.get("branch"):
        parts.append(f"{settings['equation']}, f = {settings['branch']}")
    parts.append(f"{settings['norm']} (ε = {settings['eps']:g})")
    parts += [f"L = {settings['depth']}", f"d = {settings['d']}", f"tokens = {settings['tokens']}"]
    if settings["reading"] != "recorded activations":
        parts.append(f"{settings['seeds']} seeds from key {settings['key']}")
    probes = f" × {settings['probes']} probes" if settings.get("probes") else ""
    parts += [f"reading: {settings['reading']}", f"cotangent: {settings['cotangent']}{probes}", settings["dtype"]]
    return Text(" · ".join(parts), style="dim")


def contraction(r: Contraction) -> Group:
    """One screen: estimate, bound, trunk and exact beside their laws, the factors, the verdict."""
    rows: list[tuple[str, Interval | None, np.ndarray]] = [
        ("bound ∏ (1 − c_j)/‖u_j‖", None, r.log_bound),
        ("trunk (F = 0)", r.trunk_law, r.log_trunk),
    ]
    if r.log_exact is not None:
        rows.append(("exact (true gradient)", r.law, r.log_exact))
    rows.append(("rms over directions", r.rms_law, r.log_rms_gain))
    lawful, several = any(law is not None for _, law, _ in rows), r.log_trunk.size > 1
    columns = (
        "",
        *(("law", "95 % of networks") if lawful else ()),
        "measured",
        *(("95 % of the mean",) if several else ()),
    )
    table = grid(f"Gradient gain, output to input, over {r.depth} sub-layers", (*columns, "per layer"))
    estimate = [number(r.closed_form), "", ""] if lawful else [number(r.closed_form)]
    table.add_row("estimate (1 − c)^L", *estimate, *([""] if several else []), number(1 - r.c))
    for name, law, logs in rows:
        mean = over_seeds(logs)
        cells = [number(law and law.value), span(law)] if lawful else []
        cells += [number(float(np.exp(mean.value))), *([span(gain_of(mean))] if several else [])]
        table.add_row(name, *cells, number(float(np.exp(mean.value / r.depth))))
    parts: list[Any] = [heading(r.settings), "", table, _factor_table(r)]
    if r.log_singular_values is not None:
        parts += [_spectrum_line(r)]
    if r.degenerate:
        parts.append(Text(f"{r.degenerate} token states have no variance: their direction is undefined.", style="bold"))
    parts += ["", Text(f"Verdict: {r.verdict}")]
    return Group(*parts)


def _factor_table(r: Contraction) -> Table:
    recorded = r.recorded
    shown = [name for name in FACTORS if not (recorded and name in ("skip", "branch"))]
    columns = [*shown, *([] if recorded else ["net"]), "alignment", "cos(x,u)"]
    where = "along the trunk" if recorded else "along the gradient"
    table = grid(f"Factors per sub-layer, geometric mean, {where}", ("", *columns))
    for name, profile in (("law", r.law_profile), ("measured", r.profile)):
        if profile is not None:
            table.add_row(name, *(_cell(profile, column) for column in columns))
    return table


def _cell(profile: Profile, column: str) -> str:
    figure = {"alignment": "alignment", "cos(x,u)": "stream_cosine"}.get(column, column)
    values = getattr(profile, figure)
    if values is None:
        return "–"
    if figure in ("alignment", "stream_cosine"):  # cosines may vanish: quadratic mean, not geometric
        return number(float(np.sqrt(np.mean(values**2))))
    return f"{per_layer(profile, figure):.5f}"


def _spectrum_line(r: Contraction) -> Text:
    values = np.exp(np.mean(r.log_singular_values, axis=0))  # type: ignore[arg-type]
    alive = values[values > np.finfo(r.settings["dtype"]).eps * r.d * values[0]]
    what = "trunk product" if r.recorded else "exact product"
    picks = "largest {}, median {}, smallest {}".format(*map(number, (alive[0], np.median(alive), alive[-1])))
    return Text(f"Singular values of the {what}: {picks}; {values.size - alive.size} of {values.size} below rounding")


def sweep(s: ContractionSweep) -> Group:
    """One row a depth."""
    table = grid(
        "Gradient gain, output to input, against depth",
        ("L", "(1 − c)^L", "bound", "trunk law", "trunk", "exact law", "exact", "95 % of the mean"),
    )
    for r in s:
        mean = {name: gain_of(over_seeds(getattr(r, f"log_{name}"))) for name in ("bound", "trunk", "exact")}
        laws = (r.trunk_law and r.trunk_law.value, r.law and r.law.value)
        table.add_row(
            str(r.depth),
            *(number(v) for v in (r.closed_form, mean["bound"].value, laws[0], mean["trunk"].value)),
            *(number(v) for v in (laws[1], mean["exact"].value)),
            span(mean["exact"]),
        )
    first = dict(s[0].settings) | {"depth": ", ".join(map(str, s.depths))}
    return Group(heading(first), "", table, "", Text(f"Verdict at L = {s.depths.max()}: {s.verdict}"))


_SHORT = {
    "stream_rms": "stream",
    "branch_rms": "f",
    "stream_cosine": "cos(x,u)",
    "alignment": "align",
    "projection": "proj",
}


def shown(count: int, rows: int = ROWS_SHOWN) -> list[int]:
    """Indices of the rows of a long table; −1 for what is left out of its middle."""
    half = rows // 2
    return [*range(count)] if count <= rows + 1 else [*range(half), -1, *range(count - half, count)]


def profile_table(p: Profile) -> Table:
    """One row a sub-layer, geometric mean over seeds; the middle of a deep stack is left out."""
    figures = ("stream_rms", "branch_rms", "stream_cosine", "alignment", *FACTORS, "net")
    present = [name for name in figures if (values := getattr(p, name)) is not None and np.isfinite(values).any()]
    present = [name for name in present if name not in ("affine", "skip") or not np.all(getattr(p, name) == 1)]
    curves = [name for name in ("exact", "trunk") if np.isfinite(getattr(p, f"log_{name}")).any()]
    table = grid(
        f"Factors per sub-layer ({p.settings.get('what', 'measured')}), input to output; ∏ is cumulative from the output",
        ("", *(_SHORT.get(name, name) for name in present), *(f"∏{name}" for name in curves)),
    )
    means = {name: p.summary(name).mean for name in (*present, *curves)}
    for i in shown(len(p.labels)):
        if i < 0:
            table.add_row("⋮")
            continue
        table.add_row(p.labels[i], *(number(float(means[name][i]), 3) for name in (*present, *curves)))
    return table
