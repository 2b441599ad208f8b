"""A product of depth 64 against 50 digits of mpmath, written out with plain loops."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from oracle import params_at

from gradflow.stack import Drawn, Stack

D, DEPTH = 5, 64


def layernorm(u, eps):
    """Value and Jacobian by the quotient rule, entry by entry."""
    d = len(u)
    mean = mpmath.fsum(u) / d
    y = [v - mean for v in u]
    t = mpmath.sqrt(mpmath.fsum(v * v for v in y) / d + eps)
    jacobian = mpmath.matrix(d, d)
    for i in range(d):
        for j in range(d):
            dy = (1 if i == j else 0) - mpmath.mpf(1) / d
            dt = y[j] / (d * t)  # Σ_k y_k ∂y_k/∂x_j = y_j, because Σ y = 0
            jacobian[i, j] = dy / t - y[i] * dt / t**2
    return [v / t for v in y], jacobian


def branch(kind, params, x):
    """f and F."""

    def as_matrix(w):
        return mpmath.matrix(np.asarray(w).tolist())

    column = mpmath.matrix(x)
    if kind == "linear":
        w = as_matrix(params["w"])
        return list(w * column), w
    w_in, w_out = as_matrix(params["w_in"]), as_matrix(params["w_out"])
    h = [mpmath.tanh(v) for v in w_in * column]
    slope = mpmath.diag([1 - v * v for v in h])
    return list(w_out * mpmath.matrix(h)), w_out * slope * w_in


def product_in_50_digits(kind, weights, x, scheme, eps):
    J = mpmath.eye(D)
    for (params,) in weights:
        if scheme == "post-ln":
            f, F = branch(kind, params, x)
            x, N = layernorm([a + b for a, b in zip(x, f, strict=True)], eps)
            J = N * (mpmath.eye(D) + F) * J
        else:
            fed, N = layernorm(x, eps)
            f, F = branch(kind, params, fed)
            x = [a + b for a, b in zip(x, f, strict=True)]
            J = (mpmath.eye(D) + F * N) * J
    return J


@pytest.mark.repeats(keep=2)
@pytest.mark.parametrize("scheme", ["post-ln", "pre-ln"])
@pytest.mark.parametrize("kind", ["linear", "mlp:tanh"])
def test_product_of_depth_64_has_the_digits_of_float64(scheme, kind, x64):
    stack = Stack.make(scheme, kind, DEPTH, D, norm="layernorm", eps=1e-5)
    drawn = Drawn(jax.random.key(11))
    start = jax.random.normal(jax.random.key(12), (1, D), jnp.float64)
    trace = stack.trace(drawn, start, jnp.eye(D)[None])
    with mpmath.workdps(50):
        weights = [params_at(drawn, stack, l) for l in range(DEPTH)]
        J = product_in_50_digits(kind, weights, [mpmath.mpf(float(v)) for v in start[0]], scheme, mpmath.mpf(stack.eps))
        scale = mpmath.mpf(2) ** int(trace.exponent)
        truth = np.array((J / scale).tolist(), dtype=np.float64)
        values = np.array([float(v / scale) for v in mpmath.svd_r(J, compute_uv=False)])
    np.testing.assert_allclose(trace.basis[0], truth, rtol=0, atol=1e-11 * np.abs(truth).max())
    got = np.linalg.svd(trace.basis[0], compute_uv=False)
    np.testing.assert_allclose(got, np.sort(values)[::-1], rtol=0, atol=1e-11 * values.max())
