"""A sub-layer of several streams at one point: J = DN_out ( R⊗I + w ⊗ (DN_branch F DN_in) ⊗ rᵀ ), as an operator.

Derived in `gradflow.symbolic.streams`. States are (n, tokens, d); nothing of size n·d is formed unless a basis is pushed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow.branches import Branch, Params
from gradflow.jacobian import Slots, push_norm
from gradflow.norms import AnyJacobian, AnyNorm

Streams = Float[Array, "n tokens d"]


@dataclass(frozen=True)
class OnStreams:
    """Jacobian of a norm that some of n streams pass and others do not, behind a norm's interface (`gradflow.norms`).

    Attributes
    ----------
    every : NormJacobian
        Of the norm on every stream, points (n, tokens).
    normed : tuple of bool
        The streams that pass it.
    """

    every: AnyJacobian
    normed: tuple[bool, ...]

    def _pick(self, there: Array, elsewhere: Array | float) -> Array:
        """One of two by stream, the axis in front of (tokens, d)."""
        return jnp.where(np.asarray(self.normed)[:, None, None], there, elsewhere)

    @property
    def gain(self) -> Float[Array, "n 1 d"]:
        """γ, or 1."""
        return self._pick(self.every.gain, 1)

    @property
    def direction(self) -> Streams:
        """ŷ, or 0: nothing is projected out."""
        return self._pick(self.every.direction, 0)

    @property
    def inverse_length(self) -> Float[Array, "n tokens k"]:
        """1/t, or 1."""
        return self._pick(self.every.inverse_length, 1)

    @property
    def degenerate(self) -> Array:
        """Points without a direction, where a norm stands."""
        return self.every.degenerate & np.asarray(self.normed)[:, None]

    def tangent(self, h: Float[Array, "*k n tokens d"]) -> Float[Array, "*k n tokens d"]:
        """``P_t h``, or ``h``."""
        return self._pick(self.every.tangent(h), h)

    def push(self, basis: Float[Array, "n tokens d k"]) -> Float[Array, "n tokens d k"]:
        """``J @ basis``, or the basis."""
        return jnp.where(np.asarray(self.normed)[:, None, None, None], self.every.push(basis), basis)


def normed(norm: AnyNorm | None, where: tuple[bool, ...], u: Streams) -> tuple[Streams, OnStreams | None]:
    """Pass some of the streams through a norm: the state and the Jacobian, ``None`` where no stream has one."""
    if norm is None or not any(where):
        return u, None
    value, jacobian = norm.at(u)
    return jnp.where(np.asarray(where)[:, None, None], value, u), OnStreams(jacobian, where)


def mix(residual: Float[Array, "n n"], x: Float[Array, "n ..."]) -> Float[Array, "n ..."]:
    """R on the streams, whatever axes follow."""
    return jnp.tensordot(residual, x, 1)


def spread(post: Float[Array, " n"], y: Array) -> Float[Array, "n ..."]:
    """w ⊗ y."""
    return jnp.tensordot(post, y, 0)


@dataclass(frozen=True)
class StreamJacobian:
    """One sub-layer of several streams: values on the way forward, and the operator.

    Attributes
    ----------
    x, u, out : (n, tokens, d)
        The streams as they enter, R X + w ⊗ N_branch(f), and the sub-layer's output.
    kept, added : (n, tokens, d)
        The two terms of u.
    fed : (tokens, d)
        What the branch sees.
    norm_in, norm_branch, norm_out : Jacobians or None
    """

    branch: Branch
    params: Params
    residual: Float[Array, "n n"]
    pre: Float[Array, " n"]
    post: Float[Array, " n"]
    x: Streams
    fed: Float[Array, "tokens d"]
    kept: Streams
    added: Streams
    u: Streams
    out: Streams
    norm_in: AnyJacobian | None
    norm_branch: AnyJacobian | None
    norm_out: OnStreams | None

    @classmethod
    def at(
        cls,
        branch: Branch,
        params: Params,
        norms: Slots,
        where: tuple[bool, ...],
        numbers: tuple[Array, Array, Array],
        x: Streams,
    ) -> "StreamJacobian":
        """Evaluate the sub-layer; ``norms`` as for one stream, the last on the streams that ``where`` says."""
        residual, pre, post = numbers
        read = mix(pre, x)
        fed, d_in = (read, None) if norms[0] is None else norms[0].at(read)
        f = branch.apply(params, fed)
        f, d_branch = (f, None) if norms[1] is None else norms[1].at(f)
        kept, added = mix(residual, x), spread(post, f)
        u = kept + added
        out, d_out = normed(norms[2], where, u)
        return cls(
            branch,
            params,
            residual,
            pre,
            post,
            x,
            fed,
            kept,
            added,
            u,
            out,
            norm_in=d_in,
            norm_branch=d_branch,
            norm_out=d_out,
        )

    def push(self, basis: Float[Array, "n tokens d k"]) -> Float[Array, "n tokens d k"]:
        """``J`` on every direction of the basis (forward)."""
        inner = push_norm(self.norm_in, mix(self.pre, basis))
        inner = push_norm(self.norm_branch, self.branch.push(self.params, self.fed, inner))
        summed = mix(self.residual, basis) + spread(self.post, inner)
        return summed if self.norm_out is None else self.norm_out.push(summed)

    def branch_pullback(self, notes: dict[str, Array]) -> Callable[[Array], tuple[Array, dict[str, Array]]]:
        """``c ↦ (Fᵀ c, ‖dL/dW‖ by note)``, by reverse mode through the branch alone."""
        _, pull = jax.vjp(lambda notes, fed: self.branch.apply(self.params | notes, fed), notes, self.fed)
        return lambda c: pull(c)[::-1]
