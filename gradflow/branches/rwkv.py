"""RWKV-4's branches: time-mix, a recurrence over tokens in attention's place, and channel-mix, an MLP behind a gate.

Peng et al. 2023 (2305.13048). Both blend every token with the one before it. No law is derived for them; their Jacobians are
exact all the same.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow import checks
from gradflow.branches.matrices import Basis, Params, State, gaussian, linear, pushed

Channels = Float[Array, "tokens m"]


def blends(params: Params, names: str, x: State) -> list[State]:
    """``mix·x_t + (1 − mix)·x_{t−1}`` for each of the mixes, letter by letter; before the first token stands 0."""
    before = jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
    return [before + params[f"mix_{name}"] * (x - before) for name in names]


def wkv(decay: Float[Array, " m"], first: Float[Array, " m"], k: Channels, v: Channels) -> Channels:
    """Weighted mean of the values up to each token t, channel by channel.

    Token t itself weighs exp(first + k_t), an earlier one i exp(k_i − (t − 1 − i)·exp(decay)). All weights are kept over the
    largest, e^peak, which is a constant to the derivative, as it cancels.
    """
    rate = jnp.exp(decay)

    def step(past: tuple, now: tuple[Array, Array]) -> tuple[tuple, Array]:
        values, weights, peak = past
        k, v = now

        def with_token(peak: Array, k: Array) -> tuple[Array, Array, Array]:
            top = jax.lax.stop_gradient(jnp.maximum(peak, k))
            old, new = jnp.exp(peak - top), jnp.exp(k - top)
            return old * values + new * v, old * weights + new, top

        seen, weight, _ = with_token(peak, first + k)
        return with_token(peak - rate, k), seen / weight

    none = jnp.zeros_like(k[0])
    return jax.lax.scan(step, (none, none, none - jnp.inf), (k, v))[1]


def ramp(d: int, power: float, dtype: Any) -> Float[Array, " d"]:
    """``(i/d)^power``, i from 0: low channels look back, high ones at the token itself."""
    return (jnp.arange(d, dtype=dtype) / d) ** power


def drawn(branch: Any, key: Array, d: int, dtype: Any) -> Params:
    """A branch's matrices, ``gain`` on the outer one and ``gain_in`` on the others."""
    shapes, params = branch.shapes(d), {}
    for name, k in zip(branch.matrices, jax.random.split(key, len(branch.matrices)), strict=True):
        gain, shape = branch.gain if f"w{name}" in branch.outer else branch.gain_in, shapes[f"w{name}"]
        params[f"w{name}"] = gaussian(k, shape, gain / math.sqrt(shape[1]), dtype)
    return params


def push(branch: Any, params: Params, x: State, basis: Basis) -> Basis:
    """``F`` by one linearisation, mapped over directions."""
    return pushed(functools.partial(branch.apply, params), x, basis)


def no_law(branch: Any, *_: Any) -> NoReturn:
    """Say so."""
    raise ValueError(f"branch: no law is derived for {branch.name!r}; gradflow.profile measures it")


def check(branch: Any) -> None:
    """Refuse a place that is none."""
    value = branch.along
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"along: needs a share of the depth from 0 to 1, got {value!r}")


@dataclass(frozen=True)
class TimeMix:
    """f(x)_t = W_O (σ(W_R x_t^r) ⊙ wkv(W_K x^k, W_V x^v)_t); x^r, x^k, x^v are x blended with the tokens before.

    Drawn decays and mixes are the paper's (appendix on initialisation, as its code has them), matrices Gaussian as every
    branch's, where the paper starts most of them at 0. Every block gets the decays and mixes of one place along the depth.

    Attributes
    ----------
    size : int or None
        Channels of the recurrence; ``None``: d.
    gain, gain_in : float
        On W_O, and on W_R, W_K, W_V.
    along : float
        l/(L − 1), the place.
    """

    size: int | None = None
    gain: float = 1.0
    gain_in: float = 1.0
    along: float = 0.5
    name = "time-mix"
    tokenwise, causal = False, True
    matrices, vectors = ("_r", "_k", "_v", "_o"), ("mix_r", "mix_k", "mix_v", "decay", "first")
    inner, outer = ("w_v",), ("w_o",)
    push, of_law, moments, moments_at = push, no_law, no_law, no_law

    def __post_init__(self) -> None:
        if self.size is not None:
            checks.integer("size", self.size, 1)
        check(self)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Of the parameters at width ``d``: matrices, then vectors."""
        m = self.size or d
        found = {f"w{name}": (d, m) if name == "_o" else (m, d) for name in self.matrices}
        return found | {name: (d,) if name.startswith("mix") else (m,) for name in self.vectors}

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W_R, W_K, W_V (size, d), W_O (d, size); mixes (d,), decay and first (size,)."""
        m, back = self.size or d, 1 - self.along
        channel = jnp.arange(m, dtype=dtype)
        return drawn(self, key, d, dtype) | {
            "mix_r": ramp(d, back / 2, dtype),
            "mix_k": ramp(d, back, dtype),
            "mix_v": ramp(d, back, dtype) + 0.3 * self.along,
            "decay": 8 * (channel / max(m - 1, 1)) ** (0.7 + 1.3 * self.along) - 5,
            "first": math.log(0.3) + ((channel + 1) % 3 - 1) / 2,
        }

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``; what stands behind a token does not reach it, so that padding there needs no mask."""
        r, k, v = (linear(params, f"_{n}", part) for n, part in zip("rkv", blends(params, "rkv", x), strict=True))
        return linear(params, "_o", jax.nn.sigmoid(r) * wkv(params["decay"], params["first"], k, v))


@dataclass(frozen=True)
class ChannelMix:
    """f(x)_t = σ(W_R x_t^r) ⊙ W_V max(W_K x_t^k, 0)²; x^r and x^k are x blended with the tokens before.

    Attributes
    ----------
    ratio : float
        Hidden width over d.
    gain, gain_in : float
        On W_V, and on W_K, W_R.
    along : float
        As in `TimeMix`.
    """

    ratio: float = 4
    gain: float = 1.0
    gain_in: float = 1.0
    along: float = 0.5
    name = "channel-mix"
    tokenwise, causal = False, True
    matrices, vectors = ("_k", "_r", "_v"), ("mix_k", "mix_r")
    inner, outer = ("w_k",), ("w_v",)
    push, of_law, moments, moments_at = push, no_law, no_law, no_law

    def __post_init__(self) -> None:
        check(self)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Of the parameters at width ``d``: matrices, then vectors."""
        m = round(self.ratio * d)
        return {"w_k": (m, d), "w_r": (d, d), "w_v": (d, m), "mix_k": (d,), "mix_r": (d,)}

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W_K (ratio·d, d), W_R (d, d), W_V (d, ratio·d); mixes (d,)."""
        return drawn(self, key, d, dtype) | {name: ramp(d, 1 - self.along, dtype) for name in self.vectors}

    def apply(self, params: Params, x: State) -> State:
        """``f(x)``."""
        for_k, for_r = blends(params, "kr", x)
        hidden = jax.nn.relu(linear(params, "_k", for_k)) ** 2
        return jax.nn.sigmoid(linear(params, "_r", for_r)) * linear(params, "_v", hidden)
