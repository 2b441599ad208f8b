"""A profile against one ``value_and_grad`` with respect to the input of the same stack as a user would write it (`plain`)."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import plain

from gradflow import profiles
from gradflow.stack import Stack

D, T, DEPTH = 256, 64, 24
Row = tuple[str, float, str]
Timer = Callable[[dict[str, Callable[[], object]], int], dict[str, float]]


def programs(depth: int, dtype: str) -> dict[str, tuple[Any, tuple]]:
    """Jitted functions and their arguments."""
    stack = Stack.make("post-ln", ("attention", "mlp:gelu"), depth, D, dtype=dtype)
    given, x, c = plain.drawn(stack, T)
    return {
        "gradient": (plain.gradient(stack), (x, given.params, c)),
        "profile": measured(stack, given, x, c),
        "weight_grad": measured(stack, given, x, c, watched=True),
        "low": measured(stack, given, x, c, low=True),
    }


def measured(
    stack: Stack, weights: Any, x: jax.Array, c: jax.Array, watched: bool = False, low: bool = False
) -> tuple[Any, tuple]:
    """What `gradflow.profile` runs for one network, and its arguments: no mask, no loss."""
    keys = jax.random.split(jax.random.key(0), 1)
    return profiles.measure, (stack, weights, keys, x[None], c[None, None], *[None] * 3, watched, low, False)


def compile_seconds(depth: int) -> float:
    """Seconds to lower and compile the profile of a random stack."""
    stack = Stack.make("post-ln", ("attention", "mlp:gelu"), depth, 64)
    program, arguments = measured(stack, None, jnp.ones((4, 64)), jnp.ones((4, 64)))
    start = time.perf_counter()
    program.lower(*arguments).compile()
    return time.perf_counter() - start


def used(program: Any, arguments: tuple) -> int:
    """Bytes of a compiled program's own buffers, results included."""
    analysis = program.lower(*arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def rows(interleaved: Timer, rounds: int, dtype: str = "float64") -> list[Row]:
    """Time and memory of the profile's three modes, each over one gradient."""
    jobs = programs(DEPTH, dtype)
    seconds = interleaved({name: functools.partial(f, *a) for name, (f, a) in jobs.items()}, rounds)
    size = {name: used(*job) for name, job in jobs.items()}
    wanted = {"profile": ("≤ 1.10", "≤ 1.05 (stretch 1.03)"), "weight_grad": ("≤ 1.35", ""), "low": ("≤ 1.45", "≤ 0.4")}
    names = {"profile": "profile", "weight_grad": "profile with weight_grad", "low": "profile, memory='low'"}
    found: list[Row] = []
    for key, name in names.items():
        found.append((f"{name} / one gradient, {dtype}", seconds[key] / seconds["gradient"], wanted[key][0]))
        found.append((f"memory of the {name} / of one gradient", size[key] / size["gradient"], wanted[key][1]))
    return found
