r"""The depth law at initialisation, with the 1/d term that decides how far it may be trusted.

Claim. Behind an output norm, with moments q and χ of the branch,

.. math::  \frac{\mathbb E\|g_{in}\|^2}{\|g_{out}\|^2} = \frac{\alpha^2 + \chi}{\alpha^2 + q},

and behind an input norm Q' = α²Q + q and α² + χ/Q. For q = χ (linear, ReLU) the first is 1: what the norm takes, the branch
returns. The article's (1 − c)^L is the same law with χ = 0.

Why there is no projection in it. The gradient v behind a norm is tangent, v·u = 0. One sub-layer down it is g = (αI + F)ᵀv, and
g·x = v·(αx + Fx) = v·(u + Fx − f) = v·(Fx − f), which Euler's theorem makes zero for degree-1 branches. So the next norm finds
nothing along its own direction: the projection costs 1/d once, for the cotangent from outside.

Typical against mean. log g² is a sum over layers of terms of variance O(1/d): the mean power and the typical power part by half
of that variance per layer. A linear branch has the typical log rate −(1 − 1/V²)/d and the mean rate +(1 − 1/V²)/d, V = 1 + q.
"""

import math

import numpy as np
import sympy as sp

from gradflow.branches import Linear
from gradflow.laws import law
from gradflow.symbolic import derive
from gradflow.symbolic.depth import MOMENTS, alpha, centred, chi, d, output_norm, q

# The linear branch: every fourth-order moment of the second matrix is absent, F x = f.
terms = output_norm()
linear = {MOMENTS[k]: 0 for k in ("defect", "overlap", "power_var", "slope_var", "slope_draw", "covariance", "cross")}
linear |= {chi: q, alpha: 1, centred: 0}
V, t = 1 + q, sp.Symbol("t", positive=True)
typical = (terms.log_norm + terms.log_branch + sp.log(1 - terms.aligned)).subs(linear)
spread = (terms.spread_shared + terms.spread_own).subs(linear)
typical_rate = sp.diff(typical.subs(d, 1 / t), t).subs(t, 0)
mean_rate = typical_rate + sp.simplify(spread * d) / 2
assert sp.simplify(typical_rate + (1 - 1 / V**2)) == 0
assert sp.simplify(mean_rate - (1 - 1 / V**2)) == 0
print("typical log-power rate × d:", sp.factor(typical_rate), "   mean:", sp.factor(sp.simplify(mean_rate)))

# The trunk is the same law with F = 0: the norm's 1/√V, and (1 − 1/V)/d of the power to each projection.
frozen = {MOMENTS["chi"]: 0, MOMENTS["defect"]: q, MOMENTS["overlap"]: -q, alpha: 1}
assert sp.simplify(terms.aligned.subs(frozen) - (1 - 1 / V) / d) == 0

# Leading order end to end, 24 ReLU sub-layers of unit gain (q = χ = 1/2): powers known in closed form.
assert math.isclose(law("post-ln", "mlp:relu", 24).exact[0, 0] ** 2, 1)
assert math.isclose(law("pre-ln", "mlp:relu", 24).exact[0, 0] ** 2, 13)
assert math.isclose(law("pre-ln", "mlp:relu", 24, final_norm=True).exact[0, 0] ** 2, 1)
assert math.isclose(law("post-ln", "mlp:relu", 24).trunk[0, 0] ** 2, 1.5**-24)

# Monte Carlo of whole networks in NumPy, d = 48, 12 post-LN sub-layers of RMSNorm and a linear branch, q = 9/16.
rng = np.random.default_rng(0)
width, depth, nets, sigma = 48, 12, 600, 0.75
logs = np.empty((nets, 2))
for n in range(nets):
    weights = sigma * rng.standard_normal((depth, width, width)) / math.sqrt(width)
    x = rng.standard_normal(width)
    x *= math.sqrt(width) / np.linalg.norm(x)
    us = []
    for w in weights:
        us.append(x + w @ x)
        x = us[-1] * math.sqrt(width) / np.linalg.norm(us[-1])
    g = trunk = rng.standard_normal(width)
    start = np.linalg.norm(g)
    for w, u in zip(weights[::-1], us[::-1], strict=True):
        unit, scale = u / np.linalg.norm(u), math.sqrt(width) / np.linalg.norm(u)
        v, trunk = (scale * (a - unit * (unit @ a)) for a in (g, trunk))
        g = v + w.T @ v
    logs[n] = np.log([np.linalg.norm(g) / start, np.linalg.norm(trunk) / start])

predicted = law("post-ln", Linear(sigma), depth, d=width, norm="rms")
for k, name in enumerate(("exact", "trunk")):
    expected, sd = getattr(predicted, f"log_{name}")[0, 0], getattr(predicted, f"sd_{name}")[0]
    seen, error = logs[:, k].mean(), logs[:, k].std() / math.sqrt(nets)
    print(
        f"{name}: log gain {seen:+.4f} ± {error:.4f}, law {expected:+.4f}; spread {logs[:, k].std():.3f}, law {sd:.3f}"
    )
    assert abs(seen - expected) < 4 * error
    assert abs(logs[:, k].std() / sd - 1) < 0.15

checks = derive("depth-law").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
