"""A stack: scheme × block of branches × depth, run by one ``lax.scan`` over depth.

The state is (tokens, d). A random stack draws its weights inside the scan from ``fold_in(key, l)``, so that depth costs no
memory; given weights are stacked along depth, or tied (one set for all blocks).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gradflow import checks, precision
from gradflow.branches import Branch, Params, branches_of, memory_of, powers_of, with_gains
from gradflow.jacobian import Slots, SublayerJacobian
from gradflow.norms import BY_NAME, AnyNorm, Norm
from gradflow.scaling import rescale
from gradflow.schemes import Multipliers, Scheme, scheme_of

State = Float[Array, "tokens d"]
SHARED = 2**32 - 1  # beside the blocks' indices


class Layer(NamedTuple):
    """One block's share of a network's weights: per branch its parameters, and the norms in its slots (in, branch, out)."""

    params: tuple[Params, ...]
    norms: tuple[Slots, ...]


class Weights(Protocol):
    """Where a network's parameters come from. A scan over depth takes one piece a block and turns it into a `Layer`."""

    @property
    def mask(self) -> Array | None:
        """False at padding (tokens,), which attention must not see and no figure may count."""
        ...

    def along_depth(self, stack: "Stack") -> Any:
        """A pytree whose leaves have a leading axis of length depth."""
        ...

    def multipliers(self, stack: "Stack") -> Multipliers:
        """The scheme's numbers, each of shape (depth, len(block))."""
        ...

    def layer(self, stack: "Stack", piece: Any) -> Layer:
        """The layer that one piece stands for."""
        ...

    def final(self, stack: "Stack") -> AnyNorm | None:
        """The norm after the last sub-layer, where the stack has one."""
        ...


def _masked(params: tuple[Params, ...], stack: "Stack", mask: Array | None) -> tuple[Params, ...]:
    """Hand the mask to the branches that mix tokens."""
    if mask is None:
        return params
    return tuple(p if b.tokenwise else p | {"mask": mask} for p, b in zip(params, stack.block, strict=True))


def _with_shared(params: tuple[Params, ...], stack: "Stack", key: Array) -> tuple[Params, ...]:
    """Give every block what all of them share, as a decoder's blocks share the encoder's output."""
    key = jax.random.fold_in(key, SHARED)
    return tuple(
        p | b.shared(key, stack.d, stack.dtype) if hasattr(b, "shared") else p  # type: ignore[attr-defined]
        for p, b in zip(params, stack.block, strict=True)
    )


def _times(norm: AnyNorm | None, factor: Array) -> AnyNorm | None:
    return None if norm is None else replace(norm, gain=norm.gain * factor, bias=norm.bias * factor)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Weights drawn on the spot from ``fold_in(key, l)``, so that depth costs no memory; norms have unit gain.

    Attributes
    ----------
    key : random key
    mask : (tokens,) of bool, optional
        False at padding.
    numbers : Multipliers, optional
        In place of the scheme's own, so that schemes of one shape share a compilation.
    """

    key: Array
    mask: Array | None = None
    numbers: Multipliers | None = None

    def multipliers(self, stack: "Stack") -> Multipliers:
        """Those given, or the scheme's."""
        return stack.multipliers() if self.numbers is None else self.numbers

    def along_depth(self, stack: "Stack") -> Any:
        """The blocks' indices, and the scheme's gains on norms and matrices."""
        numbers = self.multipliers(stack)
        return jnp.arange(stack.depth), (numbers.scale, numbers.inner, numbers.outer)

    def layer(self, stack: "Stack", piece: Any) -> Layer:
        """Draw a block's weights."""
        index, (scale, inner, outer) = piece
        keys = jax.random.split(jax.random.fold_in(self.key, index), len(stack.block))
        params = tuple(branch.init(k, stack.d, stack.dtype) for branch, k in zip(stack.block, keys, strict=True))
        params = _with_shared(params, stack, self.key)
        slots = stack.slots
        if self.numbers is not None or not stack.scheme.unit:
            params = tuple(map(with_gains, stack.block, params, inner, outer))
            slots = tuple((_times(s[0], factor), *s[1:]) for s, factor in zip(slots, scale, strict=True))
        return Layer(_masked(params, stack, self.mask), slots)

    def final(self, stack: "Stack") -> AnyNorm | None:
        """Unit gain."""
        return stack.layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """Weights of a network that exists.

    Attributes
    ----------
    params : tuple of dict
        One per branch of the block; every leaf has a leading axis of length depth (none where ``tied``).
    norms : tuple of (Norm or None, Norm or None, Norm or None), optional
        One per branch: the norms in its slots, γ and b of shape (depth, d). Unit gain where left out.
    last : Norm, optional
        The final norm.
    mask : (tokens,) of bool, optional
        False at padding: keys that attention must not see.
    tied : bool
        Whether every block uses the same parameters.
    numbers : Multipliers, optional
        In place of the scheme's own.
    """

    params: tuple[Params, ...]
    norms: tuple[Slots, ...] | None = None
    last: AnyNorm | None = None
    mask: Array | None = None
    tied: bool = field(default=False, metadata={"static": True})
    numbers: Multipliers | None = None

    def multipliers(self, stack: "Stack") -> Multipliers:
        """Those given, or the scheme's; those on matrices and norms are not used, as the weights are what they are."""
        return stack.multipliers() if self.numbers is None else self.numbers

    def along_depth(self, stack: "Stack") -> Any:
        """Parameters and norms; scanned over rather than indexed, so that a backward pass stacks no copy of them."""
        return None if self.tied else (self.params, self.norms)

    def layer(self, stack: "Stack", piece: Any) -> Layer:
        """A block's weights."""
        params, norms = (self.params, self.norms) if self.tied else piece
        return Layer(_masked(params, stack, self.mask), stack.slots if norms is None else norms)

    def final(self, stack: "Stack") -> AnyNorm | None:
        """The network's own, or unit gain."""
        return stack.layer if self.last is None else self.last


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Trajectory:
    """The forward run of one network.

    Attributes
    ----------
    x, u : (S, tokens, d) or None
        The stream as it enters each sub-layer, and αx + βf, what an output norm sees; ``None`` where not recorded.
    added : (S, tokens, d) or None
        β·N_branch(f), as it is added.
    out : (tokens, d)
        The last stream, before a final norm.
    basis : (tokens, d, k) or None
        The pushed basis over 2^exponent, where one was given.
    exponent : ()
        Its running base-2 log-scale.
    """

    x: Float[Array, "S tokens d"] | None
    u: Float[Array, "S tokens d"] | None
    added: Float[Array, "S tokens d"] | None
    out: State
    basis: Float[Array, "tokens d k"] | None
    exponent: Int[Array, ""]


@dataclass(frozen=True)
class Stack:
    """A residual network's architecture; hashable, so that one compilation serves all its seeds.

    Attributes
    ----------
    scheme : Scheme
        The row of the residual equation.
    block : tuple of Branch
        The branches of one block, in order; S = depth · len(block) sub-layers.
    depth, d : int
        Blocks and width.
    norm : str
        Name of the norm that fills the scheme's slots.
    eps : float
        Its ε.
    final_norm : bool
        Whether a norm follows the last sub-layer.
    dtype : str
        ``"float64"`` or ``"float32"``.
    detached : bool
        Whether the unit-gain norms that fill slots are detached (`gradflow.norms.Norm`); `gradflow.detaching` does all.
    """

    scheme: Scheme
    block: tuple[Branch, ...]
    depth: int
    d: int
    norm: str = "layernorm"
    eps: float = 1e-5
    final_norm: bool = False
    dtype: str = "float64"
    detached: bool = False

    @classmethod
    def make(cls, scheme: str | Scheme, block: Any, depth: int, d: int, **options: Any) -> "Stack":
        """Build a stack from names, checking every argument.

        Raises
        ------
        ValueError
            For an unknown name (with near ones), depth < 1, d < 2, or d < 3 under LayerNorm.
        """
        stack = cls(scheme_of(scheme), branches_of(block), depth, d, **options)
        checks.integer("depth", depth, 1)
        checks.one_of("norm", stack.norm, (*BY_NAME, "none"))
        for branch in stack.block:
            gains = [name for name in ("inner", "outer") if getattr(stack.scheme, name) != 1]
            if gains and not hasattr(branch, gains[0]):
                raise ValueError(
                    f"block: {branch.name!r} lists no {gains[0]} matrices, which {stack.scheme.name!r} scales"
                )
        if stack.norm == "layernorm":
            checks.integer("d", d, 3, "LayerNorm's Jacobian has rank d − 2 as ε → 0: none is left at d = 2")
        checks.integer("d", d, 2)
        checks.one_of("dtype", stack.dtype, precision.DTYPES)
        if not (isinstance(stack.eps, int | float) and 0 <= stack.eps < np.inf):
            raise ValueError(f"eps: needs a finite number of at least 0, got {stack.eps!r}")
        return stack

    @property
    def sublayers(self) -> int:
        """S, the number of residual sub-layers."""
        return self.depth * len(self.block)

    @property
    def mixes(self) -> bool:
        """Whether a branch lets tokens see each other."""
        return not all(branch.tokenwise for branch in self.block)

    @property
    def layer(self) -> AnyNorm | None:
        """The unit-gain norm layer that fills a slot; ``None`` for the norm ``"none"``."""
        if self.norm == "none":
            return None
        layer = BY_NAME[self.norm].init(self.d, self.eps, self.dtype)
        return replace(layer, detached=True) if self.detached and isinstance(layer, Norm) else layer

    @property
    def slots(self) -> tuple[Slots, ...]:
        """Unit-gain norms in the scheme's slots, the same for every branch of the block."""
        layer = self.layer
        return (tuple(layer if slot else None for slot in self.scheme.slots),) * len(self.block)  # type: ignore[return-value]

    def parts(self) -> list[tuple[slice, "Stack"]]:
        """Blocks of one placement, each run a stack of its own; one part, unless the scheme changes along depth."""
        return [(p, replace(self, scheme=row, depth=p.stop - p.start)) for p, row in self.scheme.parts(self.depth)]

    def over_depth(self, body: Callable[..., Any], carry: Any, xs: Any, reverse: bool = False) -> tuple[Any, Any]:
        """``lax.scan`` of ``body(part, carry, x)`` over the blocks; one scan for each part."""
        parts = self.parts()
        if len(parts) == 1:
            return jax.lax.scan(functools.partial(body, parts[0][1]), carry, xs, reverse=reverse)
        rows = []
        for blocks, part in parts[::-1] if reverse else parts:
            piece = jax.tree.map(lambda leaf, blocks=blocks: leaf[blocks], xs)
            carry, ys = jax.lax.scan(functools.partial(body, part), carry, piece, reverse=reverse)
            rows.append(ys)
        return carry, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *(rows[::-1] if reverse else rows))

    def settings(self) -> dict[str, Any]:
        """What it is and what computes it, for a result's settings."""
        return {
            "scheme": self.scheme.name,
            "equation": self.scheme.equation,
            "branch": " + ".join(branch.name for branch in self.block),
            **memory_of(self.block),
            "norm": self.norm,
            "eps": self.eps,
            **({"detached": True} if self.detached else {}),
            "final_norm": self.final_norm,
            "depth": self.depth,
            "d": self.d,
            "dtype": self.dtype,
            "matmul_precision": "highest",
            "device": jax.default_backend(),
        }

    def multipliers(self, powers: Sequence[float] | None = None) -> Multipliers:
        """The scheme's numbers, each of shape (depth, len(block)).

        Parameters
        ----------
        powers : sequence of float, optional
            q_f of each branch of a block, where the scheme takes it; by default the branches' moments, attention's of one token.
        """
        if powers is None:
            powers = powers_of(self.block) if self.scheme.of_power else [1.0] * len(self.block)
        shape = (self.depth, len(self.block))
        found = self.scheme.multipliers(self.sublayers, powers)
        return Multipliers(*(values.reshape(shape).astype(self.dtype) for values in found))

    def sublayer(self, layer: Layer, k: int, alpha: Array, beta: Array, x: State) -> SublayerJacobian:
        """Run a block's k-th sub-layer: its values and its exact Jacobian as an operator."""
        return SublayerJacobian.at(self.block[k], layer.params[k], layer.norms[k], alpha, beta, x)

    @functools.partial(jax.jit, static_argnums=(0, 4, 5))
    def trace(
        self,
        weights: Weights,
        x: State,
        basis: Float[Array, "tokens d k"] | None = None,
        record: bool = True,
        trunk: bool = False,
    ) -> Trajectory:
        """Run forward from ``x``; a basis given is pushed along through the exact Jacobians, never storing one.

        A basis of shape (tokens, d, k) holds k tangent directions of the state; where no branch mixes tokens, each token's
        rows are directions of its own.
        Without ``record`` the states on the way are not kept: memory is O(tokens·d·k) at any depth. With ``trunk`` the basis
        goes along the identity path alone (F = 0).
        """

        def block(part: Stack, carry: tuple, inputs: tuple) -> tuple[tuple, tuple | None]:
            x, basis, exponent = carry
            piece, alphas, betas = inputs
            layer, rows = weights.layer(part, piece), []
            for k in range(len(self.block)):
                step = self.sublayer(layer, k, alphas[k], betas[k], x)
                rows.append((x, step.u, step.added))
                if basis is not None:
                    basis, exponent = rescale(step.push_trunk(basis) if trunk else step.push(basis), exponent)
                x = step.out
            return (x, basis, exponent), jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows) if record else None

        start = (x, basis, jnp.zeros((), jnp.int32))
        inputs = (weights.along_depth(self), *weights.multipliers(self)[:2])
        (out, basis, exponent), states = self.over_depth(block, start, inputs)
        last = weights.final(self) if self.final_norm else None
        if basis is not None and last is not None:
            basis, exponent = rescale(last.jacobian(out).push(basis), exponent)
        if states is None:
            return Trajectory(None, None, None, out, basis, exponent)
        xs, us, added = (leaf.reshape(self.sublayers, *x.shape) for leaf in states)
        return Trajectory(xs, us, added, out, basis, exponent)
