"""Figures, drawn without pyplot: no global state, no window, the same bytes from the same numbers."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from gradflow.contractions import Contraction, ContractionSweep
from gradflow.factors import Profile
from gradflow.files import new_file

# Okabe–Ito colours: told apart by colour-blind readers; each curve has a marker of its own besides.
STYLE = {
    "exact": ("#0072B2", "o", "exact: the true gradient"),
    "trunk": ("#D55E00", "s", "trunk: F = 0"),
    "local": ("#009E73", "^", "local: norms and skip along the true gradient"),
    "bound": ("#CC79A7", "v", "bound: ∏ (1/‖u‖)(1 − c_j)"),
}
FACTOR_COLOURS = {
    "affine": "#B58900",
    "projection": "#CC79A7",
    "norm": "#D55E00",
    "skip": "#808080",
    "branch": "#0072B2",
    "net": "#000000",
}
FORMATS = (".png", ".svg", ".pdf")


class Picture(Figure):
    """A Matplotlib figure that a notebook shows as it is, without pyplot."""

    def _repr_png_(self) -> bytes:
        return png(self)


def png(figure: Figure, dpi: int = 110) -> bytes:
    """The figure as PNG bytes, for a notebook or an HTML page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def plain(ax: Axes, axis: Literal["both", "y"] = "both") -> None:
    """No frame above and on the right; a faint grid."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, axis=axis, alpha=0.25, linewidth=0.6)


def check_path(path: str | Path) -> Path:
    """Return the path if a figure can be written there; asked before long work, so that none is lost.

    Raises
    ------
    ValueError
        For a file type that is not one of `FORMATS`, or a path where no file can stand.
    """
    file = Path(path)
    if file.suffix.lower() not in FORMATS:
        raise ValueError(f"plot: needs a file name ending in {', '.join(FORMATS)}, got {str(path)!r}")
    return new_file("plot", file, ".png")


def save(figure: Figure, path: str | Path | None) -> Figure:
    """Write the figure where ``path`` is given, and return it; raises as `check_path`."""
    if path is not None:
        file = check_path(path)
        metadata = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[
            file.suffix.lower()
        ]
        with mpl.rc_context({"svg.hashsalt": "gradflow"}):
            figure.savefig(file, dpi=150, metadata=metadata)
    return figure


def _axes(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Picture, list[Axes]]:
    figure = Picture(figsize=(width, height), layout="constrained")
    axes = np.ravel(figure.subplots(rows, columns)).tolist()  # type: ignore[arg-type]
    for ax in axes:
        plain(ax)
    return figure, axes


def _curve(ax: Axes, x: np.ndarray, logs: np.ndarray, name: str) -> None:
    """Geometric mean over seeds, with the range that holds 95 % of them."""
    colour, marker, label = STYLE[name]
    step = max(1, x.size // 24)
    ax.plot(
        x, np.exp(logs.mean(0)), marker, color=colour, ms=4, markevery=step, ls="", label=f"{label}, measured", zorder=3
    )
    if len(logs) > 1:
        low, high = np.quantile(logs, [0.025, 0.975], axis=0)
        ax.fill_between(x, np.exp(low), np.exp(high), color=colour, alpha=0.18, lw=0)


def _law(ax: Axes, x: np.ndarray, logs: np.ndarray, name: str) -> None:
    ax.plot(x, np.exp(logs), color=STYLE[name][0], lw=1.4, label=f"{name}, law", zorder=2)


def _log_gain(ax: Axes, curves: Sequence[np.ndarray]) -> None:
    """Log axis; limits that keep a flat curve from filling the picture with rounding."""
    ax.set_yscale("log")
    ax.yaxis.set_minor_formatter(NullFormatter())
    low, high = min(float(c.min()) for c in curves), max(float(c.max()) for c in curves)
    ax.set_ylim(np.exp(min(low, -0.7) - 0.3), np.exp(max(high, 0.0) + 0.4))


def cumulative(
    ax: Axes, profile: Profile, law: Profile | None, names: Sequence[str], also: Sequence[np.ndarray] = ()
) -> None:
    """Cumulative gains from the output back to each sub-layer's input; ``also`` are logs that the axis must hold."""
    x = np.arange(profile.log_trunk.shape[1])
    drawn = list(also)
    for name in names:
        logs = getattr(profile, f"log_{name}")
        if np.isnan(logs).any():
            continue
        _curve(ax, x, logs, name)
        drawn.append(logs)
        if law is not None and name in ("exact", "trunk"):
            _law(ax, x, getattr(law, f"log_{name}")[0], name)
    _log_gain(ax, drawn)
    ax.set_xlabel("sub-layer l (0: input, right: output)")
    ax.set_ylabel("gain ‖∂L/∂x_l‖ / ‖∂L/∂x_L‖")


def contraction(r: Contraction) -> Figure:
    """Cumulative gains over depth on a log axis, and the factors that make them."""
    figure, (left, right) = _axes(10.5, 4.2, 2)
    names = ("bound", "trunk") if r.recorded else ("trunk", "exact")
    if np.ptp(r.profile.log_local - r.profile.log_trunk) > 0.1:  # else it hides behind the trunk
        names = ("local", *names)
    x = np.arange(r.depth + 1)
    estimate = (r.depth - x) * np.log1p(-r.c)
    cumulative(left, r.profile, r.law_profile, names, [estimate])
    left.plot(x, np.exp(estimate), color="0.35", ls="--", lw=1, label=f"estimate (1 − {r.c:g})^(L − l)")
    left.legend(fontsize=7.5, frameon=False, loc="best")
    settings = r.settings
    branch = f", {settings['branch']}" if settings.get("branch") else ""
    left.set_title(
        f"{settings['scheme']}{branch}, L = {r.depth}, d = {r.d}; band: 95 % of seeds", fontsize=10, loc="left"
    )
    factors(right, r.profile)
    return figure


def factors(ax: Axes, p: Profile) -> None:
    """The factors of each sub-layer, geometric mean over seeds."""
    x = np.arange(1, len(p.labels) + 1)
    for name, colour in FACTOR_COLOURS.items():
        values = getattr(p, name)
        if np.isnan(values).any() or (name in ("affine", "skip") and np.allclose(values, 1)):
            continue
        mean = p.summary(name).mean
        ax.plot(x, mean, "o-" if name != "net" else ".--", color=colour, ms=3.5, lw=1, label=name)
    for name, label in (("stream_cosine", "cos(x, u)"), ("alignment", "alignment of gradient and u")):
        values = getattr(p, name)
        if values is not None:
            style = {"stream_cosine": ":", "alignment": "-."}[name]
            ax.plot(x, np.sqrt(np.mean(values**2, 0)), style, color="0.35", lw=1.2, label=label)
    ax.axhline(1, color="0.7", lw=0.8, zorder=0)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("sub-layer")
    ax.set_title("factors of each sub-layer, and the two cosines", fontsize=10, loc="left")
    ax.legend(fontsize=7.5, frameon=False, loc="best", ncols=2)


def profile(p: Profile) -> Figure:
    """All four cumulative gains of a profile, and its factors."""
    figure, (left, right) = _axes(10.5, 4.2, 2)
    cumulative(left, p, None, ("bound", "local", "trunk", "exact"))
    left.legend(fontsize=7.5, frameon=False)
    factors(right, p)
    return figure


def audit(p: Profile, c: float, panels: Sequence[Callable[[Axes], None]] = ()) -> Figure:
    """All four cumulative gains of a trained network beside (1 − c)^L, and the factors, each sub-layer by its name.

    Further ``panels`` come below, two a row.
    """
    rows = 1 + -(-len(panels) // 2)
    figure, (left, right, *more) = _axes(11.5, 4.6 + 3.6 * (rows - 1), 2, rows)
    for ax, panel in zip(more, panels, strict=False):
        panel(ax)
    for ax in more[len(panels) :]:
        ax.remove()
    S = len(p.labels)
    x = np.arange(S + 1)
    estimate = (S - x) * np.log1p(-c)
    cumulative(left, p, None, ("bound", "local", "trunk", "exact"), [estimate])
    left.plot(x, np.exp(estimate), color="0.35", ls="--", lw=1, label=f"estimate (1 − {c:g})^(L − l)")
    left.legend(fontsize=7.5, frameon=False)
    texts = f"; band: 95 % of {len(p.net)} texts" if len(p.net) > 1 else ""
    left.set_title(
        f"gain, last hidden state back to sub-layer l; {p.settings['cotangent']} cotangent{texts}",
        fontsize=10,
        loc="left",
    )
    factors(right, p)
    right.set_ylim(0, 1.3 * right.get_ylim()[1])  # room for the legend above the curves
    step = -(-S // 24)
    step += step % 2 if step > 1 else 0  # of a deep model only first sub-layers of a block
    names = [label.split(":")[0] for label in p.labels]
    right.set_xticks(
        np.arange(1, S + 1)[::step], names[::step], rotation=60, ha="right", fontsize=7, rotation_mode="anchor"
    )
    right.set_xlabel("sub-layer, by block")
    return figure


def sweep(s: ContractionSweep) -> Figure:
    """End-to-end gain against depth: every seed a dot, laws as lines with the band of 95 % of networks."""
    figure, (ax,) = _axes(6.4, 4.4)
    ordered = sorted(s, key=lambda r: r.depth)
    depths = np.array([r.depth for r in ordered])
    drawn = []
    for name, law_name in (("trunk", "trunk_law"), ("exact", "law")):
        colour, marker, label = STYLE[name]
        logs = [getattr(r, f"log_{name}") for r in ordered]
        drawn += logs
        for depth, values in zip(depths, logs, strict=True):
            ax.plot(np.full(values.size, depth), np.exp(values), marker, color=colour, ms=2.5, alpha=0.4, lw=0)
        ax.plot(depths, [np.exp(v.mean()) for v in logs], marker, color=colour, ms=6, label=f"{label}, measured")
        laws = [getattr(r, law_name) for r in ordered]
        if all(law is not None for law in laws):
            ax.plot(depths, [law.value for law in laws], color=colour, lw=1.4, label=f"{name}, law")
            ax.fill_between(
                depths, [law.low for law in laws], [law.high for law in laws], color=colour, alpha=0.12, lw=0
            )
    ax.plot(depths, [r.closed_form for r in ordered], "--", color="0.35", lw=1, label=f"estimate (1 − {s[0].c:g})^L")
    _log_gain(ax, [*drawn, np.log([r.closed_form for r in ordered])])
    ax.set_xlabel("depth L (sub-layers)")
    ax.set_ylabel("end-to-end gain of the gradient")
    ax.set_xticks(depths)
    ax.set_title(f"{s[0].settings['scheme']}, {s[0].settings.get('branch', '')}, d = {s[0].d}", fontsize=10, loc="left")
    ax.legend(fontsize=8, frameon=False)
    return figure
