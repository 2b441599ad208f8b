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

from gradflow import checks, precision
from gradflow.branches.matrices import Basis, Params, State, gaussian, linear
from gradflow.moments import kernels
from gradflow.moments.kernels import Kernel
from gradflow.norms import BY_NAME, AnyJacobian
from gradflow.numeric import to_jax
from gradflow.symbolic import moments as symbolic
from gradflow.symbolic import variants

HIDDEN_NORMS = ("layernorm", "rms")


@functools.lru_cache
def _activation(phi: sympy.Expr) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """φ and φ' as JAX functions, φ' being SymPy's derivative."""
    return to_jax([symbolic.z], phi), to_jax([symbolic.z], symbolic.slope(phi))


def hidden_norm(
    name: str | None, h: Float[Array, "tokens m"], detached: bool = False
) -> tuple[Float[Array, "tokens m"], AnyJacobian | None]:
    """N(h) of every token at ε = 0 and unit gain, and its Jacobian; h itself where there is no norm."""
    return (
        (h, None) if name is None else replace(BY_NAME[name].init(h.shape[-1], 0.0, h.dtype), detached=detached).at(h)
    )


def suffix(name: str | None) -> str:
    """How a branch's name ends where a norm stands before its last matrix."""
    return "" if name is None else f"+{checks.one_of('hidden_norm', name, HIDDEN_NORMS)}"


@dataclass(frozen=True)
class MLP:
    """f(x) = W₂ N(φ(W₁ x + b₁)) + b₂ with hidden width ``ratio``·d; or gated, W₂ N(φ(W₁ x + b₁) ⊙ (W₃ x + b₃)) + b₂.

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
    hidden_norm : {None, "layernorm", "rms"}
        N over the hidden units, ε = 0: NormFormer (Shleifer et al. 2021, 2110.09456), Sub-LN (Wang et al. 2022, 2210.06423).
    bias, bias_in : float
        b₂ ~ N(0, bias²); b₁, b₃ ~ N(0, bias_in²). At 0 none is drawn.
    detached : bool
        Whether derivatives hold the statistic of the hidden norm constant.
    """

    activation: str | sympy.Expr = "relu"
    ratio: float = 4
    gain: float = 1.0
    gain_in: float = 1.0
    gated: bool = False
    hidden_norm: str | None = None
    bias: float = 0.0
    bias_in: float = 0.0
    detached: bool = False
    tokenwise = True
    inner, outer = ("w_in", "w_gate"), ("w_out",)

    def __post_init__(self) -> None:
        if not isinstance(self.activation, sympy.Expr):
            checks.one_of("activation", self.activation, symbolic.ACTIVATIONS)
        elif len(self.activation.free_symbols) != 1:
            raise ValueError(f"activation: needs an expression in one symbol, got {self.activation}")
        suffix(self.hidden_norm)
        for name in ("bias", "bias_in"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}: needs a standard deviation, a finite number of at least 0, got {value!r}")

    @property
    def name(self) -> str:
        """``mlp:ACT`` or ``glu:ACT``, and ``+NORM`` where the hidden units have one."""
        return f"{'glu' if self.gated else 'mlp'}:{self.activation}{suffix(self.hidden_norm)}"

    @property
    def refined(self) -> bool:
        """A norm over the hidden units has the leading order alone."""
        return self.hidden_norm is None

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
        """W₁ (and W₃) of shape (ratio·d, d), W₂ of shape (d, ratio·d), and the biases that are not 0."""
        m = round(self.ratio * d)
        keys = dict(zip(self.matrices, jax.random.split(key, len(self.matrices)), strict=True))
        params = {f"w{name}": gaussian(k, (m, d), self.gain_in / math.sqrt(d), dtype) for name, k in keys.items()}
        params["w_out"] = gaussian(keys["_out"], (d, m), self.gain / math.sqrt(m), dtype)
        for name, k in keys.items():
            size, std = (d, self.bias) if name == "_out" else (m, self.bias_in)
            if std:
                params[f"b{name}"] = gaussian(jax.random.fold_in(k, 1), (size,), std, dtype)
        return params

    def hidden(self, params: Params, x: State) -> Float[Array, "tokens m"]:
        """``h``, what the last matrix sees."""
        phi, _ = _activation(self.phi)
        hidden = phi(linear(params, "_in", x))
        hidden = hidden * linear(params, "_gate", x) if self.gated else hidden
        return hidden_norm(self.hidden_norm, hidden, self.detached)[0]

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``."""
        return linear(params, "_out", self.hidden(params, x))

    def factors(self, params: Params, x: Float[Array, " d"]) -> tuple[Float[Array, "d m"], Float[Array, "d m"]]:
        """U, V with F = U Vᵀ at one token, of rank m at most."""
        slopes, inner, jacobian = self._slopes(params, x[None])
        pairs = zip(slopes, inner, strict=True)
        first = functools.reduce(operator.add, [s[0][:, None] * w for s, w in pairs])
        return params["w_out"], (first if jacobian is None else jacobian.push(first[None])[0]).T

    def _slopes(self, params: Params, x: State) -> tuple[list[Array], list[Array], AnyJacobian | None]:
        """What multiplies the rows of each first matrix, (tokens, m), those matrices, and the hidden norm's Jacobian."""
        phi, slope = _activation(self.phi)
        hidden = linear(params, "_in", x)
        slopes = [jnp.broadcast_to(slope(hidden), hidden.shape)]  # φ' of a linear φ is one constant
        value = phi(hidden)
        if self.gated:
            gate = linear(params, "_gate", x)
            slopes, value = [slopes[0] * gate, jnp.broadcast_to(value, hidden.shape)], value * gate
        return (
            slopes,
            [params[f"w{name}"] for name in self.matrices[:-1]],
            hidden_norm(self.hidden_norm, value, self.detached)[1],
        )

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``W₂ DN (φ' ∘ W₁) @ basis``; without N, F is formed first where that is the cheaper order (k ≥ d)."""
        slopes, inner, jacobian = self._slopes(params, x)

        def pushed(slopes: list[Float[Array, " m"]], basis: Float[Array, "d k"]) -> Float[Array, "m k"]:
            return functools.reduce(
                operator.add, [s[:, None] * (w @ basis) for s, w in zip(slopes, inner, strict=True)]
            )

        def whole(slopes: list[Float[Array, " m"]]) -> Float[Array, "d d"]:
            pairs = zip(slopes, inner, strict=True)
            return functools.reduce(operator.add, [(params["w_out"] * s) @ w for s, w in pairs])

        if jacobian is not None:
            return params["w_out"] @ jacobian.push(jax.vmap(pushed)(slopes, basis))
        if basis.shape[-1] >= x.shape[-1]:
            return jax.vmap(lambda slopes, basis: whole(slopes) @ basis)(slopes, basis)
        return params["w_out"] @ jax.vmap(pushed)(slopes, basis)

    def moments(self) -> symbolic.BranchMoments:
        """q_f and χ_f: in 18 digits where the pre-activations are of unit power and have no norm, else by `moments_at`."""
        if self.gain_in != 1 or self.bias_in or self.hidden_norm:
            return symbolic.BranchMoments(*map(float, astuple(self.moments_at(1.0))))
        unit = symbolic.mlp_moments(self.phi, float(self.ratio), self.gated).scaled(self.gain**2)
        return variants.biased_out(unit, self.bias**2) if self.bias else unit

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> symbolic.BranchMoments:
        """q_f = s² E h² + bias², χ_f = s² ρ E|∇h|², ρ being x's share of the pre-activations' power (float64)."""
        with precision.scope("float64"):
            total, share = self._pre_activations(jnp.asarray(power), inner)
            at = variants.biased_in(self._hidden(total), share) if self.bias_in else self._hidden(total)
            at = at.scaled((self.gain * outer) ** 2)
            return variants.biased_out(at, self.bias**2) if self.bias else at

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """‖dL/dW₂‖² = ‖v‖²‖N(h)‖² and ‖dL/dW₁‖² (+ ‖dL/dW₃‖²) = ‖(W₂DN)ᵀv · ∇h‖²‖x‖²."""
        total, share = self._pre_activations(power, inner)
        at = self._hidden(total)
        return self.ratio * at.q + (self.gain * outer) ** 2 * share * at.chi / (self.gain_in * inner) ** 2

    def pairs(self, power: Any, inner: Any, outer: Any) -> Kernel:
        """E N(h)·N(h') and E ∇h·∇h' by quadrature over two correlated Gaussians; both tokens see the same biases."""
        total, share = self._pre_activations(power, inner)
        angles = jnp.asarray(kernels.angles())
        if self.bias_in:  # cos becomes share·cos + 1 − share
            angles = 2 * jnp.arcsin(jnp.sqrt(share) * jnp.sin(angles / 2))
        value, slope = kernels.of_mlp(self.phi, self.gated, total, angles)
        if self.hidden_norm:
            q, kept = self._kept(total)
            value, slope = (value - (q - kept)) / kept, slope / kept
        last = (self.gain * outer) ** 2
        weights = self.ratio * value + last * share * slope * jnp.cos(kernels.angles()) / (self.gain_in * inner) ** 2
        return kernels.interpolated(last * value + self.bias**2, last * share * slope, weights)

    def _pre_activations(self, power: Any, inner: Any) -> tuple[Any, Any]:
        """Power of the pre-activations, and x's share of it."""
        carried = power * (self.gain_in * inner) ** 2
        total = carried + self.bias_in**2
        return total, carried / total if self.bias_in else 1.0

    def _hidden(self, total: Any) -> symbolic.BranchMoments:
        """Moments at s = 1 and that power of the pre-activations: by quadrature within rounding of the 18 digits."""
        at = symbolic.mlp_moments(self.phi, float(self.ratio), self.gated)
        if at.defect == 0 and not self.gated:  # degree 1: every moment goes as the power
            at = at.scaled(total)
        else:
            at = symbolic.moments_at(self.phi, float(self.ratio), self.gated)(total)
        return variants.normed(at, self._kept(total)[1]) if self.hidden_norm else at

    def _kept(self, total: Any) -> tuple[Any, Any]:
        """E h², and what the hidden norm divides by: LayerNorm takes the mean out, which a gate has not."""
        q = symbolic.moments_at(self.phi, float(self.ratio), self.gated)(total).q
        return q, symbolic.variance_at(self.phi)(total) if self.hidden_norm == "layernorm" and not self.gated else q
