"""The same small transformer in Equinox, Flax linen and Flax nnx: whole, as its authors would call it, and as adapted parts.

Weights are float32 and drawn by NumPy into the shapes that the framework declares: its initialisers would cost a compilation
each. Dropout is there, and switched off.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from gradflow import Residual, adapters

D, HEADS, BLOCKS, TOKENS = 16, 2, 3, 6
FRAMEWORKS = ("equinox", "linen", "nnx")


class Network(NamedTuple):
    """``whole`` is the framework's own forward pass, ``last`` its last norm and what enters it, ``chain`` the adapted list."""

    whole: Any
    last: Any
    chain: list


def drawn(shapes, seed=0):
    """Matrices of variance 1/d; gains and biases around 1, so that they count."""
    rng = np.random.default_rng(seed)

    def leaf(shape):
        if not isinstance(shape, jax.ShapeDtypeStruct):
            return shape
        if not jnp.issubdtype(shape.dtype, jnp.floating):  # a key or a counter of dropout's
            return jax.random.key(0) if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key) else np.zeros((), shape.dtype)
        normal = rng.standard_normal(shape.shape)
        return jnp.asarray(normal / D**0.5 if normal.ndim > 1 else 1 + 0.3 * normal, "float32")

    return jax.tree.map(leaf, shapes)


def chain(adapt, blocks, final, post):
    """Adapt the parts of every block, and the final norm of a pre-norm model."""
    slot = "norm_out" if post else "norm_in"
    items = [
        Residual(adapt(branch), **{slot: adapt(norm)})
        for block in blocks
        for branch, norm in ((block.attn, block.norm1), (block.mlp, block.norm2))
    ]
    return items if post else [*items, adapt(final)]


class EquinoxBlock(eqx.Module):
    norm1: Any
    norm2: Any
    attn: eqx.nn.MultiheadAttention
    mlp: eqx.nn.Sequential
    post: bool = eqx.field(static=True)

    def __init__(self, key, post):
        self.norm1, self.norm2 = ((eqx.nn.LayerNorm if post else eqx.nn.RMSNorm)(D, eps=eps) for eps in (1e-5, 1e-3))
        self.attn = eqx.nn.MultiheadAttention(HEADS, D, dropout_p=0.1, inference=True, key=key)
        ends = (eqx.nn.Linear(D, 4 * D, key=key), eqx.nn.Linear(4 * D, D, key=key))
        self.mlp = eqx.nn.Sequential([ends[0], eqx.nn.Lambda(jax.nn.gelu), ends[1]])
        self.post = post

    def __call__(self, x):
        if self.post:
            x = jax.vmap(self.norm1)(x + self.attn(x, x, x))
            return jax.vmap(self.norm2)(x + jax.vmap(self.mlp)(x))
        y = jax.vmap(self.norm1)(x)
        x = x + self.attn(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm2)(x))


def equinox_block(seed=0, post=True):
    """One block by itself."""
    return drawn(eqx.filter_eval_shape(EquinoxBlock, jax.random.key(0), post), seed)


def equinox_network(post):
    *blocks, extra = (equinox_block(seed, post) for seed in range(BLOCKS + 1))
    final = extra.norm1

    def whole(x):
        for block in blocks:
            x = block(x)
        return x if post else jax.vmap(final)(x)

    def last(x):
        for block in blocks[: BLOCKS - post]:
            x = block(x)
        if not post:
            return final, x
        x = jax.vmap(blocks[-1].norm1)(x + blocks[-1].attn(x, x, x))
        return blocks[-1].norm2, x + jax.vmap(blocks[-1].mlp)(x)

    return Network(whole, last, chain(adapters.equinox, blocks, final, post))


def flax_forward(block, x):
    """One block as both Flaxes write it: their layers take any leading axes."""
    if block.post:
        x = block.norm1(x + block.attn(x))
        return block.norm2(x + block.mlp(x))
    x = x + block.attn(block.norm1(x))
    return x + block.mlp(block.norm2(x))


def flax_last(model, x):
    """The model's last norm, and what enters it."""
    for block in model.blocks[: BLOCKS - model.post]:
        x = flax_forward(block, x)
    if not model.post:
        return model.final, x
    block = model.blocks[-1]
    x = block.norm1(x + block.attn(x))
    return block.norm2, x + block.mlp(x)


class LinenBlock(nn.Module):
    post: bool

    def setup(self):
        self.norm1, self.norm2 = ((nn.LayerNorm if self.post else nn.RMSNorm)(epsilon=eps) for eps in (1e-6, 1e-3))
        self.attn = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=True)
        self.mlp = nn.Sequential([nn.Dense(4 * D), nn.gelu, nn.Dense(D)])

    def __call__(self, x):
        return flax_forward(self, x)


class LinenModel(nn.Module):
    post: bool

    def setup(self):
        self.blocks = [LinenBlock(self.post) for _ in range(BLOCKS)]
        self.final = nn.RMSNorm()

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.post else self.final(x)


def linen_network(post):
    model = LinenModel(post)
    variables = drawn(jax.eval_shape(model.init, jax.random.key(0), jnp.ones((TOKENS, D))))
    bound = model.bind(variables)

    def last(x):
        norm, u = flax_last(bound, x)
        module, own = norm.unbind()
        return (lambda token: module.apply(own, token)), u

    parts = chain(adapters.linen, bound.blocks, bound.final, post)
    return Network(lambda x: model.apply(variables, x), last, parts)


class NNXBlock(nnx.Module):
    def __init__(self, post, rngs):
        kind = nnx.LayerNorm if post else nnx.RMSNorm
        self.norm1, self.norm2 = (kind(D, epsilon=eps, rngs=rngs) for eps in (1e-6, 1e-3))
        self.attn = nnx.MultiHeadAttention(HEADS, D, dropout_rate=0.1, deterministic=True, decode=False, rngs=rngs)
        ends = (nnx.Linear(D, 4 * D, rngs=rngs), nnx.Linear(4 * D, D, rngs=rngs))
        self.mlp = nnx.Sequential(ends[0], nnx.gelu, ends[1])
        self.post = post

    def __call__(self, x):
        return flax_forward(self, x)


class NNXModel(nnx.Module):
    def __init__(self, post):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([NNXBlock(post, rngs) for _ in range(BLOCKS)])
        self.final = nnx.RMSNorm(D, rngs=rngs)
        self.post = post

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.post else self.final(x)


def nnx_module(build):
    """What ``build`` returns, with drawn weights."""
    structure, shapes = nnx.split(nnx.eval_shape(build))
    return nnx.merge(structure, drawn(shapes))


def nnx_network(post):
    model = nnx_module(lambda: NNXModel(post))
    return Network(model, functools.partial(flax_last, model), chain(adapters.nnx, model.blocks, model.final, post))


@functools.cache
def network(framework, post):
    """One framework's transformer, with float32 weights."""
    with jax.enable_x64(False):
        return {"equinox": equinox_network, "linen": linen_network, "nnx": nnx_network}[framework](post)
