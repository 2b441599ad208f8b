"""The table of small networks that stack and flow are tested on, run once by gradflow and once by the oracle."""

import functools

import jax
import jax.numpy as jnp
import oracle
import sympy

from gradflow.branches import BRANCHES
from gradflow.flow import flow
from gradflow.norms import NORMS
from gradflow.product import identity
from gradflow.schemes import BY_NAME, S, Scheme, b, l
from gradflow.stack import Drawn, Stack

WIDTH, TOKENS = 5, 3  # one shape for all: run eagerly, each new shape costs as much as a network

# rows of a user's own: every slot filled, multipliers that vary with depth, a pure branch
SANDWICH = Scheme("sandwich", "test", "norms on both sides of the branch", norm_in=True, norm_branch=True)
EVERYWHERE = Scheme(
    "everywhere", "test", "all slots, α and β along depth", True, True, True, alpha=S ** (l / S), beta=1 / (l + 1)
)
PURE = Scheme("pure-branch", "test", "no skip: α = 0", norm_out=True, alpha=0 * l)
BARE = Scheme("bare", "test", "no norm at all", beta=-1 / S)
SWITCHING = Scheme(
    "switching",
    "test",
    "placement and multipliers change along depth; gains on norms and matrices",
    norm_out=True,
    outer=S ** sympy.Rational(-1, 4),
    until=sympy.Rational(1, 2),
    then=Scheme("second half", "test", "", norm_in=True, norm_branch=True, scale=1 / sympy.sqrt(b), inner=1 / S),
)
OWN = (SANDWICH, EVERYWHERE, PURE, BARE, SWITCHING)
PLAIN = (BY_NAME["post-ln"], BY_NAME["pre-ln"])


def name(value):
    """Readable test ids."""
    if isinstance(value, tuple):
        return "+".join(value)
    return getattr(value, "name", None)


def _table():
    """Every kind of branch, on every norm in turn; blocks of two; rows of a user's own. A final norm in every other one."""
    for i, branch in enumerate(KINDS):
        yield NORMS[i % len(NORMS)].name, PLAIN[i // 2 % 2], (branch,), bool(i % 2)
    for n, scheme in enumerate(PLAIN):
        yield NORMS[n].name, scheme, ("mlp:gelu", "linear"), bool(n)
        yield NORMS[1 - n].name, scheme, ("attention", "mlp:relu"), not n
    for n, scheme in enumerate(OWN):
        yield ("layernorm", "rms")[n % 2], scheme, ("mlp:tanh", "linear"), False


# on the other activations `test_push_is_jacfwd_of_the_branch` is enough
KINDS = ("linear", "bias", "mlp:relu", "mlp:gelu", "mlp:tanh", "glu:silu", "attention", "attention:causal")
# every name without a norm over the hidden units, and each norm in each kind of branch
BRANCH_NAMES = [*BRANCHES, *(f"{name}+layernorm" for name in ("mlp:gelu", "glu:silu", "attention"))]
BRANCH_NAMES += ["attention:rope:qk-norm", "attention:causal:rope"]
BRANCH_NAMES += [f"{name}+rms" for name in ("mlp:relu", "glu:tanh", "attention:causal")]
TABLE = tuple(_table())


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


def eye(tokens, d, dtype=None):
    return jnp.broadcast_to(jnp.eye(d, dtype=dtype or jnp.float64), (tokens, d, d))


class Run:
    """One network by both roads, each part when it is first asked for; x64 must be on."""

    def __init__(self, norm, scheme, block, final, tokens, probes, depth, eps):
        self.stack = Stack.make(scheme, block, depth, WIDTH, norm=norm, eps=eps, final_norm=final)
        self.weights, self.x = Drawn(jax.random.key(7)), normal(1, tokens, WIDTH)
        self.cotangents = normal(2, probes, tokens, WIDTH)
        self.oracle = oracle.Network(self.stack, self.weights)

    @functools.cached_property
    def trace(self):
        return self.stack.trace(self.weights, self.x, identity(self.stack, len(self.x)))

    @property
    def product(self):
        """(tokens, d, d), or (tokens, d, tokens·d) where tokens mix."""
        return self.trace.basis * 2.0 ** self.trace.exponent.astype(self.trace.basis.dtype)

    @functools.cached_property
    def flow(self):
        return flow(self.stack, self.weights, self.trace, self.cotangents)


@functools.cache
def run(norm, scheme, block, final, tokens=TOKENS, probes=2, depth=2, eps=1e-3):
    return Run(norm, scheme, block, final, tokens, probes, depth, eps)
