"""The two-matrix MLP, plain or gated: its activation is a SymPy expression, and so are its slope and its moments."""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import sympy
from jaxtyping import Array, Float

from gradflow import checks, kernels, precision
from gradflow.kernels import Kernel
from gradflow.matrices import Basis, Params, State, gaussian, linear
from gradflow.numeric import to_jax
from gradflow.symbolic import moments as symbolic


@functools.lru_cache
def _activation(phi: sympy.Expr) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """φ and φ' as JAX functions, φ' being SymPy's derivative."""
    return to_jax([symbolic.z], phi), to_jax([symbolic.z], symbolic.slope(phi))


@dataclass(frozen=True)
class MLP:
    """f(x) = W₂ φ(W₁ x + b₁) + b₂ with hidden width ``ratio``·d, drawn without b; or gated, W₂ (φ(W₁ x + b₁) ⊙ (W₃ x + b₃)) + b₂.

    Attributes
    ----------
    activation : str or sympy.Expr
        A name in `gradflow.symbolic.moments.ACTIVATIONS`, or any expression in one symbol.
    ratio : float
        Hidden width over d.
    gain, gain_in : float
        W₂ ~ N(0, gain²/(ratio·d)); W₁, W₃ ~ N(0, gain_in²/d).
    gated : bool
        GLU: ``"linear"`` is bilinear, ``"relu"`` ReGLU, ``"gelu"`` GEGLU, ``"silu"`` SwiGLU (Shazeer 2020, 2002.05202).
    """

    activation: str | sympy.Expr = "relu"
    ratio: float = 4
    gain: float = 1.0
    gain_in: float = 1.0
    gated: bool = False
    tokenwise = True
    inner, outer = ("w_in", "w_gate"), ("w_out",)

    def __post_init__(self) -> None:
        if not isinstance(self.activation, sympy.Expr):
            checks.one_of("activation", self.activation, symbolic.ACTIVATIONS)
        elif len(self.activation.free_symbols) != 1:
            raise ValueError(f"activation: needs an expression in one symbol, got {self.activation}")

    @property
    def name(self) -> str:
        """``mlp:ACT`` or ``glu:ACT``."""
        return f"{'glu' if self.gated else 'mlp'}:{self.activation}"

    @property
    def matrices(self) -> tuple[str, ...]:
        """First matrix, gate, last matrix."""
        return ("_in", *(("_gate",) if self.gated else ()), "_out")

    @property
    def phi(self) -> sympy.Expr:
        """φ(z) as a SymPy expression in `gradflow.symbolic.moments.z`."""
        if isinstance(self.activation, str):
            return symbolic.ACTIVATIONS[self.activation]
        renamed = {symbol: symbolic.z for symbol in self.activation.free_symbols}
        return self.activation.xreplace(renamed)  # type: ignore[return-value]

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W₁ (and W₃) of shape (ratio·d, d) and W₂ of shape (d, ratio·d)."""
        keys = jax.random.split(key, len(self.matrices))
        m, inner = round(self.ratio * d), [f"w{name}" for name in self.matrices[:-1]]
        drawn = {
            name: gaussian(k, (m, d), self.gain_in / math.sqrt(d), dtype) for name, k in zip(inner, keys, strict=False)
        }
        return drawn | {"w_out": gaussian(keys[-1], (d, m), self.gain / math.sqrt(m), dtype)}

    def hidden(self, params: Params, x: State) -> Float[Array, "tokens m"]:
        """``h``, what the last matrix sees."""
        phi, _ = _activation(self.phi)
        hidden = phi(linear(params, "_in", x))
        return hidden * linear(params, "_gate", x) if self.gated else hidden

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``."""
        return linear(params, "_out", self.hidden(params, x))

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``(W₂ ∘ φ') W₁ @ basis``; F is formed first where that is the cheaper order (k ≥ d)."""
        phi, slope = _activation(self.phi)
        hidden = linear(params, "_in", x)
        slopes = [jnp.broadcast_to(slope(hidden), hidden.shape)]  # φ' of a linear φ is one constant
        if self.gated:
            slopes = [slopes[0] * linear(params, "_gate", x), jnp.broadcast_to(phi(hidden), hidden.shape)]
        inner = [params[f"w{name}"] for name in self.matrices[:-1]]

        def token(slopes: list[Float[Array, " m"]], basis: Float[Array, "d k"]) -> Float[Array, "d k"]:
            pairs = list(zip(slopes, inner, strict=True))
            if basis.shape[1] >= x.shape[1]:
                return functools.reduce(operator.add, [(params["w_out"] * s) @ w for s, w in pairs]) @ basis
            return params["w_out"] @ functools.reduce(operator.add, [s[:, None] * (w @ basis) for s, w in pairs])

        return jax.vmap(token)(slopes, basis)

    def moments(self) -> symbolic.BranchMoments:
        """q_f = gain² E h², χ_f = gain² E |∇h|²: in 18 digits where gain_in is 1, else by `moments_at`."""
        if self.gain_in != 1:
            return symbolic.BranchMoments(*map(float, astuple(self.moments_at(1.0))))
        return symbolic.mlp_moments(self.phi, float(self.ratio), self.gated).scaled(self.gain**2)

    def moments_at(self, power: Any) -> symbolic.BranchMoments:
        """By quadrature of the same integrands, within rounding of them (float64)."""
        unit = symbolic.mlp_moments(self.phi, float(self.ratio), self.gated)
        if unit.defect == 0 and not self.gated:  # degree 1: every moment goes as the power
            return unit.scaled(power * self.gain_in**2).scaled(self.gain**2)
        with precision.scope("float64"):
            at = symbolic.moments_at(self.phi, float(self.ratio), self.gated)
            return at(jnp.asarray(power) * self.gain_in**2).scaled(self.gain**2)

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """‖dL/dW₂‖² = ‖v‖²‖h‖² and ‖dL/dW₁‖² (+ ‖dL/dW₃‖²) = ‖W₂ᵀv · ∇h‖²‖x‖²."""
        drawn = (self.gain_in * inner) ** 2
        unit = replace(self, gain=1.0, gain_in=1.0).moments_at(power * drawn)
        return self.ratio * unit.q + (self.gain * outer) ** 2 * unit.chi / drawn

    def pairs(self, power: Any, inner: Any, outer: Any) -> Kernel:
        """E h h' and E ∇h·∇h' by quadrature over two correlated Gaussians."""
        drawn = (self.gain_in * inner) ** 2
        value, slope = kernels.of_mlp(self.phi, self.gated, power * drawn)
        last = (self.gain * outer) ** 2
        weights = self.ratio * value + last * slope * jnp.cos(kernels.angles()) / drawn
        return kernels.interpolated(last * value, last * slope, weights)
