"""Who carries the load: how a network's routers spread tokens over experts, how many are dropped, how even the outputs are."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradflow import checks, precision
from gradflow.branches.experts import Experts
from gradflow.factors import plain
from gradflow.profiles import labels
from gradflow.stack import Drawn, Stack, Weights


@dataclass(frozen=True, repr=False)
class Load:
    """One row for each sub-layer that is a mixture.

    Attributes
    ----------
    labels : tuple of str
        The sub-layers' names.
    shares : tuple of (E,) arrays
        Each expert's part of all that is asked for: they add up to 1, and 1/E is even. Dropped requests count.
    dropped : (rows,)
        Part of the requests that found no place.
    output, added : (rows,)
        Coefficient of variation over tokens of ‖f_i‖², and of ‖β N_branch(f)_i‖², as it is added.
    settings : dict
    """

    labels: tuple[str, ...]
    shares: tuple[np.ndarray, ...]
    dropped: np.ndarray
    output: np.ndarray
    added: np.ndarray
    settings: dict[str, Any]

    @property
    def variation(self) -> np.ndarray:
        """Coefficient of variation of the shares, (rows,)."""
        return np.array([np.std(row) / np.mean(row) for row in self.shares])

    @property
    def peak(self) -> np.ndarray:
        """The busiest expert's share over the mean, (rows,): from 1 to E."""
        return np.array([np.max(row) / np.mean(row) for row in self.shares])

    def to_dict(self) -> dict[str, Any]:
        """Every figure as plain numbers."""
        names = ("labels", "shares", "variation", "peak", "dropped", "output", "added")
        found = {name: plain(getattr(self, name)) for name in names if name != "shares"}
        return found | {
            "shares": [plain(row) for row in self.shares],
            "settings": {k: plain(v) for k, v in self.settings.items()},
        }

    def __str__(self) -> str:
        head = "{:<24} {:>8} {:>8} {:>8} {:>10} {:>10}"
        lines = [head.format("sub-layer", "load cv", "max/mean", "dropped", "cv |f|²", "cv added²")]
        columns = (self.variation, self.peak, self.dropped, self.output, self.added)
        for label, *row in zip(self.labels, *columns, strict=True):
            lines.append(head.format(label, *(f"{value:.3f}" for value in row)))
        return "\n".join(lines)

    __repr__ = __str__


def load(stack: Stack, x: Any, *, weights: Weights | None = None, key: int = 0) -> Load:
    """Run a network forward and count.

    Parameters
    ----------
    stack : Stack
        With a mixture of experts in its block.
    x : (tokens, d)
        The stream as it enters.
    weights : Weights, optional
        Random ones of ``key`` where left out.

    Returns
    -------
    Load

    Raises
    ------
    ValueError
        For a stack without a mixture, or a state that does not fit.
    """
    checks.key(key)
    where = [k for k, branch in enumerate(stack.block) if isinstance(branch, Experts)]
    if not where:
        raise ValueError("stack: has no mixture of experts in its block, as in moe:8x2:glu:silu")
    state = checks.real_array("x:", x)
    if state.ndim != 2 or state.shape[1] != stack.d or not state.size:
        raise ValueError(f"x: needs shape (tokens, {stack.d}), got {state.shape}")
    with precision.scope(stack.dtype):
        found = _counted(stack, weights or Drawn(jax.random.key(key)), jnp.asarray(state, stack.dtype))
    rows = [(layer, k) for layer in range(stack.depth) for k in where]
    names = labels(stack)
    at = [{name: np.asarray(leaf)[layer] for name, leaf in found[k].items()} for layer, k in rows]
    return Load(
        labels=tuple(names[layer * len(stack.block) + k] for layer, k in rows),
        shares=tuple(row["share"] for row in at),
        settings=stack.settings() | {"tokens": len(state), "key": key},
        **{name: np.array([row[name] for row in at]) for name in ("dropped", "output", "added")},
    )


def variation(state: Array) -> Array:
    """Coefficient of variation over tokens of ‖·‖²."""
    powers = jnp.sum(state**2, -1)
    return jnp.std(powers) / jnp.mean(powers)


@functools.partial(jax.jit, static_argnums=0)
def _counted(stack: Stack, weights: Weights, x: Array) -> list[dict[str, Array]]:
    """Figures of a block's branches, each with a leading axis of depth."""

    def block(part: Stack, x: Array, inputs: tuple) -> tuple[Array, list[dict[str, Array]]]:
        piece, alphas, betas = inputs
        layer, rows = weights.layer(part, piece), []
        for k, branch in enumerate(stack.block):
            step, params = stack.sublayer(layer, k, alphas[k], betas[k], x), layer.params[k]
            rows.append({})
            if isinstance(branch, Experts):
                asked, served = branch.choice(params, step.fed)
                each, requests = jnp.sum(asked, 0), jnp.sum(asked)
                rows[-1] = {
                    "share": each / requests,
                    "dropped": 1 - jnp.sum(served) / requests,
                    "output": variation(branch.apply(params, step.fed)),
                    "added": variation(step.added),
                }
            x = step.out
        return x, rows

    return stack.over_depth(block, x, (weights.along_depth(stack), *weights.multipliers(stack)[:2]))[1]
