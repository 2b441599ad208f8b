"""The model: bytes in, a gradflow stack of causal blocks, bytes out; every weight trainable.

A batch is one state of sequences · tokens rows, so that every figure of the engine is a ratio over the whole batch.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gradflow.branches import Branch, branches_of, with_fields
from gradflow.branches.attention import Attention
from gradflow.branches.matrices import Basis, Params, State, gaussian
from gradflow.inits import gain, initialised
from gradflow.norms import AnyNorm
from gradflow.schemes import Multipliers, Scheme, scheme_of
from gradflow.stack import Drawn, Given, Layer, Stack, Trajectory
from gradflow.training.data import SYMBOLS

# rows whose β is learned (LayerScale's is a vector): fixed, the first would never leave its start
LEARNED = ("rezero", "skipinit", "layerscale")
VECTOR = ("layerscale",)


@dataclass(frozen=True)
class Sequences:
    """A branch that mixes tokens, within each of ``number`` sequences of the state; all else is the branch's own."""

    branch: Any
    number: int
    tokenwise = False

    def __getattr__(self, name: str) -> Any:
        if name == "branch" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.branch, name)

    @property
    def gain(self) -> float:
        """The branch's."""
        return self.branch.gain

    @property
    def name(self) -> str:
        """The branch's."""
        return self.branch.name

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """The branch's weights."""
        return self.branch.init(key, d, dtype)

    def apply(self, params: Params, x: State) -> State:
        """``f`` of every sequence by itself."""
        rows = x.reshape(self.number, -1, x.shape[-1])
        return jax.vmap(functools.partial(self.branch.apply, params))(rows).reshape(x.shape)

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``F`` of every sequence by itself."""
        rows = (each.reshape(self.number, -1, *each.shape[1:]) for each in (x, basis))
        return jax.vmap(functools.partial(self.branch.push, params))(*rows).reshape(basis.shape)

    def of_one_token(self) -> Any:
        """The branch as it is where a token sees itself alone."""
        return getattr(self.branch, "of_one_token", lambda: self.branch)()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Learned(Given):
    """Weights that are learned, with the multipliers of skip and branch among them.

    Attributes
    ----------
    alpha, beta : (depth, branches), or (depth, branches, d)
        α is a constant; β is learned where the scheme's row says so.
    """

    alpha: Any = None
    beta: Any = None

    def multipliers(self, stack: Stack) -> Multipliers:
        """Its own; gains at initialisation are in the weights."""
        return stack.multipliers()._replace(alpha=self.alpha, beta=self.beta)

    def layer(self, stack: Stack, piece: Any) -> Layer:
        """A block's weights, of its norms those in the slots of its placement."""
        params, norms = piece
        slots = (
            tuple(norm if there else None for norm, there in zip(s, stack.scheme.slots, strict=True)) for s in norms
        )
        return Layer(params, tuple(slots))  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """All trainable weights.

    Attributes
    ----------
    symbol, position : (256, d), (tokens, d)
        Embeddings, summed; at the start the sum has unit power.
    weights : Learned
        The stack's.
    unembed : (256, d)
    """

    symbol: Float[Array, "256 d"]
    position: Float[Array, "tokens d"]
    weights: Learned
    unembed: Float[Array, "256 d"]

    def embed(self, symbols: Int[Array, "sequences tokens"]) -> State:
        """The stream as it enters, (sequences · tokens, d)."""
        return (self.symbol[symbols] + self.position).reshape(-1, self.symbol.shape[1])

    def loss(self, out: State, targets: Int[Array, "sequences tokens"]) -> Float[Array, ""]:
        """Mean cross-entropy in nats of the next byte, from the stack's output."""
        logits = jax.lax.dot_general(out, self.unembed, (((1,), (1,)), ((), ())))
        logs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logs, targets.reshape(-1, 1), 1))

    def stream(self, stack: Stack, symbols: Int[Array, "sequences tokens"], record: bool = False) -> Trajectory:
        """The forward run."""
        return stack.trace(self.weights, self.embed(symbols), None, record)

    def output(self, stack: Stack, symbols: Int[Array, "sequences tokens"]) -> State:
        """The stack's output, behind its final norm where it has one."""
        out, last = self.stream(stack, symbols).out, self.weights.last
        return out if last is None else last(out)


def loss(model: Model, stack: Stack, batch: Int[Array, "sequences tokens+1"]) -> Float[Array, ""]:
    """The loss of a batch: each byte from those before it."""
    return model.loss(model.output(stack, batch[:, :-1]), batch[:, 1:])


def stack_for(
    scheme: str | Scheme, block: Any, depth: int, d: int, heads: int, sequences: int, **options: Any
) -> Stack:
    """The stack of a scheme for batches of that many sequences, with a final norm where norms leave the stream unnormed.

    Raises
    ------
    ValueError
        For bad sizes, a block without attention's causal form, or heads that do not divide d.
    """
    row = scheme_of(scheme)
    rows = [part for _, part in row.parts(max(depth, 1))]
    final = not rows[-1].norm_out and any(any(part.slots) for part in rows)
    stack = Stack.make(row, block, depth, d, final_norm=final and options.get("norm") != "none", **options)
    return dataclasses.replace(stack, block=tuple(_sequences(b, heads, d, sequences) for b in stack.block))


def resized(stack: Stack, sequences: int) -> Stack:
    """The stack for batches of another size."""

    def one(branch: Any) -> Any:
        if hasattr(branch, "branches"):
            return with_fields(branch, branches=tuple(map(one, branch.branches)))
        return dataclasses.replace(branch, number=sequences) if isinstance(branch, Sequences) else branch

    return dataclasses.replace(stack, block=tuple(map(one, stack.block)))


def initial(block: Any, init: str, d: int) -> tuple[Branch, ...]:
    """The branches with an initialisation's gains."""
    return initialised(branches_of(block), init, d)


def _sequences(branch: Branch, heads: int, d: int, number: int) -> Branch:
    if branch.tokenwise:
        return branch
    if hasattr(branch, "branches"):  # a sum: each part by itself
        return with_fields(branch, branches=tuple(_sequences(b, heads, d, number) for b in branch.branches))  # type: ignore
    if not getattr(branch, "causal", False):
        raise ValueError(f"block: {branch.name!r} sees what it should predict; use attention:causal")
    if isinstance(branch, Attention):
        branch = with_fields(branch, heads=heads)
        branch.heads_of(d)  # type: ignore[attr-defined]
    return Sequences(branch, number)  # type: ignore[return-value]


def draw(stack: Stack, key: Array, tokens: int, profiling: Int[Array, "sequences tokens+1"]) -> tuple[Model, Stack]:
    """Draw a model, its multipliers in the weights; and the stack's shape, which runs it.

    Schemes of one shape share a compilation. A row that takes the branches' powers (Admin's ω) sees them first, in one
    forward pass of ω = 1 over the profiling batch.
    """
    dtype, d = stack.dtype, stack.d
    k_stack, k_symbol, k_position, k_out = jax.random.split(key, 4)
    symbol, position = (
        gaussian(k, (n, d), math.sqrt(0.5), dtype) for k, n in ((k_symbol, SYMBOLS), (k_position, tokens))
    )
    unembed = gaussian(k_out, (SYMBOLS, d), gain("xavier", d, SYMBOLS) / math.sqrt(d), dtype)
    shape = dataclasses.replace(stack, scheme=stack.scheme.shape)
    numbers = stack.multipliers([1.0] * len(stack.block) if stack.scheme.of_power else None)
    if stack.scheme.of_power:
        numbers = numbers._replace(alpha=np.ones_like(numbers.alpha))
    model = Model(symbol, position, _weights(stack, numbers, k_stack), unembed)
    if stack.scheme.of_power:
        added = model.stream(shape, profiling[:, :-1], True).added
        assert added is not None
        powers = jnp.mean(added**2, (1, 2)).reshape(numbers.alpha.shape).mean(0)
        alpha = jnp.asarray(stack.multipliers(powers.tolist()).alpha)
        model = dataclasses.replace(model, weights=dataclasses.replace(model.weights, alpha=alpha))
    return model, shape


def _weights(stack: Stack, numbers: Multipliers, key: Array) -> Learned:
    """Drawn as `gradflow.stack.Drawn` draws them, stacked along depth, with a norm in every slot that some block has."""
    slots = np.any([row.slots for _, row in stack.scheme.parts(stack.depth)], 0)
    everywhere = dataclasses.replace(
        stack.scheme, then=None, **dict(zip(("norm_in", "norm_branch", "norm_out"), map(bool, slots), strict=True))
    )
    whole = dataclasses.replace(stack, scheme=everywhere)
    source = Drawn(key, numbers=numbers)
    params, norms = jax.vmap(functools.partial(source.layer, whole))(source.along_depth(whole))
    alpha, beta = (jnp.asarray(each) for each in numbers[:2])
    if stack.scheme.name in VECTOR:
        beta = jnp.broadcast_to(beta[..., None], (*beta.shape, stack.d))
    last: AnyNorm | None = stack.layer if stack.final_norm else None
    return Learned(params, norms, last, alpha=alpha, beta=beta)
