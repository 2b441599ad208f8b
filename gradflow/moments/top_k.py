"""Moments of a router: weights w of the k largest of E independent N(0, τ²) logits, by quadrature.

Given the largest logit u that is not chosen, the chosen are independent above it, and 1/Zⁿ = ∫ tⁿ⁻¹ e^(−tZ) dt/(n − 1)! makes a
product of every mean over them: Σw² for one is E_u ∫ t dt · k G₂ G₀^(k−1), G_n(t, u) = ∫_u^∞ yⁿ e^(−ty) φ(z) dz with y = e^(τz).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.polynomial import legendre

from gradflow.moments.chebyshev import coefficients, evaluate, nodes

# in z; in log t, where the trapezoidal rule converges geometrically; a panel's nodes
REACH, STEP, POINTS = 9.0, 0.2, 12
ORDER, TOP = 28, 8.0  # Chebyshev in τ/(1 + τ) up to τ = TOP; from there on two terms in 1/τ, to 0.003
LIMIT = (1.0, 0.0, 1.0)


@functools.lru_cache
def _panel() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gauss–Legendre nodes and weights on [−1, 1], and the matrix of ∫ from −1 to each node."""
    x, w = legendre.leggauss(POINTS)
    values = legendre.legvander(x, POINTS)
    k = np.arange(1, POINTS)
    integrals = np.column_stack([x + 1, (values[:, 2:] - values[:, :-2]) / (2 * k + 1)])
    return x, w, integrals @ np.linalg.inv(values[:, :POINTS])


def _below(f: np.ndarray, half: float) -> np.ndarray:
    """∫ of f up to every node; f (..., panels, POINTS)."""
    _, w, matrix = _panel()
    whole = f @ w
    return half * ((np.cumsum(whole, -1) - whole)[..., None] + f @ matrix.T)


def _above(f: np.ndarray, half: float) -> np.ndarray:
    return _below(f[..., ::-1, ::-1], half)[..., ::-1, ::-1]


def means(number: int, chosen: int, renormalised: bool, tau: float) -> np.ndarray:
    """E Σw², E Σ D² and E(Σw²)² over the chosen; ``renormalised``: the softmax is over them alone, else over all logits."""
    k, rest = chosen, number - chosen
    x, w, _ = _panel()
    panels = math.ceil(max(2 * REACH, REACH * tau))
    half = REACH / panels
    z = np.linspace(-REACH + half, REACH - half, panels)[:, None] + half * x
    # from where (tZ)² is negligible to where e^(−tZ) is
    log_t = np.arange(-REACH * tau - math.log(number) - 20, REACH * tau + 4, STEP)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    def kernel(n: int) -> np.ndarray:
        """(t y)ⁿ e^(−ty) φ(z): the powers of t come from 1/Zⁿ."""
        a = log_t[:, None, None] + tau * z
        return np.exp(n * a - np.exp(a)) * density

    top = [_above(kernel(n), half) for n in (0, 2, 3, 4)]
    outside, weights = 0.0, half * w
    if rest:
        own = [density, 0 * density] if renormalised else [kernel(0), kernel(2)]  # at u itself
        lower = [_below(f, half) for f in own]
        ways = math.comb(number, k) * rest
        boundary = ways * own[0] * lower[0] ** (rest - 1)
        outside = ways * own[1] * lower[0] ** (rest - 1)
        outside = outside + ways * (rest - 1) * own[0] * lower[1] * lower[0] ** max(rest - 2, 0)
    else:  # all are chosen: from the lowest z on, one value of u
        top, boundary, weights = [(half * kernel(n) @ w).sum(-1)[:, None, None] for n in (0, 2, 3, 4)], 1.0, np.ones(1)
    G0, G2, G3, G4 = top
    pair = k * (k - 1) * G2**2 * G0 ** max(k - 2, 0)
    one, cube, fourth = (k * G * G0 ** (k - 1) for G in (G2, G3, G4))

    def mean(f: np.ndarray, n: int) -> float:
        return float((f @ weights).sum() * STEP / math.factorial(n - 1))

    squares, both = mean(one * boundary, 2), mean((fourth + pair) * boundary, 4)
    return np.array([squares, squares - 2 * mean(cube * boundary, 3) + both + mean(one * outside, 4), both])


@functools.lru_cache
def _table(number: int, chosen: int, renormalised: bool) -> np.ndarray:
    share = (nodes(ORDER) + 1) / 2 * TOP / (1 + TOP)
    values = [means(number, chosen, renormalised, float(v / (1 - v))) for v in share]
    return (coefficients(ORDER) @ np.stack(values)).T


def at(number: int, chosen: int, renormalised: bool, tau: Any) -> list[jax.Array]:
    """`means` at every τ, of any shape."""
    found = []
    for row, limit in zip(_table(number, chosen, renormalised), LIMIT, strict=True):
        value, half, end = (_interpolated(row, t) for t in (jnp.minimum(tau, TOP), TOP / 2, TOP))
        ratio = TOP / jnp.maximum(tau, TOP)
        # limit + a/τ + b/τ² through TOP/2 and TOP
        tail = (end - limit + (half / 2 + limit / 2 - end) * (ratio - 1)) * ratio
        found.append(jnp.where(ratio < 1, limit + tail, value))
    return found


def _interpolated(row: np.ndarray, tau: Any) -> jax.Array:
    return evaluate(jnp.asarray(row), 2 * tau / (1 + tau) * (1 + TOP) / TOP - 1)
