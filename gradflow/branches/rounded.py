"""Layers in low precision: a branch whose values are computed in bfloat16 (or float16), as under mixed-precision training."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from gradflow import checks
from gradflow.branches.matrices import Basis, Params, State

LAYERS = ("bfloat16", "float16")
MARK = "@"  # as in mlp:gelu@bfloat16


@dataclasses.dataclass(frozen=True)
class Rounded:
    """f with weights, input and arithmetic in ``layers``; stream and norms stay in the stack's precision.

    The Jacobian is that of f in the stack's precision at the rounded weights and the rounded input: what rounding is a noise
    on, rather than the noise. What is not named here (moments, matrices, gains, …) is the branch's own.

    Attributes
    ----------
    branch : Branch
    layers : {"bfloat16", "float16"}
    """

    branch: Any
    layers: str = "bfloat16"

    def __post_init__(self) -> None:
        checks.one_of("layers", self.layers, LAYERS)

    def __getattr__(self, name: str) -> Any:
        if name in ("branch", "factors") or name.startswith("__"):  # not set yet; not rounded; Python's own protocols
            raise AttributeError(name)
        return getattr(self.branch, name)

    @property
    def name(self) -> str:
        """The branch's, and the precision."""
        return f"{self.branch.name}{MARK}{self.layers}"

    def _rounded(self, value: Any) -> Any:
        """Floats as the precision has them, in the dtype that they came in."""
        return jax.tree.map(lambda leaf: self._low(leaf).astype(leaf.dtype), value)

    def _low(self, leaf: Array) -> Array:
        return leaf.astype(self.layers) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    def apply(self, params: Params, x: State) -> State:
        """``f(x)`` in low precision; its derivative is that of the wide f at the same point."""
        low = self.branch.apply(jax.tree.map(self._low, params), self._low(x)).astype(x.dtype)
        wide = self.branch.apply(self._rounded(params), x + jax.lax.stop_gradient(self._rounded(x) - x))
        return wide + jax.lax.stop_gradient(low - wide)

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``F @ basis`` at the rounded point."""
        return self.branch.push(self._rounded(params), self._rounded(x), basis)

    def of_one_token(self) -> "Rounded":
        """The branch as it is where a token sees itself alone."""
        return self._passed("of_one_token")

    def behind_norm(self) -> "Rounded":
        """The branch as the law has it where a norm follows."""
        return self._passed("behind_norm")

    def _passed(self, name: str) -> "Rounded":
        own = getattr(self.branch, name, None)
        return self if own is None else dataclasses.replace(self, branch=own())
