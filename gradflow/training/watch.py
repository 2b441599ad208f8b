"""The lens: what one training step looks like at every sub-layer.

The factors come from the engine (`gradflow.probes`: one backward pass of the step's own loss over the step's own batch); weight
gradients and updates from the step itself; what the step did to the function from a second forward pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow import probes
from gradflow.branches.matrices import State, linear
from gradflow.flow import Rows, ratio, rms
from gradflow.scaling import frobenius
from gradflow.stack import Stack
from gradflow.training.model import Learned, Model, resized

MOVED = 4  # sequences that the step's effect is looked at on


def figures(stack: Stack, model: Model, after: Model, grad: Model, direction: Model, batch: Array, rate: Array) -> Rows:
    """All figures of a step from ``model`` to ``after``, (S,) each or (S + 1,) with a final norm."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    sent = jax.grad(lambda out: model.loss(out, targets))
    _, _, rows = probes.profile(stack, model.weights, model.embed(inputs), sent)
    old, gradient, new = (_matrices(each.weights) for each in (model, grad, after))
    moved = jax.tree.map(jnp.subtract, new, old)
    sizes = {"weight_grad": gradient, "weight_norm": old, "update_norm": moved}
    own = {name: _by_sublayer(stack, tree) for name, tree in sizes.items()}
    own["update_rms"] = ratio(_by_sublayer(stack, _matrices(direction.weights)), jnp.sqrt(_count(stack, old)))
    own["update_ratio"] = ratio(own["update_norm"], own["weight_norm"])
    own |= _effect(stack, model, after, inputs[:MOVED], rate)
    return rows | {name: _padded(stack, values) for name, values in own.items()}


def _matrices(weights: Learned) -> list[dict[str, Array]]:
    """Each branch's matrices, (depth, n, k)."""
    return [{name: leaf for name, leaf in p.items() if name.startswith("w")} for p in weights.params]


def _by_sublayer(stack: Stack, tree: list[dict[str, Array]]) -> Float[Array, " S"]:
    """Frobenius norm over all matrices of each sub-layer."""
    return jnp.stack(
        [frobenius(jnp.stack([frobenius(leaf, 1) for leaf in p.values()], 1), 1) for p in tree], 1
    ).reshape(-1)


def _count(stack: Stack, tree: list[dict[str, Array]]) -> Float[Array, " S"]:
    """Entries of each sub-layer's matrices."""
    each = jnp.asarray([sum(leaf[0].size for leaf in p.values()) for p in tree], stack.dtype)
    return jnp.tile(each, stack.depth)


def _padded(stack: Stack, values: Array) -> Array:
    """NaN in the final norm's row, which has no matrix."""
    return jnp.append(values, jnp.nan) if stack.final_norm and values.size == stack.sublayers else values


def fed(stack: Stack, model: Model, x: Float[Array, "S tokens d"], k: int) -> Float[Array, "depth tokens d"]:
    """What the branch of each block's k-th sub-layer sees."""
    states = x[k :: len(stack.block)]

    def one(part: Stack, carry: None, inputs: tuple) -> tuple[None, State]:
        piece, state = inputs
        norm = model.weights.layer(part, piece).norms[k][0]
        return None, state if norm is None else norm(state)

    return stack.over_depth(one, None, (model.weights.along_depth(stack), states))[1]


def first_matrices(branch: Any) -> list[str]:
    """Names of the matrices that the branch's input meets, as `gradflow.branches.matrices.linear` takes them."""
    names = [name for name in getattr(branch, "matrices", ()) if f"w{name}" not in branch.outer]
    return names or [name.removeprefix("w") for name in branch.outer]


def _effect(stack: Stack, model: Model, after: Model, inputs: Array, rate: Array) -> Rows:
    """What the step does to activations: to the stream, and to the pre-activations of each branch beside η‖h‖₁.

    A step of Adam moves no weight by more than about η at first, hence a pre-activation w·h by at most η‖h‖₁; signs that differ
    from token to token leave far less.
    """
    stack = resized(stack, len(inputs))
    old, new = (each.stream(stack, inputs, True) for each in (model, after))
    xs, others = old.x, new.x
    assert xs is not None
    assert others is not None
    before, behind = (jnp.concatenate([x[1:], out[None]]) for x, out in ((xs, old.out), (others, new.out)))
    bound, move, size = [], [], []
    moved = jax.tree.map(jnp.subtract, after.weights.params, model.weights.params)
    for k, branch in enumerate(stack.block):
        h = fed(stack, model, xs, k)
        names = first_matrices(branch)
        bound.append(rate * jnp.mean(jnp.sum(jnp.abs(h), -1), -1))
        for found, params in ((move, moved[k]), (size, model.weights.params[k])):
            each = [jax.vmap(functools.partial(linear, name=name))(params, x=h) for name in names]
            found.append(jax.vmap(rms)(jnp.concatenate(each, -1)))
    rows = {"preactivation_bound": bound, "preactivation_move": move, "preactivation_rms": size}
    found = {name: jnp.stack(values, 1).reshape(-1) for name, values in rows.items()}
    return found | {"stream_move": ratio(frobenius(behind - before, 1), frobenius(before, 1))}
