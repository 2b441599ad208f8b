r"""The moments of a branch: what the depth law needs to know of f(x) = W₂ φ(W₁ x).

Claim. With Var W₁ = 1/d, Var W₂ = s²/m and rms(x) = 1,

.. math::  q_f = s^2\,\mathbb E\,\varphi(z)^2, \qquad \chi_f = s^2\,\mathbb E\,\varphi'(z)^2, \qquad z \sim N(0, 1).

Degree-1 activations (linear, ReLU) have zφ' = φ, hence q_f = χ_f. The rest are computed from the activation's own SymPy
expression. Values seen in the literature: ReLU 1/2, 1/2; tanh .39429, .46440; exact GELU .42522, .45585.
"""

import math

import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.moments import ACTIVATIONS, gaussian_mean, mlp_moments, slope, z

# Wick's theorem in the large: a polynomial's moments are exact rationals.
for order, double_factorial in ((2, 1), (4, 3), (6, 15), (8, 105)):
    assert gaussian_mean(z**order) == double_factorial
    assert gaussian_mean(z ** (order - 1)) == 0
cube = mlp_moments(z**3, 4.0)
assert (cube.q, cube.chi) == (15, 27)  # E z⁶, 9 E z⁴

# ReLU exactly, and Euler: z φ' − φ = 0.
relu = ACTIVATIONS["relu"]
assert gaussian_mean(relu**2) == gaussian_mean(slope(relu) ** 2) == sp.Rational(1, 2)
assert gaussian_mean((z * slope(relu) - relu) ** 2) == 0

# GELU has a closed form: E z²Φ(z)² = 1/3 + 1/(2π√3).
closed = sp.Rational(1, 3) + 1 / (2 * sp.pi * sp.sqrt(3))
assert abs(gaussian_mean(ACTIVATIONS["gelu"] ** 2) - closed.evalf(20)) < 1e-16

# Monte Carlo: one wide layer in NumPy, its output's mean square and the power of Fᵀg, each within 4 standard errors.
rng = np.random.default_rng(0)
d, m, draws = 64, 256, 400
for name in ("relu", "gelu", "tanh", "silu"):
    row = mlp_moments(ACTIVATIONS[name], m / d)
    phi, dphi = (sp.lambdify(z, e, ["scipy", "numpy"]) for e in (ACTIVATIONS[name], slope(ACTIVATIONS[name])))
    powers = np.empty((draws, 2))
    for n in range(draws):
        x, g = rng.standard_normal((2, d))
        x *= math.sqrt(d) / np.linalg.norm(x)
        w_in, w_out = rng.standard_normal((m, d)) / math.sqrt(d), rng.standard_normal((d, m)) / math.sqrt(m)
        pre = w_in @ x
        f, back = w_out @ phi(pre), w_in.T @ (dphi(pre) * (w_out.T @ g))
        powers[n] = f @ f / d, back @ back / (g @ g)
    seen, error = powers.mean(0), powers.std(0) / math.sqrt(draws)
    print(
        f"{name:5s} q_f {row.q:.5f}, seen {seen[0]:.4f} ± {error[0]:.4f}; χ_f {row.chi:.5f}, seen {seen[1]:.4f} ± {error[1]:.4f}"
    )
    assert np.all(np.abs(seen - (row.q, row.chi)) < 4 * error)

checks = derive("moments").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
