"""Flax nnx modules: split once into structure and values, merged anew at every call, so that no call leaves a trace."""

from typing import Any

import jax

from gradflow.adapters.parts import Function, Layers, cast, load, named, norm, over_last_axis, uncallable
from gradflow.norms import LayerNorm, Norm, RMSNorm

load("flax", "flax")
from flax import nnx  # noqa: E402


def adapt(module: Any, kwargs: dict[str, Any]) -> Norm | Layers | Function:
    """See `gradflow.adapters.nnx`."""
    if not callable(module):
        raise uncallable(module, "adapters.nnx", "a flax.nnx.Module")
    if not isinstance(module, nnx.Module):
        return named(lambda x: module(x, **kwargs), module)
    refuse(module)
    if not kwargs:
        for kind, row in ((nnx.LayerNorm, LayerNorm), (nnx.RMSNorm, RMSNorm)):
            if isinstance(module, kind) and over_last_axis(module):
                gain, bias = (_value(module, name) for name in ("scale", "bias"))
                return norm(row, module.num_features, module.epsilon, gain, bias)
        if isinstance(module, nnx.Sequential):
            return Layers.flat(adapt(layer, {}) for layer in module.layers)
    if isinstance(module, nnx.MultiHeadAttention):
        kwargs = {"decode": False} | kwargs
    return named(_function(module, kwargs), module)


def _value(module: Any, name: str) -> jax.Array | None:
    variable = getattr(module, name, None)
    return None if variable is None else variable[...]


def refuse(module: Any) -> None:
    """Raise for a module in training mode."""
    for _, node in nnx.iter_modules(module):
        name = type(node).__name__
        rate = getattr(node, "rate", None) or getattr(node, "dropout_rate", None) or 0
        dropping = rate and not getattr(node, "deterministic", True)
        if dropping or not getattr(node, "use_running_average", True):
            raise ValueError(f"module: {name} is in training mode; call model.eval() first")


def _function(module: Any, kwargs: dict[str, Any]) -> Function:
    structure, values = nnx.split(module)

    def run(x: Any) -> Any:
        # new variables of this trace, which the module may change without an error
        copy = nnx.merge(structure, jax.tree.map(lambda leaf: leaf, cast(values, x.dtype)))
        before = _by_path(copy)
        out = copy(x, **cast(kwargs, x.dtype))
        after = _by_path(copy)
        changed = [path for path in before if after.get(path) is not before[path]]
        if changed:
            raise ValueError(f"changes its own {changed[0]} while it runs; call model.eval() first")
        return out

    return run


def _by_path(module: Any) -> dict[str, Any]:
    """Every value, by where it is: ``layers.0.count``."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.split(module)[1])
    return {jax.tree_util.keystr(path[:-1], simple=True, separator="."): value for path, value in leaves}
