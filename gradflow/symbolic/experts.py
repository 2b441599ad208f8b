"""A mixture of experts at initialisation, f = Σ_e w_e f_e: its moments from one expert's and from sums over the router's weights.

The logits ℓ = W_R x + b are independent N(0, τ²) at a token, τ² = g²p + b² for an input of mean square p. Experts have last
matrices of their own, so that all their cross terms average to 0, and the router's rows are orthogonal as d → ∞:

    q_f = q E Σw_e²,      χ_f = χ E Σw_e² + q g²p E Σ_ej D_ej²,      D_ej = ∂w_e/∂ℓ_j = w_e(δ_ej − w_j)

over the chosen e; j runs over all that share the softmax. The second term of χ_f is the gradient's way through the router. A norm
behind the branch takes out the part of the cotangent along f. (f_e·v) then has the covariance δ_ee' − w_e w_e'/Σw², and the
router keeps Σ D² − ‖wᵀD‖²/Σw² = Σw² − Σw⁴/Σw². Over Σw², as the norm divides by q Σw², that is 1 − Σu_e² with u = w²/Σw², a
softmax of twice the logits.
"""

import sympy

q, chi, p, g = sympy.symbols("q chi p g", positive=True)  # one expert's moments, the input's power, the router's gain
s, R = sympy.symbols("s R", positive=True)  # E Σw², E Σ D²
S2, S3, S4 = sympy.symbols("S2:5", positive=True)  # Σ w², w³, w⁴ over the chosen
P2 = sympy.Symbol("P2", positive=True)  # Σ w² over the whole softmax: S2 where it is over the chosen alone

POWER = q * s
RETURN = chi * s + q * g**2 * p * R
SQUARES = S2 - 2 * S3 + S2 * P2  # Σ D²
RADIAL = S4 / S2 - 2 * S3 + S2 * P2  # ‖wᵀD‖²/Σw²
BEHIND_NORM = 1 - S4 / S2**2  # what is left of Σ D² behind a norm, over Σw²


def softmax_jacobian(number: int, chosen: int, renormalised: bool) -> tuple[sympy.Matrix, sympy.Matrix]:
    """w of the chosen (the first ones), (chosen, 1), and ∂w/∂ℓ, by differentiation; exp ℓ_e is written x_e."""
    x = sympy.symbols(f"x:{number}", positive=True)
    shared = x[:chosen] if renormalised else x
    w = sympy.Matrix([each / sum(shared) for each in x[:chosen]])
    return w, sympy.Matrix(chosen, number, lambda e, j: x[j] * sympy.diff(w[e], x[j]))  # ∂/∂ℓ = x ∂/∂x
