"""The same weights in another placement: where norms stand changes, matrices do not.

A slot that the model has keeps its trained norm; one that it lacks gets γ = 1, b = 0. Of a norm that the placement takes away
only the division goes: a branch still reads through the γ and b that it was trained behind.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow import checks, streams
from gradflow.branches import Params
from gradflow.branches.attention import Attention
from gradflow.branches.experts import Experts
from gradflow.branches.mlp import MLP
from gradflow.branches.parallel import Parallel
from gradflow.norms import AnyNorm, Norm
from gradflow.schemes import Scheme, scheme_of
from gradflow.stack import Given, Stack

GAINS = ("kept", "unit")
READERS = ("_q", "_k", "_v", "_in", "_gate", "_router")  # what sees a branch's input


def refuse(block: Sequence[Any]) -> None:
    """Refuse a network whose branches share a sub-layer, or read more than their matrices say.

    Raises
    ------
    ValueError
    """
    if len(block) == 1 and isinstance(block[0], Parallel):
        raise ValueError("schemes: this model's branches share a sub-layer (parallel residual), which is not re-wired")
    for branch in block:
        if not isinstance(branch, Attention | MLP | Experts):
            raise ValueError(f"schemes: a model with {branch.name!r} is not re-wired")


def checked(spec: str | Scheme) -> Scheme:
    """The row of a placement that a network's weights can take.

    Raises
    ------
    ValueError
        For a placement of several streams, of two kinds along depth, or of moments at initialisation.
    """
    if isinstance(spec, str) and spec in streams.BY_NAME:
        raise ValueError(f"schemes: {spec!r} has several streams, and these weights one; choose a row of one stream")
    row = scheme_of(spec)
    if row.then is not None:
        raise ValueError(f"schemes: {row.name!r} changes its placement along depth; name one of its placements")
    if row.of_power:
        raise ValueError(f"schemes: {row.name!r} takes its skips from a network at initialisation; use 'admin-closed'")
    return row


def rewired(stack: Stack, weights: Given, spec: str | Scheme, gains: str = "kept") -> tuple[Stack, Given]:
    """Put a network's weights into another placement.

    α, β and σ are the row's for this depth; its gains on matrices at initialisation are not applied. A norm ends the network
    where one did: the last output norm becomes a final norm where the placement has none at the output.

    Parameters
    ----------
    gains : {"kept", "unit"}
        ``"unit"``: the γ and b of a norm that is taken away go with it.

    Raises
    ------
    ValueError
        As `checked`, and for a parallel residual.
    """
    checks.one_of("gains", gains, GAINS)
    refuse(stack.block)
    row = checked(spec)
    numbers = replace(stack, scheme=row).multipliers()
    if row.name == stack.scheme.name:
        return replace(stack, scheme=row.shape), replace(weights, numbers=numbers)
    assert weights.norms is not None, "a checkpoint brings its norms"
    unit = replace(_any(weights), gain=jnp.ones((stack.depth, stack.d)), bias=jnp.zeros((stack.depth, stack.d)))
    lost = stack.scheme.norm_out and not row.norm_out
    params, norms = [], []
    for k, (own, p) in enumerate(zip(weights.norms, weights.params, strict=True)):
        slots: list[Any] = [(norm or unit) if slot else None for slot, norm in zip(row.slots, own, strict=True)]
        read = _before(weights, k) if lost and own[0] is None else own[0]
        if gains == "kept" and read is not None and row.norm_in:
            slots[0] = read
        elif gains == "kept" and read is not None:
            p = through(p, read)
        if row.norm_in:
            slots[0] = _times(slots[0], jnp.asarray(numbers.scale)[:, k, None])
        params.append(p)
        norms.append(tuple(slots))
    last = weights.last
    if not stack.final_norm and lost:
        last = _at(weights.norms[-1][2], -1)
    placed = replace(stack, scheme=row.shape, final_norm=stack.final_norm or lost)
    return placed, replace(weights, params=tuple(params), norms=tuple(norms), last=last, numbers=numbers)


def through(params: Params, norm: AnyNorm) -> Params:
    """f(γ ⊙ x + b) as a branch of x: γ and b of every block go into the matrices that read x."""
    found = dict(params)
    for name in READERS:
        if f"w{name}" in params:
            w: Float[Array, "depth n d"] = params[f"w{name}"]
            found[f"w{name}"] = w * norm.gain[:, None]
            if jnp.any(norm.bias):
                found[f"b{name}"] = params.get(f"b{name}", 0.0) + jnp.einsum("lnd,ld->ln", w, norm.bias)
    return found


def _any(weights: Given) -> Any:
    return next(norm for slots in weights.norms or () for norm in slots if norm is not None)


def _before(weights: Given, k: int) -> Any:
    """Of every block, the output norm that the stream has passed before sub-layer ``k``; of the first one none: γ = 1."""
    assert weights.norms is not None
    if k:
        return weights.norms[k - 1][2]
    norm: Any = weights.norms[-1][2]
    first = jnp.ones_like(norm.gain[:1])
    gain, bias = (jnp.concatenate([one, part[:-1]]) for one, part in ((first, norm.gain), (0 * first, norm.bias)))
    return replace(norm, gain=gain, bias=bias)


def _at(norm: Any, l: int) -> Norm:
    return replace(norm, gain=norm.gain[l], bias=norm.bias[l])


def _times(norm: Any, factor: Array) -> Norm:
    return replace(norm, gain=norm.gain * factor, bias=norm.bias * factor)
