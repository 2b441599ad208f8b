"""Equinox modules: arrays without a batch axis, so what takes one token is mapped over the tokens."""

from collections.abc import Iterator
from typing import Any

import jax

from gradflow.adapters.parts import Function, Layers, cast, load, named, norm, uncallable
from gradflow.norms import LayerNorm, Norm, RMSNorm

eqx = load("equinox", "equinox")


def adapt(module: Any, tokenwise: bool, kwargs: dict[str, Any]) -> Norm | Layers | Function:
    """See `gradflow.adapters.equinox`."""
    if not callable(module):
        raise uncallable(module, "adapters.equinox", "an equinox.Module")
    refuse(module)
    if not kwargs:
        rows = ((eqx.nn.LayerNorm, LayerNorm), (eqx.nn.RMSNorm, RMSNorm))
        for kind, row in rows:
            # over more axes it is another function: it normalises the whole array at once
            if isinstance(module, kind) and len(module.shape) == 1:
                return norm(row, module.shape[0], module.eps, module.weight, module.bias)
        if isinstance(module, eqx.nn.Sequential):
            return Layers.flat(adapt(layer, tokenwise, {}) for layer in module.layers)

    if isinstance(module, eqx.nn.MultiheadAttention):
        if tokenwise:
            raise ValueError("tokenwise: attention mixes tokens; leave tokenwise out")
        return named(_mapped(lambda x: cast(module, x.dtype)(x, x, x, **cast(kwargs, x.dtype)), 2), module)

    def run(x: Any) -> Any:
        return cast(module, x.dtype)(x, **cast(kwargs, x.dtype))

    vector = tokenwise or isinstance(module, eqx.nn.Linear | eqx.nn.MLP)
    return named(_mapped(run, 1) if vector else run, module)


def _mapped(f: Function, axes: int) -> Function:
    """``f`` on the last ``axes`` axes, at every index of those before."""

    def run(x: Any) -> Any:
        if x.ndim < axes:
            raise ValueError(f"needs a state of at least {axes} axes, got shape {x.shape}")
        mapped = f
        for _ in range(x.ndim - axes):
            mapped = jax.vmap(mapped)
        return mapped(x)

    return run


def refuse(module: Any) -> None:
    """Raise for a module that keeps state, or is in training mode."""
    nodes = list(_nodes(module))
    if any(isinstance(node, eqx.nn.StateIndex) for node in nodes):
        raise ValueError(
            "module: keeps state (BatchNorm, SpectralNorm); give the function yourself: "
            "lambda x: eqx.nn.inference_mode(module)(x, state)[0]"
        )
    for node in nodes:
        # the same rule as Dropout's own: only a plain 0 switches it off
        off = isinstance(node, eqx.nn.Dropout) and isinstance(node.p, int | float) and node.p == 0
        if not getattr(node, "inference", True) and not off:
            raise ValueError(f"module: {type(node).__name__} is in training mode; pass eqx.nn.inference_mode(model)")


def _nodes(tree: Any) -> Iterator[Any]:
    """A module and all modules in it."""
    if isinstance(tree, eqx.Module):
        yield tree
    inner = jax.tree.leaves(tree, is_leaf=lambda node: node is not tree and isinstance(node, eqx.Module))
    for node in inner:
        if node is not tree and isinstance(node, eqx.Module):
            yield from _nodes(node)
