"""Initialisations as one row each: the variance of a matrix's entries, as a gain over the unit-gain Var W = 1/fan_in."""

from collections.abc import Sequence
from typing import Any

import sympy
from sympy import Rational

from gradflow import checks
from gradflow.branches import Branch, with_fields

fan_in, fan_out = sympy.symbols("fan_in fan_out", positive=True)

# name -> (Var W, source); entries are Gaussian here whatever the paper draws: the law takes the variance alone
INITS: dict[str, tuple[sympy.Expr, str]] = {
    "unit": (1 / fan_in, "the default: q_f = χ_f = 1 for a linear branch"),
    "xavier": (2 / (fan_in + fan_out), "Glorot, Bengio 2010"),
    "he": (2 / fan_in, "He et al. 2015 (1502.01852)"),
    "gpt2": (Rational(2, 100) ** 2 + 0 * fan_in, "std 0.02: Radford et al. 2019"),
    "torch": (1 / (3 * fan_in), "torch.nn.Linear: uniform ±1/√fan_in; an MLP's biases too, which are of order 1/d"),
}
BIASED = ("torch",)  # draws biases, of the matrix's own variance; nn.MultiheadAttention starts its own at 0


def gain(init: str, into: int, out: int) -> float:
    """√(Var W · fan_in) of a matrix (out, into)."""
    variance = INITS[checks.one_of("init", init, INITS)][0]
    return float(sympy.sqrt(variance.subs({fan_in: into, fan_out: out}) * into))


def initialised(branches: Sequence[Branch], init: str, d: int | None) -> tuple[Branch, ...]:
    """The branches with the gains, and the biases, of an initialisation at width ``d``.

    Raises
    ------
    ValueError
        For an unknown name, or an initialisation that needs the width where there is none.
    """
    checks.one_of("init", init, INITS)
    if init == "unit":
        return tuple(branches)
    if d is None and init == "gpt2":
        raise ValueError("d: an init of fixed std needs the width; give d")
    width = d or 1024  # the others do not depend on it

    def one(branch: Any) -> Branch:
        if hasattr(branch, "branches"):  # a sum: each part by its own shapes
            return with_fields(branch, branches=tuple(map(one, branch.branches)))
        if not getattr(branch, "outer", ()) or not getattr(branch, "matrices", ()):
            return branch
        hidden = round(getattr(branch, "ratio", 1) * width)
        gains = {"gain": branch.gain * gain(init, hidden, width)}
        if hasattr(branch, "gain_in"):
            gains["gain_in"] = branch.gain_in * gain(init, width, hidden)
        if hasattr(branch, "bias") and init in BIASED and d is not None:  # without a width, leading order: none
            gains |= {
                "bias": gain(init, hidden, width) / hidden**0.5,
                "bias_in": gain(init, width, hidden) / width**0.5,
            }
        return with_fields(branch, **gains)

    return tuple(map(one, branches))
