"""Norms where naive code breaks: float32, bfloat16, tiny and huge inputs, no variance or almost none."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradflow import norms

rows = pytest.mark.parametrize("row", norms.NORMS, ids=lambda row: row.name)


def reference(row, x, eps):
    """Value and Jacobian at gain 1, from the closed form of the paper: exact rational centring, then long double."""
    exact = [Fraction(float(v)) for v in np.asarray(x)]
    mean = sum(exact) / len(exact) if row.name == "layernorm" else 0
    y = np.array([float(v - mean) for v in exact], np.longdouble)
    d = y.size
    P = np.eye(d, dtype=np.longdouble) - (np.longdouble(1) / d if row.name == "layernorm" else 0)
    r = np.sqrt(np.mean(y**2))
    if row.name == "unit":
        return y / (r * np.sqrt(np.longdouble(d))), (P - np.outer(y, y) / (d * r**2)) / (r * np.sqrt(np.longdouble(d)))
    if row.name == "rms-outside":
        return y / (r + eps), (P - np.outer(y, y) / (d * r * (r + eps))) / (r + eps)
    t = np.sqrt(r**2 + eps)
    return y / t, (P - np.outer(y, y) / (d * t**2)) / t


def close(left, right, rtol):
    right = np.asarray(right, np.float64)
    np.testing.assert_allclose(np.asarray(left, np.float64), right, rtol=0, atol=rtol * np.abs(right).max())


def direction(d, seed=0):
    v = np.random.default_rng(seed).normal(size=d)
    return v / np.linalg.norm(v)


@pytest.mark.repeats(keep=48)
@rows
@pytest.mark.parametrize("eps", [0.0, 1e-5])
@pytest.mark.parametrize("length", [1e-30, 1e-20, 1e-12, 1e-6, 1.0, 1e6, 1e12, 1e20, 1e30])
@pytest.mark.parametrize("d", [3, 64])
def test_float32_is_right_over_sixty_decades(row, eps, length, d):
    x = (length * direction(d)).astype(np.float32)
    layer = row.init(d, eps)
    value, jacobian = reference(row, x, eps)
    got = layer(x), layer.jacobian(x).dense(), jax.jacrev(layer)(jnp.asarray(x))
    assert all(a.dtype == np.float32 for a in got)
    close(got[0], value, 4e-6)
    close(got[1], jacobian, 4e-6)
    close(got[2], jacobian, 4e-6)


@rows
@pytest.mark.parametrize("length", [1e-200, 1e-100, 1e100, 1e200])
def test_float64_has_no_overflow_in_the_squares(row, length):
    x = length * direction(16)
    layer = row.init(16, 0.0, "float64")
    value, jacobian = reference(row, x, 0.0)
    close(layer(x), value, 1e-14)
    close(layer.jacobian(x).dense(), jacobian, 1e-14)


@rows
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_inputs_have_float32_statistics_and_their_own_dtype(row, dtype):
    x = jnp.asarray(5 * direction(32), dtype)
    layer = row.init(32, 1e-5)
    value, jacobian = reference(row, x.astype(jnp.float32), 1e-5)
    assert layer(x).dtype == jnp.dtype(dtype)
    close(layer(x).astype(jnp.float32), value, 0.51 * float(jnp.finfo(dtype).eps) + 1e-6)
    assert layer.jacobian(x).scale.dtype == jnp.float32
    close(layer.jacobian(x).dense(), jacobian, 2e-6)


def test_float16_of_size_1000_does_not_overflow_in_its_square():
    x = jnp.asarray(np.linspace(-1000, 1000, 16), jnp.float16)
    for row in norms.NORMS:
        close(row.init(16)(x).astype(jnp.float32), reference(row, x.astype(jnp.float32), 1e-5)[0], 1e-3)


@rows
def test_numpy_float64_stays_float64_without_a_global_switch(row):
    x = direction(8)
    layer = row.init(8, 1e-5, "float64")
    value, jacobian = reference(row, x, 1e-5)
    assert layer(x).dtype == layer.jacobian(x).dense().dtype == np.float64
    close(layer(x), value, 1e-14)
    close(layer.jacobian(x).dense(), jacobian, 1e-14)
    g = direction(8, 1)
    close(layer.jacobian(x).rmv(g), jacobian.T @ g, 1e-14)
    assert not jax.config.jax_enable_x64


def test_lists_and_integers_are_taken_as_float64():
    layer = norms.LayerNorm.init(4, 0.0, "float64")
    close(layer([1, 0, 0, 0]), layer(np.array([1.0, 0, 0, 0])), 1e-15)
    assert layer([1, 0, 0, 0]).dtype == np.float64


@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-14, 1e-5])
@pytest.mark.parametrize("centre", [0.0, 3.0, -1e3])
@pytest.mark.parametrize("d", [3, 24])
def test_layernorm_1e_7_from_the_zero_variance_point(eps, centre, d):
    x = centre + 1e-7 * direction(d, 1)
    layer = norms.LayerNorm.init(d, eps, "float64")
    value, jacobian = reference(norms.LayerNorm, x, eps)
    close(layer(x), value, 1e-12)
    close(layer.jacobian(x).dense(), jacobian, 1e-12)
    assert not layer.jacobian(x).degenerate


@pytest.mark.parametrize("row", norms.NORMS[1:], ids=lambda row: row.name)
@pytest.mark.parametrize("eps", [0.0, 1e-14, 1e-5])
def test_rms_1e_7_from_the_origin(row, eps):
    x = 1e-7 * direction(8, 1)
    layer = row.init(8, eps, "float64")
    value, jacobian = reference(row, x, eps)
    close(layer(x), value, 1e-13)
    close(layer.jacobian(x).dense(), jacobian, 1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("d", [3, 10, 512])
@pytest.mark.parametrize("level", [0.1, -10 / 3, 1e10])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_a_constant_row_is_degenerate_and_finite_forward_and_backward(dtype, d, level, eps):
    x = np.full(d, level, dtype)
    layer = norms.LayerNorm.init(d, eps, dtype)
    jacobian = layer.jacobian(x)
    assert jacobian.degenerate
    np.testing.assert_array_equal(layer(x), np.zeros(d))
    P = (np.eye(d) - 1 / d) / np.sqrt(eps) if eps else np.zeros((d, d))
    if d <= 10:
        close(jacobian.dense(), P, 1e-6 if dtype == "float32" else 1e-13) if eps else None
        assert np.isfinite(jacobian.dense()).all()
    g = np.random.default_rng(0).normal(size=d).astype(dtype)
    with jax.enable_x64(dtype == "float64"):
        gradient = jax.grad(lambda v: jnp.vdot(g, layer(v)))(jnp.asarray(x))
    close(gradient, P @ g, 1e-6 if dtype == "float32" else 1e-13) if eps else None
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("row", norms.NORMS[1:], ids=lambda row: row.name)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_the_zero_vector_is_degenerate_and_finite_for_every_norm(row, eps):
    layer, x = row.init(4, eps), jnp.zeros(4)
    scale = {"rms": 1 / np.sqrt(1e-5), "rms-outside": 1e5, "unit": 0.0}[row.name] if eps else 0.0
    jacobian = layer.jacobian(x)
    assert jacobian.degenerate
    np.testing.assert_array_equal(layer(x), np.zeros(4))
    np.testing.assert_allclose(jacobian.dense(), scale * np.eye(4), rtol=1e-6)
    np.testing.assert_allclose(jax.jacrev(layer)(x), scale * np.eye(4), rtol=1e-6)
    assert np.isfinite(jax.grad(lambda v: jnp.sum(layer(v) ** 3))(x)).all()


def test_degenerate_rows_do_not_disturb_their_neighbours():
    batch = jnp.stack([jnp.full(6, 2.0), jnp.arange(6.0)])
    layer = norms.LayerNorm.init(6)
    gradient = jax.grad(lambda v: jnp.sum(layer(v)[:, 0]))(batch)
    assert jnp.isfinite(gradient).all()
    np.testing.assert_allclose(gradient[1], reference(norms.LayerNorm, batch[1], 1e-5)[1][0].astype(float), atol=1e-6)
    np.testing.assert_array_equal(jax.vmap(layer.jacobian)(batch).degenerate, [True, False])
