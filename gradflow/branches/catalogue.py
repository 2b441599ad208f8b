"""Branches f of a residual sub-layer: parameters, value, exact Jacobian push, and the moments that the law needs.

A branch acts on the whole state (tokens, d); most act on each token by itself, attention mixes them. Weights are drawn as iid
zero-mean Gaussians at unit gain (Var W = 1/fan_in); ``gain`` multiplies the last matrix, so that q_f and χ_f carry gain².
Given weights may bring a bias ``b_*`` beside each matrix ``w_*``, and attention a ``mask`` over keys. A branch of which the
law has the leading order alone says so by ``refined = False``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array

from gradflow import checks
from gradflow.branches.attention import Attention
from gradflow.branches.cross_attention import CrossAttention
from gradflow.branches.experts import Experts
from gradflow.branches.matrices import Basis, Params, State, gaussian, linear
from gradflow.branches.mlp import HIDDEN_NORMS, MLP
from gradflow.branches.parallel import BETWEEN, Parallel
from gradflow.branches.rounded import MARK, Rounded
from gradflow.branches.rwkv import ChannelMix, TimeMix
from gradflow.moments import kernels
from gradflow.moments.kernels import Kernel
from gradflow.symbolic import moments as symbolic


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

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> symbolic.BranchMoments:
        """Those of x ↦ f(√power x) for a unit-rms x, the scheme's gains on its matrices included; all of any shape."""
        ...

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """Σ‖dL/dW‖²/(‖v‖² d) over its matrices, v = dL/df, at that input power; ``inner``, ``outer``: the scheme's gains."""
        ...

    def pairs(self, power: Any, inner: Any, outer: Any) -> Kernel:
        """What `moments_at` and `weight_power` say of one token, said of two, by their angle (`gradflow.moments.kernels`)."""
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

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> symbolic.BranchMoments:
        """Times the power."""
        return self.moments().scaled(power * outer**2)

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """‖dL/dW‖² = ‖v‖²‖x‖²."""
        return power

    def pairs(self, power: Any, inner: Any, outer: Any) -> Kernel:
        """Cosines are kept."""
        gain, cosines = power * (self.gain * outer) ** 2, jnp.cos(kernels.angles())
        return kernels.interpolated(gain * cosines, gain, power * cosines)


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

    def factors(self, params: Params, x: Array) -> tuple[Array, Array]:
        """F = U Vᵀ of no columns."""
        return jnp.zeros((x.size, 0), x.dtype), jnp.zeros((x.size, 0), x.dtype)

    def moments(self) -> symbolic.BranchMoments:
        """q_f = gain², χ_f = 0."""
        return symbolic.CONSTANT.scaled(self.gain**2)

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> symbolic.BranchMoments:
        """The same at any power."""
        return self.moments().scaled(outer**2)

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """No matrix, no gradient."""
        return 0 * power

    def pairs(self, power: Any, inner: Any, outer: Any) -> Kernel:
        """The same b at every token."""
        return kernels.interpolated((self.gain * outer) ** 2 + 0 * power, 0.0, 0.0)


BRANCHES: dict[str, Any] = {  # Branch by name; `named` knows mixtures, attention's options, and norms over hidden units
    "linear": Linear(),
    "bias": Bias(),
    **{mlp.name: mlp for gated in (False, True) for mlp in (MLP(name, gated=gated) for name in symbolic.ACTIVATIONS)},
    **{branch.name: branch for branch in (Attention(), Attention(causal=True))},
    **{branch.name: branch for branch in (CrossAttention(), CrossAttention(qk_norm=True))},
    **{branch.name: branch for branch in (TimeMix(), ChannelMix())},
}


def named(argument: str, name: object) -> Branch:
    """The branch of a name, as in ``mlp:gelu`` or, with a norm before the last matrix, ``mlp:gelu+layernorm``."""
    plain, plus, norm = name.partition("+") if isinstance(name, str) else (name, "", "")
    spelt: Any = Experts.named(plain) or Attention.named(plain)
    branch = spelt or BRANCHES[checks.one_of(argument, plain, BRANCHES)]
    if not plus:
        return branch
    if not hasattr(branch, "hidden_norm"):
        raise ValueError(f"{argument}: {plain!r} has no hidden units, which {name!r} would normalise")
    return replace(branch, hidden_norm=checks.one_of(argument, norm, HIDDEN_NORMS))


def branch_of(spec: str | Branch) -> Branch:
    """The branch of a name: ``"a|b"`` a sum, ``"a@bfloat16"`` in that precision; a branch object is returned as it is."""
    if all(hasattr(spec, part) for part in ("name", "gain", "tokenwise", "init", "apply", "push", "moments")):
        return spec  # type: ignore[return-value]
    if isinstance(spec, str) and BETWEEN in spec:
        return joined(tuple(branch_of(part.strip()) for part in spec.split(BETWEEN)))
    if isinstance(spec, str) and MARK in spec:
        plain, _, layers = spec.rpartition(MARK)
        return Rounded(branch_of(plain), layers)  # type: ignore[return-value]
    return named("branch", spec)


def joined(branches: tuple[Branch, ...]) -> Branch:
    """The branches as one that adds them up; one alone stays as it is."""
    return branches[0] if len(branches) == 1 else Parallel(branches)


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


def behind_norm(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    """What branches are to the law where a norm follows: it takes out a part of the gradient that goes through a router."""
    return tuple(getattr(b, "behind_norm", lambda b=b: b)() for b in branches)


def memory_of(branches: Sequence[Branch]) -> dict[str, Any]:
    """Length and cosine of the (first) memory that a block asks, for a result's settings; nothing without cross-attention."""
    asked = [branch for branch in branches if isinstance(branch, CrossAttention)]
    return {"memory_tokens": asked[0].memory, "memory_cosine": asked[0].memory_cosine} if asked else {}


def powers_of(branches: Sequence[Branch]) -> list[float]:
    """q_f of each, of one token."""
    return [branch.moments().q for branch in of_one_token(branches)]


def with_gains(branch: Branch, params: Params, inner: Array, outer: Array) -> Params:
    """The parameters with the branch's ``inner`` and ``outer`` matrices multiplied, as a scheme wants them at initialisation."""
    factors = dict.fromkeys(getattr(branch, "inner", ()), inner) | dict.fromkeys(getattr(branch, "outer", ()), outer)
    return {name: value * factors[name] if name in factors else value for name, value in params.items()}


def with_power(branch: Branch, q_f: float) -> Branch:
    """Return the branch rescaled so that E f_i² = q_f for a unit-rms input."""
    factor = math.sqrt(q_f / branch.moments().q)
    return with_fields(branch, **{n: getattr(branch, n) * factor for n in ("gain", "bias") if hasattr(branch, n)})


def with_fields(branch: Any, **fields: Any) -> Branch:
    """The branch with some of its fields replaced: those of the branch within, where it wraps one."""
    within = getattr(branch, "branch", None)
    return replace(branch, **fields if within is None else {"branch": with_fields(within, **fields)})
