"""Cotangents: what is sent back from the output, and the refusal of those that have no gradient."""

from typing import Any

import numpy as np

from gradflow import checks
from gradflow.factors import Profile


def resolve(spec: Any, reading: str, shape: tuple[int, int]) -> tuple[str, np.ndarray | None]:
    """The cotangent's kind, and its entries where the caller gave them."""
    if spec is None:
        return ("aligned" if reading == "alignment" else "gaussian"), None
    if isinstance(spec, str):
        kind = checks.one_of("cotangent", spec, ("gaussian", "aligned"))
        if kind == "aligned" and reading != "alignment":
            raise ValueError("cotangent: 'aligned' lies in the alignment reading's plane; use reading='alignment'")
        return kind, None
    array = checks.real_array("cotangent:", spec)
    if array.shape not in (shape, (shape[1],) if shape[0] == 1 else shape):
        raise ValueError(f"cotangent: needs shape {shape}, got {array.shape}")
    array = array.reshape(shape)
    if not array.any():
        raise ValueError("cotangent: is zero, so there is no gradient to follow")
    return "given", array / np.abs(array).max()


def refuse_null(profile: Profile, dtype: str) -> None:
    """A cotangent of which the outermost norm leaves rounding only has no gain, and is refused."""
    floor = 1e3 * np.finfo(dtype).eps
    if np.any(profile.projection[:, -1] < floor) or np.any(profile.trunk_projection[:, -1] < floor):  # type: ignore[index]
        raise ValueError(
            "cotangent: lies in the null space of the outermost norm (1ᵀJ = 0 under LayerNorm, so a summed loss has no "
            "gradient; uᵀJ = 0 at ε = 0); use another cotangent"
        )
    if np.isneginf(profile.log_trunk[:, 0]).any() and np.any(profile.degenerate):
        raise ValueError(
            "activations: no token has variance at some layer and eps is 0, so its norm has no Jacobian; give eps"
        )
