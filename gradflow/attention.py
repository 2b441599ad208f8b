"""Multi-head self-attention as a branch: tokens mix, so that its Jacobian is one block over all of them."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import checks
from gradflow.matrices import Basis, Params, State, gaussian, linear, pushed
from gradflow.mlp import MLP, hidden_norm, suffix
from gradflow.norms import BY_NAME
from gradflow.qkv import NormedValues
from gradflow.symbolic import moments as symbolic

BASE = 10_000.0


def _rotated(x: Float[Array, "heads tokens k"]) -> Float[Array, "heads tokens k"]:
    """Each pair of halves turned by position times its frequency BASE^(−2i/k)."""
    tokens, half = x.shape[-2], x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(tokens, dtype=x.dtype), BASE ** -(jnp.arange(half, dtype=x.dtype) / half))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def heads_at(heads: int | None, d: int) -> int:
    """Number of heads at width ``d``; ``None``: 8 where that divides d, else the largest of 4, 2, 1 that does.

    Raises
    ------
    ValueError
        If ``heads`` does not divide ``d``.
    """
    heads = heads or math.gcd(d, 8)
    if d % heads:
        raise ValueError(f"heads: {heads} heads do not divide d={d}")
    return heads


def split(state: State, heads: int) -> Float[Array, "heads tokens k"]:
    """Each head's share of the width."""
    return state.reshape(len(state), heads, -1).swapaxes(0, 1)


def unit_rms(*each: Array) -> tuple[Array, ...]:
    """RMSNorm along the last axis."""
    return tuple(t * jax.lax.rsqrt(jnp.mean(t**2, -1, keepdims=True)) for t in each)


def mix(q: Array, k: Array, v: Array, seen: Array | None = None) -> State:
    """softmax(qkᵀ/√size) v of every head, side by side again; ``seen`` (queries, keys) or (keys,) is False where hidden."""
    logits = jnp.einsum("hik,hjk->hij", q, k) / math.sqrt(q.shape[-1])
    if seen is not None:  # the least finite number, not −inf: a row that sees nothing stays finite
        logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
    return jnp.einsum("hij,hjk->ihk", jax.nn.softmax(logits), v).reshape(q.shape[1], -1)


def drawn(key: Array, d: int, gain_in: float, gain: float, dtype: Any) -> Params:
    """W_Q, W_K, W_V of gain ``gain_in`` and W_O of ``gain``, each (d, d)."""
    names, gains = ("w_q", "w_k", "w_v", "w_o"), (gain_in, gain_in, gain_in, gain)
    keys = jax.random.split(key, len(names))
    return {n: gaussian(k, (d, d), g / math.sqrt(d), dtype) for n, k, g in zip(names, keys, gains, strict=True)}


@dataclass(frozen=True)
class Attention:
    """Multi-head self-attention, f(x) = W_O N(concat_h softmax(QKᵀ/√(d/heads)) V), without dropout.

    Attributes
    ----------
    heads : int or None
        Must divide d; ``None`` as in `heads_at`.
    causal : bool
        Whether a token sees itself and earlier tokens only.
    gain, gain_in : float
        On W_O, and on W_Q, W_K, W_V.
    qk_norm : bool
        RMSNorm on the queries and keys of every head (Henry et al. 2020, 2010.04245; as in OLMo 2, Gemma 3).
    rope : bool
        Rotary positions, base 10,000, halves paired (Su et al. 2021, 2104.09864).
    hidden_norm : {None, "layernorm", "rms"}
        N before W_O, ε = 0: Sub-LN (Wang et al. 2022, 2210.06423).
    qkv_norm, eps : str, float
        A norm that the queries, keys and values of every head pass (`gradflow.qkv`), and its ε.
    """

    heads: int | None = None
    causal: bool = False
    gain: float = 1.0
    gain_in: float = 1.0
    qk_norm: bool = False
    rope: bool = False
    hidden_norm: str | None = None
    qkv_norm: str = "none"
    eps: float = 0.0
    tokenwise = False
    matrices = ("_q", "_k", "_v", "_o")
    inner, outer = ("w_v",), ("w_o",)

    def __post_init__(self) -> None:
        if self.heads is not None:
            checks.integer("heads", self.heads, 1)
        suffix(self.hidden_norm)

    @staticmethod
    def named(spec: Any) -> "Attention | None":
        """The attention that a name with options stands for, as in ``attention:causal:rope``; ``None`` for any other."""
        first, *options = spec.split(":") if isinstance(spec, str) else ("",)
        if first != "attention" or not set(options) <= {"causal", "rope", "qk-norm"}:
            return None
        return Attention(causal="causal" in options, rope="rope" in options, qk_norm="qk-norm" in options)

    @property
    def name(self) -> str:
        """``attention``, then of ``:causal``, ``:rope``, ``:qk-norm``, ``:qkv-norm`` what it has, and ``+NORM`` before W_O."""
        options = {
            "causal": self.causal,
            "rope": self.rope,
            "qk-norm": self.qk_norm,
            "qkv-norm": self.qkv_norm != "none",
        }
        return ":".join(["attention", *(name for name, on in options.items() if on)]) + suffix(self.hidden_norm)

    def heads_of(self, d: int) -> int:
        """Number of heads at width ``d``."""
        return heads_at(self.heads, d)

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W_Q, W_K, W_V, W_O, each (d, d)."""
        self.heads_of(d)
        return drawn(key, d, self.gain_in, self.gain, dtype)

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``; ``params["mask"]`` (tokens,) is False at keys that nobody may attend to."""
        tokens, d = x.shape
        heads = self.heads_of(d)
        q, k, v = (split(linear(params, name, x), heads) for name in ("_q", "_k", "_v"))
        if self.qkv_norm != "none":
            norm = BY_NAME[self.qkv_norm].init(d // heads, self.eps, x.dtype)
            q, k, v = norm(q), norm(k), norm(v)
        if self.qk_norm:
            q, k = unit_rms(q, k)
        if self.rope:
            q, k = (_rotated(t) for t in (q, k))
        seen = jnp.tri(tokens, dtype=bool) if self.causal else None
        if "mask" in params:
            seen = params["mask"] if seen is None else seen & params["mask"]
        return linear(params, "_o", hidden_norm(self.hidden_norm, mix(q, k, v, seen))[0])

    @property
    def scores_normed(self) -> bool:
        """Whether queries and keys pass a norm, so that the logits' variance is 1 − cosine at any power of the input."""
        return self.qk_norm or self.qkv_norm != "none"

    def score_gain(self, power: Any) -> Any:
        """Power gain of W_Q, and of W_K, as the logits see it, for inputs of that power."""
        return 1 / power if self.scores_normed else self.gain_in**2

    def value_gain(self, power: Any, inner: Any) -> Any:
        """Power gain of W_V, a norm behind it included."""
        return 1 / power if self.qkv_norm != "none" else (self.gain_in * inner) ** 2

    def turn(self, tokens: int) -> Float[np.ndarray, "tokens tokens"]:
        """What rotary positions leave of the logits' covariance at distance i − j: mean cos((i − j) θ), many frequencies."""
        apart = np.subtract.outer(np.arange(tokens), np.arange(tokens))
        if not self.rope:
            return np.ones(apart.shape)
        return np.mean(np.cos(apart[..., None] * BASE ** -((np.arange(512) + 0.5) / 512)), -1)

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``F`` by one linearisation, mapped over directions."""
        return pushed(functools.partial(self.apply, params), x, basis)

    def moments(self) -> symbolic.BranchMoments:
        """None of its own: attention mixes tokens, so that q_f and χ_f depend on their cosines."""
        raise ValueError(f"branch: the depth law of {self.name!r} is not derived; gradflow.profile measures it")

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> symbolic.BranchMoments:
        """None of its own."""
        return self.moments()

    def of_one_token(self) -> MLP | NormedValues:
        """What it is where a token sees itself alone: W_O N(W_V x), N of the values, before W_O, or none."""
        if self.qkv_norm != "none":
            return NormedValues(self)
        return MLP("linear", 1, self.gain, self.gain_in, hidden_norm=self.hidden_norm)
