"""Rotary positions: pairs of a head's halves turned by position times frequency (Su et al. 2021, 2104.09864)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

BASE = 10_000.0


def frequencies(width: int, base: float = BASE) -> Float[np.ndarray, " pairs"]:
    """base^(−2i/width) for the width/2 pairs."""
    return base ** -(np.arange(width // 2) / (width // 2))


def rotated(x: Float[Array, "heads tokens k"], turns: Float[Array, " pairs"]) -> Float[Array, "heads tokens k"]:
    """Entry i turned with entry i + pairs, by position times ``turns[i]``; entries beyond 2·pairs stay as they are."""
    tokens, half = x.shape[-2], turns.shape[-1]
    angles = jnp.outer(jnp.arange(tokens, dtype=x.dtype), turns.astype(x.dtype))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)
