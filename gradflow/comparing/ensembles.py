"""`Ensemble`: random networks of one row of the catalogue, one block, depth and width; measured one by one, and their law."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradflow import checks, devices, laws, precision, probes, profiles
from gradflow.branches import Branch, branches_of
from gradflow.branches.matrices import alike
from gradflow.factors import Profile
from gradflow.inits import initialised
from gradflow.schemes import Multipliers, Scheme
from gradflow.stack import Drawn, Stack
from gradflow.streams import StreamScheme, any_scheme
from gradflow.streams import flow as stream_flow
from gradflow.streams.stack import StreamStack, stack_of

FINAL = "+final"


class Tokens(NamedTuple):
    """How many there are, and the cosine of every two: of the input, and of the cotangents at the output."""

    number: int
    cosine: float = 0.0
    cotangent_cosine: float = 0.0


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def measure(
    stack: Stack | StreamStack, tokens: Tokens, watched: bool, numbers: Multipliers | None, keys: Array
) -> dict[str, Array]:
    """Rows of random networks of a shape, one after another; each with an input of unit rms and a Gaussian cotangent."""

    def one(key: Array) -> dict[str, Array]:
        k_x, k_weights, k_cotangent = jax.random.split(key, 3)
        drawn = ((k_x, tokens.cosine), (k_cotangent, tokens.cotangent_cosine))
        x, cotangent = (alike(k, tokens.number, stack.d, cosine, stack.dtype) for k, cosine in drawn)
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))
        if isinstance(stack, StreamStack):
            return stream_flow.profile(stack, Drawn(k_weights), x, cotangent[None], watched)
        return probes.profile(stack, Drawn(k_weights, None, numbers), x, cotangent, watched)[2]

    return devices.over(one, keys)


def seeds_of(key: int, seeds: int) -> Array:
    """One random key a network; a network's own does not depend on how many there are."""
    with jax.threefry_partitionable(True):  # JAX's default, without which it would
        return jax.random.split(jax.random.key(checks.key(key)), seeds)


@dataclass(frozen=True)
class Ensemble:
    """All networks of a stack, by the random key of each.

    Attributes
    ----------
    name : str
        What the row was asked for by.
    stack : Stack or StreamStack
        Scheme, block, depth and width.
    tokens : Tokens
        Of the state.
    watched : bool
        Whether the weights' gradients are measured, too.
    """

    name: str
    stack: Stack | StreamStack
    tokens: Tokens
    watched: bool

    @classmethod
    def make(
        cls,
        spec: str | Scheme | StreamScheme,
        block: str | Branch | Sequence[str | Branch],
        depth: int,
        d: int,
        *,
        norm: str,
        init: str,
        final_norm: bool,
        tokens: int,
        token_cosine: float,
        cotangent_cosine: float,
        dtype: str,
    ) -> "Ensemble":
        """Build one from the arguments of `gradflow.compare`, checking each.

        Raises
        ------
        ValueError
            For an argument out of range; the message names it.
        """
        checks.integer("d", d, 2)
        branches, number = initialised(branches_of(block), init, d), checks.integer("tokens", tokens, 1)
        cosines = {"token_cosine": token_cosine, "cotangent_cosine": cotangent_cosine}
        drawn = Tokens(number, *(checks.cosine(name, value, number) for name, value in cosines.items()))
        name, row, final = _row(spec, final_norm)
        options = {"norm": norm, "eps": 0.0, "final_norm": final, "dtype": precision.resolve(dtype)}
        watched = all(hasattr(branch, "matrices") for branch in branches)
        return cls(name, stack_of(row, branches, depth, d, **options), drawn, watched)

    @property
    def program(self) -> Stack | StreamStack:
        """What is compiled: rows of one shape are one program."""
        stack = self.stack
        return stack if isinstance(stack, StreamStack) else replace(stack, scheme=stack.scheme.shape)

    def numbers(self, first: Array) -> Multipliers | None:
        """The row's multipliers; one that takes the branches' powers sees them first, on the network of one key, (1,)."""
        stack = self.stack
        if isinstance(stack, StreamStack):
            return None
        numbers = stack.multipliers()
        if stack.scheme.of_power and stack.mixes and self.tokens.number > 1:
            # as Admin does: one pass forward, ω = 1, to see the branches
            numbers = numbers._replace(alpha=np.ones_like(numbers.alpha))
            rms = np.asarray(measure(self.program, self.tokens, self.watched, numbers, first)["branch_rms"][0])
            numbers = stack.multipliers(np.mean(rms[: stack.sublayers].reshape(numbers.alpha.shape) ** 2, 0).tolist())
        return numbers

    def measured(self, keys: Array, numbers: Multipliers | None) -> Profile:
        """The profile of the networks of these keys, (n,); call it, and what makes its arguments, in `precision.scope`."""
        found = measure(self.program, self.tokens, self.watched, numbers, keys)
        settings = {"what": "measured", **self.stack.settings(), "tokens": self.tokens.number}
        rows = {name: np.asarray(leaf) for name, leaf in found.items()}
        return Profile.from_rows(rows, profiles.labels(self.stack), settings)

    def law(self) -> tuple[Profile | None, str]:
        """The law's profile, or why there is none."""
        stack, tokens = self.stack, self.tokens
        options: dict[str, Any] = {"d": stack.d, "norm": stack.norm, "final_norm": stack.final_norm}
        options |= {"tokens": tokens.number, "token_cosine": tokens.cosine}
        options |= {"cotangent_cosine": tokens.cotangent_cosine}
        try:
            return laws.law(stack.scheme, stack.block, stack.depth, **options), ""
        except ValueError as error:
            return None, str(error)


def _row(spec: str | Scheme | StreamScheme, final: bool) -> tuple[str, Scheme | StreamScheme, bool]:
    """Name, row, and whether a final norm follows."""
    if isinstance(spec, str) and spec.endswith(FINAL):
        return spec, any_scheme(spec.removesuffix(FINAL)), True
    row = any_scheme(spec)
    return spec if isinstance(spec, str) else row.name, row, bool(final)
