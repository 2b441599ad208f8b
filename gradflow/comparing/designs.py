"""`design`: the scale at which a scheme meets a target, solved from the law and then measured on real networks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
from scipy.optimize import brentq

from gradflow import checks, laws
from gradflow.branches import Branch
from gradflow.comparing.comparisons import Comparison, compare, spread
from gradflow.factors import Profile, plain
from gradflow.laws.depth import blocks_of
from gradflow.schemes import Scheme, scheme_of

KNOBS = {
    "branch": "the branch's multiplier β",
    "skip": "the skip's multiplier α",
    "weights": "the gains at initialisation of the branch's inner and last matrices",
}
TARGETS = {
    "exact": "end-to-end gain of the gradient",
    "trunk": "end-to-end gain with F = 0",
    "stream": "rms of the stream as it enters the last sub-layer",
    "weights": "largest over smallest ‖∂L/∂W‖ of two sub-layers",
    "update": "Σ (v² + w²) β²/α² over sub-layers, v and w the gains of a branch's two matrices: DeepNorm's bound is 1",
}
RANGE = (1e-4, 1e4)


@dataclass(frozen=True, repr=False)
class Design:
    """A scheme with its scale solved for.

    Attributes
    ----------
    scheme : Scheme
        The row with the scale in it; give it to `gradflow.compare`, `gradflow.law`, `gradflow.profile`.
    scale : float
        What multiplies the knob.
    knob, target : str
        What was turned, and the figure that was asked for.
    wanted, law : float
        The figure asked for, and what the law says at that scale.
    measured : Comparison or None
        Real networks at that scale.
    seen : (seeds,) or None
        The figure on each of them; ``None`` for ``"update"``, which is a sum of constants.
    """

    scheme: Scheme
    scale: float
    knob: str
    target: str
    wanted: float
    law: float
    measured: Comparison | None
    seen: np.ndarray | None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and words."""
        names = ("scale", "knob", "target", "wanted", "law")
        found = {name: getattr(self, name) for name in names} | {"equation": self.scheme.equation}
        return found | {"seen": None if self.seen is None else plain(self.seen)}

    def __str__(self) -> str:
        from gradflow.comparing.report import short

        lines = [
            f"{self.scheme.name}: {self.scheme.equation}",
            f"{KNOBS[self.knob]} × {self.scale:.6g}",
            f"{TARGETS[self.target]}: wanted {self.wanted:.6g}, by the law {self.law:.6g}",
        ]
        if self.seen is not None:
            typical = float(np.exp(np.mean(np.log(self.seen))))
            low, high = map(short, (self.seen.min(), self.seen.max()))
            lines.append(f"as seen on {self.seen.size} networks: {short(typical)} ({low} … {high})")
        return "\n".join(lines)

    __repr__ = __str__


def figure(p: Profile, target: str) -> np.ndarray:
    """The target's value in every seed of a profile."""
    if target in ("exact", "trunk"):
        return getattr(p, target)[:, 0]
    if target == "stream":
        assert p.stream_rms is not None
        return p.stream_rms[:, -1 - ("final norm" in p.labels)]
    assert p.weight_grad is not None
    return np.array([spread(row) for row in p.weight_grad])


def update(row: Scheme, sublayers: int) -> float:
    """DeepNorm's bound on how far one step moves the output (2203.00555, eq. for one stack): 2S·gain²/α² there, which is 1."""
    m = row.multipliers(sublayers)
    return float(np.sum((m.inner**2 + m.outer**2) * m.beta**2 / m.alpha**2))


def turned(row: Scheme, knob: str, scale: float | sympy.Expr) -> Scheme:
    """The row with one of its knobs multiplied."""
    fields = {"branch": ("beta",), "skip": ("alpha",), "weights": ("inner", "outer")}[knob]
    then = None if row.then is None else turned(row.then, knob, scale)
    return replace(row, then=then, **{name: getattr(row, name) * scale for name in fields})


def design(
    scheme: str | Scheme,
    depth: int,
    *,
    knob: str = "branch",
    block: str | Branch | Sequence[str | Branch] = "mlp:relu",
    d: int = 256,
    norm: str = "layernorm",
    init: str = "unit",
    final_norm: bool = False,
    seeds: int = 4,
    key: int = 0,
    **target: float,
) -> Design:
    """Solve the law for the scale at which a scheme meets a target, and measure networks there.

    Parameters
    ----------
    scheme, depth, block, d, norm, init, final_norm
        As for `gradflow.compare`.
    knob : {"branch", "skip", "weights"}
        What the scale multiplies: β, α, or the gains at initialisation.
    seeds, key : int
        Networks measured at the solution; 0 seeds leave that out.
    **target : float
        One of ``exact=``, ``trunk=`` (end-to-end gain), ``stream=`` (rms at the last sub-layer), ``weights=`` (largest over
        smallest weight gradient) or ``update=`` (DeepNorm's bound, 1 there).

    Returns
    -------
    Design

    Raises
    ------
    ValueError
        For no or several targets, or one that no scale from 1e-4 to 1e4 reaches; the message says what is reached.

    Examples
    --------
    >>> gradflow.design("pre-ln", 24, exact=1.5).scale  # (1 + S q s²)^½ = 1.5 with q = 1/2
    """
    row = scheme_of(scheme)
    checks.one_of("knob", knob, KNOBS)
    if len(target) != 1:
        raise ValueError(f"target: give exactly one of {', '.join(f'{name}=' for name in TARGETS)}")
    ((name, wanted),) = target.items()
    checks.one_of("target", name, TARGETS)
    if isinstance(wanted, bool) or not isinstance(wanted, int | float) or not 0 < wanted < np.inf:
        raise ValueError(f"{name}: needs a positive number, got {wanted!r}")
    options: dict[str, Any] = {"norm": norm, "init": init, "final_norm": final_norm}
    sublayers = checks.integer("depth", depth, 1) * len(blocks_of(block, 1))

    def at(log_scale: float) -> float:
        tried = turned(row, knob, float(np.exp(log_scale)))
        if name == "update":
            return update(tried, sublayers)
        return float(figure(laws.law(tried, block, depth, d=d, **options), name)[0])

    scale = float(np.exp(_solve(at, wanted, name, row.name)))
    found = replace(turned(row, knob, scale), name=f"{row.name} ({knob} × {scale:.4g})")
    measured = (
        compare([found], block, depth, d, seeds=seeds, key=key, **options)
        if checks.integer("seeds", seeds, 0)
        else None
    )
    seen = None if measured is None or name == "update" else figure(measured[0].measured, name)
    return Design(found, scale, knob, name, float(wanted), at(np.log(scale)), measured, seen)


def _solve(at: Callable[[float], float], wanted: float, name: str, scheme: str) -> float:
    """The log scale nearest to 0 at which the figure crosses what is wanted."""
    grid = np.log(np.geomspace(*RANGE, 25))
    with np.errstate(over="ignore", divide="ignore"):
        gaps = np.array([np.log(at(x)) for x in grid]) - np.log(wanted)
    finite = np.isfinite(gaps)
    crossings = [i for i in range(24) if finite[i] and finite[i + 1] and gaps[i] * gaps[i + 1] <= 0]
    if not crossings:
        low, high = np.exp(gaps[finite].min()) * wanted, np.exp(gaps[finite].max()) * wanted
        raise ValueError(f"{name}: no scale gives {scheme!r} {wanted:g}; it reaches {low:.4g} to {high:.4g}")
    i = min(crossings, key=lambda i: abs(grid[i] + grid[i + 1]))
    return float(brentq(lambda x: np.log(at(x)) - np.log(wanted), grid[i], grid[i + 1], xtol=1e-10))  # type: ignore[arg-type]
