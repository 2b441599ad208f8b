"""The estimate (1−c)^L, from both of its readings (THEORY.md, section 3), for symbolic d, c and L.

**Norm reading.** Each branch is f = σWx with W_ij ~ N(0, 1/d): the output norm divides by rms(x + σWx), and Wick
contraction gives its square as 1 + σ². **Alignment reading.** The stream keeps unit length and turns by arccos(1−c)
per layer in one plane, in which the gradient lies: each projection then keeps 1−c of it. The branch may be a
constant, which returns no gradient (exact = trunk), or linear, which returns nearly all of it (exact = 1−c at every
depth).
"""

# SymPy's annotations do not follow its operators: x[i] may be a Tuple there, a - b a Basic.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import sympy as sp
from sympy import Expr, Indexed, IndexedBase, Matrix, Symbol

from gradflow.symbolic.index import contract, d, delta, gather, i, j, k, matrix, terms, total, vector
from gradflow.symbolic.projections import L, normal, theta

c = Symbol("c", positive=True)  # share of the gradient that one layer loses, below 1
sigma = Symbol("sigma", positive=True)
W, J, x, g = matrix("W"), matrix("J"), vector("x"), vector("g")


@dataclass(frozen=True)
class Readings:
    """What the two readings derive, as expressions in c, L and d.

    Attributes
    ----------
    strength : Expr
        σ(c) of the norm reading: the branch multiplier at which one layer keeps 1−c.
    spread : Expr
        Variance of ‖x + σWx‖² over its squared mean, in σ and d: how far one draw strays.
    turn, cosine : Expr
        Alignment reading: the turn per layer, and the |cosine| of the arriving gradient with the stream.
    trunk, exact_constant, exact_linear : Expr
        End-to-end gains of the in-plane cotangent.
    random_gain, random_gain_linear : Expr
        rms gain of a Gaussian cotangent through the constant-branch stack, and through the linear one.
    smallest : Expr
        Smallest non-zero singular value of that stack.
    """

    strength: Expr
    spread: Expr
    turn: Expr
    cosine: Expr
    trunk: Expr
    exact_constant: Expr
    exact_linear: Expr
    random_gain: Expr
    random_gain_linear: Expr
    smallest: Expr


def expectation(expr: Expr, base: IndexedBase, variance: Expr) -> Expr:
    """Return E ``expr`` over iid entries base[…] ~ N(0, variance), by Wick's theorem on indices, for symbolic d.

    A product of entries is replaced by the sum over all ways to pair them, E W_ij W_kl = variance·δ_ik δ_jl.

    Examples
    --------
    >>> expectation(total(W[i, k] * x[k], k) ** 2, W, 1 / d)
    Sum(x[k]**2, (k, 0, d - 1))/d
    """
    result = sp.Integer(0)
    for factors, bound in terms(expr):
        single = [f for factor in factors for f in _powers(factor)]
        drawn = [f for f in single if isinstance(f, Indexed) and f.base == base]
        rest = sp.Mul(*(f for f in single if f not in drawn))
        for pairing in _pairings(drawn):
            pairs = (delta(p, q) for a, b in pairing for p, q in zip(a.indices, b.indices, strict=True))
            term = rest * variance ** len(pairing) * sp.Mul(*pairs)
            result += total(term, *bound) if bound else term
    return contract(result)


def summed_power(degree: int = 1) -> Expr:
    """Return E(‖x + σWx‖²)^degree with W_ij ~ N(0, 1/d), contracted, in σ, d and Σx²."""
    u = x[i] + sigma * total(W[i, k] * x[k], k)
    return sp.factor(expectation(total(u**2, i) ** degree, W, 1 / d))


def turn_matrix() -> Matrix:
    """Return the plane's rotation by θ."""
    return Matrix([[sp.cos(theta), -sp.sin(theta)], [sp.sin(theta), sp.cos(theta)]])


def direction(index: Expr) -> Matrix:
    """Return the stream's unit vector after layer number ``index``, (cos, sin)(index·θ)."""
    return Matrix([sp.cos(index * theta), sp.sin(index * theta)])


def plane_product(*, linear: bool) -> Matrix:
    """Return J_L … J_1 in the plane, L symbolic: cos^(L−1)θ · n_L n_1ᵀ for constant branches, n_L n_0ᵀ for linear."""
    if linear:
        return normal(L) * normal(sp.Integer(0)).T
    return sp.cos(theta) ** (L - 1) * normal(L) * normal(sp.Integer(1)).T


def induction(*, linear: bool) -> tuple[Matrix, Matrix]:
    """Return base and step of the proof of ``plane_product``: two matrices that vanish.

    A layer is J_l = n_l n_lᵀ · (I + F), with F = 0 for a constant branch and I + F = R, the turn, for a linear one.
    """
    first, after = normal(sp.Integer(1)), normal(L + 1)
    returned = turn_matrix() if linear else sp.eye(2)
    claim = plane_product(linear=linear)
    base = first * first.T * returned - claim.subs(L, 1)
    # after·returned·claim, its inner product simplified by itself: trigonometry with a symbolic L wants small portions.
    row = (after.T * returned * normal(L))[0]
    head = sp.trigsimp(sp.expand_trig(sp.expand(row))) if linear else sp.trigsimp(row)
    tail = normal(sp.Integer(0)).T if linear else sp.cos(theta) ** (L - 1) * first.T
    step = head * after * tail - claim.subs(L, L + 1)
    return base.applyfunc(sp.trigsimp), step.applyfunc(lambda e: sp.simplify(sp.powsimp(e)))


@lru_cache
def readings() -> Readings:
    """Return the derived laws of both readings."""
    length = {total(x[k] ** 2, k): d}  # the stream enters with unit rms
    mean = gather(summed_power(), length) / d
    second = gather(summed_power(2), length) / d**2
    # The norm factor 1/√mean is to be 1−c: linear in σ².
    square = Symbol("s")
    (strength,) = sp.solve(mean.subs(sigma**2, square) * (1 - c) ** 2 - 1, square)
    cosine_of_turn = {sp.cos(theta): 1 - c}
    arriving = normal(L + 1)  # the in-plane cotangent
    constant = sp.trigsimp(arriving.dot(normal(L))) * sp.cos(theta) ** (L - 1)
    linear = sp.trigsimp(arriving.dot(normal(L)))
    aligned = sp.trigsimp(arriving.dot(direction(L)))
    # ‖J‖_F²: every direction off the plane has gain 1
    frobenius = d - 2 + sp.cos(theta) ** (2 * L - 2)
    frobenius_linear = d - 2 + sp.trigsimp(sp.expand(sum(entry**2 for entry in plane_product(linear=True))))
    return Readings(
        strength=sp.sqrt(sp.apart(strength, c)),
        spread=sp.factor(second / mean**2 - 1),
        turn=sp.acos(1 - c),
        cosine=sp.sqrt(sp.expand(aligned**2).subs(sp.sin(theta) ** 2, 1 - sp.cos(theta) ** 2).subs(cosine_of_turn)),
        trunk=sp.powsimp(constant).subs(cosine_of_turn),
        exact_constant=sp.powsimp(constant).subs(cosine_of_turn),
        exact_linear=linear.subs(cosine_of_turn),
        random_gain=sp.sqrt(frobenius / d).subs(cosine_of_turn),
        random_gain_linear=sp.sqrt(frobenius_linear / d).subs(cosine_of_turn),
        smallest=(sp.cos(theta) ** (L - 1)).subs(cosine_of_turn),
    )


def random_power() -> Expr:
    """Return E‖gᵀJ‖² over a Gaussian cotangent g_i ~ N(0, 1): Σ_ij J_ij², whatever J is."""
    return expectation(total(total(g[i] * J[i, j], i) ** 2, j), g, sp.Integer(1))


def _powers(factor: Expr) -> list[Expr]:
    if isinstance(factor, sp.Pow) and isinstance(factor.base, Indexed) and factor.exp.is_Integer and factor.exp > 0:
        return [factor.base] * int(factor.exp)
    return [factor]


def _pairings(items: Sequence[Indexed]) -> Iterator[list[tuple[Indexed, Indexed]]]:
    """Yield every way to split ``items`` into pairs; none if their number is odd."""
    if not items:
        yield []
    for position in range(1, len(items)):
        for rest in _pairings([*items[1:position], *items[position + 1 :]]):
            yield [(items[0], items[position]), *rest]
