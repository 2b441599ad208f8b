"""The depth law: closed values, an independent recursion, and agreement with networks that it knows nothing of."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy

import gradflow
from gradflow.branches import MLP, Bias, Linear
from gradflow.flow import flow
from gradflow.schemes import S, Scheme
from gradflow.stack import Drawn, Stack
from gradflow.symbolic import depth as depth_law

pytestmark = pytest.mark.optimised  # networks by the hundred
MOMENTS = {  # (q_f, χ_f) at unit gain, from the theory's list
    "linear": (1.0, 1.0),
    "bias": (1.0, 0.0),
    "mlp:linear": (1.0, 1.0),
    "mlp:relu": (0.5, 0.5),
    "mlp:tanh": (0.39429, 0.46440),
    "mlp:gelu": (0.42522, 0.45585),
}
DEEPNORM = Scheme("deepnorm", "Wang et al. 2022", "α on the shortcut", norm_out=True, alpha=S ** sympy.Rational(1, 4))


def power(profile, curve="exact"):
    return getattr(profile, curve)[0, 0] ** 2


@pytest.mark.parametrize("depth", [24, 6])
@pytest.mark.parametrize("norm", ["layernorm", "rms"])
def test_end_to_end_power_of_relu_blocks(depth, norm):
    law = functools.partial(gradflow.law, block="mlp:relu", depth=depth, norm=norm)
    assert power(law("pre-ln")) == pytest.approx(1 + depth / 2, rel=1e-12)
    assert power(law("pre-ln", final_norm=True)) == pytest.approx(1, rel=1e-12)
    assert power(law("post-ln")) == pytest.approx(1, rel=1e-12)
    assert power(law(DEEPNORM)) == pytest.approx(1, rel=1e-12)
    assert power(law("post-ln"), "trunk") == pytest.approx(1.5**-depth, rel=1e-12)
    assert power(law("pre-ln"), "trunk") == 1
    if depth == 24:
        assert power(law("pre-ln")) == pytest.approx(13)
    assert law("post-ln").norm[0, 0] == pytest.approx(math.sqrt(2 / 3), rel=1e-12)  # Xiong et al. 2020


def recursion(scheme, block, depth):
    """The theory's section 4, written out: (exact power, trunk power) end to end."""
    Q, exact, trunk = 1.0, 1.0, 1.0
    for _ in range(depth):
        for branch in block:
            q, chi = MOMENTS[branch]
            if scheme == "post-ln":
                exact *= (1 + chi) / (1 + q)
                trunk /= 1 + q
            else:
                exact *= 1 + chi / Q
                Q += q
    return exact, trunk


@pytest.mark.parametrize("scheme", ["post-ln", "pre-ln"])
@pytest.mark.parametrize("block", [(b,) for b in MOMENTS] + [("mlp:tanh", "bias"), ("linear", "mlp:gelu", "mlp:relu")])
def test_leading_order_is_the_theorys_recursion(scheme, block):
    law = gradflow.law(scheme, block, 8)
    exact, trunk = recursion(scheme, block, 8)
    assert power(law) == pytest.approx(exact, rel=2e-4)
    assert power(law, "trunk") == pytest.approx(trunk, rel=2e-4)
    assert law.net.shape == (1, 8 * len(block))
    np.testing.assert_allclose(law.projection, 1.0)


@pytest.mark.parametrize("scheme", ["post-ln", "pre-ln"])
def test_multipliers_enter_as_their_squares(scheme):
    base = gradflow.schemes.scheme_of(scheme)
    row = Scheme(
        "scaled", "test", "", norm_in=base.norm_in, norm_out=base.norm_out, alpha=sympy.Rational(3, 2), beta=1 / S
    )
    law = gradflow.law(row, "mlp:tanh", 5)
    q, chi = (m / 25 for m in MOMENTS["mlp:tanh"])
    Q = 1.0
    for s in range(5):
        if scheme == "post-ln":
            wanted = (2.25 + chi) / (2.25 + q)
        else:
            wanted, Q = 2.25 + chi / Q, 2.25 * Q + q
        assert law.net[0, s] ** 2 == pytest.approx(wanted, rel=1e-4)


def test_the_1_over_d_term_vanishes_with_width_and_is_of_first_order():
    for scheme in ("post-ln", "pre-ln"):
        ends = [gradflow.law(scheme, "mlp:gelu", 12, d=d).log_exact[0, 0] for d in (1000, 2000, 10**9)]
        leading = gradflow.law(scheme, "mlp:gelu", 12).log_exact[0, 0]
        assert ends[2] == pytest.approx(leading, abs=1e-7)
        assert (ends[0] - leading) / (ends[1] - leading) == pytest.approx(2, rel=0.02)


def test_law_profile_obeys_the_identities_of_a_profile():
    for scheme, final in (("post-ln", False), ("pre-ln", True), (DEEPNORM, True)):
        p = gradflow.law(scheme, ("mlp:gelu", "linear"), 5, d=64, final_norm=final)
        product = p.affine * p.projection * p.norm * p.skip * p.branch
        np.testing.assert_allclose(p.net, product, rtol=1e-13)
        np.testing.assert_allclose(p.exact[0, :-1], np.cumprod(p.net[0, ::-1])[::-1], rtol=1e-12)
        assert p.sd_exact.shape == p.sd_trunk.shape == (10 + final + 1,)
        assert np.all(np.diff(p.sd_exact) <= 0)
        assert p.sd_exact[-1] == p.sd_trunk[-1] == 0


def test_own_activation_gets_its_law():
    t = sympy.Symbol("t")
    law = gradflow.law("post-ln", MLP(t**3 / 6), 4)
    q, chi = 15 / 36, 27 / 36  # E z⁶/36, E z⁴/4
    assert power(law) == pytest.approx(((1 + chi) / (1 + q)) ** 4, rel=1e-12)


@pytest.mark.parametrize("branch", [Linear(0.8), MLP("relu", ratio=2)], ids=lambda branch: branch.name)
def test_spread_of_a_growing_stream_is_its_sum_by_name(branch):
    """Of a pre-norm stack with a final norm: every symbol by its name, and the noise of each sub-layer in all later ones."""
    depth, d, alpha = 4, 64, 2 ** sympy.Rational(-1, 2)
    scheme = Scheme("damped", "test", "α < 1", norm_in=True, alpha=alpha)
    law, unit = gradflow.law(scheme, branch, depth, d=d, norm="layernorm", final_norm=True), branch.moments()
    fixed = {symbol: getattr(unit, name) for name, symbol in depth_law.MOMENTS.items()}
    fixed |= {depth_law.alpha: float(alpha), depth_law.d: d, depth_law.centred: 1}
    terms, stream = depth_law.input_norm(), [(1.0, 0.0, 0.0)]

    def value(expression, at, radial=0.0):
        names = zip((depth_law.Q, depth_law.mean_power, depth_law.var_Q), at, strict=True)
        return float(expression.subs(fixed | dict(names) | {depth_law.radial: radial}))

    for _ in range(depth):
        stream.append(tuple(value(e, stream[-1]) for e in (terms.next_Q, terms.next_mean, terms.next_var)))
    radial = [0.0] * depth
    for l in reversed(range(depth - 1)):
        radial[l] = value(terms.next_radial, stream[l + 1], radial[l + 1])
    slope, noise, overlap = depth_law.response()
    slopes = [value(slope, at) for at in stream[:depth]] + [-1 / stream[depth][0]]
    variance = 0.0
    for l, at in enumerate(stream[:depth]):
        later = sum(s * float(alpha) ** (2 * k) for k, s in enumerate(slopes[l + 1 :]))
        own = sum(value(e, at, radial[l]) for e in (terms.spread_shared, terms.spread_own))
        variance += own + later**2 * value(noise, at) + 2 * later * value(overlap, at)
    assert law.sd_exact[0] == pytest.approx(math.sqrt(variance) / 2, rel=1e-12)


# --- measurement -----------------------------------------------------------------------------------------------------

D, DEPTH, SEEDS = 96, 12, 280


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def end_to_end(stack, tokens, probes, seeds, key):
    """Log gains (exact, trunk) of many networks, each with its own input, weights and cotangent: vectors only."""

    def one(key):
        k_x, k_w, k_g = jax.random.split(key, 3)
        x = jax.random.normal(k_x, (tokens, stack.d), stack.dtype)
        x = x / jnp.sqrt(jnp.mean(x**2, axis=1, keepdims=True))
        g = jax.random.normal(k_g, (probes, tokens, stack.d), stack.dtype)
        weights = Drawn(k_w)
        rows = flow(stack, weights, stack.trace(weights, x), g)
        return jnp.sum(jnp.log(rows["net"])), jnp.sum(jnp.log(rows["trunk_net"]))

    return jax.lax.map(one, jax.random.split(key, seeds))


@functools.cache
def measured(scheme, branch, norm, tokens=1, probes=1, final_norm=False, depth=DEPTH, seeds=SEEDS):
    stack = Stack.make(scheme, branch, depth, D, norm=norm, eps=0.0, final_norm=final_norm, dtype="float32")
    with jax.default_matmul_precision("highest"):
        logs = end_to_end(stack, tokens, probes, seeds, jax.random.key(2024))
    return {name: np.asarray(values, np.float64) for name, values in zip(("exact", "trunk"), logs, strict=True)}


def agree(logs, law, curve):
    """Mean within max(0.03, 3 s.e.), s.e. below 0.02, and the spread within 15 %."""
    values, predicted, sd = logs[curve], getattr(law, f"log_{curve}")[0, 0], getattr(law, f"sd_{curve}")[0]
    error = values.std(ddof=1) / math.sqrt(values.size)
    assert error < 0.02, f"s.e. {error:.4f}"
    difference = values.mean() - predicted
    assert abs(difference) <= max(0.03, 3 * error), (
        f"{curve}: mean {values.mean():.4f} ± {error:.4f}, law {predicted:.4f}"
    )
    spread = values.std(ddof=1)
    if spread > 1e-4 or sd > 1e-4:
        assert abs(spread / sd - 1) < 0.15, f"{curve}: sd {spread:.4f}, law {sd:.4f}"


BRANCHES = (Linear(), Bias(), MLP("relu", ratio=2), MLP("tanh", ratio=2))  # GELU: below, for several tokens and probes
BIASED = MLP("tanh", ratio=2, bias=0.7, bias_in=1.0)


@pytest.mark.repeats(keep=2)
@pytest.mark.parametrize(
    ("scheme", "norm", "branch"),
    [
        ("post-ln", "rms", BRANCHES[0]),
        *(pytest.param("post-ln", "rms", b, marks=pytest.mark.slow) for b in BRANCHES[1:]),
        *(("pre-ln", "layernorm", b) for b in BRANCHES if b.name in ("linear", "mlp:tanh")),
        *(pytest.param(*row, BIASED, marks=pytest.mark.slow) for row in (("post-ln", "layernorm"), ("pre-ln", "rms"))),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_law_is_the_mean_log_gain_of_networks_and_its_spread(scheme, norm, branch):
    logs = measured(scheme, branch, norm)
    law = gradflow.law(scheme, branch, DEPTH, d=D, norm=norm)
    for curve in ("exact", "trunk"):
        agree(logs, law, curve)


@pytest.mark.parametrize(
    ("scheme", "norm"), [("post-ln", "layernorm"), pytest.param("pre-ln", "rms", marks=pytest.mark.slow)]
)
def test_law_with_a_final_norm(scheme, norm):
    logs = measured(scheme, Linear(), norm, final_norm=True)
    law = gradflow.law(scheme, Linear(), DEPTH, d=D, norm=norm, final_norm=True)
    for curve in ("exact", "trunk"):
        agree(logs, law, curve)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branch", "tokens", "probes"),
    [
        pytest.param(Linear(), 4, 1, marks=pytest.mark.slow),
        pytest.param(MLP("gelu", ratio=2), 1, 5, marks=pytest.mark.slow),
        (MLP("tanh", ratio=2), 3, 2),
    ],
    ids=["4 tokens", "5 probes", "3 tokens of 2 probes"],
)
@pytest.mark.parametrize("scheme", ["post-ln"])
def test_law_of_pooled_tokens_and_probes(scheme, branch, tokens, probes):
    logs = measured(scheme, branch, "layernorm", tokens, probes)
    law = gradflow.law(scheme, branch, DEPTH, d=D, norm="layernorm", tokens=tokens, probes=probes)
    for curve in ("exact", "trunk"):
        agree(logs, law, curve)


@pytest.mark.slow
def test_pooled_tokens_with_a_common_part_spread_more_than_the_law_says():
    """E φ ≠ 0: W₂ E φ is the same for every token and does not average out. The mean holds, the spread is a lower bound."""
    branch = MLP("gelu", ratio=2)
    logs = measured("post-ln", branch, "layernorm", 4)
    law = gradflow.law("post-ln", branch, DEPTH, d=D, norm="layernorm", tokens=4)
    for curve in ("exact", "trunk"):
        values = logs[curve]
        error = values.std(ddof=1) / math.sqrt(values.size)
        assert abs(values.mean() - getattr(law, f"log_{curve}")[0, 0]) < max(0.03, 3 * error)
        assert 1 < values.std(ddof=1) / getattr(law, f"sd_{curve}")[0] < 1.6


def test_law_is_not_fed_the_networks_own_moments():
    """Scaling the measured weights parts law and measurement; a law told of the gain follows."""
    stronger = Linear(gain=1.4)
    logs = measured("post-ln", stronger, "rms", seeds=400)
    unaware, aware = (gradflow.law("post-ln", b, DEPTH, d=D, norm="rms") for b in (Linear(), stronger))
    assert abs(logs["trunk"].mean() - unaware.log_trunk[0, 0]) > 1
    for curve in ("exact", "trunk"):
        agree(logs, aware, curve)


def test_typical_and_mean_power_part_as_the_theory_says():
    """Linear branch, V = 2: typical log power −(1 − 1/V²)/d a layer, mean power 1 + (1 − 1/V²)/d."""
    logs = measured("post-ln", Linear(), "rms")["exact"]
    rate = (1 - 1 / 4) / D * DEPTH
    error = 2 * logs.std(ddof=1) / math.sqrt(logs.size)
    assert abs(2 * logs.mean() + rate) < 3 * error + 1.5 / D
    assert np.log(np.mean(np.exp(2 * logs))) > 2 * logs.mean() + rate / 2
