"""A `Spectrum` as a table of at most 100 columns, as one figure, and as one sentence."""

import math
from typing import Any

import numpy as np
from rich.console import Group
from rich.text import Text

from gradflow import plots
from gradflow.intervals import exp
from gradflow.report import grid, number
from gradflow.spectra.forecast import duration, size
from gradflow.spectra.result import Spectrum

ROWS = 8
PLACES = (("largest", 1.0), ("upper quartile", 0.75), ("median", 0.5), ("lower quartile", 0.25), ("smallest", 0.0))


def _gain(log: float) -> str:
    """A gain; as a power of ten where float64 has no number for it."""
    if abs(log) < 600 or not math.isfinite(log):
        return number(float(exp(log)))
    return f"10^{log / math.log(10):.4g}"


def _header(s: Spectrum) -> Text:
    c = s.settings
    parts = [
        c["scheme"],
        f"f = {c['branch']}" if "branch" in c else "",
        f"{c['depth']} blocks" if "branch" in c else "",
    ]
    parts += [f"d = {c['d']}" if "d" in c else "", f"tokens = {c['tokens']}" if "tokens" in c else f"n = {s.n}"]
    parts += [f"{c.get('norm', '')} ε = {c['eps']:g}" if "eps" in c else "", c.get("dtype", "")]
    return Text(" · ".join(filter(None, parts)), style="dim")


def _quantiles(s: Spectrum) -> Any:
    """Quantiles of the non-zero values: gain end to end, and rate per sub-layer."""
    shown = grid(
        f"Singular values of J ({s.settings['path']})", ["of the non-zero", "σ", "over seeds", "log σ / sub-layer", "±"]
    )
    for name, share in PLACES:
        q = s.quantile(share)
        seen = "–" if len(s.rms_gain) < 2 else f"{_gain(q.low)} … {_gain(q.high)}"
        shown.add_row(name, _gain(q.value), seen, number(q.value / s.layers), _error(s, share))
    return shown


def _error(s: Spectrum, share: float) -> str:
    """The error of a quantile: of the log rate."""
    row = s.log_singular_values[0]
    finite = np.flatnonzero(np.isfinite(row))
    if not finite.size:
        return "–"
    i = finite[round((1 - share) * (finite.size - 1))]
    if s.exponent_error is not None:
        return number(float(s.exponent_error[0, i]), 2)
    return number(math.exp(min(float(s.log_error[0, i] - row[i]), 0.0)) / s.layers, 2)  # type: ignore[index]


def _largest(s: Spectrum) -> Any:
    """The largest values one by one, with their residuals."""
    shown = grid(f"Largest singular values of J ({s.settings['path']})", ["rank", "σ", "± (residual)", "relative"])
    row, error = s.log_singular_values[0], s.log_error[0]  # type: ignore[index]
    for i in range(min(ROWS, len(row))):
        shown.add_row(str(i + 1), _gain(row[i]), _gain(error[i]), number(float(exp(error[i] - row[i])), 2))
    return shown


def table(s: Spectrum) -> Group:
    """Values with errors, the rms gain beside the law, and how they were found."""
    first = _largest(s) if s.method == "matrix-free" else _quantiles(s)
    rms = grid("Gain over all directions, ‖J‖_F/√n", ["", "rms gain", "± relative", "law"])
    law = "–" if s.log_rms_law is None else _gain(s.log_rms_law)
    for i in range(min(len(s.rms_gain), ROWS)):
        rms.add_row(f"network {i + 1}", _gain(s.log_rms_gain[i]), number(float(s.log_rms_error[i]), 2), law)
    extra = _how(s)
    lines = [f"By {s.method}: {s.why}.", *extra, f"Verdict: {verdict(s)}"]
    return Group(_header(s), "", first, rms, *map(Text, lines))


def cost(s: Spectrum) -> str:
    """What was expected, and what it took: another figure on every machine."""
    expected = f"{duration(s.forecast['seconds'])}, {size(s.forecast['bytes'])}"
    return f"Forecast {expected}; took {duration(s.seconds)}, compilation included"


def _how(s: Spectrum) -> list[str]:
    c = s.settings
    if s.method == "lyapunov":
        return [
            f"QR after every {c['qr_every']} sub-layers (one spreads the frame by {c['spread_per_layer']:.3g} in logs at most); "
            f"rounding {c['rounding_per_layer']:.1e} a sub-layer.",
            "At finite depth these logs differ from those of the singular values by what does not grow with depth.",
        ]
    if s.method == "matrix-free":
        return [
            f"{c['pairs']} pairs (J v, Jᵀg); rms gain from {c['probes']} vectors by {c['trace']}, ± one standard error."
        ]
    return []


def verdict(s: Spectrum) -> str:
    """What the spectrum says of a gradient."""
    null = int(np.median(s.null))
    zero = f"{null} of {s.n} directions lost (0 to rounding)" if null else "no direction lost"
    rms = f"the rms gain over all directions is {_gain(float(np.mean(s.log_rms_gain)))}"
    if not s.whole:
        return f"{rms}; the largest singular value is {_gain(s.quantile(1.0).value)}."
    top, bottom = s.quantile(1.0).value, s.quantile(0.0).value
    if not math.isfinite(top):
        return "nothing comes through: J is 0 to rounding."
    return f"{rms}; the non-zero singular values span a factor of {_gain(top - bottom)}, with {zero}."


def figure(s: Spectrum) -> Any:
    """Singular values in order, a line a network, with the rms gain and the law's."""
    picture, (ax,) = plots._axes(6.4, 3.8, 1)
    ten = math.log(10)
    for i, row in enumerate(s.log_singular_values):
        finite = np.isfinite(row)
        place = (np.arange(1, len(row) + 1))[finite]
        style = {"color": "#0072B2", "lw": 1.2, "alpha": max(0.3, 1 / len(s.rms_gain))}
        marker = {"marker": "o", "ms": 3} if len(row) <= 64 else {}
        ax.plot(place, row[finite] / ten, label="log₁₀ σ" if i == 0 else None, **style, **marker)
        if s.log_error is not None and finite.any():
            error = np.minimum(s.log_error[i][finite], 700)
            with np.errstate(divide="ignore"):
                low = np.log(np.clip(np.exp(row[finite] - row[0]) - np.exp(error - row[0]), 1e-300, None)) + row[0]
            high = np.logaddexp(row[finite], error)
            shown = low / ten > row[finite].min() / ten - 1
            ax.fill_between(place[shown], low[shown] / ten, high[shown] / ten, color="#0072B2", alpha=0.15, lw=0)
    rms = float(np.mean(s.log_rms_gain)) / ten
    if math.isfinite(rms):
        ax.axhline(rms, color="#D55E00", lw=1.2, label="rms gain")
    if s.log_rms_law is not None:
        ax.axhline(s.log_rms_law / ten, color="black", lw=1, ls="--", label="rms gain, law")
    null = int(np.median(s.null))
    ax.set_title(
        f"{s.settings['scheme']}, {s.settings['path']} Jacobian" + (f"; {null} zero" if null else ""), fontsize=10
    )
    ax.set_xlabel(f"rank (of {s.n})")
    ax.set_ylabel("log₁₀ of the singular value")
    ax.legend(fontsize=8, frameon=False)
    return picture
