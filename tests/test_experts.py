"""Mixtures of experts: value and Jacobian against a NumPy loop, moments against draws, the law against networks."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest
from refusals import refused

import gradflow
from gradflow.branches import branch_of, with_power
from gradflow.branches.experts import Experts
from gradflow.loads import load
from gradflow.moments import top_k
from gradflow.stack import Given, Stack

SMALL = Experts(4, 2, ratio=1)
MIXTURES = {
    "mixtral": replace(SMALL, imbalance=1.0),
    "switch": replace(SMALL, chosen=1, activation="gelu", gated=False, renormalised=False),
    "all": Experts(3, 3, "tanh", False, ratio=2, router_gain=2.0),
    "crowded": replace(SMALL, capacity=0.6, renormalised=False),
}


def mixture(f, params, x):
    """One token, one expert at a time, in the tokens' order."""
    m, taken, rows = len(params["w_in"]) // f.number, np.zeros(f.number), []
    for t in range(x.shape[-2]):
        state = x[..., t, :]
        logits = state @ params["w_router"].T + params["b_router"]
        best = np.argsort(logits.real.reshape(-1, f.number)[0])[::-1][: f.chosen]
        shared = best if f.renormalised else range(f.number)
        total, out = sum(np.exp(logits[..., e]) for e in shared), 0
        for e in best:
            taken[e] += 1
            if f.capacity and taken[e] > math.ceil(f.capacity * f.chosen * x.shape[-2] / f.number):
                continue
            mine = {k: params[k][e * m : (e + 1) * m] for k in ("w_in", "w_gate") if k in params}
            mine["w_out"] = params["w_out"][:, e * m : (e + 1) * m]
            out = out + (np.exp(logits[..., e]) / total)[..., None] * oracle.branch(f.expert.name, mine, state)
        rows.append(out + 0 * state)
    return np.stack(rows, -2)


@pytest.mark.repeats(keep=2)
@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.usefixtures("x64")
def test_value_and_push_are_those_of_a_loop_over_tokens_and_experts(kind):
    f, d, tokens = MIXTURES[kind], 5, 6
    params = f.init(jax.random.key(1), d, "float64")
    x, basis = (
        jax.random.normal(jax.random.key(k), (tokens, d, *more), jnp.float64) for k, more in ((2, ()), (3, (2,)))
    )
    plain = jax.tree.map(np.asarray, params)
    np.testing.assert_allclose(f.apply(params, x), mixture(f, plain, np.asarray(x)), rtol=1e-12, atol=1e-14)
    truth = oracle.jacobian(lambda v: mixture(f, plain, v), x)
    np.testing.assert_allclose(
        f.push(params, x, basis), np.einsum("tisj,sjk->tik", truth, basis), rtol=1e-11, atol=1e-13
    )
    (back,) = jax.vjp(lambda v: f.apply(params, v), x)[1](basis[..., 0])
    np.testing.assert_allclose(back, np.einsum("tisj,ti->sj", truth, basis[..., 0]), rtol=1e-11, atol=1e-13)
    asked, served = f.choice(params, x)
    assert bool(np.all(np.sum(asked, 1) == f.chosen))
    assert bool(np.all(served == asked)) == (kind != "crowded")


@pytest.mark.usefixtures("eager")
def test_padding_takes_no_place():
    f = replace(SMALL, capacity=1.0)
    params, x = f.init(jax.random.key(0), 5, "float64"), jax.random.normal(jax.random.key(1), (6, 5), jnp.float64)
    real = jnp.array([False, True, True, False, True, True])
    padded, alone = f.apply(params | {"mask": real}, x)[real], f.apply(params, x[real])
    np.testing.assert_allclose(padded, alone, rtol=1e-12)


def logistic(g, tau):
    """E g(σ(δ)), δ the difference of two logits."""
    return float(
        mpmath.quad(lambda z: g(1 / (1 + mpmath.exp(-math.sqrt(2) * tau * z))) * mpmath.npdf(z), [-12, -3, 0, 3, 12])
    )


@pytest.mark.parametrize("tau", [0.0, 0.5, 2.0, 7.0])
def test_sums_over_two_experts_are_one_integral(tau, x64):
    both = [lambda w: w**2 + (1 - w) ** 2, lambda w: 4 * (w * (1 - w)) ** 2, lambda w: (w**2 + (1 - w) ** 2) ** 2]
    np.testing.assert_allclose(top_k.at(2, 2, True, tau), [logistic(g, tau) for g in both], rtol=1e-10)
    best = [lambda w: max(w, 1 - w) ** 2, lambda w: 2 * (w * (1 - w)) ** 2, lambda w: max(w, 1 - w) ** 4]
    np.testing.assert_allclose(top_k.at(2, 1, False, tau), [logistic(g, tau) for g in best], rtol=1e-10)


@pytest.mark.parametrize("experts", [1, 4])
def test_closed_cases(experts, x64):
    np.testing.assert_allclose(top_k.means(experts, 1, True, 1.3), [1, 0, 1], atol=1e-12)  # all the weight, no gradient
    even = 1 / experts
    np.testing.assert_allclose(top_k.means(experts, experts, True, 0.0), [even, even - even**2, even**2], atol=1e-12)
    f = Experts(experts, experts, "relu", False, router_gain=0.0)
    found = f.moments()
    assert (found.q, found.chi) == pytest.approx((0.5 / experts, 0.5 / experts), rel=1e-10)
    assert with_power(f, 2.0).moments().q == pytest.approx(2.0, rel=1e-12)


def sums(logits, k, renormalised):
    """Σw², Σ D² and (Σw²)² of each row, D written out."""
    e = np.exp(np.sort(logits)[:, ::-1])
    p = e / (e[:, :k] if renormalised else e).sum(1, keepdims=True)
    if renormalised:
        p = p[:, :k]
    D = p[:, :k, None] * (np.eye(p.shape[1])[:k] - p[:, None])
    squares = (p[:, :k] ** 2).sum(1)
    return np.stack([squares, (D**2).sum((1, 2)), squares**2])


@pytest.mark.parametrize(
    ("number", "k", "renormalised", "tau"),
    [(8, 2, True, 1.0), (8, 3, False, 2.0), (16, 16, True, 1.5), (5, 1, False, 0.7)],
)
def test_sums_over_the_router_are_those_of_draws(number, k, renormalised, tau):
    drawn = sums(tau * np.random.default_rng(0).standard_normal((100_000, number)), k, renormalised)
    error = drawn.std(1) / math.sqrt(drawn.shape[1])
    assert np.all(np.abs(top_k.means(number, k, renormalised, tau) - drawn.mean(1)) < 4 * error)


def test_what_a_norm_leaves_of_the_routers_way_is_that_of_draws(x64):
    """(δ − w wᵀ/Σw²) between D and D, over Σw²: of a softmax over the chosen, and of one over all alike."""
    tau = 1.3
    e = np.exp(np.sort(tau * np.random.default_rng(1).standard_normal((100_000, 4)))[:, ::-1])
    for renormalised in (True, False):
        p = e[:, :2] / e[:, :2].sum(1, keepdims=True) if renormalised else e / e.sum(1, keepdims=True)
        w, D = p[:, :2], p[:, :2, None] * (np.eye(p.shape[1])[:2] - p[:, None])
        size = (w**2).sum(1)
        left = ((D**2).sum((1, 2)) - (np.einsum("ne,nej->nj", w, D) ** 2).sum(1) / size) / size
        f = replace(SMALL, renormalised=renormalised, router_gain=0.0, imbalance=tau)
        s, through = f.behind_norm().sums(1.0)
        assert abs(through / s - left.mean()) < 4 * left.std() / math.sqrt(len(left))


def test_the_table_is_the_quadrature_and_its_tail_near_it(x64):
    for tau in (0.3, 1.7, 6.0):
        np.testing.assert_allclose(top_k.at(4, 2, True, tau), top_k.means(4, 2, True, tau), atol=1e-10)
    np.testing.assert_allclose(top_k.at(4, 2, True, 16.0), top_k.means(4, 2, True, 16.0), atol=2e-3)
    far = np.array(top_k.at(4, 2, True, np.inf))
    np.testing.assert_allclose(far, top_k.LIMIT, atol=1e-12)


@pytest.mark.repeats
@pytest.mark.parametrize("kind", ["mixtral", "switch"])
def test_moments_are_those_of_drawn_mixtures(kind):
    """q_f, χ_f, ‖dL/dW‖², and χ_f/q_f behind a norm, within 4 standard errors and 1/d."""
    f, d, power, draws = replace(MIXTURES[kind], router_gain=1.5), 64, 1.4, 600

    def one(key):
        k_w, k_x, k_v = jax.random.split(key, 3)
        params, (x, v) = f.init(k_w, d, "float32"), (jax.random.normal(k, (1, d)) for k in (k_x, k_v))
        x = x * jnp.sqrt(d / jnp.sum(x**2))
        out, pull = jax.vjp(lambda params, x: f.apply(params, math.sqrt(power) * x), params, x)
        to_params, to_x = pull(v)
        weights = sum(jnp.sum(g**2) for name, g in to_params.items() if name.startswith("w"))

        def normed(x):
            y = f.apply(params, math.sqrt(power) * x)
            return y / jnp.sqrt(jnp.mean(y**2))

        (behind,) = jax.vjp(normed, x)[1](v)
        size = jnp.sum(v**2)
        return jnp.stack([jnp.mean(out**2), jnp.sum(to_x**2) / size, weights / size / d, jnp.sum(behind**2) / size])

    seen = np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(jax.random.key(0), draws)))
    with jax.enable_x64(True):
        law, behind, one = f.moments_at(power), f.behind_norm().moments_at(power), f.expert.moments_at(power)
        wanted = np.array([law.q, law.chi, f.weight_power(power, 1.0, 1.0), behind.chi / behind.q])
        through = np.array(1 - law.q * one.chi / one.q / law.chi)
    error = seen.std(0) / math.sqrt(draws)
    assert np.all(error < 0.05 * wanted)
    assert np.all(np.abs(seen.mean(0) - wanted) < 4 * error + 2 / d * wanted)
    assert through > 0.05  # the router's way is no small part of χ_f


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a_norm_behind_it_makes_switch_and_mixtral_one_and_leaves_one_experts_router_no_gradient():
    d, x = 6, jax.random.normal(jax.random.key(1), (3, 6), jnp.float64)
    f = replace(SMALL, renormalised=False)
    params = f.init(jax.random.key(0), d, "float64")

    def normed(f, params):
        y = f.apply(params, x)
        return y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True))

    np.testing.assert_allclose(normed(f, params), normed(SMALL, params), rtol=1e-12)
    one = replace(f, chosen=1)
    v = jax.random.normal(jax.random.key(2), x.shape, jnp.float64)
    found = jax.grad(lambda p: jnp.sum(normed(one, p) * v))(params)
    assert float(jnp.linalg.norm(found["w_router"])) < 1e-13 * float(jnp.linalg.norm(found["w_out"]))
    bare = jax.grad(lambda p: jnp.sum(one.apply(p, x) * v))(params)
    assert float(jnp.linalg.norm(bare["w_router"])) > 1e-2 * float(jnp.linalg.norm(bare["w_out"]))
    assert one.behind_norm().sums(1.0)[1] == pytest.approx(0, abs=1e-12)


def unequal(f, seed=0, draws=50_000):
    """log of what post-LN's weight gradients are of the law's, by drawn logits: the law divides by the mean of ‖u‖².

    A token's own is 1 + q Σw², largest where the weights' gradient is, and u takes a part of the router's cotangent.
    """
    logits = f.router_gain * np.random.default_rng(seed).standard_normal((draws, f.number))
    chosen = logits >= np.sort(logits, 1)[:, [-f.chosen]]
    w = np.exp(np.where(chosen | (not f.renormalised), logits, -np.inf))
    w /= w.sum(1, keepdims=True)
    kept = w * chosen
    q, experts = float(f.expert.moments().q), float(f.expert.weight_power(1.0, 1.0, 1.0))
    s, jacobian = (kept**2).sum(1), kept[:, :, None] * (np.eye(f.number) - w[:, None])
    router = (jacobian**2).sum((1, 2))
    along = (np.einsum("te,tej->tj", kept, jacobian) ** 2).sum(1)
    mine = (s * experts + q * (router - q * along / (1 + q * s))) / (1 + q * s)
    return math.log(mine.mean() * (1 + q * s.mean()) / (s.mean() * experts + q * router.mean())) / 2


def near(entry, **known):
    """Every sub-layer's gain and weight gradient: law and its ``known`` miss within max(2 %, 3 s.e.) of the geometric mean."""
    for name in ("net", "weight_grad"):
        seen = np.log(getattr(entry.measured, name))
        error = seen.std(0, ddof=1) / math.sqrt(len(seen))
        assert np.all(error < 0.02)
        gap = np.abs(seen.mean(0) - np.log(getattr(entry.law, name)[0]) - known.get(name, 0.0))
        assert np.all(gap < np.maximum(0.02, 3 * error)), (entry.name, name, gap, error)


@pytest.mark.repeats
@pytest.mark.parametrize("scheme", ["post-ln", "pre-ln", "sandwich"])
def test_law_against_networks(scheme):
    f = replace(SMALL, imbalance=0.5)
    near(gradflow.compare([scheme], f, 3, 128, tokens=16, seeds=16, dtype="float32")[0])


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("block", ["moe:8x2:glu:silu", "switch:8x1:mlp:relu", Experts(8, 8, ratio=4, router_gain=2.0)])
@pytest.mark.parametrize("scheme", ["post-ln", "pre-ln", "sandwich", "deepnorm", "layernorm-scaling"])
def test_law_of_more_mixtures_against_networks(x64, scheme, block):
    known = {"weight_grad": unequal(branch_of(block))} if scheme == "post-ln" else {}
    near(gradflow.compare([scheme], block, 3, 128, tokens=32, seeds=48, dtype="float32")[0], **known)


@pytest.mark.optimised
def test_post_lns_weight_gradients_miss_the_law_by_the_spread_of_lengths(x64):
    """One layer of a switch: -3.2 % of the power at any width, more than 4 s.e. from the law and within 3 of what draws say."""
    f = branch_of("switch:8x1:mlp:relu")
    entry = gradflow.compare(["post-ln"], f, 1, 128, tokens=64, seeds=128, dtype="float32")[0]
    powers = (entry.measured.weight_grad[:, 0] / entry.law.weight_grad[0, 0]) ** 2
    seen, error = math.log(powers.mean()) / 2, powers.std(ddof=1) / math.sqrt(len(powers)) / 2
    assert unequal(f) == pytest.approx(-0.0165, abs=0.001)
    assert abs(seen - unequal(f)) < 3 * error
    assert seen < -4 * error


def by_hand(**options):
    """A network of one sub-layer whose tokens ask for experts 0, 0, 0, 1 of 4, in one dimension each."""
    f = Experts(4, 1, "linear", False, ratio=1, renormalised=False, **options)
    scheme = gradflow.Scheme("bare", "test", "no norm")
    params = {"w_in": np.tile(np.eye(4), (4, 1)), "w_out": np.tile(np.eye(4), (1, 4))}
    params |= {"w_router": 40 * np.eye(4), "b_router": np.zeros(4)}
    stack = Stack.make(scheme, f, 1, 4)
    given = Given((jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], params),))
    return load(stack, np.eye(4)[[0, 0, 0, 1]] * [[1.0], [1.0], [2.0], [1.0]], weights=given)


def test_load_figures_by_hand(x64):
    free = by_hand()
    np.testing.assert_allclose(free.shares, [[0.75, 0.25, 0, 0]])
    assert free.peak[0] == 3
    assert free.variation[0] == pytest.approx(math.sqrt((4 + 0 + 1 + 1) / 4))
    assert free.dropped[0] == 0
    powers = np.array([1, 1, 4, 1])  # w = 1 to rounding: ‖f‖² = ‖x‖²
    assert free.output[0] == pytest.approx(powers.std() / powers.mean(), rel=1e-10)
    tight = by_hand(capacity=2.0)  # two places each: the third of three is dropped
    np.testing.assert_allclose(tight.shares, free.shares)
    assert tight.dropped[0] == 0.25
    assert tight.output[0] == pytest.approx(np.std([1, 1, 0, 1]) / 0.75, rel=1e-10)
    found = tight.to_dict()
    assert found["shares"] == [[0.75, 0.25, 0, 0]]
    assert found["dropped"] == [0.25]
    assert found["settings"]["tokens"] == 4
    assert str(tight).splitlines()[1].split() == ["1", "1.225", "3.000", "0.250", "0.577", "0.577"]


def test_one_token_always_finds_a_place_and_several_have_no_law():
    full = replace(SMALL, capacity=0.1)
    assert gradflow.law("sandwich", full, 2).exact[0, 0] == gradflow.law("sandwich", SMALL, 2).exact[0, 0]
    refused(full.moments, "capacity: who is dropped depends on the tokens")
    refused(lambda: gradflow.law("pre-ln", full, 2, tokens=4), "needs `pairs`")
    refused(lambda: gradflow.law("pre-ln", SMALL, 2, tokens=4, token_cosine=0.5), "needs `pairs`")


def test_names_are_read_and_written():
    for name in ("moe:8x2:glu:silu", "switch:64x1:mlp:relu", "moe:4x4:mlp:gelu_tanh"):
        assert branch_of(name).name == name
    assert branch_of("moe:8x2:glu:silu") == Experts()


BAD = {
    "branch: 'moe:8' is no mixture; write": lambda: branch_of("moe:8"),
    "branch: 'moe:8xk:glu:silu' is no mixture": lambda: branch_of("moe:8xk:glu:silu"),
    "expert: unknown 'glu:sliu'; did you mean 'glu:silu'": lambda: branch_of("moe:8x2:glu:sliu"),
    "expert: unknown ''": lambda: branch_of("switch:8x1"),
    "chosen: 3 of 2 experts": lambda: branch_of("moe:2x3:mlp:relu"),
    "number: needs a whole number of at least 1": lambda: branch_of("moe:0x1:mlp:relu"),
    "router_gain: needs a finite number": lambda: Experts(router_gain=-1.0),
    "imbalance: needs a finite number": lambda: Experts(imbalance=math.nan),
    "capacity: needs a factor above 0": lambda: Experts(capacity=0),
    "activation: unknown 'sliu'": lambda: Experts(activation="sliu"),
    "branch: the law of 'moe:4x2:glu:silu' states no spread": lambda: gradflow.contraction(2, 8, branch=SMALL),
    "stack: has no mixture": lambda: load(Stack.make("pre-ln", "mlp:relu", 1, 4), np.ones((2, 4))),
    r"x: needs shape \(tokens, 4\)": lambda: load(Stack.make("pre-ln", SMALL, 1, 4), np.ones((2, 3))),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(message):
    refused(BAD[message], message)
