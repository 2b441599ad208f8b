"""Compact: J = e^s·diag(D)·(I − E T⁻¹ Gᵀ), a product of identities with low-rank corrections, in O(d R²) instead of O(L d³).

A norm's Jacobian is diag(γ)·(1/t)·(I − E Eᵀ) with one column ŷ√(κ/d) for its direction, and one 1/√d where it centres; a branch
of rank r adds r columns on either side. In a product the columns stand side by side and interact through their Gram alone:

    (I − E_L G_Lᵀ) … (I − E₁ G₁ᵀ) = I − E T⁻¹ Gᵀ,     T = I + GᵀE where the row's factor is the later one

(by induction: multiplying from the left by I − egᵀ appends e to E, g to G, and the rows gᵀE to T). Gains γ are taken to the
left, as (I − EGᵀ)·P = P·(I − (E/P)(PG)ᵀ), so none may be zero.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow.jacobian import SublayerJacobian
from gradflow.norms import AnyJacobian, Norm, NormJacobian
from gradflow.spectra.network import Network
from gradflow.stack import Stack

Edges = tuple[Float[Array, "r d"], Float[Array, "r d"]]  # the columns of E and G, as rows


class LowRank(NamedTuple):
    """sign · e^log_scale · diag(D)·(I − E T⁻¹ Gᵀ), of one token.

    Attributes
    ----------
    diagonal : (d,)
        D, the product of all γ over its largest entry.
    left, right : (R, d)
        Eᵀ and Gᵀ.
    triangle : (R, R)
        T.
    log_scale, sign : ()
    """

    diagonal: Float[Array, " d"]
    left: Float[Array, "R d"]
    right: Float[Array, "R d"]
    triangle: Float[Array, "R R"]
    log_scale: Array
    sign: Array

    def mv(self, v: Float[Array, " d"]) -> Float[Array, " d"]:
        """The matrix times v, without e^log_scale."""
        inner = jax.scipy.linalg.solve_triangular(self.triangle, self.right @ v, lower=True, unit_diagonal=True)
        return self.sign * self.diagonal * (v - inner @ self.left)

    @property
    def dense(self) -> Float[Array, "d d"]:
        """The matrix, without its scale and sign."""
        inner = jax.scipy.linalg.solve_triangular(self.triangle, self.right, lower=True, unit_diagonal=True)
        return self.diagonal[:, None] * (jnp.eye(self.diagonal.size, dtype=self.left.dtype) - self.left.T @ inner)


@jax.jit
def times(tokens: LowRank, log_scale: Any, v: Float[Array, "m tokens d"]) -> Float[Array, "m tokens d"]:
    """The whole matrix over e^log_scale times every v; ``tokens`` has its blocks stacked."""
    own = jnp.exp(tokens.log_scale - log_scale)[:, None]
    return jax.lax.map(lambda one: own * jax.vmap(LowRank.mv)(tokens, one), v)


def columns(network: Network) -> int | None:
    """R, the columns of E over the whole depth; ``None`` where the product is not of that form."""
    stack = network.model
    if not isinstance(stack, Stack) or not network.blocks or stack.norm == "dyt" or not _invertible(network):
        return None
    own = _norm_rank(stack) if stack.scheme.slots[2] else 0
    found = [0] * len(stack.block)
    if network.path == "exact":
        if not all(hasattr(branch, "factors") for branch in stack.block):
            return None
        params, x = network.first().params, network.x[0]
        shapes = (jax.eval_shape(b.factors, p, x)[0] for b, p in zip(stack.block, params, strict=True))  # type: ignore[attr-defined]
        found = [shape.shape[1] for shape in shapes]
    last = _norm_rank(stack) if stack.final_norm else 0
    return (sum(found) + own * len(found)) * stack.depth + last


def _invertible(network: Network) -> bool:
    """Whether every sub-layer has an identity path with α ≠ 0 and γ ≠ 0, and one placement holds along depth."""
    stack: Any = network.model
    weights: Any = network.weights
    gains = [norm.gain for norm in outer_norms(weights) if isinstance(norm, Norm)]
    return (
        len(stack.parts()) == 1
        and bool(np.all(weights.multipliers(stack).alpha != 0))
        and all(np.all(g) for g in gains)
    )


def outer_norms(weights: Any) -> list[Any]:
    """The learned norms on the identity path, each over all blocks; none where they have unit gain."""
    learned = getattr(weights, "norms", None) or ()
    return [slots[2] for slots in learned] + [getattr(weights, "last", None)]


def _norm_rank(stack: Stack) -> int:
    return {"none": 0, "layernorm": 2}.get(stack.norm, 1)


class _Walk(NamedTuple):
    """What goes along depth: the running product of gains over its largest entry, and the rest of the scale."""

    gains: Float[Array, " d"]
    log_scale: Array
    sign: Array

    def edges(self, left: Float[Array, "r d"], right: Float[Array, "r d"]) -> Edges:
        """E/P and P·G."""
        return left / self.gains, right * self.gains

    def times(self, factor: Array) -> "_Walk":
        """A number taken out."""
        return self._replace(log_scale=self.log_scale + jnp.log(jnp.abs(factor)), sign=self.sign * jnp.sign(factor))

    def gained(self, gain: Float[Array, " d"]) -> "_Walk":
        """diag(γ) times this."""
        product = self.gains * gain
        size = jnp.max(jnp.abs(product))
        return self._replace(gains=product / size, log_scale=self.log_scale + jnp.log(size))


def _through(norm: NormJacobian, token: int, walk: _Walk) -> tuple[_Walk, list[Edges]]:
    """A norm's Jacobian at one token."""
    own = norm.direction[token] * jnp.sqrt(norm.removed[token] / norm.gain.size)
    rows = jnp.stack([own] + ([jnp.full_like(own, own.size**-0.5)] if norm.centred else []))
    return walk.times(norm.scale[token]).gained(norm.gain), [walk.edges(rows, rows)]


def _at(norm: Any, token: int) -> Any:
    """One token's Jacobian of a batch; the gain is common to all."""
    pick = jax.tree.map(lambda leaf: leaf[token] if leaf.ndim else leaf, norm)
    return type(norm)(**{**vars(pick), "gain": norm.gain})


def _branch(step: SublayerJacobian, token: int, walk: _Walk) -> list[Edges]:
    """(β/α) DN_branch U Vᵀ DN_in, as columns."""
    left, right = step.branch.factors(step.params, step.fed[token])  # type: ignore[attr-defined]
    if not left.shape[1]:
        return []

    def passed(norm: AnyJacobian | None, columns: Array, transposed: bool) -> Array:
        if norm is None:
            return columns
        one = _at(norm, token)
        return jax.vmap(one.rmv if transposed else one.mv, -1, -1)(columns)

    left = -step.beta / step.alpha * passed(step.norm_branch, left, False)
    return [walk.edges(left.T, passed(step.norm_in, right, True).T)]


@functools.partial(jax.jit, static_argnums=1)
def low_rank(network: Network, token: int) -> LowRank:
    """The whole product of one token; memory is O(d R)."""
    stack, weights = network.model, network.weights
    assert isinstance(stack, Stack)
    assert weights is not None

    def block(part: Stack, carry: tuple, inputs: tuple) -> tuple[tuple, Edges]:
        x, walk = carry
        piece, alphas, betas = inputs
        layer, found = weights.layer(part, piece), []
        for k in range(len(stack.block)):
            step = stack.sublayer(layer, k, alphas[k], betas[k], x)
            found += [] if network.path == "trunk" else _branch(step, token, walk)
            walk = walk.times(step.alpha)
            if step.norm_out is not None:
                walk, edges = _through(step.norm_out, token, walk)  # type: ignore[arg-type]
                found += edges
            x = step.out
        sizes[:] = [len(edge[0]) for edge in found]
        return (x, walk), _side_by_side(found, x)

    dtype, sizes = network.x.dtype, []
    start = _Walk(jnp.ones(stack.d, dtype), jnp.zeros((), dtype), jnp.ones((), dtype))
    inputs = (weights.along_depth(stack), *weights.multipliers(stack)[:2])
    (x, walk), edges = stack.over_depth(block, (network.x, start), inputs)
    found = [tuple(side.reshape(-1, stack.d) for side in edges)]
    last = weights.final(stack) if stack.final_norm else None
    if last is not None:
        walk, ends = _through(last.jacobian(x), token, walk)  # type: ignore[arg-type]
        found += ends
    left, right = _side_by_side(found, x)
    sizes = sizes * stack.depth + ([] if last is None else [len(found[-1][0])])
    factor = np.repeat(np.arange(len(sizes)), sizes)  # which factor of the product a column belongs to
    triangle = jnp.eye(len(left), dtype=dtype) + jnp.where(factor[:, None] > factor, right @ left.T, 0)
    return LowRank(walk.gains, left, right, triangle, walk.log_scale, walk.sign)


def _side_by_side(edges: list[Any], x: Array) -> Edges:
    if not edges:
        return jnp.zeros((0, x.shape[-1]), x.dtype), jnp.zeros((0, x.shape[-1]), x.dtype)
    left, right = zip(*edges, strict=True)
    return jnp.concatenate(left), jnp.concatenate(right)


@functools.partial(jax.jit, static_argnums=(1, 2))
def spectrum(found: LowRank, plain: bool, alike: bool) -> Float[Array, " d"]:
    """All singular values, descending, without the scale.

    Parameters
    ----------
    plain : bool
        Whether D is one number. Then an orthonormal basis Q of [E, G] = Q [R_E, R_G] holds all that is not D: the singular
        values of D·(I − R_E T⁻¹ R_Gᵀ), and D for every direction outside. Else those of the matrix itself.
    alike : bool
        Whether E and G span the same (no branch): Q then has half the columns.
    """
    rows, d = found.left.shape
    wide = rows if alike else 2 * rows
    if not plain or wide >= d:
        return jnp.linalg.svd(found.dense, compute_uv=False)
    both = found.left if alike else jnp.concatenate([found.left, found.right])
    triangle = jnp.linalg.qr(both.T, mode="r")
    left, right = (triangle, triangle) if alike else (triangle[:, :rows], triangle[:, rows:])
    inner = jax.scipy.linalg.solve_triangular(found.triangle, right.T, lower=True, unit_diagonal=True)
    size = jnp.abs(found.diagonal[0])
    core = size * jnp.linalg.svd(jnp.eye(wide, dtype=left.dtype) - left @ inner, compute_uv=False)
    return jnp.sort(jnp.concatenate([core, jnp.full(d - wide, size)]), descending=True)
