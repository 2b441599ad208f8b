"""Moments of a softmax over n independent N(0, s²) logits, by quadrature of the integrands that `symbolic.attention` derives."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow.moments.chebyshev import coefficients, evaluate, nodes
from gradflow.numeric import to_jax
from gradflow.symbolic import attention as symbolic

REACH, STEP = 9.0, 0.25  # the trapezoidal rule on analytic functions converges geometrically
TURN = 4.0  # s²: below it in the variable z, above in y
ORDER = 40


@functools.lru_cache
def _integrands() -> tuple[Callable[..., Any], ...]:
    s = symbolic
    small = to_jax((s.lam, s.z, s.s, s.order), s.PHI)
    large, large_0 = to_jax((s.t, s.y, s.s, s.order), s.WIDE), to_jax((s.t, s.y, s.s), s.WIDE_0)
    return small, large, large_0, to_jax((s.lam, s.n, *s.phi), tuple(s.INTEGRANDS.values()))


def _summed(phis: Any, lam: jax.Array, sizes: np.ndarray, step: Any) -> jax.Array:
    # not 0: at n = 1 the power n − 2 would divide by it
    phis = [jnp.maximum(phi, 1e-300) for phi in phis]
    found = _integrands()[-1](lam, jnp.asarray(sizes, float)[:, None], *phis)
    return jnp.stack([(f * lam).sum(-1) * step for f in found])


def narrow(sizes: np.ndarray, s2: Any) -> jax.Array:
    """K₁ = n E a², M₃ = n E a³, M₂₂ = E(Σa²)² of rows of n keys, (3, len(sizes)), for 0 ≤ s² ≤ 4."""
    widest = TURN**0.5
    z = jnp.arange(-REACH, REACH + 4 * widest, STEP / widest)
    # λ ~ 1/Σ e^(sz): from where λ² is negligible to where no sum is that small
    lam = jnp.exp(jnp.arange(-np.log(max(sizes)) - TURN / 2 - REACH * widest - 18, REACH * widest + 5, STEP))
    phis = [_integrands()[0](lam[:, None], z, jnp.sqrt(s2), m).sum(-1) * (z[1] - z[0]) for m in range(5)]
    return _summed(phis, lam, sizes, STEP)


def wide(sizes: np.ndarray, s2: Any) -> jax.Array:
    """The same for s² ≥ 4, however large."""
    _, large, large_0, _ = _integrands()
    s = jnp.sqrt(s2)
    step = STEP * s / 4  # in units of s the integrand widens with it
    y = jnp.arange(-40.0, 5.0, STEP)
    t = step * jnp.arange(-int((REACH + 11) * 4 / STEP), int((REACH + 3) * 4 / STEP)) - np.log(max(sizes)) / 2
    by_power = [large(t[:, None], y, s, m).sum(-1) * STEP for m in range(1, 5)]
    phi_0 = large_0(t[:, None], y, s).sum(-1) * STEP
    # each integrand takes as many powers of λ as its φ's have orders: they are in the φ's here
    return _summed([phi_0, *by_power], jnp.ones_like(t), sizes, step)


@functools.partial(jax.jit, static_argnums=(0, 1))
def table(sizes: tuple[int, ...], bounded: bool) -> tuple[jax.Array, ...]:
    """Chebyshev coefficients of the moments in s² over [0, 4], and, unless ``bounded`` by it, in 2/s over [0, 1];
    each (ORDER, 3, len(sizes)).
    """
    unit = (nodes(ORDER) + 1) / 2
    cases = [(narrow, unit * TURN)] + ([] if bounded else [(wide, TURN / unit**2)])
    values = [jax.lax.map(functools.partial(rule, np.asarray(sizes)), jnp.asarray(s2)) for rule, s2 in cases]
    return tuple(jnp.tensordot(jnp.asarray(coefficients(ORDER)), each, 1) for each in values)


def looked_up(table: tuple[jax.Array, ...], s2: jax.Array) -> jax.Array:
    """K₁, M₃, M₂₂ at s², a value per size: (3, len(sizes))."""
    found = evaluate(table[0], 2 * jnp.minimum(s2, TURN) / TURN - 1)
    if len(table) == 1:
        return found
    return jnp.where(s2 <= TURN, found, evaluate(table[1], 2 * jnp.sqrt(TURN / jnp.maximum(s2, TURN)) - 1))
