r"""LayerNorm's Jacobian, for every width d: RMSNorm's at the centred vector, times the centring matrix.

Claim. With y = Px, P = I − 11ᵀ/d, t² = ‖y‖²/d + ε, gain γ and bias b,

.. math::  N(x) = \gamma \odot y/t + b, \qquad
           J = \operatorname{diag}(\gamma)\,\frac1t\Bigl(P - \frac{y y^\top}{d\,t^2}\Bigr).

At γ = 1 the singular values are 1/t (d − 2 times), ε/t³ along y, and 0 along 1; at ε = 0 the rank is d − 2.
Source of the map: Ba, Kiros and Hinton 2016; derived here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.index import contract, d, delta, evaluate, gather, i, j, k, l, m, partial, total
from gradflow.symbolic.norms import bias, eps, frobenius_squared, gamma, norm_formula, r, rank, spectrum, x, y

# 1. Centring is linear; its derivative is P, and what it yields sums to zero.
centred = x[i] - total(x[l], l) / d
centring = partial(centred, x[j])
assert centring == delta(i, j) - 1 / d
assert contract(total(centred, i)) == 0
# P is a projection: P P = P.
assert contract(total(centring.xreplace({j: k}) * centring.xreplace({i: k}), k) - centring) == 0
print("P_ij =", centring)

# 2. RMSNorm at y, with gain and bias.
value = gamma[i] * y[i] / sp.sqrt(total(y[k] ** 2, k) / d + eps) + bias[i]
at_y = partial(value, y[m])

# 3. The chain rule: J_ij = Σ_m ∂N_i/∂y_m · P_mj. Σy appears once, and is zero by 1.
known = {total(y[k] ** 2, k): d * r**2, total(y[k], k): sp.Integer(0)}
jacobian = gather(total(at_y * centring.xreplace({i: m}), m), known)
t = sp.sqrt(r**2 + eps)
claim = gamma[i] / t * (delta(i, j) - 1 / d - y[i] * y[j] / (d * t**2))
assert contract(jacobian - claim) == 0
print("J_ij =", jacobian)

# 4. What it does, at unit gain: it wipes out 1, it shrinks y to ε/t³, and it is symmetric.
plain = claim.xreplace({gamma[i]: sp.Integer(1)})
assert sp.simplify(gather(total(plain, j), known)) == 0
assert sp.simplify(gather(total(plain * y[j], j), known) / y[i] - eps / t**3) == 0
assert contract(plain - plain.xreplace({i: j, j: i})) == 0
formula = norm_formula("layernorm")
assert dict(spectrum(formula)) == {1 / t: d - 2, sp.Integer(0): 1, eps / t**3: 1}
assert rank(formula) == d - 2
assert sp.simplify(frobenius_squared(formula) - (d - 2 + (eps / t**2) ** 2) / t**2) == 0
print("singular values:", spectrum(formula))

# 5. Exact rationals, against SymPy's derivative of the written-out components. ε is chosen to make t whole.
for point, epsilon in (((0, 1, 5), sp.Rational(13, 3)), ((2, 0, 4, -2), 4), ((4, 2, 5, 1, 3), 2)):
    size = len(point)
    entries, gains = sp.Matrix(sp.symbols(f"x0:{size}", real=True)), [sp.Rational(a + 1, 2) for a in range(size)]
    middle = entries - sp.ones(size, 1) * sum(entries) / size
    truth = sp.diag(*gains) * middle / sp.sqrt(middle.dot(middle) / size + epsilon)
    at = dict(zip(entries, point, strict=True))
    less = middle.subs(at)
    values = {y: less, gamma: gains, eps: epsilon, r: sp.sqrt(less.dot(less) / size)}
    assert evaluate(claim, size, values, (i, j)) == truth.jacobian(entries).subs(at)
print("exact at d = 3, 4, 5")

# 6. Autodiff in float64.
point, gains, shift = np.random.default_rng(3).normal(size=(3, 8))
with jax.enable_x64(True):
    truth = np.asarray(
        jax.jacfwd(lambda a: gains * (a - a.mean()) / jnp.sqrt(jnp.var(a) + 1e-5) + shift)(jnp.asarray(point))
    )
less, t_squared = point - point.mean(), point.var() + 1e-5
here = gains[:, None] / np.sqrt(t_squared) * (np.eye(8) - 1 / 8 - np.outer(less, less) / (8 * t_squared))
assert np.allclose(truth, here, rtol=1e-12, atol=1e-14)

checks = derive("layernorm").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
