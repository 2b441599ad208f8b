"""A stack of several residual streams: a row of `gradflow.streams` × a block × a depth, run by one ``lax.scan`` over depth.

Weights are those of `gradflow.stack` (`Drawn`, `Given`); the row's own numbers are its constants. The input is one state
(tokens, d), and so is the output: expansion and readout belong to the stack.
"""

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gradflow.branches import Branch, branches_of, joined
from gradflow.branches.attention import Attention
from gradflow.jacobian import Slots
from gradflow.scaling import rescale
from gradflow.schemes import Multipliers
from gradflow.stack import Layer, Stack, State, Weights
from gradflow.streams.jacobian import OnStreams, StreamJacobian, Streams, mix, normed, spread
from gradflow.streams.rows import StreamNumbers, StreamScheme, any_scheme, composite


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StreamTrajectory:
    """The forward run of one network.

    Attributes
    ----------
    x : (S, n, tokens, d) or None
        The streams as they enter each sub-layer.
    last : (n, tokens, d)
        Those behind the last one.
    out : (tokens, d)
        What is read out of them, before a final norm.
    basis, exponent
        As of `gradflow.stack.Trajectory`, pushed to the network's output.
    """

    x: Float[Array, "S n tokens d"] | None
    last: Streams
    out: State
    basis: Float[Array, "tokens d k"] | None
    exponent: Int[Array, ""]


@dataclass(frozen=True)
class StreamStack:
    """A network of several residual streams, hashable. Attributes are those of a `Stack`; ``scheme`` is a `StreamScheme`."""

    scheme: StreamScheme
    block: tuple[Branch, ...]
    depth: int
    d: int
    norm: str = "layernorm"
    eps: float = 1e-5
    final_norm: bool = False
    dtype: str = "float64"

    @classmethod
    def make(cls, scheme: str | StreamScheme, block: Any, depth: int, d: int, **options: Any) -> "StreamStack":
        """Build a stack from names, checking every argument.

        Raises
        ------
        ValueError
            As `gradflow.stack.Stack.make`; also for a row of one stream, or a block that has no place for each branch.
        """
        row = any_scheme(scheme)
        if not isinstance(row, StreamScheme):
            raise ValueError(f"scheme: {row.name!r} has one stream; it is a gradflow.Stack")
        branches = block_of(row, block, options.get("norm", "layernorm"), options.get("eps", 1e-5))
        plain = Stack.make("no-norm", branches, depth, d, **options)  # every check but the row's
        least = 2 + (plain.norm == "layernorm")
        for branch in branches if row.qkv_norm and plain.norm != "none" else ():
            if isinstance(branch, Attention) and branch.size_of(d) < least:
                raise ValueError(
                    f"d: leaves heads of width {branch.size_of(d)} to be normed; at least {least} it takes"
                )
        return cls(row, **{f.name: getattr(plain, f.name) for f in fields(cls) if f.name != "scheme"})

    sublayers, mixes, layer = Stack.sublayers, Stack.mixes, Stack.layer  # one definition, of what both have
    detached = False  # its norms never are

    @property
    def slots(self) -> tuple[Slots, ...]:
        """Unit-gain norms at every branch's input and output, and those behind the sum, where any stream has one."""
        found = []
        for place in map(self.scheme.place, range(len(self.block))):
            filled = (place.norm_in, place.norm_branch, any(place.norm_out))
            found.append(tuple(self.layer if slot else None for slot in filled))
        return tuple(found)

    def multipliers(self) -> Multipliers:
        """Units: a row of several streams has no gains on norms and matrices."""
        return Multipliers(*np.ones((5, self.depth, len(self.block)), self.dtype))

    def numbers(self) -> StreamNumbers:
        """R, r, w with leading axes (depth, len(block))."""
        found = self.scheme.numbers(self.sublayers)
        return StreamNumbers(*(a.reshape(self.depth, len(self.block), *a.shape[1:]).astype(self.dtype) for a in found))

    def settings(self) -> dict[str, Any]:
        """As of a `Stack`; also the number of streams, and what ∏R alone can do (`gradflow.streams.composite`)."""
        plain = Stack.settings(self)  # type: ignore[arg-type]
        n = self.scheme.streams
        if n == 1 or any(any(place.norm_out) for place in self.scheme.places):
            return plain | {"streams": n}
        gains = composite(self.scheme, self.sublayers)
        return plain | {"streams": n, "composite": {k: float(v[0]) for k, v in gains._asdict().items()}}

    def sublayer(self, layer: Layer, k: int, numbers: StreamNumbers, x: Streams) -> StreamJacobian:
        """Run a block's k-th sub-layer: its values and its exact Jacobian as an operator."""
        where = self.scheme.place(k).norm_out
        mine = jax.tree.map(lambda leaf: leaf[k], tuple(numbers))
        return StreamJacobian.at(self.block[k], layer.params[k], layer.norms[k], where, mine, x)

    def expanded(self, x: Array) -> Array:
        """e ⊗ x."""
        return spread(jnp.asarray(self.scheme.expand, self.dtype), x)

    def read(self, last: Streams) -> tuple[State, Array, OnStreams | None]:
        """The output, the weights that read it, and the Jacobian of the norms before."""
        weights = jnp.asarray(self.scheme.readout, self.dtype)
        state, jacobian = normed(self.layer, self.scheme.readout_norm, last)
        return mix(weights, state), weights, jacobian

    @functools.partial(jax.jit, static_argnums=(0, 4))
    def trace(
        self, weights: Weights, x: State, basis: Float[Array, "tokens d k"] | None = None, record: bool = True
    ) -> StreamTrajectory:
        """Run forward from ``x``; a basis given is pushed along through the exact Jacobians (`gradflow.stack.Stack.trace`)."""

        def block(carry: tuple, inputs: tuple) -> tuple[tuple, list | None]:
            x, basis, exponent = carry
            piece, numbers = inputs
            layer, rows = weights.layer(self, piece), []  # type: ignore[arg-type]
            for k in range(len(self.block)):
                step = self.sublayer(layer, k, numbers, x)
                rows.append(x)
                if basis is not None:
                    basis, exponent = rescale(step.push(basis), exponent)
                x = step.out
            return (x, basis, exponent), rows if record else None

        start = (self.expanded(x), None if basis is None else self.expanded(basis), jnp.zeros((), jnp.int32))
        inputs = (weights.along_depth(self), self.numbers())  # type: ignore[arg-type]
        (last, basis, exponent), rows = jax.lax.scan(block, start, inputs)
        out, reads, jacobian = self.read(last)
        final = weights.final(self) if self.final_norm else None  # type: ignore[arg-type]
        if basis is not None:
            basis = mix(reads, basis if jacobian is None else jacobian.push(basis))
            basis = basis if final is None else final.jacobian(out).push(basis)
            basis, exponent = rescale(basis, exponent)
        xs = None if rows is None else jnp.stack(rows, 1).reshape(self.sublayers, *last.shape)
        return StreamTrajectory(xs, last, out, basis, exponent)


def block_of(row: StreamScheme, block: Any, norm: str, eps: float) -> tuple[Branch, ...]:
    """The branches of a block as a row has them: summed where it joins them, with normed queries where it says so.

    Raises
    ------
    ValueError
        Where the row has places for another number of branches.
    """
    branches = branches_of(block)
    if row.joined:
        return (joined(branches),)
    if len(row.places) not in (1, len(branches)):
        raise ValueError(
            f"block: {row.name!r} is of blocks of {len(row.places)} branches, such as attention,mlp:gelu, got {len(branches)}"
        )
    if row.qkv_norm:
        branches = tuple(replace(b, qkv_norm=norm, eps=eps) if isinstance(b, Attention) else b for b in branches)
    return branches


def stack_of(scheme: Any, block: Any, depth: int, d: int, **options: Any) -> "Stack | StreamStack":
    """A `Stack`, or a `StreamStack` where the row has several streams."""
    row = any_scheme(scheme)
    kind: Any = StreamStack if isinstance(row, StreamScheme) else Stack
    return kind.make(row, block, depth, d, **options)
