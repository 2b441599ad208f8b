"""Norms against the identities that they satisfy, and against plain autodiff of the written-out formula."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from gradflow import norms

pytestmark = pytest.mark.usefixtures("x64")
rows = pytest.mark.parametrize("row", norms.NORMS, ids=lambda row: row.name)
widths = pytest.mark.parametrize("d", [3, 6, 17])
epsilons = pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


def layer_at(row, d, eps=1e-5, seed=1):
    """A layer with gain and bias of no special kind."""
    layer = row.init(d, eps, "float64")
    return dataclasses.replace(layer, gain=1 + 0.5 * normal(seed, d), bias=normal(seed + 1, d))


def formula(layer):
    return lambda x: layer.gain * oracle.norm(layer.row, layer.eps, x) + layer.bias


close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


@rows
@widths
@epsilons
def test_value_is_the_formula(row, d, eps):
    layer, x = layer_at(row, d, eps), normal(0, d)
    close(layer(x), formula(layer)(x))


@rows
@widths
@epsilons
def test_dense_mv_rmv_are_jacfwd_of_the_formula(row, d, eps):
    layer, x = layer_at(row, d, eps), normal(0, d)
    truth = jax.jacfwd(formula(layer))(x)
    jacobian = layer.jacobian(x)
    close(jacobian.dense(), truth)
    v, g = normal(3, d), normal(4, d)
    close(jacobian.mv(v), truth @ v)
    close(jacobian.rmv(g), truth.T @ g)


@rows
@epsilons
def test_autodiff_of_the_layer_is_its_jacobian_to_second_order(row, eps):
    layer, x, g = layer_at(row, 5, eps), normal(0, 5), normal(1, 5)
    for derivative in (jax.jacfwd, jax.jacrev):
        close(derivative(layer)(x), layer.jacobian(x).dense())
    close(jax.hessian(lambda v: g @ layer(v))(x), jax.hessian(lambda v: g @ formula(layer)(v))(x), atol=1e-11)


@rows
@widths
def test_adjoint_identity(row, d):
    jacobian = layer_at(row, d).jacobian(normal(0, d))
    u, v = normal(5, d), normal(6, d)
    close(jnp.vdot(jacobian.mv(u), v), jnp.vdot(u, jacobian.rmv(v)))


@widths
@epsilons
def test_layernorm_deletes_the_constant_direction_on_both_sides(d, eps):
    jacobian = norms.LayerNorm.init(d, eps, "float64").jacobian(normal(0, d))
    close(jacobian.mv(jnp.ones(d)), jnp.zeros(d))
    close(jacobian.rmv(jnp.ones(d)), jnp.zeros(d))


@rows
@widths
def test_euler_j_x_is_zero_at_eps_zero(row, d):
    layer, x = layer_at(row, d, 0.0), normal(0, d)
    close(layer.jacobian(x).mv(x), jnp.zeros(d))


@rows
@widths
@epsilons
def test_spectrum_is_one_over_t_then_the_removed_direction_then_zero(row, d, eps):
    x = np.asarray(normal(0, d))
    y = x - x.mean() if row.name == "layernorm" else x
    r = np.sqrt(np.mean(y**2))
    t, along = {
        "layernorm": (np.sqrt(r**2 + eps), eps / (r**2 + eps) ** 1.5),
        "rms": (np.sqrt(r**2 + eps), eps / (r**2 + eps) ** 1.5),
        "rms-outside": (r + eps, eps / (r + eps) ** 2),
        "unit": (np.sqrt(d) * r, 0.0),
    }[row.name]
    centred = row.name == "layernorm"
    values = [1 / t] * (d - 1 - centred) + [along] + [0.0] * centred
    dense = row.init(d, eps, "float64").jacobian(x).dense()
    close(np.linalg.svd(dense, compute_uv=False), values)
    close(dense, dense.T)


@rows
@pytest.mark.parametrize("scale", [1e-3, 7.0, 1e6])
def test_scale_invariance_at_eps_zero(row, scale):
    layer, x = layer_at(row, 6, 0.0), normal(0, 6)
    close(layer(scale * x), layer(x))
    close(scale * layer.jacobian(scale * x).dense(), layer.jacobian(x).dense())
    reflected = dataclasses.replace(layer, bias=-layer.bias)
    close(reflected(-x), -layer(x))


@pytest.mark.parametrize("shift", [1.0, -1e3])
def test_layernorm_is_shift_invariant(shift):
    layer, x = layer_at(norms.LayerNorm, 6), normal(0, 6)
    close(layer(x + shift), layer(x), rtol=1e-11, atol=1e-11)
    close(layer.jacobian(x + shift).dense(), layer.jacobian(x).dense(), rtol=1e-11, atol=1e-11)


def test_layernorm_is_rms_of_the_centred_vector():
    x = normal(0, 6)
    centring = jnp.eye(6) - 1 / 6
    ln, rms = (row.init(6, 1e-5, "float64") for row in (norms.LayerNorm, norms.RMSNorm))
    close(ln(x), rms(centring @ x))
    close(ln.jacobian(x).dense(), rms.jacobian(centring @ x).dense() @ centring)


def test_root_d_times_the_unit_norm_is_rms_at_eps_zero():
    x = normal(0, 6)
    unit, rms = (row.init(6, 0.0, "float64") for row in (norms.UnitNorm, norms.RMSNorm))
    close(np.sqrt(6) * unit(x), rms(x))
    close(np.sqrt(6) * unit.jacobian(x).dense(), rms.jacobian(x).dense())


@rows
def test_jit_and_vmap_change_nothing(row):
    layer, batch = layer_at(row, 6), normal(0, 2, 3, 6)
    one_by_one = jnp.stack([jnp.stack([layer(x) for x in pair]) for pair in batch])
    close(layer(batch), one_by_one)
    close(jax.jit(lambda n, x: n(x))(layer, batch), one_by_one)
    stacked = jax.jit(jax.vmap(lambda x: layer.jacobian(x).dense()))(batch[0])
    close(stacked, jnp.stack([layer.jacobian(x).dense() for x in batch[0]]))


@rows
def test_a_batch_of_jacobians_is_the_batch_of_each(row):
    layer, batch = layer_at(row, 6), normal(0, 2, 3, 6)
    jacobian, v = layer.jacobian(batch), normal(5, 2, 3, 6)
    each = jnp.stack([jnp.stack([layer.jacobian(x).dense() for x in pair]) for pair in batch])
    close(jacobian.dense(), each)
    close(jacobian.mv(v), jnp.einsum("abij,abj->abi", each, v))
    close(jacobian.rmv(v), jnp.einsum("abij,abi->abj", each, v))
    close(layer.at(batch)[0], layer(batch))


@rows
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_jacobian_wants_vectors_of_its_width(row, shape):
    with pytest.raises(ValueError, match="x: needs vectors of 4 entries"):
        row.init(4).jacobian(np.ones(shape))


@rows
@pytest.mark.parametrize("eps", [-1e-5, float("nan")])
def test_eps_below_zero_is_refused(row, eps):
    with pytest.raises(ValueError, match="eps"):
        row.init(4, eps)
