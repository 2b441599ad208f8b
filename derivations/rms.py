r"""RMSNorm's Jacobian, ε inside the root, for every width d.

Claim. With r² = ‖x‖²/d, t² = r² + ε and a gain γ,

.. math::  J_{ij} = \frac{\gamma_i}{t}\Bigl(\delta_{ij} - \frac{x_i x_j}{d\,t^2}\Bigr).

At γ = 1 the singular values are 1/t, d − 1 times, and ε/t³ along x: ε keeps the share ε/t² of the gradient along x
that a bare projection would remove. √d times the bare map x/‖x‖ is RMSNorm at ε = 0. Source: Zhang and Sennrich 2019;
derived here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.index import contract, d, delta, evaluate, gather, i, j, k, partial, total
from gradflow.symbolic.norms import bias, eps, frobenius_squared, gamma, norm_formula, r, rank, spectrum, x

# Value and derivative. The bias drops out, the gain stays in front.
mean_square = total(x[k] ** 2, k) / d
value = gamma[i] * x[i] / sp.sqrt(mean_square + eps) + bias[i]
length = {total(x[k] ** 2, k): d * r**2}
jacobian = gather(partial(value, x[j]), length)
t = sp.sqrt(r**2 + eps)
claim = gamma[i] / t * (delta(i, j) - x[i] * x[j] / (d * t**2))
assert contract(jacobian - claim) == 0
print("J_ij =", jacobian)

# The package reads the same two numbers off the same derivative.
formula = norm_formula("rms")
assert formula.scale == 1 / t
assert formula.removed == r**2 / t**2

# Along x, at unit gain: J x = (ε/t³) x. Across x the bracket is the identity.
plain = claim.xreplace({gamma[i]: sp.Integer(1)})
along = sp.simplify(gather(total(plain * x[j], j), length) / x[i])
assert sp.simplify(along - eps / t**3) == 0
assert spectrum(formula) == ((1 / t, d - 1), (eps / t**3, 1))
assert rank(formula) == d - 1
assert sp.simplify(frobenius_squared(formula) - (d - 1 + (eps / t**2) ** 2) / t**2) == 0
print("singular values:", spectrum(formula), " Frobenius norm squared:", frobenius_squared(formula))

# ε = 0 is √d times the bare map.
bare = norm_formula("unit")
assert formula.scale.subs(eps, 0) == sp.sqrt(d) * bare.scale
assert formula.removed.subs(eps, 0) == bare.removed == 1

# Exact rationals: ε = 9r²/16 makes t = 5r/4, with r = 3, 3, 2.
for point in ((5, 1, 1), (1, 1, 3, 5), (1, 1, 1, 1, 4)):
    size, entries = len(point), sp.Matrix(sp.symbols(f"x0:{len(point)}", real=True))
    rms = sp.sqrt(sp.Rational(sum(c * c for c in point), size))
    epsilon, gains = sp.Rational(9, 16) * rms**2, [sp.Rational(a - 1, 3) for a in range(size)]
    written = sp.diag(*gains) * entries / sp.sqrt(entries.dot(entries) / size + epsilon)
    truth = written.jacobian(entries).subs(dict(zip(entries, point, strict=True)))
    assert evaluate(claim, size, {x: point, gamma: gains, eps: epsilon, r: rms}, (i, j)) == truth
print("exact at d = 3, 4, 5")

# Autodiff in float64, with ε as large as the signal and as small as it gets.
point, gains = np.random.default_rng(1).normal(size=(2, 6))
for epsilon in (1.0, 1e-12, 0.0):
    with jax.enable_x64(True):
        truth = np.asarray(jax.jacfwd(lambda a: gains * a / jnp.sqrt(jnp.mean(a**2) + epsilon))(jnp.asarray(point)))  # noqa: B023
    t_squared = np.mean(point**2) + epsilon
    formula_here = gains[:, None] / np.sqrt(t_squared) * (np.eye(6) - np.outer(point, point) / (6 * t_squared))
    assert np.allclose(truth, formula_here, rtol=1e-13, atol=1e-14)

checks = derive("rms").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
