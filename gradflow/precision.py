"""Scoped precision: float64 where a number is reported, full matmul precision, no global switch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import checks

DTYPES = ("float64", "float32")


def resolve(dtype: str) -> str:
    """Return the dtype that the default device can run: TPUs have no float64, so float32 there."""
    checks.one_of("dtype", dtype, DTYPES)
    return "float32" if jax.default_backend() == "tpu" else dtype


@contextlib.contextmanager
def scope(dtype: Any) -> Iterator[None]:
    """Enter a scope in which ``dtype`` exists and matmuls keep all its digits (no TF32, no bf16 passes)."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("highest"))
        if np.dtype(dtype) == np.float64:
            stack.enter_context(jax.enable_x64(True))
        yield


def as_array(x: Any) -> jax.Array:
    """Make a floating JAX array of ``x``; lists, integers and NumPy float64 become float64."""
    if isinstance(x, jax.Array):
        return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
    host = np.asarray(x)
    host = host if host.dtype.kind == "f" else host.astype(np.float64)
    with scope(host.dtype):
        return jnp.asarray(host)


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Standard Gaussians, drawn in float32 whatever ``dtype`` is: every precision gets the very same network."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)
