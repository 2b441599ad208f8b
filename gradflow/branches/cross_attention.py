"""Multi-head cross-attention as a branch: a decoder's tokens ask a memory, which is no part of their stream.

Each token's output depends on that token alone, so that its law is one of angles between tokens (`gradflow.moments.kernels`),
with a softmax over the memory's keys; derived in `gradflow.symbolic.cross_attention`.
"""

import functools
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradflow import checks, precision
from gradflow.branches.attention import drawn, heads_at, mix, split, unit_rms
from gradflow.branches.matrices import Basis, Params, State, alike, linear, pushed
from gradflow.moments import grams, kernels, softmax
from gradflow.moments.kernels import Kernel
from gradflow.numeric import to_jax
from gradflow.symbolic import attention
from gradflow.symbolic import cross_attention as symbolic
from gradflow.symbolic import moments as gaussian


@functools.lru_cache
def _table(keys: int) -> tuple[np.ndarray, ...]:
    """The softmax's moments as constants, whoever traces the call."""
    with jax.ensure_compile_time_eval(), precision.scope("float64"):
        return tuple(np.asarray(part) for part in softmax.table((keys,), False))


@functools.lru_cache
def _formulas() -> tuple[Callable[..., Any], ...]:
    a = attention
    names = (symbolic.rho, a.qq, a.kk)
    own, other = ((symbolic.mixed()[k], symbolic.returned()[k].subs({a.G: 1, a.C: 1})) for k in (0, 1))
    variance = to_jax((a.p, *names), symbolic.LOGIT_VARIANCE)
    return variance, to_jax((a.K1, a.D1, *names), own), to_jax((a.K2, a.D2, *names), other)


@dataclass(frozen=True)
class CrossAttention:
    """Multi-head cross-attention, f(x) = W_O concat_h softmax(Q(x) K(m)ᵀ/√(d/heads)) V(m), without dropout.

    The memory m is drawn with the weights, ``params["memory"]`` (memory, d): Gaussian tokens of unit rms. Networks that
    `gradflow.stack.Drawn` draws have one for all their blocks, as a decoder has its encoder's output; given weights bring
    theirs, with an axis of depth like every other leaf, and may bring ``memory_mask`` (memory,), False at keys that nobody may
    attend to. It is a constant: no figure follows a gradient into the memory.

    Attributes
    ----------
    heads : int or None
        Must divide d; ``None`` as in `gradflow.branches.attention.heads_at`.
    memory : int
        Tokens of the memory.
    memory_cosine : float
        Cosine of every two of them.
    gain, gain_in : float
        On W_O, and on W_Q, W_K, W_V.
    qk_norm : bool
        RMSNorm on the queries and keys of every head.
    detached : bool
        Whether derivatives hold its statistics constant.
    head_size, scale : int, float or None
        Width of a head, and factor of the logits; ``None``: d/heads, and 1/√head_size.
    """

    heads: int | None = None
    memory: int = 32
    memory_cosine: float = 0.0
    gain: float = 1.0
    gain_in: float = 1.0
    qk_norm: bool = False
    detached: bool = False
    head_size: int | None = None
    scale: float | None = None
    tokenwise = True
    matrices = ("_q", "_k", "_v", "_o")
    inner, outer = ("w_v",), ("w_o",)
    refined = False  # a 1/d term would want the spread over heads

    def __post_init__(self) -> None:
        if self.heads is not None:
            checks.integer("heads", self.heads, 1)
        checks.integer("memory", self.memory, 1)
        checks.cosine("memory_cosine", self.memory_cosine, self.memory)

    @property
    def name(self) -> str:
        """``cross-attention``, with ``:qk-norm`` behind it as it has one."""
        return "cross-attention" + ":qk-norm" * self.qk_norm

    def heads_of(self, d: int) -> int:
        """Number of heads at width ``d``."""
        return self.heads if self.heads and self.head_size else heads_at(self.heads, d)

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W_Q, W_K, W_V of shape (heads·size, d), W_O (d, heads·size), by default all (d, d), and a memory."""
        heads = self.heads_of(d)
        width = heads * (self.head_size or d // heads)
        weights, memory = jax.random.split(key)
        return drawn(weights, d, self.gain_in, self.gain, dtype, width, width) | self.shared(memory, d, dtype)

    def shared(self, key: Array, d: int, dtype: Any) -> Params:
        """The memory, (memory, d): what all blocks of a network get alike."""
        return {"memory": unit_rms(alike(key, self.memory, d, self.memory_cosine, dtype))[0]}

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``."""
        if "memory" not in params:
            raise ValueError(
                "weights: hold no memory for cross-attention; Checkpoint.reading gives a decoder its encoder's"
            )
        heads, memory = self.heads_of(x.shape[-1]), params["memory"]
        q, k, v = (split(linear(params, *each), heads) for each in (("_q", x), ("_k", memory), ("_v", memory)))
        if self.qk_norm:
            q, k = unit_rms(q, k, detached=self.detached)
        return linear(params, "_o", mix(q, k, v, params.get("memory_mask"), self.scale))

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``F`` by one linearisation, mapped over directions."""
        return pushed(functools.partial(self.apply, params), x, basis)

    def _at(self, power: Any, cosine: Any = None) -> tuple[Any, Any]:
        """Powers of the mixed memory, and of what W_Qᵀ returns per unit of it, of one query of that power (or of two)."""
        for name in ("head_size", "scale"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: cross-attention with it has no derived law; gradflow.profile measures it")
        variance, own, other = _formulas()
        qq, kk = (1 / power, 1.0) if self.qk_norm else (self.gain_in**2, self.gain_in**2)
        s2, n = variance(power, self.memory_cosine, qq, kk), self.memory
        found = softmax.looked_up(tuple(map(jnp.asarray, _table(n))), jnp.asarray(s2)[..., None, None])
        K1, M3, M22 = jnp.moveaxis(found[..., 0], -1, 0)
        K2, D2, D1 = grams.overlap()(K1, M3, M22, n, max(n - 1, 1), s2, 1.0 if cosine is None else cosine)
        if cosine is None:
            return own(K1, D1, self.memory_cosine, qq, kk)
        return other(K2, D2, self.memory_cosine, qq, kk)

    def moments(self) -> gaussian.BranchMoments:
        """q_f and χ_f of a query of unit rms."""
        with precision.scope("float64"):
            return gaussian.BranchMoments(*map(float, astuple(self.moments_at(1.0))))

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> gaussian.BranchMoments:
        """q_f = g (ρ_m + (1 − ρ_m) K₁), χ_f = g power q_gain k_gain (1 − ρ_m)² (K₁ − 2M₃ + M₂₂), g the gain of V and O."""
        mixed, returned = self._at(power)
        values = (self.gain * self.gain_in * inner * outer) ** 2
        return gaussian.BranchMoments(values * mixed, values * power * returned)

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """See `_weights`."""
        return self._weights(*self._at(power), power, inner, outer)

    def pairs(self, power: Any, inner: Any, outer: Any) -> Kernel:
        """The same of two queries, by their angle."""
        cosines = jnp.cos(kernels.angles())
        mixed, returned = self._at(power, cosines)
        values = (self.gain * self.gain_in * inner * outer) ** 2
        weights = self._weights(mixed, returned, power * cosines, inner, outer)
        return kernels.interpolated(values * mixed, values * power * returned, weights)

    def _weights(self, mixed: Any, returned: Any, product: Any, inner: Any, outer: Any) -> Any:
        """W_O and W_V see the mixed memory; W_Q and W_K, one as much as the other, what the scores return, at ⟨x, x'⟩/d."""
        value, last = (self.gain_in * inner) ** 2, (self.gain * outer) ** 2
        return (value + last) * mixed + 2 * value * last * returned * product / self.gain_in**2
