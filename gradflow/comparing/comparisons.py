"""`compare`: several schemes on the same block, law and measurement side by side, forward and backward."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradflow import checks, precision
from gradflow.branches import Branch, branches_of
from gradflow.comparing.ensembles import Ensemble, seeds_of
from gradflow.factors import ENDS, Profile, plain
from gradflow.schemes import Scheme
from gradflow.streams import StreamScheme

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Entry:
    """One scheme: its measured profile, the law's (``None`` where there is none, and ``why``)."""

    name: str
    scheme: Scheme | StreamScheme
    measured: Profile
    law: Profile | None
    why: str = ""

    @property
    def size(self) -> int:
        """Sub-layers of one block: parallel branches are one."""
        return sum(label not in ENDS for label in self.measured.labels) // self.measured.settings["depth"]

    def both(self) -> dict[str, Profile]:
        """The profiles that there are, by name."""
        return {"measured": self.measured} | ({} if self.law is None else {"law": self.law})


@dataclass(frozen=True, repr=False)
class Comparison:
    """Schemes side by side; indexes and iterates like a tuple of `Entry`, and by name."""

    entries: tuple[Entry, ...]
    settings: dict[str, Any]

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, which: int | str) -> Entry:
        if isinstance(which, str):
            names = {entry.name: entry for entry in self.entries}
            return names[checks.one_of("scheme", which, names)]
        return self.entries[which]

    def to_dict(self) -> dict[str, Any]:
        """Settings, and every figure of every profile; what is undefined is ``None``."""
        rows = [
            {"name": e.name, "equation": e.scheme.equation, "source": e.scheme.source, "why": e.why}
            | {"streams": e.measured.settings.get("streams", 1), "composite": e.measured.settings.get("composite")}
            | {what: p.to_dict() for what, p in e.both().items()}
            for e in self.entries
        ]
        return {"settings": {k: plain(v) for k, v in self.settings.items()}, "schemes": rows}

    def to_pandas(self) -> Any:
        """One row for each scheme and sub-layer: figures of law and measurement (geometric mean over seeds).

        Raises
        ------
        ImportError
            Where pandas is not installed.
        """
        import pandas as pd

        tables = []
        for e in self.entries:
            columns: dict[str, Any] = {"scheme": e.name, "sublayer": list(e.measured.labels)}
            for what, p in e.both().items():
                columns |= {f"{figure}_{what}": values for figure, values in figures(p).items()}
            tables.append(pd.DataFrame(columns))
        return pd.concat(tables, ignore_index=True)

    def plot(self, path: str | None = None) -> Any:
        """Draw stream, branch share, gradient and weight gradient over depth; written where ``path`` is given."""
        from gradflow import plots
        from gradflow.comparing import report as comparison_report

        return plots.save(comparison_report.figure(self), path)

    def __str__(self) -> str:
        from gradflow import report
        from gradflow.comparing import report as comparison_report

        return report.text(comparison_report.table(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report
        from gradflow.comparing import report as comparison_report

        return report.html(comparison_report.table(self), figure=self.plot())


def figures(p: Profile) -> dict[str, np.ndarray]:
    """What is compared at every sub-layer: rms of the stream as it enters, the branch's share of the sum's power, the
    gradient at the input over that at the output, and the weight gradient; geometric means over seeds.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        mean = functools.partial(np.mean, axis=0)
        stream, added = (np.exp(mean(np.log(getattr(p, name)))) for name in ("stream_rms", "branch_rms"))
        kept = mean(p.skip) * stream if p.kept_rms is None else np.exp(mean(np.log(p.kept_rms)))
        share = 1 / (1 + (kept / added) ** 2)  # their powers alone would leave float32 before the stream does
        found = {"stream": stream, "share": share, "gradient": np.exp(mean(p.log_exact))[:-1]}
        if p.weight_grad is not None:
            found["weight_grad"] = np.exp(mean(np.log(p.weight_grad)))
    return found


def by_block(p: Profile, size: int) -> dict[str, np.ndarray]:
    """`figures` of whole blocks of ``size`` sub-layers: stream and gradient as they stand at the block's input, the mean share,
    and the norm of all its weight gradients. Rows that are no sub-layer (a final norm, ends of several streams) are left out.
    """
    inside = np.asarray([label not in ENDS for label in p.labels])
    found = {name: values[inside].reshape(-1, size) for name, values in figures(p).items()}
    out = {name: found[name][:, 0] for name in ("stream", "gradient")} | {"share": found["share"].mean(1)}
    if "weight_grad" in found:
        out["weight_grad"] = np.sqrt(np.sum(found["weight_grad"] ** 2, 1))
    return out


def spread(values: np.ndarray) -> float:
    """Largest over smallest of the finite, positive entries."""
    alive = values[np.isfinite(values) & (values > 0)]
    return float(alive.max() / alive.min()) if alive.size else np.nan


def ends(p: Profile, size: int) -> dict[str, float]:
    """End to end, geometric means over seeds: log gain of gradient and trunk, the last block's stream and share, and the spread
    of weight gradients over blocks.
    """
    found = by_block(p, size)
    logs = {f"log_{name}": float(np.mean(getattr(p, f"log_{name}")[:, 0])) for name in ("exact", "trunk")}
    last = {name: float(found[name][-1]) for name in ("stream", "share")}
    return logs | last | {"weight_grad_ratio": spread(found["weight_grad"]) if "weight_grad" in found else np.nan}


def compare(
    schemes: Sequence[str | Scheme | StreamScheme],
    block: str | Branch | Sequence[str | Branch] = ("attention", "mlp:gelu"),
    depth: int = 24,
    d: int = 512,
    *,
    norm: str = "layernorm",
    init: str = "unit",
    final_norm: bool = False,
    tokens: int = 1,
    token_cosine: float = 0.0,
    cotangent_cosine: float = 0.0,
    seeds: int = 4,
    key: int = 0,
    dtype: str = "float64",
    progress: Progress | None = None,
) -> Comparison:
    """Hold schemes against each other at initialisation: law and measurement, forward and backward.

    Parameters
    ----------
    schemes : sequence of str, Scheme or StreamScheme
        Rows of the catalogues (`gradflow.schemes`, `gradflow.streams`) or of one's own; ``"pre-ln+final"`` is the row with a
        final norm.
    block : str, Branch, or a sequence of them
        Branches of one block. Of one token attention is W_O W_V.
    depth, d : int
        Blocks, and width.
    norm : {"layernorm", "rms", "rms-outside", "unit", "dyt", "none"}
        What fills every scheme's slots (ε = 0).
    init : {"unit", "xavier", "he", "gpt2", "torch"}
        Variance of the matrices before the scheme's own gains.
    final_norm : bool
        Whether a norm follows the last sub-layer, in all schemes.
    tokens, seeds, key : int
        Tokens of the state, each of unit rms; networks measured; the integer that all randomness comes from.
    token_cosine, cotangent_cosine : float
        Cosine of every two tokens of the input, and of the cotangents that they get.
    dtype : {"float64", "float32"}
        Of all arrays.
    progress : callable, optional
        Called with (schemes done, schemes in all).

    Returns
    -------
    Comparison

    Raises
    ------
    ValueError
        For an argument out of range; the message names it.
    """
    specs = [schemes] if isinstance(schemes, str | Scheme | StreamScheme) else list(schemes)
    if not specs:
        raise ValueError("schemes: needs at least one")
    options = {"norm": norm, "init": init, "final_norm": final_norm, "tokens": tokens, "dtype": dtype}
    options |= {"token_cosine": token_cosine, "cotangent_cosine": cotangent_cosine}
    ensembles = [Ensemble.make(spec, block, depth, d, **options) for spec in specs]
    checks.integer("seeds", seeds, 1)
    entries = []
    for i, ensemble in enumerate(ensembles):
        if progress:
            progress(i, len(specs))
        with precision.scope(ensemble.stack.dtype):
            keys = seeds_of(key, seeds)
            measured = ensemble.measured(keys, ensemble.numbers(keys[:1]))
        entries.append(Entry(ensemble.name, ensemble.stack.scheme, measured, *ensemble.law()))
    if progress:
        progress(len(specs), len(specs))
    names = [branch.name for branch in branches_of(block)]
    settings = ensembles[0].stack.settings() | options | {"seeds": seeds, "key": key}
    settings |= {"dtype": ensembles[0].stack.dtype, "block": len(names), "branch": " + ".join(names)}
    for name in ("scheme", "equation", "streams", "composite"):
        settings.pop(name, None)
    return Comparison(tuple(entries), settings)
