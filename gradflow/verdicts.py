"""The verdict: one plain sentence made of the measured factors."""

import numpy as np

from gradflow.contractions import Contraction
from gradflow.factors import ENDS, FACTORS, Profile

NOTHING = 5e-5  # a factor this close to 1 does nothing worth a word
ROUNDING = 1e-5  # a factor that departs from 1 by less, in float32 too, does not depart from it


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


def takes(profile: Profile, name: str) -> str:
    """What a factor takes and where: at one sub-layer alone, or per sub-layer with the place where it takes most."""
    with np.errstate(divide="ignore"):
        logs = np.mean(np.log(getattr(profile, name)), axis=0)
    if np.isfinite(logs).all() and logs.min() < 0.9 * logs.sum() < -NOTHING and len(logs) > 1:
        where = place(profile, name).removeprefix("most ")
        return f"{_name(name)} takes {-100 * np.expm1(logs.min()):.3g} % {where} and next to nothing elsewhere"
    return f"{_name(name)} {does(per_layer(profile, name))}, {place(profile, name)}"


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
    gains = {name: per_layer(r.profile, name) for name in ("norm", "projection")}
    worst, other = sorted(gains, key=gains.__getitem__)
    taken = "no norm on the identity path takes anything"
    if gains[worst] < 1 - NOTHING:
        taken = f"{takes(r.profile, worst)}; {_name(other)} {does(gains[other])}"
    if not np.all(r.profile.skip == 1):
        taken = f"α, for which the estimate was not made, gives back {100 * (per_layer(r.profile, 'skip') - 1):.3g} %; {taken}"
    return f"{claim}: {taken}; {_branch(r)}."


def profile(p: Profile, law: Profile | None = None) -> str:
    """Say what is left end to end, beside its law, where least is kept, and what the branches return."""

    def end(found: Profile, name: str) -> str:
        return f"{np.exp(np.mean(getattr(found, f'log_{name}')[:, 0])):.4g}"

    net, sublayers = p.summary("net").mean, sum(label not in ENDS for label in p.labels)
    worst = int(np.argmin(net))
    factors = {name: float(p.summary(name).mean[worst]) for name in FACTORS}
    least = min(factors, key=factors.__getitem__)
    said = "" if law is None else f"; its law says {end(law, 'exact')} and {end(law, 'trunk')}"
    return (
        f"The gradient keeps {end(p, 'exact')} over {sublayers} sub-layers (trunk alone: {end(p, 'trunk')}{said}); "
        f"{p.labels[worst]} keeps least, {net[worst]:.4g}, where the smallest factor is {least}, {factors[least]:.4g}; "
        f"the branch {does(per_layer(p, 'branch') ** (len(p.labels) / sublayers))}."
    )


def _branch(r: Contraction) -> str:
    """What (αI + βF)ᵀ does."""
    gain = per_layer(r.profile, "branch")
    who = "the branch (αI + βF)ᵀ, which the estimate leaves out,"
    if abs(gain - 1) >= NOTHING:
        return f"{who} {'gives back' if gain > 1 else 'takes another'} {100 * abs(gain - 1):.3g} % per sub-layer"
    if np.max(np.abs(r.profile.branch - 1)) > ROUNDING:
        return f"{who} keeps the gradient's length but turns it away from û, so that no later projection finds it"
    return "the branch returns nothing, so the trunk is all there is"


def _name(factor: str) -> str:
    return {"norm": "1/‖u‖", "projection": "the projection", "affine": "γ"}[factor]


def _recorded(r: Contraction) -> str:
    p = r.profile
    parts = [f"{_name(name)} {does(per_layer(p, name))}" for name in ("projection", "norm", "affine")]
    worst = min(("affine", "projection", "norm"), key=lambda name: per_layer(p, name))
    sentence = (
        f"Along the trunk of these {r.depth} sub-layers the cotangent keeps {float(r.trunk[0]):.4g} (where (1 − {r.c:g})^L "
        f"says {r.closed_form:.4g}): {', '.join(parts)}; {_name(worst)} takes most, {place(p, worst)}"
    )
    if p.stream_cosine is not None and p.alignment is not None:
        low, high = p.stream_cosine.min(), p.stream_cosine.max()
        sentence += (
            f"; cos(x, u) is {low:.2f} to {high:.2f}, the cotangent's alignment with u at most {p.alignment.max():.2f}"
        )
    return sentence + "; what the branches return is not in the file."
