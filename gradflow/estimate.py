"""The main job: the estimate (1 − c)^L beside the law and the exact measurement, and why they differ."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import sympy

from gradflow import checks, cotangents, laws, precision, trunk
from gradflow.branches import Branch, branch_of, with_power
from gradflow.contractions import Contraction, ContractionSweep
from gradflow.factors import Profile, safe_log
from gradflow.intervals import Interval, band
from gradflow.laws.depth import labels
from gradflow.measure import Measurement, measure
from gradflow.schemes import Scheme, scheme_of
from gradflow.stack import Stack
from gradflow.symbolic import readings

Progress = Callable[[int, int], None]
LawEnds = tuple[Profile | None, Interval | None, Interval | None, Interval | None]
LARGEST_PRODUCT = 2 * 2**30  # bytes of one basis (tokens, d, d)


@functools.lru_cache
def _reading(name: str) -> Callable[..., Any]:
    """One of the derived formulas of the two readings, as a function of Python numbers (c, L, d)."""
    return sympy.lambdify([readings.c, readings.L, readings.d], getattr(readings.readings(), name), modules="math")


def branch_power(c: float) -> float:
    """q_f = 1/(1 − c)² − 1, the square of the derived σ(c): what makes the trunk factor 1 − c."""
    return float(_reading("strength")(c, 1, 1)) ** 2


def contraction(
    depth: int | Sequence[int] = 24,
    d: int = 512,
    *,
    c: float = 0.2,
    scheme: str | Scheme = "post-ln",
    branch: str | Branch = "linear",
    norm: str | None = None,
    reading: str = "norm",
    tokens: int = 1,
    seeds: int = 8,
    key: int = 0,
    cotangent: str | Any | None = None,
    probes: int | None = None,
    final_norm: bool = False,
    activations: str | Path | Mapping[str, Any] | None = None,
    dtype: str = "float64",
    progress: Progress | None = None,
) -> Contraction | ContractionSweep:
    """Measure how much of the gradient survives depth, beside the estimate (1 − c)^L and the law.

    Parameters
    ----------
    depth : int or sequence of int
        Blocks of one sub-layer each; several depths give a sweep.
    d : int
        Width.
    c : float
        The article's loss per layer, in (0, 1). In the norm reading it sets the branch's forward strength,
        q_f = 1/(1 − c)² − 1; in the alignment reading the turn per layer, arccos(1 − c).
    scheme : {"post-ln", "pre-ln"} or Scheme
        A row of the residual equation.
    branch : str or Branch
        ``"linear"``, ``"bias"`` (constant), ``"mlp:ACT"``.
    norm : {"rms", "layernorm"}, optional
        What fills the scheme's slots, ε = 0. ``"rms"`` by default; ``"layernorm"`` for recorded activations.
    reading : {"norm", "alignment"}
        ``"norm"``: iid weights, the trunk loses by 1/‖u‖. ``"alignment"``: û turns in one plane and the gradient lies in it.
    tokens, seeds, key : int
        Tokens of the state; networks measured; the integer that all randomness comes from.
    cotangent : {"gaussian", "aligned"} or array (tokens, d), optional
        dLoss/d(output). ``"aligned"`` (the in-plane one) is the default of the alignment reading.
    probes : int, optional
        Measure with this many Gaussian cotangents per seed and leave the whole product (O(d²) memory) out.
    final_norm : bool
        Whether a norm follows the last sub-layer.
    activations : path or mapping, optional
        Recorded activations (`gradflow.recorded`): then depth, d and tokens are theirs and only the trunk is known.
    dtype : {"float64", "float32"}
        Of all arrays. On a TPU float32 is used, and stated.
    progress : callable, optional
        Called with (seeds done, seeds in all).

    Returns
    -------
    Contraction
        Prints as a table; a `ContractionSweep` of them for several depths.

    Raises
    ------
    ValueError
        For an argument out of range or a combination without meaning; the message names the argument.
    """
    if activations is not None:
        fixed = {"branch": (branch, "linear"), "reading": (reading, "norm"), "final_norm": (final_norm, False)}
        for name, (value, only) in fixed.items():
            if value != only:
                raise ValueError(f"{name}: recorded activations say what there is; leave {name} out")
        checks.integer("seeds", seeds, 1)
        return trunk.contraction(activations, depth, d, c, norm, scheme, tokens, cotangent, probes, key, dtype)
    if not isinstance(depth, int | np.integer):
        if (
            isinstance(depth, str)
            or not isinstance(depth, Sequence | np.ndarray)
            or np.ndim(depth) != 1
            or not len(depth)
        ):
            raise ValueError(f"depth: needs a whole number or several, got {depth!r}")
        rest = {k: v for k, v in locals().items() if k not in ("depth", "activations", "progress")}
        depths = [checks.integer("depth", each, 1) for each in depth]
        return ContractionSweep(tuple(contraction(each, progress=progress, **rest) for each in depths))  # type: ignore[arg-type]
    case = _Case.checked(**{k: v for k, v in locals().items() if k not in ("activations", "progress")})
    with precision.scope(case.stack.dtype):
        law = case.law()  # first: a scheme without a law is refused before anything is measured
        return case.result(case.run(progress), law)


@dataclass(frozen=True)
class _Case:
    """Checked arguments of a measured contraction."""

    stack: Stack
    c: float
    reading: str
    tokens: int
    seeds: int
    key: int
    cotangent: str
    given: np.ndarray | None
    probes: int | None

    @classmethod
    def checked(
        cls,
        *,
        depth: int,
        d: int,
        c: float,
        scheme: str | Scheme,
        branch: str | Branch,
        norm: str | None,
        reading: str,
        tokens: int,
        seeds: int,
        key: int,
        cotangent: Any,
        probes: int | None,
        final_norm: bool,
        dtype: str,
    ) -> "_Case":
        checks.fraction("c", c)
        checks.one_of("reading", reading, ("norm", "alignment"))
        row, f = scheme_of(scheme), branch_of(branch)
        if getattr(f, "spreads", False):
            raise ValueError(
                f"branch: the law of {f.name!r} states no spread over networks to hold an estimate against; use gradflow.compare"
            )
        norm = checks.one_of("norm", norm or "rms", ("rms", "layernorm"))
        tokens = checks.integer("tokens", tokens, 1)
        if row.norm_branch:
            raise ValueError(f"c: has no meaning under {row.name!r}, whose branch is normalised whatever its strength")
        if row.norm_in == row.norm_out or row.then is not None or not row.unit:
            raise ValueError(
                f"scheme: {row.name!r} sets the branch's strength itself, or has not one norm, at the output or the branch's "
                "input; c is for those that do, gradflow.compare for all"
            )
        if reading == "alignment":
            if row.name != "post-ln" or f.name not in ("linear", "bias") or tokens != 1 or final_norm:
                raise ValueError(
                    "reading: 'alignment' is a post-ln stack of one token, branch 'linear' or 'bias', no final norm"
                )
        else:
            f = with_power(f, branch_power(c))
        depth, d = checks.integer("depth", depth, 1), checks.integer("d", d, 2)
        options = {"norm": norm, "eps": 0.0, "final_norm": bool(final_norm), "dtype": precision.resolve(dtype)}
        stack = Stack.make(row, f, depth, d, **options)
        kind, given = cotangents.resolve(cotangent, reading, (tokens, stack.d))
        if probes is not None:
            checks.integer("probes", probes, 1)
            if kind != "gaussian":
                raise ValueError(f"probes: are Gaussian cotangents; leave out cotangent={kind!r}, or probes")
        held = tokens * d * d * np.dtype(stack.dtype).itemsize
        if probes is None and held > LARGEST_PRODUCT:
            raise ValueError(
                f"d: the whole product at d={d}, tokens={tokens} needs {held / 2**30:.1f} GiB a copy; "
                "probes=16 measures the gains without it"
            )
        checks.integer("seeds", seeds, 1)
        checks.key(key)
        floor = 1e4 * np.finfo(stack.dtype).eps
        if reading == "alignment" and kind == "aligned" and (1 - c) ** depth < floor:
            raise ValueError(
                f"depth: at most {int(math.log(floor) / math.log1p(-c))} here; deeper, the gradient that stays in the plane "
                f"is smaller than what {stack.dtype} rounding puts outside of it"
            )
        return cls(stack, float(c), reading, tokens, int(seeds), int(key), kind, given, probes)

    def run(self, progress: Progress | None) -> list[Measurement]:
        """Measure every seed; one compilation serves all."""
        done = []
        keys = jax.random.split(jax.random.key(self.key), self.seeds)
        cosine = 1 - self.c if self.reading == "alignment" else None
        given = None if self.given is None else self.given.astype(self.stack.dtype)
        for i in range(0, self.seeds, jax.device_count()):
            some = measure(
                self.stack,
                self.tokens,
                cosine,
                self.probes or 1,
                self.probes is None,
                self.cotangent == "aligned",
                keys[i : i + jax.device_count()],
                given,
            )
            some = jax.tree.map(np.asarray, some)
            done += [jax.tree.map(operator.itemgetter(j), some) for j in range(len(some.rows["net"]))]
            if progress:
                progress(len(done), self.seeds)
        return done

    def result(self, done: list[Measurement], law_ends: LawEnds) -> Contraction:
        """Assemble the answer."""
        stack = self.stack
        rows = {name: np.stack([one.rows[name] for one in done]) for name in done[0].rows}
        profile = Profile.from_rows(
            rows, labels(stack.sublayers, stack.final_norm), self.settings() | {"what": "measured"}
        )
        if not np.isfinite(profile.stream_rms).all():  # type: ignore[arg-type]
            raise ValueError(f"depth: the stream grows beyond the range of {stack.dtype}; use fewer layers, or float64")
        cotangents.refuse_null(profile, stack.dtype)
        law_profile, trunk_law, law, rms_law = law_ends
        if self.probes is None:
            log2 = np.array([one.exponent for one in done]) * math.log(2)
            values = np.array([one.singular_values for one in done])
            log_values = safe_log(values) + log2[:, None]
            log_rms = safe_log(np.array([one.frobenius for one in done])) + log2 - 0.5 * math.log(self.tokens * stack.d)
        else:
            log_values, log_rms = None, profile.log_exact[:, 0]
        return Contraction(
            c=self.c,
            depth=stack.depth,
            d=stack.d,
            cotangent=self.cotangent,
            profile=profile,
            law_profile=law_profile,
            trunk_law=trunk_law,
            law=law,
            rms_law=rms_law,
            log_rms_gain=log_rms,
            log_singular_values=log_values,
            settings=self.settings(),
        )

    def settings(self) -> dict[str, Any]:
        """What made the numbers."""
        stack = self.stack
        return {
            **stack.settings(),
            "init": "iid Gaussian, Var W = 1/fan_in" if self.reading == "norm" else "planar rotation",
            "q_f": branch_power(self.c) if self.reading == "norm" else None,
            "reading": self.reading,
            "c": self.c,
            "tokens": self.tokens,
            "seeds": self.seeds,
            "key": self.key,
            "cotangent": self.cotangent,
            "probes": self.probes,
        }

    def law(self) -> LawEnds:
        """The law's profile, and its end-to-end trunk, exact and rms gains."""
        stack = self.stack
        if self.reading == "alignment":
            return None, *self.planar_law()
        options = {"d": stack.d, "norm": stack.norm, "final_norm": stack.final_norm, "tokens": self.tokens}
        # one cotangent a seed, or k pooled; the rms gain pools all directions, or the same k where the product is left out
        profile, rms = (
            laws.law(stack.scheme, stack.block, stack.depth, probes=probes, **options)
            for probes in (self.probes or 1, self.probes or math.inf)
        )

        def end(log: np.ndarray, sd: np.ndarray | None) -> Interval | None:
            # a branch whose law has the leading order alone has no band for networks
            return None if sd is None else band(float(log[0, 0]), float(sd[0]), "95% of networks")

        return (
            profile,
            end(profile.log_trunk, profile.sd_trunk),
            end(profile.log_exact, profile.sd_exact),
            end(rms.log_exact, rms.sd_exact),
        )

    def planar_law(self) -> tuple[Interval | None, Interval | None, Interval | None]:
        """The alignment reading's gains: sure for the in-plane cotangent, rms for a Gaussian one, unknown for others."""
        linear = self.stack.block[0].name == "linear"
        # Under LayerNorm everything happens in the d − 1 directions off 1, which is deleted.
        d = self.stack.d - (self.stack.norm == "layernorm")

        def sure(name: str, of: str) -> Interval:
            gain = float(_reading(name)(self.c, self.stack.depth, d))
            gain *= math.sqrt(d / self.stack.d) if name.startswith("random") else 1
            return Interval(gain, gain, gain, of)

        rms = sure("random_gain_linear" if linear else "random_gain", "the same in every network")
        if self.cotangent == "aligned":
            of = "the same in every network"
            return sure("trunk", of), sure("exact_linear" if linear else "exact_constant", of), rms
        if self.cotangent == "gaussian":
            return sure("random_gain", "rms over Gaussian cotangents"), rms, rms
        return None, None, rms
