"""What biases, a norm over the hidden units and dropout make of a branch's moments: maps from moments to moments.

Plain arithmetic, so that the same lines take numbers, arrays and symbols; derived and checked in ``derivations/moments.py``.
"""

import math
from dataclasses import replace
from typing import Any

from gradflow.symbolic.moments import BranchMoments


def leading(q: Any, chi: Any) -> BranchMoments:
    """Moments of a branch whose 1/d term is not derived: NaN stands there, so that nobody takes it for 0."""
    rest = [name for name in BranchMoments.__dataclass_fields__ if name not in ("q", "chi")]
    return BranchMoments(q, chi, **dict.fromkeys(rest, math.nan))


def biased_in(at: BranchMoments, share: Any) -> BranchMoments:
    """Of x ↦ f(x) where x brings the ``share`` ρ of the pre-activations' power P, and a Gaussian bias the rest.

    ``at`` are the moments at P. Of a pre-activation √P z the part ρ√P z + √(ρ(1−ρ)P) w comes from x, w ~ N(0, 1) being
    independent of z: F carries ρ of the power, and F x = ρ z·∇h + √(ρ(1−ρ)) |∇h| w.
    """
    product = at.overlap + at.q  # E (z·∇h) h
    squared = at.defect + 2 * product - at.q  # E (z·∇h)²
    return replace(
        at,
        chi=share * at.chi,
        defect=share**2 * squared - 2 * share * product + at.q + share * (1 - share) * at.chi,
        overlap=share * product - at.q,
        slope_var=share**2 * at.slope_var,
        slope_draw=share**2 * at.slope_draw,
        covariance=share * at.covariance,
        cross=share * at.cross,
    )


def biased_out(at: BranchMoments, power: Any) -> BranchMoments:
    """Of f + b, b ~ N(0, power): it adds to f, and not to F. What F returns along f̂ it has from W₂ h alone."""
    q = at.q + power
    return replace(at, q=q, defect=at.defect + power, overlap=at.overlap - power, cross=at.cross * at.q / (q + 1e-300))


def normed(at: BranchMoments, spread: Any) -> BranchMoments:
    """Of W₂ N(h) with N over the hidden units: q_f = s² = 1 and χ_f = s² E|∇h|²/K, K = ``spread`` being what N divides by.

    K is E h² (RMSNorm) or Var h (LayerNorm).
    """
    return leading(1 + 0 * spread, at.chi / spread)


def dropped(at: BranchMoments, rate: float) -> BranchMoments:
    """Of f ⊙ μ, μ_i = 1/(1 − rate) or, with probability ``rate``, 0: E μ² = 1/(1 − rate) multiplies q_f and χ_f."""
    return at if rate == 0 else leading(at.q / (1 - rate), at.chi / (1 - rate))
