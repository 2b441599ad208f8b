r"""Several residual streams: the Jacobian of one equation, and the law of its Grams.

Claim. With n streams X, read by r, written to by w and kept by R,

.. math::  X' = N_{out}(R X + w \otimes N_b(f(N_{in}(r^T X)))), \qquad
           J = DN_{out}\,(R \otimes I + w \otimes (DN_b\,F\,DN_{in}) \otimes r^T).

At initialisation f has zero mean given the streams and F zero mean given the gradient, so that the Gram K of the streams and the
Gram G of the gradient close among themselves to leading order in 1/d: K goes to D(R K Rᵀ + q w wᵀ)D and G back to
Rᵀ(DGD)R + r rᵀ·(wᵀDGDw)·χ/p, with D the gains 1/rms of the output norms. One stream is the ordinary depth law.

What it says of the published rows. Hyper-connections at initialisation are pre-LN, n times over: R = I and every stream gets what
the branch adds. A doubly stochastic R keeps the sum of the streams forward and of the gradients back, so no product of such R
grows; the gradient's *exact* gain grows about as pre-LN's, because what grows there comes back through the branches.
"""

import math

import numpy as np

from gradflow.laws import law
from gradflow.streams import BY_NAME, composite, sinkhorn
from gradflow.symbolic import derive

# hyper-connections at initialisation are pre-LN, factor by factor end to end
block = ("linear", "mlp:tanh")
one, four = law("pre-ln", block, 12), law("hyper-connections", block, 12)
assert math.isclose(one.exact[0, 0], four.exact[0, 0], rel_tol=1e-12)
assert math.isclose(four.trunk[0, 0], 1, rel_tol=1e-12)

# B2T: post-LN's trunk passes every norm, the connection only the last one of each block
post, b2t = law("post-ln", block, 12), law("b2t", block, 12)
print(f"trunk over 12 blocks: post-LN {post.trunk[0, 0]:.2e}, B2T {b2t.trunk[0, 0]:.3f}")
assert post.trunk[0, 0] < 0.01 < b2t.trunk[0, 0]

# mHC: rows sum to 1 to rounding, columns as far as 20 iterations go; free matrices grow
rng = np.random.default_rng(0)
free = np.exp(rng.standard_normal((48, 4, 4)))
mixed = sinkhorn(free)
print(f"column sums are off by {np.abs(mixed.sum(-2) - 1).max():.1e} at most after 20 iterations")
gains = composite(BY_NAME["mhc"], 48)
print(
    f"composite of 48: {gains.forward[0]:.6f} forward, {gains.backward[0]:.6f} back; law {law('mhc', block, 24).exact[0, 0]:.3f}"
)
assert abs(gains.forward[0] - 1) < 1e-5
assert abs(gains.backward[0] - 1) < 1e-4

checks = derive("streams").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
