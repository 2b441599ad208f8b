"""The oracle: formulas written out in NumPy, a Python loop for depth, and complex steps for every derivative.

It shares gradflow's interface (``trace``, ``flow``) and its weights, none of its mathematics, and no JAX. Every function takes
states (..., tokens, d), so that all directions of a derivative are one call: f(x + ih·v) has the imaginary part h·J v, to
rounding, as nothing is subtracted (Squire, Trapp 1998).
"""

import functools
import math
import types
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import scipy.special
import sympy

STEP = 1e-30


def _mean(x):
    return x.mean(-1, keepdims=True)


# name -> (what is divided, by how much), along the last axis; no conjugate anywhere, and JAX arrays pass too
NORMS = {
    "layernorm": (lambda x: x - _mean(x), lambda x, eps: (_mean((x - _mean(x)) ** 2) + eps) ** 0.5),
    "rms": (lambda x: x, lambda x, eps: (_mean(x * x) + eps) ** 0.5),
    "rms-outside": (lambda x: x, lambda x, eps: _mean(x * x) ** 0.5 + eps),
    "unit": (lambda x: x, lambda x, eps: (x * x).sum(-1, keepdims=True) ** 0.5),
}

ACTIVATIONS = {
    "linear": lambda z: z,
    "relu": lambda z: np.where(z.real > 0, z, 0),
    "gelu": lambda z: z * (1 + scipy.special.erf(z / 2**0.5)) / 2,
    "gelu_tanh": lambda z: z * (1 + np.tanh((2 / np.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "tanh": np.tanh,
    "erf": scipy.special.erf,
    "softplus": lambda z: np.log(1 + np.exp(z)),
}

# the catalogue's schemes, as the papers write them
SCHEMES = {
    "post-ln": lambda N, f, x: N(x + f(x)),
    "pre-ln": lambda N, f, x: x + f(N(x)),
    "sandwich": lambda N, f, x: x + N(f(N(x))),
    "res-post-norm": lambda N, f, x: x + N(f(x)),
    "deepnorm": lambda N, f, x: N(2**0.25 * x + f(x)),
    "admin-closed": lambda N, f, x: N((3 / np.log(3) - 1) ** 0.5 * x + f(x)),
    "layernorm-scaling": lambda N, f, x: x + f(N(x)),  # in the first block
    "residual-scaling": lambda N, f, x: x + f(N(x)) / 2**0.5,
    "layerscale": lambda N, f, x: x + 0.1 * f(N(x)),
    "rezero": lambda N, f, x: x,
    "skipinit": lambda N, f, x: x + f(x) / 2**0.5,
    "fixup": lambda N, f, x: x,
    "keel": lambda N, f, x: N(2 * x + f(N(x))),
    "ngpt": lambda N, f, x: N(x + 0.05 * (N(f(x)) - x)),
    "no-norm": lambda N, f, x: x + f(x),
}


def jacobian(f, x):
    """df/dx at ``x``, (*f(x).shape, *x.shape)."""
    x = np.asarray(x)
    steps = np.eye(x.size).reshape(x.size, *x.shape)
    out = f(x + 1j * STEP * steps).imag / STEP
    return np.moveaxis(out, 0, -1).reshape(*out.shape[1:], *x.shape)


def pull(f, x, cotangents):
    """Cotangents (..., *f(x).shape), sent to ``x`` in one go."""
    return np.tensordot(np.asarray(cotangents), jacobian(f, x), np.ndim(x))


def params_at(weights, stack, block):
    """One block's parameters, a dict per branch."""
    piece = jax.tree.map(lambda leaf: leaf[block], weights.along_depth(stack))
    return weights.layer(stack, piece).params


def norm(name, eps, x):
    """N(x) along the last axis, gain 1, bias 0."""
    top, length = NORMS[name]
    return top(x) / length(x, eps)


def turned(vector, position):
    """Halves paired, each pair turned by position · 10000^(−i/half)."""
    half = vector.shape[-1] // 2
    out = np.array(vector)
    for i in range(half):
        angle = position * 10_000.0 ** (-i / half)
        a, b = vector[..., i], vector[..., half + i]
        out[..., i], out[..., half + i] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return out


def attention(
    params, x, heads, causal=False, mask=None, rope=False, qk_norm=False, hidden=None, normed=lambda part: part
):
    """Multi-head attention, one head and one query at a time; ``normed`` acts on the queries, keys and values of a head,
    ``hidden`` names a norm before the last matrix; keys and values are a memory's where there is one.
    """
    (tokens, d), rows = x.shape[-2:], []
    asked = params.get("memory", x)
    width = d // heads

    def project(name, part, states):
        return states @ params["w" + name][part].T + (params["b" + name][part] if "b" + name in params else 0)

    for i in range(tokens):
        seen = [j for j in range(asked.shape[-2]) if (j <= i or not causal) and (mask is None or mask[j])]
        parts = []
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            q = normed(project("_q", part, x[..., i, :]))
            k, v = (normed(project(name, part, asked[..., seen, :])) for name in ("_k", "_v"))
            if qk_norm:
                q, k = (t / np.sqrt(np.mean(t * t, -1, keepdims=True)) for t in (q, k))
            if rope:
                q = turned(q, i)
                k = np.stack([turned(k[..., n, :], j) for n, j in enumerate(seen)], -2)
            score = np.exp((k * q[..., None, :]).sum(-1) / width**0.5)[..., None]
            parts.append((score * v).sum(-2) / score.sum(-2))
        mixed = np.concatenate(parts, -1)
        rows.append(project("_o", slice(None), norm(hidden, 0.0, mixed) if hidden else mixed))
    return np.stack(rows, -2)


def shifted(mix, x):
    """Each token's share of itself, and the rest of the one before."""
    before = np.concatenate([np.zeros_like(x[..., :1, :]), x[..., :-1, :]], -2)
    return mix * x + (1 - mix) * before


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def time_mix(params, x):
    """By its definition: at every token one sum over all up to it, and no recurrence."""
    r, k, v = (shifted(params[f"mix_{n}"], x) @ params[f"w_{n}"].T for n in "rkv")
    rows, fall = [], np.exp(params["decay"])
    for t in range(x.shape[-2]):
        age = t - 1 - np.arange(t + 1)[:, None]
        w = np.exp(k[..., : t + 1, :] + np.where(age < 0, params["first"], -age * fall))
        rows.append((w * v[..., : t + 1, :]).sum(-2) / w.sum(-2))
    return (sigmoid(r) * np.stack(rows, -2)) @ params["w_o"].T


def channel_mix(params, x):
    k, r = (shifted(params[f"mix_{n}"], x) @ params[f"w_{n}"].T for n in "kr")
    return sigmoid(r) * (np.where(k.real > 0, k, 0) ** 2 @ params["w_v"].T)


def branch(name, params, x, activation=None):
    """f(x) of the whole state, from the branch's name and weights."""
    name, hidden = next(
        ((name.removesuffix(f"+{n}"), n) for n in ("layernorm", "rms") if name.endswith(f"+{n}")), (name, "")
    )
    if name.startswith(("attention", "cross-attention")):
        options = {"causal": "causal" in name, "rope": "rope" in name, "qk_norm": "qk-norm" in name}
        return attention(params, x, math.gcd(x.shape[-1], 8), **options, hidden=hidden)
    if name in ("time-mix", "channel-mix"):
        return {"time-mix": time_mix, "channel-mix": channel_mix}[name](params, x)
    if name == "linear":
        return x @ params["w"].T
    if name == "bias":
        return np.broadcast_to(params["b"], x.shape)
    kind, _, phi = name.partition(":")
    phi = activation or ACTIVATIONS[phi]
    biases = [params.get(f"b_{part}", 0) for part in ("in", "gate", "out")]
    gate = x @ params["w_gate"].T + biases[1] if kind == "glu" else 1
    h = phi(x @ params["w_in"].T + biases[0]) * gate
    return (norm(hidden, 0.0, h) if hidden else h) @ params["w_out"].T + biases[2]


def part(a, whole):
    """a/whole, and 0 of nothing, as gradflow has it."""
    return a / whole if whole > 0 else 0.0


def size(a):
    return np.linalg.norm(np.ravel(a))


def rms(x):
    return np.sqrt(np.mean(x * x))


def pooled_cosine(a):
    """Mean inner product of two different tokens over the mean square, by a double loop over tokens."""
    tokens = range(a.shape[-2])
    pairs = [np.sum(a[..., i, :] * a[..., k, :]) for i in tokens for k in tokens if i != k]
    return sum(pairs) / (len(pairs) / a.shape[-2]) / np.sum(a * a) if pairs else np.nan


@dataclass(frozen=True)
class Network:
    """The oracle's counterpart of ``stack`` with ``weights``; ``activation`` is a user's own φ as a function."""

    stack: Any
    weights: Any
    activation: Any = None

    def _norm(self, x):
        return norm(self.stack.norm, self.stack.eps, x)

    def _length(self, x):
        return NORMS[self.stack.norm][1](x, self.stack.eps)

    def _row(self, s):
        """The scheme that holds at a sub-layer."""
        row, block = self.stack.scheme, s // len(self.stack.block)
        return row if row.then is None or block < float(row.until) * self.stack.depth else row.then

    def _slots(self, s):
        row = self._row(s)
        scale = self._multipliers(s)[2]
        slots = [self._norm if slot else (lambda x: x) for slot in (row.norm_in, row.norm_branch, row.norm_out)]
        return [lambda x: scale * self._norm(x), *slots[1:]] if row.norm_in else slots

    def _multipliers(self, s):
        l, S, b = sympy.symbols("l S b", positive=True, integer=True)
        row, at = self._row(s), {l: s + 1, S: self.stack.sublayers, b: s // len(self.stack.block) + 1}
        return [float(m.subs(at)) for m in (row.alpha, row.beta, row.scale)]

    @functools.cached_property
    def _params(self):
        blocks = [params_at(self.weights, self.stack, block) for block in range(self.stack.depth)]
        return jax.tree.map(np.asarray, [params for block in blocks for params in block])

    def _branch(self, s):
        name = self.stack.block[s % len(self.stack.block)].name
        return functools.partial(branch, name, self._params[s], activation=self.activation)

    def _added(self, s, x):
        n_in, n_branch, _ = self._slots(s)
        return self._multipliers(s)[1] * n_branch(self._branch(s)(n_in(x)))

    def sublayer(self, s, x, frozen=False):
        """x' of sub-layer ``s`` (from 0); frozen: F = 0."""
        added = self._added(s, x)
        return self._slots(s)[2](self._multipliers(s)[0] * x + (added.real if frozen else added))

    def run(self, x, frozen=False):
        """The whole network as one function."""
        for s in range(self.stack.sublayers):
            x = self.sublayer(s, x, frozen)
        return self._norm(x) if self.stack.final_norm else x

    def product(self, x):
        """The whole Jacobian; unless tokens mix, its blocks (tokens, d, d), and the others must vanish."""
        whole = jacobian(self.run, x)
        if any(branch.name.startswith("attention") for branch in self.stack.block):
            return whole.reshape(*x.shape, x.size)
        tokens = range(x.shape[0])
        assert not any(np.any(whole[i, :, j]) for i in tokens for j in tokens if i != j)
        return np.stack([whole[i, :, i] for i in tokens])

    def states(self, x):
        """x, u, added of every sub-layer, and out."""
        rows, x = [], np.asarray(x)
        for s in range(self.stack.sublayers):
            added = self._added(s, x)
            rows.append((x, self._multipliers(s)[0] * x + added, added))
            x = self.sublayer(s, x)
        xs, us, added = map(np.stack, zip(*rows, strict=True))
        return types.SimpleNamespace(x=xs, u=us, added=added, out=x)

    def trace(self, x):
        """The states, and the product as ``basis``."""
        return types.SimpleNamespace(**vars(self.states(x)), basis=self.product(x))

    def _through(self, present, at, g, scale=1.0):
        """Factors of one norm of gain ``scale``: P_t h is t·Jᵀh, by the derivative of the norm and its length."""
        if not present:
            return g, dict(affine=1.0, projection=1.0, norm=1.0, alignment=0.0, mean_component=0.0)
        out, factors = self._through(True, at, scale * g) if scale != 1 else (None, None)
        if factors:
            return out, factors | {"affine": abs(scale)}
        out = pull(self._norm, at, g)
        tangent = self._length(at) * out
        y = NORMS[self.stack.norm][0](at)
        unit = y / np.linalg.norm(y, axis=-1, keepdims=True)
        return out, dict(
            affine=part(size(g), size(g)),
            projection=part(size(tangent), size(g)),
            norm=part(size(out), size(tangent)),
            alignment=part(size(np.sum(g * unit, -1)), size(g)),
            mean_component=part(size(np.sum(g, -1)) / g.shape[-1] ** 0.5, size(g)),
        )

    def _norm_row(self, present, at, g, w):
        out, row = self._through(present, at, g)
        trunk_out, trunk = self._through(present, at, w)
        return out, row | {
            "trunk_projection": trunk["projection"],
            "trunk_alignment": trunk["alignment"],
            "trunk_net": part(size(trunk_out), size(w)),
            "radius_gain": rms(1 / self._length(at)) if present else 1.0,
            "gradient_cosine": pooled_cosine(g),
            "degenerate": 0,
        }

    def flow(self, x, cotangents):
        """Every factor of every sub-layer, from input to output, each by its definition."""
        cotangents = np.asarray(cotangents)
        ran, g, w, rows = self.states(x), cotangents, cotangents, []
        if self.stack.final_norm:
            out, row = self._norm_row(True, ran.out, g, w)
            neutral = dict(skip=1.0, branch=1.0, branch_return=0.0, stream_cosine=1.0, branch_rms=0.0)
            neutral |= {f"branch_{s}_{n}": 1.0 for s in ("in", "out") for n in ("affine", "projection", "norm")}
            figures = dict(
                stream_rms=rms(ran.out),
                sum_rms=rms(ran.out),
                token_cosine=pooled_cosine(ran.out),
                net=size(out) / size(g),
            )
            rows.append(row | neutral | figures)
            g, w = out, pull(self._norm, ran.out, w)
        for s in reversed(range(self.stack.sublayers)):
            (alpha, beta, scale), at, scheme = self._multipliers(s), ran.x[s], self._row(s)
            out, row = self._norm_row(scheme.norm_out, ran.u[s], g, w)
            inner = self._slots(s)[0](at)
            after, at_branch = self._through(scheme.norm_branch, self._branch(s)(inner), beta * out)
            before = pull(self._branch(s), inner, after)
            returned, at_in = self._through(scheme.norm_in, at, before, scale)
            back = pull(functools.partial(self.sublayer, s), at, g)
            w_back = pull(functools.partial(self.sublayer, s, frozen=True), at, w)
            skip = abs(alpha) if alpha else 1.0
            row |= {f"branch_out_{n}": at_branch[n] for n in ("affine", "projection", "norm")}
            row |= {f"branch_in_{n}": at_in[n] for n in ("affine", "projection", "norm")}
            row |= dict(
                skip=skip,
                branch=size(back) / (skip * size(out)),
                branch_return=size(returned) / size(out),
                net=size(back) / size(g),
                trunk_net=part(size(w_back), size(w)),
                stream_rms=rms(at),
                branch_rms=rms(ran.added[s]),
                sum_rms=rms(ran.u[s]),
                stream_cosine=np.mean([a @ b / size(a) / size(b) for a, b in zip(at, ran.u[s], strict=True)]),
                token_cosine=pooled_cosine(at),
            )
            rows.append(row)
            g, w = back, w_back
        rows = rows[::-1]
        found = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
        return found | {"input_gradient_cosine": pooled_cosine(g)}
