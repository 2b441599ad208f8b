"""Norms that act on every entry by itself: DyT, N(x) = γ ⊙ tanh(a x) + b, and its diagonal Jacobian.

The slope comes from SymPy's derivative of the formula; nothing is projected, so that ``projection`` is 1.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import sympy
from jaxtyping import Array, Float

from gradflow import precision
from gradflow.numeric import to_jax

z, a = sympy.symbols("z a", real=True)
FORMULA = sympy.tanh(a * z)
A = 0.5  # Zhu et al. 2025: the initial a

Vectors = Float[Array, "*batch d"]


@functools.lru_cache
def _functions() -> tuple[Callable[..., Array], Callable[..., Array]]:
    return to_jax((z, a), FORMULA), to_jax((z, a), sympy.diff(FORMULA, z))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DiagonalJacobian:
    """``J = diag(gain · slope)`` at a batch of points, behind the interface of `gradflow.norms.NormJacobian`.

    Attributes
    ----------
    gain : (d,)
        γ.
    slope : (*batch, d)
        a·sech²(a x).
    """

    gain: Vectors
    slope: Vectors

    @property
    def direction(self) -> Vectors:
        """No direction is deleted: zero."""
        return jnp.zeros_like(self.slope)

    @property
    def degenerate(self) -> Array:
        """Nowhere."""
        return jnp.zeros(self.slope.shape[:-1], bool)

    @property
    def inverse_length(self) -> Vectors:
        """What stands for 1/t, (*batch, d)."""
        return self.slope

    def tangent(self, h: Vectors) -> Vectors:
        """``h``: nothing is projected out."""
        return h

    def mv(self, v: Vectors) -> Vectors:
        """``J v``."""
        return self.gain * self.slope * v

    def rmv(self, g: Vectors) -> Vectors:
        """``Jᵀ g``, the same."""
        return self.mv(g)

    def push(self, basis: Float[Array, "*batch d k"]) -> Float[Array, "*batch d k"]:
        """``J @ basis``."""
        return (self.gain * self.slope)[..., None] * basis

    def dense(self) -> Float[Array, "*batch d d"]:
        """``J`` as a matrix."""
        return (self.gain * self.slope)[..., None] * jnp.eye(self.slope.shape[-1], dtype=self.slope.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DyTLayer:
    """``γ ⊙ tanh(a x) + b``; make one with ``DyT.init``.

    Attributes
    ----------
    gain, bias : (d,)
        γ and b.
    a : float
        The slope at 0.
    """

    gain: Vectors
    bias: Vectors
    a: float = field(default=A, metadata={"static": True})

    @property
    def row(self) -> str:
        """Its name in the catalogue."""
        return "dyt"

    def __call__(self, x: Vectors) -> Vectors:
        """Apply to the last axis."""
        return self.at(x)[0]

    def jacobian(self, x: Vectors) -> DiagonalJacobian:
        """Return the exact Jacobian at a vector, or at a batch of them."""
        return self.at(x)[1]

    def at(self, x: Vectors) -> tuple[Vectors, DiagonalJacobian]:
        """Value and Jacobian at ``x``.

        Raises
        ------
        ValueError
            If the last axis of ``x`` is not of the layer's width.
        """
        x = precision.as_array(x)
        if not x.ndim or x.shape[-1:] != self.gain.shape:
            raise ValueError(f"x: needs vectors of {self.gain.size} entries along the last axis, got shape {x.shape}")
        with precision.scope(x.dtype):
            value, slope = (function(x, self.a) for function in _functions())
            gain, bias = (p.astype(x.dtype) for p in (self.gain, self.bias))
            return value * gain + bias, DiagonalJacobian(gain, slope)


@dataclass(frozen=True)
class DyTRow:
    """The catalogue's row of `DyTLayer`."""

    name: str = "dyt"
    equation: str = "γ ⊙ tanh(a x) + b, a = 0.5"
    source: str = "Zhu et al. 2025 (2503.10622)"

    def init(self, d: int, eps: float = 0.0, dtype: Any = "float32") -> DyTLayer:
        """Return the unit-gain, zero-bias layer of width ``d``; it has no ε."""
        with precision.scope(dtype):
            return DyTLayer(jnp.ones(d, dtype), jnp.zeros(d, dtype))


DyT = DyTRow()
