"""From recorded tensors to a profile's rows, by gradflow's own norm Jacobians and factors, in float64."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import precision
from gradflow.flow import (
    ON_BRANCH,
    Rows,
    bare_row,
    forward_figures,
    norm_row,
    normalised,
    ratio,
    sublayer_row,
    through,
    token_cosine,
)
from gradflow.norms import Norm
from gradflow.scaling import frobenius

States = Float[Array, "batch tokens d"]


class Passed(NamedTuple):
    """A norm as gradflow knows it, what entered it, and the gradients that left and entered it on the way back."""

    norm: Norm
    entered: Any
    gradient: Any  # at its input; None where it is not needed
    arriving: Any  # at its output


class Values(NamedTuple):
    """A sub-layer's recorded arrays, (batch, tokens, d), and its norms in the slots in, branch, out."""

    x: Any
    u: Any
    alpha: Any
    beta: Any
    at_x: Any
    at_out: Any
    norms: tuple[Passed | None, Passed | None, Passed | None]


def recognised(
    gain: np.ndarray | None,
    bias: np.ndarray | None,
    eps: float,
    entered: np.ndarray,
    left: np.ndarray,
    tolerance: float,
) -> tuple[Norm, float]:
    """The row of the catalogue, with gain γ or 1 + γ, that gives what the module gave, and its error over the norm.

    The first within ``tolerance``, or else the nearest.
    """
    d = entered.shape[-1]
    gain = np.ones(d) if gain is None else gain
    bias = np.zeros(d) if bias is None else bias
    tried = []
    with precision.scope("float64"):
        for row in ("layernorm", "rms", "rms-outside"):
            for g in (gain, 1 + gain):
                norm = Norm(jnp.asarray(g), jnp.asarray(bias), row, eps)
                off = np.linalg.norm(np.asarray(norm(jnp.asarray(entered))) - left) / max(np.linalg.norm(left), 1e-300)
                tried.append((float(off), norm))
                if off <= tolerance:
                    return norm, float(off)
    off, norm = min(tried, key=lambda pair: pair[0])
    return norm, off


def _relative(difference: Array, size: Array) -> Array:
    return ratio(frobenius(difference), size)


@jax.jit
def _sublayer(values: Values, w: States, real: Any) -> tuple[States, Rows]:
    """Rows of every state, and the trunk vector before the sub-layer.

    ``parity``: the analytic gradient against the recorded one, behind N_out and behind N_in, where one of them stands.
    """

    def one(values: Values, w: Array, real: Any) -> tuple[Array, Rows]:
        norm_in, norm_branch, norm_out = values.norms
        size = frobenius(values.at_out)
        g, at_x = ratio(values.at_out, size)[None], ratio(values.at_x, size)
        jacobian = None if norm_out is None else norm_out.norm.jacobian(values.u)
        exact, trunk, row = norm_row(jacobian, g, w[None], real)
        at = None if norm_branch is None else norm_branch.norm.jacobian(norm_branch.entered)
        after = through(at, (values.beta * exact)[None])
        returned, off = at_x - values.alpha * exact[0], []
        if norm_out is not None:
            off.append(_relative(exact[0] - ratio(norm_out.gradient, size), frobenius(exact)))
        if norm_in is not None:
            before = through(norm_in.norm.jacobian(values.x), ratio(norm_in.arriving, size)[None, None])
            off.append(_relative(before.out[0, 0] - returned, frobenius(at_x)))
            slot, share = before, before.left[0]
        else:
            slot, share = through(None, returned[None, None]), frobenius(returned)
        row = sublayer_row(row, values.alpha, frobenius(at_x), share)
        for name in ON_BRANCH:
            row |= {f"branch_in_{name}": getattr(slot, name)[0], f"branch_out_{name}": getattr(after, name)[0]}
        row |= forward_figures(values.x, values.u, values.u - values.alpha * values.x, real)
        row["parity"] = functools.reduce(jnp.maximum, off, jnp.zeros(()))
        return normalised(values.alpha * trunk)[0], row

    axes = Values(0, 0, None, None, 0, 0, tuple(n and Passed(None, 0, 0, 0) for n in values.norms))  # type: ignore[arg-type]
    return jax.vmap(one, (axes, 0, None if real is None else 0))(values, w, real)


@jax.jit
def _final(passed: Passed, w: States, real: Any) -> tuple[States, Rows]:
    def one(passed: Passed, w: Array, real: Any) -> tuple[Array, Rows]:
        g, size = passed.arriving, frobenius(passed.arriving)
        exact, trunk, row = norm_row(passed.norm.jacobian(passed.entered), ratio(g, size)[None], w[None], real)
        off = _relative(exact[0] - ratio(passed.gradient, size), frobenius(exact))
        return normalised(trunk)[0], bare_row(row, passed.entered, real) | {"parity": off}

    return jax.vmap(one, (Passed(None, 0, 0, 0), 0, None if real is None else 0))(passed, w, real)  # type: ignore[arg-type]


def rows(values: list[Values], last: Passed | None, real: np.ndarray | None) -> dict[str, np.ndarray]:
    """Rows (batch, S), or (batch, S + 1) with a final norm, from input to output; ``parity`` among them."""
    with precision.scope("float64"):
        w = jnp.asarray(values[-1].at_out if last is None else last.arriving)
        w = jax.vmap(normalised)(w)
        found: list[Rows] = []
        if last is not None:
            w, row = _final(last, w, real)
            found.append(row)
        for each in reversed(values):
            w, row = _sublayer(each, w, real)
            found.insert(0, row)
        out = {name: np.stack([np.asarray(row[name]) for row in found], 1) for name in found[0]}
        end = jax.vmap(token_cosine, (0, None if real is None else 0))(jnp.asarray(values[0].at_x), real)  # type: ignore[arg-type]
        return out | {"input_gradient_cosine": np.asarray(end)}
