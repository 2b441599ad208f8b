"""Identities with a low-rank correction, I + U M Uᵀ, for symbolic d: products, spectra, and products of projections.

U has k columns of length d, of which only the Gram matrix G = UᵀU is known. Every question below is then a k × k one,
whatever d is: (I + U M₁ Uᵀ)(I + U M₂ Uᵀ) = I + U (M₁ + M₂ + M₁ G M₂) Uᵀ, and by Sylvester's determinant identity
det(λI − I − U M Uᵀ) = (λ − 1)^(d−k) det((λ − 1)I_k − G M).
"""

# SymPy's annotations do not follow its operators: x[i] may be a Tuple there, a - b a Basic.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import sympy as sp
from sympy import Expr, ImmutableMatrix, Matrix, Symbol

from gradflow.symbolic.index import d

theta = Symbol("theta", real=True)
lam = Symbol("lambda")
L = Symbol("L", integer=True, positive=True)

Spectrum = tuple[tuple[Expr, Expr], ...]
"""Pairs (value, multiplicity); the multiplicities add up to d."""


@dataclass(frozen=True)
class LowRank:
    """The operator I + U·core·Uᵀ on R^d, with UᵀU = ``gram``; both k × k, d symbolic."""

    gram: ImmutableMatrix
    core: ImmutableMatrix

    def __matmul__(self, other: "LowRank") -> "LowRank":
        core = self.core + other.core + self.core * self.gram * other.core
        return LowRank(self.gram, core.applyfunc(sp.expand).as_immutable())

    @property
    def T(self) -> "LowRank":  # noqa: N802 - as in NumPy
        """The transpose."""
        return LowRank(self.gram, self.core.T)

    def trace(self) -> Expr:
        """Return the trace, d + tr(M G)."""
        return sp.expand(d + (self.core * self.gram).trace())

    def charpoly(self) -> Expr:
        """Return det(λI − A) as (λ−1)^(d−k) times a factored polynomial of degree k in ``lam``."""
        size = self.gram.rows
        small = sp.eye(size) + self.gram * self.core
        return (lam - 1) ** (d - size) * sp.factor(sp.trigsimp(small.charpoly(lam).as_expr()))

    def spectrum(self) -> Spectrum:
        """Return the eigenvalues with their multiplicities, the d − k ones first."""
        small = sp.eye(self.gram.rows) + self.gram * self.core
        found: dict[Expr, Expr] = {sp.Integer(1): d - self.gram.rows}
        for value, count in small.applyfunc(sp.simplify).eigenvals().items():
            value = sp.factor(sp.simplify(value))
            found[value] = found.get(value, sp.Integer(0)) + count
        return tuple(found.items())

    def singular_values(self) -> Spectrum:
        """Return the singular values with their multiplicities: roots of the spectrum of AᵀA."""
        return tuple((sp.sqrt(value), count) for value, count in (self.T @ self).spectrum())


def projection_product(gram: Matrix, removed: Matrix | None = None) -> LowRank:
    """Return ∏_j (I − κ_j u_j u_jᵀ) = I − U T Uᵀ, in the order written, T upper triangular.

    The columns of T obey t_new = κ (e − T g), g the Gram column of the new direction: one factor costs O(L²), the whole
    product O(dL² + L³), and no d × d matrix is formed.

    Parameters
    ----------
    gram : Matrix
        G = UᵀU.
    removed : Matrix, optional
        The column of κ_j; ones by default (bare projections, if the directions have unit length).
    """
    size = gram.rows
    kappa = removed if removed is not None else sp.ones(size, 1)
    table = sp.zeros(size, size)
    for column in range(size):
        correction = table[:column, :column] * gram[:column, column]
        table[:column, column] = -kappa[column] * correction
        table[column, column] = kappa[column]
    return LowRank(ImmutableMatrix(gram), ImmutableMatrix(-table).applyfunc(sp.expand))


def turning_directions(size: int, angle: Expr = theta) -> Matrix:
    """Return the Gram matrix of ``size`` unit directions that turn by ``angle`` each, in one plane.

    The entry is cos((a−b)·angle), written as a Chebyshev polynomial of cos(angle) so that determinants factor.
    """
    return Matrix(size, size, lambda a, b: sp.chebyshevt(abs(a - b), sp.cos(angle)))


def normal(index: Expr) -> Matrix:
    """Return the plane's unit vector at right angles to direction number ``index``, (−sin, cos)(index·θ)."""
    return Matrix([-sp.sin(index * theta), sp.cos(index * theta)])


def turning_charpoly() -> Expr:
    """Return det(λI − AᵀA) of L projections whose directions turn by θ in one plane."""
    return lam * (lam - sp.cos(theta) ** (2 * L - 2)) * (lam - 1) ** (d - 2)
