"""Inputs of the kinds on which tools like this went wrong in public; each test varies the input that was reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy

import gradflow
from gradflow import norms
from gradflow.branches import Linear
from gradflow.norms import NORMS
from gradflow.schemes import S, Scheme, l
from gradflow.stack import Drawn, Stack


def close(left, right, rtol=1e-9, atol=0.0):
    np.testing.assert_allclose(left, right, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("level", "d"), [(3.0, 8), (-0.7, 5), (1e6, 12)])
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_zero_variance_has_jacobian_p_over_root_eps(level, d, eps):
    layer, x = norms.LayerNorm.init(d, eps, "float64"), np.full(d, level)
    values = np.linalg.svd(layer.jacobian(x).dense(), compute_uv=False)
    close(values, [eps**-0.5] * (d - 1) + [0], atol=1e-9)
    close(layer(x), np.zeros(d))
    assert layer.jacobian(x).degenerate
    if (level, eps) == (3.0, 1e-5):
        close(values[:7], 316.2278, rtol=1e-6)


@pytest.mark.parametrize(("x", "eps"), [([0.3, -1.1], 1e-6), ([0.3, -1.1], 1e-3), ([5.0, 5.5], 1e-4)])
def test_two_features_leave_layernorm_eps_over_t_cubed(x, eps):
    half = (x[0] - x[1]) / 2
    values = np.linalg.svd(norms.LayerNorm.init(2, eps, "float64").jacobian(x).dense(), compute_uv=False)
    close(values, [eps / (half**2 + eps) ** 1.5, 0], rtol=1e-9, atol=1e-17)
    if (x, eps) == ([0.3, -1.1], 1e-6):
        close(values[0], 2.9154e-6, rtol=1e-4)


@pytest.mark.parametrize("d", [16, 512])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_summed_loss_has_no_gradient_under_layernorm(d, eps):
    layer = norms.LayerNorm.init(d, eps, "float64")
    x = np.random.default_rng(0).normal(size=d)
    close(layer.jacobian(x).rmv(np.ones(d)), np.zeros(d), atol=1e-14)


@pytest.mark.parametrize(("d", "scale"), [(512, 1.0), (32, -1e200)])
def test_profile_started_with_a_summed_loss_says_so(d, scale):
    with pytest.raises(ValueError, match=r"cotangent.*null space"):
        gradflow.contraction(depth=2, d=d, norm="layernorm", seeds=1, cotangent=scale * np.ones((1, d)))
    r = gradflow.contraction(depth=2, d=32, norm="rms", seeds=1, cotangent=np.ones((1, 32)))
    assert np.all(r.exact > 0)


@pytest.mark.parametrize(
    ("level", "eps", "inside", "outside"),
    [
        (1e-3, 1e-5, [301.511, 274.101], [990.099, 9.803]),
        (0.0, 1e-5, [316.2278, 316.2278], [1e5, 1e5]),
        (2.0, 0.5, None, None),
    ],
)
def test_eps_inside_and_outside_the_root_are_different_layers(level, eps, inside, outside):
    x = np.full(4, level)
    for row, expected in ((norms.RMSNorm, inside), (norms.RMSNormOutside, outside)):
        values = np.linalg.svd(row.init(4, eps, "float64").jacobian(x).dense(), compute_uv=False)
        t = np.sqrt(level**2 + eps) if row is norms.RMSNorm else level + eps
        along = eps / t**3 if row is norms.RMSNorm else eps / t**2
        close(values, [1 / t] * 3 + [along])
        if expected:
            close(values, [expected[0]] * 3 + [expected[1]], rtol=1e-4)


@pytest.mark.parametrize(("d", "scale"), [(4, 1.0), (4, -50.0), (9, 2.0)])
def test_variance_is_the_biased_one(d, scale):
    x = scale * np.eye(d)[0]
    sign = np.sign(scale)
    layer = norms.LayerNorm.init(d, 0.0, "float64")
    close(layer(x), sign * np.array([np.sqrt(d - 1)] + [-1 / np.sqrt(d - 1)] * (d - 1)))
    t = abs(scale) * np.sqrt(d - 1) / d
    close(np.linalg.svd(layer.jacobian(x).dense(), compute_uv=False)[0], 1 / t)


@pytest.mark.parametrize(("offset", "step", "d"), [(1000.0, 1e-3, 16), (-500.0, 1e-3, 32), (1e5, 1.0, 16)])
def test_variance_is_two_pass_in_float32(offset, step, d):
    x = np.float32(offset + step * np.arange(d))
    y = x.astype(np.float64) - x.astype(np.float64).mean()
    value = np.linalg.svd(norms.LayerNorm.init(d, 1e-5).jacobian(x).dense(), compute_uv=False)[0]
    close(value, 1 / np.sqrt(np.mean(y**2) + 1e-5), rtol=1e-5)
    if offset == 1000.0:
        close(value, 178.9, rtol=1e-3)


@pytest.mark.repeats
@pytest.mark.parametrize("norm", ["rms", "layernorm"])
def test_deep_post_ln_keeps_its_gradient_and_loses_its_trunk(norm):
    c = 1 - 2**-0.5  # q_f = 1, as W ~ N(0, 1/d)
    r = gradflow.contraction(depth=64, d=256, c=c, norm=norm, seeds=2, probes=4)
    assert np.all(np.abs(r.log_exact) < 1.5)
    np.testing.assert_allclose(r.law_profile.log_trunk[0, 0], -22.2, atol=0.15)
    np.testing.assert_allclose(r.log_trunk, -22.2, atol=4 * r.law_profile.sd_trunk[0])
    assert r.law_profile.sd_trunk[0] < 0.6
    constant = gradflow.contraction(depth=64, d=256, c=c, branch="bias", norm=norm, seeds=2, probes=4)
    np.testing.assert_allclose(constant.log_exact, -22.2, atol=4 * r.law_profile.sd_trunk[0])
    np.testing.assert_allclose(constant.log_exact, constant.log_trunk, rtol=1e-12)


def _end_to_end(scheme, branch, depth, d, norm="rms", final_norm=False, eps=0.0):
    """Trunk and exact end-to-end log gains of one drawn stack at unit strength, float64."""
    from gradflow.flow import flow

    with jax.enable_x64(True):
        stack = Stack.make(scheme, branch, depth, d, norm=norm, eps=eps, final_norm=final_norm)
        keys = jax.random.split(jax.random.key(0), 3)
        x = stack.layer(jax.random.normal(keys[0], (1, d), jnp.float64))
        weights = Drawn(keys[1])
        trace = stack.trace(weights, x)
        rows = flow(stack, weights, trace, jax.random.normal(keys[2], (1, 1, d), jnp.float64))
        return {k: np.asarray(v) for k, v in rows.items()}, np.asarray(trace.out)


@pytest.mark.parametrize("sublayers", [24])
def test_deepnorms_alpha_multiplies_the_shortcut(sublayers):
    alpha = S ** sympy.Rational(1, 4)
    right = Scheme("deepnorm", "test", "α on x", norm_out=True, alpha=alpha)
    wrong = Scheme("deepnorm-wrong", "test", "α on f", norm_out=True, beta=alpha)
    a2 = np.sqrt(sublayers)
    for scheme, power in ((right, a2 / (a2 + 1)), (wrong, 1 / (1 + a2))):
        rows, _ = _end_to_end(scheme, "bias", sublayers, 2048)
        np.testing.assert_allclose(np.sum(np.log(rows["trunk_net"])), sublayers * np.log(power) / 2, atol=0.12)
    if sublayers == 24:
        close(np.exp(12 * np.log(a2 / (a2 + 1))), 0.1076, rtol=1e-3)
        close(np.exp(12 * np.log(1 / (1 + a2))), 5.6e-10, rtol=2e-2)
        assert gradflow.law(right, "bias", 24, norm="rms").trunk[0, 0] == pytest.approx(0.1076, rel=1e-3)
        assert gradflow.law(wrong, "bias", 24, norm="rms").trunk[0, 0] == pytest.approx(5.6e-10, rel=2e-2)


@pytest.mark.parametrize(("sublayers", "norm"), [(64, "rms")])
def test_missing_final_norm_leaves_the_gain_larger_by_the_streams_rms(sublayers, norm):
    bare, out = _end_to_end("pre-ln", "bias", sublayers, 512, norm)
    final, _ = _end_to_end("pre-ln", "bias", sublayers, 512, norm, final_norm=True)
    rms = np.sqrt(np.mean((out - (out.mean() if norm == "layernorm" else 0)) ** 2))
    gain = {name: np.exp(np.sum(np.log(rows["net"]))) for name, rows in (("bare", bare), ("final", final))}
    projection = final["projection"][-1]
    close(gain["bare"] * projection / gain["final"], rms)
    np.testing.assert_allclose(rms, np.sqrt(1 + sublayers), rtol=0.1)
    for wanted in (False, True):
        r = gradflow.contraction(depth=2, d=8, scheme="pre-ln", seeds=1, final_norm=wanted)
        assert r.settings["final_norm"] is wanted
        assert (r.profile.labels[-1] == "final norm") is wanted


@pytest.mark.parametrize("row", NORMS[:2], ids=lambda row: row.name)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_doubled_norm_changes_the_jacobian_by_order_eps_only(row, eps):
    layer = row.init(12, eps, "float64")
    x = 3 * np.random.default_rng(0).normal(size=12)
    once, again = (np.asarray(layer.jacobian(at).dense()) for at in (x, layer(x)))
    np.testing.assert_allclose(again @ once, once, rtol=0, atol=3 * eps + 1e-14)


@pytest.mark.repeats
@pytest.mark.parametrize(("factor", "depth", "dtype"), [(0.5, 1100, "float64"), (0.5, 400, "float32")])
def test_log_gain_survives_where_the_plain_product_does_not(factor, depth, dtype):
    scheme = Scheme("scaled", "test", "J = factor", norm_in=True, alpha=sympy.Float(factor), beta=sympy.Integer(0))
    r = gradflow.contraction(depth=depth, d=4, scheme=scheme, branch="bias", seeds=1, dtype=dtype)
    expected = depth * np.log(factor)
    assert np.dtype(dtype).type(factor) ** depth == 0.0
    for logs in (r.log_exact, r.log_trunk, r.log_rms_gain, r.log_singular_values):
        np.testing.assert_allclose(logs, expected, rtol=1e-6 if dtype == "float32" else 1e-12)
    if depth == 1100:
        close(expected, -762.4619, rtol=1e-6)


def test_a_stream_beyond_the_range_of_its_dtype_is_refused():
    scheme = Scheme("scaled", "test", "J = 3", norm_in=True, alpha=sympy.Float(3), beta=sympy.Integer(0))
    with pytest.raises(ValueError, match=r"^depth: the stream grows beyond the range of float32"):
        gradflow.contraction(depth=900, d=4, scheme=scheme, branch="bias", seeds=1, dtype="float32")


def test_log_gain_of_a_deep_trunk_underflows_as_a_gain_only():
    r = gradflow.contraction(depth=1500, d=16, c=0.4, branch="bias", seeds=1)
    assert r.trunk == r.exact == 0.0 or r.trunk < 1e-300
    np.testing.assert_allclose(r.log_trunk / (1500 * np.log(0.6)), 1, atol=0.15)
    assert np.isfinite(r.log_rms_gain).all()


class _Seen(list):
    """Precisions that were in force while a branch was traced."""


seen = _Seen()


class Spy(Linear):
    """A linear branch that notes the matmul precision it is traced under."""

    def apply(self, params, x):
        seen.append(jax.config.jax_default_matmul_precision)
        return super().apply(params, x)

    def push(self, params, x, basis):
        seen.append(jax.config.jax_default_matmul_precision)
        return super().push(params, x, basis)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_matmul_precision_is_forced_and_stated(dtype):
    seen.clear()
    with jax.default_matmul_precision("bfloat16"):
        r = gradflow.contraction(depth=2, d=7, branch=Spy(), seeds=1, dtype=dtype)
    assert set(seen) == {"highest"}
    assert r.settings["matmul_precision"] == "highest"


def test_float32_matmul_keeps_float32s_digits():
    from gradflow import precision

    A = jnp.asarray([[1.1111111, 2.2222222], [3.3333333, 4.4444444]], jnp.float32)
    with precision.scope("float32"):
        text = jax.make_jaxpr(lambda a: a @ a.T)(A)
        close((A @ A.T)[0, 0], 6.17283938, rtol=1e-6)
    assert "HIGHEST" in str(text)
    branch, basis = Linear(), jnp.eye(2, dtype=jnp.float32)[None]
    with precision.scope("float32"):
        close(branch.push({"w": A}, A[:1], branch.push({"w": A.T}, A[:1], basis))[0, 0, 0], 6.17283938, rtol=1e-6)


def test_a_scheme_that_varies_along_depth_follows_the_sublayer_not_the_block():
    scheme = Scheme("along", "test", "α = l", norm_in=True, alpha=l, beta=sympy.Integer(0))
    with jax.enable_x64(True):
        rows, _ = _end_to_end(scheme, ("linear", "bias"), 2, 4)
    close(rows["skip"], [1, 2, 3, 4])
    close(rows["net"], [1, 2, 3, 4])
