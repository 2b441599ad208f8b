"""Every factor of the backward sweep against its definition by autodiff, and the identities between them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import PLAIN, PURE, TABLE, WIDTH, eye, name, normal, run

from gradflow.factors import FACTORS
from gradflow.flow import flow
from gradflow.stack import Drawn, Stack

table = pytest.mark.parametrize(("norm", "scheme", "block", "final"), TABLE, ids=name)


def close(left, right, rtol=1e-11, atol=1e-12):
    np.testing.assert_allclose(left, right, rtol=rtol, atol=atol)


def cumulative(gains):
    """Product from the output back, (S,) → (S + 1,)."""
    return np.append(np.cumprod(np.asarray(gains)[::-1])[::-1], 1.0)


@table
@pytest.mark.usefixtures("x64")
def test_every_factor_is_its_definition(norm, scheme, block, final):
    r = run(norm, scheme, block, final)
    truth = r.oracle.flow(r.x, r.cotangents)
    assert set(r.flow) == set(truth)
    for figure, values in truth.items():
        np.testing.assert_allclose(r.flow[figure], values, rtol=1e-10, atol=1e-11, err_msg=figure)
    close(r.flow["net"], np.prod([r.flow[factor] for factor in FACTORS], axis=0), 1e-14, 0)
    # gJ of every probe: by each token's own block, or by the whole
    over = "pj" if r.stack.mixes else "ptj"
    pushed = jnp.einsum(f"pti,tij->{over}", r.cotangents, r.product)
    close(cumulative(r.flow["net"])[0], jnp.linalg.norm(pushed.ravel()) / jnp.linalg.norm(r.cotangents.ravel()))
    slots = {"": scheme.norm_out, "branch_in_": scheme.norm_in, "branch_out_": scheme.norm_branch}
    for prefix in (
        prefix for prefix, present in slots.items() if not present and scheme.then is None
    ):  # an empty slot costs nothing
        for factor in ("affine", "projection", "norm"):
            np.testing.assert_array_equal(r.flow[f"{prefix}{factor}"][: r.stack.sublayers], 1.0)


@pytest.mark.repeats(keep=2)
@pytest.mark.parametrize("norm", ["layernorm", "rms"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.usefixtures("x64")
def test_pythagoras_at_eps_zero(norm, tokens):
    r = run(norm, PLAIN[0], ("mlp:gelu",), True, tokens, eps=0.0)
    mean = r.flow["mean_component"] ** 2 if norm == "layernorm" else 0
    close(r.flow["projection"] ** 2, 1 - r.flow["alignment"] ** 2 - mean)


@pytest.mark.usefixtures("x64")
def test_final_norm_is_a_last_row_of_its_own():
    r = run("layernorm", PLAIN[1], ("linear",), True)
    bare = run("layernorm", PLAIN[1], ("linear",), False)
    assert r.flow["net"].shape == (r.stack.sublayers + 1,)
    assert bare.flow["net"].shape == (r.stack.sublayers,)
    assert float(r.flow["branch"][-1]) == float(r.flow["skip"][-1]) == 1
    assert float(r.flow["projection"][-1]) < 1


@pytest.mark.usefixtures("x64")
def test_alpha_zero_reports_the_branchs_own_gain_and_no_trunk():
    r = run("layernorm", PURE, ("mlp:tanh", "linear"), False)
    np.testing.assert_array_equal(r.flow["skip"], 1.0)
    np.testing.assert_array_equal(r.flow["trunk_net"], 0.0)
    assert np.all(np.isfinite(r.flow["branch"]))
    assert np.all(r.flow["branch"] > 0)


@pytest.mark.parametrize("scheme", PLAIN, ids=name)
@pytest.mark.usefixtures("x64")
def test_more_probes_pool_their_powers(scheme):
    many = run("rms", scheme, ("mlp:gelu",), False)

    def size(c):
        return float(jnp.sum(c**2))

    single = [flow(many.stack, many.weights, many.trace, c[None])["net"] for c in many.cotangents]
    powers = [size(c) * cumulative(net)[0] ** 2 for c, net in zip(many.cotangents, single, strict=True)]
    close(cumulative(many.flow["net"])[0] ** 2, sum(powers) / size(many.cotangents))


@pytest.mark.parametrize("scheme", PLAIN, ids=name)
@pytest.mark.usefixtures("x64")
def test_gains_do_not_depend_on_the_cotangents_size(scheme):
    r = run("layernorm", scheme, ("mlp:gelu",), False)
    for scale in (1e-200, 1e-3, 1e200):
        again = flow(r.stack, r.weights, r.trace, scale * r.cotangents)
        for figure, values in r.flow.items():
            np.testing.assert_allclose(again[figure], values, rtol=1e-12, atol=1e-13, err_msg=figure)


@pytest.mark.parametrize(("scheme", "norm"), [(PLAIN[0], "layernorm")], ids=name)
def test_compiled_sweep_is_the_oracles(scheme, norm, x64):
    r = run(norm, scheme, ("mlp:relu", "bias"), True, depth=3)
    for figure, values in r.oracle.flow(r.x, r.cotangents).items():
        np.testing.assert_allclose(r.flow[figure], values, rtol=1e-10, atol=1e-11, err_msg=figure)


def test_float32_sweep_keeps_its_dtype_and_digits():
    stack = Stack.make("post-ln", "mlp:gelu", 6, WIDTH, norm="layernorm", dtype="float32")
    x = jax.random.normal(jax.random.key(1), (2, WIDTH))
    weights, cotangents = Drawn(jax.random.key(0)), jax.random.normal(jax.random.key(2), (1, 2, WIDTH))
    trace = stack.trace(weights, x, eye(2, WIDTH, jnp.float32))
    rows = flow(stack, weights, trace, cotangents)
    assert all(v.dtype == (np.int32 if k == "degenerate" else np.float32) for k, v in rows.items())
    pushed = np.einsum("pti,tij->ptj", cotangents, trace.basis) * 2.0 ** int(trace.exponent)
    truth = np.linalg.norm(pushed) / np.linalg.norm(cotangents)
    np.testing.assert_allclose(cumulative(rows["net"])[0], truth, rtol=2e-5)


def test_a_row_without_variance_is_counted_and_stays_finite(x64):
    from gradflow.stack import Given

    stack = Stack.make("post-ln", "bias", 2, 4, norm="layernorm", eps=1e-5)
    x = jnp.ones((1, 4))
    rows = flow(stack, (w := Given(({"b": jnp.zeros((2, 4))},))), stack.trace(w, x), normal(0, 1, 1, 4))
    np.testing.assert_array_equal(rows["degenerate"], [1, 1])
    assert all(np.isfinite(v).all() for k, v in rows.items() if not k.endswith("_cosine"))
    np.testing.assert_allclose(rows["norm"], 1e5**0.5, rtol=1e-12)
