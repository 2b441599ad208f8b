"""Which sub-layer and which factor make the end-to-end gain: its log is the sum of the logs of all factors, exactly."""

from typing import NamedTuple

import numpy as np

from gradflow.counterfactuals.edits import Edit
from gradflow.factors import ENDS, FACTORS, Profile, safe_log


class Share(NamedTuple):
    """One factor of one sub-layer.

    Attributes
    ----------
    index, label, factor : int, str, str
        Its row in the profile, and its name.
    gain : float
        The factor, geometric mean over texts.
    log : float
        Its natural log.
    share : float
        Of the log end to end; above 0 it pushes as the whole goes. All shares add up to 1.
    """

    index: int
    label: str
    factor: str
    gain: float
    log: float
    share: float


def responsible(p: Profile) -> tuple[Share, ...]:
    """Every factor of every sub-layer, the one that is most to blame first.

    net = affine·projection·norm·skip·branch holds to rounding at every sub-layer, hence log exact = Σ_s Σ_factor log factor,
    without a rest. Factors pull against each other: the longer u, the more the branch gives back; the smaller γ, the shorter the
    next u and the larger its 1/‖u‖. What one is worth by itself, an edit measures (`gradflow.what_if`).
    """
    logs = np.array([np.mean(safe_log(getattr(p, name)), axis=0) for name in FACTORS])
    total = float(logs.sum())
    found = [
        Share(s, label, name, float(np.exp(log)), float(log), float(log / total) if total else 0.0)
        for s, label in enumerate(p.labels)
        for name, log in zip(FACTORS, logs[:, s], strict=True)
    ]
    return tuple(sorted(found, key=lambda part: -part.share))


def remedies(p: Profile, number: int) -> tuple[Edit, ...]:
    """Edits that would change the factors that are most to blame, at most one a sub-layer and factor.

    γ is set to 1; a branch is halved, which shortens u too, where 1/‖u‖ is to blame; a skip is set to 1. The length of the
    stream before a final norm has no single edit.
    """
    found: dict[Edit, None] = {}
    for part in responsible(p):
        if part.share <= 0 or len(found) == number:
            break
        place = part.label.split(":")[0]
        if part.factor == "affine":
            found[Edit(place, "gain", 1.0)] = None
        elif part.label not in ENDS:
            change = ("skip", 1 / part.gain) if part.factor == "skip" else ("branch", 0.5)
            found[Edit(place, *change)] = None
    return tuple(found)
