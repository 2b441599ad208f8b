"""Gaussian averages E g(z, p), z ~ N(0, 1), as functions of the power p: by quadrature, and from a table of it.

A long stack asks for them at every sub-layer, one after another. E φ(√p z) = ∫ φ(u) N(u; 0, p) du is analytic in p where
Re 1/p > 0, be φ smooth or not. So on an octave the Chebyshev series falls as (3 + √8)^−n, and 20 terms are all there is.
An octave where an average changes too much for that, or is beyond the quadrature, is not tabled.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sympy
from numpy.polynomial import chebyshev

from gradflow.moments.chebyshev import coefficients, nodes
from gradflow.numeric import to_jax

OCTAVES = range(-24, 40)
TERMS = 20


def panels(edges: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Legendre nodes and weights, ``order`` of them between every two edges."""
    nodes, weights = np.polynomial.legendre.leggauss(order)
    left, width = edges[:-1, None], np.diff(edges)[:, None]
    return (left + width * (nodes + 1) / 2).ravel(), (width * weights / 2).ravel()


@functools.lru_cache
def half_line() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of ∫₀^∞ g(z) N(z; 0, 1) dz: Gauss–Legendre on panels that halve towards 0.

    A function of √p z that changes at the scale of 1 is smooth on every panel, whatever p is.
    """
    points, weights = panels(np.concatenate([[0.0], 2.0 ** np.arange(-30.0, 2), np.arange(4.0, 14, 2)]), 12)
    return points, weights * np.exp(-(points**2) / 2) / np.sqrt(2 * np.pi)


def by_quadrature(values: Callable[..., Sequence[Any]], p: Any, xp: Any) -> tuple[Any, ...]:
    """Average of each of ``values(z, p)`` at p of any shape, by NumPy or JAX (``xp``)."""
    points, weights = half_line()
    shape = (*p.shape, points.size)
    halves = [values(sign * points, p[..., None]) for sign in (1.0, -1.0)]
    return tuple(sum(xp.broadcast_to(g, shape) @ weights for g in pair) for pair in zip(*halves, strict=True))


@np.errstate(all="ignore")  # an octave that overflows is not a good one
def table(values: Callable[..., Sequence[Any]], cancelling: Sequence[int] = ()) -> tuple[np.ndarray, range]:
    """Each average on every octave as a polynomial in −1 … 1, highest power first, (k, octaves, terms), and which they are.

    ``cancelling`` are those that may be 0, or but the rounding of larger ones: they do not say how far a series has come.
    """
    found = np.array(by_quadrature(values, 2.0 ** np.array(OCTAVES)[:, None] * (nodes(TERMS) + 3) / 2, np))
    series = found @ coefficients(TERMS).T
    powers = [np.pad(chebyshev.cheb2poly(np.eye(n + 1)[n]), (0, TERMS - 1 - n)) for n in range(TERMS)]
    tail, least = np.abs(series[..., -2:]).max(-1), np.abs(found).min(-1)
    good = np.all(np.delete(tail <= 1e-12 * least, list(cancelling), 0), 0)
    runs = np.flatnonzero(np.diff(np.pad(good.astype(int), 1))).reshape(-1, 2)  # the longest is kept
    first, last = max(runs.tolist(), key=lambda run: run[1] - run[0], default=(0, 0))
    # the series falls faster than the powers' coefficients grow: no digit is lost
    return (series @ powers)[:, first:last, ::-1], OCTAVES[first:last]


def averages(
    symbols: Sequence[sympy.Symbol], expressions: tuple[sympy.Expr, ...], cancelling: Sequence[int] = ()
) -> Callable[[Any], tuple]:
    """E over z of expressions in ``symbols`` = (z, p), as JAX functions of p: from the table, beyond it by quadrature."""
    exact = to_jax(symbols, expressions)
    polynomials, octaves = table(sympy.lambdify(symbols, expressions, ["scipy", "numpy"], cse=True), cancelling)

    def looked_up(p: jax.Array) -> tuple[jax.Array, ...]:
        mantissa, exponent = jnp.frexp(p)
        rows = [jnp.moveaxis(jnp.asarray(each)[exponent - 1 - octaves.start], -1, 0) for each in polynomials]
        return tuple(jnp.polyval(row, 4 * mantissa - 3, unroll=TERMS) for row in rows)

    def computed(p: jax.Array) -> tuple[jax.Array, ...]:
        return by_quadrature(exact, p, jnp)

    def at(p: Any) -> tuple[jax.Array, ...]:
        p = jnp.asarray(p, float)
        if not octaves:
            return computed(p)
        inside = (p >= 2.0**octaves.start) & (p < 2.0**octaves.stop)
        return jax.lax.cond(jnp.all(inside), looked_up, computed, p)

    return at
