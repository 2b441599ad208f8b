"""The block Jacobian as an operator: J = DN_out(u) · ( α I + β · DN_branch · F · DN_in ).

Derived in `gradflow.symbolic.residual`. An empty slot is ``None``. Nothing of size d × d is formed unless a basis is pushed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from gradflow.branches import Branch, Params
from gradflow.norms import AnyJacobian, AnyNorm

State = Float[Array, "tokens d"]
Slots = tuple[AnyNorm | None, AnyNorm | None, AnyNorm | None]


@dataclass(frozen=True)
class SublayerJacobian:
    """One residual sub-layer at one point: values on the way forward, and the operator.

    Attributes
    ----------
    x, fed : (tokens, d)
        The stream as it enters, and what the branch sees.
    u, added, out : (tokens, d)
        αx + β·N_branch(f), its second term, and the sub-layer's output.
    norm_in, norm_branch, norm_out : NormJacobian or None
        The slots' Jacobians, one per token along the leading axis of their leaves.
    alpha, beta : ()
        Multipliers of skip and branch.
    """

    branch: Branch
    params: Params
    alpha: Array
    beta: Array
    x: State
    fed: State
    u: State
    added: State
    out: State
    norm_in: AnyJacobian | None
    norm_branch: AnyJacobian | None
    norm_out: AnyJacobian | None

    @classmethod
    def at(
        cls, branch: Branch, params: Params, norms: Slots, alpha: Array, beta: Array, x: State
    ) -> "SublayerJacobian":
        """Evaluate the sub-layer at ``x``; ``norms`` are those at the branch's input, its output, and the output."""

        def normed(norm: AnyNorm | None, state: State) -> tuple[State, AnyJacobian | None]:
            return (state, None) if norm is None else norm.at(state)

        fed, d_in = normed(norms[0], x)
        f, d_branch = normed(norms[1], branch.apply(params, fed))
        added = beta * f
        u = alpha * x + added
        out, d_out = normed(norms[2], u)
        return cls(branch, params, alpha, beta, x, fed, u, added, out, d_in, d_branch, d_out)

    def push(self, basis: Float[Array, "tokens d k"]) -> Float[Array, "tokens d k"]:
        """``J`` on every direction of the basis (forward)."""
        inner = push_norm(self.norm_in, basis)
        inner = self.branch.push(self.params, self.fed, inner)
        inner = push_norm(self.norm_branch, inner)
        return push_norm(self.norm_out, self.alpha * basis + self.beta * inner)

    def push_trunk(self, basis: Float[Array, "tokens d k"]) -> Float[Array, "tokens d k"]:
        """``DN_out α`` on every direction: the identity path alone, F = 0."""
        return push_norm(self.norm_out, self.alpha * basis)

    def branch_pullback(self) -> Callable[[State], State]:
        """``c ↦ Fᵀ c`` at the point, by reverse mode through the branch alone."""
        _, pull = jax.vjp(functools.partial(self.branch.apply, self.params), self.fed)
        return lambda c: pull(c)[0]


def push_norm(jacobian: AnyJacobian | None, basis: Float[Array, "tokens d k"]) -> Float[Array, "tokens d k"]:
    """``DN @ basis`` for every token; an empty slot passes the basis on."""
    return basis if jacobian is None else jacobian.push(basis)
