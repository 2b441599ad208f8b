"""Recorded activations: a trained network's trunk, recomputed here with NumPy alone."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import gradflow

FILE = Path(__file__).resolve().parent.parent / "examples" / "data" / "minilm_stream.npz"


@pytest.fixture(scope="module")
def arrays():
    with np.load(FILE) as file:
        return {name: np.asarray(file[name], np.float64) for name in file}


@pytest.fixture(scope="module")
def r():
    return gradflow.contraction(activations=FILE)


def made(seed=0, S=3, tokens=2, d=6):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(S, tokens, d))
    return dict(
        u=x + rng.normal(size=x.shape),
        x=x,
        gain=1 + 0.3 * rng.normal(size=(S, d)),
        eps=np.array(1e-3),
        cotangent=rng.normal(size=(tokens, d)),
    )


def trunk(arrays, norm="layernorm"):
    """Per token Jacobians J_s = diag(γ)(1/t)(P − yyᵀ/(dt²)), and the factors along the recorded cotangent."""
    u, eps = arrays["u"], float(np.ravel(arrays.get("eps", 0.0))[0])
    S, tokens, d = u.shape
    gain = np.broadcast_to(arrays.get("gain", np.ones(d)), (S, d))
    P = np.eye(d) - (1 / d if norm == "layernorm" else 0)
    w = arrays["cotangent"].copy()
    products = np.broadcast_to(np.eye(d), (tokens, d, d))
    rows = {name: np.zeros(S) for name in ("affine", "projection", "norm", "alignment", "radius_gain", "net")}
    for s in reversed(range(S)):
        h = w * gain[s]
        out, tangent, along, ts = np.zeros_like(w), np.zeros_like(w), np.zeros(tokens), np.zeros(tokens)
        step = []
        for i in range(tokens):
            y = P @ u[s, i]
            t = np.sqrt(y @ y / d + eps)
            symmetric = P - np.outer(y, y) / (d * t**2)
            tangent[i], along[i], ts[i] = symmetric @ h[i], h[i] @ y / np.linalg.norm(y), t
            out[i] = tangent[i] / t
            step.append(gain[s][:, None] * symmetric / t)
        products = products @ np.stack(step)
        size = np.linalg.norm
        rows["affine"][s] = size(h) / size(w)
        rows["projection"][s] = size(tangent) / size(h)
        rows["norm"][s] = size(out) / size(tangent)
        rows["alignment"][s] = size(along) / size(h)
        rows["radius_gain"][s] = np.sqrt(np.mean(1 / ts**2))
        rows["net"][s] = size(out) / size(w)
        w = out
    return rows, products, np.linalg.norm(w) / np.linalg.norm(arrays["cotangent"])


def agrees(r, arrays, norm="layernorm", rtol=1e-10):
    rows, products, gain = trunk(arrays, norm)
    np.testing.assert_allclose(r.trunk, [gain], rtol=rtol)
    p = r.profile
    for name in ("affine", "projection", "norm", "alignment", "radius_gain"):
        np.testing.assert_allclose(getattr(p, name)[0], rows[name], rtol=rtol, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(p.trunk_projection[0], rows["projection"], rtol=rtol)
    np.testing.assert_allclose(r.bound, [np.prod(rows["projection"] * rows["radius_gain"])], rtol=rtol)
    values = np.sort(np.linalg.svd(products, compute_uv=False).ravel())[::-1]
    np.testing.assert_allclose(r.singular_values[0], values, rtol=0, atol=1e-10 * values[0])
    np.testing.assert_allclose(r.rms_gain, [np.sqrt(np.mean(values**2))], rtol=rtol)
    x, u = arrays["x"], arrays["u"]
    cosine = np.mean(np.sum(x * u, 2) / np.linalg.norm(x, axis=2) / np.linalg.norm(u, axis=2), axis=1)
    np.testing.assert_allclose(p.stream_cosine[0], cosine, rtol=rtol)


def test_minilm_trunk_gain_is_0_305(r, arrays):
    S, tokens, d = arrays["u"].shape
    assert r.trunk[0] == pytest.approx(0.305, abs=5e-4)
    assert (r.depth, r.d, r.settings["tokens"]) == (S, d, tokens)
    assert r.cotangent == "recorded"
    assert r.exact is None
    assert r.log_exact is None
    assert r.c_exact is None
    assert r.law is None
    assert r.law_profile is None
    assert r.recorded
    # the last sub-layer, 0.435, is outside of the range that the first eleven keep
    cosine = r.profile.stream_cosine[0]
    assert np.all((cosine[:11] > 0.855) & (cosine[:11] < 0.965))
    assert cosine[11] == pytest.approx(0.435, abs=1e-3)
    assert np.all(r.profile.alignment < 0.135)  # u is aligned with x, the gradient with u hardly


def test_minilm_recomputed_with_numpy_alone(r, arrays):
    agrees(r, arrays)


@pytest.mark.parametrize("norm", ["layernorm", "rms"])
def test_any_recording_recomputed_with_numpy_alone(norm):
    arrays = made()
    agrees(gradflow.contraction(activations=arrays, norm=norm), arrays, norm)


def test_a_mapping_is_as_good_as_a_file(tmp_path):
    arrays = made()
    r = gradflow.contraction(activations=arrays)
    np.savez(tmp_path / "plain.npz", **arrays)
    np.savez_compressed(tmp_path / "small.npz", **arrays)
    for name in ("plain.npz", "small.npz"):
        again = gradflow.contraction(activations=str(tmp_path / name))
        np.testing.assert_array_equal(again.trunk, r.trunk)


def test_nested_lists_fortran_order_and_jax_arrays_are_read_alike():
    arrays = made()
    wanted = gradflow.contraction(activations=arrays).trunk
    for other in (
        {k: v.tolist() for k, v in arrays.items()},
        {k: np.asfortranarray(v) for k, v in arrays.items()},
        {k: v.astype(">f8") for k, v in arrays.items()},
    ):
        np.testing.assert_allclose(gradflow.contraction(activations=other).trunk, wanted, rtol=1e-14)
    single = {k: jnp.asarray(v, jnp.float32) for k, v in arrays.items()}
    np.testing.assert_allclose(gradflow.contraction(activations=single).trunk, wanted, rtol=1e-5)


def test_files_with_odd_layouts_are_read(tmp_path):
    arrays = {k: np.asfortranarray(v) for k, v in made().items()}
    np.savez(tmp_path / "fortran.npz", **arrays)
    np.savez(tmp_path / "big.npz", **{k: v.astype(">f4") for k, v in arrays.items()})
    wanted = gradflow.contraction(activations=arrays).trunk
    np.testing.assert_allclose(gradflow.contraction(activations=tmp_path / "fortran.npz").trunk, wanted, rtol=1e-14)
    np.testing.assert_allclose(gradflow.contraction(activations=tmp_path / "big.npz").trunk, wanted, rtol=1e-5)


def test_u_alone_is_enough():
    arrays = made()
    r = gradflow.contraction(activations={"u": arrays["u"]}, cotangent=arrays["cotangent"])
    _rows, _, gain = trunk({"u": arrays["u"], "cotangent": arrays["cotangent"]})
    np.testing.assert_allclose(r.trunk, [gain], rtol=1e-12)
    np.testing.assert_array_equal(r.profile.affine, 1.0)
    assert r.cotangent == "given"
    assert r.settings["eps"] == 0
    assert r.profile.stream_cosine is None


def test_one_gain_vector_serves_every_sublayer():
    arrays = made()
    shared = arrays | {"gain": arrays["gain"][0]}
    repeated = arrays | {"gain": np.stack([arrays["gain"][0]] * 3)}
    a, b = (gradflow.contraction(activations=source) for source in (shared, repeated))
    np.testing.assert_array_equal(a.trunk, b.trunk)


def test_probes_and_key_draw_gaussian_cotangents():
    arrays = {"u": made()["u"]}
    a, b, c = (gradflow.contraction(activations=arrays, probes=500, key=key) for key in (0, 0, 1))
    np.testing.assert_array_equal(a.trunk, b.trunk)
    assert a.trunk != c.trunk
    assert a.singular_values is None
    whole = gradflow.contraction(activations=arrays)
    np.testing.assert_allclose(a.trunk, whole.rms_gain, rtol=0.06)


def test_float32_and_float64_agree():
    arrays = made()
    single = gradflow.contraction(activations=arrays, dtype="float32")
    assert single.profile.projection.dtype == np.float32
    np.testing.assert_allclose(single.trunk, gradflow.contraction(activations=arrays).trunk, rtol=1e-5)


def test_a_row_without_variance_is_counted_and_its_answer_finite_and_right():
    arrays = made()
    arrays["u"][1, 0] = 2.5
    r = gradflow.contraction(activations=arrays)
    assert r.degenerate == 1
    assert np.isfinite(r.trunk).all()
    P = np.eye(6) - 1 / 6
    jacobians = []
    for s in range(3):
        y = P @ arrays["u"][s, 0]
        y = np.zeros(6) if s == 1 else y
        t = np.sqrt(y @ y / 6 + 1e-3)
        jacobians.append(arrays["gain"][s][:, None] * (P - np.outer(y, y) / (6 * t**2)) / t)
    other, _, _ = trunk(
        {k: v[:, 1:] if v.ndim == 3 else v for k, v in arrays.items()} | {"cotangent": arrays["cotangent"][1:]}
    )
    first = arrays["cotangent"][0] @ jacobians[2] @ jacobians[1] @ jacobians[0]
    second = np.prod(other["net"]) * np.linalg.norm(arrays["cotangent"][1])
    gain = np.hypot(np.linalg.norm(first), second) / np.linalg.norm(arrays["cotangent"])
    np.testing.assert_allclose(r.trunk, [gain], rtol=1e-9)
    assert "1 token states have no variance" in str(r) or "no variance" in str(r)


def test_all_rows_without_variance_at_eps_zero_stay_finite_or_are_refused():
    arrays = {"u": np.ones((2, 1, 6)), "cotangent": np.arange(6.0)[None]}
    with pytest.raises(ValueError, match=r"activations|cotangent"):
        gradflow.contraction(activations=arrays)


def test_output_speaks_of_the_trunk_and_not_of_what_is_not_in_the_file(r):
    text = str(r)
    assert "exact product" not in text
    assert "nan" not in text.lower()
    assert "trunk" in r.verdict
    assert max(map(len, text.splitlines())) <= 100
