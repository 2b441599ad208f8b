r"""The moments of a branch: what the depth law needs to know of f(x) = W₂ φ(W₁ x).

Claim. With Var W₁ = 1/d, Var W₂ = s²/m and rms(x) = 1,

.. math::  q_f = s^2\,\mathbb E\,\varphi(z)^2, \qquad \chi_f = s^2\,\mathbb E\,\varphi'(z)^2, \qquad z \sim N(0, 1).

Degree-1 activations (linear, ReLU) have zφ' = φ, hence q_f = χ_f. The rest are computed from the activation's own SymPy
expression. Values seen in the literature: ReLU 1/2, 1/2; tanh .39429, .46440; exact GELU .42522, .45585.

Three variants follow from these (`gradflow.symbolic.variants`), h being the hidden units, ∇h their slopes:

*A norm over the hidden units*, f = W₂ N(h) (NormFormer; Sub-LN). N divides by √K, where K = h·h/m, of the centred h for
LayerNorm: a mean over m units, hence E h² or Var h up to a relative 1/√m. So

.. math::  q_f = s^2, \qquad \chi_f = s^2\,\mathbb E|\nabla h|^2 / K .

DN = (P − ĥĥᵀ/m)/√K, ĥ of unit rms, differs from I/√K by one rank, or two. v = W₂ᵀg is isotropic and independent of h, so that
a rank takes 1/m of ‖v‖². Fᵀg is W₁ᵀD on what is left, D = diag ∇h, and of E‖Fᵀg‖² the rank takes the share of ‖W₁ᵀDĥ‖²/m in
E tr(DW₁W₁ᵀD) = m E|∇h|². W₁ᵀDĥ has (m/√d) E zφ'ĥ along x, by W₁x = z, and √m at random off it: shares of order 1/d and 1/m.
For ReLU and RMSNorm the first is Euler's theorem: N∘h has degree 0, Fx = 0, and one direction of d is lost.

*Random biases*, b₁ ~ N(0, σ₁²), b₂ ~ N(0, σ₂²). A pre-activation has the power P = p + σ₁², of which ρ = p/P comes from x.
Given it, √P z, x's part is ρ√P z + √(ρ(1 − ρ)P) w. Hence q_f(P) + σ₂², ρ χ_f(P), and F x = ρ z·∇h + √(ρ(1 − ρ)) |∇h| w.

*Dropout*, f ⊙ μ with E μ = 1, E μ² = 1/(1 − r): both moments over 1 − r, as μ is independent of f and of g.
"""

import math

import numpy as np
import sympy as sp

from gradflow.branches import MLP
from gradflow.symbolic import derive, variants
from gradflow.symbolic.moments import ACTIVATIONS, BranchMoments, gaussian_mean, mlp_moments, slope, z

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

# A norm over the hidden units: ReLU has K = 1/2 (RMSNorm), 1/2 − 1/(2π) (LayerNorm); the ratio χ_f/q_f is 1 or 1.4669…
for norm, K in (("rms", sp.Rational(1, 2)), ("layernorm", sp.Rational(1, 2) - 1 / (2 * sp.pi))):
    assert sp.simplify(gaussian_mean(relu**2) - int(norm == "layernorm") * gaussian_mean(relu) ** 2 - K) == 0
    at = variants.normed(BranchMoments(q=sp.Rational(1, 2), chi=sp.Rational(1, 2)), K)
    found = MLP("relu", hidden_norm=norm).moments()
    assert (at.q, found.q) == (1, 1.0)
    assert abs(float(at.chi) - found.chi) < 1e-14
assert abs(found.chi - 1.4669422069) < 1e-10

# What the rank-one part takes, for ReLU and RMSNorm: all that F has along x, 1/d, and 1/(mK) off it.
for d in (8, 32):
    taken = []
    for _ in range(600):
        x, g = rng.standard_normal((2, d))
        x *= math.sqrt(d) / np.linalg.norm(x)
        w_in, w_out = rng.standard_normal((4 * d, d)) / math.sqrt(d), rng.standard_normal((d, 4 * d)) / math.sqrt(4 * d)
        pre = w_in @ x
        h = np.maximum(pre, 0)
        K = h @ h / h.size
        v = w_out.T @ g / math.sqrt(K)
        whole, left = (w_in.T @ ((pre > 0) * u) for u in (v, v - h * (h @ v) / (h @ h)))
        assert abs(left @ x) < 1e-10 * np.linalg.norm(left)
        taken.append((whole @ whole - left @ left) / (g @ g))
    share, error = np.mean(taken), np.std(taken) / math.sqrt(len(taken))
    print(f"d = {d}: the rank-one part takes {share:.4f} ± {error:.4f}; 1/d + 2/m = {1.5 / d:.4f}")
    assert abs(share - 1.5 / d) < 4 * error

# Random biases: φ = u³ with u = x's part and b the bias, exactly by Wick, against the map from the moments at P = p + σ².
u, b, p, sigma2 = sp.symbols("u b p sigma2", positive=True)


def wick(g):
    """E of a polynomial in u ~ N(0, p) and b ~ N(0, σ²)."""

    def moment(n, variance):
        return 0 if n % 2 else sp.factorial2(n - 1) * variance ** (n // 2)

    terms = sp.Poly(sp.expand(g), u, b).terms()
    return sum(c * moment(i, p) * moment(j, sigma2) for (i, j), c in terms)


P = p + sigma2
f, df = (u + b) ** 3, 3 * (u + b) ** 2
cubic = {
    name: value * P**3 for name, value in {"q": 15, "chi": 27, "defect": 60, "overlap": 30}.items()
}  # degree 3: Fx = 3f
mapped = variants.biased_in(BranchMoments(**cubic), p / P)
direct = {"q": wick(f**2), "chi": p * wick(df**2), "defect": wick((u * df - f) ** 2), "overlap": wick((u * df - f) * f)}
for name, value in direct.items():
    assert sp.simplify(getattr(mapped, name) - value) == 0, name
out = variants.biased_out(mapped, sp.Symbol("s"))
assert sp.simplify(out.q - mapped.q - sp.Symbol("s")) == 0
assert out.chi == mapped.chi

# Dropout: E μ² of a mask that is 1/(1 − r) with probability 1 − r.
r = sp.Symbol("r")
assert sp.simplify((1 - r) * (1 / (1 - r)) ** 2 - variants.dropped(BranchMoments(1, 1), r).q) == 0

checks = derive("moments").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
