"""Attention at initialisation: what a softmax over random logits does to the Gram of the tokens, forward and back.

Tokens are exchangeable: ⟨x_i, x_i⟩/d = p, ⟨x_i, x_j⟩/d = c. Given the tokens the logits ℓ_ij of random W_Q, W_K are Gaussian
with Cov(ℓ_ij, ℓ_i'j') ∝ ⟨x_i, x_i'⟩⟨x_j, x_j'⟩. What a row's logits share cancels in the softmax, so that a row a_i is the
softmax of n independent N(0, s²), s² ∝ p (p − c), and two rows have the correlation r = c/p. The gradient's Gram is G on the
diagonal, C off it. Steps and checks: ``derive("attention")``.
"""

from typing import NamedTuple

import sympy
from sympy import Expr

n, others = sympy.symbols("n nu", positive=True)  # keys, and n − 1 (1 of a row that sees itself alone)
s2 = sympy.Symbol("s2", positive=True)
K1, M3, M22 = sympy.symbols("K1 M3 M22", positive=True)  # n E a², n E a³, E (Σ a²)²
r = sympy.Symbol("r", real=True)
p, c, G, C = sympy.symbols("p c G C", real=True)
K2, D1, D2 = sympy.symbols("K2 D1 D2", real=True)
qq, kk = sympy.symbols("q_gain k_gain", positive=True)

# Integrands of the softmax's moments: 1/S^k = ∫ λ^(k−1) e^(−λS)/Γ(k) dλ, and the n factors e^(sz) are independent, so that
# each is an integral over one λ of φ_m(λ) = E e^(msZ − λ e^(sZ)), by the power of λ and the φ's that it takes.
lam, z, s, order, y, t = sympy.symbols("lambda z s m y t", real=True)
phi = [sympy.Symbol(f"phi{m}", positive=True) for m in range(5)]
PHI = sympy.exp(order * s * z - lam * sympy.exp(s * z) - z**2 / 2) / sympy.sqrt(2 * sympy.pi)  # dz, of Z ~ N(0, 1)
# The same in y = sz + t, λ = e^t, for large s; and φ₀ by parts. λ^m φ_m and φ₀ are the integrals over y.
WIDE = sympy.exp(order * y - sympy.exp(y) - ((y - t) / s) ** 2 / 2) / (s * sympy.sqrt(2 * sympy.pi))
WIDE_0 = sympy.exp(y - sympy.exp(y)) * (1 + sympy.erf((y - t) / (s * sympy.sqrt(2)))) / 2


def reciprocal(power: int) -> Expr:
    """λ^(k−1)/Γ(k), the weight that makes 1/S^k of e^(−λS)."""
    return lam ** (power - 1) / sympy.gamma(power)


INTEGRANDS = {
    "K1": n * reciprocal(2) * phi[2] * phi[0] ** (n - 1),
    "M3": n * reciprocal(3) * phi[3] * phi[0] ** (n - 1),
    "M22": reciprocal(4) * (n * phi[4] * phi[0] ** (n - 1) + n * (n - 1) * phi[2] ** 2 * phi[0] ** (n - 2)),
}


class Overlap(NamedTuple):
    """Two rows a, b of correlation r, summed over keys: K₂ = E Σ a b, and what their Jacobians share,
    D₂ = E tr(J_aᵀ J_b) = E Σ a b (1 − a − b + Σ a b).
    """

    values: Expr
    scores: Expr


def sensitivity() -> Expr:
    """D₂(1) = E tr JᵀJ of one row, J = diag a − a aᵀ."""
    return K1 - 2 * M3 + M22


def overlap() -> Overlap:
    """K₂ and D₂ as functions of r. Price's theorem gives dK₂/dr = s² D₂; D₂(0), D₂(1) and the mean of D₂ over r, which is
    (K₂(1) − K₂(0))/s², are exact, and D₂ is the quadratic that has them.
    """
    at_0, at_1 = (1 - K1) ** 2 / others, sensitivity()
    mean = sympy.Piecewise(((K1 - 1 / n) / s2, s2 > sympy.Rational(1, 10**5)), ((at_0 + at_1) / 2, True))
    bend = 3 * (at_0 + at_1 - 2 * mean)
    scores = at_0 + (at_1 - at_0 - bend) * r + bend * r**2
    integral = at_0 * r + (at_1 - at_0 - bend) * r**2 / 2 + bend * r**3 / 3
    return Overlap(1 / n + s2 * integral, scores)


class Pair(NamedTuple):
    """A Gram of exchangeable tokens: a token with itself, and with another."""

    own: Expr
    other: Expr


def mixed() -> Pair:
    """Gram of Σ_j a_ij x_j."""
    return Pair(c + (p - c) * K1, c + (p - c) * K2)


def through_values() -> Pair:
    """Gram of Σ_i a_ij g_i: rows of a sum to 1, hence the sum over all pairs is kept."""
    own = G * K1 + others * C * K2
    return Pair(own, (G + others * C - own) / others)


def score_gradient() -> Pair:
    """n E D_ij² and n E D_ij D_i'j of D = dL/dℓ = a (b − Σ a b), b_ij = ⟨g_i, x_j⟩; only p − c of b differs between keys."""
    return Pair(G * (p - c) * D1, C * (p - c) * D2)


def through_queries() -> Pair:
    """Gram of dL/dq_i, W_K's gain included: Σ_jj' D_ij D_i'j' ⟨x_j, x_j'⟩ with Σ_j D_ij = 0."""
    own, other = score_gradient()
    return Pair(kk * (p - c) * own, kk * (p - c) * other)


def through_keys() -> Pair:
    """Gram of dL/dk_j: Σ_ii' D_ij D_i'j' ⟨x_i, x_i'⟩; it sums to 0 over j."""
    own, other = score_gradient()
    total = qq * (p * own + others * c * other)
    return Pair(total, -total / others)


LOGIT_VARIANCE: Expr = qq * kk * p * (p - c)
