"""Multi-head self-attention as a branch: tokens mix, so that its Jacobian is one block over all of them."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import checks
from gradflow.branches.matrices import Basis, Params, State, gaussian, linear, pushed
from gradflow.branches.mlp import MLP, hidden_norm, suffix
from gradflow.branches.qkv import NormedValues
from gradflow.branches.relative import added
from gradflow.branches.rotary import BASE, frequencies, rotated
from gradflow.norms import BY_NAME
from gradflow.symbolic import moments as symbolic


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


def unit_rms(*each: Array, eps: float = 0.0, detached: bool = False) -> tuple[Array, ...]:
    """RMSNorm along the last axis."""
    scales = [jax.lax.rsqrt(jnp.mean(t**2, -1, keepdims=True) + eps) for t in each]
    return tuple(t * (jax.lax.stop_gradient(s) if detached else s) for t, s in zip(each, scales, strict=True))


def mix(
    q: Array,
    k: Array,
    v: Array,
    seen: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
) -> State:
    """softmax(scale·qkᵀ + bias) v of every head, side by side; ``seen`` (queries, keys) or (keys,) is False where hidden."""
    logits = jnp.einsum("hik,hjk->hij", q, k)
    logits = logits / math.sqrt(q.shape[-1]) if scale is None else logits * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    if seen is not None:  # the least finite number, not −inf: a row that sees nothing stays finite
        logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
    return jnp.einsum("hij,hjk->ihk", jax.nn.softmax(logits), v).reshape(q.shape[1], -1)


def drawn(
    key: Array, d: int, gain_in: float, gain: float, dtype: Any, queries: int | None = None, keys: int | None = None
) -> Params:
    """W_Q, W_K, W_V of gain ``gain_in`` and W_O of ``gain``; ``queries`` and ``keys`` (and values) are as wide as d, or given."""
    wide, narrow = queries or d, keys or d
    shapes = {"w_q": (wide, d), "w_k": (narrow, d), "w_v": (narrow, d), "w_o": (d, wide)}
    gains = dict.fromkeys(shapes, gain_in) | {"w_o": gain}
    each = zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True)
    return {n: gaussian(k, shape, gains[n] / math.sqrt(shape[1]), dtype) for (n, shape), k in each}


@dataclass(frozen=True)
class Attention:
    """Multi-head self-attention, f(x) = W_O N(concat_h softmax(QKᵀ/√(d/heads)) V), without dropout.

    Given weights may bring along depth, beside biases, ``gain_q`` and ``gain_k`` behind the norms of queries and keys,
    ``rope``, the frequencies of the pairs that are turned, ``reach``, how many tokens back a query sees, itself the first, and
    ``relative`` (heads, offsets), what is added to the logits by the key's distance (`gradflow.branches.relative`).

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
        A norm that the queries, keys and values of every head pass (`gradflow.branches.qkv`); its ε, or that of ``qk_norm``.
    kv_heads : int or None
        Heads of keys and values, each for heads/kv_heads queries in turn (Ainslie et al. 2023, 2305.13245); ``None``: heads.
    head_size : int or None
        Width of a head; ``None``: d/heads.
    scale : float or None
        Factor of the logits; ``None``: 1/√head_size.
    softcap : float or None
        Logits become softcap·tanh(logits/softcap) (Gemma 2: 2408.00118).
    qk_whole : bool
        Whether ``qk_norm`` goes over all heads at once (OLMo 2: 2501.00656).
    detached : bool
        Whether derivatives hold the statistics of its norms constant.
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
    kv_heads: int | None = None
    head_size: int | None = None
    scale: float | None = None
    softcap: float | None = None
    qk_whole: bool = False
    detached: bool = False
    tokenwise = False
    matrices = ("_q", "_k", "_v", "_o")
    inner, outer = ("w_v",), ("w_o",)

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_size"):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), 1)
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name}: needs a finite number above 0, or None, got {value!r}")
        if self.head_size and not self.heads:
            raise ValueError("heads: say how many, where head_size says how wide")
        if self.qk_whole and not self.qk_norm:
            raise ValueError("qk_whole: says how far qk_norm goes; give qk_norm=True too")
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
        """``attention``, then of ``:causal``, ``:rope``, ``:qk-norm``, ``:qkv-norm``, ``:grouped``, ``:softcap`` what it has,
        and ``+NORM`` before W_O.
        """
        options = {
            "causal": self.causal,
            "rope": self.rope,
            "qk-norm": self.qk_norm,
            "qkv-norm": self.qkv_norm != "none",
            "grouped": self.kv_heads is not None,
            "softcap": self.softcap is not None,
        }
        return ":".join(["attention", *(name for name, on in options.items() if on)]) + suffix(self.hidden_norm)

    def heads_of(self, d: int) -> int:
        """Number of heads at width ``d``."""
        return self.heads if self.heads and self.head_size else heads_at(self.heads, d)

    def size_of(self, d: int) -> int:
        """Width of a head at width ``d``."""
        return self.head_size or d // self.heads_of(d)

    def kv_heads_of(self, d: int) -> int:
        """Number of heads of keys and values at width ``d``."""
        heads = self.heads_of(d)
        if self.kv_heads and heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} do not divide {heads} heads")
        return self.kv_heads or heads

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W_Q (heads·size, d), W_K and W_V (kv_heads·size, d), W_O (d, heads·size): (d, d) by default."""
        size = self.size_of(d)
        return drawn(key, d, self.gain_in, self.gain, dtype, self.heads_of(d) * size, self.kv_heads_of(d) * size)

    def queries_and_keys(self, params: Params, q: Array, k: Array) -> tuple[Array, Array]:
        """They behind their own norms' gains, where these have any."""
        q, k = unit_rms(q, k, eps=self.eps, detached=self.detached)
        return (q * params["gain_q"], k * params["gain_k"]) if "gain_q" in params else (q, k)

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``; ``params["mask"]`` (tokens,) is False at keys that nobody may attend to."""
        tokens, d = x.shape
        heads, few = self.heads_of(d), self.kv_heads_of(d)
        q, k, v = (linear(params, name, x) for name in ("_q", "_k", "_v"))
        if self.qk_whole:
            q, k = self.queries_and_keys(params, q, k)
        q, k, v = split(q, heads), split(k, few), split(v, few)
        if self.qkv_norm != "none":
            norm = replace(BY_NAME[self.qkv_norm].init(self.size_of(d), self.eps, x.dtype), detached=self.detached)
            q, k, v = norm(q), norm(k), norm(v)
        if self.qk_norm and not self.qk_whole:
            q, k = self.queries_and_keys(params, q, k)
        if self.rope:
            turns = params["rope"] if "rope" in params else jnp.asarray(frequencies(self.size_of(d)), x.dtype)
            q, k = (rotated(t, turns) for t in (q, k))
        if few < heads:
            k, v = (jnp.repeat(t, heads // few, 0) for t in (k, v))
        bias = added(params["relative"], tokens, tokens) if "relative" in params else None
        mixed = mix(q, k, v, self.seen(params, tokens), self.scale, self.softcap, bias)
        return linear(params, "_o", hidden_norm(self.hidden_norm, mixed, self.detached)[0])

    def seen(self, params: Params, tokens: int) -> Array | None:
        """Which keys each query may attend to; ``None``: all."""
        seen = jnp.tri(tokens, dtype=bool) if self.causal else None
        if "reach" in params:
            near = jnp.subtract.outer(jnp.arange(tokens), jnp.arange(tokens)) < params["reach"]
            seen = near if seen is None else seen & near
        if "mask" in params:
            seen = params["mask"] if seen is None else seen & params["mask"]
        return seen

    def of_law(self) -> "Attention":
        """Itself, where the law knows its options.

        Raises
        ------
        ValueError
            For an option without a derivation.
        """
        for name in ("kv_heads", "head_size", "scale", "softcap"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: attention with it has no derived law; gradflow.profile measures it")
        if self.qk_whole:
            raise ValueError("qk_whole: attention with it has no derived law; gradflow.profile measures it")
        return self

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
        self.of_law()
        if self.qkv_norm != "none":
            return NormedValues(self)
        return MLP("linear", 1, self.gain, self.gain_in, hidden_norm=self.hidden_norm)
