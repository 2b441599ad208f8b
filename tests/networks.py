"""The table of small networks that stack and flow are tested on, run once by gradflow and once by the oracle."""

import functools
import types

import jax
import jax.numpy as jnp
import oracle

from gradflow.branches import BRANCHES
from gradflow.flow import flow
from gradflow.norms import NORMS
from gradflow.schemes import SCHEMES, S, Scheme, l
from gradflow.stack import Drawn, Stack

WIDTH = 5

# rows of a user's own: every slot filled, multipliers that vary with depth, a pure branch
SANDWICH = Scheme("sandwich", "test", "norms on both sides of the branch", norm_in=True, norm_branch=True)
EVERYWHERE = Scheme(
    "everywhere", "test", "all slots, α and β along depth", True, True, True, alpha=S ** (l / S), beta=1 / (l + 1)
)
PURE = Scheme("pure-branch", "test", "no skip: α = 0", norm_out=True, alpha=0 * l)
BARE = Scheme("bare", "test", "no norm at all", beta=-1 / S)
OWN = (SANDWICH, EVERYWHERE, PURE, BARE)


def name(value):
    """Readable test ids."""
    if isinstance(value, tuple):
        return "+".join(value)
    return getattr(value, "name", None)


def _table():
    """norm × branch × scheme, one setting of the rest each; blocks of two branches with every setting."""
    for n, row in enumerate(NORMS):
        for k, scheme in enumerate(SCHEMES):
            for b, branch in enumerate(BRANCHES):
                other = (n + k + b) % 2
                yield row.name, scheme, (branch,), bool(other), 3 if other else 1
            for final, tokens in ((True, 1), (False, 3)):
                yield row.name, scheme, ("mlp:gelu", "linear"), final, tokens
    for scheme in OWN:
        for norm in ("layernorm", "rms"):
            yield norm, scheme, ("mlp:tanh", "linear"), False, 3


TABLE = tuple(_table())


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


def eye(tokens, d, dtype=None):
    return jnp.broadcast_to(jnp.eye(d, dtype=dtype or jnp.float64), (tokens, d, d))


@functools.cache
def run(norm, scheme, block, final, tokens, probes=2, depth=2, eps=1e-3):
    """One network of the table by both roads; x64 must be on."""
    stack = Stack.make(scheme, block, depth, WIDTH, norm=norm, eps=eps, final_norm=final)
    weights, x = Drawn(jax.random.key(7)), normal(1, tokens, WIDTH)
    cotangents = normal(2, probes, tokens, WIDTH)
    trace = stack.trace(weights, x, eye(tokens, WIDTH))
    network = oracle.Network(stack, weights)
    return types.SimpleNamespace(
        stack=stack,
        weights=weights,
        x=x,
        cotangents=cotangents,
        trace=trace,
        product=trace.basis * 2.0 ** trace.exponent.astype(trace.basis.dtype),
        flow=flow(stack, weights, trace, cotangents),
        oracle=network,
        true_trace=network.trace(x),
    )
