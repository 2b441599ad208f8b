r"""End to end: where the depth law telescopes, and what five papers' numbers are in it.

Claim. With degree-1 branches (linear, ReLU: :math:`\chi = q`, Euler) the leading-order power from output to input is

.. math::  \text{post-LN } 1, \; \text{pre-LN } 1 + S q, \; \text{Sandwich } 1 + S, \; \text{LayerNorm Scaling } 1 + q H_S .

Xiong et al. 2020. Their √(2/3) a layer is the norm's 1/√(1 + q) at q = 1/2: true, and of the trunk. What it leaves out is the
branch, which returns √(1 + χ) = √(3/2): the full factor is 1. The exponential decay is not what a post-LN network of ReLU
blocks does at initialisation; it is what it does where the branch returns nothing, χ = 0.

Admin is pre-LN's stream at initialisation. Its ω_s² = 1 + (s − 1) q is the power that pre-LN's stream has at sub-layer s, so that
N(ω x + f) mixes x and f in pre-LN's proportion. With χ = 0 the trunk is ∏ ω_s²/ω_{s+1}² = 1/(1 + S q): a power law in S.

DeepNorm balances two identities. With α² = √S and both gains (4S)^{−1/4} a branch adds q/(4S), so that the worst case is
(1 + q/(4 S^{3/2}))^{−S} → exp(−q/(4√S)), which tends to 1; and its bound on the update, S·2·gain²/α², is 1 at every S.

Pre-LN. The stream grows as √(1 + S q); sub-layer l adds the share q/(1 + l q) of it, so deep blocks add little; the gradient that
reaches sub-layer l has the power Q_S/Q_l, and ‖dL/dW_l‖² goes with 1/Q_{l+1}: larger in early layers by √(Q_S/Q_1).

Why ‖g‖² q is conserved. A degree-1 branch that acts on tokens by themselves has F x = f, so with isotropic weights χ = q, and the
factor of every row is Q_l/Q_{l−1} (or 1 where the stream is normalised): E‖g_l‖² Q_l is the same at every depth.
"""

import math

import sympy as sp

from gradflow.comparing.designs import update
from gradflow.laws import law
from gradflow.schemes import scheme_of
from gradflow.symbolic import derive
from gradflow.symbolic.telescope import ROWS, S, end_to_end, q

half = sp.Rational(1, 2)
assert end_to_end("post-ln") == 1
assert end_to_end("pre-ln").subs({S: 24, q: half}) == 13
assert end_to_end("sandwich").subs(S, 24) == 25
assert sp.sqrt(end_to_end("post-ln trunk").subs({S: 1, q: half})) == sp.sqrt(sp.Rational(2, 3))  # Xiong's factor
assert sp.simplify(end_to_end("admin trunk") - 1 / (1 + S * q)) == 0

# Xiong's factor beside what it leaves out, sub-layer by sub-layer.
post = law("post-ln", "mlp:relu", 24)
print(
    f"post-LN, ReLU: norm {post.norm[0, 0]:.5f} = sqrt(2/3), branch {post.branch[0, 0]:.5f}, net {post.net[0, 0]:.5f}"
)
assert math.isclose(post.norm[0, 0] ** 2, 2 / 3)
assert math.isclose(post.norm[0, 0] * post.branch[0, 0], 1)

# Admin's skip is pre-LN's stream.
admin, pre = law("admin", "mlp:relu", 24), law("pre-ln", "mlp:relu", 24)
assert max(abs(admin.skip[0] - pre.stream_rms[0])) < 1e-12

# DeepNorm's bound on the update is 1 at every depth, and its trunk stays near 1.
for size in (2, 24, 2000):
    assert math.isclose(update(scheme_of("deepnorm"), size), 1)
    seen, limit = law("deepnorm", "mlp:relu", size).trunk[0, 0] ** 2, math.exp(-0.5 / (4 * math.sqrt(size)))
    print(f"DeepNorm, S = {size}: trunk power {seen:.6f}, exp(-q/(4 sqrt S)) = {limit:.6f}")
    assert abs(seen - limit) < 0.1 / size**1.5

# ‖g_l‖² Q_l is conserved, and the weight gradients of pre-LN fall as 1/√Q_{l+1}.
for name in ("post-ln", "pre-ln", "sandwich", "layernorm-scaling", "no-norm", "mix-ln"):
    p = law(name, "mlp:relu", 12)
    conserved = p.exact[0, :12] ** 2 * p.stream_rms[0] ** 2
    assert max(conserved) - min(conserved) < 1e-9 * max(conserved), name
wide = law("pre-ln", "mlp:relu", 24, d=10**9)
ratio = wide.weight_grad[0, 0] / wide.weight_grad[0, -1]
print(f"pre-LN, S = 24: first over last weight gradient {ratio:.5f}, sqrt(Q_24/Q_1) = {math.sqrt(13 / 1.5):.5f}")
assert math.isclose(ratio, math.sqrt(13 / 1.5), rel_tol=1e-6)
assert len(ROWS) == 9

checks = derive("end-to-end").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
