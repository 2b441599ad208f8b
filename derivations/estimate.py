r"""The estimate (1 − c)^L, from both of its readings, and what a branch returns of it.

Claim 1, norm reading. If f = σWx with W_ij ~ N(0, 1/d), then E rms(x + σWx)² = (1 + σ²) rms(x)², so the output norm
divides the gradient by √(1 + σ²) and, to leading order in 1/d, the trunk keeps (1 − c)^L at

.. math::  \sigma(c) = \sqrt{\frac{1}{(1-c)^2} - 1}, \qquad \sigma(1/5) = 3/4 .

Claim 2, alignment reading. Let the unit stream turn by arccos(1 − c) per layer in one plane, and the gradient arrive
in that plane. With constant branches f_j = û_{j+1} − û_j the exact gain is the trunk's, (1 − c)^L: 0.8²⁴ =
0.004722366… . With linear branches f = (R − I)x the same stream has the same trunk and the exact gain 1 − c, at any
depth: the branch returns all that the norms take, but for once. A random cotangent hardly notices either.
"""

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.index import d, gather, i, j, k, l, total
from gradflow.symbolic.projections import L, normal, theta
from gradflow.symbolic.readings import J, W, c, direction, expectation, g, readings, sigma, turn_matrix, x

# Norm reading. One pairing: E W_ik W_jl = δ_ij δ_kl / d, summed over indices for symbolic d.
u = x[i] + sigma * total(W[i, k] * x[k], k)
unit_rms = {total(x[k] ** 2, k): d}
power = gather(expectation(total(u**2, i), W, 1 / d), unit_rms) / d
assert sp.expand(power - (1 + sigma**2)) == 0
print("E rms(u)^2 =", power)
# Three pairings: the variance of that power over draws of W is O(1/d), so one wide network obeys the mean.
fourth = gather(expectation(total(u**2, i) ** 2, W, 1 / d), unit_rms) / d**2
assert sp.simplify(fourth - power**2 - (4 * sigma**2 + 2 * sigma**4) / d) == 0
law = readings()
assert sp.simplify(law.strength**2 - (1 / (1 - c) ** 2 - 1)) == 0
assert law.strength.subs(c, sp.Rational(1, 5)) == sp.Rational(3, 4)
print("sigma(c) =", law.strength, " sigma(1/5) =", law.strength.subs(c, sp.Rational(1, 5)))

# Alignment reading, constant branches. In the plane the layer's Jacobian is n_l n_lᵀ, and the cotangent n_{L+1}.
assert sp.trigsimp(normal(L + 1).dot(normal(L))) == sp.cos(theta)  # what each layer keeps
assert sp.trigsimp(normal(L + 1).dot(direction(L))) == -sp.sin(theta)  # cosine of the arriving gradient with the stream
# cos θ = 1 − c, once for each of the L layers:
assert law.exact_constant == law.trunk == (1 - c) ** L
assert law.cosine.subs(c, sp.Rational(1, 5)) == sp.Rational(3, 5)

# Linear branches: I + F = R takes n_l to n_{l+1}, so each layer hands on the whole of what the last one left.
assert (turn_matrix() * normal(L) - normal(L + 1)).applyfunc(
    lambda e: sp.trigsimp(sp.expand_trig(sp.expand(e)))
) == sp.zeros(2, 1)
assert law.exact_linear == 1 - c

# A Gaussian cotangent sees the Frobenius norm, whatever the Jacobian, and that is d − 2 + (1 − c)^(2L−2).
assert expectation(total(total(g[i] * J[i, j], i) ** 2, j), g, sp.Integer(1)) == total(J[k, l] ** 2, k, l)
at = {c: sp.Rational(1, 5), L: 24, d: 512}
print("trunk", sp.N(law.trunk.subs(at), 12), " random cotangent", sp.N(law.random_gain.subs(at), 6))

# Exact rationals, at d = 3, 4, 5 and L = 24: nothing is multiplied but the stacks' own Jacobians.
for size in (3, 4, 5):
    turn = sp.diag(sp.Matrix([[4, -3], [3, 4]]) / 5, sp.eye(size - 2))
    stream, constant, linear = sp.eye(size)[:, 0], sp.eye(size), sp.eye(size)
    for _ in range(24):
        stream = turn * stream
        keeps = sp.eye(size) - stream * stream.T
        constant, linear = keeps * constant, keeps * turn * linear
    cotangent = turn**25 * sp.eye(size)[:, 1]
    assert (cotangent.T * constant).norm() == sp.Rational(4, 5) ** 24
    assert (cotangent.T * linear).norm() == sp.Rational(4, 5)
print("exact at d = 3, 4, 5: constant", sp.Rational(4, 5) ** 24, " linear", sp.Rational(4, 5))

# Autodiff: the two networks themselves, d = 4, L = 24, one backward pass each, in float64.
angle = float(np.arccos(0.8))
points = np.zeros((25, 4))
points[:, 0], points[:, 1] = np.cos(angle * np.arange(25)), np.sin(angle * np.arange(25))
rotation = np.eye(4)
rotation[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
cotangent = np.array([-np.sin(25 * angle), np.cos(25 * angle), 0, 0])
with jax.enable_x64(True):
    steps, turn = jnp.diff(jnp.asarray(points), axis=0), jnp.asarray(rotation) - jnp.eye(4)
    branches = {"constant": lambda a, step: step, "linear": lambda a, step: turn @ a}
    gains = {}
    for name, branch in branches.items():

        def network(a: jax.Array, branch: object = branch) -> jax.Array:
            """The post-norm stack."""
            for step in steps:
                a = a + branch(a, step)
                a = a / jnp.linalg.norm(a)
            return a

        gains[name] = float(jnp.linalg.norm(jax.vjp(network, jnp.asarray(points[0]))[1](jnp.asarray(cotangent))[0]))
print("measured:", gains)
assert np.isclose(gains["constant"], 0.8**24, rtol=1e-11)
assert np.isclose(gains["linear"], 0.8, rtol=1e-11)

checks = derive("estimate").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
