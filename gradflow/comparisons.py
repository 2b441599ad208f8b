"""`compare`: several schemes on the same block, law and measurement side by side, forward and backward."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradflow import checks, devices, laws, precision, probes, profiles, stream_flow
from gradflow.branches import Branch, branches_of
from gradflow.factors import ENDS, Profile, plain
from gradflow.inits import initialised
from gradflow.matrices import alike
from gradflow.schemes import Multipliers, Scheme
from gradflow.stack import Drawn, Stack
from gradflow.stream_stack import StreamStack, stack_of
from gradflow.streams import StreamScheme, any_scheme

Progress = Callable[[int, int], None]
FINAL = "+final"


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
        from gradflow import comparison_report, plots

        return plots.save(comparison_report.figure(self), path)

    def __str__(self) -> str:
        from gradflow import comparison_report, report

        return report.text(comparison_report.table(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import comparison_report, report

        return report.html(comparison_report.table(self), figure=self.plot())


def figures(p: Profile) -> dict[str, np.ndarray]:
    """What is compared at every sub-layer: rms of the stream as it enters, the branch's share of the sum's power, the
    gradient at the input over that at the output, and the weight gradient; geometric means over seeds.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = functools.partial(np.mean, axis=0)
        stream, added = (np.exp(mean(np.log(getattr(p, name)))) for name in ("stream_rms", "branch_rms"))
        kept = mean(p.skip) * stream if p.kept_rms is None else np.exp(mean(np.log(p.kept_rms)))
        found = {"stream": stream, "share": added**2 / (added**2 + kept**2), "gradient": np.exp(mean(p.log_exact))[:-1]}
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


class Tokens(NamedTuple):
    """How many there are, and the cosine of every two: of the input, and of the cotangents at the output."""

    number: int
    cosine: float = 0.0
    cotangent_cosine: float = 0.0


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def measure(
    stack: Stack | StreamStack, tokens: Tokens, watched: bool, numbers: Multipliers | None, keys: Array
) -> dict[str, Array]:
    """Rows of random networks of a shape, one after another; each with an input of unit rms and a Gaussian cotangent."""

    def one(key: Array) -> dict[str, Array]:
        k_x, k_weights, k_cotangent = jax.random.split(key, 3)
        drawn = ((k_x, tokens.cosine), (k_cotangent, tokens.cotangent_cosine))
        x, cotangent = (alike(k, tokens.number, stack.d, cosine, stack.dtype) for k, cosine in drawn)
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))
        if isinstance(stack, StreamStack):
            return stream_flow.profile(stack, Drawn(k_weights), x, cotangent[None], watched)
        return probes.profile(stack, Drawn(k_weights, None, numbers), x, cotangent, watched)[2]

    return devices.over(one, keys)


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
    rows = [_row(spec, final_norm) for spec in specs]
    checks.integer("d", d, 2)
    branches = initialised(branches_of(block), init, d)
    number, seeds = checks.integer("tokens", tokens, 1), checks.integer("seeds", seeds, 1)
    cosines = {"token_cosine": token_cosine, "cotangent_cosine": cotangent_cosine}
    drawn = Tokens(number, *(checks.cosine(name, value, number) for name, value in cosines.items()))
    options = {"norm": norm, "eps": 0.0, "dtype": precision.resolve(dtype)}
    stacks = [stack_of(row, branches, depth, d, final_norm=final, **options) for _, row, final in rows]
    watched = all(hasattr(branch, "matrices") for branch in branches)
    entries = []
    for i, ((name, row, _), stack) in enumerate(zip(rows, stacks, strict=True)):
        if progress:
            progress(i, len(rows))
        entries.append(Entry(name, row, _measured(stack, drawn, watched, seeds, checks.key(key)), *_law(stack, drawn)))
    if progress:
        progress(len(rows), len(rows))
    settings = stacks[0].settings() | {"init": init, "tokens": number, **cosines, "seeds": seeds, "key": key}
    settings["final_norm"] = final_norm
    settings |= {"block": len(branches), "branch": " + ".join(branch.name for branch in branches)}
    for name in ("scheme", "equation", "streams", "composite"):
        settings.pop(name, None)
    return Comparison(tuple(entries), settings)


def _row(spec: str | Scheme | StreamScheme, final: bool) -> tuple[str, Scheme | StreamScheme, bool]:
    """Name, row, and whether a final norm follows."""
    if isinstance(spec, str) and spec.endswith(FINAL):
        return spec, any_scheme(spec.removesuffix(FINAL)), True
    row = any_scheme(spec)
    return spec if isinstance(spec, str) else row.name, row, bool(final)


def _measured(stack: Stack | StreamStack, tokens: Tokens, watched: bool, seeds: int, key: int) -> Profile:
    with precision.scope(stack.dtype):
        keys = jax.random.split(jax.random.key(key), seeds)
        if isinstance(stack, StreamStack):
            found = measure(stack, tokens, watched, None, keys)
        else:
            found = _of_one_stream(stack, tokens, watched, keys)
    names, settings = profiles.labels(stack), {"what": "measured", **stack.settings(), "tokens": tokens.number}
    return Profile.from_rows({name: np.asarray(leaf) for name, leaf in found.items()}, names, settings)


def _of_one_stream(stack: Stack, tokens: Tokens, watched: bool, keys: Array) -> dict[str, Array]:
    """Rows of one shape share a compilation; a row that takes the branches' powers sees them first."""
    shape, numbers = replace(stack, scheme=stack.scheme.shape), stack.multipliers()
    if stack.scheme.of_power and stack.mixes and tokens.number > 1:
        # as Admin does: one pass forward, ω = 1, to see the branches
        numbers = numbers._replace(alpha=np.ones_like(numbers.alpha))
        rms = np.asarray(measure(shape, tokens, watched, numbers, keys[:1])["branch_rms"][0])
        numbers = stack.multipliers(np.mean(rms[: stack.sublayers].reshape(numbers.alpha.shape) ** 2, 0).tolist())
    return measure(shape, tokens, watched, numbers, keys)


def _law(stack: Stack | StreamStack, tokens: Tokens) -> tuple[Profile | None, str]:
    """The law's profile, or why there is none."""
    options = {"d": stack.d, "norm": stack.norm, "final_norm": stack.final_norm, "tokens": tokens.number}
    options |= {"token_cosine": tokens.cosine, "cotangent_cosine": tokens.cotangent_cosine}
    try:
        return laws.law(stack.scheme, stack.block, stack.depth, **options), ""
    except ValueError as error:
        return None, str(error)
