"""Learning rates as one row each: optax schedules behind a linear warm-up."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from gradflow import checks, precision
from gradflow.training.library import optax

ORIGINAL = 4000  # warm-up steps of Vaswani et al. 2017 (1706.03762)


def _inverse_root(peak: float, warmup: int, steps: int) -> Callable[[Any], Any]:
    """peak · √(w/t) from step w on; w is the warm-up, or the original's where there is none."""
    at = warmup or ORIGINAL
    return lambda step: peak * (at / (step + at)) ** 0.5


# what follows the warm-up, by steps since its end
SCHEDULES: dict[str, Callable[[float, int, int], Callable[[Any], Any]]] = {
    "constant": lambda peak, warmup, steps: optax().constant_schedule(peak),
    "inverse-sqrt": _inverse_root,
    "cosine": lambda peak, warmup, steps: optax().cosine_decay_schedule(peak, max(steps - warmup, 1)),
}


def rates(schedule: str, peak: float, warmup: int, steps: int) -> np.ndarray:
    """The learning rate of every step, (steps,) of float32: linear to ``peak`` at step ``warmup``, then the schedule's.

    The t-th step, from 0, has peak·(t + 1)/warmup while t < warmup: the first step is small, not zero.
    """
    checks.one_of("schedule", schedule, SCHEDULES)
    with precision.scope("float64"):  # optax takes the difference from the peak, of which float32 leaves few digits
        after = SCHEDULES[schedule](peak, warmup, steps)
        rise = optax().linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
        whole = optax().join_schedules([rise, after], [warmup])
        return np.asarray(jnp.broadcast_to(whole(jnp.arange(steps)), (steps,)), np.float32)
