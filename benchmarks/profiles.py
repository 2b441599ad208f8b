"""A profile against one ``value_and_grad`` with respect to the input of the same stack, written as a user would write it well."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gradflow import profiles
from gradflow.stack import Given, Stack

D, T, DEPTH, HEADS = 256, 64, 24, 8
Row = tuple[str, float, str]
Timer = Callable[[dict[str, Callable[[], object]], int], dict[str, float]]


def times(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """``x Wᵀ`` without a transposed copy of W among the residuals."""
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))


def layer_norm(x: jax.Array) -> jax.Array:
    y = x - x.mean(-1, keepdims=True)
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)


def plain(params: Any, x: jax.Array) -> jax.Array:
    """The post-LN stack: attention and MLP, one scan over blocks."""

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        attention, mlp = layer
        heads = [times(attention[n], x).reshape(len(x), HEADS, -1).swapaxes(0, 1) for n in ("w_q", "w_k", "w_v")]
        q, k, v = heads
        weights = jax.nn.softmax(jnp.einsum("hik,hjk->hij", q, k) / math.sqrt(q.shape[-1]))
        mixed = jnp.einsum("hij,hjk->ihk", weights, v).reshape(x.shape)
        x = layer_norm(x + times(attention["w_o"], mixed))
        hidden = jax.nn.gelu(times(mlp["w_in"], x), approximate=False)
        return layer_norm(x + times(mlp["w_out"], hidden)), None

    return jax.lax.scan(block, x, params)[0]


def stack_of(depth: int, dtype: str) -> tuple[Stack, Given, jax.Array, jax.Array]:
    """A stack with given weights, its input and a cotangent."""
    stack = Stack.make("post-ln", ("attention", "mlp:gelu"), depth, D, dtype=dtype)
    k_weights, k_x, k_c = jax.random.split(jax.random.key(0), 3)
    keys = [jax.random.split(k, depth) for k in jax.random.split(k_weights)]
    params = tuple(
        jax.vmap(functools.partial(b.init, d=D, dtype=dtype))(k) for b, k in zip(stack.block, keys, strict=True)
    )
    x, c = (jax.random.normal(k, (T, D), dtype) for k in (k_x, k_c))
    return stack, Given(params), x, c


def programs(depth: int, dtype: str) -> dict[str, tuple[Any, tuple]]:
    """Jitted functions and their arguments."""
    stack, given, x, c = stack_of(depth, dtype)
    gradient = jax.jit(jax.value_and_grad(lambda x, params, c: jnp.sum(plain(params, x) * c)))
    keys = jax.random.split(jax.random.key(0), 1)

    def measured(watched: bool, low: bool) -> tuple[Any, tuple]:
        return profiles.measure, (stack, given, keys, x[None], c[None, None], None, None, watched, low, False)

    return {
        "gradient": (gradient, (x, given.params, c)),
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
