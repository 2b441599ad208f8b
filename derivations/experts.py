r"""A mixture of experts at initialisation: what the router's weights do to the branch, and what a norm behind it undoes.

Claim. For :math:`f = \sum_e w_e f_e` over the k largest of E logits :math:`\ell = W_R x + b`, independent :math:`N(0, \tau^2)`
with :math:`\tau^2 = g^2 p + b^2`, as d → ∞,

.. math::  q_f = q\,\mathbb E\sum_e w_e^2, \qquad
           \chi_f = \chi\,\mathbb E\sum_e w_e^2 + q\,g^2 p\,\mathbb E\sum_{ej} D_{ej}^2, \qquad
           D_{ej} = \partial w_e/\partial\ell_j.

Proof. Experts have last matrices of their own, zero-mean and independent: E f_e·f_e' = 0, which is q_f. Backwards
:math:`F^\top v = \sum_e w_e F_e^\top v + \sum_{ej} (f_e\cdot v)\,D_{ej}\,W_{R,j}`: each f_e·v is N(0, q‖v‖²) over the
expert's last matrix, and the router's rows are orthogonal, of square g². The two sums meet along x alone, which is 1/d.

Behind a norm of f the cotangent has lost its part along f, so that f_e·v has the covariance
:math:`q(\delta_{ee'} - w_e w_{e'}/\sum w^2)`, and all is divided by :math:`q\sum w^2`. Of the router's way there is left

.. math::  g^2 p\,\Big(1 - \mathbb E\sum_e u_e^2\Big), \qquad u_e = w_e^2/\sum w^2,

a softmax of twice the logits over the chosen, whether w was one over the chosen or over all: N(f) does not know the difference.
At k = 1 nothing is left: w scales the one expert, and the norm takes scales out. The spread of Σw² is gone as well: at k = 1 of
a softmax over all logits ‖f‖² varies by 70 % from token to token, behind the norm not at all.

Left out: 1/d, and with it every difference between tokens that one expert makes; tokens that share an expert; and what does
not go away with width. Where a norm follows u = x + f, a token's own ‖u‖²/d = 1 + q Σw² stands below its gradient, and the law
has the mean of it. The weights' gradient is largest where u is, so that post-LN's power is below the law's, by the figures at the
end; its norm takes a part of f out of the router's cotangent as well (below 1 % of χ_f at k = 2).
"""

import numpy as np
import sympy as sp

from gradflow.moments import top_k
from gradflow.symbolic import experts as e

# The sums of D², by differentiating the softmax: of 3 logits, both kinds, all k.
for k in (1, 2, 3):
    for renormalised in (True, False):
        w, D = e.softmax_jacobian(3, k, renormalised)
        whole = w if renormalised else e.softmax_jacobian(3, 3, False)[0]
        sums = {S: sum(each**n for each in w) for S, n in ((e.S2, 2), (e.S3, 3), (e.S4, 4))} | {e.P2: whole.dot(whole)}
        assert sp.simplify(e.SQUARES.subs(sums) - sum(entry**2 for entry in D)) == 0
        along = (w.T * D).dot(w.T * D) / w.dot(w)
        assert sp.simplify(e.RADIAL.subs(sums) - along) == 0
        # behind a norm: the covariance δ − w wᵀ/Σw², over Σw²
        left = (D.T * (sp.eye(k) - w * w.T / w.dot(w)) * D).trace() / w.dot(w)
        assert sp.simplify(e.BEHIND_NORM.subs(sums) - left) == 0
        u = [each**2 / w.dot(w) for each in w]
        assert sp.simplify(left - (1 - sum(each**2 for each in u))) == 0
assert sp.simplify((e.SQUARES - e.RADIAL) / e.S2 - e.BEHIND_NORM) == 0

# Equal logits: 1/k each, and the gradient's way 1/k − 1/k².
for k in (2, 4, 8):
    assert np.allclose(top_k.means(8, k, True, 0.0), [1 / k, 1 / k - 1 / k**2, 1 / k**2], atol=1e-11)

# From 1/k to 1 as the logits part: Σw² and its spread over tokens, by quadrature and by draws.
rng = np.random.default_rng(0)
for tau in (0.5, 1.0, 2.0, 4.0, 8.0):
    s, through, squared = top_k.means(8, 2, True, tau)
    logits = np.sort(tau * rng.standard_normal((50_000, 8)))[:, -2:]
    w = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    seen = (w**2).sum(1)
    print(
        f"τ = {tau}: E Σw² {s:.4f}, drawn {seen.mean():.4f}; cv {(squared / s**2 - 1) ** 0.5:.4f}; E ΣD² {through:.4f}"
    )
    assert abs(seen.mean() - s) < 4 * seen.std() / len(seen) ** 0.5

# Behind the norm, k = 1 loses the router's gradient and k = 2 keeps some of it.
behind = [1 - top_k.means(8, k, True, 2.0)[0] for k in (1, 2, 8)]
print("router's way behind a norm, k = 1, 2, 8:", np.round(behind, 4))
assert abs(behind[0]) < 1e-11
assert behind[1] < behind[2]

# Post-LN: power of the weights' gradients over the law's, E(W/‖u‖²) E‖u‖²/E W: experts of 4d ReLU
# units at unit gain, q = χ = ½, whose W₁ has the power χ and W₂ that of its 4d inputs, 4q.
squares, radial = (sp.lambdify((e.S2, e.S3, e.S4, e.P2), sum_) for sum_ in (e.SQUARES, e.RADIAL))
for k, renormalised in ((1, False), (2, True), (8, True)):
    logits = rng.standard_normal((100_000, 8))
    chosen = logits >= np.sort(logits, 1)[:, [-k]]
    w = np.exp(np.where(chosen | (not renormalised), logits, -np.inf))
    w /= w.sum(1, keepdims=True)
    s, cubes, fourths = ((w**n * chosen).sum(1) for n in (2, 3, 4))
    sums = s, cubes, fourths, (w**2).sum(1)
    law, length = 2.5 * s + squares(*sums) / 2, 1 + s / 2
    # of the router's cotangent the norm takes the part along û
    power = law - s * radial(*sums) / 4 / length
    below = (power / length).mean() * length.mean() / law.mean() - 1
    print(f"post-LN, {k} of 8: {100 * below:.1f} %")
    assert below < 0
