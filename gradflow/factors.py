"""`Profile`: every factor of every sub-layer, measured or from a law, in one shape, so that comparing is subtraction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from gradflow.intervals import exp

FACTORS = ("affine", "projection", "norm", "skip", "branch")
CURVES = ("exact", "trunk", "local", "bound")
ENDS = ("expand", "readout", "final norm")  # rows that are no sub-layer: of several streams, and behind the last


class Summary(NamedTuple):
    """A figure over seeds: geometric mean, median, and the root of the mean power."""

    mean: np.ndarray
    median: np.ndarray
    mean_power: np.ndarray


@dataclass(frozen=True)
class Profile:
    """Factors, forward figures and cumulative gains of a stack, from input to output.

    Arrays of shape (seeds, S) hold one value per sub-layer (S + 1 with a final norm, which is a row of its own). Each is a ratio
    of Frobenius norms over (probes, tokens, d), hence ``net == affine·projection·norm·skip·branch`` to rounding.

    Attributes
    ----------
    affine : ‖γ⊙g‖/‖g‖
    projection : ‖P_t h‖/‖h‖, h = γ⊙g; the article's 1 − c
    norm : ‖P_t h/t‖/‖P_t h‖; the article's 1/‖u‖
    skip : |α|
    branch : ‖(αI + βF…)ᵀ v‖/(|α|‖v‖), what the article leaves out; where α = 0 the branch's own gain
    net : the sub-layer's gain
    stream_rms, branch_rms, sum_rms : rms of x as it enters, of β·N_branch(f) as it is added, and of u
    kept_rms : rms of what the skip keeps, RX, where there are several streams
    stream_cosine : cos(x, u), u = αx + βf, mean over tokens: the article's premise
    alignment : cosine of the arriving gradient with û, pooled over tokens: what the projection really deletes
    mean_component : the same for the direction 1, which LayerNorm deletes too
    token_cosine, gradient_cosine : mean cosine of two tokens of x, and of their gradients; NaN for one token
    input_gradient_cosine : (seeds,)
        The same of the gradients at the network's input.
    trunk_projection, trunk_alignment : projection and alignment along the trunk vector
    radius_gain : 1/‖u‖, rms over tokens
    branch_return : ‖(βF…)ᵀ v‖/‖v‖, the part of the gradient that comes back through the branch
    weight_grad : ‖dLoss/dW‖ over a sub-layer's matrices, in units of the loss; only where asked for
    branch_in_*, branch_out_* : affine, projection, norm of the norms inside the branch; reported beside, not multiplied in
    degenerate : tokens whose u has no variance, so that its direction is undefined
    log_exact, log_trunk, log_local, log_bound : (seeds, S + 1)
        Natural logs of the cumulative gains: ``[:, 0]`` at the input, the last at the output, where it is 0. ``exact``
        is the true gradient; ``trunk`` the same cotangent with F = 0; ``local`` the product of affine, projection, norm, skip
        along the true gradient; ``bound`` the article's ∏ (1/‖u‖)(1 − c), with c as measured on the trunk (times |α|).
    sd_exact, sd_trunk : (S + 1,) or None
        A law's standard deviation of the log gain over networks (leading order in 1/d).
    labels : one name a row
    settings : what made it
    """

    labels: tuple[str, ...]
    affine: np.ndarray
    projection: np.ndarray
    norm: np.ndarray
    skip: np.ndarray
    branch: np.ndarray
    net: np.ndarray
    log_exact: np.ndarray
    log_trunk: np.ndarray
    log_local: np.ndarray
    log_bound: np.ndarray
    stream_rms: np.ndarray | None = None
    branch_rms: np.ndarray | None = None
    sum_rms: np.ndarray | None = None
    kept_rms: np.ndarray | None = None
    stream_cosine: np.ndarray | None = None
    alignment: np.ndarray | None = None
    mean_component: np.ndarray | None = None
    token_cosine: np.ndarray | None = None
    gradient_cosine: np.ndarray | None = None
    input_gradient_cosine: np.ndarray | None = None
    trunk_projection: np.ndarray | None = None
    trunk_alignment: np.ndarray | None = None
    radius_gain: np.ndarray | None = None
    branch_return: np.ndarray | None = None
    weight_grad: np.ndarray | None = None
    branch_in_affine: np.ndarray | None = None
    branch_in_projection: np.ndarray | None = None
    branch_in_norm: np.ndarray | None = None
    branch_out_affine: np.ndarray | None = None
    branch_out_projection: np.ndarray | None = None
    branch_out_norm: np.ndarray | None = None
    degenerate: np.ndarray | None = None
    sd_exact: np.ndarray | None = None
    sd_trunk: np.ndarray | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> np.ndarray:
        """Cumulative gain of the true gradient, (seeds, S + 1)."""
        return exp(self.log_exact)

    @property
    def trunk(self) -> np.ndarray:
        """Cumulative gain with F = 0, (seeds, S + 1)."""
        return exp(self.log_trunk)

    @property
    def local(self) -> np.ndarray:
        """Cumulative affine·projection·norm·skip along the true gradient, (seeds, S + 1)."""
        return exp(self.log_local)

    @property
    def bound(self) -> np.ndarray:
        """The article's ∏ (1/‖u‖)(1 − c), (seeds, S + 1)."""
        return exp(self.log_bound)

    @property
    def consensus(self) -> np.ndarray:
        """Share of the gradient's power that all tokens have in common, (seeds, S + 1): T‖mean g‖²/Σ‖g_i‖², by the cosines.

        Raises
        ------
        ValueError
            If the profile does not follow the tokens' cosines.
        """
        if self.gradient_cosine is None or self.input_gradient_cosine is None:
            raise ValueError("consensus: this profile has no gradient_cosine")
        tokens = np.reshape(self.settings["tokens"], (-1, 1))
        cosine = np.concatenate([self.input_gradient_cosine[:, None], self.gradient_cosine], 1)
        return np.where(tokens == 1, 1.0, (1 + (tokens - 1) * cosine) / tokens)

    def summary(self, name: str) -> Summary:
        """Summarise a figure over seeds.

        Raises
        ------
        ValueError
            If there is no such figure in this profile.
        """
        values = getattr(self, name, None)
        if not isinstance(values, np.ndarray):
            raise ValueError(f"name: this profile has no figure {name!r}")
        with np.errstate(divide="ignore"):
            mean = np.exp(np.mean(np.log(np.abs(values)), axis=0))
        return Summary(mean, np.median(values, axis=0), np.sqrt(np.mean(values**2, axis=0)))

    @classmethod
    def from_rows(cls, rows: Mapping[str, np.ndarray], labels: Sequence[str], settings: Mapping[str, Any]) -> "Profile":
        """Build a measured profile from `gradflow.flow.flow`'s rows, each stacked over seeds."""
        rows = {name: np.asarray(values) for name, values in rows.items()}
        local = rows["affine"] * rows["projection"] * rows["norm"] * rows["skip"]
        bound = rows["trunk_projection"] * rows["radius_gain"] * rows["skip"]
        curves = {"exact": rows["net"], "trunk": rows["trunk_net"], "local": local, "bound": bound}
        known = {f.name for f in fields(cls)}
        return cls(
            labels=tuple(labels),
            settings=dict(settings),
            **{f"log_{name}": backward_sum(safe_log(gains)) for name, gains in curves.items()},
            **{name: values for name, values in rows.items() if name in known},
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures as lists; what is undefined is ``None``."""
        out: dict[str, Any] = {"labels": list(self.labels)}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray):
                out[f.name] = plain(value)
        out |= {name: plain(getattr(self, name)) for name in CURVES}
        return out

    def plot(self, path: str | None = None) -> Any:
        """Draw the cumulative gains over depth; returns the Matplotlib figure, and writes it where ``path`` is given."""
        from gradflow import plots

        return plots.save(plots.profile(self), path)

    def __str__(self) -> str:
        from gradflow import profile_report, report

        return report.text(profile_report.profile(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import profile_report, report

        return report.html(profile_report.profile(self), figure=self.plot())


def safe_log(gains: np.ndarray) -> np.ndarray:
    """Natural log in float64, −inf at 0 without a warning."""
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(gains, np.float64))


def backward_sum(logs: np.ndarray) -> np.ndarray:
    """Sum from the output back: (seeds, S) → (seeds, S + 1), 0 at the output."""
    total = np.cumsum(logs[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate([total, np.zeros_like(total[:, :1])], axis=1)


def plain(value: Any) -> Any:
    """NumPy to JSON-ready Python: non-finite numbers become ``None``."""
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
