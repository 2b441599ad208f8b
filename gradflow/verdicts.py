"""The verdict: one plain sentence made of the measured factors."""

import numpy as np

from gradflow.contractions import Contraction
from gradflow.factors import Profile

NOTHING = 5e-5  # a factor this close to 1 does nothing worth a word


def per_layer(profile: Profile, name: str) -> float:
    """Geometric mean of a factor over sub-layers and seeds."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.mean(np.log(getattr(profile, name)))))


def does(gain: float) -> str:
    """What a factor does per sub-layer, in words."""
    change = abs(gain - 1)
    if change < NOTHING:
        return "takes nothing"
    return f"{'takes' if gain < 1 else 'adds'} {100 * change:.3g} % per sub-layer"


def place(profile: Profile, name: str) -> str:
    """Where a factor takes most: the sub-layer, or 'evenly over depth' when none stands out."""
    logs = np.mean(np.log(np.maximum(getattr(profile, name), 1e-300)), axis=0)
    worst = int(np.argmin(logs))
    if len(logs) == 1 or (logs[worst] > 2 * np.median(logs) and np.median(logs) < -NOTHING):
        return "evenly over depth"
    label = profile.labels[worst]
    return f"most at {label if label == 'final norm' else f'sub-layer {label}'}"


def contraction(r: Contraction) -> str:
    """Say which factor takes the gradient, at which sub-layer most, and what the branch returns."""
    if r.recorded:
        return _recorded(r)
    exact, trunk = (float(np.mean(logs)) for logs in (r.log_exact, r.log_trunk))  # type: ignore[arg-type]
    estimate = np.log(r.closed_form)
    holds = abs(exact - estimate) < 0.25 * abs(estimate)
    claim = (
        f"(1 − c)^L = {r.closed_form:.4g} {'holds' if holds else 'does not hold'} for the gradient, which keeps "
        f"{np.exp(exact):.4g} end to end (trunk alone: {np.exp(trunk):.4g})"
    )
    takes = {name: per_layer(r.profile, name) for name in ("norm", "projection")}
    worst, other = sorted(takes, key=takes.__getitem__)
    taken = "no norm on the identity path takes anything"
    if takes[worst] < 1 - NOTHING:
        taken = f"{_name(worst)} {does(takes[worst])}, {place(r.profile, worst)}; {_name(other)} {does(takes[other])}"
    return f"{claim}: {taken}; {_branch(r, exact - trunk)}."


def _branch(r: Contraction, excess: float) -> str:
    """What (αI + βF)ᵀ does; ``excess`` is log exact − log trunk."""
    gain = per_layer(r.profile, "branch")
    who = "the branch (αI + βF)ᵀ, which the estimate leaves out,"
    if abs(gain - 1) >= NOTHING:
        return f"{who} {'gives back' if gain > 1 else 'takes another'} {100 * abs(gain - 1):.3g} % per sub-layer"
    if abs(excess) > 0.01:
        return f"{who} keeps the gradient's length but turns it away from û, so that no later projection finds it"
    return "the branch returns nothing, so the trunk is all there is"


def _name(factor: str) -> str:
    return {"norm": "1/‖u‖", "projection": "the projection", "affine": "γ"}[factor]


def _recorded(r: Contraction) -> str:
    p = r.profile
    parts = [f"{_name(name)} {does(per_layer(p, name))}" for name in ("projection", "norm", "affine")]
    worst = min(("affine", "projection", "norm"), key=lambda name: per_layer(p, name))
    sentence = (
        f"Along the trunk of these {r.depth} sub-layers the cotangent keeps {float(r.trunk[0]):.4g}, where (1 − {r.c:g})^L "
        f"says {r.closed_form:.4g}: {', '.join(parts)}; {_name(worst)} takes most, {place(p, worst)}"
    )
    if p.stream_cosine is not None and p.alignment is not None:
        cosines = f"{p.stream_cosine.min():.2f}–{p.stream_cosine.max():.2f}"
        sentence += (
            f"; u is aligned with x (cos {cosines}), the gradient with u hardly (at most {p.alignment.max():.2f})"
        )
    return sentence + "; what the branches return is not in the file."
