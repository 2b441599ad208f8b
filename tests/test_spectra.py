"""The four ways to a spectrum against each other, against autodiff and NumPy, and against 60 digits."""

import json
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from refusals import refused
from typer.testing import CliRunner

import gradflow
from gradflow import precision
from gradflow.branches import MLP, Linear
from gradflow.cli import app
from gradflow.norms import BY_NAME
from gradflow.profiles import gaussian_state
from gradflow.spectra import check, compact, forecast, krylov, lyapunov
from gradflow.spectra.choice import forecasts
from gradflow.spectra.network import Network
from gradflow.stack import Drawn, Given, Stack
from gradflow.streams.stack import StreamStack

FEW = (MLP("gelu", ratio=2 / 20), MLP("silu", ratio=1 / 20, gated=True))


def network(stack, tokens=2, path="exact", key=0):
    with precision.scope(stack.dtype):
        x = precision.normal(jax.random.key(key + 1), (tokens, stack.d), stack.dtype)
        return Network(Drawn(jax.random.key(key)), x, stack, path)


def plain_values(model, x):
    """Singular values of ``jax.jacrev`` of the whole network, by NumPy."""
    with precision.scope(x.dtype):
        jacobian = np.asarray(jax.jacrev(model)(x)).reshape(x.size, x.size)
    return np.linalg.svd(jacobian, compute_uv=False)


@pytest.mark.parametrize(
    ("scheme", "block", "path"),
    [
        ("post-ln", ["attention", "mlp:gelu"], "exact"),
        pytest.param("sandwich", ["mlp:tanh"], "exact", marks=pytest.mark.slow),
        pytest.param("deepnorm", ["attention", "mlp:gelu"], "trunk", marks=pytest.mark.slow),
        pytest.param("mix-ln", ["mlp:silu"], "trunk", marks=pytest.mark.slow),
    ],
)
def test_dense_is_the_svd_of_autodiff_whatever_the_chunk(scheme, block, path):
    stack = Stack.make(scheme, block, 4, 8, final_norm=True)
    found = gradflow.spectrum(stack, method="dense", path=path, tokens=3, key=5)
    with precision.scope("float64"):
        drawn = Drawn(jax.random.split(jax.random.key(5), 1)[0])
        state = gaussian_state(stack, 3, 5)
        state = state / np.sqrt(np.mean(state**2, -1, keepdims=True))
        net = Network(drawn, jnp.asarray(state), stack, path)
        expected = plain_values(net.run, net.x)
    np.testing.assert_allclose(found.singular_values[0], expected, rtol=0, atol=1e-13 * expected[0])
    error = math.exp(found.log_error[0, 0])
    assert 0 < error < 1e-13 * expected[0]
    chunked = gradflow.spectrum(stack, method="dense", path=path, tokens=3, key=5, chunk=5)
    np.testing.assert_allclose(chunked.singular_values, found.singular_values, rtol=0, atol=1e-14 * expected[0])
    rms = np.sqrt(np.mean(expected**2))
    assert found.rms_gain[0] == pytest.approx(rms, rel=1e-13)


def test_streams_and_lists_of_functions_have_spectra():
    stack = StreamStack.make("hyper-connections", ["mlp:tanh"], 2, 6)
    found = gradflow.spectrum(stack, tokens=2, method="dense")
    assert found.n == 12
    assert math.exp(found.log_error[0, 0] - found.log_singular_values[0, 0]) < 1e-13
    rng = np.random.default_rng(0)
    w = rng.standard_normal((5, 5)) / 5**0.5

    @jax.custom_vjp
    def doubled(x):
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    x = rng.standard_normal((2, 5))
    items = [gradflow.Residual(lambda x: jnp.tanh(x @ w.T), norm_out="layernorm"), lambda x: x @ w]
    expected = plain_values(lambda x: items[1](gradflow.norms.LayerNorm.init(5)(x + jnp.tanh(x @ w.T))), x)
    for chain, factor in ((items, 1), ([*items, doubled], 2)):
        found = gradflow.spectrum(chain, x, method="dense")
        np.testing.assert_allclose(found.singular_values[0], factor * expected, atol=1e-14 * expected[0])
        top = gradflow.spectrum(chain, x, method="matrix-free", top=3, pairs=8)
        np.testing.assert_allclose(top.singular_values[0], factor * expected[:3], rtol=1e-10)


@pytest.mark.parametrize(
    ("scheme", "norm", "path"),
    [
        ("post-ln", "layernorm", "exact"),
        pytest.param("deepnorm", "rms", "exact", marks=pytest.mark.slow),
        pytest.param("pre-ln", "layernorm", "exact", marks=pytest.mark.slow),
        pytest.param("sandwich", "rms", "exact", marks=pytest.mark.slow),
        pytest.param("post-ln", "rms", "trunk", marks=pytest.mark.slow),
        pytest.param("keel", "layernorm", "trunk", marks=pytest.mark.slow),
    ],
)
def test_compact_is_dense(scheme, norm, path):
    stack = Stack.make(scheme, FEW, 3, 20, norm=norm, final_norm=scheme != "post-ln")
    one, two = (gradflow.spectrum(stack, method=m, path=path, tokens=2) for m in ("compact", "dense"))
    largest = two.singular_values[0, 0]
    np.testing.assert_allclose(one.singular_values, two.singular_values, rtol=0, atol=2e-14 * largest)
    assert one.null == two.null
    assert math.exp(one.log_error[0, 0]) < 1e-13 * largest


def given(stack, gains):
    """A random stack's own weights, with learned gains at the output norms."""
    drawn = Drawn(jax.random.key(0))
    pieces = drawn.along_depth(stack)
    layers = [drawn.layer(stack, jax.tree.map(lambda leaf, i=i: leaf[i], pieces)) for i in range(stack.depth)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[layer.params for layer in layers])
    norm = BY_NAME[stack.norm].init(stack.d, stack.eps, stack.dtype)
    return Given(params, ((None, None, replace(norm, gain=gains, bias=jnp.zeros_like(gains))),))


@pytest.mark.parametrize("path", ["exact", pytest.param("trunk", marks=pytest.mark.slow)])
def test_a_learned_gain_has_its_own_route(path):
    stack, rng = Stack.make("post-ln", FEW[:1], 3, 20), np.random.default_rng(0)
    gains = rng.uniform(0.3, 1.5, (3, 20)) * rng.choice([-1, 1], (3, 20))
    with precision.scope("float64"):
        weights, x = given(stack, jnp.asarray(gains)), rng.standard_normal((2, 20))
        one, two = (gradflow.spectrum(stack, x, weights=weights, method=m, path=path) for m in ("compact", "dense"))
        assert one.settings["learned gain"]
        np.testing.assert_allclose(
            one.singular_values, two.singular_values, rtol=0, atol=1e-14 * two.singular_values.max()
        )
        gains[1, 3] = 0
        dead = given(stack, jnp.asarray(gains))
        refused(lambda: gradflow.spectrum(stack, x, weights=dead, method="compact"), "method: compact needs")


def test_the_measured_error_is_that_of_a_planted_fault():
    net = network(Stack.make("post-ln", "mlp:tanh", 2, 12), 1)
    with precision.scope("float64"):
        jacobian = np.asarray(jax.jacrev(net.run)(net.x)).reshape(12, 12)
        fault = 1e-5 * np.random.default_rng(0).standard_normal((12, 12))
        wrong = jnp.asarray(jacobian + fault)
        seen = check.log_error(net, lambda v: v @ wrong.T, 0.0, jax.random.key(3))
    assert math.exp(seen) == pytest.approx(np.linalg.norm(fault), rel=0.6)  # 8 pairs: about 25 % of spread


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["hutchinson", "xtrace"])
def test_ritz_values_lie_within_their_residuals_and_probes_within_their_errors(trace):
    net = network(Stack.make("pre-ln", ["attention", "mlp:gelu"], 3, 24), 5)
    exact = plain_values(net.run, net.x)
    with precision.scope("float64"):
        found = krylov.ritz(net, jax.random.key(1), 8, 28, 16, trace)
    scale = 2.0 ** float(found.exponent)
    values, residuals = np.asarray(found.values) * scale, np.asarray(found.residuals) * scale
    assert (np.abs(values - exact[:8]) <= residuals + 1e-13 * exact[0]).all()
    assert np.abs(values / exact[:8] - 1).max() < 0.01
    power, error = float(found.power) * scale**2, float(found.power_error) * scale**2
    assert abs(power - (exact**2).sum()) < 4 * error
    assert error < 0.2 * power


def test_a_krylov_space_that_closes_ends_there():
    upper = np.array([[2.0, 1.0, np.nan], [0.0, 1.0, np.nan], [0.0, 0.0, np.nan]])
    values, residuals = krylov._triplets(jnp.asarray(upper, jnp.float32), jnp.asarray(0.0, jnp.float32))
    np.testing.assert_allclose(values[:2], np.linalg.svd(upper[:2, :2], compute_uv=False), rtol=1e-6)
    assert np.isnan(values[2])
    assert residuals[0] < 1e-5


def digits(net, frame):
    """Logs of the triangle of J Q, all layers multiplied and factored in 120 digits."""
    stack, weights = net.model, net.weights
    states = stack.trace(weights, net.x).x
    numbers, pieces = stack.multipliers(), weights.along_depth(stack)
    with mpmath.workdps(120):
        product = mpmath.matrix(np.asarray(frame).tolist())
        for l in range(stack.depth):
            layer = weights.layer(stack, jax.tree.map(lambda leaf, l=l: leaf[l], pieces))
            step = stack.sublayer(layer, 0, numbers.alpha[l, 0], numbers.beta[l, 0], states[l])
            jacobian = np.asarray(step.push(jnp.eye(stack.d)[None])[0])
            product = mpmath.matrix(jacobian.tolist()) * product
        _, r = mpmath.qr(product)
        return [float(mpmath.log(abs(r[i, i]))) for i in range(r.cols)]


@pytest.mark.parametrize("every", [1, 3])
def test_exponents_against_120_digits(every):
    net = network(Stack.make("pre-ln", (Linear(0.5),), 60, 5), 1)
    with precision.scope("float64"):
        key = jax.random.key(2)
        frame = jnp.linalg.qr(precision.normal(key, (1, 5, 5), "float64"))[0][0]
        expected = sorted(digits(net, frame), reverse=True)
        found = lyapunov.exponents(net, key, 5, every)
    np.testing.assert_allclose(found.logs, expected, rtol=0, atol=2e-13)
    assert float(found.log_frobenius) == pytest.approx(
        0.5 * np.logaddexp.reduce(2 * np.log(plain_values(net.run, net.x)))
    )


def test_exponents_of_a_norm_at_eps_0_are_minus_infinity_and_counted():
    stack = Stack.make("post-ln", "linear", 70, 8, norm="layernorm", eps=0.0)
    found = gradflow.spectrum(stack, method="lyapunov", seeds=2, every=2)
    assert (found.null == 2).all()  # the mean, and the length
    assert found.settings["qr_every"] == [2]
    assert (found.exponent_error[np.isfinite(found.log_singular_values)] > 0).all()
    dense = gradflow.spectrum(stack, method="dense", seeds=2)  # of which the largest are still right
    np.testing.assert_allclose(found.log_rms_gain, dense.log_rms_gain, rtol=1e-10)


@pytest.mark.parametrize(("depth", "norm"), [(3000, "rms"), pytest.param(100_000, "layernorm", marks=pytest.mark.slow)])
def test_float32_exponents_at_great_depth(depth, norm):
    one, two = (
        gradflow.spectrum(
            Stack.make("post-ln", "linear", depth, 32, norm=norm, eps=0.0, dtype=dtype), method="lyapunov"
        )
        for dtype in ("float64", "float32")
    )
    assert one.null == two.null
    both = np.isfinite(one.exponents[0])
    assert np.abs(one.exponents[0][both] - two.exponents[0][both]).max() < 1e-5
    np.testing.assert_allclose(two.log_rms_gain, one.log_rms_gain, rtol=1e-4)


def test_float32_errors_are_stated():
    stack = Stack.make("post-ln", "mlp:gelu", 6, 24)
    wide, narrow = (gradflow.spectrum(replace(stack, dtype=dtype), method="dense") for dtype in ("float64", "float32"))
    gap = np.abs(narrow.singular_values - wide.singular_values).max()
    error = math.exp(narrow.log_error[0, 0])
    assert 1e-8 < gap <= 3 * error < 1e-4
    top = gradflow.spectrum(replace(stack, dtype="float32"), method="matrix-free", top=2, pairs=12)
    np.testing.assert_allclose(top.singular_values[0], wide.singular_values[0, :2], rtol=1e-3)


def test_the_networks_are_those_of_profile():
    stack = Stack.make("post-ln", "mlp:tanh", 3, 10)
    x = np.random.default_rng(0).standard_normal((1, 10))
    sent = np.eye(10)[:, None, :]
    powers = [gradflow.profile(stack, x, g, seeds=2, key=4).exact[:, 0] ** 2 for g in sent]
    found = gradflow.spectrum(stack, x, seeds=2, key=4, method="dense")
    np.testing.assert_allclose(found.rms_gain, np.sqrt(np.mean(powers, 0)), rtol=1e-12)


@pytest.mark.slow
def test_auto_says_which_and_why(capsys):
    small, deep = Stack.make("post-ln", "mlp:gelu", 3, 16), Stack.make("post-ln", "mlp:gelu", 250, 8)
    assert gradflow.spectrum(small).method == "dense"
    assert "sub-layers" in gradflow.spectrum(deep).why
    narrow = Stack.make("post-ln", MLP("relu", ratio=1 / 64), 4, 64)
    found = gradflow.spectrum(narrow)
    assert found.method == "compact"
    assert "rank 12 of 64" in found.why
    wide = Stack.make("pre-ln", ["attention", "mlp:gelu"], 24, 512)
    refused(lambda: gradflow.spectrum(wide, tokens=64, method="dense"), "method: dense would take about .*force=True")
    costs = forecasts(wide, tokens=64)
    assert costs["matrix-free"].seconds < costs["dense"].seconds / 100
    assert set(costs) == {"dense", "matrix-free", "lyapunov"}
    assert capsys.readouterr().out == ""


def test_forecasts_grow_as_the_work_does():
    def seconds(d, depth, method):
        with precision.scope("float64"):
            net = network(Stack.make("post-ln", "mlp:gelu", depth, d), 1)
            return forecast._cost(net, method, 8, 28, 16, 4, forecast.TYPICAL).seconds

    assert seconds(1024, 24, "dense") / seconds(512, 24, "dense") == pytest.approx(8, rel=0.2)
    assert seconds(256, 1000, "lyapunov") / seconds(256, 100, "lyapunov") == pytest.approx(10, rel=0.1)
    assert forecast.duration(30000) == "8 h"
    assert forecast.size(2.5e9) == "2.5 GB"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "densest"}, "method: unknown 'densest'; did you mean 'dense'"),
        ({"path": "trunks"}, "path: unknown 'trunks'; did you mean 'trunk'"),
        ({"method": "compact"}, "method: compact needs a Stack whose tokens stay apart"),
        ({"top": 99}, "top: the Jacobian has 8 singular values, got 99"),
        ({"top": 4, "pairs": 3}, "pairs: the 4 largest values need at least as many"),
        ({"trace": "xtrace"}, "probes: XTrace takes fewer than half"),
        ({"x": np.full((1, 8), np.nan)}, "x: holds"),
        ({"x": np.zeros((1, 7))}, r"x: needs shape \(tokens, 8\)"),
        ({"seeds": 0}, "seeds: needs a whole number of at least 1"),
        ({"chunk": -1}, "chunk: needs a whole number of at least 1"),
    ],
)
def test_bad_input(options, message):
    stack = Stack.make("post-ln", "linear", 2, 8)
    refused(lambda: gradflow.spectrum(stack, **options), message)


def test_models_that_have_none():
    refused(lambda: gradflow.spectrum(3), "model: no spectrum of a int")
    streams = StreamStack.make("hyper-connections", ["mlp:tanh"], 2, 6)
    refused(lambda: gradflow.spectrum(streams, path="trunk"), "path: several streams")
    refused(lambda: gradflow.spectrum(streams, method="lyapunov"), "method: lyapunov needs a Stack")
    refused(lambda: gradflow.spectrum([jnp.tanh]), "x: a list of functions needs the state")


def test_a_jacobian_that_is_zero_has_a_table_and_a_figure():
    stack = Stack.make("post-ln", "linear", 2, 4, eps=0.0)
    found = gradflow.spectrum(stack, np.zeros((1, 4)), method="dense")
    assert found.null == 4
    assert "nothing comes through" in str(found)
    assert found.plot() is not None


def test_shell_table_json_and_figure(tmp_path):
    base = ["spectrum", "post-ln", "--block", "mlp:tanh", "--depth", "2", "--d", "12"]
    done = CliRunner().invoke(app, [*base, "--seeds", "2", "--plot", str(tmp_path / "s.png")])
    assert done.exit_code == 0, done.output
    assert "By dense" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert (tmp_path / "s.png").stat().st_size > 5000
    found = json.loads(CliRunner().invoke(app, [*base, "--method", "matrix-free", "--top", "2", "--json"]).stdout)
    assert len(found["log_singular_values"][0]) == 2
    costs = json.loads(CliRunner().invoke(app, [*base, "--forecast", "--json"]).stdout)
    assert set(costs) == {"dense", "compact", "matrix-free", "lyapunov"}
    assert compact.columns(network(Stack.make("post-ln", "linear", 2, 12), 1)) is None


def test_a_wrong_path_is_told(shell):
    code, _, error = shell("spectrum", "nowhere/model", "--text", "a text")
    assert (code, error.count("\n")) == (2, 1)
    assert "'nowhere/model' is no folder" in error
