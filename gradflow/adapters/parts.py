"""What the adapters share: a list that is also a function, weights in the state's dtype, a norm from γ, b and ε."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from gradflow.norms import Norm, NormRow

Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Layers(Sequence):
    """Layers in order: a list for `gradflow.profile`, and one function where a function is wanted, as in a `Residual`."""

    layers: tuple[Function, ...]
    __name__ = "Sequential"

    @classmethod
    def flat(cls, items: Iterable[Function]) -> "Layers":
        """Layers within layers as one list, so that each has its row."""
        return cls(tuple(layer for item in items for layer in (item if isinstance(item, Layers) else (item,))))

    def __call__(self, x: Any) -> Any:
        """Run them one after another."""
        for layer in self.layers:
            x = layer(x)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]


def load(module: str, extra: str) -> ModuleType:
    """Import a framework.

    Raises
    ------
    ImportError
        One line that says which extra brings it; a framework that is there and broken keeps its own error.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ImportError(
            f"adapters: {extra} is not installed; pip install gradflow[{extra}]", name=error.name
        ) from None


def cast(tree: Any, dtype: Any) -> Any:
    """All real floating arrays of a tree in ``dtype``; keys, integers and functions stay."""

    def leaf(value: Any) -> Any:
        kind = getattr(value, "dtype", None)
        if kind is None or not jnp.issubdtype(kind, jnp.floating) or kind == dtype:
            return value
        return jnp.asarray(value, dtype)

    with jax.ensure_compile_time_eval():  # once, while tracing: not an operation on constants for XLA to fold
        return jax.tree.map(leaf, tree)


def norm(row: NormRow, d: int, eps: Any, gain: Any, bias: Any) -> Norm:
    """Make the layer of a row with what was learned; ``None`` is γ = 1 or b = 0."""
    layer = row.init(d, float(eps))
    gain, bias = (default if p is None else jnp.asarray(p) for p, default in ((gain, layer.gain), (bias, layer.bias)))
    return Norm(gain, bias, layer.row, layer.eps)


def over_last_axis(module: Any) -> bool:
    """Whether a Flax norm is over the last axis, in one place: what `Norm` is."""
    last = (-1, (-1,), [-1])
    return module.reduction_axes in last and module.feature_axes in last and module.axis_name is None


def named(f: Function, module: Any) -> Function:
    """``f`` with the module's name, which labels its row."""
    f.__name__ = getattr(module, "__name__", type(module).__name__)
    return f


def uncallable(module: Any, framework: str, modules: str) -> ValueError:
    """What to raise for something that is not a module and cannot be called."""
    return ValueError(f"module: {framework} adapts {modules} or another callable, got {type(module).__name__}")
