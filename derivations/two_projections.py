r"""Two projections in a row: only the angle between their directions matters.

Claim. For unit vectors u, v with u·v = cos θ, the product A = (I − uuᵀ)(I − vvᵀ) has the singular values

.. math::  1 \;(d-2 \text{ times}), \qquad |\cos\theta|, \qquad 0 .

So two norms in a row cost a gradient at most |cos θ| in one single direction; if the second meets the direction that
the first has already removed (θ = 0), it costs nothing more.
"""

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.index import contract, d, delta, gather, i, j, k, total, vector
from gradflow.symbolic.projections import lam, projection_product, theta, turning_directions

# Multiply out and contract, for symbolic d.
u, v, cosine = vector("u"), vector("v"), sp.cos(theta)
known = {total(u[k] ** 2, k): 1, total(v[k] ** 2, k): 1, total(u[k] * v[k], k): cosine}
product = gather(total((delta(i, k) - u[i] * u[k]) * (delta(k, j) - v[k] * v[j]), k), known)
print("A_ij =", product)

# Only u and v occur: A = I + U M Uᵀ with U = [u, v], its Gram matrix G and a 2 × 2 core M.
operator = projection_product(turning_directions(2))
assert operator.core == sp.ImmutableMatrix([[-1, cosine], [0, -1]])
columns = (u, v)
written = sum(operator.core[a, b] * columns[a][i] * columns[b][j] for a in range(2) for b in range(2))
assert contract(product - delta(i, j) - written) == 0

# AᵀA = I + U(M + Mᵀ + MᵀGM)Uᵀ. Sylvester: its determinant is one of size 2, whatever d is.
square = operator.T @ operator
assert sp.expand(square.charpoly() - lam * (lam - cosine**2) * (lam - 1) ** (d - 2)) == 0
assert dict(operator.singular_values()) == {sp.Integer(1): d - 2, sp.Integer(0): 1, sp.Abs(cosine): 1}
print("singular values:", operator.singular_values())
# The trace agrees: 2 + … = d − 2 + cos²θ, the squared Frobenius norm.
assert sp.expand(square.trace() - (d - 2 + cosine**2)) == 0

# Exact: rational unit vectors, the characteristic polynomial of the explicit matrix.
pairs = (((1, 2, 2), (2, 1, 2), 3), ((1, 1, 1, 1), (1, 1, 1, -1), 2), ((1, 1, 1, 2, 3), (3, 2, 1, 1, 1), 4))
for left, right, whole in pairs:
    a, b = sp.Matrix(left) / whole, sp.Matrix(right) / whole
    size = a.rows
    explicit = (sp.eye(size) - a * a.T) * (sp.eye(size) - b * b.T)
    found = (explicit.T * explicit).charpoly(lam).as_expr()
    assert sp.expand(found - lam * (lam - a.dot(b) ** 2) * (lam - 1) ** (size - 2)) == 0
print("exact at d = 3, 4, 5")

# Against autodiff: the Jacobians of x/‖x‖ at two points, times the lengths, are the two projections.
points = np.random.default_rng(8).normal(size=(2, 7))
with jax.enable_x64(True):
    jacobians = jax.vmap(jax.jacfwd(lambda a: a / jnp.linalg.norm(a)))(jnp.asarray(points))
lengths = np.linalg.norm(points, axis=1)
values = np.linalg.svd(
    lengths[0] * np.asarray(jacobians[0]) @ (lengths[1] * np.asarray(jacobians[1])), compute_uv=False
)
between = abs(points[0] @ points[1]) / lengths.prod()
assert np.allclose(values, [1] * 5 + [between, 0], atol=1e-13)

checks = derive("two-projections").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
