"""Layers in bfloat16: the values of a network that runs in it, the Jacobian of what it rounds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import gradflow
from gradflow.branches import branch_of
from gradflow.stack import Stack


@pytest.mark.parametrize("name", ["mlp:gelu", pytest.param("attention", marks=pytest.mark.slow)])
def test_values_are_bfloat16s_and_the_jacobian_is_the_wide_one_there(name):
    wide, low = branch_of(name), branch_of(f"{name}@bfloat16")
    assert low.name == f"{name}@bfloat16"
    params = wide.init(jax.random.key(0), 16, "float32")
    x = jax.random.normal(jax.random.key(1), (3, 16))
    there = {key: value.astype(jnp.bfloat16) for key, value in params.items()}
    expected = wide.apply(there, x.astype(jnp.bfloat16))
    assert expected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(low.apply(params, x), np.asarray(expected, np.float32))
    back = {key: value.astype(jnp.float32) for key, value in there.items()}
    point = x.astype(jnp.bfloat16).astype(jnp.float32)
    jacobian = jax.jacrev(lambda x: low.apply(params, x))(x)
    np.testing.assert_allclose(jacobian, jax.jacrev(lambda x: wide.apply(back, x))(point), rtol=0, atol=2e-6)
    basis = jax.random.normal(jax.random.key(2), (3, 16, 4))
    pushed = jax.jvp(lambda x: wide.apply(back, x), (point,), (basis[..., 0],))[1]
    np.testing.assert_allclose(low.push(params, x, basis)[..., 0], pushed, rtol=0, atol=5e-6)


@pytest.mark.slow
def test_its_spectrum_beside_float64s():
    one, two = (
        gradflow.spectrum(Stack.make("post-ln", block, 4, 24, dtype=dtype), method="dense")
        for block, dtype in (("mlp:gelu@bfloat16", "float32"), ("mlp:gelu", "float64"))
    )
    gap = np.abs(one.singular_values - two.singular_values).max() / two.singular_values.max()
    assert 2**-12 < gap < 2**-5
    # measured against a float64 stream, of which bfloat16 rounds some entries the other way: bfloat16's error, not float32's
    assert 2**-12 < math.exp(one.log_error[0, 0] - one.log_singular_values[0, 0]) < 2**-5
    assert one.log_rms_law == two.log_rms_law


def test_refused():
    refused(lambda: branch_of("mlp:gelu@bfloat15"), "layers: unknown 'bfloat15'; did you mean 'bfloat16'")
