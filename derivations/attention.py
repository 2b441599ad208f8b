r"""Attention at initialisation: rank collapses, and the gradient's consensus survives.

Claim. Tokens of mean square p and mutual product c leave attention with random weights as (c + (p − c) K₁, c + (p − c) K₂),
where K₁ = n E a² of a softmax over Gaussian logits and K₂ is the overlap of two queries' rows. Of what tokens share attention
keeps all, of what differs between them K₁ − K₂, which is 0 as logits even out: :math:`s^2 = p(p-c) \to 0`.

Rank collapse (Dong et al. 2021, 2103.03404; Noci et al. 2022, 2206.03126). In post-LN the sum x + f has the difference
(p − c)(1 + K₁ − K₂) and the power 1 + q_f, q_f → 1 as c → p: with every sub-layer half of the tokens' difference is lost, as
the norm divides by 2 what the branch did not add to.

The gradient goes the same way back. Its consensus, the mean over tokens, passes the values whole: rows of a sum to 1, so that
Σ_j Σ_i a_ij g_i = Σ g_i. Its differences come back with K₁ − K₂, so that behind the norm's 1/(1 + q_f) they are halved where
the consensus gets (1 + 1)/2. A cotangent that all tokens share (a pooled loss) therefore keeps its power in deep post-LN, while
one that differs from token to token (a loss per token) loses its differences first: its power falls to 1/n, the share of the
consensus in it, and no further. In the first sub-layers, where tokens still differ, q_f is small and the consensus is added to
itself: there its power grows n times.
"""

import numpy as np
import sympy as sp

from gradflow import law
from gradflow.branches import Attention
from gradflow.symbolic import attention as a
from gradflow.symbolic import derive

# Equal tokens: uniform rows, nothing through the scores, the consensus untouched.
uniform = {a.K1: 1 / a.n, a.K2: 1 / a.n, a.p: 1, a.c: 1, a.others: a.n - 1}
assert [sp.simplify(e.subs(uniform)) for e in a.mixed()] == [1, 1]
assert all(sp.simplify(e.subs(uniform)) == 0 for e in (*a.through_queries(), *a.through_keys()))
own, other = (e.subs(uniform) for e in a.through_values())
assert sp.simplify(own + (a.n - 1) * other - (a.G + (a.n - 1) * a.C)) == 0  # consensus: kept
assert sp.simplify(own - other) == 0  # differences: none come back

# Post-LN, 24 sub-layers of attention alone: 1 − cosine halves with each, as soon as tokens are alike.
post = law("post-ln", "attention", 24, tokens=32)
apart = 1 - post.token_cosine[0]
rates = apart[1:] / apart[:-1]
print("1 - cosine, ratio of a sub-layer to the one before:", np.round(rates[[0, 1, 2, 4, 8, 22]], 4))
assert abs(rates[-1] - 0.5) < 1e-3
assert np.all(np.diff(rates[:12]) < 0)

# Backwards: a shared cotangent keeps its power, one per token falls to the share of its consensus.
depth = 40
shared = law("post-ln", "attention", depth, tokens=32, cotangent_cosine=1.0)
each = law("post-ln", "attention", depth, tokens=32)
for down in (1, 4, 8, 16, 40):
    powers = [p.exact[0, depth - down] ** 2 for p in (shared, each)]
    print(f"{down:2d} sub-layers down: power of a shared cotangent {powers[0]:.4f}, of one per token {powers[1]:.4f}")
assert abs(each.exact[0, depth - 16] ** 2 * 32 - 1) < 0.01
assert abs(shared.exact[0, depth - 16] ** 2 - 1) < 0.01
assert 0.9 < shared.exact[0, 0] ** 2 / 32 < 1.4

# Uniform rows are a law of their own, and the wrong one: at cosine 0 K₁ is 2.3 times 1/n (n = 32), not 1/n.
first = law("post-ln", "attention", 1, tokens=32)
q = first.branch_rms[0, 0] ** 2
print(f"first sub-layer's branch power {q:.5f}, uniform {1 / 32:.5f}")
assert 2.2 < q * 32 < 2.5

# Keys by position: a causal token sees fewer keys the earlier it stands, the first itself alone.
causal = law("post-ln", Attention(causal=True), 12, tokens=32)
assert causal.branch_rms[0, 0] > first.branch_rms[0, 0]

checks = derive("attention").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
