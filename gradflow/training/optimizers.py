"""Optimizers as one row each: what optax does to a gradient before the learning rate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from gradflow import checks
from gradflow.training.library import optax


@dataclass(frozen=True)
class Optimizer:
    """A row's name and constants; hashable, so that runs share a compilation.

    Attributes
    ----------
    name : str
        In `OPTIMIZERS`.
    b1, b2, eps : float
        Adam's β₁, β₂ and ε; SGD's momentum is ``b1``.
    weight_decay : float
        AdamW's, on matrices alone.
    """

    name: str = "adam"
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        checks.one_of("optimizer", self.name, OPTIMIZERS)
        for name in ("b1", "b2"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(f"{name}: needs a number from 0 to below 1, got {value!r}")

    @property
    def transformation(self) -> Any:
        """The optax transformation; its result times −rate is the step."""
        return OPTIMIZERS[self.name](self)


def matrices(tree: Any) -> Any:
    """True at the branches' matrices, by their names."""
    return jax.tree_util.tree_map_with_path(lambda path, _: getattr(path[-1], "key", "").startswith("w"), tree)


OPTIMIZERS: dict[str, Callable[[Optimizer], Any]] = {
    # Kingma, Ba 2014 (1412.6980)
    "adam": lambda o: optax().scale_by_adam(o.b1, o.b2, o.eps),
    # Loshchilov, Hutter 2017 (1711.05101)
    "adamw": lambda o: optax().chain(
        optax().scale_by_adam(o.b1, o.b2, o.eps), optax().add_decayed_weights(o.weight_decay, matrices)
    ),
    # Liu et al. 2019 (1908.03265)
    "radam": lambda o: optax().scale_by_radam(o.b1, o.b2, o.eps),
    "sgd": lambda o: optax().trace(o.b1),
}
