"""The depth law at initialisation: what one sub-layer does to stream and gradient on average, with its 1/d term.

Setting: iid zero-mean Gaussian weights, one token, ε = 0. Only two facts about f are used (`gradflow.symbolic.moments`): its
Gaussian moments, and that W₁ is isotropic, so that given x and f the rest of F is independent of them. Leading order:

    output norm:  E‖g_in‖²/‖g_out‖² = (α² + χ)/(α² + q)
    input norm:   Q' = α²Q + q,   E‖g_in‖²/‖g_out‖² = α² + χ/Q

(q, χ carry β²). The 1/d terms follow from the geometry spelled out beside each line, and the typical (mean-log) value from
E log X = log μ − σ²/(2μ²).
"""

from dataclasses import dataclass

import sympy
from sympy import Expr

alpha, q, chi = sympy.symbols("alpha q chi", nonnegative=True)
defect, overlap, power_var = sympy.symbols("e h v_q", real=True)
slope_var, slope_draw, covariance, cross = sympy.symbols("v_chi w_chi k_qchi k_x", real=True)
d = sympy.Symbol("d", positive=True)
centred = sympy.Symbol("c", nonnegative=True)  # 1 for LayerNorm, 0 for RMSNorm
Q, mean_power, var_Q, radial = sympy.symbols("Q M v_Q omega", nonnegative=True)

MOMENTS = {
    "q": q,
    "chi": chi,
    "defect": defect,
    "overlap": overlap,
    "power_var": power_var,
    "slope_var": slope_var,
    "slope_draw": slope_draw,
    "covariance": covariance,
    "cross": cross,
}
SYMBOLS = (*MOMENTS.values(), alpha, d, centred, Q, mean_power, var_Q, radial)


def log_mean(mean: Expr, variance: Expr) -> Expr:
    """E log X to second order: log μ − σ²/(2μ²)."""
    return sympy.log(mean) - variance / (2 * mean**2)


n_branch, n_out, d_in, d_branch, d_out = sympy.symbols("n_branch n_out d_in d_branch d_out", nonnegative=True)
fed, beta, sigma = sympy.symbols("p beta sigma", nonnegative=True)


@dataclass(frozen=True)
class LeadingLaw:
    """The leading order for any slots, in powers: each norm enters by its output's power n and its Jacobian's power d.

    A length norm has n = 1 and d = 1/power of what it sees; an empty slot n = that power and d = 1.
    ``chi`` is that of x ↦ f(√p x), hence f's own Jacobian has the power χ/p.
    """

    total: Expr = alpha**2 * Q + beta**2 * n_branch
    back: Expr = alpha**2 + beta**2 * d_branch * chi / fed * sigma**2 * d_in
    net: Expr = back * d_out
    trunk: Expr = alpha**2 * d_out
    to_branch: Expr = beta**2 * d_branch * d_out


@dataclass(frozen=True)
class SublayerLaw:
    """One sub-layer's law as expressions in `SYMBOLS`; logs are of powers (twice the log gain), typical values.

    Attributes
    ----------
    next_Q, next_mean, next_var : Expr
        Mean square of the stream after it, the part of it along 1, and its variance over networks.
    next_radial : Expr
        d times the share of the gradient's power along x, one sub-layer further back.
    log_norm, log_branch : Expr
        Typical log power of the factors norm and branch; α² is the skip's.
    aligned, along_mean : Expr
        Shares of the gradient's power, as this sub-layer hands it down, along the next norm's û and along 1.
    spread_shared, spread_own : Expr
        Variance of the sub-layer's log power over networks: the part that all cotangents share, and each one's own.
    shift_norm : Expr
        The part of ``spread_shared`` that is the norm's.
    """

    next_Q: Expr
    next_mean: Expr
    next_var: Expr
    next_radial: Expr
    log_norm: Expr
    log_branch: Expr
    aligned: Expr
    along_mean: Expr
    spread_shared: Expr
    spread_own: Expr
    shift_norm: Expr


def output_norm() -> SublayerLaw:
    """x' = N(αx + f(x)): each sub-layer starts from rms 1."""
    V = alpha**2 + q
    # ‖u‖²/d = α² + |f|²/d + 2α x·f/d: f is N(0, q) given its power, x·f is N(0, q d); LayerNorm's P takes 1/d of f.
    t2, t2_var = V - centred * q / d, (2 * q**2 + 4 * alpha**2 * q + power_var) / d
    # The gradient v behind the norm is tangent: v ⊥ u = αx + f, else isotropic. Hence (v·x̂)² = (1 − α²/V)/d, and along
    # f̂ it has α²/V of an isotropic share. Fᵀv lies in the d − 1 directions off x, save g·x = v·(Fx − f) (u ⊥ v).
    off_tangent = (defect - overlap**2 / V) / d
    raw = alpha**2 * (1 - q / V / d) + chi * (1 - 1 / d) - q / V * cross / d + off_tangent
    raw_var = (4 * alpha**2 * chi + 2 * chi**2 + slope_var + slope_draw) / d
    gain = alpha**2 + chi
    return SublayerLaw(
        next_Q=sympy.Integer(1),
        next_mean=sympy.Integer(0),
        next_var=sympy.Integer(0),
        next_radial=sympy.Integer(0),
        log_norm=-log_mean(t2, t2_var),
        log_branch=log_mean(raw, raw_var) - sympy.log(alpha**2),
        # v is centred if the norm centres, Fᵀv is not; x is the next norm's û, and g·x the off-tangent part above.
        aligned=off_tangent / gain,
        along_mean=centred * chi / gain / d,
        spread_shared=t2_var / V**2 + slope_var / d / gain**2 - 2 * covariance / d / (V * gain),
        spread_own=(raw_var - slope_var / d) / gain**2,
        shift_norm=t2_var / V**2,
    )


def input_norm() -> SublayerLaw:
    """x' = αx + f(N(x)): the stream grows, and the norm's 1/t sits in the branch."""
    Q_next = alpha**2 * Q + q
    t2 = Q - mean_power  # what N_in divides by
    # The norm at the branch's input leaves d − 1 (LayerNorm d − 2) directions. Along f̂ the gradient has the share
    # (1 − q/Q') + ω q/Q' of an isotropic one, where ω/d is its share along x'.
    raw = alpha**2 + chi * (1 - (1 + centred) / d) / t2 - (1 - radial) * q / Q_next * cross / Q / d
    raw_var = (4 * alpha**2 * chi / Q + (2 * chi**2 + slope_var + slope_draw) / Q**2) / d
    gain = alpha**2 + chi / Q
    curvature = sympy.diff(sympy.log(gain), Q, 2)
    return SublayerLaw(
        next_Q=Q_next,
        next_mean=alpha**2 * mean_power + centred * q / d,
        next_var=alpha**4 * var_Q + (2 * q**2 + 4 * alpha**2 * q * Q + power_var) / d,
        # g·x = α g'·x (the norm's Jacobian deletes x), and g' has the share above along x.
        next_radial=alpha**2 * (radial * alpha**2 * Q + q) / Q_next / gain,
        log_norm=sympy.Integer(0),
        log_branch=log_mean(raw, raw_var) + var_Q * curvature / 2 - sympy.log(alpha**2),
        aligned=sympy.Integer(0),
        along_mean=sympy.Integer(0),
        spread_shared=slope_var / Q**2 / d / gain**2,
        spread_own=(raw_var - slope_var / Q**2 / d) / gain**2,
        shift_norm=sympy.Integer(0),
    )


def response() -> tuple[Expr, Expr, Expr]:
    """How input-norm log power answers to the stream's noise: ∂ log(α² + χ/Q)/∂Q, the noise, its covariance with the gain."""
    gain = alpha**2 + chi / Q
    noise = (2 * q**2 + 4 * alpha**2 * q * Q + power_var) / d
    return sympy.diff(sympy.log(gain), Q), noise, covariance / (Q * d * gain)


def outermost_norm() -> tuple[Expr, Expr, Expr]:
    """The first norm that a cotangent meets, on a stream of power Q: typical log power of 1/t², shares along û and 1."""
    return -log_mean(Q - mean_power, var_Q), 1 / d, centred / d
