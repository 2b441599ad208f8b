"""The depth law at leading order for every row of the catalogue: stream forward, gradient back, weight gradients."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sympy

from gradflow import dyt
from gradflow.branches import Branch, behind_norm
from gradflow.numeric import to_jax
from gradflow.schemes import Multipliers, Scheme
from gradflow.symbolic import depth as symbolic
from gradflow.symbolic import moments as gaussian

Rows = dict[str, jax.Array]
LENGTHS = ("layernorm", "rms")


@functools.lru_cache
def _formula() -> Callable[..., tuple]:
    law = symbolic.LeadingLaw()
    names = (symbolic.alpha, symbolic.beta, symbolic.sigma, symbolic.Q, symbolic.fed, symbolic.chi)
    slots = (symbolic.n_branch, symbolic.n_out, symbolic.d_in, symbolic.d_branch, symbolic.d_out)
    return to_jax((*names, *slots), (law.total, law.back, law.net, law.trunk, law.to_branch))


def norm_powers(norm: str, present: bool, power: Any) -> tuple[Any, Any]:
    """Power of a norm's output, and of its Jacobian, at an input of that power; an empty slot passes everything on."""
    if not present or norm == "none":
        return power, jnp.ones_like(power)
    if norm in LENGTHS:
        return jnp.ones_like(power), 1 / power
    at = gaussian.moments_at(dyt.FORMULA.subs({dyt.z: gaussian.z, dyt.a: sympy.Rational(str(dyt.A))}), 1.0)(power)
    return at.q, at.chi / power


@dataclass(frozen=True)
class Part:
    """Blocks of one placement. ``known``: the branch sees the same power at any stream, so that its moments are looked up."""

    scheme: Scheme
    branches: tuple[Branch, ...]
    norm: str

    @property
    def known(self) -> bool:
        """A length norm stands before every branch: its own, or the output norm of the sub-layer below."""
        return self.norm in LENGTHS and (self.scheme.norm_in or self.scheme.norm_out)


def branch_powers(branch: Branch, power: Any, inner: Any, outer: Any) -> tuple[Any, Any, Any]:
    """q, χ of x ↦ f(√power x), and the power of its weight gradients."""
    at = branch.moments_at(power, inner, outer)
    q, chi = (jnp.broadcast_to(m, jnp.shape(power)) for m in (at.q, at.chi))
    return q, chi, jnp.broadcast_to(branch.weight_power(power, inner, outer), jnp.shape(power))


@functools.partial(jax.jit, static_argnums=0)
def _moments(branch: Branch, rows: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: jnp.stack(branch_powers(branch, *row)), rows)


def distinct(*columns: Any) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of columns of one length, and where each row belongs; constant columns are not sorted."""
    table = np.stack([np.asarray(column) for column in columns], 1)
    varying = np.flatnonzero(np.any(table != table[:1], 0))
    if not varying.size:
        return table[:1], np.zeros(len(table), int)
    _, first, where = np.unique(table[:, varying].squeeze(), axis=0, return_index=True, return_inverse=True)
    return table[first], where.ravel()


def looked_up(branch: Branch, *columns: Any) -> np.ndarray:
    """`branch_powers` at every sub-layer, (3, S), each distinct (power, inner, outer) once."""
    rows, where = distinct(*columns)
    return np.asarray(_moments(branch, rows))[where].T


@functools.partial(jax.jit, static_argnums=0)
def _recursion(part: Part, start: jax.Array, numbers: Multipliers, moments: tuple) -> tuple[jax.Array, Rows]:
    """The blocks of one part; rows of shape (depth, len(block))."""
    row, norm, formula = part.scheme, part.norm, _formula()

    def block(Q: jax.Array, inputs: tuple) -> tuple[jax.Array, Rows]:
        numbers, moments = inputs
        rows = []
        for k, branch in enumerate(part.branches):
            alpha, beta, sigma, inner, outer = (column[k] for column in numbers)
            into, d_in = norm_powers(norm, row.norm_in, Q)
            power = sigma**2 * into
            q, chi, weights = [m[k] for m in moments] if moments else branch_powers(branch, power, inner, outer)
            n_branch, d_branch = norm_powers(norm, row.norm_branch, q)
            total = formula(alpha, beta, sigma, Q, power, chi, n_branch, 0.0, d_in, d_branch, 0.0)[0]
            n_out, d_out = norm_powers(norm, row.norm_out, total)
            _, back, net, trunk, to_branch = formula(
                alpha, beta, sigma, Q, power, chi, n_branch, n_out, d_in, d_branch, d_out
            )
            found = {"Q": Q, "added": beta**2 * n_branch, "total": total, "norm": d_out, "back": back, "net": net}
            rows.append(found | {"trunk": trunk, "weights": to_branch * weights, "alpha": alpha})
            Q = n_out
        return Q, jax.tree.map(lambda *leaves: jnp.stack(jnp.broadcast_arrays(*leaves)), *rows)

    return jax.lax.scan(block, start, (numbers, moments))


def leading(
    scheme: Scheme, numbers: Multipliers, branches: tuple[Branch, ...], depth: int, norm: str, final: bool
) -> dict[str, np.ndarray]:
    """Powers of every sub-layer by the scheme's ``numbers``, (S,), or (S + 1,) with a final norm, as NumPy arrays.

    ``Q`` the stream as it enters, ``added`` what the branch adds, ``total`` what an output norm sees, ``norm`` the power of its
    Jacobian, ``back`` that of αI + βF…, ``net``, ``trunk``; ``weights`` Σ‖dL/dW‖²/(‖g‖² d), g at the sub-layer's output.
    """
    numbers = Multipliers(*(np.asarray(a).reshape(depth, len(branches)) for a in numbers))
    Q, rows = np.ones(()), []
    for blocks, row in scheme.parts(depth):
        placed = behind_norm(branches) if row.norm_branch and norm in LENGTHS else branches
        part, mine = Part(row.shape, placed, norm), jax.tree.map(lambda leaf, blocks=blocks: leaf[blocks], numbers)
        moments: tuple = ()
        if part.known:
            into = mine.scale**2
            columns = [looked_up(b, into[:, k], mine.inner[:, k], mine.outer[:, k]) for k, b in enumerate(placed)]
            moments = tuple(np.stack(each, 1) for each in zip(*columns, strict=True))
        Q, found = _recursion(part, Q, mine, moments)
        rows.append({name: np.asarray(leaf).reshape(-1) for name, leaf in found.items()})
    out = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    if final:
        _, gain = norm_powers(norm, True, Q)
        last = {"Q": Q, "total": Q, "norm": gain, "net": gain, "trunk": gain, "added": 0.0, "weights": 0.0}
        out = {name: np.append(values, float(last.get(name, 1.0))) for name, values in out.items()}
    return out
