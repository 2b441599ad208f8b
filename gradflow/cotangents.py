"""Cotangents: what is sent back from the output, and the refusal of those that have no gradient."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from gradflow import checks, precision
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
    array = given(spec, shape, (shape[1],) if shape[0] == 1 else shape).reshape(shape)
    return "given", array / np.abs(array).max()


def gaussian(key: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """A standard Gaussian of ``key``, the same wherever it is asked for."""
    return precision.normal(jax.random.fold_in(jax.random.key(key), 1), shape, dtype)


def given(spec: Any, *shapes: tuple[int, ...]) -> np.ndarray:
    """A cotangent of the caller's own, of one of these shapes; refused where it is zero or no array of real numbers."""
    array = checks.real_array("cotangent:", spec)
    if array.shape not in shapes:
        raise ValueError(f"cotangent: needs shape {shapes[0]}, got {array.shape}")
    if not array.any():
        raise ValueError("cotangent: is zero, so there is no gradient to follow")
    return array


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
