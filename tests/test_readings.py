"""The estimate's two readings, reproduced by measurement: 1/‖u‖ of iid weights, and the turning û."""

import numpy as np
import pytest

import gradflow

norms = pytest.mark.parametrize("norm", ["rms", "layernorm"])
branches = pytest.mark.parametrize("branch", ["bias", "linear"])


@pytest.mark.repeats
@pytest.mark.parametrize("c", [0.2, 0.05])
def test_norm_reading_turns_c_into_the_weights_strength(c):
    r = gradflow.contraction(depth=2, d=8, c=c, seeds=1)
    sigma = np.sqrt(r.settings["q_f"])
    assert 1 / np.sqrt(1 + sigma**2) == pytest.approx(1 - c, rel=1e-12)
    if c == 0.2:
        assert sigma == pytest.approx(0.75, rel=1e-12)
    w = np.sqrt(np.mean(gradflow.contraction(depth=2, d=512, c=c, seeds=2, probes=1).profile.branch_rms ** 2))
    assert w == pytest.approx(sigma, rel=0.06)


def test_norm_reading_trunk_is_the_estimate_at_leading_order():
    law = gradflow.law("post-ln", "bias", 24, norm="rms")
    r = gradflow.contraction(depth=24, d=8, seeds=1)
    assert r.closed_form == pytest.approx(0.00472236648, rel=1e-9)
    assert law.trunk[0, 0] == pytest.approx(2**-12, rel=1e-9)  # unit strength: 1/√2 per layer
    wide = gradflow.contraction(depth=24, d=256, seeds=6, probes=1)
    assert np.mean(wide.log_trunk) == pytest.approx(24 * np.log(0.8), abs=0.25)
    assert abs(np.mean(wide.log_exact)) < 0.5


@pytest.mark.repeats(keep=2)
@norms
@branches
def test_alignment_reading_measures_the_estimate_on_the_trunk(norm, branch):
    r = gradflow.contraction(depth=24, d=64, reading="alignment", branch=branch, norm=norm, seeds=2)
    np.testing.assert_allclose(r.trunk, 0.00472236648, rtol=1e-9)
    np.testing.assert_allclose(r.bound, 0.00472236648, rtol=1e-9)
    np.testing.assert_allclose(r.exact, 0.8 if branch == "linear" else 0.00472236648, rtol=1e-9)
    np.testing.assert_allclose(r.profile.trunk_alignment, 0.6, rtol=1e-9)
    np.testing.assert_allclose(r.profile.radius_gain, 1.0, rtol=1e-12)
    np.testing.assert_allclose(r.profile.norm, 1.0, rtol=1e-12)
    np.testing.assert_allclose(r.profile.stream_cosine, 0.8, rtol=1e-12)
    np.testing.assert_allclose(r.profile.stream_rms, 1.0, rtol=1e-12)
    np.testing.assert_allclose(r.c_trunk.value, 0.2, rtol=1e-9)
    law = 0.8 if branch == "linear" else 0.00472236648
    np.testing.assert_allclose([r.trunk_law.value, r.law.value], [0.00472236648, law], rtol=1e-9)


@norms
@branches
def test_alignment_reading_gradient_alignment_along_the_exact_chain(norm, branch):
    r = gradflow.contraction(depth=24, d=64, reading="alignment", branch=branch, norm=norm, seeds=1)
    first = r.profile.alignment[0, -1]
    np.testing.assert_allclose(first, 0.6, rtol=1e-9)
    rest = r.profile.alignment[0, :-1]
    np.testing.assert_allclose(rest, 0.6 if branch == "bias" else 0.0, rtol=1e-9, atol=1e-9)


@pytest.mark.repeats(keep=2)
@norms
@branches
def test_alignment_reading_spectrum_and_random_cotangent(norm, branch):
    d = 512 if norm == "rms" else 64
    r = gradflow.contraction(
        depth=24, d=d, reading="alignment", branch=branch, norm=norm, cotangent="gaussian", seeds=2
    )
    alive = d - (norm == "layernorm")
    values = np.sort(r.singular_values, axis=1)[:, ::-1]
    expected = [1.0] * (alive - 2) + ([1.0] if branch == "linear" else [0.8**23]) + [0.0] * (1 + d - alive)
    np.testing.assert_allclose(values, [expected] * 2, rtol=1e-8, atol=1e-12)
    power = (alive - 2 + (1.0 if branch == "linear" else 0.8**46)) / d
    np.testing.assert_allclose(r.rms_gain, np.sqrt(power), rtol=1e-9)
    assert r.rms_law.value == pytest.approx(np.sqrt(power), rel=1e-9)
    if norm == "rms" and branch == "bias":
        assert r.rms_gain[0] == pytest.approx(0.998, abs=5e-4)
        assert r.exact.mean() == pytest.approx(0.998, abs=5e-3)


@pytest.mark.parametrize(("c", "norm"), [(0.5, "rms"), (0.01, "layernorm")])
def test_alignment_reading_at_other_turns(c, norm):
    r = gradflow.contraction(depth=7, d=5, c=c, reading="alignment", branch="bias", norm=norm, seeds=2)
    np.testing.assert_allclose(r.exact, (1 - c) ** 7, rtol=1e-9)
    np.testing.assert_allclose(r.profile.trunk_alignment, np.sqrt(1 - (1 - c) ** 2), rtol=1e-9)


@pytest.mark.parametrize("norm", ["layernorm"])
def test_alignment_reading_in_float32(norm):
    r = gradflow.contraction(depth=24, d=64, reading="alignment", branch="bias", norm=norm, seeds=1, dtype="float32")
    np.testing.assert_allclose(r.exact, 0.00472236648, rtol=1e-4)


@pytest.mark.parametrize(("branch", "norm"), [("bias", "rms"), ("linear", "layernorm")])
def test_alignment_reading_goes_as_deep_as_rounding_allows_and_no_deeper(branch, norm):
    options = dict(d=16, reading="alignment", branch=branch, norm=norm, seeds=1)
    r = gradflow.contraction(depth=100, **options)
    np.testing.assert_allclose(r.log_trunk, 100 * np.log(0.8), rtol=1e-6)
    with pytest.raises(ValueError, match=r"^depth: at most 120 here"):
        gradflow.contraction(depth=121, **options)


@pytest.mark.parametrize("d", [2, 3])
def test_alignment_reading_in_the_smallest_space(d):
    norm = "rms" if d == 2 else "layernorm"
    r = gradflow.contraction(depth=24, d=d, reading="alignment", branch="bias", norm=norm, seeds=1)
    np.testing.assert_allclose(r.exact, 0.00472236648, rtol=1e-6)
