r"""The Jacobian of u ↦ u/‖u‖, for every width d.

Claim. With n = ‖u‖ and û = u/n,

.. math::  \frac{\partial}{\partial u_j}\frac{u_i}{n} = \frac1n\Bigl(\delta_{ij} - \hat u_i \hat u_j\Bigr),

so the gradient loses exactly its part along û and what is left is divided by ‖u‖; the rank is d − 1. The map has
degree 0, and Euler's identity J·u = 0 says the same thing without a derivative in sight.
"""

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.index import contract, d, delta, evaluate, gather, i, j, k, partial, total, vector
from gradflow.symbolic.norms import norm_formula, rank

u = vector("u")
n = sp.Symbol("n", positive=True)

# The length, and one quotient rule. The delta is ranged over 0 … d−1, so the sum over it needs no cases.
length = sp.sqrt(total(u[k] ** 2, k))
assert partial(length, u[j]) == u[j] / length

jacobian = partial(u[i] / length, u[j])
in_n = gather(jacobian, {total(u[k] ** 2, k): n**2})
claim = (delta(i, j) - u[i] * u[j] / n**2) / n
assert contract(in_n - claim) == 0
print("d/du_j (u_i/n) =", in_n)

# Euler: J u = 0, contracted for symbolic d.
assert gather(total(jacobian * u[j], j), {total(u[k] ** 2, k): n**2}) == 0

# Idempotent: (nJ)² = nJ, so nJ is a projection; its trace d − 1 is its rank.
square = gather(n**2 * total(claim.xreplace({j: k}) * claim.xreplace({i: k}), k), {total(u[k] ** 2, k): n**2})
assert contract(square - n * claim) == 0
trace = gather(total(n * claim.xreplace({j: i}), i), {total(u[k] ** 2, k): n**2})
assert trace == d - 1 == rank(norm_formula("unit"))
print("n J is idempotent with trace", trace)

# Exact rationals: vectors of whole length, against SymPy's derivative of the written-out components.
for point in ((1, 2, 2), (1, 1, 1, 1), (1, 1, 1, 2, 3)):
    size, entries = len(point), sp.Matrix(sp.symbols(f"u0:{len(point)}", real=True))
    truth = (entries / sp.sqrt(entries.dot(entries))).jacobian(entries).subs(dict(zip(entries, point, strict=True)))
    assert evaluate(claim, size, {u: point, n: sp.sqrt(sum(c * c for c in point))}, (i, j)) == truth
print("exact at d = 3, 4, 5")

# And autodiff, in float64.
point = np.random.default_rng(0).normal(size=7)
with jax.enable_x64(True):
    truth = np.asarray(jax.jacfwd(lambda a: a / jnp.linalg.norm(a))(jnp.asarray(point)))
unit = point / np.linalg.norm(point)
assert np.allclose(truth, (np.eye(7) - np.outer(unit, unit)) / np.linalg.norm(point), rtol=1e-13, atol=1e-15)

checks = derive("unit").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
