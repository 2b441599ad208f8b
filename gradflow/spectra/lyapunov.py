"""Lyapunov: an orthonormal frame pushed through depth, made orthonormal again by QR at every k-th layer (Benettin et al. 1980).

The logs of the triangle's diagonal add up to all exponents at any depth; nothing under- or overflows, and small singular values
keep their digits beside large ones, as they do not in a product.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

from gradflow import precision
from gradflow.scaling import frobenius, rescale
from gradflow.spectra.network import Network
from gradflow.stack import Stack

MARKS = 16  # depths at which the sums are kept, for the spread along depth
WIDEST = 16  # layers between two QRs, at most
PILOT = 32  # blocks that the spacing is chosen from


class Sums(NamedTuple):
    """Σ log rᵢᵢ over the QRs so far, compensated (Kahan); how often rᵢᵢ was lost in rounding; the product of the triangles."""

    total: Float[Array, "tokens m"]
    left_over: Float[Array, "tokens m"]
    lost: Int[Array, "tokens m"]
    last: Bool[Array, "tokens m"]
    steps: Int[Array, ""]
    spread: Array
    triangle: Float[Array, "tokens m m"]
    exponent: Int[Array, ""]


class Exponents(NamedTuple):
    """Lyapunov exponents over depth S.

    Attributes
    ----------
    logs : (tokens·m,) or (m,)
        log of each singular value of the product, S times its exponent, descending; −inf where it is 0 to rounding.
    marks : (MARKS, …)
        The same at MARKS equal parts of the depth.
    spread : ()
        Largest log r₁₁ − log r_mm of one QR, over what is not lost.
    lost : (n,)
        Share of the QRs whose rᵢᵢ was 0 to rounding; above a half, or at the end, the exponent is −inf.
    log_frobenius : ()
        log ‖J Q₀‖_F over the frame that was sent in; of J itself where the frame is whole.
    """

    logs: Float[Array, " n"]
    marks: Float[Array, "marks n"]
    spread: Array
    lost: Float[Array, " n"]
    log_frobenius: Array


def floor(dtype: Any, size: int) -> float:
    """What rounding leaves of a zero on a triangle's diagonal, over the largest entry."""
    return 16 * math.sqrt(size) * float(np.finfo(dtype).eps)


def spacing(spread: float, dtype: str, size: int) -> int:
    """k, so that the ends of a frame stay e² above `floor` after k layers of the measured spread (27 in float64 at d = 512)."""
    return int(np.clip((-math.log(floor(dtype, size)) - 2) / max(spread, 1e-3), 1, WIDEST))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def exponents(network: Network, key: Array, top: int, every: int, blocks: int | None = None) -> Exponents:
    """The ``top`` largest exponents by a QR after every ``every``-th sub-layer and after the last, of the first ``blocks``."""
    stack, weights = network.model, network.weights
    assert isinstance(stack, Stack)
    assert weights is not None
    x, trunk, wide, depth = network.x, network.path == "trunk", len(stack.block), blocks or stack.depth
    frame = precision.normal(key, (x.shape[0], x.shape[1], top) if network.blocks else (x.size, top), x.dtype)
    frame = jnp.linalg.qr(frame)[0].reshape(*x.shape, top)

    def orthonormal(frame: Array, shift: Array, sums: Sums) -> tuple[Array, Sums]:
        matrix = frame if network.blocks else frame.reshape(1, -1, top)
        q, r = jnp.linalg.qr(matrix)
        # LAPACK's Q lies by columns; left so, it would make every layer between two QRs transpose the frame
        q = with_layout_constraint(q.reshape(frame.shape), Layout(tuple(range(frame.ndim))))
        return q, _added(sums, r, shift)

    def block(part: Stack, carry: tuple, inputs: tuple) -> tuple[tuple, None]:
        x, frame, shift, sums, marks = carry
        index, piece, alphas, betas = inputs
        layer = weights.layer(part, piece)
        for k in range(wide):
            step = stack.sublayer(layer, k, alphas[k], betas[k], x)
            frame, shift = rescale((step.push_trunk if trunk else step.push)(frame), shift)
            x = step.out
            now = index * wide + k + 1
            due = (now % every == 0) | (now == depth * wide)
            frame, sums = jax.lax.cond(due, orthonormal, lambda f, s, sums: (f, sums), frame, shift, sums)
            shift = jnp.where(due, 0, shift)
        return (x, frame, shift, sums, marks.at[index * MARKS // depth].set(sums.total + sums.left_over)), None

    shape = (x.shape[0] if network.blocks else 1, top)
    zeros = jnp.zeros(shape, x.dtype)
    eye, none = jnp.broadcast_to(jnp.eye(top, dtype=x.dtype), (*shape, top)), jnp.zeros((), jnp.int32)
    count, off = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool)
    sums = Sums(zeros, zeros, count, off, none, jnp.zeros((), x.dtype), eye, none)
    start = (x, frame, none, sums, jnp.zeros((MARKS, *shape), x.dtype))
    inputs = (jnp.arange(stack.depth), weights.along_depth(stack), *weights.multipliers(stack)[:2])
    inputs = jax.tree.map(lambda leaf: leaf[:depth], inputs)
    (x, frame, _, sums, marks), _ = stack.over_depth(block, start, inputs)
    last = weights.final(stack) if stack.final_norm and blocks is None else None
    if last is not None:
        frame, shift = rescale(last.jacobian(x).push(frame), jnp.zeros((), jnp.int32))
        _, sums = orthonormal(frame, shift, sums)
    null = sums.last | (2 * sums.lost > sums.steps)
    logs = jnp.where(null, -jnp.inf, sums.total + sums.left_over).reshape(-1)
    order = jnp.argsort(logs, descending=True)
    share = (sums.lost / sums.steps).astype(x.dtype).reshape(-1)[order]
    size = jnp.log(frobenius(sums.triangle)) + sums.exponent.astype(x.dtype) * math.log(2)
    return Exponents(logs[order], marks.reshape(MARKS, -1)[:, order], sums.spread, share, size)


def _added(sums: Sums, r: Float[Array, "tokens m m"], shift: Array) -> Sums:
    """One QR's logs added; an entry that is lost counts with what rounding left of it."""
    diagonal = jnp.abs(jnp.diagonal(r, axis1=-2, axis2=-1))
    largest = jnp.max(diagonal, -1, keepdims=True)
    lost = diagonal <= largest * floor(diagonal.dtype, diagonal.shape[-1])
    logs = jnp.log(jnp.where(diagonal > 0, diagonal, 1))  # never −inf, which would spoil the compensation
    spread = jnp.max(jnp.log(largest) - jnp.where(lost, jnp.log(largest), logs))
    term = logs + shift.astype(logs.dtype) * math.log(2)
    total = sums.total + (term + sums.left_over)
    left_over = (term + sums.left_over) - (total - sums.total)
    triangle, exponent = rescale(r @ sums.triangle, sums.exponent + shift)
    count, spread = sums.lost + lost, jnp.maximum(sums.spread, spread)
    return Sums(total, left_over, count, lost, sums.steps + 1, spread, triangle, exponent)


def thinly_lost(found: Exponents) -> bool:
    """Whether some exponent that is not zero was lost in rounding at some QR."""
    lost = np.asarray(found.lost)
    return bool(((lost > 0) & (lost < 0.5)).any())
