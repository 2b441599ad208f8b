"""The alignment reading as a real stack: û turns by one angle per layer in one plane, and the gradient lies in that plane.

‖u_j‖ = √d at every layer, so the norm divides by 1; only the projection acts. Two branches give this trajectory: constants
f_j = √d(û_j − û_{j−1}), which return no gradient, and the linear f = (R − I)x, which returns it. THEORY: cosine ±√(1 − (1−c)²)
between the arriving trunk gradient and û at every layer.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow import precision
from gradflow.stack import Given, Stack


class Planar(NamedTuple):
    """Weights, input (1, d) and in-plane cotangent (1, d) of one planar stack."""

    weights: Given
    x: Float[Array, "1 d"]
    cotangent: Float[Array, "1 d"]


def planar(stack: Stack, key: Array, cosine: float) -> Planar:
    """Build the planar trajectory in a random plane.

    Parameters
    ----------
    stack : Stack
        A post-LN stack of one ``linear`` or ``bias`` branch per block; under LayerNorm the plane is orthogonal to 1.
    cosine : float
        cos of the turn per layer, 1 − c.
    """
    frame = precision.normal(key, (stack.d, 2), stack.dtype)
    if stack.norm == "layernorm":
        frame = frame - frame.mean(0)
    e1, e2 = jnp.linalg.qr(frame)[0].T
    turn = jnp.arccos(jnp.asarray(cosine, stack.dtype))
    sine = jnp.sin(turn)
    angles = turn * jnp.arange(stack.depth + 1, dtype=stack.dtype)[:, None]
    length = stack.d**0.5
    directions = jnp.cos(angles) * e1 + jnp.sin(angles) * e2  # û_0 … û_L
    if stack.block[0].name == "bias":
        weights = Given(({"b": length * jnp.diff(directions, axis=0)},))
    else:
        in_plane = jnp.outer(e1, e1) + jnp.outer(e2, e2)
        rotation = (cosine - 1) * in_plane + sine * (jnp.outer(e2, e1) - jnp.outer(e1, e2))
        weights = Given(({"w": rotation},), tied=True)
    tangent = jnp.cos(angles[-1]) * e2 - jnp.sin(angles[-1]) * e1
    # cosine −sin(turn) with û_L; what the projection leaves, the tangent, meets û_{L−1} at the same cosine, and so on down
    cotangent = cosine * tangent - sine * directions[-1]
    return Planar(weights, length * directions[:1], cotangent[None])
