r"""The second derivative of √d·x/‖x‖, for every width d.

Claim. With n = ‖x‖, û = x/n and Q = I − ûûᵀ,

.. math::  D^2N[v, w] = -\frac{\sqrt d}{n^2}\Bigl[(\hat u\cdot v)Qw + (\hat u\cdot w)Qv + (v^\top Q w)\hat u\Bigr].

It says how the Jacobian itself turns when the stream moves: a step across û rotates the removed direction (third
term), a step along û only rescales (first two). This is what the spread of a gradient over seeds is made of.
"""

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.index import contract, d, delta, evaluate, gather, i, j, k, l, partial, total, vector

x, u, v, w = (vector(name) for name in "xuvw")
n = sp.Symbol("n", positive=True)
length = {total(x[k] ** 2, k): n**2}

# Twice the same rule, for symbolic d: three deltas and one product of three entries, symmetric in i, j, l.
value = sp.sqrt(d) * x[i] / sp.sqrt(total(x[k] ** 2, k))
first = partial(value, x[j])
second = partial(first, x[l])
in_n = gather(second, length)
claimed = (
    sp.sqrt(d) / n**3 * (3 * x[i] * x[j] * x[l] / n**2 - x[i] * delta(j, l) - x[j] * delta(i, l) - x[l] * delta(i, j))
)
assert contract(in_n - claimed) == 0
swapped = in_n.xreplace({i: l, l: i})
assert contract(in_n - swapped) == 0
print("d²N_i/dx_j dx_l =", in_n)

# Contract with v and w and put x = n·u, u of unit length.
bilinear = gather(total(second * v[j] * w[l], j, l), length).xreplace({x[i]: n * u[i], x[k]: n * u[k]})
along_v, along_w = total(u[k] * v[k], k), total(u[k] * w[k], k)
across = total(v[k] * w[k], k) - along_v * along_w  # vᵀQw
claim = along_v * (w[i] - along_w * u[i]) + along_w * (v[i] - along_v * u[i]) + across * u[i]
claim = -sp.sqrt(d) / n**2 * claim
assert contract(bilinear - claim) == 0

# Euler. DN has degree −1, so D²N[x, w] = −DN w: both sides contracted, for symbolic d.
euler = gather(total(second * x[j] * w[l], j, l) + total(first * w[j], j), length)
assert contract(euler) == 0
print("D²N[x, w] + DN w =", contract(euler))

# Exact at d = 3, 4, 5, on points of whole length (√d is carried as a surd).
for point in ((1, 2, 2), (1, 1, 1, 1), (1, 1, 1, 2, 3)):
    size, entries = len(point), sp.symbols(f"x0:{len(point)}", real=True)
    at, whole = dict(zip(entries, point, strict=True)), sp.sqrt(sum(c * c for c in point))
    written = sp.sqrt(size) * sp.Matrix(entries) / sp.sqrt(sum(e * e for e in entries))
    left, right = list(range(size)), [sp.Rational(1, a + 2) for a in range(size)]
    slope = sp.Matrix([sum(e.diff(a) * left[p] for p, a in enumerate(entries)) for e in written])
    truth = (slope.jacobian(entries) * sp.Matrix(right)).subs(at)
    here = evaluate(claim, size, {u: [c / whole for c in point], n: whole, v: left, w: right}, (i,))
    assert (here - truth).applyfunc(sp.nsimplify) == sp.zeros(size, 1)
print("exact at d = 3, 4, 5")

# Autodiff: a forward derivative of a forward derivative, in float64.
point, left, right = np.random.default_rng(4).normal(size=(3, 6))


def norm(a: jax.Array) -> jax.Array:
    """√d·a/‖a‖."""
    return jnp.sqrt(a.size) * a / jnp.linalg.norm(a)


with jax.enable_x64(True):
    truth = np.asarray(
        jax.jvp(lambda a: jax.jvp(norm, (a,), (jnp.asarray(left),))[1], (jnp.asarray(point),), (jnp.asarray(right),))[1]
    )
whole = float(np.linalg.norm(point))
unit = point / whole
q = np.eye(6) - np.outer(unit, unit)
here = -np.sqrt(6) / whole**2 * ((unit @ left) * q @ right + (unit @ right) * q @ left + (left @ q @ right) * unit)
assert np.allclose(truth, here, rtol=1e-12, atol=1e-14)

checks = derive("second-derivative").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
