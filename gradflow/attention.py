"""Multi-head self-attention as a branch: tokens mix, so that its Jacobian is one block over all of them."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow import checks
from gradflow.matrices import Basis, Params, State, gaussian, linear
from gradflow.mlp import MLP
from gradflow.norms import BY_NAME
from gradflow.qkv import NormedValues
from gradflow.symbolic import moments as symbolic


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
    qkv_norm, eps : str, float
        A norm that the queries, keys and values of every head pass (`gradflow.qkv`), and its ε.
    """

    heads: int | None = None
    causal: bool = False
    gain: float = 1.0
    gain_in: float = 1.0
    qkv_norm: str = "none"
    eps: float = 0.0
    tokenwise = False
    matrices = ("_q", "_k", "_v", "_o")
    inner, outer = ("w_v",), ("w_o",)

    def __post_init__(self) -> None:
        if self.heads is not None:
            checks.integer("heads", self.heads, 1)

    @property
    def name(self) -> str:
        """``attention`` or ``attention:causal``, and ``:qkv-norm`` where there is one."""
        name = "attention:causal" if self.causal else "attention"
        return name if self.qkv_norm == "none" else f"{name}:qkv-norm"

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
        norm = None if self.qkv_norm == "none" else BY_NAME[self.qkv_norm].init(d // heads, self.eps, x.dtype)

        def split(name: str) -> Float[Array, "heads tokens k"]:
            states = linear(params, name, x).reshape(tokens, heads, d // heads).swapaxes(0, 1)
            return states if norm is None else norm(states)

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

    def of_one_token(self) -> MLP | NormedValues:
        """What it is where a token sees itself alone: W_O W_V x, or W_O N(W_V x)."""
        return MLP("linear", 1, self.gain, self.gain_in) if self.qkv_norm == "none" else NormedValues(self)
