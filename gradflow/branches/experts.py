"""Mixture of experts as a branch: a router picks k of E MLPs for each token and weighs them (Shazeer et al. 2017, 1701.06538).

All experts are one wide MLP whose hidden units carry their expert's weight, 0 where it was not chosen: W₂ (w ⊗ h). So every
expert runs on every token, which is exact, and costs E/k times what a dispatch would.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow import checks, precision
from gradflow.branches.matrices import Basis, Params, State, linear, pushed
from gradflow.branches.mlp import MLP
from gradflow.moments import top_k
from gradflow.numeric import to_jax
from gradflow.symbolic import experts as mixture
from gradflow.symbolic import moments as symbolic

Weights = Float[Array, "tokens experts"]
KINDS = {"moe": True, "switch": False}  # renormalised?


@dataclass(frozen=True)
class Experts:
    """f(x) = Σ_e w_e(x) f_e(x) over the k experts whose logits W_R x + b are largest; f_e are MLPs without a last bias.

    Attributes
    ----------
    number, chosen : int
        E and k.
    activation, ratio, gain, gain_in, gated
        Of every expert, as in `gradflow.branches.MLP`; a gated SiLU by default.
    renormalised : bool
        Softmax over the chosen (Mixtral: Jiang et al. 2024, 2401.04088), or over all, of which the chosen are taken (Switch:
        Fedus et al. 2022, 2101.03961; GShard: 2006.16668).
    router_gain, imbalance : float
        W_R ~ N(0, router_gain²/d), b_e ~ N(0, imbalance²): a bias that makes some experts popular with all tokens.
    capacity : float or None
        Places of an expert over its even share k·T/E, rounded up; in the tokens' order, those who find none get 0 from it.
    normed : bool
        For the law: a norm follows, so that the router's gradient along f is lost (`gradflow.symbolic.experts`).
    """

    number: int = 8
    chosen: int = 2
    activation: Any = "silu"
    gated: bool = True
    ratio: float = 4
    gain: float = 1.0
    gain_in: float = 1.0
    renormalised: bool = True
    router_gain: float = 1.0
    imbalance: float = 0.0
    capacity: float | None = None
    normed: bool = False
    spreads = True  # Σw² differs from token to token at any width
    refined = False  # so that the law has no 1/d term
    inner, outer = ("w_in", "w_gate", "w_router"), ("w_out",)

    def __post_init__(self) -> None:
        checks.integer("number", self.number, 1)
        if checks.integer("chosen", self.chosen, 1) > self.number:
            raise ValueError(f"chosen: {self.chosen} of {self.number} experts; choose at most all of them")
        for name in ("router_gain", "imbalance"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}: needs a finite number of at least 0, got {value!r}")
        places = self.capacity
        if places is not None and (isinstance(places, bool) or not isinstance(places, int | float) or not places > 0):
            raise ValueError(f"capacity: needs a factor above 0, or None for no limit, got {places!r}")
        MLP(self.activation)  # refuses what is none

    @staticmethod
    def named(spec: Any) -> "Experts | None":
        """The mixture that ``moe:8x2:glu:silu`` or ``switch:8x1:mlp:relu`` stands for; ``None`` for names of another form.

        Raises
        ------
        ValueError
            For a mixture's name that is not of that form, or names no MLP.
        """
        kind, *parts = spec.split(":", 2) if isinstance(spec, str) else (None,)
        if kind not in KINDS:
            return None
        sizes, _, mlp = ":".join(parts).partition(":")
        number, _, chosen = sizes.partition("x")
        if not (number.isdecimal() and chosen.isdecimal()):
            raise ValueError(f"branch: {spec!r} is no mixture; write experts, chosen and MLP as in {kind}:8x2:glu:silu")
        names = [f"{form}:{name}" for form in ("mlp", "glu") for name in symbolic.ACTIVATIONS]
        form, _, activation = checks.one_of(f"branch: {spec!r}, expert", mlp, names).partition(":")
        return Experts(int(number), int(chosen), activation, form == "glu", renormalised=KINDS[kind])

    @property
    def expert(self) -> MLP:
        """One of them."""
        return MLP(self.activation, self.ratio, self.gain, self.gain_in, self.gated)

    @property
    def name(self) -> str:
        """As `named` reads it."""
        kind = "moe" if self.renormalised else "switch"
        return f"{kind}:{self.number}x{self.chosen}:{self.expert.name}"

    @property
    def tokenwise(self) -> bool:
        """Unless a token can be dropped because of others."""
        return self.capacity is None

    @property
    def matrices(self) -> tuple[str, ...]:
        """The experts' and the router."""
        return (*self.expert.matrices, "_router")

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """W₁ (and W₃) (E·m, d) and W₂ (d, E·m) with m = ratio·d, one expert after another; W_R (E, d) and b (E,)."""
        experts, router, bias = jax.random.split(key, 3)
        units = self.number * round(self.ratio * d)
        wide = replace(self.expert, ratio=units / d, gain=self.gain * math.sqrt(self.number))
        rows = precision.normal(router, (self.number, d), dtype)
        return wide.init(experts, d, dtype) | {
            "w_router": self.router_gain / math.sqrt(d) * rows,
            "b_router": self.imbalance * precision.normal(bias, (self.number,), dtype),
        }

    def choice(self, params: Params, x: State) -> tuple[Array, Array]:
        """Which experts each token asks for, and which have a place for it, (tokens, E) of bool."""
        _, best = jax.lax.top_k(linear(params, "_router", x), self.chosen)
        asked = jnp.any(jax.nn.one_hot(best, self.number, dtype=bool), -2)
        if self.capacity is None:
            return asked, asked
        real = params.get("mask", jnp.ones(len(x), bool))
        queue = asked & real[:, None]
        places = jnp.ceil(self.capacity * self.chosen * jnp.sum(real) / self.number)
        return asked, asked & (jnp.cumsum(queue, 0) <= places)

    def route(self, params: Params, x: State) -> Weights:
        """w, 0 for experts that are not chosen or have no place left; the choice is constant to a derivative."""
        logits, (asked, served) = linear(params, "_router", x), self.choice(params, x)
        if self.renormalised:
            logits = jnp.where(asked, logits, jnp.finfo(logits.dtype).min)
        return jnp.where(served, jax.nn.softmax(logits), 0)

    def apply(self, params: Params, x: State) -> State:
        """``Σ_e w_e f_e(x)``."""
        hidden = self.expert.hidden(params, x)
        return linear(params, "_out", hidden * jnp.repeat(self.route(params, x), hidden.shape[1] // self.number, 1))

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``F`` by one linearisation, mapped over directions: Σ_e w_e F_e + f_e ∇w_eᵀ."""
        return pushed(functools.partial(self.apply, params), x, basis)

    def sums(self, power: Any) -> tuple[Any, Any]:
        """E Σw², and E Σ(∂w/∂ℓ)² of what the gradient sees, for an input of that power."""
        if self.capacity is not None:
            raise ValueError(
                "capacity: who is dropped depends on the tokens, and has no law; gradflow.profile measures it"
            )
        tau = jnp.sqrt(self.router_gain**2 * jnp.asarray(power) + self.imbalance**2)
        s, through, _ = top_k.at(self.number, self.chosen, self.renormalised, tau)
        if self.normed:
            through = s * (1 - top_k.at(self.number, self.chosen, True, 2 * tau)[0])
        return s, through

    def moments(self) -> symbolic.BranchMoments:
        """q_f and χ_f of a token of unit rms, averaged over the router; those of the 1/d term are left at 0."""
        return symbolic.BranchMoments(*map(float, astuple(self.moments_at(1.0))))

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> symbolic.BranchMoments:
        """One expert's, and sums over the router's weights: `gradflow.symbolic.experts`."""
        with precision.scope("float64"):
            fed = jnp.asarray(power) * inner**2
            (s, through), one = self.sums(fed), self.expert.moments_at(fed)
            found = _mixture()(one.q, one.chi, fed, self.router_gain, s, through)
            return symbolic.BranchMoments(*found).scaled(outer**2)

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """E Σw² times one expert's, as all that is chosen comes with its weight; and ‖dL/dW_R‖² = Σ_j (Σ_e v·f_e D_ej)² ‖x‖²."""
        fed = power * inner**2
        s, through = self.sums(fed)
        q = self.expert.moments_at(fed).q * outer**2
        return s * self.expert.weight_power(power, inner, outer) + power * q * through

    def of_one_token(self) -> "Experts":
        """Alone, a token finds a place in every expert."""
        return replace(self, capacity=None)

    def behind_norm(self) -> "Experts":
        """What it is to the law where a norm follows."""
        return replace(self, normed=True)


@functools.lru_cache
def _mixture() -> Callable[..., Any]:
    names = (mixture.q, mixture.chi, mixture.p, mixture.g, mixture.s, mixture.R)
    return to_jax(names, (mixture.POWER, mixture.RETURN))
