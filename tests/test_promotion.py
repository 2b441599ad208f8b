"""Nothing relies on silent promotion: strict dtypes throughout, no rank promotion where one vector is meant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import EVERYWHERE

import gradflow
from gradflow.flow import flow
from gradflow.norms import NORMS
from gradflow.stack import Drawn, Stack

dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


@pytest.fixture
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@dtypes
@pytest.mark.parametrize("row", NORMS, ids=lambda row: row.name)
def test_a_norm_of_one_vector_promotes_neither_dtype_nor_rank(row, dtype, strict):
    layer, x = row.init(4, 1e-5, dtype), np.array([0.3, -1.0, 2.0, 0.7], dtype)
    with jax.numpy_rank_promotion("raise"):
        jacobian = layer.jacobian(x)
        got = layer(x), jacobian.mv(x), jacobian.rmv(x), jacobian.dense()
    assert {a.dtype for a in got} == {np.dtype(dtype)}


@pytest.mark.repeats(keep=4)
@dtypes
@pytest.mark.parametrize("branch", ["bias", "mlp:relu", "mlp:gelu", "attention:causal"])
def test_a_branch_promotes_no_dtype(branch, dtype, strict):
    from gradflow.branches import branch_of

    with jax.enable_x64(dtype == "float64"):
        f, x = branch_of(branch), jnp.arange(4, dtype=dtype)[None]
        params = f.init(jax.random.key(0), 4, dtype)
        assert f.apply(params, x).dtype == f.push(params, x, jnp.eye(4, dtype=dtype)[None]).dtype == np.dtype(dtype)


@dtypes
def test_trace_and_flow_promote_no_dtype(dtype, strict):
    with jax.enable_x64(dtype == "float64"):
        stack = Stack.make(EVERYWHERE, ("mlp:gelu", "linear"), 2, 4, final_norm=True, dtype=dtype)
        x, weights = jax.ShapeDtypeStruct((2, 4), dtype), Drawn(jax.random.key(0))

        def run(x):
            trace = stack.trace(weights, x, jnp.broadcast_to(jnp.eye(4, dtype=dtype), (2, 4, 4)))
            return flow(stack, weights, trace, x[None])

        rows = jax.eval_shape(run, x)  # strictness is a matter of tracing
    assert {v.dtype for k, v in rows.items() if k != "degenerate"} == {np.dtype(dtype)}


@pytest.mark.repeats
@dtypes
def test_the_main_job_promotes_no_dtype(dtype, strict):
    gradflow.contraction(depth=2, d=4, seeds=1, branch="mlp:relu", norm="layernorm", dtype=dtype)
