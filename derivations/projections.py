r"""Products of many projections: identity minus low rank, and the exponential that a turning stream makes.

Claim 1. (I − u₁u₁ᵀ) … (I − u_L u_Lᵀ) = I − U T Uᵀ with T upper triangular and T⁻¹ the upper triangle of G = UᵀU: A =
UT and B = U have shape (d, L), so the whole spectrum costs O(dL² + L³) and not O(L d³). With shares κ_j in place of
1, the diagonal of T⁻¹ is 1/κ_j.

Claim 2. If u_j turns by θ from layer to layer in one plane, the product's singular values are

.. math::  1 \;(d-2 \text{ times}), \qquad |\cos\theta|^{L-1}, \qquad 0,

proved by induction, for symbolic L: exponential decay of one direction in the plane, and of no other.
"""

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.index import contract, delta, i, j, k, matrix, total, vector
from gradflow.symbolic.projections import L, normal, projection_product, theta

# One more factor, for symbolic d: with the product so far I − K, the new correction is one outer product (…)_i u_j.
u, K = vector("u"), matrix("K")
grown = contract(total((delta(i, k) - K[i, k]) * (delta(k, j) - u[k] * u[j]), k))
column = u[i] - total(K[i, k] * u[k], k)
assert contract(grown - (delta(i, j) - K[i, j] - column * u[j])) == 0
print("one more factor: A_ij =", grown)

# In terms of T, with K = U T Uᵀ and g = Uᵀu: the new column of A is u − U T g. T and g are matrices of any size, so
# they stand as symbols that do not commute. The bordered T has the bordered inverse.
t, g = sp.symbols("T g", commutative=False)
bordered = sp.Matrix([[t, -t * g], [0, 1]])
assert sp.Matrix([[t**-1, g], [0, 1]]) * bordered == sp.eye(2)
# And AᵀA = I − U TᵀT Uᵀ, because G = T⁻¹ + T⁻ᵀ − I (S stands for Tᵀ).
s = sp.Symbol("S", commutative=False)
assert (-s - t + s * (t**-1 + s**-1 - 1) * t).expand() == -s * t

# The recurrence agrees with the inverse of the triangle, entries symbolic, shares κ symbolic.
for size in (2, 3, 4):
    gram = sp.Matrix(size, size, lambda a, b: sp.Symbol(f"g{min(a, b)}{max(a, b)}"))
    share = sp.Matrix(sp.symbols(f"kappa0:{size}"))
    triangle = sp.diag(*(1 / q for q in share)) + gram.upper_triangular(1)
    found = -projection_product(gram, share).core * triangle
    assert found.applyfunc(sp.expand) == sp.eye(size)
print("T is the inverse of the Gram matrix's upper triangle")

# Turning in one plane. There I − uuᵀ = nnᵀ with n at right angles to u.
first, last, after = normal(sp.Integer(1)), normal(L), normal(L + 1)
assert sp.trigsimp(last.dot(after)) == sp.cos(theta)
claim = sp.cos(theta) ** (L - 1) * first * last.T  # the product of L factors
direction = sp.Matrix([sp.cos(theta), sp.sin(theta)])
assert (claim.subs(L, 1) - sp.eye(2) + direction * direction.T).applyfunc(sp.trigsimp) == sp.zeros(2)
# Step: (first·lastᵀ)(after·afterᵀ) = (last·after)·first·afterᵀ, and the scalar is cos θ, as shown.
step = sp.cos(theta) ** (L - 1) * sp.trigsimp(last.dot(after)) * first * after.T
assert (step - claim.subs(L, L + 1)).applyfunc(sp.powsimp) == sp.zeros(2)
print("the product of L factors in the plane: cos^(L-1) θ · n_1 n_L^T")

# Exact: turns of arccos(4/5), explicit matrices at d = 3, 4, 5.
for size in (3, 4, 5):
    turn = sp.diag(sp.Matrix([[4, -3], [3, 4]]) / 5, sp.eye(size - 2))
    product, lam = sp.eye(size), sp.Symbol("lambda")
    for count in range(1, 5):
        point = turn**count * sp.eye(size)[:, 0]
        product *= sp.eye(size) - point * point.T
        found = (product.T * product).charpoly(lam).as_expr()
        expected = lam * (lam - sp.Rational(4, 5) ** (2 * count - 2)) * (lam - 1) ** (size - 2)
        assert sp.expand(found - expected) == 0
print("exact at d = 3, 4, 5")

# Against autodiff, and at the depth of the estimate: 24 Jacobians of x/‖x‖ that turn by arccos(0.8).
angles = np.arccos(0.8) * np.arange(24)
frame = np.linalg.qr(np.random.default_rng(9).normal(size=(6, 2)))[0]
points = np.stack([np.cos(angles), np.sin(angles)], axis=1) @ frame.T
with jax.enable_x64(True):
    jacobians = np.asarray(jax.vmap(jax.jacfwd(lambda a: a / jnp.linalg.norm(a)))(jnp.asarray(points)))
values = np.linalg.svd(np.linalg.multi_dot(jacobians), compute_uv=False)
assert np.allclose(values, [1] * 4 + [0.8**23, 0], rtol=1e-12, atol=1e-14)
print(f"smallest non-zero singular value {values[4]:.12f}, 0.8**23 = {0.8**23:.12f}")

# The triangle does the same from the 24 × 24 Gram matrix alone.
triangle = np.triu(points @ points.T)
inverse = np.linalg.inv(triangle)
assert np.allclose(np.eye(6) - points.T @ inverse @ points, np.linalg.multi_dot(jacobians), atol=1e-12)

checks = derive("projections").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
