"""The derivations of products of projections: two at an angle, and L that turn in one plane."""

# SymPy's annotations do not follow its operators: x[i] may be a Tuple there, a - b a Basic.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import numpy as np
import sympy as sp
from sympy import Eq, Expr, Function, IndexedBase, Matrix, Symbol

from gradflow.symbolic.derivation import Derivation, Step, Test, agree, every, near
from gradflow.symbolic.index import contract, d, delta, gather, i, j, k, matrix, total, vector
from gradflow.symbolic.projections import (
    L,
    LowRank,
    Spectrum,
    lam,
    normal,
    projection_product,
    theta,
    turning_charpoly,
    turning_directions,
)

A, K, p = IndexedBase("A"), matrix("K"), Function("p")
u, v = vector("u"), vector("v")
_UNIT = {total(u[k] ** 2, k): 1, total(v[k] ** 2, k): 1, total(u[k] * v[k], k): sp.cos(theta)}

# Pairs of rational unit vectors, d = 3, 4, 5.
_PAIRS = (
    (Matrix([1, 2, 2]) / 3, Matrix([2, 1, 2]) / 3),
    (Matrix([1, 1, 1, 1]) / 2, Matrix([1, 1, 1, -1]) / 2),
    (Matrix([1, 1, 1, 2, 3]) / 4, Matrix([3, 2, 1, 1, 1]) / 4),
)


def two_projections() -> Derivation:
    """Derive the spectrum of (I − uuᵀ)(I − vvᵀ) for unit vectors at an angle θ."""
    product = gather(total((delta(i, k) - u[i] * u[k]) * (delta(k, j) - v[k] * v[j]), k), _UNIT)
    operator = projection_product(turning_directions(2))
    square = operator.T @ operator
    steps = (
        Step("Multiply out and contract; the sum over $u_k v_k$ is the cosine.", Eq(A[i, j], product)),
        Step("So the product is $I + U M U^T$ with the columns $u, v$ of $U$; the Gram matrix is", operator.gram),
        Step("and the core $M$ is", operator.core),
        Step("The core of $A^T A$ is $M + M^T + M^T G M$.", square.core),
        Step(
            r"Sylvester: $\det(\lambda I - A^T A)$ is a 2 by 2 determinant for every $d$.",
            Eq(p(lam), square.charpoly()),
        ),
        *_listed(operator.singular_values()),
    )
    tests: tuple[tuple[str, Test], ...] = (
        ("index contraction = low-rank algebra, symbolic d", lambda _: _contraction(product, operator)),
        ("characteristic polynomial exactly, d = 3, 4, 5", lambda q: every([_explicit(q, *pair) for pair in _PAIRS])),
        ("SVD of two Jacobians of x/|x| by jax.jacfwd, d = 6", _two_jacobians),
    )
    claim = r"A product of two bare projections has the singular values 1 ($d-2$ times), $|\cos \theta|$ and 0."
    assumed = (r"$u, v$ of unit length at the angle $\theta$",)
    return Derivation(
        "two-projections", "Product of two projections", claim, assumed, steps, Eq(p(lam), square.charpoly()), tests
    )


def projections() -> Derivation:
    """Derive the product of L projections as I − ABᵀ, and its spectrum for directions that turn in one plane."""
    kept = delta(i, k) - K[i, k]
    one_more = contract(total(kept * (delta(k, j) - u[k] * u[j]), k))
    t, t_inverse, s, g, zero, one = *_operators(), sp.Integer(0), sp.Integer(1)
    grown, inverse = Matrix([[t, -t * g], [zero, one]]), Matrix([[t_inverse, g], [zero, one]])
    lost = (-s - t + s * (t**-1 + s**-1 - 1) * t).expand()
    first, last, after = normal(1), normal(L), normal(L + 1)
    cosine = sp.trigsimp(last.dot(after))
    claimed = sp.cos(theta) ** (L - 1) * first * last.T
    steps = (
        Step("One more factor adds one column to $A$ and to $B$, with $K = A B^T$.", Eq(A[i, j], one_more)),
        Step("With $B = U$, $A = U T$ and $g = U^T u$, the new column makes $T$ into", grown),
        Step(
            "whose inverse is $T^{-1}$ bordered by $g$, so $T^{-1}$ is the upper triangle of the Gram matrix:",
            inverse * grown,
        ),
        Step("What the product takes away: the core of $A^T A$, from $G = T^{-1} + T^{-T} - I$, is", lost),
        Step("In one plane a projection is $n n^T$ with the normal", Eq(Symbol("n_L"), last, evaluate=False)),
        Step("Neighbouring normals have the cosine", cosine),
        Step("Induction: the product of $L$ factors is", claimed),
        Step(
            "because one more factor multiplies it by that cosine and puts the next normal last; the difference is",
            _induct(),
        ),
        Step("Outside of the plane nothing happens, hence", Eq(p(lam), turning_charpoly())),
    )
    tests: tuple[tuple[str, Test], ...] = (
        (
            "T = inverse of the Gram's upper triangle, L = 1 … 4, symbolic entries",
            lambda _: every([_triangle(q) for q in range(1, 5)]),
        ),
        ("induction, symbolic L", lambda _: (not any([*_base(), *_induct()]), f"base {_base()}, step {_induct()}")),
        ("explicit product exactly, d = 3, 4, 5, L = 1 … 5", _turned_explicitly),
        ("SVD of L Jacobians of x/|x| by jax.jacfwd, d = 6, L = 7", _turned_jacobians),
    )
    claim = (
        r"A product of $L$ projections is $I - A B^T$ with $A, B$ of shape $(d, L)$. "
        r"If the directions turn by $\theta$ in one plane, its singular values are 1 ($d-2$ times), "
        r"$|\cos \theta|^{L-1}$ and 0."
    )
    assumed = (r"unit directions, each at the angle $\theta$ to the last, in one plane", "$d$ at least 2")
    return Derivation(
        "projections", "Product of many projections", claim, assumed, steps, Eq(p(lam), turning_charpoly()), tests
    )


def _listed(spectrum: Spectrum) -> tuple[Step, ...]:
    return tuple(Step(f"Singular value, multiplicity ${sp.sstr(count)}$.", value) for value, count in spectrum)


def _operators() -> list[Expr]:
    """Return T, T⁻¹, Tᵀ and g as symbols that do not commute: matrices of any size."""
    t, s, g = sp.symbols("T S g", commutative=False)
    return [t, t**-1, s, g]


def _base() -> Matrix:
    """Return n₁n₁ᵀ − (I − û₁û₁ᵀ) in the plane: zero."""
    first, direction = normal(sp.Integer(1)), Matrix([sp.cos(theta), sp.sin(theta)])
    return (first * first.T - sp.eye(2) + direction * direction.T).applyfunc(sp.trigsimp)


def _induct() -> Matrix:
    """Return claim(L)·n_{L+1}n_{L+1}ᵀ − claim(L+1) for symbolic L: zero."""
    first, last, after = normal(sp.Integer(1)), normal(L), normal(L + 1)
    step = sp.cos(theta) ** (L - 1) * sp.trigsimp(last.dot(after)) * first * after.T
    return (step - sp.cos(theta) ** L * first * after.T).applyfunc(sp.powsimp)


def _contraction(product: Expr, operator: LowRank) -> tuple[bool, str]:
    columns = (u, v)
    written = sum(operator.core[a, b] * columns[a][i] * columns[b][j] for a in range(2) for b in range(2))
    difference = contract(product - delta(i, j) - written)
    return difference == 0, f"difference {difference}"


def _explicit(proof: Derivation, left: Matrix, right: Matrix) -> tuple[bool, str]:
    size = left.rows
    product = (sp.eye(size) - left * left.T) * (sp.eye(size) - right * right.T)
    claimed = proof.result.rhs.subs({sp.cos(theta): left.dot(right), d: size})
    return agree((product.T * product).charpoly(lam).as_expr(), sp.expand(claimed))


def _roots(proof: Derivation, cosine: float, size: int, count: int = 1) -> np.ndarray:
    """Return the singular values that the result's polynomial claims, ascending."""
    polynomial = sp.Poly(sp.expand(proof.result.rhs.subs({sp.cos(theta): sp.Rational(cosine), d: size, L: count})), lam)
    return np.sqrt([float(root) for root in sorted(sp.real_roots(polynomial))])


def _bare(points: np.ndarray) -> np.ndarray:
    """Return ∏ ‖x_j‖·Jacobian of x/‖x‖ at x_j, by forward-mode autodiff in float64."""
    import jax
    import jax.numpy as jnp

    with jax.enable_x64(True):
        jacobian = jax.vmap(jax.jacfwd(lambda a: a / jnp.linalg.norm(a)))(jnp.asarray(points))
        return np.linalg.multi_dot(np.asarray(jacobian) * np.linalg.norm(points, axis=1)[:, None, None])


def _two_jacobians(proof: Derivation) -> tuple[bool, str]:
    points = np.random.default_rng(5).normal(size=(2, 6))
    cosine = points[0] @ points[1] / np.prod(np.linalg.norm(points, axis=1))
    return near(np.linalg.svd(_bare(points), compute_uv=False)[::-1], _roots(proof, cosine, 6))


def _triangle(size: int) -> tuple[bool, str]:
    """Compare the recurrence for T with the inverse of diag(1/κ) + the Gram's strict upper triangle."""
    gram = Matrix(size, size, lambda a, b: Symbol(f"g{min(a, b)}{max(a, b)}"))
    removed = Matrix(sp.symbols(f"kappa0:{size}"))
    upper = sp.diag(*(1 / q for q in removed)) + gram.upper_triangular(1)
    grown = -projection_product(gram, removed).core
    return agree((grown * upper).applyfunc(sp.expand), sp.eye(size))


def _turned(size: int, count: int) -> list[Matrix]:
    """Return ``count`` rational unit vectors that turn by arccos(4/5) in one plane of R^size."""
    turn = Matrix([[4, -3], [3, 4]]) / 5
    planar = [turn**q * Matrix([1, 0]) for q in range(count)]
    # The plane is spanned by (3/5, 4/5, 0, …) and the last axis, lest everything be axis-aligned.
    frame = Matrix.hstack(Matrix([sp.Rational(3, 5), sp.Rational(4, 5), *[0] * (size - 2)]), sp.eye(size)[:, size - 1])
    return [frame * q for q in planar]


def _turned_explicitly(proof: Derivation) -> tuple[bool, str]:
    outcomes = []
    for size in (3, 4, 5):
        product = sp.eye(size)
        for count, direction in enumerate(_turned(size, 5), 1):
            product *= sp.eye(size) - direction * direction.T
            claimed = proof.result.rhs.subs({sp.cos(theta): sp.Rational(4, 5), d: size, L: count})
            outcomes.append(agree((product.T * product).charpoly(lam).as_expr(), sp.expand(claimed)))
            directions = Matrix.hstack(*_turned(size, count))
            low = projection_product(directions.T * directions)
            outcomes.append(agree(sp.eye(size) + directions * low.core * directions.T, product))
    return every(outcomes)


def _turned_jacobians(proof: Derivation) -> tuple[bool, str]:
    size, count, cosine = 6, 7, 0.8
    frame = np.linalg.qr(np.random.default_rng(7).normal(size=(size, 2)))[0]
    angles = np.arccos(cosine) * np.arange(count)
    points = 1.7 * np.stack([np.cos(angles), np.sin(angles)], axis=1) @ frame.T
    found = np.linalg.svd(_bare(points), compute_uv=False)[::-1]
    return near(found, _roots(proof, sp.Rational(4, 5), size, count))
