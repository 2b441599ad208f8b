"""A symbolic result is used, not retyped: a wrong derivation makes wrong numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy

import gradflow
from gradflow import norms
from gradflow.branches import branch_of
from gradflow.stack import Drawn, Stack
from gradflow.symbolic import depth as depth_law
from gradflow.symbolic import moments
from gradflow.symbolic import norms as symbolic


def dense(name="layernorm"):
    x = np.array([0.3, -1.0, 2.0, 0.7])
    row = {row.name: row for row in norms.NORMS}[name]
    layer = row.init(4, 1e-2, "float64")
    with jax.enable_x64(True):
        return (
            np.asarray(layer.jacobian(x).dense()),
            np.asarray(layer(x)),
            np.asarray(jax.jacfwd(layer)(jnp.asarray(x))),
        )


@pytest.mark.parametrize("name", ["layernorm", "rms-outside"])
@pytest.mark.parametrize("part", ["removed", "scale"])
def test_a_wrong_norm_formula_gives_a_wrong_jacobian(tamper, name, part):
    right, value, _ = dense(name)
    formula = symbolic.norm_formula
    factor = sympy.Rational(9, 10)

    def wrong(row):
        f = formula(row)
        return dataclasses.replace(f, **{part: getattr(f, part) * factor})

    tamper(symbolic, "norm_formula", wrong)
    bent, bent_value, bent_auto = dense(name)
    assert np.abs(bent - right).max() > 1e-2 * np.abs(right).max()
    np.testing.assert_allclose(bent_auto, bent, atol=1e-12)
    if part == "scale":
        np.testing.assert_allclose(bent, 0.9 * right, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(bent_value, 0.9 * value, rtol=1e-12)
    else:
        np.testing.assert_allclose(bent_value, value, rtol=1e-12)


def test_after_tampering_the_right_formula_is_back():
    right, _, auto = dense()
    y = np.array([0.3, -1.0, 2.0, 0.7]) - 0.5
    t2 = np.mean(y**2) + 1e-2
    np.testing.assert_allclose(right, (np.eye(4) - 0.25 - np.outer(y, y) / (4 * t2)) / np.sqrt(t2), atol=1e-14)
    np.testing.assert_allclose(auto, right, atol=1e-13)


def test_a_wrong_centring_flag_changes_value_and_jacobian(tamper):
    right, value, _ = dense()
    formula = symbolic.norm_formula
    tamper(symbolic, "norm_formula", lambda row: dataclasses.replace(formula(row), centred=False))
    bent, bent_value, _ = dense()
    assert np.abs(bent - right).max() > 0.05
    assert np.abs(bent_value - value).max() > 0.05


def product(branch="mlp:tanh"):
    with jax.enable_x64(True):
        stack = Stack.make("post-ln", branch, 2, 4, norm="layernorm")
        x = jax.random.normal(jax.random.key(0), (1, 4), jnp.float64)
        trace = stack.trace(Drawn(jax.random.key(1)), x, jnp.eye(4)[None])
        return np.asarray(trace.basis) * 2.0 ** int(trace.exponent), np.asarray(trace.out)


def test_a_wrong_slope_of_an_activation_gives_a_wrong_product(tamper):
    right, out = product()
    slope = moments.slope
    tamper(moments, "slope", lambda phi: slope(phi) * sympy.Rational(9, 10))
    bent, same = product()
    assert np.abs(bent - right).max() > 1e-2 * np.abs(right).max()
    np.testing.assert_array_equal(same, out)


def test_a_wrong_slope_gives_a_wrong_law(tamper):
    right = gradflow.law("post-ln", "mlp:tanh", 12).log_exact[0, 0]
    slope = moments.slope
    tamper(moments, "slope", lambda phi: slope(phi) * sympy.Rational(9, 10))
    assert branch_of("mlp:tanh").moments().chi == pytest.approx(0.81 * 0.46440, rel=1e-4)
    assert abs(gradflow.law("post-ln", "mlp:tanh", 12).log_exact[0, 0] - right) > 0.1


@pytest.mark.repeats
@pytest.mark.parametrize(("scheme", "function"), [("post-ln", "output_norm"), ("pre-ln", "input_norm")])
def test_a_wrong_depth_law_gives_a_wrong_prediction(tamper, scheme, function):
    right = gradflow.law(scheme, "mlp:relu", 24, d=256)
    derived = getattr(depth_law, function)

    def wrong():
        law = derived()
        return dataclasses.replace(law, log_branch=law.log_branch.subs(depth_law.chi, 2 * depth_law.chi))

    tamper(depth_law, function, wrong)
    bent = gradflow.law(scheme, "mlp:relu", 24, d=256)
    assert abs(bent.log_exact[0, 0] - right.log_exact[0, 0]) > 0.5
    r = gradflow.contraction(depth=24, d=8, scheme=scheme, branch="mlp:relu", seeds=1, norm="layernorm")
    wanted = gradflow.law(scheme, r.law_profile and branch_of("mlp:relu"), 24, d=8)
    assert r.law_profile.branch.shape == wanted.branch.shape


def test_a_wrong_strength_of_the_norm_reading_moves_the_measurement(tamper):
    from gradflow.symbolic import readings

    right = gradflow.contraction(depth=2, d=64, seeds=1, probes=1).settings["q_f"]
    derived = readings.readings()
    tamper(readings, "readings", lambda: dataclasses.replace(derived, strength=derived.strength * 2))
    r = gradflow.contraction(depth=2, d=64, seeds=1, probes=1)
    assert r.settings["q_f"] == pytest.approx(4 * right, rel=1e-12)
    assert np.mean(r.profile.branch_rms**2) == pytest.approx(4 * right, rel=0.5)


def test_a_wrong_overlap_of_two_rows_gives_a_wrong_law_of_attention(tamper):
    from gradflow.symbolic import attention

    def exact():
        return gradflow.law("post-ln", "attention", 2, tokens=4, cotangent_cosine=1.0).exact[0, 0]

    right, derived = exact(), attention.overlap()
    tamper(attention, "overlap", lambda: attention.Overlap(derived.values / 2, derived.scores))
    assert abs(exact() / right - 1) > 0.05
