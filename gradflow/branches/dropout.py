"""Dropout on a branch's output: its moments, and one mask a network."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from gradflow import checks
from gradflow.branches.catalogue import behind_norm, branch_of, of_one_token
from gradflow.branches.matrices import Basis, Params, State
from gradflow.symbolic import variants
from gradflow.symbolic.moments import BranchMoments


@dataclasses.dataclass(frozen=True)
class Dropout:
    """f(x) ⊙ μ, μ_ti = 0 with probability ``rate``, else 1/(1 − rate), for every token t and unit i (Srivastava et al. 2014).

    The mask is drawn with the weights and stays, so that a network's Jacobian is one matrix; the law is over masks too.
    What is not named here (matrices, gains, …) is the branch's own.

    Attributes
    ----------
    branch : str or Branch
    rate : float
        In [0, 1).
    """

    branch: Any
    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "branch", branch_of(self.branch))
        if self.rate != 0:
            checks.fraction("rate", self.rate)
        if isinstance(self.branch, Dropout):
            raise ValueError("branch: has a dropout already; give the two as one rate, 1 − (1 − r₁)(1 − r₂)")

    def __getattr__(self, name: str) -> Any:
        if name in ("branch", "factors") or name.startswith(
            "__"
        ):  # not set yet; without the mask; Python's own protocols
            raise AttributeError(name)
        return getattr(self.branch, name)

    @property
    def gain(self) -> float:
        """The branch's."""
        return self.branch.gain

    @property
    def name(self) -> str:
        """The branch's, and the rate."""
        return f"{self.branch.name}, dropout {self.rate:g}"

    @property
    def tokenwise(self) -> bool:
        """As the branch is."""
        return self.branch.tokenwise

    @property
    def refined(self) -> bool:
        """The law has its leading order alone."""
        return self.rate == 0 and getattr(self.branch, "refined", True)

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """The branch's weights as without dropout, and the mask's key."""
        return self.branch.init(key, d, dtype) | {"key": jax.random.key_data(jax.random.fold_in(key, 1))}

    def apply(self, params: Params, x: State) -> State:
        """``f(x) ⊙ μ``."""
        return self._mask(params, x) * self.branch.apply(params, x)

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``μ ⊙ (F @ basis)``."""
        return self._mask(params, x)[..., None] * self.branch.push(params, x, basis)

    def _mask(self, params: Params, x: State) -> State:
        # in float32 whatever x is: every precision gets the very same network
        drawn = jax.random.uniform(jax.random.wrap_key_data(params["key"]), x.shape, jnp.float32)
        return (drawn >= self.rate).astype(x.dtype) / (1 - self.rate)

    def moments(self) -> BranchMoments:
        """q_f and χ_f over 1 − rate."""
        return variants.dropped(self.branch.moments(), self.rate)

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> BranchMoments:
        """The same."""
        return variants.dropped(self.branch.moments_at(power, inner, outer), self.rate)

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """The branch's, which sees v ⊙ μ, of power ‖v‖²/(1 − rate)."""
        return self.branch.weight_power(power, inner, outer) / (1 - self.rate)

    def behind_norm(self) -> "Dropout":
        """The branch as the law has it where a norm follows."""
        return dataclasses.replace(self, branch=behind_norm((self.branch,))[0])

    def of_one_token(self) -> "Dropout":
        """The branch as it is where a token sees itself alone."""
        return dataclasses.replace(self, branch=of_one_token((self.branch,))[0])
