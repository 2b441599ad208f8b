"""Normalisations: value and exact Jacobian, from the formula that `gradflow.symbolic.norms` derives.

Every row is ``N(x) = gain * A * y + bias`` with ``y = Px`` (P centres, or does nothing) and ``r = rms(y)``. Then

    J = diag(gain) · A · (P − κ ŷŷᵀ/d),    ŷ = y/r,

with the scalars ``A(r, ε)`` (scale) and ``κ(r, ε)`` (removed) read off SymPy's derivative and lambdified; nothing is retyped.
A detached norm has the same value and the Jacobian with r held constant: κ = 0.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import sympy
from jaxtyping import Array, Bool, Float

from gradflow import numeric, precision
from gradflow.dyt import DiagonalJacobian, DyT, DyTLayer
from gradflow.scaling import scaled
from gradflow.symbolic import norms as symbolic

Vectors = Float[Array, "*batch d"]
Scalars = Float[Array, " *batch"]


@functools.lru_cache
def _coefficients(row: str, detached: bool = False) -> Callable[..., tuple[Scalars, Scalars, Scalars]]:
    """(r, ε, d) → (A, κ, 1 − κ) as JAX code."""
    formula = symbolic.norm_formula(row)
    scale, removed = symbolic.detached(formula) if detached else (formula.scale, formula.removed)
    kept = sympy.factor(sympy.together(1 - removed))  # one fraction: no cancellation when ε ≪ r²
    arguments = (symbolic.r, symbolic.eps, symbolic.d)
    return numeric.to_jax(arguments, (scale, removed, kept))


def _wide(dtype: Any) -> Any:
    """Statistics are at least float32 (``promote_types`` refuses float32 beside float64 under strict promotion)."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def _mean(x: Array, axis: int = -1) -> Array:
    """Mean of an axis, which stays with length 1."""
    return jnp.mean(x, axis, keepdims=True)


def _before(part: Array, axis: int) -> Array:
    """``part`` with its last axis at ``axis``, axes of length 1 behind it."""
    return part.reshape(*part.shape, *(1,) * (-1 - axis))


def _centre(x: Vectors) -> Vectors:
    """``Px``; the second pass removes what rounding left of a mean much larger than the spread."""
    once = x - _mean(x)
    return once - _mean(once)


def _split(y: Vectors) -> tuple[Scalars, Vectors]:
    """``rms(y)`` and ``y/rms(y)`` without under- or overflow; a zero vector has direction zero."""
    unit, power = scaled(y, y.ndim - 1)
    rms = jnp.sqrt(_mean(unit**2))
    return (power * rms)[..., 0], unit / jnp.where(rms > 0, rms, 1)


def _scalars(
    row: str, eps: float, radius: Scalars, width: int, detached: bool = False
) -> tuple[Scalars, Scalars, Scalars]:
    """A, κ, 1 − κ at the point; ε/m^degree and r/m are at most 1, so no power leaves the dtype's range.

    A has the dimension 1/length and κ none, hence A(r, ε) = A(r/m, ε/m^degree)/m for m = max(r, ε^(1/degree)).
    """
    degree = symbolic.norm_formula(row).eps_degree
    length = jnp.asarray(eps ** (1 / degree) if degree else 0.0, radius.dtype)
    m = jnp.maximum(radius, length)
    m = jnp.where(m > 0, m, 1)
    scale, removed, kept = _coefficients(row, detached)(radius / m, (length / m) ** degree, width)
    exists = (radius > 0) | (length > 0)
    cast = functools.partial(jnp.asarray, dtype=radius.dtype)
    return tuple(jnp.where(exists, cast(value), 0) for value in (scale / m, removed, kept))  # type: ignore[return-value]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormJacobian:
    """``J = diag(gain) · A · (P − κ ŷŷᵀ/d)`` at one point or at a batch of points, as an operator that costs O(d).

    Attributes
    ----------
    gain : (d,)
        γ.
    direction : (*batch, d)
        ``ŷ`` (unit rms; zero at a degenerate point).
    scale, removed, kept : (*batch,)
        A = 1/t, κ and 1 − κ. At ε = 0 κ is 1: the component along ``ŷ`` is deleted.
    degenerate : (*batch,)
        True where ``y = 0``. With ε > 0 the Jacobian there is ``diag(gain) P/t`` and right; at ε = 0 it does
        not exist, and 0 stands in for it.
    centred : bool
        Whether P centres (LayerNorm).
    """

    gain: Vectors
    direction: Vectors
    scale: Scalars
    removed: Scalars
    kept: Scalars
    degenerate: Bool[Array, " *batch"]
    centred: bool = field(metadata={"static": True})

    @property
    def inverse_length(self) -> Float[Array, "*batch 1"]:
        """1/t of every point, an axis of length 1 after it."""
        return self.scale[..., None]

    @functools.partial(jax.jit, static_argnums=2, inline=True)
    def tangent(self, h: Array, axis: int = -1) -> Array:
        """``P_t h = (P − κ ŷŷᵀ/d) h`` along an axis, the symmetric part that projects; ``h`` may have leading axes of its own."""
        direction, kept = (_before(part, axis) for part in (self.direction, self.kept[..., None]))
        h = h - _mean(h, axis) if self.centred else h
        along = _mean(direction * h, axis) * direction
        return h - along + kept * along

    def mv(self, v: Vectors) -> Vectors:
        """``J v`` (forward), shape (*batch, d)."""
        with precision.scope(self.scale.dtype):
            return self.gain * (self.scale[..., None] * self.tangent(precision.as_array(v)))

    def rmv(self, g: Vectors) -> Vectors:
        """``Jᵀ g`` (backward), shape (*batch, d)."""
        with precision.scope(self.scale.dtype):
            return self.scale[..., None] * self.tangent(self.gain * precision.as_array(g))

    def push(self, basis: Float[Array, "*batch d k"]) -> Float[Array, "*batch d k"]:
        """``J @ basis``: k directions at every point, where they lie (``vmap`` of `mv` would transpose them twice a layer)."""
        gain, scale = (_before(part, -2) for part in (self.gain, self.scale[..., None]))
        with precision.scope(self.scale.dtype):
            return gain * (scale * self.tangent(precision.as_array(basis), -2))

    def dense(self) -> Float[Array, "*batch d d"]:
        """``J`` as a matrix, shape (*batch, d, d)."""
        with precision.scope(self.scale.dtype):
            d = self.direction.shape[-1]
            eye = jnp.eye(d, dtype=self.scale.dtype)
            return self.push(jnp.broadcast_to(eye, (*self.scale.shape, d, d)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _normalise(row: str, eps: float, detached: bool, x: Vectors) -> Vectors:
    """``A · Px``; differentiated by the derived Jacobian, so never NaN at ``y = 0``."""
    return _at(row, eps, detached, x)[0]


@_normalise.defjvp
def _normalise_jvp(row: str, eps: float, detached: bool, primals: tuple, tangents: tuple) -> tuple[Vectors, Vectors]:
    (x,), (v,) = primals, tangents
    value, jacobian = _at(row, eps, detached, x)
    return value, jacobian.scale[..., None] * jacobian.tangent(v)


def _at(row: str, eps: float, detached: bool, x: Vectors) -> tuple[Vectors, NormJacobian]:
    """Value and Jacobian of the unit-gain norm."""
    centred = symbolic.norm_formula(row).centred
    radius, direction = _split(_centre(x) if centred else x)
    scale, removed, kept = _scalars(row, eps, radius, x.shape[-1], detached)
    jacobian = NormJacobian(
        jnp.ones_like(x[(0,) * (x.ndim - 1)]), direction, scale, removed, kept, radius == 0, centred
    )
    return (radius * scale)[..., None] * direction, jacobian


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    """A normalisation layer with learned gain and bias; make one with a row's ``init``.

    Attributes
    ----------
    gain, bias : (d,)
        γ and b.
    row : str
        Its name in `NORMS`.
    eps : float
        ε, inside the root or outside as the row says.
    detached : bool
        Whether derivatives hold rms(y) constant (`gradflow.symbolic.norms.detached`); the value is the same.
    """

    gain: Vectors
    bias: Vectors
    row: str = field(metadata={"static": True})
    eps: float = field(metadata={"static": True})
    detached: bool = field(default=False, metadata={"static": True})

    def __call__(self, x: Vectors) -> Vectors:
        """Normalise the last axis; statistics are at least float32, the result has ``x``'s dtype."""
        x = precision.as_array(x)
        with precision.scope(x.dtype):
            return _layer(self, x)

    def jacobian(self, x: Vectors) -> NormJacobian:
        """Return the exact Jacobian at a vector, equivalent to ``jax.jacfwd(norm)(x)``, or at a batch of them.

        Raises
        ------
        ValueError
            If the last axis of ``x`` is not of the layer's width.
        """
        return self.at(x)[1]

    def at(self, x: Vectors) -> tuple[Vectors, NormJacobian]:
        """Value and Jacobian at ``x``, from one pass over it."""
        x = precision.as_array(x)
        if not x.ndim or x.shape[-1:] != self.gain.shape:
            raise ValueError(f"x: needs vectors of {self.gain.size} entries along the last axis, got shape {x.shape}")
        with precision.scope(x.dtype):
            return _layer_at(self, x)


@functools.partial(jax.jit, inline=True)
def _layer(norm: Norm, x: Vectors) -> Vectors:
    return _layer_at(norm, x)[0]


@functools.partial(jax.jit, inline=True)
def _layer_at(norm: Norm, x: Vectors) -> tuple[Vectors, NormJacobian]:
    wide = x.astype(_wide(x.dtype))
    of = (norm.row, norm.eps, norm.detached, wide)
    value, unit = _normalise(*of), _at(*of)[1]  # compiled: one pass
    gain, bias = (p.astype(wide.dtype) for p in (norm.gain, norm.bias))
    return (value * gain + bias).astype(x.dtype), replace(unit, gain=gain)


@dataclass(frozen=True)
class NormRow:
    """One row of the catalogue: a name, its formula (in `gradflow.symbolic.norms`) and where it comes from."""

    name: str
    equation: str
    source: str

    def init(self, d: int, eps: float = 1e-5, dtype: Any = "float32") -> Norm:
        """Return the unit-gain, zero-bias layer of width ``d``; at call time γ and b take ``x``'s dtype."""
        if not eps >= 0:
            raise ValueError(f"eps: needs a number of at least 0, got {eps!r}")
        with precision.scope(dtype):
            return Norm(jnp.ones(d, dtype), jnp.zeros(d, dtype), self.name, float(eps))


LayerNorm = NormRow("layernorm", "γ ⊙ Px/√(rms(Px)² + ε) + b", "Ba, Kiros, Hinton 2016 (1607.06450)")
RMSNorm = NormRow("rms", "γ ⊙ x/√(rms(x)² + ε) + b", "Zhang, Sennrich 2019 (1910.07467)")
RMSNormOutside = NormRow(
    "rms-outside", "γ ⊙ x/(rms(x) + ε) + b", "RMSNorm with ε outside the root, as some code has it"
)
UnitNorm = NormRow("unit", "γ ⊙ x/‖x‖ + b", "the bare projection (I − ûûᵀ)/‖u‖")

NORMS = (LayerNorm, RMSNorm, RMSNormOutside, UnitNorm)
AnyNorm = Norm | DyTLayer
AnyJacobian = NormJacobian | DiagonalJacobian
BY_NAME = {row.name: row for row in (*NORMS, DyT)}
