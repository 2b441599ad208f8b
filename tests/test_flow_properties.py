"""Properties over drawn seeds, scales and ε: few shapes, one compiled comparator for each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow import norms
from gradflow.factors import FACTORS
from gradflow.flow import flow
from gradflow.stack import Drawn, Stack

many = settings(max_examples=40, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**31 - 1)
scales = st.floats(-12, 12).map(lambda e: 10.0**e)
gains = st.floats(-3, 3).map(lambda e: 10.0**e)


@functools.cache
def measured(scheme, norm, branch="mlp:tanh"):
    """(seed, input scale, cotangent scale) → five factors, net, both end-to-end gains, and |gJ|/|g| from the product."""
    stack = Stack.make(scheme, branch, 3, 6, norm=norm, eps=0.0)

    @jax.jit
    def run(seed, scale, cotangent_scale):
        keys = jax.random.split(jax.random.key(seed), 3)
        x = scale * jax.random.normal(keys[0], (2, 6), jnp.float64)
        g = cotangent_scale * jax.random.normal(keys[1], (1, 2, 6), jnp.float64)
        weights = Drawn(keys[2])
        trace = stack.trace(weights, x, jnp.broadcast_to(jnp.eye(6), (2, 6, 6)))
        rows = flow(stack, weights, trace, g)
        pushed = jnp.einsum("pti,tij->ptj", g, trace.basis)
        log_gain = jnp.log(jnp.linalg.norm(pushed) / jnp.linalg.norm(g)) + trace.exponent * jnp.log(2.0)
        return rows, log_gain

    return run


@pytest.mark.repeats(keep=2)
@pytest.mark.parametrize("norm", ["layernorm", "rms"])
@pytest.mark.parametrize("scheme", ["post-ln", "pre-ln"])
@many
@given(seed=seeds, scale=scales, cotangent_scale=scales)
def test_net_is_the_product_of_factors_and_their_product_is_the_gain(scheme, norm, seed, scale, cotangent_scale):
    with jax.enable_x64(True):
        rows, log_gain = measured(scheme, norm)(seed, scale, cotangent_scale)
        rows = {k: np.asarray(v) for k, v in rows.items()}
    np.testing.assert_allclose(rows["net"], np.prod([rows[f] for f in FACTORS], axis=0), rtol=1e-13)
    np.testing.assert_allclose(np.sum(np.log(rows["net"])), log_gain, rtol=0, atol=1e-9)
    for figure in ("projection", "trunk_projection", "branch_in_projection"):
        assert np.all((rows[figure] >= 0) & (rows[figure] <= 1 + 1e-12))
    if scheme == "post-ln":
        mean = rows["mean_component"] ** 2 if norm == "layernorm" else 0
        np.testing.assert_allclose(rows["projection"] ** 2 + rows["alignment"] ** 2 + mean, 1, atol=1e-12)
    assert np.all(np.abs(rows["stream_cosine"]) <= 1 + 1e-12)


@pytest.mark.parametrize("norm", ["layernorm", "rms"])
@many
@given(seed=seeds, scale=scales)
def test_homogeneous_branch_returns_what_the_input_scale_takes(norm, seed, scale):
    """f degree 1, ε = 0: scaling x by s leaves every later sub-layer as it is and divides the first norm factor by s."""
    with jax.enable_x64(True):
        run = measured("post-ln", norm, "mlp:relu")
        one, other = (run(seed, s, 1.0)[0] for s in (1.0, scale))
        np.testing.assert_allclose(other["net"][1:], one["net"][1:], rtol=1e-9)
        np.testing.assert_allclose(scale * other["norm"][0], one["norm"][0], rtol=1e-9)
        np.testing.assert_allclose(other["branch"], one["branch"], rtol=1e-9)


@functools.cache
def both_norms(name, eps):
    layer = {row.name: row for row in norms.NORMS}[name].init(7, eps, "float64")

    @jax.jit
    def run(seed, scale, shift):
        keys = jax.random.split(jax.random.key(seed), 2)
        x = scale * (jax.random.normal(keys[0], (7,), jnp.float64) + shift)
        u = jax.random.normal(keys[1], (7,), jnp.float64)
        truth = jax.jacfwd(lambda v: oracle.norm(name, eps, v))(x)
        jacobian = layer.jacobian(x)
        return layer(x), oracle.norm(name, eps, x), jacobian.dense(), truth, jacobian.mv(u), jacobian.rmv(u), u

    return run


@pytest.mark.repeats(keep=4)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("name", [row.name for row in norms.NORMS])
@many
@given(seed=seeds, scale=gains, shift=st.floats(-10, 10))
def test_norm_jacobian_is_the_oracles_at_any_scale(name, eps, seed, scale, shift):
    with jax.enable_x64(True):
        value, true_value, dense, truth, mv, rmv, u = map(np.asarray, both_norms(name, eps)(seed, scale, shift))
    tolerance = 1e-10 * max(np.abs(truth).max(), 1e-300)
    np.testing.assert_allclose(value, true_value, rtol=0, atol=1e-12 * np.abs(true_value).max() * 100)
    np.testing.assert_allclose(dense, truth, rtol=0, atol=tolerance)
    np.testing.assert_allclose(mv, truth @ u, rtol=0, atol=10 * tolerance)
    np.testing.assert_allclose(rmv, truth.T @ u, rtol=0, atol=10 * tolerance)
