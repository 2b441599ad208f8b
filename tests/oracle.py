"""The oracle: formulas written out in jnp, a Python loop for depth, and plain autodiff for every derivative.

It shares gradflow's interface (``trace``, ``flow``), its weights, and none of its mathematics.
"""

import functools
import math
import types
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import sympy


def _rms(x):
    return jnp.sqrt(jnp.mean(x * x))


# name -> (what is divided, by how much), for one vector
NORMS = {
    "layernorm": (lambda x: x - jnp.mean(x), lambda x, eps: jnp.sqrt(jnp.var(x) + eps)),
    "rms": (lambda x: x, lambda x, eps: jnp.sqrt(jnp.mean(x * x) + eps)),
    "rms-outside": (lambda x: x, lambda x, eps: _rms(x) + eps),
    "unit": (lambda x: x, lambda x, eps: jnp.linalg.norm(x)),
}

ACTIVATIONS = {
    "linear": lambda z: z,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "erf": jax.scipy.special.erf,
    "softplus": jax.nn.softplus,
}

# the catalogue's schemes, as the papers write them
SCHEMES = {
    "post-ln": lambda N, f, x: N(x + f(x)),
    "pre-ln": lambda N, f, x: x + f(N(x)),
}


def params_at(weights, stack, block):
    """One block's parameters, a dict per branch."""
    piece = jax.tree.map(lambda leaf: leaf[block], weights.along_depth(stack))
    return weights.layer(stack, piece).params


def norm(name, eps, x):
    """N(x) for one vector, gain 1, bias 0."""
    top, length = NORMS[name]
    return top(x) / length(x, eps)


def attention(params, x, heads, causal=False, mask=None):
    """Multi-head attention, one head and one query at a time."""
    tokens, d = x.shape
    width, rows = d // heads, []
    for i in range(tokens):
        seen = [j for j in range(tokens) if (j <= i or not causal) and (mask is None or mask[j])]
        parts = []
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            q = params["w_q"][part] @ x[i] + (params["b_q"][part] if "b_q" in params else 0)
            k, v = (
                jnp.stack(
                    [params["w" + n][part] @ x[j] + (params["b" + n][part] if "b" + n in params else 0) for j in seen]
                )
                for n in ("_k", "_v")
            )
            score = jnp.exp(k @ q / width**0.5)
            parts.append(score @ v / score.sum())
        rows.append(params["w_o"] @ jnp.concatenate(parts) + params.get("b_o", 0))
    return jnp.stack(rows)


def branch(name, params, x, activation=None):
    """f(x) of the whole state, from the branch's name and weights."""
    if name.startswith("attention"):
        return attention(params, x, math.gcd(x.shape[1], 8), name.endswith("causal"))

    def token(x):
        if name == "linear":
            return params["w"] @ x
        if name == "bias":
            return params["b"]
        phi = activation or ACTIVATIONS[name.removeprefix("mlp:")]
        return params["w_out"] @ phi(params["w_in"] @ x)

    return jnp.stack([token(v) for v in x])


def part(a, whole):
    """a/whole, and 0 of nothing, as gradflow has it."""
    return a / whole if whole > 0 else jnp.zeros(())


def size(a):
    return jnp.linalg.norm(jnp.ravel(a))


def pooled_cosine(a):
    """Mean inner product of two different tokens over the mean square, by a double loop over tokens."""
    tokens = range(a.shape[-2])
    pairs = [jnp.sum(a[..., i, :] * a[..., k, :]) for i in tokens for k in tokens if i != k]
    return sum(pairs) / (len(pairs) / a.shape[-2]) / jnp.sum(a * a) if pairs else jnp.nan


@dataclass(frozen=True)
class Network:
    """The oracle's counterpart of ``stack`` with ``weights``; ``activation`` is a user's own φ as a function."""

    stack: Any
    weights: Any
    activation: Any = None

    def _norm(self, x):
        return jax.vmap(functools.partial(norm, self.stack.norm, self.stack.eps))(x)

    def _length(self, x):
        return jax.vmap(lambda v: NORMS[self.stack.norm][1](v, self.stack.eps))(x)

    def _slots(self):
        row = self.stack.scheme
        return [self._norm if slot else (lambda x: x) for slot in (row.norm_in, row.norm_branch, row.norm_out)]

    def _multipliers(self, s):
        l, S = sympy.symbols("l S", positive=True, integer=True)
        row = self.stack.scheme
        return [float(m.subs({l: s + 1, S: self.stack.sublayers})) for m in (row.alpha, row.beta)]

    def _branch(self, s):
        block, k = divmod(s, len(self.stack.block))
        params = params_at(self.weights, self.stack, block)[k]
        return lambda x: branch(self.stack.block[k].name, params, x, self.activation)

    def _added(self, s, x):
        n_in, n_branch, _ = self._slots()
        return self._multipliers(s)[1] * n_branch(self._branch(s)(n_in(x)))

    def sublayer(self, s, x, frozen=False):
        """x' of sub-layer ``s`` (from 0); frozen: F = 0."""
        added = self._added(s, x)
        added = jax.lax.stop_gradient(added) if frozen else added
        return self._slots()[2](self._multipliers(s)[0] * x + added)

    def run(self, x, frozen=False):
        """The whole network as one function."""
        for s in range(self.stack.sublayers):
            x = self.sublayer(s, x, frozen)
        return self._norm(x) if self.stack.final_norm else x

    def product(self, x):
        """The whole Jacobian by ``jax.jacfwd``; unless tokens mix, its blocks (tokens, d, d), and the others must vanish."""
        whole = jax.jacfwd(self.run)(x)
        if any(branch.name.startswith("attention") for branch in self.stack.block):
            return whole.reshape(*x.shape, x.size)
        own = jnp.stack([whole[i, :, i] for i in range(x.shape[0])])
        rest = whole - jnp.stack([whole[i] * (jnp.arange(x.shape[0]) == i)[None, :, None] for i in range(x.shape[0])])
        assert not jnp.any(rest)
        return own

    def pull(self, x, cotangents, frozen=False):
        """Cotangents (probes, tokens, d) at the output, sent to the input in one go."""
        return jax.vmap(lambda c: jax.vjp(functools.partial(self.run, frozen=frozen), x)[1](c)[0])(cotangents)

    def states(self, x):
        """x, u, added of every sub-layer, and out."""
        rows = []
        for s in range(self.stack.sublayers):
            added = self._added(s, x)
            rows.append((x, self._multipliers(s)[0] * x + added, added))
            x = self.sublayer(s, x)
        xs, us, added = map(jnp.stack, zip(*rows, strict=True))
        return types.SimpleNamespace(x=xs, u=us, added=added, out=x)

    def trace(self, x):
        """The states, and the product as ``basis``."""
        return types.SimpleNamespace(**vars(self.states(x)), basis=self.product(x))

    def _through(self, present, at, g):
        """Factors of one norm: P_t h is t·Jᵀh, by autodiff of the norm and its length."""
        if not present:
            return g, dict(affine=1.0, projection=1.0, norm=1.0, alignment=0.0, mean_component=0.0)
        out = jax.vmap(lambda c: jax.vjp(self._norm, at)[1](c)[0])(g)
        tangent = self._length(at)[:, None] * out
        y = jax.vmap(NORMS[self.stack.norm][0])(at)
        unit = y / jnp.linalg.norm(y, axis=1, keepdims=True)
        return out, dict(
            affine=part(size(g), size(g)),
            projection=part(size(tangent), size(g)),
            norm=part(size(out), size(tangent)),
            alignment=part(jnp.sqrt(jnp.sum(jnp.sum(g * unit, -1) ** 2)), size(g)),
            mean_component=part(jnp.sqrt(jnp.sum(jnp.sum(g, -1) ** 2 / g.shape[-1])), size(g)),
        )

    def _norm_row(self, present, at, g, w):
        out, row = self._through(present, at, g)
        trunk_out, trunk = self._through(present, at, w)
        return out, row | {
            "trunk_projection": trunk["projection"],
            "trunk_alignment": trunk["alignment"],
            "trunk_net": part(size(trunk_out), size(w)),
            "radius_gain": jnp.sqrt(jnp.mean(self._length(at) ** -2.0)) if present else 1.0,
            "gradient_cosine": pooled_cosine(g),
            "degenerate": 0,
        }

    def flow(self, x, cotangents):
        """Every factor of every sub-layer, from input to output, each by its definition."""
        ran, g, w, rows = self.states(x), cotangents, cotangents, []
        scheme = self.stack.scheme
        if self.stack.final_norm:
            out, row = self._norm_row(True, ran.out, g, w)
            neutral = dict(skip=1.0, branch=1.0, branch_return=0.0, stream_cosine=1.0, branch_rms=0.0)
            neutral |= {f"branch_{s}_{n}": 1.0 for s in ("in", "out") for n in ("affine", "projection", "norm")}
            figures = dict(
                stream_rms=_rms(ran.out),
                sum_rms=_rms(ran.out),
                token_cosine=pooled_cosine(ran.out),
                net=size(out) / size(g),
            )
            rows.append(row | neutral | figures)
            g = out
            w = jax.vmap(lambda c: jax.vjp(self._norm, ran.out)[1](c)[0])(w)
        for s in reversed(range(self.stack.sublayers)):
            (alpha, beta), at = self._multipliers(s), ran.x[s]
            out, row = self._norm_row(scheme.norm_out, ran.u[s], g, w)
            inner = self._slots()[0](at)
            f = self._branch(s)(inner)
            after, at_branch = self._through(scheme.norm_branch, f, beta * out)
            before = jax.vmap(lambda c, s=s, inner=inner: jax.vjp(self._branch(s), inner)[1](c)[0])(after)
            returned, at_in = self._through(scheme.norm_in, at, before)
            step = functools.partial(self.sublayer, s)
            back = jax.vmap(lambda c, step=step, at=at: jax.vjp(step, at)[1](c)[0])(g)
            trunk = functools.partial(step, frozen=True)
            w_back = jax.vmap(lambda c, trunk=trunk, at=at: jax.vjp(trunk, at)[1](c)[0])(w)
            skip = abs(alpha) if alpha else 1.0
            row |= {f"branch_out_{n}": at_branch[n] for n in ("affine", "projection", "norm")}
            row |= {f"branch_in_{n}": at_in[n] for n in ("affine", "projection", "norm")}
            row |= dict(
                skip=skip,
                branch=size(back) / (skip * size(out)),
                branch_return=size(returned) / size(out),
                net=size(back) / size(g),
                trunk_net=part(size(w_back), size(w)),
                stream_rms=_rms(at),
                branch_rms=_rms(ran.added[s]),
                sum_rms=_rms(ran.u[s]),
                stream_cosine=jnp.mean(jax.vmap(lambda a, b: a @ b / size(a) / size(b))(at, ran.u[s])),
                token_cosine=pooled_cosine(at),
            )
            rows.append(row)
            g, w = back, w_back
        rows = rows[::-1]
        return {name: jnp.asarray([row[name] for row in rows]) for name in rows[0]}
