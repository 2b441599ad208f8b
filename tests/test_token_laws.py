"""The law of several tokens: its softmax moments, its kernels, its sums by position, and networks that it knows nothing of."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from following import networks_follow
from refusals import refused

import gradflow
from gradflow.branches import MLP, Attention, Bias, Linear, branch_of
from gradflow.branches.dropout import Dropout
from gradflow.comparing.comparisons import compare
from gradflow.laws import tokens as token_laws
from gradflow.moments import kernels, softmax
from gradflow.moments.grams import Exchangeable, Positions
from gradflow.schemes import scheme_of
from gradflow.symbolic.moments import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("x64")


def logistic(s2):
    """K₁, M₃, M₂₂ of two keys: a = 1/(1 + e^−ℓ), ℓ ~ N(0, 2 s²)."""
    s = mpmath.sqrt(2 * s2)

    def mean(g):
        cuts = [-12, -4, -1, -0.1, 0, 0.1, 1, 4, 12]
        return mpmath.quad(lambda z: g(1 / (1 + mpmath.exp(-s * z))) * mpmath.npdf(z), cuts)

    return [2 * mean(lambda a: a**2), 2 * mean(lambda a: a**3), mean(lambda a: (a**2 + (1 - a) ** 2) ** 2)]


@pytest.mark.parametrize("s2", [0.01, 3.9, 4.1, 400.0])
def test_softmax_moments_of_two_keys_and_of_one(s2):
    rule = softmax.narrow if s2 <= softmax.TURN else softmax.wide
    wanted = np.array(logistic(s2), float)
    found = rule(np.array([1, 2]), s2)
    np.testing.assert_allclose(found[:, 0], 1, rtol=1e-12)
    np.testing.assert_allclose(found[:, 1], wanted, rtol=1e-10)
    table = softmax.table((1, 2), False)
    np.testing.assert_allclose(softmax.looked_up(table, jnp.asarray(s2))[:, 1], wanted, rtol=1e-9)


def test_softmax_moments_of_many_keys():
    sizes = np.array([3, 32, 512])
    np.testing.assert_allclose(softmax.narrow(sizes, 4.0), softmax.wide(sizes, 4.0), rtol=1e-11)
    np.testing.assert_allclose(
        softmax.narrow(sizes, 0.0), np.array([1 / sizes, 1 / sizes**2, 1 / sizes**2]), rtol=1e-11
    )
    huge = np.array([10**7])  # the lognormal limit e^s²/n, e^3s²/n²
    np.testing.assert_allclose(huge * softmax.narrow(huge, 0.5)[0], math.exp(0.5), rtol=1e-5)
    np.testing.assert_allclose(huge**2 * softmax.narrow(huge, 0.5)[1], math.exp(1.5), rtol=1e-5)
    rng = np.random.default_rng(0)
    a = jax.nn.softmax(rng.standard_normal((200_000, 5)) * 1.2, -1)
    seen_of = ((a**2).sum(-1), (a**3).sum(-1), (a**2).sum(-1) ** 2)
    for seen, wanted in zip(seen_of, softmax.narrow(np.array([5]), 1.44), strict=True):
        assert abs(seen.mean() - wanted[0]) < 4 * seen.std() / math.sqrt(len(a))


def at(branch, cosine, power=1.0):
    return [float(v) for v in kernels.at(branch.pairs(power, 1.0, 1.0), jnp.asarray(cosine))]


@pytest.mark.parametrize("cosine", [-0.9, 0.3, 0.999])
def test_kernels_against_closed_forms_and_gauss_hermite(cosine):
    angle = math.acos(cosine)
    value, slope, weights = at(MLP("relu", ratio=3), cosine)  # Cho, Saul 2009
    wanted = (math.sin(angle) + (math.pi - angle) * cosine) / (2 * math.pi), (math.pi - angle) / (2 * math.pi)
    np.testing.assert_allclose([value, slope], wanted, rtol=1e-13)
    np.testing.assert_allclose(weights, 3 * value + slope * cosine, rtol=1e-13)
    np.testing.assert_allclose(at(Linear(0.5), cosine, 4.0), [cosine, 1, 4 * cosine], atol=1e-13)
    np.testing.assert_allclose(at(Bias(0.5), cosine, 4.0), [0.25, 0, 0], atol=1e-13)
    x, w = np.polynomial.hermite_e.hermegauss(140)
    w, z = w / w.sum(), cosine * x[:, None] + math.sqrt(1 - cosine**2) * x
    for name in ("gelu", "silu"):
        phi, dphi = map(np.vectorize, by_hand(name))
        plain, steep = (float(w @ (f(x)[:, None] * f(z)) @ w) for f in (phi, dphi))
        np.testing.assert_allclose(at(branch_of(f"mlp:{name}"), cosine)[:2], [plain, steep], rtol=1e-11)
        gated = [plain * cosine, steep * cosine + plain]
        np.testing.assert_allclose(at(branch_of(f"glu:{name}"), cosine)[:2], gated, rtol=1e-11, atol=1e-12)


def by_hand(name):
    """φ and φ' of one number."""

    def cdf(z):
        return math.erfc(-z / math.sqrt(2)) / 2

    def sigmoid(z):
        return 1 / (1 + math.exp(-z))

    return {
        "gelu": (lambda z: z * cdf(z), lambda z: cdf(z) + z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)),
        "silu": (lambda z: z * sigmoid(z), lambda z: sigmoid(z) * (1 + z * (1 - sigmoid(z)))),
    }[name]


VARIANTS = (
    MLP("tanh", bias=0.3, bias_in=0.5),
    MLP("gelu", gain_in=1.3, hidden_norm="layernorm"),
    MLP("silu", gated=True, bias_in=0.4, hidden_norm="layernorm"),
    MLP("relu", bias_in=0.5, hidden_norm="rms"),
)


@pytest.mark.repeats(keep=6)
@pytest.mark.parametrize("branch", [*VARIANTS, *(f"glu:{name}" for name in ACTIVATIONS)])
def test_a_token_with_itself_has_the_moments_of_one(branch):
    branch = branch_of(branch)
    value, slope, weights = kernels.at(branch.pairs(0.7, 1.0, 1.0), jnp.ones(()))
    one = branch.moments_at(0.7)
    np.testing.assert_allclose([value, slope, weights], [one.q, one.chi, branch.weight_power(0.7, 1.0, 1.0)], rtol=1e-9)


def test_exchangeable_tokens_by_position_are_two_numbers(monkeypatch):
    case = dict(depth=3, tokens=5, token_cosine=0.2, cotangent_cosine=0.3, d=64)
    block = ("attention", "mlp:gelu")
    two = gradflow.law("post-ln", block, **case)
    monkeypatch.setattr(token_laws, "layout_of", lambda branches, tokens: Positions(tokens))
    every = gradflow.law("post-ln", block, **case)
    for name in (
        "net",
        "branch",
        "norm",
        "weight_grad",
        "token_cosine",
        "gradient_cosine",
        "log_trunk",
        "stream_cosine",
    ):
        np.testing.assert_allclose(getattr(two, name), getattr(every, name), rtol=1e-12, err_msg=name)


def sums_by_position(branch, fed, gradient, K, M):
    """Attention's Grams of unit-gain weights by four explicit loops, from each row's moments (K, D₁) and overlaps (K₂, D₂)."""
    T = len(fed)
    turn = branch.turn(T)
    seen = [i + 1 if branch.causal else T for i in range(T)]
    own, overlaps = M
    f, values, queries, keys = (np.zeros((T, T)) for _ in range(4))
    for i in range(T):
        for k in range(T):
            o, most = sorted((seen[i], seen[k]))
            share = K[o - 1] if i == k else o * overlaps[0](o, fed[i, k] * turn[i, k]) / most
            score = own[o - 1] if i == k else o * overlaps[1](o, fed[i, k] * turn[i, k]) / most
            square = [fed[a, b] for a in range(o) for b in range(o) if a != b]
            score *= gradient[i, k] * (np.trace(fed[:o, :o]) / o - (np.mean(square) if square else 0))
            for j in range(seen[i]):
                for m in range(seen[k]):
                    if j == m:
                        weight, grad, turned = share / o, score / o, turn[i, k]
                    else:
                        weight, grad = (1 - share) / (o * (most - 1)), -score / (o * (most - 1))
                        turned = turn[i, k] * turn[j, m]
                    f[i, k] += weight * fed[j, m]
                    values[j, m] += weight * gradient[i, k]
                    queries[i, k] += grad * fed[j, m] * turned
                    keys[j, m] += grad * fed[i, k] * turned
    return f, values + queries + keys


@pytest.mark.parametrize("branch", [Attention(causal=True), Attention(rope=True), Attention(causal=True, rope=True)])
def test_sums_by_position_against_explicit_loops(branch):
    T, rng = 4, np.random.default_rng(1)
    root = rng.standard_normal((T, 9))
    fed, gradient = root @ root.T, np.cov(rng.standard_normal((T, 12)))
    scale = 1 / np.sqrt(np.diag(fed))
    fed = fed * scale * scale[:, None]
    sizes = tuple(range(1, T + 1)) if branch.causal else (T,)
    table = softmax.table(sizes, False)
    f, back = Positions(T).attend(branch, jnp.asarray(fed), 1.0, 1.0, table)
    # each row's moments, from its own logit variance; the pair's, from that of the row with fewer keys
    turned, K, own, curves = fed * branch.turn(T), [], [], {}
    for n in range(1, T + 1):
        size = n if branch.causal else T
        square = turned[:size, :size]
        s2 = (size - (square.sum() - size) / max(size - 1, 1)) / size if size > 1 else 1.0
        K1, M3, M22 = (float(m[0]) for m in softmax.narrow(np.array([size]), s2))
        D1, D0, mean = K1 - 2 * M3 + M22, (1 - K1) ** 2 / max(size - 1, 1), (K1 - 1 / size) / s2
        bend = 3 * (D0 + D1 - 2 * mean)
        K.append(K1)
        own.append(D1)
        fit = np.polynomial.Polynomial([D0, D1 - D0 - bend, bend])
        curves[size] = (1 / size, s2 * fit.integ(), fit)
    overlaps = (lambda n, r: curves[n][0] + curves[n][1](r), lambda n, r: curves[n][2](r))
    wanted_f, wanted_back = sums_by_position(branch, fed, gradient, K, (own, overlaps))
    np.testing.assert_allclose(f, wanted_f, rtol=1e-8)
    np.testing.assert_allclose(back(jnp.asarray(gradient))[0], wanted_back, rtol=1e-7, atol=1e-9)


def test_without_attention_and_a_shared_part_it_is_the_law_of_one_token():
    one = gradflow.law("post-ln", ("mlp:tanh", "linear"), 3)
    several = gradflow.law("post-ln", ("mlp:tanh", "linear"), 3, tokens=4, token_cosine=0.5)
    for name in ("net", "norm", "branch", "branch_rms", "log_trunk"):
        np.testing.assert_allclose(getattr(several, name), getattr(one, name), rtol=1e-12, err_msg=name)
    assert np.all(several.gradient_cosine == 0)
    assert several.token_cosine[0, 0] == 0.5


@pytest.mark.slow
def test_long_stacks_go_in_pieces(monkeypatch):
    case = dict(depth=4, tokens=3, cotangent_cosine=0.5, final_norm=True)
    whole = gradflow.law("pre-ln", ("attention:causal", "mlp:relu"), **case)
    monkeypatch.setattr(token_laws, "KEPT", 2 * 18)
    pieces = gradflow.law("pre-ln", ("attention:causal", "mlp:relu"), **case)
    np.testing.assert_allclose(pieces.log_exact, whole.log_exact, rtol=1e-12)
    assert whole.labels[-1] == "final norm"


def test_qk_norm_takes_the_scale_out_of_the_scores():
    case = dict(depth=2, tokens=4)
    one = gradflow.law("post-ln", Attention(qk_norm=True), **case)
    other = gradflow.law("post-ln", Attention(qk_norm=True, gain_in=2, gain=0.5), **case)
    np.testing.assert_allclose(other.log_exact, one.log_exact, rtol=1e-10)
    plain = gradflow.law("post-ln", Attention(gain_in=2, gain=0.5), **case)
    assert abs(plain.log_exact[0, 0] / one.log_exact[0, 0] - 1) > 0.1


EVERYTHING = MLP("relu", hidden_norm="layernorm", bias_in=0.5, bias=0.3)
NETWORKS = [
    pytest.param("post-ln", (Attention(2), "mlp:relu"), {"cotangent_cosine": 0.3}, marks=pytest.mark.slow),
    pytest.param(
        "pre-ln",
        (Attention(2, True, qk_norm=True, rope=True, hidden_norm="rms"), Dropout(EVERYTHING, 0.2)),
        {"token_cosine": 0.4},
        marks=pytest.mark.slow,
    ),
    pytest.param("sandwich", (Attention(2, rope=True), "glu:silu"), {"token_cosine": 0.4}, marks=pytest.mark.slow),
    pytest.param("pre-ln", (Attention(2, True), "mlp:gelu"), {"cotangent_cosine": 1.0}, marks=pytest.mark.slow),
    pytest.param("admin", (Attention(2), "mlp:tanh"), {"init": "xavier"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("scheme", "block", "options"), NETWORKS)
def test_networks_follow_the_law(scheme, block, options):
    """At every sub-layer: the mean power of the gradient, and the trunk, within max(5 %, 3 s.e.); the s.e. is 2 to 6 %."""
    seeds = 24
    entry = compare([scheme], block, 3, 128, tokens=12, seeds=seeds, dtype="float32", **options)[0]
    networks_follow(entry, seeds)


def test_what_it_cannot_say_is_refused():
    law = gradflow.law
    refused(
        lambda: law("post-ln", "attention", 2, tokens=4, token_cosine=-0.5),
        "token_cosine: 4 tokens can share a cosine from -0.333 to 1",
    )
    refused(lambda: law("post-ln", "attention", 2, token_cosine=0.5), "token_cosine: one token has no other")
    refused(lambda: law("post-ln", "attention", 2, tokens=4, cotangent_cosine="x"), "cotangent_cosine: 4 tokens")
    refused(
        lambda: law("no-norm", "attention:causal", 2, tokens=4),
        "scheme: the law by position needs a norm before every branch",
    )
    refused(lambda: law("post-ln", "attention", 2, tokens=4, norm="dyt"), "norm: the law of several tokens knows")


def test_two_numbers_and_a_layout_of_one_size():
    assert isinstance(token_laws.layout_of((Attention(),), 3), Exchangeable)
    found = token_laws.follow(
        scheme_of("pre-ln"), scheme_of("pre-ln").multipliers(2, [1.0]), (Attention(),), 2, "rms", False, 2, 1.0, 1.0
    )
    # equal tokens: uniform rows, all is kept: Q grows by 1 a sub-layer, and so does the gradient's share
    np.testing.assert_allclose(found["Q"], [1, 2], rtol=1e-12)
    np.testing.assert_allclose(found["back"], [2, 1.5], rtol=1e-10)
