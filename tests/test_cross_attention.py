"""Cross-attention: one memory for all blocks, value and push, its law by other routes, and networks of decoder blocks."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from following import networks_follow
from refusals import refused

import gradflow
from gradflow.branches import MLP, Attention, CrossAttention, branch_of
from gradflow.comparing import prescriptions
from gradflow.comparing.comparisons import compare
from gradflow.moments import kernels
from gradflow.schemes import BY_NAME
from gradflow.stack import Drawn, Given, Stack

pytestmark = pytest.mark.usefixtures("x64")
DECODER = (Attention(2, True), CrossAttention(2, 8, 0.3), "mlp:relu")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


def test_value_and_push_against_loops_with_given_biases():
    branch, x, basis = CrossAttention(2, 3, 0.5), normal(0, 4, 6), normal(1, 4, 6, 2)
    params = branch.init(jax.random.key(2), 6, "float64") | {f"b_{n}": normal(3 + i, 6) for i, n in enumerate("qkvo")}
    f = functools.partial(oracle.attention, jax.tree.map(np.asarray, params), heads=2)
    np.testing.assert_allclose(branch.apply(params, x), f(np.asarray(x)), rtol=1e-12)
    whole = jax.jacfwd(functools.partial(branch.apply, params))(x)
    np.testing.assert_allclose(branch.push(params, x, basis), jnp.einsum("tisj,sjk->tik", whole, basis), rtol=1e-11)
    np.testing.assert_allclose(whole, oracle.jacobian(f, np.asarray(x)), atol=1e-13)
    assert not np.any(whole[0, :, 1])  # a token's output is its own


def test_a_memory_has_its_size_its_cosine_and_is_one_for_all_blocks():
    branch = CrossAttention(2, 16, 0.6)
    stack = Stack.make("post-ln", (branch, "linear"), 3, 1024)
    weights = Drawn(jax.random.key(0))
    index, rest = weights.along_depth(stack)
    layers = [weights.layer(stack, (index[b], [leaf[b] for leaf in rest])).params for b in range(3)]
    memory = np.asarray(layers[0][0]["memory"])
    for layer in layers[1:]:
        np.testing.assert_array_equal(layer[0]["memory"], memory)
        assert np.any(layer[0]["w_q"] != layers[0][0]["w_q"])
    assert "memory" not in layers[0][1]
    gram = memory @ memory.T / 1024
    np.testing.assert_allclose(np.diag(gram), 1, rtol=1e-12)
    assert abs(gram[np.triu_indices(16, 1)].mean() - 0.6) < 0.03
    other = Drawn(jax.random.key(1)).layer(stack, (index[0], [leaf[0] for leaf in rest])).params[0]["memory"]
    assert np.abs(other - memory).max() > 1


def test_given_weights_bring_their_memory():
    stack = Stack.make("post-ln", CrossAttention(2, 3), 2, 8)
    weights = Drawn(jax.random.key(0))
    pieces = weights.along_depth(stack)
    layers = [weights.layer(stack, jax.tree.map(lambda leaf, b=b: leaf[b], pieces)) for b in range(2)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layer.params for layer in layers))
    x, g = normal(1, 4, 8), np.asarray(normal(2, 4, 8))
    found, drawn = (gradflow.profile(stack, x, g, weights=w) for w in (Given(params), weights))
    np.testing.assert_allclose(found.log_exact, drawn.log_exact, rtol=1e-12)
    doubled = ({**params[0], "memory": 2 * params[0]["memory"]},)
    other = gradflow.profile(stack, x, g, weights=Given(doubled))
    assert abs(other.log_exact[0, 0] - found.log_exact[0, 0]) > 1e-3


def sampled(keys, s2, r, draws=200_000):
    """K₁, D₁, K₂, D₂ of rows of Gaussian logits, each with its standard error."""
    rng = np.random.default_rng(0)
    one, two = rng.standard_normal((2, draws, keys))
    a, b = (np.asarray(jax.nn.softmax(math.sqrt(s2) * l, -1)) for l in (one, r * one + math.sqrt(1 - r * r) * two))

    def scores(a, b):
        dot = (a * b).sum(-1, keepdims=True)
        return (a * b * (1 - a - b + dot)).sum(-1)

    rows = ((a * a).sum(-1), scores(a, a), (a * b).sum(-1), scores(a, b))
    return np.array([(row.mean(), row.std() / math.sqrt(draws)) for row in rows])


@pytest.mark.repeats
@pytest.mark.parametrize(("gain", "rho", "r"), [(1.0, 0.0, 0.5), (1.3, 0.4, 0.0), (1.0, 0.7, 0.9)])
def test_moments_and_pairs_against_sampled_softmax_rows(gain, rho, r):
    """At r = 0 and for one query within 4 s.e.; between, within the 0.5 % of `K_2 and D_2 between the ends` as well."""
    branch = CrossAttention(memory=8, memory_cosine=rho, gain_in=gain, gain=0.5)
    power = 0.8
    scores = gain**4 * power
    (K1, *e0), (D1, *e1), (K2, *e2), (D2, *e3) = sampled(8, scores * (1 - rho), r)
    values = (0.5 * gain) ** 2
    at = branch.moments_at(power)
    assert abs(at.q / values - (rho + (1 - rho) * K1)) < 4 * e0[0]
    assert abs(at.chi / values / scores / (1 - rho) ** 2 - D1) < 4 * e1[0]
    value, slope, _ = kernels.at(branch.pairs(power, 1.0, 1.0), jnp.asarray(r))
    assert abs(value / values - (rho + (1 - rho) * K2)) < 4 * e2[0] + 0.005 * K2 * (r > 0)
    assert abs(slope / values / scores / (1 - rho) ** 2 - D2) < 4 * e3[0] + 0.01 * D2 * (r > 0)


def test_the_limit_of_wide_heads_and_the_number_of_narrow_ones():
    """Eight independent keys at unit gain: .2323, .1345 by the softmax's integrals; .244, .140, the figures of THEORY.md §4,
    are of narrow networks: raw Gaussian tokens of width 32, whose lengths vary, give .245 and .146 ± .001.
    """
    at = CrossAttention(memory=8).moments()
    np.testing.assert_allclose([at.q, at.chi], [0.2323, 0.1345], atol=1e-4)
    np.testing.assert_allclose([at.q, at.chi], [0.244, 0.140], rtol=0.05)


def test_limits():
    alike, one = CrossAttention(memory_cosine=1.0).moments(), CrossAttention(memory=1).moments()
    for at in (alike, one):
        np.testing.assert_allclose([at.q, at.chi], [1, 0], atol=1e-12)
    blind = CrossAttention(memory=8, memory_cosine=0.25, gain_in=1e-3, gain=1e3).moments()  # W_Q, W_K → 0
    np.testing.assert_allclose([blind.q, blind.chi], [0.25 + 0.75 / 8, 0], atol=1e-9)
    many = CrossAttention(memory=10**6).moments()  # e^s²/n
    np.testing.assert_allclose(1e6 * many.q, math.e, rtol=1e-4)
    normed = CrossAttention(qk_norm=True, gain_in=2.0, gain=0.5)
    np.testing.assert_allclose(
        [normed.moments_at(7.0).q, normed.moments_at(7.0).chi], dataclasses.astuple(CrossAttention().moments())[:2]
    )


@pytest.mark.parametrize("power", [0.6, 9.0])
def test_a_query_with_itself_has_the_moments_of_one(power):
    branch = CrossAttention(memory=5, memory_cosine=0.2, gain=0.7)
    found = kernels.at(branch.pairs(power, 1.2, 0.9), jnp.ones(()))
    one, gains = branch.moments_at(power), (1.2 * 0.9) ** 2
    np.testing.assert_allclose(found, [gains * one.q, gains * one.chi, branch.weight_power(power, 1.2, 0.9)], rtol=1e-9)


def test_post_ln_decays_where_the_memory_is_alike():
    """A power 1/(1 + q_f) a block, q_f = 1: the true exponential decay; and of a memory that differs, little."""
    law = gradflow.law("post-ln", CrossAttention(memory_cosine=1.0), 10)
    np.testing.assert_allclose(law.exact[0, 0], 2.0**-5, rtol=1e-12)
    np.testing.assert_allclose(law.trunk[0, 0], law.exact[0, 0], rtol=1e-12)
    at = CrossAttention(memory=8).moments()
    law = gradflow.law("post-ln", CrossAttention(memory=8), 10, d=64)
    np.testing.assert_allclose(law.exact[0, 0] ** 2, ((1 + at.chi) / (1 + at.q)) ** 10, rtol=1e-9)
    assert [law.settings[name] for name in ("order", "memory_tokens", "memory_cosine")] == ["leading", 8, 0.0]
    assert law.sd_exact is None
    # W_V's gain multiplies the output; the softmax, which W_Q, W_K and x make, does not see it
    row = dataclasses.replace(BY_NAME["post-ln"], inner=BY_NAME["deepnorm"].inner, outer=BY_NAME["deepnorm"].outer)
    law, g4 = gradflow.law(row, CrossAttention(memory=8), 10), 1 / 40
    np.testing.assert_allclose(law.exact[0, 0] ** 2, ((1 + g4 * at.chi) / (1 + g4 * at.q)) ** 10, rtol=1e-9)


NETWORKS = [
    pytest.param("post-ln", DECODER, {"cotangent_cosine": 0.3}, marks=pytest.mark.slow),
    ("pre-ln", (CrossAttention(2, 8, qk_norm=True), MLP("gelu", 2)), {"token_cosine": 0.5, "cotangent_cosine": 0.5}),
    pytest.param("post-ln", (Attention(2), CrossAttention(2, 12, 0.9), "mlp:tanh"), {}, marks=pytest.mark.slow),
    pytest.param("pre-ln", DECODER, {"init": "xavier", "token_cosine": 0.2}, marks=pytest.mark.slow),
    pytest.param("deepnorm", DECODER, {"cotangent_cosine": 1.0}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "block", "options"), NETWORKS)
def test_networks_follow_the_law(scheme, block, options):
    """At every sub-layer: the mean power of the gradient, and the trunk, within max(5 %, 3 s.e.); the s.e. is below 8 %.

    Alike tokens fluctuate together, so that a mean power is off by O(1/d) a sub-layer: hence the width.
    """
    seeds = 32
    entry = compare([scheme], block, 2, 256, tokens=10, seeds=seeds, dtype="float32", **options)[0]
    networks_follow(entry, seeds)


ENCODER, DEPTH = ("attention", "mlp:relu"), 12


def decoder(cosine):
    return ("attention:causal", CrossAttention(memory=8, memory_cosine=cosine), "mlp:relu")


def powers(scheme, block):
    """Power of the gradient at every block's input, by the law."""
    return gradflow.law(scheme, block, DEPTH, tokens=8).exact[0, : DEPTH * len(block) : len(block)] ** 2


@pytest.mark.slow
def test_encoder_against_decoder():
    """Liu et al. 2020: post-LN's decoder loses its gradient, its encoder does not, nor does pre-LN; the memory decides."""
    encoder, alike, differing = (powers("post-ln", block) for block in (ENCODER, decoder(0.9), decoder(0.0)))
    at = CrossAttention(memory=8, memory_cosine=0.9).moments()
    cross = gradflow.law("post-ln", decoder(0.9), DEPTH, tokens=8).net[0, 1::3] ** 2
    np.testing.assert_allclose(cross, (1 + at.chi) / (1 + at.q), rtol=1e-9)
    np.testing.assert_allclose(
        cross, 1 / (1 + at.q), rtol=2e-3
    )  # next to nothing returns: the decay is the norm's alone
    rates = alike[:-1] / alike[1:]  # of a block: the other two sub-layers give a little back
    assert np.all((rates[:8] > cross[0]) & (rates[:8] < 1.1 * cross[0]))
    assert encoder[0] > 1000 * alike[0]
    assert differing[0] > 0.3
    assert np.all(np.diff(powers("pre-ln", decoder(0.9))) < 0)  # grows towards the input


@pytest.mark.parametrize("name", ["deepnorm", "admin"])
def test_the_decoders_constants_on_a_decoder(name):
    """α² against the branch: the power that cross-attention keeps back from the skip is of the order of 1/α²."""
    row = prescriptions.rows(name, encoder=DEPTH, decoder=DEPTH)["decoder"]
    held, plain = (gradflow.law(r, decoder(0.9), DEPTH, tokens=8) for r in (row, "post-ln"))
    assert plain.exact[0, 0] < 0.03
    assert held.exact[0, 0] > {"deepnorm": 0.99, "admin": 0.4}[name]
    assert held.trunk[0, 0] > {"deepnorm": 0.98, "admin": 0.2}[name]


def test_rows_hold_what_constants_list():
    for name in ("deepnorm", "t-fixup"):
        listed, rows = (
            prescriptions.constants(name, encoder=6, decoder=4),
            prescriptions.rows(name, encoder=6, decoder=4),
        )
        for stack, row in rows.items():
            numbers = row.multipliers(listed[stack]["sublayers"])
            np.testing.assert_allclose(numbers.alpha, listed[stack]["alpha"], rtol=1e-12)
            np.testing.assert_allclose([numbers.inner, numbers.outer], listed[stack]["weight_gain"], rtol=1e-12)
            assert row.name == f"{name} {stack}"
    np.testing.assert_allclose(float(rows["decoder"].inner), 36**-0.25)  # (9M)^−¼
    refused(lambda: prescriptions.rows("sub-ln", encoder=6, decoder=6), "name: unknown 'sub-ln'")
    refused(lambda: prescriptions.rows("deepnorm", encoder=6, decoder=0), "decoder: needs a whole number of at least 1")


def test_the_shell_gives_cross_attention_a_memory(shell):
    block = "cross-attention,mlp:relu"
    code, out, _ = shell(
        "law", "post-ln", "--block", block, "--depth", 2, "--memory", 5, "--memory-cosine", 1, "--json"
    )
    found = json.loads(out)
    assert code == 0
    np.testing.assert_allclose(
        found["exact"][0][0], 0.5, rtol=1e-12
    )  # twice 1/√2, of memories alike; ReLU's factor is 1
    code, _, error = shell("law", "post-ln", "--block", "mlp:relu", "--memory", 5)
    assert code == 2
    assert "memory: no branch of 'mlp:relu' has one" in error


def test_bad_input_is_refused_in_one_line():
    refused(lambda: CrossAttention(heads=0), "heads: needs a whole number of at least 1, got 0")
    refused(lambda: CrossAttention(memory=0), "memory: needs a whole number of at least 1, got 0")
    refused(
        lambda: CrossAttention(memory=4, memory_cosine=-0.5), "memory_cosine: 4 tokens can share a cosine from -0.333"
    )
    refused(lambda: CrossAttention(memory=1, memory_cosine=0.5), "memory_cosine: one token has no other")
    refused(lambda: CrossAttention(3).init(jax.random.key(0), 8, "float64"), "heads: 3 heads do not divide d=8")
    assert branch_of("cross-attention") == CrossAttention()
