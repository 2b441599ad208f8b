r"""The Jacobian of one residual block, whatever sits in its slots.

Claim. For x' = N_out(α x + β N_branch(f(N_in(x)))),

.. math::  J = D_{out}\,(\alpha I + \beta\, D_{branch}\, F\, D_{in}),

each D and F taken where its map is used; an empty slot is the identity. Post-norm fills the first, pre-norm the last,
and the gradient's two ways through a block, past the branch (α) and through it (β), are the two terms of the sum.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import sympy as sp

from gradflow.symbolic import derive
from gradflow.symbolic.index import contract, d, delta, gather, i, j, k, l, m, partial, total, vector
from gradflow.symbolic.residual import D_branch, D_in, D_out, F, alpha, beta, block_jacobian

# One map at a time: f answers a perturbation h with f_i(x + h) = f_i(x) + Σ_l F_il h_l. Here by hand for post-norm …
h, x = vector("h"), vector("x")
summed = alpha * h[i] + beta * total(F[i, l] * h[l], l)
answer = total(D_out[i, m] * summed.xreplace({i: m}), m)
by_hand = partial(answer, h[j])
assert contract(by_hand - block_jacobian(n_branch=False, n_in=False)) == 0
print("post-norm: J_ij =", by_hand)

# … and all eight fillings from the package, each against the matrix product that the claim writes.
for slots in itertools.product((False, True), repeat=3):
    n_out, n_branch, n_in = slots
    outer = D_out[i, k] if n_out else delta(i, k)
    after = D_branch[k, l] if n_branch else delta(k, l)
    before = D_in[m, j] if n_in else delta(m, j)
    claim = total(outer * (alpha * delta(k, j) + beta * total(after * F[l, m] * before, l, m)), k)
    assert contract(claim - block_jacobian(n_out=n_out, n_branch=n_branch, n_in=n_in)) == 0
print("all slots: J_ij =", block_jacobian())

# With RMSNorm at ε = 0 as the output norm, what arrives loses its part along u and is divided by rms(u): for a branch
# that returns nothing (F = 0) the block is α times that, and J u = 0.
u, r = vector("u"), sp.Symbol("r", positive=True)
norm = (delta(i, k) - u[i] * u[k] / (d * r**2)) / r
trunk = contract(block_jacobian(n_branch=False, n_in=False).xreplace({F[k, j]: sp.Integer(0)}))
assert trunk == alpha * D_out[i, j]
assert gather(total(alpha * norm * u[k], k), {total(u[k] ** 2, k): d * r**2}) == 0

# Exact: a bilinear branch has a rational derivative, so a block without norms is exact at any rational point.
for size in (3, 4, 5):
    entries = sp.Matrix(sp.symbols(f"x0:{size}", real=True))
    first = sp.Matrix(size, size, lambda a, b: a - 2 * b + 1)
    second = sp.Matrix(size, size, lambda a, b: (a * b) % 3)
    branch = sp.matrix_multiply_elementwise(first * entries, second * entries)
    block = sp.Rational(3, 2) * entries + sp.Rational(1, 4) * branch
    at = dict(zip(entries, (sp.Rational(a + 1, 3) for a in range(size)), strict=True))
    slope = sp.diag(*(second * entries)) * first + sp.diag(*(first * entries)) * second
    truth = block.jacobian(entries).subs(at)
    assert truth == sp.Rational(3, 2) * sp.eye(size) + sp.Rational(1, 4) * slope.subs(at)
print("exact at d = 3, 4, 5")

# Autodiff: pre-norm, post-norm and sandwich on one random tanh branch, in float64.
generator = np.random.default_rng(6)
weights, point = generator.normal(size=(5, 5)), generator.normal(size=5)


def layernorm(a: jax.Array) -> jax.Array:
    """LayerNorm with unit gain."""
    return (a - a.mean()) / jnp.sqrt(jnp.var(a) + 1e-5)


def branch_of(a: jax.Array) -> jax.Array:
    """One tanh layer."""
    return jnp.tanh(jnp.asarray(weights) @ a)


def identity(a: jax.Array) -> jax.Array:
    """An empty slot."""
    return a


with jax.enable_x64(True):
    for slots in ((1, 0, 0), (0, 0, 1), (0, 1, 1)):
        outer, after, before = (layernorm if used else identity for used in slots)
        a = jnp.asarray(point)
        seen = before(a)
        raw = branch_of(seen)
        whole = jax.jacfwd(lambda a, o=outer, n=after, b=before: o(1.3 * a + 0.7 * n(branch_of(b(a)))))(a)
        inner = jax.jacfwd(after)(raw) @ jax.jacfwd(branch_of)(seen) @ jax.jacfwd(before)(a)
        parts = jax.jacfwd(outer)(1.3 * a + 0.7 * after(raw)) @ (1.3 * jnp.eye(5) + 0.7 * inner)
        assert np.allclose(whole, parts, rtol=1e-12, atol=1e-13)

checks = derive("residual-block").check()
print(*checks, sep="\n")
assert all(check.passed for check in checks)
