"""Branches f of a residual sub-layer: parameters, value, exact Jacobian push, and the moments that the law needs.

A branch acts on the whole state (tokens, d); most act on each token by itself, attention mixes them. Weights are drawn as iid
zero-mean Gaussians at unit gain (Var W = 1/fan_in); ``gain`` multiplies the last matrix, so that q_f and χ_f carry gain².
Given weights may bring a bias ``b_*`` beside each matrix ``w_*``, and attention a ``mask`` over keys.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import sympy
from jaxtyping import Array, Float

from gradflow import checks, precision
from gradflow.matrices import Params, gaussian, linear
from gradflow.numeric import to_jax
from gradflow.symbolic import moments as symbolic

State = Float[Array, "tokens d"]
Basis = Float[Array, "tokens d k"]


class Branch(Protocol):
    """What a stack needs of a branch; implementations are frozen (hashable) dataclasses.

    ``push(params, x, basis)`` is F(x) applied to each of k directions in the state, (tokens, d, k). Where a branch is
    ``tokenwise`` F is block-diagonal, and one basis of k = d serves all tokens at once. A branch whose matrices go through
    `linear` may list their names as ``matrices``; then the norms of their gradients can be asked for.
    """

    @property
    def gain(self) -> float:
        """Factor on the last matrix."""
        ...

    @property
    def name(self) -> str:
        """The name that `branch_of` knows it by."""
        ...

    @property
    def tokenwise(self) -> bool:
        """Whether each token's output depends on that token alone."""
        ...

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """Draw weights for width ``d``."""
        ...

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``."""
        ...

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``F(x)`` on every direction."""
        ...

    def moments(self) -> symbolic.BranchMoments:
        """Its moments for a unit-rms input, gain included."""
        ...

    def moments_at(self, power: Any) -> symbolic.BranchMoments:
        """Those of x ↦ f(√power x) for a unit-rms x; ``power`` of any shape."""
        ...

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """Σ‖dL/dW‖²/(‖v‖² d) over its matrices, v = dL/df, at that input power; ``inner``, ``outer``: the scheme's gains."""
        ...


@dataclass(frozen=True)
class Linear:
    """f(x) = W x, W_ij ~ N(0, gain²/d): q_f = χ_f = gain²."""

    gain: float = 1.0
    name = "linear"
    tokenwise = True
    matrices = ("",)
    inner, outer = (), ("w",)

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W of shape (d, d)."""
        return {"w": gaussian(key, (d, d), self.gain / math.sqrt(d), dtype)}

    def apply(self, params: Params, x: State) -> State:
        """``W x``."""
        return linear(params, "", x)

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``W @ basis``."""
        return params["w"] @ basis

    def moments(self) -> symbolic.BranchMoments:
        """q_f = χ_f = gain²."""
        return symbolic.LINEAR.scaled(self.gain**2)

    def moments_at(self, power: Any) -> symbolic.BranchMoments:
        """Times the power."""
        return self.moments().scaled(power)

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """‖dL/dW‖² = ‖v‖²‖x‖²."""
        return power


@dataclass(frozen=True)
class Bias:
    """f(x) = b, b_i ~ N(0, gain²), whatever x is: q_f = gain², F = 0, so that exact = trunk."""

    gain: float = 1.0
    name = "bias"
    tokenwise = True
    matrices = ()
    inner, outer = (), ("b",)

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """b of shape (d,)."""
        return {"b": gaussian(key, (d,), self.gain, dtype)}

    def apply(self, params: Params, x: State) -> State:
        """``b`` at every token."""
        return params["b"] + jnp.zeros_like(x)

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """Zero: a constant has no Jacobian."""
        return jnp.zeros_like(basis)

    def moments(self) -> symbolic.BranchMoments:
        """q_f = gain², χ_f = 0."""
        return symbolic.CONSTANT.scaled(self.gain**2)

    def moments_at(self, power: Any) -> symbolic.BranchMoments:
        """The same at any power."""
        return self.moments()

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """No matrix, no gradient."""
        return 0 * power


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

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``."""
        phi, _ = _activation(self.phi)
        hidden = phi(linear(params, "_in", x))
        return linear(params, "_out", hidden * linear(params, "_gate", x) if self.gated else hidden)

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


@dataclass(frozen=True)
class Attention:
    """Multi-head self-attention, f(x) = W_O concat_h softmax(QKᵀ/√(d/heads)) V, without dropout.

    Attributes
    ----------
    heads : int or None
        Must divide d; ``None`` is 8 where that divides d, else the largest of 4, 2, 1 that does.
    causal : bool
        Whether a token sees itself and earlier tokens only.
    gain, gain_in : float
        On W_O, and on W_Q, W_K, W_V.
    """

    heads: int | None = None
    causal: bool = False
    gain: float = 1.0
    gain_in: float = 1.0
    tokenwise = False
    matrices = ("_q", "_k", "_v", "_o")
    inner, outer = ("w_v",), ("w_o",)

    def __post_init__(self) -> None:
        if self.heads is not None:
            checks.integer("heads", self.heads, 1)

    @property
    def name(self) -> str:
        """``attention`` or ``attention:causal``."""
        return "attention:causal" if self.causal else "attention"

    def heads_of(self, d: int) -> int:
        """Number of heads at width ``d``.

        Raises
        ------
        ValueError
            If ``heads`` does not divide ``d``.
        """
        heads = self.heads or math.gcd(d, 8)
        if d % heads:
            raise ValueError(f"heads: {heads} heads do not divide d={d}")
        return heads

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W_Q, W_K, W_V, W_O, each (d, d)."""
        self.heads_of(d)
        names = ("w_q", "w_k", "w_v", "w_o")
        gains = (self.gain_in, self.gain_in, self.gain_in, self.gain)
        keys = jax.random.split(key, len(names))
        return {n: gaussian(k, (d, d), g / math.sqrt(d), dtype) for n, k, g in zip(names, keys, gains, strict=True)}

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``; ``params["mask"]`` (tokens,) is False at keys that nobody may attend to."""
        tokens, d = x.shape
        heads = self.heads_of(d)

        def split(name: str) -> Float[Array, "heads tokens k"]:
            return linear(params, name, x).reshape(tokens, heads, d // heads).swapaxes(0, 1)

        q, k, v = (split(name) for name in ("_q", "_k", "_v"))
        logits = jnp.einsum("hik,hjk->hij", q, k) / math.sqrt(d // heads)
        seen = jnp.tri(tokens, dtype=bool) if self.causal else None
        if "mask" in params:
            seen = params["mask"] if seen is None else seen & params["mask"]
        if seen is not None:  # the least finite number, not −inf: a row that sees nothing stays finite
            logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
        mixed = jnp.einsum("hij,hjk->ihk", jax.nn.softmax(logits), v)
        return linear(params, "_o", mixed.reshape(tokens, d))

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``F`` by one linearisation, mapped over directions."""
        _, tangent = jax.linearize(functools.partial(self.apply, params), x)
        return jax.vmap(tangent, -1, -1)(basis)

    def moments(self) -> symbolic.BranchMoments:
        """None of its own: attention mixes tokens, so that q_f and χ_f depend on their cosines."""
        raise ValueError(f"branch: the depth law of {self.name!r} is not derived; gradflow.profile measures it")

    def moments_at(self, power: Any) -> symbolic.BranchMoments:
        """None of its own."""
        return self.moments()

    def of_one_token(self) -> MLP:
        """What it is where a token sees itself alone: W_O W_V x."""
        return MLP("linear", 1, self.gain, self.gain_in)


BRANCHES: dict[str, Any] = {  # Branch by name
    "linear": Linear(),
    "bias": Bias(),
    **{mlp.name: mlp for gated in (False, True) for mlp in (MLP(name, gated=gated) for name in symbolic.ACTIVATIONS)},
    **{branch.name: branch for branch in (Attention(), Attention(causal=True))},
}


def branch_of(spec: str | Branch) -> Branch:
    """Return the branch that a name stands for; a branch object is returned as it is."""
    if all(hasattr(spec, part) for part in ("name", "gain", "tokenwise", "init", "apply", "push", "moments")):
        return spec  # type: ignore[return-value]
    return BRANCHES[checks.one_of("branch", spec, BRANCHES)]


def branches_of(block: Any) -> tuple[Branch, ...]:
    """The branches of a block: one name or object, or a sequence of them.

    Raises
    ------
    ValueError
        For an empty block or an unknown name.
    """
    each = block if isinstance(block, Sequence) and not isinstance(block, str) else (block,)
    if not each:
        raise ValueError("block: needs at least one branch")
    return tuple(map(branch_of, each))


def of_one_token(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """What branches are where a token sees itself alone: attention is W_O W_V."""
    return tuple(getattr(b, "of_one_token", lambda b=b: b)() for b in branches)


def powers_of(branches: Sequence[Branch]) -> list[float]:
    """q_f of each, of one token."""
    return [branch.moments().q for branch in of_one_token(branches)]


def with_gains(branch: Branch, params: Params, inner: Array, outer: Array) -> Params:
    """The parameters with the branch's ``inner`` and ``outer`` matrices multiplied, as a scheme wants them at initialisation."""
    factors = dict.fromkeys(getattr(branch, "inner", ()), inner) | dict.fromkeys(getattr(branch, "outer", ()), outer)
    return {name: value * factors[name] if name in factors else value for name, value in params.items()}


def with_power(branch: Branch, q_f: float) -> Branch:
    """Return the branch rescaled so that E f_i² = q_f for a unit-rms input."""
    unit = branch.moments().q / branch.gain**2
    return replace(branch, gain=math.sqrt(q_f / unit))  # type: ignore[type-var]
