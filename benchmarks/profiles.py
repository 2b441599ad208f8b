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
    keys = jax.random.split(jax.random.key(0), 1)

    def measured(watched: bool, low: bool) -> tuple[Any, tuple]:
        return profiles.measure, (stack, given, keys, x[None], c[None, None], None, None, watched, low, False)

    return {
        "gradient": (plain.gradient(stack), (x, given.params, c)),
        "profile": measured(False, False),
        "weight_grad": measured(True, False),
        "low": measured(False, True),
    }


def compile_seconds(depth: int) -> float:
    """Seconds to lower and compile the profile of a random stack."""
    stack = Stack.make("post-ln", ("attention", "mlp:gelu"), depth, 64)
    keys, x = jax.random.split(jax.random.key(0), 1), jnp.ones((1, 4, 64))
    start = time.perf_counter()
    profiles.measure.lower(stack, None, keys, x, x[None], None, None, False, False, False).compile()
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
