"""The Gram of tokens, ⟨x_i, x_j⟩/d, as the token law carries it: two numbers where tokens are exchangeable, else tokens × tokens.

A layout knows how to sum and scale such a Gram, and what attention does to it, forward and back. Attention's sums are derived in
`gradflow.symbolic.attention`; by position they are the same sums over the keys that each query sees.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gradflow.moments import softmax
from gradflow.numeric import to_jax
from gradflow.symbolic import attention as symbolic

if TYPE_CHECKING:
    from gradflow.branches import Attention

Gram = jax.Array  # (2,): own, other; or (tokens, tokens)
Back = Callable[[Gram], tuple[Gram, jax.Array]]  # of dL/df: that of dL/dx, and the weights' gradient power per token
Table = tuple[jax.Array, ...]  # of `gradflow.moments.softmax`


@functools.lru_cache
def overlap() -> Callable[..., Any]:
    """K₂, D₂ and D₁ of K₁, M₃, M₂₂, n, n − 1 (at least 1), s² and the rows' correlation."""
    s = symbolic
    return to_jax((s.K1, s.M3, s.M22, s.n, s.others, s.s2, s.r), (*s.overlap(), s.sensitivity()))


@functools.lru_cache
def _exchanged() -> Callable[..., Any]:
    s = symbolic
    pairs = (s.mixed(), s.through_values(), s.through_queries(), s.through_keys())
    names = (s.p, s.c, s.G, s.C, s.K1, s.K2, s.D1, s.D2, s.others, s.qq, s.kk)
    return to_jax(names, tuple(map(tuple, pairs)))


@functools.lru_cache
def _logit_variance() -> Callable[..., Any]:
    s = symbolic
    return to_jax((s.p, s.c, s.qq, s.kk), s.LOGIT_VARIANCE)


def _before(branch: "Attention", inner: Any, values: Gram, scores: Gram) -> Gram:
    """Gradients of W_V x, W_Q x and W_K x: what comes back to x, without the matrices' gains."""
    return values / (branch.gain_in * inner) ** 2 + scores / branch.gain_in**2


def _hidden_norm(branch: "Attention", powers: jax.Array) -> jax.Array:
    """What a norm before W_O multiplies each token by, and its gradient too."""
    return 1 / jnp.sqrt(powers) if branch.hidden_norm else jnp.ones_like(powers)


@dataclass(frozen=True)
class Exchangeable:
    """Every pair of tokens alike: [⟨x_i, x_i⟩, ⟨x_i, x_j⟩]/d."""

    tokens: int

    def start(self, cosine: float) -> Gram:
        """Tokens of unit rms."""
        return jnp.asarray([1.0, cosine])

    def join(self, own: Any, other: Any) -> Gram:
        """A Gram of its diagonal and of what stands off it."""
        return jnp.stack(jnp.broadcast_arrays(own, jnp.ravel(other)[-1]))

    def powers(self, gram: Gram) -> jax.Array:
        """The diagonal."""
        return gram[0]

    def scaled(self, gram: Gram, factors: jax.Array) -> Gram:
        """Each token times its factor."""
        return gram * factors**2

    def cosines(self, gram: Gram) -> jax.Array:
        """Of every entry."""
        return gram / gram[0]

    def own(self, gram: Gram) -> jax.Array:
        """Mean of the diagonal."""
        return gram[0]

    def inner(self, one: Gram, two: Gram) -> jax.Array:
        """Σ_ij one_ij two_ij, per token."""
        return one[0] * two[0] + (self.tokens - 1) * one[1] * two[1]

    def attend(self, branch: "Attention", fed: Gram, inner: Any, outer: Any, table: Table) -> tuple[Gram, Back]:
        """Attention forward, and its way back."""
        (p, c), n, others = fed, float(self.tokens), float(max(self.tokens - 1, 1))
        score = branch.score_gain(p)
        s2 = _logit_variance()(p, c, score, score)
        K1, M3, M22 = softmax.looked_up(table, s2)[:, 0]
        K2, D2, D1 = overlap()(K1, M3, M22, n, others, s2, c / p)
        value, last = branch.value_gain(p, inner), (branch.gain * outer) ** 2

        def at(G: Any, C: Any) -> list[Gram]:
            return [jnp.stack(pair) for pair in _exchanged()(p, c, G, C, K1, K2, D1, D2, others, score, score)]

        mixed = value * at(0.0, 0.0)[0]
        factors = _hidden_norm(branch, self.powers(mixed))
        mixed = self.scaled(mixed, factors)

        def back(gradient: Gram) -> tuple[Gram, jax.Array]:
            _, values, queries, keys = at(*self.scaled(last * gradient, factors))
            scores = score * value * (queries + keys)
            onto = value * values + scores
            return onto, self.inner(gradient, mixed) + self.inner(_before(branch, inner, value * values, scores), fed)

        return last * mixed, back


@dataclass(frozen=True)
class Positions:
    """Every pair of tokens by itself, (tokens, tokens): for causal attention and rotary positions."""

    tokens: int

    def start(self, cosine: float) -> Gram:
        """Tokens of unit rms."""
        return self.join(1.0, cosine)

    def join(self, own: Any, other: Any) -> Gram:
        """A Gram of its diagonal and of what stands off it."""
        eye = jnp.eye(self.tokens, dtype=bool)
        return jnp.where(eye, jnp.broadcast_to(own, (self.tokens,)), other)

    def powers(self, gram: Gram) -> jax.Array:
        """The diagonal."""
        return jnp.diagonal(gram)

    def scaled(self, gram: Gram, factors: jax.Array) -> Gram:
        """Each token times its factor."""
        return gram * factors * factors[:, None]

    def cosines(self, gram: Gram) -> jax.Array:
        """Of every entry."""
        return self.scaled(gram, 1 / jnp.sqrt(self.powers(gram)))

    def own(self, gram: Gram) -> jax.Array:
        """Mean of the diagonal."""
        return jnp.mean(self.powers(gram))

    def inner(self, one: Gram, two: Gram) -> jax.Array:
        """Σ_ij one_ij two_ij, per token."""
        return jnp.sum(one * two) / self.tokens

    def attend(self, branch: "Attention", fed: Gram, inner: Any, outer: Any, table: Table) -> tuple[Gram, Back]:
        """Attention forward, and its way back. Query i sees ``seen[i]`` keys; a pair of queries shares the fewer of the two,
        ``o``, on which their rows overlap; the rest of the mass lies evenly over the other pairs of keys.
        """
        causal, index = branch.causal, jnp.arange(1, self.tokens + 1)
        seen = (index if causal else jnp.full_like(index, self.tokens)).astype(float)
        o, most = jnp.minimum(seen, seen[:, None]), jnp.maximum(seen, seen[:, None])
        fewer = o.astype(int) - 1
        turn = branch.turn(self.tokens)
        turned = fed * turn

        def below(gram: Gram) -> Gram:  # Σ over keys that queries i and i' see
            return jnp.cumsum(jnp.cumsum(gram, 0), 1) if causal else jnp.full_like(gram, jnp.sum(gram))

        def below_own(gram: Gram) -> jax.Array:  # its diagonal, without the rest: Grams are symmetric
            if not causal:
                return jnp.full(self.tokens, jnp.sum(gram))
            return jnp.cumsum(2 * jnp.sum(jnp.tril(gram, -1), 1) + self.powers(gram))

        def onto_keys(same: Gram, different: Gram) -> Gram:  # Σ over queries that see keys j = j', and j ≠ j'
            turned = [gram[::-1, ::-1] for gram in (same, different)]
            return self.join(below_own(turned[0])[::-1], below(turned[1])[::-1, ::-1])

        p = jnp.cumsum(self.powers(fed)) / index if causal else jnp.full(self.tokens, self.own(fed))
        pairs = jnp.maximum(seen * (seen - 1), 1)

        def apart(gram: Gram) -> jax.Array:  # p − c over the keys that a query sees
            return p - (below_own(gram) - seen * p) / pairs

        mean = self.own(fed)
        score = branch.score_gain(mean)
        s2 = score**2 * self.powers(fed) * apart(turned)
        K1, M3, M22 = softmax.looked_up(table, s2)
        columns = [v[fewer] for v in (K1, M3, M22, seen, jnp.maximum(seen - 1, 1), s2)]
        K2, D2, D1 = overlap()(*columns, self.cosines(fed) * turn)
        share = self.join(K1, o * K2 / most)
        scores = self.join(self.powers(D1), o * D2 / most) * apart(fed)[fewer]
        shared, rest = o, jnp.maximum(o * (most - 1), 1)

        traced = (jnp.cumsum(self.powers(fed)) if causal else jnp.full(self.tokens, jnp.sum(self.powers(fed))))[fewer]
        whole = below(fed)
        value, last = branch.value_gain(mean, inner), (branch.gain * outer) ** 2
        mixed = value * (share * traced / shared + (1 - share) * (whole - traced) / rest)
        factors = _hidden_norm(branch, self.powers(mixed))
        mixed = self.scaled(mixed, factors)

        def back(gradient: Gram) -> tuple[Gram, jax.Array]:
            upon = self.scaled(last * gradient, factors)
            values = onto_keys(upon * share / shared, upon * (1 - share) / rest)
            D = value * upon * scores
            queries = score * D * turn * (traced / shared - ((below(turned) if branch.rope else whole) - traced) / rest)
            keys = score * onto_keys(D / shared * turned, -D / rest * turned) * self.join(1.0, turn)
            through = score * (queries + keys)
            onto = value * values + through
            return onto, self.inner(gradient, mixed) + self.inner(_before(branch, inner, value * values, through), fed)

        return last * mixed, back
