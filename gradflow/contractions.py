"""`Contraction`: the answer of the main job, law, exact and why side by side; and a sweep of them over depth."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradflow.factors import Profile, plain
from gradflow.intervals import Interval, exp, loss_per_layer, over_seeds


@dataclass(frozen=True, repr=False)
class Contraction:
    """How much of the gradient survives depth. Gains are natural; logs are exact where gains underflow.

    Attributes
    ----------
    c, depth, d
        The article's loss per layer, the number of sub-layers, the width.
    cotangent : str
        What was sent back: ``"gaussian"``, ``"aligned"``, ``"given"`` or ``"recorded"``.
    profile, law_profile : Profile
        Measured factors and the law's (``None`` where no law applies).
    trunk_law, law, rms_law : Interval or None
        The law's end-to-end trunk, exact and rms gain: typical value with its 1/d term, and the band of 95 % of networks;
        ``None`` where the law has the leading order alone.
    log_rms_gain : (seeds,)
        log of ‖J‖_F/√(tokens·d) of the exact product (of the trunk product for recorded activations); estimated by the
        probes where they were asked for.
    log_singular_values : (seeds, tokens·d) or None
        Of that product, descending; ``None`` with probes.
    settings : mapping
        Scheme, branch, init, norm, ε, dtype, precision, path, cotangent, seeds.
    """

    c: float
    depth: int
    d: int
    cotangent: str
    profile: Profile
    law_profile: Profile | None
    trunk_law: Interval | None
    law: Interval | None
    rms_law: Interval | None
    log_rms_gain: np.ndarray
    log_singular_values: np.ndarray | None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def closed_form(self) -> float:
        """The estimate, (1 − c)^depth."""
        return (1 - self.c) ** self.depth

    @property
    def log_trunk(self) -> np.ndarray:
        """End-to-end log gain with F = 0, (seeds,)."""
        return self.profile.log_trunk[:, 0]

    @property
    def log_exact(self) -> np.ndarray | None:
        """End-to-end log gain of the true gradient, (seeds,); ``None`` for recorded activations."""
        return None if self.recorded else self.profile.log_exact[:, 0]

    @property
    def log_bound(self) -> np.ndarray:
        """Log of the article's product ∏ (1/‖u_j‖)(1 − c_j) with the measured c_j, (seeds,)."""
        return self.profile.log_bound[:, 0]

    @property
    def recorded(self) -> bool:
        """Whether the answer comes from recorded activations, where only the trunk is known."""
        return self.profile.settings.get("what") == "recorded"

    @property
    def trunk(self) -> np.ndarray:
        """End-to-end gain of the cotangent with F = 0, (seeds,)."""
        return exp(self.log_trunk)

    @property
    def exact(self) -> np.ndarray | None:
        """End-to-end gain of the cotangent through the true product, (seeds,)."""
        return None if self.log_exact is None else exp(self.log_exact)

    @property
    def bound(self) -> np.ndarray:
        """The article's product with the measured c_j, (seeds,)."""
        return exp(self.log_bound)

    @property
    def rms_gain(self) -> np.ndarray:
        """‖J‖_F/√(tokens·d), (seeds,)."""
        return exp(self.log_rms_gain)

    @property
    def singular_values(self) -> np.ndarray | None:
        """Singular values of the whole-depth product, descending, (seeds, tokens·d)."""
        return None if self.log_singular_values is None else exp(self.log_singular_values)

    @property
    def c_trunk(self) -> Interval:
        """1 − gain^(1/depth) on the trunk: the c that was measured."""
        return loss_per_layer(over_seeds(self.log_trunk), self.depth)

    @property
    def c_exact(self) -> Interval | None:
        """1 − gain^(1/depth) of the true gradient."""
        return None if self.log_exact is None else loss_per_layer(over_seeds(self.log_exact), self.depth)

    @property
    def degenerate(self) -> int:
        """Token states without variance, whose direction is undefined; 0 in a healthy run."""
        return 0 if self.profile.degenerate is None else int(self.profile.degenerate.sum())

    @property
    def verdict(self) -> str:
        """One plain sentence: which factor takes what, and what the branch returns."""
        from gradflow import verdicts

        return verdicts.contraction(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready Python; what is undefined is ``None``."""
        intervals = {name: getattr(self, name) for name in ("trunk_law", "law", "rms_law", "c_trunk", "c_exact")}
        arrays = ("bound", "trunk", "exact", "rms_gain", "log_bound", "log_trunk", "log_exact", "log_rms_gain")
        return {
            "settings": plain(dict(self.settings)),
            "closed_form": self.closed_form,
            **{name: plain(getattr(self, name)) for name in arrays},
            **{name: None if i is None else i.to_dict() for name, i in intervals.items()},
            "singular_values": plain(self.singular_values),
            "log_singular_values": plain(self.log_singular_values),
            "degenerate": self.degenerate,
            "profile": self.profile.to_dict(),
            "law_profile": None if self.law_profile is None else self.law_profile.to_dict(),
            "verdict": self.verdict,
        }

    def plot(self, path: str | None = None) -> Any:
        """Draw the cumulative gains over depth, law as line, measurement with its spread; returns the figure.

        Parameters
        ----------
        path : str, optional
            Where to write it; ``.png``, ``.svg`` or ``.pdf``.
        """
        from gradflow import plots

        return plots.save(plots.contraction(self), path)

    def __str__(self) -> str:
        from gradflow import report

        return report.text(report.contraction(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report

        return report.html(report.contraction(self), figure=self.plot())


@dataclass(frozen=True, repr=False)
class ContractionSweep:
    """Contractions at several depths, all else equal; iterates over them."""

    contractions: tuple[Contraction, ...]

    def __iter__(self) -> Iterator[Contraction]:
        return iter(self.contractions)

    def __len__(self) -> int:
        return len(self.contractions)

    def __getitem__(self, index: int) -> Contraction:
        return self.contractions[index]

    @property
    def depths(self) -> np.ndarray:
        """Depths, (n,)."""
        return np.array([r.depth for r in self])

    @property
    def verdict(self) -> str:
        """The deepest contraction's sentence."""
        return max(self, key=lambda r: r.depth).verdict

    def to_dict(self) -> dict[str, Any]:
        """A list of the contractions as JSON-ready Python."""
        return {"depths": self.depths.tolist(), "contractions": [r.to_dict() for r in self]}

    def plot(self, path: str | None = None) -> Any:
        """Draw end-to-end gain against depth; returns the figure, and writes it where ``path`` is given."""
        from gradflow import plots

        return plots.save(plots.sweep(self), path)

    def __str__(self) -> str:
        from gradflow import report

        return report.text(report.sweep(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report

        return report.html(report.sweep(self), figure=self.plot())
