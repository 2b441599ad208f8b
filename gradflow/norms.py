"""Normalisations: value and exact Jacobian, from the formula that `gradflow.symbolic.norms` derives.

Every row is ``N(x) = gain * A * y + bias`` with ``y = Px`` (P centres, or does nothing) and ``r = rms(y)``. Then

    J = diag(gain) · A · (P − κ ŷŷᵀ/d),    ŷ = y/r,

with the scalars ``A(r, ε)`` (scale) and ``κ(r, ε)`` (removed) read off SymPy's derivative and lambdified; nothing is retyped.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import sympy
from jaxtyping import Array, Bool, Float

from gradflow import numeric, precision
from gradflow.symbolic import norms as symbolic

Vector = Float[Array, " d"]
Scalar = Float[Array, ""]


@functools.lru_cache
def _coefficients(row: str) -> Callable[..., tuple[Scalar, Scalar, Scalar]]:
    """(r, ε, d) → (A, κ, 1 − κ) as JAX code."""
    formula = symbolic.norm_formula(row)
    kept = sympy.factor(sympy.together(1 - formula.removed))  # one fraction: no cancellation when ε ≪ r²
    arguments = (symbolic.r, symbolic.eps, symbolic.d)
    return numeric.to_jax(arguments, (formula.scale, formula.removed, kept))


def _wide(dtype: Any) -> Any:
    """Statistics are at least float32 (``promote_types`` refuses float32 beside float64 under strict promotion)."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def _centre(x: Vector) -> Vector:
    """``Px``; the second pass removes what rounding left of a mean much larger than the spread."""
    once = x - jnp.mean(x)
    return once - jnp.mean(once)


def _split(y: Vector) -> tuple[Scalar, Vector]:
    """``rms(y)`` and ``y/rms(y)`` without under- or overflow; a zero vector has direction zero."""
    largest = jnp.max(jnp.abs(y))
    safe = jnp.where(largest > 0, largest, 1)
    unit = y / safe
    rms = jnp.sqrt(jnp.mean(unit**2))
    return safe * rms, unit / jnp.where(rms > 0, rms, 1)


def _scalars(row: str, eps: float, radius: Scalar, width: int) -> tuple[Scalar, Scalar, Scalar]:
    """A, κ, 1 − κ at the point; ε/m^degree and r/m are at most 1, so no power leaves the dtype's range.

    A has the dimension 1/length and κ none, hence A(r, ε) = A(r/m, ε/m^degree)/m for m = max(r, ε^(1/degree)).
    """
    degree = symbolic.norm_formula(row).eps_degree
    length = jnp.asarray(eps ** (1 / degree) if degree else 0.0, radius.dtype)
    m = jnp.maximum(radius, length)
    m = jnp.where(m > 0, m, 1)
    scale, removed, kept = _coefficients(row)(radius / m, (length / m) ** degree, width)
    exists = (radius > 0) | (length > 0)
    cast = functools.partial(jnp.asarray, dtype=radius.dtype)
    return tuple(jnp.where(exists, cast(value), 0) for value in (scale / m, removed, kept))  # type: ignore[return-value]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormJacobian:
    """``J = diag(gain) · A · (P − κ ŷŷᵀ/d)`` at one point, as an operator that costs O(d).

    Attributes
    ----------
    gain, direction : (d,)
        γ and ``ŷ`` (unit rms; zero at a degenerate point).
    scale, removed, kept : ()
        A = 1/t, κ and 1 − κ. At ε = 0 κ is 1: the component along ``ŷ`` is deleted.
    degenerate : ()
        True where ``y = 0``. With ε > 0 the Jacobian there is ``diag(gain) P/t`` and right; at ε = 0 it does
        not exist, and 0 stands in for it.
    centred : bool
        Whether P centres (LayerNorm).
    """

    gain: Vector
    direction: Vector
    scale: Scalar
    removed: Scalar
    kept: Scalar
    degenerate: Bool[Array, ""]
    centred: bool = field(metadata={"static": True})

    def tangent(self, h: Vector) -> Vector:
        """``P_t h = (P − κ ŷŷᵀ/d) h``, the symmetric part that projects."""
        h = _centre(h) if self.centred else h
        along = jnp.mean(self.direction * h)
        return h - along * self.direction + self.kept * along * self.direction

    def mv(self, v: Vector) -> Vector:
        """``J v`` (forward), shape (d,)."""
        with precision.scope(self.scale.dtype):
            return self.gain * (self.scale * self.tangent(precision.as_array(v)))

    def rmv(self, g: Vector) -> Vector:
        """``Jᵀ g`` (backward), shape (d,)."""
        with precision.scope(self.scale.dtype):
            return self.scale * self.tangent(self.gain * precision.as_array(g))

    def dense(self) -> Float[Array, "d d"]:
        """``J`` as a matrix, shape (d, d)."""
        with precision.scope(self.scale.dtype):
            return jax.vmap(self.mv, in_axes=1, out_axes=1)(jnp.eye(self.gain.size, dtype=self.scale.dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _normalise(row: str, eps: float, x: Vector) -> Vector:
    """``A · Px`` for one vector; differentiated by the derived Jacobian, so never NaN at ``y = 0``."""
    y = _centre(x) if symbolic.norm_formula(row).centred else x
    radius, direction = _split(y)
    scale, _, _ = _scalars(row, eps, radius, x.size)
    return (radius * scale) * direction


@_normalise.defjvp
def _normalise_jvp(row: str, eps: float, primals: tuple, tangents: tuple) -> tuple[Vector, Vector]:
    (x,), (v,) = primals, tangents
    jacobian = _jacobian(row, eps, jnp.ones_like(x), x)
    return _normalise(row, eps, x), jacobian.scale * jacobian.tangent(v)


def _jacobian(row: str, eps: float, gain: Vector, x: Vector) -> NormJacobian:
    centred = symbolic.norm_formula(row).centred
    radius, direction = _split(_centre(x) if centred else x)
    scale, removed, kept = _scalars(row, eps, radius, x.size)
    return NormJacobian(gain, direction, scale, removed, kept, radius == 0, centred)


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
    """

    gain: Vector
    bias: Vector
    row: str = field(metadata={"static": True})
    eps: float = field(metadata={"static": True})

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """Normalise the last axis; statistics are at least float32, the result has ``x``'s dtype."""
        x = precision.as_array(x)
        with precision.scope(x.dtype):
            wide = x.astype(_wide(x.dtype))
            one = functools.partial(_normalise, self.row, self.eps)
            for _ in range(x.ndim - 1):
                one = jax.vmap(one)
            gain, bias = (p.astype(wide.dtype) for p in (self.gain, self.bias))
            return (one(wide) * gain + bias).astype(x.dtype)

    def jacobian(self, x: Vector) -> NormJacobian:
        """Return the exact Jacobian at one vector, equivalent to ``jax.jacfwd(norm)(x)``.

        Raises
        ------
        ValueError
            If ``x`` is not one vector of the layer's width; use ``jax.vmap`` for a batch.
        """
        x = precision.as_array(x)
        if x.shape != self.gain.shape:
            raise ValueError(f"x: needs one vector of shape {self.gain.shape}, got {x.shape}; jax.vmap maps a batch")
        with precision.scope(x.dtype):
            wide = x.astype(_wide(x.dtype))
            return _jacobian(self.row, self.eps, self.gain.astype(wide.dtype), wide)


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
BY_NAME = {row.name: row for row in NORMS}
