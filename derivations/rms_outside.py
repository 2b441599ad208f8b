r"""RMSNorm's Jacobian with ε outside the root, for every width d, and how the two places of ε differ.

Claim. With r² = ‖x‖²/d,

.. math::  J_{ij} = \frac{\gamma_i}{r+\varepsilon}\Bigl(\delta_{ij} - \frac{x_i x_j}{d\,r\,(r+\varepsilon)}\Bigr).

The share kept along x is ε/(r+ε), first order in ε/r, where ε inside the root keeps ε/(r²+ε), first order in ε/r².
The two are different functions: no choice of one ε reproduces the other at every r.
"""

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.index import contract, d, delta, evaluate, gather, i, j, k, partial, total
from gradflow.symbolic.norms import eps, gamma, norm_formula, norm_of, r, spectrum, x

rms = sp.sqrt(total(x[k] ** 2, k) / d)
jacobian = gather(partial(gamma[i] * x[i] / (rms + eps), x[j]), {total(x[k] ** 2, k): d * r**2})
claim = gamma[i] / (r + eps) * (delta(i, j) - x[i] * x[j] / (d * r * (r + eps)))
assert contract(jacobian - claim) == 0
print("J_ij =", jacobian)

# Both places of ε are one family, N = x·g(r): the scale is g and the removed share −r g'/g.
outside, inside = norm_formula("rms-outside"), norm_formula("rms")
for formula in (outside, inside):
    g = formula.scale
    assert sp.simplify(formula.removed + r * g.diff(r) / g) == 0
kept = [sp.simplify(1 - formula.removed) for formula in (outside, inside)]
assert [sp.series(share, eps, 0, 2).removeO() for share in kept] == [eps / r, eps / r**2]
print("share kept along x: outside", kept[0], " inside", kept[1])
assert spectrum(outside) == ((1 / (r + eps), d - 1), (eps / (r + eps) ** 2, 1))

# A norm of one's own comes out the same way: g = 1/(1 + r²) removes 2r²/(1 + r²), more than everything once r > 1,
# and the gradient along x turns its sign.
own = norm_of(1 / (1 + r**2))
assert sp.simplify(own.removed - 2 * r**2 / (1 + r**2)) == 0

# Exact rationals at rms 3, 3, 2.
epsilon = sp.Rational(1, 2)
for point in ((5, 1, 1), (1, 1, 3, 5), (1, 1, 1, 1, 4)):
    size, entries = len(point), sp.Matrix(sp.symbols(f"x0:{len(point)}", real=True))
    written = entries / (sp.sqrt(entries.dot(entries) / size) + epsilon)
    truth = written.jacobian(entries).subs(dict(zip(entries, point, strict=True)))
    values = {x: point, gamma: [1] * size, eps: epsilon, r: sp.sqrt(sp.Rational(sum(c * c for c in point), size))}
    assert evaluate(claim, size, values, (i, j)) == truth.applyfunc(sp.nsimplify)
print("exact at d = 3, 4, 5")

point = np.random.default_rng(2).normal(size=6)
with jax.enable_x64(True):
    truth = np.asarray(jax.jacfwd(lambda a: a / (jnp.sqrt(jnp.mean(a**2)) + 0.1))(jnp.asarray(point)))
length = np.sqrt(np.mean(point**2))
here = (np.eye(6) - np.outer(point, point) / (6 * length * (length + 0.1))) / (length + 0.1)
assert np.allclose(truth, here, rtol=1e-13, atol=1e-15)

checks = derive("rms-outside").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
