"""`Audit`: a checkpoint's profile on its texts, with what vouches for it and what is said beside it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradflow.auditing.apart import Apart
from gradflow.auditing.attribution import Share, responsible
from gradflow.auditing.block_spectra import BlockSpectra
from gradflow.auditing.contradictions import contradictions
from gradflow.auditing.growth import Growth
from gradflow.auditing.sinks import Sink
from gradflow.checkpoints import Parity
from gradflow.factors import FACTORS, Profile, plain
from gradflow.linting.architectures import Architecture
from gradflow.linting.constants import Finding

SCHEMA, VERSION = "gradflow.audit", 1
CALL = ("text", "target", "target_ids", "cotangent", "probes", "key")
C = 0.2  # the article's loss per sub-layer


class Worst(NamedTuple):
    """The sub-layer that keeps least of the gradient, and the factor that takes most there."""

    index: int
    label: str
    net: float
    factor: str
    value: float


def worst(p: Profile) -> Worst:
    """Of a profile, geometric mean over texts."""
    net = p.summary("net").mean
    index = int(np.argmin(net))
    values = {name: float(p.summary(name).mean[index]) for name in FACTORS}
    factor = min(values, key=values.__getitem__)
    return Worst(index, p.labels[index], float(net[index]), factor, values[factor])


@dataclass(frozen=True, repr=False)
class Audit:
    """A checkpoint's profile on one or more texts, with what vouches for it.

    Attributes
    ----------
    path : Path
        The model's folder, as it was given.
    family : str
        Its row in `gradflow.checkpoints.FAMILIES`.
    parity : Parity
        The comparison that held before any figure was computed.
    profile : Profile
        One row a text, one column a sub-layer.
    ids : tuple of tuple of int
        Token ids of each text, masked where the cotangent is ``"mlm"``.
    settings : mapping
        Text, cotangent, probes, key, and what the network is.
    growth : Growth, optional
        How the stream grows, and each update's share of the last one.
    sinks : tuple of Sink
        Tokens whose stream stands out, and each text's first.
    apart : Apart, optional
        The figures without these tokens, where they are set apart.
    spectra : BlockSpectra, optional
        The largest singular values of every block and of the whole stack, where asked for.
    architecture : Architecture, optional
        As ``gradflow check`` sees it, where it can be mapped.
    encoder : Audit or None
        Of an encoder–decoder, whose ``profile`` is the decoder's, the encoder's share: the same gradient from where the
        decoder's cross-attentions hand it on. ``settings["crossing"]`` is its size there over that at the decoder's end.
    """

    path: Path
    family: str
    parity: Parity
    profile: Profile
    ids: tuple[tuple[int, ...], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    growth: Growth | None = None
    sinks: tuple[Sink, ...] = ()
    apart: Apart | None = None
    spectra: BlockSpectra | None = None
    architecture: Architecture | None = None
    encoder: "Audit | None" = None

    @property
    def parts(self) -> dict[str, Growth | Apart | BlockSpectra | None]:
        """What there is beside the profile, by name."""
        return {"growth": self.growth, "apart": self.apart, "spectra": self.spectra}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What contradicts what in the architecture, as ``gradflow check`` says it."""
        return () if self.architecture is None else contradictions(self.architecture)

    @property
    def worst(self) -> Worst:
        """The sub-layer of the smallest net gain (geometric mean over texts), and its smallest factor."""
        return worst(self.profile)

    @property
    def responsible(self) -> tuple[Share, ...]:
        """Every factor of every sub-layer by its share of the end-to-end gain's log, the largest first."""
        return responsible(self.profile)

    @property
    def sublayers(self) -> int:
        """S, the number of residual sub-layers; a final norm is none."""
        return len(self.profile.labels) - bool(self.settings["final_norm"])

    @property
    def closed_form(self) -> float:
        """(1 − 0.2)^S, what the article's estimate says of this depth."""
        return (1 - C) ** self.sublayers

    @property
    def verdict(self) -> str:
        """One plain sentence: what is left end to end, and which block and factor lose most."""
        from gradflow.auditing import report as audit_report

        return audit_report.verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready Python; what is undefined is ``None``."""
        s = self.settings
        beside = {} if self.encoder is None else {"encoder": self.encoder.to_dict()}
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "model": {"path": self.path.as_posix(), "family": self.family, "sizes": dict(s["sizes"])},
            "call": {name: s[name] for name in CALL if name in s}
            | {"ids": not s["text"], "detached": bool(s.get("detached"))},
            "ids": [list(row) for row in self.ids],
            "parity": dataclasses.asdict(self.parity),
            "settings": plain(dict(s)),
            "closed_form": self.closed_form,
            "worst": self.worst._asdict(),
            "verdict": self.verdict,
            "profile": self.profile.to_dict(),
            "sinks": [sink._asdict() for sink in self.sinks],
            **{name: part and part.to_dict() for name, part in self.parts.items()},
            "findings": [finding._asdict() for finding in self.findings],
        } | beside

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as JSON, for ``gradflow check --baseline``; an older file is replaced whole or not at all."""
        from gradflow.auditing import baselines

        baselines.save(self, path)

    def plot(self, path: str | None = None) -> Any:
        """Draw the gains, factors, stream and spectra; returns the figure, and writes it where ``path`` is given."""
        from gradflow import plots
        from gradflow.auditing import panels as audit_plots

        return plots.save(plots.audit(self.profile, C, audit_plots.panels(self)), path)

    def __str__(self) -> str:
        from gradflow import report
        from gradflow.auditing import report as audit_report

        return report.text(audit_report.audit(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report
        from gradflow.auditing import report as audit_report

        return report.html(audit_report.audit(self), figure=self.plot())
