"""Gaussian moments of a branch: what the depth law needs to know of f, derived from the activation's SymPy expression.

For f(x) = W₂ h(W x) with Var W = 1/d, Var W₂ = s²/m, and an input of mean square p, a hidden unit sees independent z ~ N(0, 1)
for each of its rows of W:

    h = φ(√p z),  or gated  h = φ(√p z)·√p y,      q_f = s² E h²,    χ_f = s² E |∇h|²

of x ↦ f(√p x) at unit rms. The 1/d term asks for fourth moments and for the defect e = z·∇h − h, 0 for degree 1 (Euler).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mpmath
import sympy

z = sympy.Symbol("z", real=True)
power = sympy.Symbol("p", positive=True)
_gate = sympy.Symbol("y", real=True)
_positive = sympy.Symbol("z", positive=True)

ACTIVATIONS: dict[str, sympy.Expr] = {
    "linear": z,
    "relu": sympy.Max(0, z),
    "gelu": z * (1 + sympy.erf(z / sympy.sqrt(2))) / 2,
    "gelu_tanh": z * (1 + sympy.tanh(sympy.sqrt(2 / sympy.pi) * (z + sympy.Rational(44715, 10**6) * z**3))) / 2,
    "silu": z * (1 + sympy.tanh(z / 2)) / 2,  # = z/(1 + e^−z), written so that no exponential overflows
    "tanh": sympy.tanh(z),
    "erf": sympy.erf(z),
    "softplus": sympy.log(1 + sympy.exp(-sympy.Abs(z))) + sympy.Max(0, z),
}


def slope(phi: sympy.Expr) -> sympy.Expr:
    """φ', with the one-sided limits at a kink left to ``Heaviside`` and ``sign``."""
    return sympy.diff(phi, z)


def gaussian_mean(g: sympy.Expr) -> sympy.Expr:
    """E g(z), z ~ N(0, 1): exact where g is a polynomial on each half-line, else 18 digits of quadrature (a ``Float``).

    The half-lines are taken apart, so that a kink at 0 costs no digits.
    """
    halves = [sympy.expand(g.subs(z, sign * _positive)) for sign in (1, -1)]
    if all(half.is_polynomial(_positive) for half in halves):
        weight = sympy.exp(-(_positive**2) / 2) / sympy.sqrt(2 * sympy.pi)
        return sympy.Add(*(sympy.integrate(half * weight, (_positive, 0, sympy.oo)) for half in halves))
    with mpmath.workdps(20):
        total = mpmath.mpf(0)
        for sign in (1, -1):
            value = sympy.lambdify(_positive, g.subs(z, sign * _positive), modules="mpmath")
            total += mpmath.quad(lambda p, f=value: f(p) * mpmath.npdf(p), [0, 1, 3, 6, 12, 24])
        return sympy.Float(total, 18)


@dataclass(frozen=True)
class BranchMoments:
    """The numbers of one branch for a unit-rms input; the second group belongs to the 1/d term of the law.

    Attributes
    ----------
    q, chi : float
        q_f = E f_i² and χ_f = E‖Fᵀg‖²/‖g‖².
    defect, overlap : float
        s² E e² and s² E eφ with e = zφ' − φ: how far F x is from f.
    power_var, slope_var, slope_draw, covariance, cross : float
        (d/m) times s⁴ Var φ², s⁴ Var φ'², 2 s⁴ E φ'⁴, s⁴ Cov(φ², φ'²) and s² E φ²φ'²/E φ².
    """

    q: float
    chi: float
    defect: float = 0.0
    overlap: float = 0.0
    power_var: float = 0.0
    slope_var: float = 0.0
    slope_draw: float = 0.0
    covariance: float = 0.0
    cross: float = 0.0

    def scaled(self, power: Any) -> "BranchMoments":
        """The moments of √power · f: those of second order scale with power, those of fourth with its square."""
        return BranchMoments(**{k: v * power ** POWERS[k] for k, v in vars(self).items()})


# How each moment scales with the power of the branch: those of fourth order in f or F with its square.
POWERS = dict.fromkeys(BranchMoments.__dataclass_fields__, 1) | dict.fromkeys(
    ("power_var", "slope_var", "slope_draw", "covariance"), 2
)


MEANS = ("q", "chi", "defect", "overlap", "h4", "slope4", "both")
CANCELLING = ("defect", "overlap")  # 0 at degree 1


@functools.lru_cache
def integrands(phi: sympy.Expr, gated: bool) -> dict[str, Any]:
    """What is averaged over z, in z and p: the gate's Gaussian y is averaged here, as h is linear in it."""
    root = sympy.sqrt(power)
    value, derivative = sympy.symbols("F D", real=True)  # φ and φ' stay whole: multiplied out they would cancel
    gate = root * _gate if gated else sympy.Integer(1)
    h, dz = value * gate, root * derivative * gate
    dy = sympy.diff(h, _gate)
    squared, defect = dz**2 + dy**2, z * dz + _gate * dy - h
    means = (h**2, squared, defect**2, defect * h, h**4, squared**2, h**2 * squared)
    if gated:
        moment = {0: 1, 2: 1, 4: 3}  # E yⁿ
        means = tuple(
            sum(c * moment[n] for (n,), c in sympy.Poly(sympy.expand(g), _gate).terms() if not n % 2) for g in means
        )
    at = {value: phi.subs(z, root * z), derivative: slope(phi).subs(z, root * z)}
    return {name: sympy.sympify(g).xreplace(at) for name, g in zip(MEANS, means, strict=True)}


def _from_means(mean: dict[str, Any], width_ratio: float) -> BranchMoments:
    q, chi = mean["q"], mean["chi"]
    return BranchMoments(
        q=q,
        chi=chi,
        defect=mean["defect"],
        overlap=mean["overlap"],
        power_var=(mean["h4"] - q**2) / width_ratio,
        slope_var=(mean["slope4"] - chi**2) / width_ratio,
        slope_draw=2 * mean["slope4"] / width_ratio,
        covariance=(mean["both"] - q * chi) / width_ratio,
        cross=mean["both"] / (q + 1e-300) / width_ratio,  # 0 of a zero branch
    )


@functools.lru_cache
def mlp_moments(phi: sympy.Expr, width_ratio: float, gated: bool = False) -> BranchMoments:
    """Moments of W₂ h(W x) at unit gain (s = 1) and unit input; ``width_ratio`` is m/d."""
    means = {name: float(gaussian_mean(g.subs(power, 1))) for name, g in integrands(phi, gated).items()}
    return _from_means(means, width_ratio)


@functools.lru_cache
def moments_at(phi: sympy.Expr, width_ratio: float, gated: bool = False) -> Callable[[Any], BranchMoments]:
    """The same as a function of the input's mean square p (any shape, JAX), from the same integrands."""
    from gradflow.moments.averages import averages

    means = averages((z, power), tuple(integrands(phi, gated).values()), tuple(map(MEANS.index, CANCELLING)))
    return lambda p: _from_means(dict(zip(MEANS, means(p), strict=True)), width_ratio)


@functools.lru_cache
def variance_at(phi: sympy.Expr) -> Callable[[Any], Any]:
    """Var φ(√p z) as a function of p; φ is counted from φ(0), which at small p is nearly all of it."""
    from gradflow.moments.averages import averages

    value = phi.subs(z, sympy.sqrt(power) * z) - phi.subs(z, 0)
    means = averages((z, power), (value**2, value), (1,))

    def at(p: Any) -> Any:
        square, mean = means(p)
        return square - mean**2

    return at


LINEAR = BranchMoments(q=1.0, chi=1.0)
CONSTANT = BranchMoments(q=1.0, chi=0.0, defect=1.0, overlap=-1.0)


def frozen(moments: BranchMoments) -> BranchMoments:
    """The same branch with F = 0: what the trunk sees. Only its output's power and spread remain."""
    return replace(CONSTANT.scaled(moments.q), power_var=moments.power_var)
