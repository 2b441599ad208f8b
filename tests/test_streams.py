"""Schemes of several residual streams: each against its paper's equation by hand, its definitions, and the law's networks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from networks import name, normal
from oracle import params_at
from refusals import refused

import gradflow
from gradflow.branches import branch_of
from gradflow.comparing.comparisons import compare, figures
from gradflow.factors import FACTORS
from gradflow.flow import flow as ordinary_flow
from gradflow.product import identity
from gradflow.profiles import labels
from gradflow.schemes import l, scheme_of
from gradflow.stack import Drawn, Given, Stack
from gradflow.streams import (
    STREAM_SCHEMES,
    Place,
    StreamScheme,
    Written,
    any_scheme,
    composite,
    hyper_connections,
    manifold,
    sinkhorn,
)
from gradflow.streams.flow import flow
from gradflow.streams.stack import StreamStack

TOKENS, WIDTH, EPS, DEPTH = 2, 12, 1e-3, 2  # 12: four heads of width 3, the least that a LayerNorm on Q, K, V can have
BLOCK = ("attention", "mlp:tanh")
rows = pytest.mark.parametrize(
    "row",
    [r if r.name in ("hybridnorm", "mhc") else pytest.param(r, marks=pytest.mark.slow) for r in STREAM_SCHEMES],
    ids=name,
)


# --- the papers' equations -----------------------------------------------------------------------------------------------


def parallel(N, blocks, x, _):
    for attn, mlp in blocks:
        x = x + attn(N(x)) + mlp(N(x))
    return x


def b2t(N, blocks, x, _):
    for attn, mlp in blocks:
        middle = N(x + attn(x))
        x = N(x + middle + mlp(middle))
    return x


def hybridnorm(N, blocks, x, _):
    for attn, mlp in blocks:
        y = x + attn(x)
        x = N(y) + mlp(N(y))
    return x


def residual(N, blocks, x, _):
    dual = x
    for f in (f for block in blocks for f in block):
        added = f(x)
        dual, x = dual + added, N(x + added)
    return x + N(dual)


def hyper(N, blocks, x, numbers):
    n, streams = numbers.pre.shape[1], [x] * numbers.pre.shape[1]
    for s, f in enumerate(f for block in blocks for f in block):
        R, read, write = (part[s] for part in numbers)
        added = f(N(sum(read[i] * streams[i] for i in range(n))))
        streams = [sum(R[i, j] * streams[j] for j in range(n)) + write[i] * added for i in range(n)]
    return sum(streams) / n


PAPERS = {"hyper-connections": hyper, "mhc": hyper} | {f.__name__: f for f in (parallel, b2t, hybridnorm, residual)}


class Case:
    """One row's network by both roads; x64 must be on."""

    def __init__(self, row):
        self.row, final = row, row.name in ("residual", "mhc", "parallel")
        self.stack = StreamStack.make(row, BLOCK, DEPTH, WIDTH, norm="layernorm", eps=EPS, final_norm=final)
        self.weights, self.x = Drawn(jax.random.key(7)), normal(1, TOKENS, WIDTH)
        self.cotangents = normal(2, 2, TOKENS, WIDTH)
        self.N = functools.partial(oracle.norm, "layernorm", EPS)

    @functools.cached_property
    def trace(self):
        return self.stack.trace(self.weights, self.x, identity(self.stack, TOKENS))

    @functools.cached_property
    def flow(self):
        return flow(self.stack, self.weights, self.trace, self.cotangents)

    def branches(self, frozen):
        """Attention and MLP of every block; frozen: without a derivative."""
        normed = self.N if self.row.qkv_norm else (lambda part: part)

        def one(kind, params):
            def f(x):
                out = (
                    oracle.attention(params, x, 4, normed=normed)
                    if kind == "attention"
                    else oracle.branch(kind, params, x)
                )
                return out.real if frozen else out

            return f

        found = []
        for block in range(DEPTH):
            params = jax.tree.map(np.asarray, params_at(self.weights, self.stack, block))
            if self.row.joined:  # by hand: the first part's matrices are named 0, the second's 1
                params = [{k.replace(f"{i}:", ""): v for k, v in params[0].items() if f"{i}:" in k} for i in (0, 1)]
            found.append([one(kind, each) for kind, each in zip(BLOCK, params, strict=True)])
        return found

    def run(self, x, frozen=False):
        """The paper's network as one function."""
        out = PAPERS[self.row.name](self.N, self.branches(frozen), x, self.row.numbers(2 * DEPTH))
        return self.N(out) if self.stack.final_norm else out


@functools.cache
def case(row):
    return Case(row)


def close(left, right, rtol=1e-11):
    right = np.asarray(right)
    np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol * np.abs(right).max(initial=0))


@pytest.mark.slow
@rows
@pytest.mark.usefixtures("x64")
def test_product_is_the_jacobian_of_the_papers_network(row):
    c = case(row)
    whole = oracle.jacobian(c.run, c.x)
    close(np.asarray(c.trace.basis) * 2.0 ** int(c.trace.exponent), whole.reshape(TOKENS, WIDTH, TOKENS * WIDTH))


@pytest.mark.repeats
@rows
@pytest.mark.usefixtures("x64")
def test_exact_and_trunk_are_the_cotangents_pulled_back_and_net_the_product_of_factors(row):
    c = case(row)
    sent = np.asarray(c.cotangents)
    for figure, frozen in (("net", False), ("trunk_net", True)):
        pulled = oracle.pull(functools.partial(c.run, frozen=frozen), c.x, sent)
        close(np.prod(c.flow[figure]), np.linalg.norm(pulled) / np.linalg.norm(sent))
    np.testing.assert_allclose(c.flow["net"], np.prod([c.flow[f] for f in FACTORS], axis=0), rtol=1e-14)
    assert len(c.flow["net"]) == len(labels(c.stack))


@pytest.mark.parametrize("row", [any_scheme("b2t"), any_scheme("mhc")], ids=name)
@pytest.mark.usefixtures("x64")
def test_every_factor_is_its_definition(row):
    """Sub-layer by sub-layer with dense matrices over (streams, tokens, d)."""
    c, n = case(row), row.streams
    numbers, branches = row.numbers(2 * DEPTH), [f for block in c.branches(False) for f in block]
    first = 1 + 2 * DEPTH + 1 + c.stack.final_norm  # rows: expand, sub-layers, readout, final norm
    assert len(c.flow["net"]) == first
    out = np.asarray(c.trace.out)
    g = np.asarray(c.cotangents)
    g = oracle.pull(c.N, out, g) if c.stack.final_norm else g
    g = np.einsum("a,pij->paij", row.readout, g)
    for s in reversed(range(2 * DEPTH)):
        place, x = row.place(s % 2), np.asarray(c.trace.x[s])
        R, read, write = (part[s] for part in numbers)

        def norm_out(u, place=place):
            return np.stack([c.N(u[..., i, :, :]) if place.norm_out[i] else u[..., i, :, :] for i in range(n)], -3)

        def added(x, s=s, place=place, read=read):
            seen = np.einsum("a,...aij->...ij", read, x)
            return branches[s](c.N(seen) if place.norm_in else seen)

        def summed(x, R=R, write=write, added=added):
            return np.einsum("ab,...bij->...aij", R, x) + np.einsum("a,...ij->...aij", write, added(x))

        v = oracle.pull(norm_out, summed(x), g)
        kept, back = np.einsum("ab,paij->pbij", R, v), oracle.pull(summed, x, v)
        size, u = np.linalg.norm, summed(x)
        at = 1 + s
        alive = [a for a in range(n) if np.any(u[a])]
        truth = {
            "norm": size(v) / size(g) / c.flow["projection"][at],
            "skip": size(kept) / size(v),
            "branch": size(back) / size(kept),
            "branch_return": size(back - kept) / size(v),
            "net": size(back) / size(g),
            "stream_rms": oracle.rms(x[[a for a in range(n) if np.any(x[a])]]),
            "sum_rms": oracle.rms(u[alive]),
            "kept_rms": oracle.rms(np.einsum("ab,bij->aij", R, x)[alive]),
            "branch_rms": oracle.rms(np.einsum("a,ij->aij", write, added(x))[alive]),
        }
        for figure, value in truth.items():
            np.testing.assert_allclose(c.flow[figure][at], value, rtol=1e-10, err_msg=f"{figure} {s}")
        g = back
    np.testing.assert_allclose(c.flow["skip"][0], size(np.einsum("a,paij->pij", row.expand, g)) / size(g), rtol=1e-10)


def single(scheme):
    """An ordinary row as one of one stream."""
    place = Place(scheme.norm_in, scheme.norm_branch, (scheme.norm_out,))
    numbers = Written((((scheme.alpha,),),), ((1,),), ((scheme.beta,),))
    return StreamScheme(scheme.name, "test", "", scheme.equation, numbers, (place,))


@pytest.mark.repeats
@pytest.mark.parametrize("scheme", ["post-ln", "sandwich", "ngpt"])
@pytest.mark.usefixtures("x64")
def test_one_stream_is_the_ordinary_stack(scheme):
    options = {"norm": "layernorm", "eps": EPS, "final_norm": True}
    plain = Stack.make(scheme, BLOCK, DEPTH, WIDTH, **options)
    stack = StreamStack.make(single(scheme_of(scheme)), BLOCK, DEPTH, WIDTH, **options)
    weights, x, sent = Drawn(jax.random.key(7)), normal(1, TOKENS, WIDTH), normal(2, 2, TOKENS, WIDTH)
    a, b = (s.trace(weights, x) for s in (plain, stack))
    close(b.out, a.out, 1e-14)
    truth, found = ordinary_flow(plain, weights, a, sent), flow(stack, weights, b, sent)
    assert set(found) == {*truth, "kept_rms"}
    for figure, values in truth.items():
        np.testing.assert_allclose(found[figure], values, rtol=1e-12, atol=1e-13, err_msg=figure)


@pytest.mark.usefixtures("x64")
def test_hyper_connections_start_as_pre_ln():
    c = case(any_scheme("hyper-connections"))
    plain = Stack.make("pre-ln", BLOCK, DEPTH, WIDTH, norm="layernorm", eps=EPS)
    truth = plain.trace(c.weights, c.x, identity(plain, TOKENS))
    close(*(np.asarray(t.basis) * 2.0 ** int(t.exponent) for t in (c.trace, truth)), 1e-13)
    one, four = (gradflow.law(scheme, "mlp:relu", 5).exact[0, 0] for scheme in ("pre-ln", "hyper-connections"))
    close(four, one)


@pytest.mark.slow
def test_weight_gradients_are_autodiffs(x64):
    stack = StreamStack.make("residual", ("linear", "mlp:tanh"), DEPTH, WIDTH, eps=EPS)
    drawn, x, sent = Drawn(jax.random.key(7)), normal(1, TOKENS, WIDTH), normal(2, 1, TOKENS, WIDTH)
    params = jax.tree.map(lambda *p: jnp.stack(p), *(params_at(drawn, stack, block) for block in range(DEPTH)))

    def loss(params):
        return jnp.sum(stack.trace(Given(params), x).out * sent[0])

    grads = jax.grad(loss)(params)
    truth = [
        [math.sqrt(sum(float(jnp.sum(g[block] ** 2)) for g in part.values())) for part in grads]
        for block in range(DEPTH)
    ]
    p = gradflow.profile(stack, x, lambda out: jnp.sum(out * sent[0]), weights=Given(params), weight_grad=True)
    close(p.weight_grad[0, 1:-1], np.ravel(truth))
    assert p.labels == (
        "expand",
        *(f"{block} {kind}" for block in (1, 2) for kind in ("linear", "mlp:tanh")),
        "readout",
    )


# --- branches that add up ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_parallel_branch_pushes_and_weighs_as_its_parts():
    f, parts = branch_of("attention|mlp:gelu"), [branch_of("attention"), branch_of("mlp:gelu")]
    params, x = f.init(jax.random.key(0), WIDTH, "float64"), normal(1, TOKENS, WIDTH)
    own = [{k.replace(f"{i}:", ""): v for k, v in params.items() if f"{i}:" in k} for i in (0, 1)]
    close(f.apply(params, x), sum(part.apply(p, x) for part, p in zip(parts, own, strict=True)))
    basis = normal(2, TOKENS, WIDTH, 3)
    jacobian = jax.jacfwd(lambda v: f.apply(params, v))(x)
    close(f.push(params, x, basis), jnp.einsum("tisj,sjk->tik", jacobian, basis))
    assert not f.tokenwise
    assert f.matrices == ("0:_q", "0:_k", "0:_v", "0:_o", "1:_in", "1:_out")


def test_parallel_moments_are_sums_and_meet_monte_carlo():
    f = branch_of("linear|mlp:tanh")
    one, other = branch_of("linear").moments(), branch_of("mlp:tanh").moments()
    assert (f.moments().q, f.moments().chi) == (one.q + other.q, one.chi + other.chi)
    assert f.moments_at(2.0).q == pytest.approx(2 + float(branch_of("mlp:tanh").moments_at(2.0).q))
    d, draws = 64, 200
    with jax.enable_x64(True):
        x = normal(0, 1, d)
        x = x / jnp.sqrt(jnp.mean(x**2))

        @jax.jit
        def powers(key):
            params = f.init(key, d, "float64")
            out, pull = jax.vjp(lambda v: f.apply(params, v), x)
            g = jax.random.normal(key, x.shape, jnp.float64)
            return jnp.mean(out**2), jnp.sum(pull(g)[0] ** 2) / jnp.sum(g**2)

        seen = np.asarray(jax.lax.map(powers, jax.random.split(jax.random.key(1), draws)))
    for values, truth in zip(seen, (f.moments().q, f.moments().chi), strict=True):
        assert abs(values.mean() - truth) < 4 * values.std(ddof=1) / math.sqrt(draws) + 2 * truth / d


# --- the law -------------------------------------------------------------------------------------------------------------

MEASURED = ("parallel", "b2t", "ResiDual", "mhc")  # hyper-connections are pre-LN, hybridnorm stands below


@pytest.fixture(scope="module")
def zoo():
    return compare(MEASURED, ("linear", "mlp:tanh"), 4, 256, seeds=12)


@pytest.mark.slow
def test_law_and_networks_agree_in_every_row(zoo):
    """Mean log gain per sub-layer within max(2 %, 3 s.e.), s.e. below 0.8 %; streams, weight gradients within 4 s.e."""
    for entry in zoo:
        inside = [label not in ("expand", "readout") for label in entry.law.labels]
        for curve in ("log_exact", "log_trunk"):
            rates = getattr(entry.measured, curve)[:, 0] / sum(inside)
            error = rates.std(ddof=1) / math.sqrt(len(rates))
            gap = rates.mean() - getattr(entry.law, curve)[0, 0] / sum(inside)
            assert error < 0.008, entry.name
            assert abs(gap) < max(0.02, 3 * error), f"{entry.name} {curve}: {gap:+.4f} ± {error:.4f}"
        for figure in ("stream_rms", "kept_rms", "branch_rms", "weight_grad"):
            seen = np.log(getattr(entry.measured, figure)[:, inside])
            gaps = seen.mean(0) - np.log(getattr(entry.law, figure)[0, inside])
            errors = seen.std(0, ddof=1) / math.sqrt(len(seen))
            assert errors.max() < 0.03
            assert np.all(np.abs(gaps) < np.maximum(0.02, 4 * errors)), f"{entry.name} {figure}: {gaps} ± {errors}"


@pytest.mark.slow
def test_laws_part_where_the_rows_do(zoo):
    """By several times the band within which each row's networks follow it."""
    for figure in ("log_exact", "log_trunk"):
        gains = [getattr(entry.law, figure)[0, 0] / 8 for entry in zoo]
        assert max(gains) - min(gains) > 4 * 0.02


@pytest.mark.slow
def test_table_states_the_composite_gain_beside_the_exact_one(zoo):
    text = str(zoo)
    assert max(map(len, text.splitlines())) <= 100
    assert "mhc: ∏R stretches by at most 1 forward" in text
    assert zoo["mhc"].measured.settings["composite"]["backward"] == pytest.approx(1, abs=1e-5)
    assert zoo["parallel"].size == 1
    assert zoo["b2t"].size == 2
    assert [row["streams"] for row in zoo.to_dict()["schemes"]] == [1, 2, 2, 4]


def test_hybridnorm_and_its_normed_values_follow_their_law():
    """One token, eight heads of width 64: W_O N(W_V x), of unit power whatever comes in."""
    entry = compare("hybridnorm", ("attention", "linear"), 2, 512, seeds=8, norm="rms")[0]
    rates = entry.measured.log_exact[:, 0] / 4
    error = rates.std(ddof=1) / math.sqrt(len(rates))
    assert error < 0.01
    assert abs(rates.mean() - entry.law.log_exact[0, 0] / 4) < max(0.02, 3 * error)
    np.testing.assert_allclose(figures(entry.measured)["weight_grad"], figures(entry.law)["weight_grad"], rtol=0.1)


# --- matrices of streams -------------------------------------------------------------------------------------------------


def test_sinkhorn_is_doubly_stochastic():
    free = np.exp(np.random.default_rng(0).standard_normal((50, 4, 4)))
    close(sinkhorn(free).sum(-1), np.ones((50, 4)), 1e-14)
    np.testing.assert_allclose(sinkhorn(free).sum(-2), 1, atol=1e-4)  # what 20 iterations leave
    for axis in (-1, -2):
        np.testing.assert_allclose(sinkhorn(free, 400).sum(axis), 1, atol=1e-14)


def test_composite_gains_are_row_and_column_sums_of_the_product():
    R = np.array([[0.5, -1.0], [0.25, 2.0]])
    close(composite(hyper_connections(R, [1, 0], [1, 1]), 3).forward[-1], np.abs(R.sum(1)).max())
    turning = Written((((1, l), (0, -0.5)),), ((1, 0),), ((1, 1),))  # no two of them commute
    gains = composite(StreamScheme("x", "test", "", "", turning, (Place(True, False, (False,) * 2),), (1, 1)), 3)
    maps = [np.array([[1.0, s], [0.0, -0.5]]) for s in (1, 2, 3)]
    for s in range(3):
        whole = functools.reduce(lambda product, later: later @ product, maps[s:])
        close(gains.forward[s], np.abs(whole.sum(1)).max())
        close(gains.backward[s], np.abs(whole.sum(0)).max())
    drawn = composite(manifold(spread=2.0, key=1), 64)
    np.testing.assert_allclose(drawn.forward, 1, atol=1e-13)
    np.testing.assert_allclose(drawn.backward, 1, atol=0.05)


def test_uniform_mixture_is_the_limit_of_no_spread():
    numbers = manifold(spread=0.0).numbers(4)
    close(numbers.residual, np.full((4, 4, 4), 0.25))
    close(numbers.pre, np.full((4, 4), 0.5))
    close(numbers.post, np.ones((4, 4)))


BAD = {
    "scheme: unknown 'b2'": lambda: compare("b2", BLOCK, 2, 24),
    "block: 'b2t' is of blocks of 2 branches": lambda: compare("b2t", "mlp:relu", 2, 24),
    "scheme: 'post-ln' has one stream": lambda: StreamStack.make("post-ln", BLOCK, 2, 24),
    "d: leaves heads of width 1": lambda: StreamStack.make("hybridnorm", BLOCK, 2, 8),
    r"residual: needs shape \(2, 2\)": lambda: hyper_connections([1, 0], [1, 0], [1, 0]),
    "pre: needs shape": lambda: hyper_connections(np.eye(2), np.eye(2), [1, 0]),
    "post: holds 1 NaN": lambda: hyper_connections(np.eye(2), [1, 0], [np.nan, 0]),
    "streams: needs a whole number": lambda: manifold(0),
    "spread: needs a finite number": lambda: manifold(spread=-1.0),
    "norm: the law of several streams": lambda: gradflow.law("b2t", BLOCK, 2, norm="dyt"),
    "branch: unknown 'mlp:rel'": lambda: branch_of("attention|mlp:rel"),
    "block: 'linear|mlp:relu' has no inner matrix": lambda: gradflow.law("deepnorm", "linear|mlp:relu", 2),
    "mask: a stack of several streams": lambda: gradflow.profile(
        StreamStack.make("mhc", BLOCK, 1, 24), np.ones((2, 24)), mask=np.ones(2, bool)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(message):
    refused(BAD[message], message)


def test_shell_compares_and_profiles(shell):
    code, out, _ = shell("compare", "mhc", "--block", "linear", "--depth", "1", "--d", "8", "--seeds", "1")
    assert code == 0
    assert "mhc" in out
    code, _, err = shell("profile", "b2t", "--block", "linear", "--depth", "1", "--d", "8")
    assert code == 2
    assert err.startswith("gradflow: block: 'b2t'")
