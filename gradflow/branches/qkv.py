"""Attention whose queries, keys and values pass a norm, as one token has it: f(x) = W_O N(W_V x).

HybridNorm (Zhuo et al. 2025, 2503.04598) norms Q, K and V of every head. Its output has unit power whatever x is: q_f = gain²;
its Jacobian is W_O (1/t) P W_V, t² the power of W_V x, so that χ of x ↦ f(√p x) is gain² too, to leading order in d/heads.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

from gradflow.branches.matrices import Basis, Params, State
from gradflow.symbolic.moments import BranchMoments

UNIT = BranchMoments(q=1.0, chi=1.0, defect=1.0, overlap=-1.0)  # degree 0: F x = 0


@dataclass(frozen=True)
class NormedValues:
    """What attention with normed queries, keys and values is where a token sees itself alone; ``attention`` runs it."""

    attention: Any
    tokenwise = True
    matrices = ("_v", "_o")
    inner, outer = (), ("w_o",)  # a gain on W_V is normed away

    @property
    def gain(self) -> float:
        """On W_O."""
        return self.attention.gain

    @property
    def name(self) -> str:
        """The attention's."""
        return self.attention.name

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """Its matrices."""
        return self.attention.init(key, d, dtype)

    def apply(self, params: Params, x: State) -> State:
        """Token by token, which is attention of a mask that shows each its own: here of one token."""
        return self.attention.apply(params, x)

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """As attention's."""
        return self.attention.push(params, x, basis)

    def moments(self) -> BranchMoments:
        """q_f = χ_f = gain²."""
        return UNIT.scaled(self.gain**2)

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> BranchMoments:
        """The same at any power."""
        return self.moments().scaled(outer**2)

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """‖dL/dW_O‖² = ‖v‖² d and ‖dL/dW_V‖² = gain² ‖v‖²‖x‖²/t², t² = gain_in² times the power of x."""
        return 1 + (self.gain * outer / self.attention.gain_in) ** 2 + 0 * power
