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
from gradflow.branches import Branch
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


def _branch(branch: Branch, power: Any, inner: Any, outer: Any) -> tuple[Any, Any, Any]:
    """q, χ of x ↦ f(√power x), and the power of its weight gradients."""
    hidden, last = inner**2 if getattr(branch, "inner", ()) else jnp.ones_like(inner), outer**2
    if getattr(branch, "linear_inside", False):  # the inner gain passes to the output as it is
        hidden, last = jnp.ones_like(inner), hidden * last
    at = branch.moments_at(power * hidden)
    q, chi = (jnp.broadcast_to(m * last, jnp.shape(power)) for m in (at.q, at.chi))
    return q, chi, jnp.broadcast_to(branch.weight_power(power, inner, outer), jnp.shape(power))


@functools.partial(jax.jit, static_argnums=0)
def _moments(branch: Branch, rows: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: jnp.stack(_branch(branch, *row)), rows, batch_size=256)


def looked_up(branch: Branch, *columns: jax.Array) -> tuple:
    """`_branch` at every sub-layer, each distinct (power, inner, outer) once."""
    table = np.stack([np.asarray(c) for c in columns], 1)
    if np.all(table == table[:1]):  # as most schemes have it: no need to sort a million rows
        rows, where = table[:1], np.zeros(len(table), int)
    else:
        rows, where = np.unique(table, axis=0, return_inverse=True)
    return tuple(jnp.asarray(np.asarray(_moments(branch, jnp.asarray(rows)))[where.ravel()].T))


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
            q, chi, weights = [m[k] for m in moments] if moments else _branch(branch, power, inner, outer)
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
    numbers = Multipliers(*(jnp.asarray(a).reshape(depth, len(branches)) for a in numbers))
    Q, rows = jnp.ones(()), []
    for blocks, row in scheme.parts(depth):
        part, mine = Part(row.shape, branches, norm), jax.tree.map(lambda leaf, blocks=blocks: leaf[blocks], numbers)
        moments: tuple = ()
        if part.known:
            into = mine.scale**2
            columns = [looked_up(b, into[:, k], mine.inner[:, k], mine.outer[:, k]) for k, b in enumerate(branches)]
            moments = tuple(jnp.stack(each, 1) for each in zip(*columns, strict=True))
        Q, found = _recursion(part, Q, mine, moments)
        rows.append({name: leaf.reshape(-1) for name, leaf in found.items()})
    out = {name: np.concatenate([np.asarray(row[name]) for row in rows]) for name in rows[0]}
    if final:
        _, gain = norm_powers(norm, True, Q)
        last = {"Q": Q, "total": Q, "norm": gain, "net": gain, "trunk": gain, "added": 0.0, "weights": 0.0}
        out = {name: np.append(values, float(last.get(name, 1.0))) for name, values in out.items()}
    return out
