"""Two tokens through one drawn branch: E f_i·f_j/d and E (Fᵀg)_i·(Fᵀg)_j as functions of the angle between the tokens.

In the angle both are analytic on [0, π], for smooth activations and for kinks at 0 alike (ReLU: sin ω + (π − ω) cos ω), so that
few Chebyshev coefficients hold them (Cho, Saul 2009 for ReLU's closed forms).
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sympy

from gradflow.moments.averages import panels
from gradflow.moments.chebyshev import coefficients, evaluate, nodes
from gradflow.numeric import to_jax
from gradflow.symbolic import moments as symbolic

ORDER = 32
Kernel = jax.Array  # (3, ORDER): value, slope, and the weights' gradients; of cos = cos ω


def angles() -> np.ndarray:
    """ω at the Chebyshev nodes."""
    return (nodes(ORDER) + 1) / 2 * np.pi


def interpolated(value: Any, slope: Any, weights: Any) -> Kernel:
    """The kernel with these values at `angles`."""
    rows = [jnp.broadcast_to(row, (ORDER,)) for row in (value, slope, weights)]
    return jnp.stack(rows) @ jnp.asarray(coefficients(ORDER)).T


def at(kernel: Kernel, cosine: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Value, slope and weights at a cosine of any shape."""
    x = 2 * jnp.arccos(jnp.clip(cosine, -1, 1)) / np.pi - 1
    value, slope, weights = (evaluate(row, x) for row in kernel)
    return value, slope, weights


@functools.lru_cache
def _quadrature() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Radii and weights of E over a 2-D Gaussian's length; nodes and weights on [0, 1] that crowd at both ends."""
    radii, lengths = panels(np.array([0, 1, 2, 3, 4.5, 6, 8, 10.5]), 12)
    half = np.concatenate([[0.0], 2.0 ** np.arange(-5, 0)])
    return radii, lengths * radii * np.exp(-(radii**2) / 2), *panels(np.concatenate([half, 1 - half[-2::-1]]), 8)


@functools.lru_cache
def _means(phi: sympy.Expr) -> Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]:
    """E φ(√p z)φ(√p z') and E φ'φ' at some angles, for a power p.

    In polar coordinates z = r cos θ, z' = r cos(θ − ω) a kink at 0 is a ray: the angle is cut there.
    """
    value, slope = (to_jax([symbolic.z], e) for e in (phi, symbolic.slope(phi)))
    radii, lengths, parts, shares = _quadrature()

    def mean(g: Callable[[Any], Any], root: Any, angle: Any) -> jax.Array:
        total = jnp.zeros(())
        cuts = (angle / 2, jnp.pi / 2, angle + jnp.pi / 2, angle / 2 + jnp.pi)  # θ ↦ ω − θ swaps the two tokens
        for start, stop in itertools.pairwise(cuts):
            theta = start + (stop - start) * parts
            pair = [g(root * radii[:, None] * jnp.cos(turned)) for turned in (theta, theta - angle)]
            pair = [jnp.broadcast_to(h, (len(radii), len(parts))) for h in pair]  # φ' of a linear φ is one number
            total += (stop - start) * (lengths @ (pair[0] * pair[1]) @ shares)
        return total / jnp.pi

    def means(power: Any, angles: jax.Array) -> tuple[jax.Array, jax.Array]:
        root = jnp.sqrt(power)
        return jax.lax.map(lambda a: (mean(value, root, a), mean(slope, root, a)), angles)

    return means


def of_mlp(phi: sympy.Expr, gated: bool, power: Any, angles: jax.Array) -> tuple[Any, Any]:
    """E h h' and E ∇h·∇h' of x ↦ h(√p W x) at some angles; the gate's Gaussians are averaged here."""
    value, slope = _means(phi)(power, angles)
    if not gated:
        return value, power * slope
    gate = power * jnp.cos(angles)  # h = φ(√p z) √p y, with E y y' = cos ω
    return value * gate, power * slope * gate + value * power
