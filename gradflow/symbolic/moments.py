"""Gaussian moments of a branch: what the depth law needs to know of f, derived from the activation's SymPy expression.

For f(x) = W₂ φ(W₁x), rms(x) = 1, Var W₁ = 1/d, Var W₂ = s²/m, the pre-activation is z ~ N(0, 1) and

    q_f = s² E φ²,    χ_f = s² E φ'²    (THEORY: the law's leading order)

while the 1/d term asks for the fourth moments and for the defect e(z) = zφ' − φ, which is 0 for degree-1 activations (Euler).
"""

import functools
from dataclasses import dataclass, replace

import mpmath
import sympy

z = sympy.Symbol("z", real=True)
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

    def scaled(self, power: float) -> "BranchMoments":
        """The moments of √power · f: those of second order scale with power, those of fourth with its square."""
        return BranchMoments(**{k: v * power ** POWERS[k] for k, v in vars(self).items()})


# How each moment scales with the power of the branch: those of fourth order in f or F with its square.
POWERS = dict.fromkeys(BranchMoments.__dataclass_fields__, 1) | dict.fromkeys(
    ("power_var", "slope_var", "slope_draw", "covariance"), 2
)


@functools.lru_cache
def mlp_moments(phi: sympy.Expr, width_ratio: float) -> BranchMoments:
    """Moments of W₂ φ(W₁x) at unit gain (s = 1); ``width_ratio`` is m/d."""
    dphi = slope(phi)
    defect = z * dphi - phi
    mean = {
        name: float(gaussian_mean(g))
        for name, g in {
            "q": phi**2,
            "chi": dphi**2,
            "defect": defect**2,
            "overlap": defect * phi,
            "phi4": phi**4,
            "dphi4": dphi**4,
            "both": phi**2 * dphi**2,
        }.items()
    }
    q, chi = mean["q"], mean["chi"]
    return BranchMoments(
        q=q,
        chi=chi,
        defect=mean["defect"],
        overlap=mean["overlap"],
        power_var=(mean["phi4"] - q**2) / width_ratio,
        slope_var=(mean["dphi4"] - chi**2) / width_ratio,
        slope_draw=2 * mean["dphi4"] / width_ratio,
        covariance=(mean["both"] - q * chi) / width_ratio,
        cross=(mean["both"] / q if q else 0.0) / width_ratio,
    )


LINEAR = BranchMoments(q=1.0, chi=1.0)
CONSTANT = BranchMoments(q=1.0, chi=0.0, defect=1.0, overlap=-1.0)


def frozen(moments: BranchMoments) -> BranchMoments:
    """The same branch with F = 0: what the trunk sees. Only its output's power and spread remain."""
    return replace(CONSTANT.scaled(moments.q), power_var=moments.power_var)
