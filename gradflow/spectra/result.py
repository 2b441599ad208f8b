"""`Spectrum`: singular values or exponents of a whole-depth Jacobian, each with its error, and how they were found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradflow.factors import plain
from gradflow.intervals import Interval, exp


@dataclass(frozen=True, repr=False)
class Spectrum:
    """The spectrum of J = ∂output/∂input over the whole depth, or of its identity path. Logs are natural.

    Attributes
    ----------
    method, why : str
        ``"dense"``, ``"compact"``, ``"matrix-free"`` or ``"lyapunov"``, and why that one.
    log_singular_values : (seeds, m)
        Descending; −inf where a value is 0 to rounding. m = n but for ``top``. By Lyapunov: S times the exponents, which
        differ from the logs of the singular values by what does not grow with depth.
    log_error : (seeds, m)
        log of the absolute error of each singular value: ‖δJ‖_F as measured by products with another route (dense, compact),
        the residual of each Ritz vector (matrix-free), or nothing (Lyapunov: see ``exponent_error``).
    exponent_error : (seeds, m) or None
        Lyapunov: standard error of each exponent, from the spread along depth, and the rounding of the pilot, added.
    log_rms_gain, log_rms_error : (seeds,)
        log of ‖J‖_F/√n, and its error (one standard error where probes estimate it).
    log_rms_law : float or None
        The law's, where there is one.
    n, layers : int
        Inputs (tokens·d) and residual sub-layers.
    forecast : dict
        Seconds and bytes that were expected; ``seconds`` is what it took.
    settings : mapping
        Scheme, branch, init, norm, ε, dtype, precision, path, tokens, seeds, key, and what the method was given.
    """

    method: str
    why: str
    log_singular_values: np.ndarray
    log_error: np.ndarray | None
    exponent_error: np.ndarray | None
    log_rms_gain: np.ndarray
    log_rms_error: np.ndarray
    log_rms_law: float | None
    n: int
    layers: int
    forecast: Mapping[str, float]
    seconds: float
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def singular_values(self) -> np.ndarray:
        """Descending, (seeds, m); inf beyond float64's range, where the logs still stand."""
        return exp(self.log_singular_values)

    @property
    def exponents(self) -> np.ndarray:
        """log σ/S, the rate per sub-layer, (seeds, m)."""
        return self.log_singular_values / self.layers

    @property
    def rms_gain(self) -> np.ndarray:
        """‖J‖_F/√n, (seeds,)."""
        return exp(self.log_rms_gain)

    @property
    def null(self) -> np.ndarray:
        """How many of the singular values are 0 to rounding, (seeds,)."""
        return np.isneginf(self.log_singular_values).sum(1)

    @property
    def whole(self) -> bool:
        """Whether all singular values are there."""
        return self.log_singular_values.shape[1] == self.n

    def quantile(self, share: float) -> Interval:
        """log of the singular value below which that share of the non-zero ones lies, with its range over seeds."""
        logs = [np.quantile(row[np.isfinite(row)], share) for row in self.log_singular_values if np.isfinite(row).any()]
        if not logs:
            return Interval(-np.inf, -np.inf, -np.inf, "all are zero")
        return Interval(float(np.mean(logs)), min(logs), max(logs), f"range over {len(logs)} networks")

    @property
    def verdict(self) -> str:
        """One plain sentence."""
        from gradflow.spectra import report

        return report.verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; −inf and NaN are ``None``."""
        arrays = {
            name: plain(getattr(self, name))
            for name in ("log_singular_values", "log_error", "exponent_error", "log_rms_gain", "log_rms_error")
        }
        facts = {name: plain(getattr(self, name)) for name in ("log_rms_law", "n", "layers", "seconds")}
        return {
            "method": self.method,
            "why": self.why,
            **arrays,
            "null": plain(self.null),
            **facts,
            "forecast": dict(self.forecast),
            "verdict": self.verdict,
            "settings": {k: plain(v) for k, v in self.settings.items()},
        }

    def plot(self, path: str | None = None) -> Any:
        """Draw the singular values in order, on a log axis, with their errors; written where ``path`` is given."""
        from gradflow import plots
        from gradflow.spectra import report

        return plots.save(report.figure(self), path)

    def __str__(self) -> str:
        from gradflow import report as shown
        from gradflow.spectra import report

        return shown.text(report.table(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report as shown
        from gradflow.spectra import report

        return shown.html(report.table(self), figure=self.plot())
