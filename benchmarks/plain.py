"""Networks as a user would write them well in JAX: attention, MLP, LayerNorm and their placement, one scan over blocks."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gradflow.stack import Given, Stack

HEADS, EPS = 8, 1e-5


def times(matrix: jax.Array, x: jax.Array) -> jax.Array:
    """``x Wᵀ`` without a transposed copy of W among the residuals."""
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())))


def layer_norm(x: jax.Array) -> jax.Array:
    y = x - x.mean(-1, keepdims=True)
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + EPS)


def attention(p: Any, x: jax.Array) -> jax.Array:
    q, k, v = (times(p[n], x).reshape(len(x), HEADS, -1).swapaxes(0, 1) for n in ("w_q", "w_k", "w_v"))
    weights = jax.nn.softmax(jnp.einsum("hik,hjk->hij", q, k) / math.sqrt(q.shape[-1]))
    return times(p["w_o"], jnp.einsum("hij,hjk->ihk", weights, v).reshape(x.shape))


def mlp(p: Any, x: jax.Array) -> jax.Array:
    return times(p["w_out"], jax.nn.gelu(times(p["w_in"], x), approximate=False))


BRANCHES = {"attention": attention, "mlp:gelu": mlp}
PLACED: dict[str, Callable[..., jax.Array]] = {
    "post-ln": lambda f, x: layer_norm(x + f(x)),
    "pre-ln": lambda f, x: x + f(layer_norm(x)),
}


def block(stack: Stack, params: Any, x: jax.Array) -> jax.Array:
    """One block of the stack."""
    for branch, p in zip(stack.block, params, strict=True):
        x = PLACED[stack.scheme.name](functools.partial(BRANCHES[branch.name], p), x)
    return x


def run(stack: Stack, params: Any, x: jax.Array) -> jax.Array:
    """The whole stack."""
    return jax.lax.scan(lambda x, p: (block(stack, p, x), None), x, params)[0]


def gradient(stack: Stack) -> Callable[..., Any]:
    """(x, params, cotangent) ↦ one ``value_and_grad`` with respect to the input."""
    return jax.jit(jax.value_and_grad(lambda x, params, c: jnp.sum(run(stack, params, x) * c)))


def drawn(stack: Stack, tokens: int) -> tuple[Given, jax.Array, jax.Array]:
    """Weights of a stack, its input and a cotangent."""
    k_weights, k_x, k_c = jax.random.split(jax.random.key(0), 3)
    keys = [jax.random.split(k, stack.depth) for k in jax.random.split(k_weights, len(stack.block))]
    params = tuple(
        jax.vmap(functools.partial(b.init, d=stack.d, dtype=stack.dtype))(k)
        for b, k in zip(stack.block, keys, strict=True)
    )
    x, c = (jax.random.normal(k, (tokens, stack.d), stack.dtype) for k in (k_x, k_c))
    return Given(params), x, c
