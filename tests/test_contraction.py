"""The main job: its attributes and their shapes, reproducibility, precision, and what may be asked of it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow.branches import MLP
from gradflow.factors import FACTORS
from gradflow.schemes import Scheme

SMALL = dict(depth=4, d=8, seeds=3)
CURVES = ("exact", "trunk", "local", "bound")


@pytest.fixture(scope="module")
def small():
    return gradflow.contraction(**SMALL)


def figures(r):
    """Every number of a result, as JSON text."""
    return json.dumps(r.to_dict(), sort_keys=True, allow_nan=False)


def test_attributes_named_in_the_design_have_their_shapes(small):
    r = small
    assert r.closed_form == pytest.approx(0.8**4, rel=1e-15)
    assert r.c == 0.2
    for name in ("bound", "trunk", "exact", "log_trunk", "log_exact", "rms_gain", "log_rms_gain"):
        value = getattr(r, name)
        assert value.shape == (3,)
        assert value.dtype == np.float64
    assert r.singular_values.shape == (3, 8)
    assert r.singular_values.dtype == np.float64
    assert np.all(np.diff(r.singular_values, axis=1) <= 0)
    for interval in (r.trunk_law, r.law, r.rms_law, r.c_trunk, r.c_exact):
        assert interval.low <= interval.value <= interval.high
        assert float(interval) == interval.value
    assert isinstance(r.verdict, str)
    assert "\n" not in r.verdict
    assert r.degenerate == 0


def test_profile_and_law_profile_have_one_shape(small):
    p, q = small.profile, small.law_profile
    names = (*FACTORS, "net", "stream_rms", "branch_rms", "stream_cosine", "alignment", "mean_component")
    for name in names:
        assert getattr(p, name).shape == (3, 4)
        assert getattr(q, name).shape == (1, 4)
    for name in CURVES:
        assert getattr(p, name).shape == (3, 5)
        assert getattr(q, name).shape == (1, 5)
        np.testing.assert_array_equal(getattr(p, name)[:, -1], 1.0)
    assert p.token_cosine.shape == p.gradient_cosine.shape == (3, 4)
    assert np.isnan(p.token_cosine).all()
    assert p.labels == q.labels == ("1", "2", "3", "4")


def test_curves_are_the_sums_of_their_factors(small):
    p = small.profile
    local = p.affine * p.projection * p.norm * p.skip
    for name, gains in {
        "exact": p.net,
        "local": local,
        "trunk": None,
        "bound": p.trunk_projection * p.radius_gain * p.skip,
    }.items():
        if gains is not None:
            total = np.cumprod(gains[:, ::-1], axis=1)[:, ::-1]
            np.testing.assert_allclose(getattr(p, name)[:, :-1], total, rtol=1e-13)
    np.testing.assert_allclose(p.net, np.prod([getattr(p, f) for f in FACTORS], axis=0), rtol=1e-14)
    np.testing.assert_array_equal(small.exact, p.exact[:, 0])
    np.testing.assert_array_equal(small.trunk, p.trunk[:, 0])
    np.testing.assert_array_equal(small.bound, p.bound[:, 0])


def test_measured_c_is_one_minus_the_geometric_gain_per_layer(small):
    for interval, logs in ((small.c_trunk, small.log_trunk), (small.c_exact, small.log_exact)):
        assert interval.value == pytest.approx(1 - np.exp(np.mean(logs) / 4), rel=1e-12)
    from scipy import stats

    low, high = stats.t.interval(0.95, 2, np.mean(small.log_exact), stats.sem(small.log_exact))
    assert small.c_exact.low == pytest.approx(1 - np.exp(high / 4), rel=1e-9)
    assert small.c_exact.high == pytest.approx(1 - np.exp(low / 4), rel=1e-9)


def test_rms_gain_is_the_singular_values_root_mean_square(small):
    np.testing.assert_allclose(small.rms_gain, np.sqrt(np.mean(small.singular_values**2, axis=1)), rtol=1e-12)


def test_settings_state_what_was_run(small):
    stated = small.settings
    wanted = dict(scheme="post-ln", branch="linear", norm="rms", eps=0.0, depth=4, d=8, c=0.2, tokens=1, seeds=3, key=0)
    wanted |= dict(cotangent="gaussian", dtype="float64", matmul_precision="highest", reading="norm", final_norm=False)
    assert {k: stated[k] for k in wanted} == wanted
    assert stated["q_f"] == pytest.approx(1 / 0.64 - 1)
    assert "init" in stated
    assert "1/fan_in" in stated["init"]


def test_the_same_call_gives_the_same_numbers_and_another_key_others(small):
    assert figures(gradflow.contraction(**SMALL)) == figures(small)
    other = gradflow.contraction(**SMALL, key=1)
    assert not np.any(np.isin(other.exact, small.exact))
    assert len(set(small.exact)) == 3


@pytest.mark.parametrize("x64", [False, True])
def test_numbers_do_not_depend_on_a_global_x64_flag_and_none_is_flipped(small, x64):
    before = jax.config.jax_enable_x64
    try:
        jax.config.update("jax_enable_x64", x64)
        assert figures(gradflow.contraction(**SMALL)) == figures(small)
        assert jax.config.jax_enable_x64 is x64
        assert jax.config.jax_default_matmul_precision is None
        law = gradflow.law("pre-ln", depth=5, d=64)
        assert law.log_exact.dtype == np.float64
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("options", [dict(tokens=3, branch="mlp:relu", norm="layernorm", scheme="pre-ln")])
def test_to_dict_is_json_without_nan(options, dtype):
    r = gradflow.contraction(depth=2, d=6, seeds=1, dtype=dtype, **options)
    again = json.loads(json.dumps(r.to_dict(), allow_nan=False))
    assert again["exact"] == r.exact.tolist()
    assert again["settings"]["dtype"] == dtype
    assert len(again["singular_values"][0]) == 6 * options.get("tokens", 1)
    assert again["c_trunk"]["low"] is None  # one seed has no interval
    assert again["profile"]["labels"] == ["1", "2"]


def test_float32_leg_states_itself_and_finds_the_law():
    r = gradflow.contraction(depth=24, d=64, seeds=4, dtype="float32", branch="mlp:relu")
    assert r.settings["dtype"] == "float32"
    assert r.profile.net.dtype == np.float32
    np.testing.assert_allclose(r.profile.net, np.prod([getattr(r.profile, f) for f in FACTORS], axis=0), rtol=1e-5)
    assert abs(np.mean(r.log_exact) - np.log(r.law.value)) < 4 * r.law_profile.sd_exact[0] / 2


@pytest.mark.parametrize("depths", [[2, 4], (2, 4), np.array([2, 4])])
def test_depth_sequence_is_a_sweep_of_single_calls(depths):
    sweep = gradflow.contraction(depths, d=8, seeds=2)
    assert [r.depth for r in sweep] == [2, 4]
    assert len(sweep) == 2
    assert sweep.depths.tolist() == [2, 4]
    assert figures(sweep[1]) == figures(gradflow.contraction(4, d=8, seeds=2))
    assert json.loads(json.dumps(sweep.to_dict(), allow_nan=False))["depths"] == [2, 4]
    assert sweep.verdict == sweep[1].verdict


def test_numpy_integers_count_as_whole_numbers(small):
    assert figures(gradflow.contraction(np.int64(4), np.int32(8), seeds=np.int64(3))) == figures(small)


@pytest.mark.slow
def test_probes_estimate_the_same_figures_without_the_product():
    whole = gradflow.contraction(depth=3, d=16, seeds=2, branch="mlp:gelu")
    probed = gradflow.contraction(depth=3, d=16, seeds=2, branch="mlp:gelu", probes=500)
    assert probed.singular_values is None
    assert probed.log_singular_values is None
    assert probed.settings["probes"] == 500
    np.testing.assert_allclose(probed.rms_gain, whole.rms_gain, rtol=0.05)
    np.testing.assert_allclose(probed.exact, probed.rms_gain, rtol=1e-12)


def test_rms_gain_and_spectrum_are_the_products_whatever_the_cotangent():
    given = np.eye(8)[:1]
    a, b = gradflow.contraction(**SMALL), gradflow.contraction(**SMALL, cotangent=given)
    np.testing.assert_allclose(a.rms_gain, b.rms_gain, rtol=1e-14)
    np.testing.assert_allclose(a.singular_values, b.singular_values, rtol=1e-12)
    assert np.all(b.exact <= b.singular_values[:, 0] * (1 + 1e-12))
    assert b.settings["cotangent"] == b.cotangent == "given"


def test_one_seed_has_a_value_and_no_interval():
    r = gradflow.contraction(depth=2, d=8, seeds=1)
    assert r.exact.shape == (1,)
    assert np.isfinite(r.c_exact.value)
    assert np.isnan(r.c_exact.low)
    assert "nan" not in str(r)


def test_three_tokens_are_pooled_in_every_figure():
    r = gradflow.contraction(depth=3, d=8, tokens=3, seeds=2, branch="mlp:gelu", norm="layernorm")
    assert r.singular_values.shape == (2, 24)
    assert np.isfinite(r.profile.token_cosine).all()
    assert np.isfinite(r.profile.gradient_cosine).all()
    np.testing.assert_allclose(r.rms_gain, np.sqrt(np.mean(r.singular_values**2, axis=1)), rtol=1e-12)
    np.testing.assert_allclose(r.singular_values[:, -3:], 0, atol=1e-13)  # each token's 1


ROW = np.arange(1.0, 9.0)
SAME_COTANGENT = {
    "list": [ROW.tolist()],
    "numpy": ROW[None],
    "vector": ROW,
    "float32": ROW[None].astype(np.float32),
    "integers": np.arange(1, 9)[None],
    "jax": jnp.arange(1.0, 9.0)[None],
    "scaled": 1e-250 * ROW,
    "tuple": tuple(ROW),
}


@pytest.mark.parametrize("kind", SAME_COTANGENT)
def test_a_cotangent_of_ones_own_comes_as_any_array(kind):
    wanted = gradflow.contraction(**SMALL, cotangent=ROW[None])
    got = gradflow.contraction(**SMALL, cotangent=SAME_COTANGENT[kind])
    np.testing.assert_allclose(got.exact, wanted.exact, rtol=1e-12)


def test_a_given_cotangent_pays_its_own_projection():
    """At depth 1 with a constant branch, g J = (g − (g·û)û)/rms(u): one projection and one 1/‖u‖."""
    p = gradflow.contraction(depth=1, d=8, seeds=1, branch="bias", cotangent=ROW).profile
    np.testing.assert_allclose(p.exact[0, 0], p.projection[0, 0] * p.radius_gain[0, 0], rtol=1e-14)
    np.testing.assert_allclose(p.projection[0, 0] ** 2, 1 - p.alignment[0, 0] ** 2, rtol=1e-12)


@pytest.mark.repeats
@pytest.mark.parametrize(("c", "branch"), [(0.05, "linear"), (0.6, "mlp:gelu"), (0.2, "bias")])
def test_c_sets_the_branchs_forward_strength(c, branch):
    r = gradflow.contraction(depth=3, d=64, c=c, branch=branch, seeds=2, probes=1)
    q = 1 / (1 - c) ** 2 - 1
    assert r.settings["q_f"] == pytest.approx(q, rel=1e-12)
    np.testing.assert_allclose(np.mean(r.profile.branch_rms**2), q, rtol=0.25)
    np.testing.assert_allclose(r.law_profile.branch_rms**2, q, rtol=1e-9)


def test_a_branch_object_and_a_scheme_row_of_ones_own():
    import sympy

    t = sympy.Symbol("t")
    row = Scheme("mine", "test", "α = 2", norm_out=True, alpha=sympy.Integer(2))
    r = gradflow.contraction(depth=3, d=32, seeds=2, scheme=row, branch=MLP(t / (1 + sympy.exp(-2 * t))))
    assert r.settings["scheme"] == "mine"
    np.testing.assert_array_equal(r.profile.skip, 2.0)
    assert abs(np.mean(r.log_exact) - np.log(r.law.value)) < 4 * r.law_profile.sd_exact[0]


def test_progress_counts_seeds():
    calls = []
    gradflow.contraction(depth=2, d=4, seeds=3, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_a_table_fits_100_columns_and_html_holds_a_picture(small):
    assert max(map(len, str(small).splitlines())) <= 100
    html = small._repr_html_()
    assert "data:image/png;base64," in html
    assert max(map(len, str(small.profile).splitlines())) <= 100


def test_verdict_names_estimate_factor_and_branch(small):
    assert "0.4096" in small.verdict
    assert "‖u‖" in small.verdict
    assert "branch" in small.verdict
    trunk_only = gradflow.contraction(**SMALL, branch="bias")
    assert "returns nothing" in trunk_only.verdict


def test_verdict_of_one_sublayer_places_nothing_wrongly():
    r = gradflow.contraction(depth=1, d=8, seeds=2)
    assert isinstance(r.verdict, str)
    assert "nan" not in r.verdict.lower()
