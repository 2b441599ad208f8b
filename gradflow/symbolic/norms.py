"""The normalisations N(x) = γ ⊙ y·g(r) + b, y = x or x − mean(x), r = rms(y), and their Jacobians by index calculus.

Every norm of this family is one function g(r) of one length, so the catalogue below holds nothing else; value,
Jacobian, scale and removed share are derived. ``norm_of(g)`` does the same for a norm of the user's own.
"""

# SymPy's annotations do not follow its operators: x[i] may be a Tuple there, a - b a Basic.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass
from functools import lru_cache

import sympy as sp
from sympy import Expr, IndexedBase, Symbol

from gradflow.checks import one_of
from gradflow.symbolic.index import contract, d, delta, gather, i, j, k, l, partial, total, vector
from gradflow.symbolic.projections import LowRank, Spectrum

r = Symbol("r", positive=True)  # rms of y
eps = Symbol("epsilon", nonnegative=True)
x, y, gamma, bias = vector("x"), vector("y"), vector("gamma"), vector("b")


@dataclass(frozen=True)
class NormFormula:
    """A normalisation, its Jacobian and the two numbers that say what it does to a gradient.

    J = diag(gain) · scale · (P − removed · ŷŷᵀ/d) with ŷ = y/r, and N = gain ⊙ y · scale + bias.

    Attributes
    ----------
    name : str
        ``"unit"`` (u/‖u‖), ``"rms"`` (ε inside the root), ``"rms-outside"``, ``"layernorm"``.
    centred : bool
        Whether P = I − 11ᵀ/d acts first; else P = I.
    eps_degree : int
        The power of a length that ε has: 2 inside the root, 1 outside, 0 if it does not occur.
    value, jacobian : Expr
        N_i(x), and J_ij in entries of ``stream``; both without gain and bias.
    affine_value, affine_jacobian : Expr
        The same with gain γ and bias b.
    scale, removed : Expr
        Functions of r, ε and d, read off the derived Jacobian.
    stream : IndexedBase
        The vector that the Jacobian is written in: x, or y = Px if centred.
    """

    name: str
    centred: bool
    eps_degree: int
    value: Expr
    jacobian: Expr
    scale: Expr
    removed: Expr
    affine_value: Expr
    affine_jacobian: Expr
    stream: IndexedBase


# name -> (g(r), centred, eps_degree)
_CATALOGUE: dict[str, tuple[Expr, bool, int]] = {
    "unit": (1 / (sp.sqrt(d) * r), False, 0),
    "rms": (1 / sp.sqrt(r**2 + eps), False, 2),
    "rms-outside": (1 / (r + eps), False, 1),
    "layernorm": (1 / sp.sqrt(r**2 + eps), True, 2),
}

NORM_NAMES = tuple(_CATALOGUE)


@lru_cache
def norm_formula(name: str) -> NormFormula:
    """Return the derived formula of a catalogued normalisation.

    Raises
    ------
    ValueError
        For a name that is not in ``NORM_NAMES``.
    """
    g, centred, degree = _CATALOGUE[one_of("name", name, NORM_NAMES)]
    return norm_of(g, centred=centred, name=name, eps_degree=degree)


def norm_of(g: Expr, *, centred: bool = False, name: str = "custom", eps_degree: int = 0) -> NormFormula:
    """Return the formula of N(x) = y·g(r), for g an expression in ``norms.r`` (and ``eps``, ``d``).

    Examples
    --------
    >>> norm_of(1 / (1 + r)).removed
    r/(r + 1)
    """
    stream = y if centred else x
    length = sp.sqrt(total(stream[k] ** 2, k) / d)
    affine_value = gamma[i] * stream[i] * g.subs(r, length) + bias[i]
    affine_jacobian = contract(total(partial(affine_value, stream[l]) * centring_jacobian(centred), l))
    if centred:  # Σy = 0: see `centred_sum`, which derives it
        affine_jacobian = affine_jacobian.xreplace({contract(total(y[k], k)): sp.Integer(0)})
    plain = {gamma[i]: sp.Integer(1), bias[i]: sp.Integer(0)}
    value = (
        affine_value.xreplace({y[i]: centred_entry(i), y[k]: centred_entry(k)}) if centred else affine_value
    ).xreplace(plain)
    jacobian = affine_jacobian.xreplace(plain)
    scale, removed = _read_off(jacobian, stream, centred)
    return NormFormula(
        name, centred, eps_degree, value, jacobian, scale, removed, affine_value, affine_jacobian, stream
    )


def centred_entry(index: Expr) -> Expr:
    """Return y_i = x_i − (1/d) Σ_l x_l."""
    return x[index] - total(x[l], l) / d


def centring_jacobian(centred: bool) -> Expr:
    """Return ∂y_l/∂x_j: δ_lj, less 1/d if centred."""
    return partial(centred_entry(l), x[j]) if centred else delta(l, j)


def centred_sum() -> Expr:
    """Return Σ_i y_i contracted, for y = x − mean(x): zero."""
    return contract(total(centred_entry(i), i))


def detached(formula: NormFormula) -> tuple[Expr, Expr]:
    """Return (scale, removed) of the Jacobian with the length r held constant, as ``stop_gradient`` holds it: nothing is removed.

    N is then linear, y ↦ γ ⊙ y·g(r) + b, of which centring is a part. So are norms "detached" or "frozen" where a gradient is
    to be read as a sum over paths: LayerNorm in relevance propagation (Ali et al. 2022, 2202.07304; AttnLRP: Achtibat et al.
    2024, 2402.05602).
    """
    held = gamma[i] * formula.stream[i] * formula.scale + bias[i]
    entry = contract(total(partial(held, formula.stream[l]) * centring_jacobian(formula.centred), l))
    return _read_off(entry.xreplace({gamma[i]: sp.Integer(1)}), formula.stream, formula.centred)


def in_length(expr: Expr, stream: IndexedBase) -> Expr:
    """Return ``expr`` with Σ stream_k² written as d·r²."""
    return gather(expr, {total(stream[k] ** 2, k): d * r**2})


def normalised_operator(formula: NormFormula) -> LowRank:
    """Return J/scale at γ = 1 as I + U M Uᵀ with U = [1/√d,] ŷ/√d, orthonormal because ŷ is centred and of unit rms."""
    removed = [sp.Integer(1), formula.removed] if formula.centred else [formula.removed]
    return LowRank(sp.ImmutableMatrix(sp.eye(len(removed))), sp.ImmutableMatrix(-sp.diag(*removed)))


def spectrum(formula: NormFormula) -> Spectrum:
    """Return the singular values of J at γ = 1 with their multiplicities (J is symmetric and not negative if κ ≤ 1)."""
    pairs = normalised_operator(formula).spectrum()
    return tuple((sp.factor(formula.scale * value), count) for value, count in pairs)


def rank(formula: NormFormula) -> Expr:
    """Return the rank of J at ε = 0: d less the directions that are wiped out."""
    return sp.Add(*(count for value, count in spectrum(formula) if sp.simplify(value.subs(eps, 0)) != 0))


def frobenius_squared(formula: NormFormula) -> Expr:
    """Return ‖J‖_F² at γ = 1: Σ_ij J_ij² contracted, for symbolic d."""
    square = in_length(total(formula.jacobian**2, i, j), formula.stream)
    return sp.factor(square.xreplace({contract(total(y[k], k)): sp.Integer(0)}))


def closed_jacobian(formula: NormFormula) -> Expr:
    """Return γ_i · scale · (P_ij − removed · y_i y_j/(d r²)), what the two numbers say J_ij is."""
    centring = delta(i, j) - (1 / d if formula.centred else 0)
    outer = formula.removed * formula.stream[i] * formula.stream[j] / (d * r**2)
    return gamma[i] * formula.scale * (centring - outer)


def _read_off(jacobian: Expr, stream: IndexedBase, centred: bool) -> tuple[Expr, Expr]:
    """Return (scale, removed) of J_ij = scale·(δ_ij − [1/d] − removed·y_i y_j/(d r²)); refuse a J of another shape."""
    marks = sp.symbols("delta_ij y_i y_j")
    polynomial = sp.Poly(
        in_length(jacobian, stream).xreplace(dict(zip((delta(i, j), stream[i], stream[j]), marks, strict=True))), *marks
    )
    found = {monomial: coefficient for monomial, coefficient in polynomial.terms()}
    scale = sp.simplify(found.pop((1, 0, 0)))
    removed = sp.simplify(-found.pop((0, 1, 1), sp.Integer(0)) * d * r**2 / scale)
    constant = found.pop((0, 0, 0), sp.Integer(0))
    if found or sp.simplify(constant + (scale / d if centred else 0)) != 0:
        raise ArithmeticError(f"the Jacobian is not scale·(P − removed·ŷŷᵀ/d): {jacobian}")
    return scale, removed
