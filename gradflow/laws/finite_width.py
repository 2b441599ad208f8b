"""The law with its 1/d term, and its spread over networks: schemes of one length norm, at the output or at the branch's input.

Leading order for every row is `gradflow.laws.leading`; the expressions are `gradflow.symbolic.depth`'s.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow.branches import Branch
from gradflow.laws.leading import Rows, distinct
from gradflow.numeric import to_jax
from gradflow.schemes import Multipliers
from gradflow.symbolic import depth as symbolic
from gradflow.symbolic import moments as gaussian

_NAMES = tuple(f.name for f in dataclasses.fields(symbolic.SublayerLaw))


@dataclasses.dataclass(frozen=True)
class Case:
    """A law's arguments, checked and resolved: the branches in turn, S values of each multiplier, d (∞: leading order)."""

    branches: tuple[Branch, ...]
    numbers: Multipliers
    output_norm: bool
    centred: float
    final: bool
    d: float
    tokens: int
    probes: float

    def moments(self, frozen: bool) -> dict[str, np.ndarray]:
        """Moments of β·f for every sub-layer, each of shape (S,); frozen: of the same branch with F = 0."""
        found = {name: np.empty(len(self.alpha)) for name in symbolic.MOMENTS}
        for k, branch in enumerate(self.branches):
            mine = slice(k, None, len(self.branches))
            scale, inner, outer = (a[mine] for a in self.numbers[2:])
            rows, where = distinct(scale**2, inner, outer)
            at = branch.moments() if np.all(rows == 1) else moments_of(branch, rows, where)
            at = at.scaled(self.beta[mine] ** 2)
            for name in found:
                found[name][mine] = getattr(gaussian.frozen(at) if frozen else at, name)
        return found

    @property
    def alpha(self) -> np.ndarray:
        """Skip multipliers, (S,)."""
        return self.numbers.alpha

    @property
    def beta(self) -> np.ndarray:
        """Branch multipliers, (S,)."""
        return self.numbers.beta


def moments_of(branch: Branch, rows: np.ndarray, where: np.ndarray) -> gaussian.BranchMoments:
    """A branch's moments at each distinct (power, inner, outer), put where they belong."""
    columns: list[Any] = [np.broadcast_to(leaf, len(rows))[where] for leaf in _moments_at(branch, rows)]
    return gaussian.BranchMoments(*columns)


@functools.partial(jax.jit, static_argnums=0)
def _moments_at(branch: Branch, rows: jax.Array) -> tuple:
    return jax.lax.map(lambda row: dataclasses.astuple(branch.moments_at(*row)), rows)


@functools.lru_cache
def _sublayer_law(output_norm: bool) -> Callable[..., tuple]:
    law = symbolic.output_norm() if output_norm else symbolic.input_norm()
    return to_jax(symbolic.SYMBOLS, dataclasses.astuple(law))


@functools.lru_cache
def _extras() -> tuple[Callable[..., tuple], Callable[..., tuple]]:
    return to_jax(symbolic.SYMBOLS, symbolic.response()), to_jax(symbolic.SYMBOLS, symbolic.outermost_norm())


def _recursion(
    output_norm: bool, final: bool, moments: Rows, alpha: jax.Array, d: Any, centred: Any
) -> tuple[Rows, tuple[jax.Array, ...]]:
    """Forward for the stream, backward for the gradient's share along it; all terms, and (Q, M, v_Q) at the end."""
    law, columns = _sublayer_law(output_norm), tuple(moments[name] for name in symbolic.MOMENTS)

    def terms_at(row: tuple, a: jax.Array, state: Sequence[Any], radial: Any) -> Rows:
        return dict(zip(_NAMES, law(*row, a, d, centred, *state, radial), strict=True))

    def forward(state: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        row, a = inputs
        terms = terms_at(row, a, state, 0.0)
        return tuple(jnp.asarray(terms[k], float) for k in ("next_Q", "next_mean", "next_var")), state

    def backward(radial: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        row, a, state = inputs
        return jnp.asarray(terms_at(row, a, state, radial)["next_radial"], float), radial

    start = (jnp.ones(()), jnp.zeros(()), jnp.zeros(()))
    last, states = jax.lax.scan(forward, start, (columns, alpha))
    first = jnp.asarray(0.0 if final else 1.0)  # a final norm leaves nothing along x
    _, radial = jax.lax.scan(backward, first, (columns, alpha, states), reverse=True)
    terms = {k: jnp.broadcast_to(v, alpha.shape) for k, v in terms_at(columns, alpha, states, radial).items()}
    return terms | {"Q": states[0], "radial": radial}, last


def _pooled(terms: Rows, tokens: Any, probes: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Shifts of log norm and log branch from pooling over tokens and cotangents, and the variance that is left.

    A pooled power averages before the log is taken, which gains half of the variance that it averages away.
    """
    shared, own, norm = terms["spread_shared"], terms["spread_own"], terms["shift_norm"]
    over_tokens, over_both = 1 - 1 / tokens, 1 - 1 / (tokens * probes)
    shift_norm = norm * over_tokens / 2
    shift = (shared * over_tokens + own * over_both) / 2
    return shift_norm, shift - shift_norm, shared * (1 - over_tokens) + own * (1 - over_both)


def _stream_noise(final: bool, moments: Rows, alpha: jax.Array, d: Any, centred: Any, terms: Rows, Q: Any) -> jax.Array:
    """Variance from the growing stream of an input-norm scheme, at one token: noise at a sub-layer moves every later gain."""
    states = (terms["Q"], jnp.zeros(()), jnp.zeros(()), terms["radial"])
    columns = [moments[name] for name in symbolic.MOMENTS]
    slope, noise, overlap = _extras()[0](*columns, alpha, d, centred, *states)
    tail = -1 / Q if final else jnp.zeros(())
    # what noise at each sub-layer does to all later log gains; one step on it is worth α²
    lag = jax.lax.scan(lambda r, row: (row[0] + row[1] ** 2 * r, r), tail, (slope, alpha), reverse=True)[1]
    return lag**2 * noise + 2 * lag * overlap


@functools.partial(jax.jit, static_argnums=(0, 1))
def _curve(
    output_norm: bool, final: bool, moments: Rows, alpha: jax.Array, d: Any, centred: Any, tokens: Any, probes: Any
) -> Rows:
    """`curve`, compiled whole: operation by operation it would be compiled so too, at every depth anew."""
    terms, last = _recursion(output_norm, final, moments, alpha, d, centred)
    shift_norm, shift_branch, variance = _pooled(terms, tokens, probes)
    outside = _extras()[1](*[0.0] * len(symbolic.MOMENTS), 0.0, d, centred, *last, 0.0)
    log_outer, *isotropic = map(jnp.asarray, outside)
    shares = [terms["aligned"], terms["along_mean"]]
    if output_norm:
        # A norm finds what the sub-layer above hands down; the last one an isotropic cotangent, or, behind a final norm,
        # what that left: nothing, as both have the same û.
        above = [jnp.zeros(())] * 2 if final else isotropic
        shares = [jnp.append(share[1:], value) for share, value in zip(shares, above, strict=True)]
    else:
        variance = variance + _stream_noise(final, moments, alpha, d, centred, terms, last[0]) / tokens
    rows = {
        "aligned": shares[0],
        "along_mean": shares[1],
        "norm": jnp.exp((terms["log_norm"] + shift_norm) / 2),
        "skip": jnp.abs(alpha),
        "branch": jnp.exp((terms["log_branch"] + shift_branch) / 2),
        "Q": terms["Q"],
        "q": moments["q"],
        "alpha": alpha,
    }
    if final:
        end = {
            "aligned": isotropic[0],
            "along_mean": isotropic[1],
            "norm": jnp.exp(log_outer / 2),
            "Q": last[0],
            "q": 0.0,
        }
        rows = {name: jnp.append(values, jnp.asarray(end.get(name, 1.0))) for name, values in rows.items()}
        variance = jnp.append(variance, 0.0)
    rows["projection"] = jnp.sqrt(1 - rows["aligned"] - rows["along_mean"])
    rows["sd"] = jnp.sqrt(jnp.append(jnp.cumsum(variance[::-1])[::-1], 0.0)) / 2
    return rows


def curve(case: Case, frozen: bool) -> dict[str, np.ndarray]:
    """Rows of one vector: the gradient, or the trunk where F is frozen; ``sd`` is that of the cumulative log gain."""
    of = (case.moments(frozen), case.alpha, case.d, case.centred, float(case.tokens), case.probes)
    return jax.tree.map(np.asarray, _curve(case.output_norm, case.final, *of))
