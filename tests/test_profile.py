"""`gradflow.profile`: one backward pass against the sweep, plain gradients and the oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from networks import EVERYWHERE, PURE, SANDWICH, name, normal
from refusals import refused

import gradflow
from gradflow import norms, probes
from gradflow.branches import MLP, Attention, Linear
from gradflow.branches.matrices import linear
from gradflow.factors import FACTORS
from gradflow.flow import flow
from gradflow.stack import Drawn, Given, Stack

TOKENS, D = 5, 8
BLOCK = ("attention", "mlp:gelu")


def close(left, right, rtol=1e-11, atol=1e-12):
    np.testing.assert_allclose(left, right, rtol=rtol, atol=atol)


def made(scheme="post-ln", block=BLOCK, depth=2, **options):
    return Stack.make(scheme, block, depth, D, **{"norm": "layernorm", "eps": 1e-3} | options)


def given(stack, seed=0, bias=0.3):
    """Weights with biases everywhere, and norms with gains of their own."""
    keys = iter(jax.random.split(jax.random.key(seed), 99))

    def draw(*shape):
        return jax.random.normal(next(keys), (stack.depth, *shape), stack.dtype)

    params, slots = [], []
    for branch in stack.block:
        p = {
            k: jnp.stack([branch.init(next(keys), D, stack.dtype)[k] for _ in range(stack.depth)])
            for k in branch.init(next(keys), D, stack.dtype)
        }
        params.append(p | {"b" + k[1:]: bias * draw(w.shape[1]) for k, w in p.items()})
        row = stack.scheme
        slots.append(
            tuple(
                norms.Norm(1 + bias * draw(D), bias * draw(D), stack.norm, stack.eps) if slot else None
                for slot in (row.norm_in, row.norm_branch, row.norm_out)
            )
        )
    last = norms.Norm(1 + bias * draw(D)[0], bias * draw(D)[0], stack.norm, stack.eps) if stack.final_norm else None
    return Given(tuple(params), tuple(slots), last)


def plain(stack, weights, x, mask=None):
    """The network from its equations, by the oracle's branches and LayerNorm."""
    weights = jax.tree.map(np.asarray, weights)

    def norm(layer, at):
        return oracle.norm(stack.norm, stack.eps, at) * layer.gain + layer.bias if layer else at

    for block in range(stack.depth):
        for k, branch in enumerate(stack.block):
            p, slots = jax.tree.map(lambda leaf, block=block: leaf[block], (weights.params[k], weights.norms[k]))
            fed = norm(slots[0], x)
            if branch.tokenwise:
                f = oracle.ACTIVATIONS["gelu"](fed @ p["w_in"].T + p["b_in"]) @ p["w_out"].T + p["b_out"]
            else:
                f = oracle.attention(p, fed, branch.heads_of(D), branch.causal, mask)
            x = norm(slots[2], x + norm(slots[1], f))
    return norm(weights.last, x) if stack.final_norm else x


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("scheme", "block", "final"), [(EVERYWHERE, "attention", True), (PURE, ("mlp:gelu", "linear"), False)], ids=name
)
def test_one_backward_pass_gives_what_the_sweep_gives(scheme, block, final, x64):
    stack = made(scheme, block, final_norm=final)
    mask = jnp.arange(TOKENS) < 4 if final else None
    weights, x, c = Drawn(jax.random.key(7), mask), normal(1, TOKENS, D), normal(2, TOKENS, D)
    c = c if mask is None else c.at[4].set(0)
    swept = flow(stack, weights, stack.trace(weights, x), c[None])
    out, gradient, rows = jax.jit(probes.profile, static_argnums=0)(stack, weights, x, c)
    assert set(rows) == set(swept)
    for figure, values in swept.items():
        close(rows[figure], values, 1e-12, 1e-13)
        assert rows[figure].dtype == values.dtype
    if mask is None:
        run = oracle.Network(stack, weights).run
        close(out, run(np.asarray(x)))
        truth = oracle.pull(run, x, c)
        close(gradient / jnp.linalg.norm(gradient), truth / np.linalg.norm(truth))


@pytest.mark.repeats
@pytest.mark.parametrize(("scheme", "causal"), [("post-ln", False), (SANDWICH, True)], ids=name)
def test_given_weights_with_biases_and_gains_against_the_equations(scheme, causal, x64):
    stack = made(scheme, (Attention(2, causal), MLP("gelu", 3)), final_norm=True)
    weights, x, c = given(stack), normal(1, TOKENS, D), normal(2, TOKENS, D)
    mask = np.arange(TOKENS) < 4
    full, c = c, c.at[4].set(0)
    p = gradflow.profile(stack, x, c, weights=weights, mask=mask)
    of_loss = gradflow.profile(stack, x, lambda out: jnp.sum(full * out), weights=weights, mask=mask)
    close(of_loss.exact, p.exact)  # what a loss says of padding is not sent back either
    x, c = np.asarray(x), np.asarray(c)
    gradient = oracle.pull(functools.partial(plain, stack, weights, mask=mask), x, c)
    close(p.stream_rms[0, -1], oracle.rms(plain(dataclasses.replace(stack, final_norm=False), weights, x, mask)[:4]))
    close(p.exact[0, 0], oracle.size(gradient) / oracle.size(c))
    close(gradient[4], 0)
    assert p.labels == (
        "1 attention" + ":causal" * causal,
        "1 mlp:gelu",
        "2 attention" + ":causal" * causal,
        "2 mlp:gelu",
        "final norm",
    )


def test_net_is_the_product_of_the_factors_and_local_leaves_the_branch_out():
    dtype = "float32"  # in float64 too: test_probes_pool_their_powers
    stack = made(EVERYWHERE, "attention", depth=3, final_norm=True, dtype=dtype)
    p = gradflow.profile(stack, np.random.default_rng(0).normal(size=(TOKENS, D)), seeds=3)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(p.net, np.prod([getattr(p, f) for f in FACTORS], 0), rtol=8 * eps)
    np.testing.assert_allclose(p.exact[:, :-1], np.cumprod(p.net[:, ::-1], 1)[:, ::-1], rtol=32 * eps)
    np.testing.assert_allclose(p.local[:, 0], np.prod(p.affine * p.projection * p.norm * p.skip, 1), rtol=32 * eps)
    assert p.net.dtype == np.dtype(dtype)


def test_low_memory_is_the_same_profile():
    stack, x = made(block="attention"), np.random.default_rng(0).normal(size=(TOKENS, D))
    full, low = (gradflow.profile(stack, x, memory=memory) for memory in ("full", "low"))
    for figure in ("net", "alignment", "log_trunk", "log_bound", "branch_return", "stream_rms", "token_cosine"):
        close(getattr(full, figure), getattr(low, figure), 1e-12)


def test_weight_grad_is_the_norm_of_the_weights_gradient(x64):
    """5 tokens: by Gram products for the MLP's matrices (8, 32), directly for the attention's (8, 8)."""
    stack = made(depth=2)
    weights, x, c = given(stack), normal(1, TOKENS, D), 1e3 * normal(2, TOKENS, D)
    p = gradflow.profile(stack, x, c, weights=weights, weight_grad=True)

    def loss(params):
        return jnp.sum(stack.trace(dataclasses.replace(weights, params=params), x).out * c)

    gradients = jax.grad(loss)(weights.params)
    powers = [sum(jnp.sum(v**2, (1, 2)) for k, v in g.items() if k.startswith("w")) for g in gradients]
    close(p.weight_grad[0], jnp.sqrt(jnp.stack(powers, 1)).ravel(), 1e-11)


def test_weight_grad_counts_the_powers_of_two_that_were_taken_out():
    """Depth 600 at half the gain a layer: the gradient at the bottom is 2⁻⁶⁰⁰ of the loss's."""
    stack = Stack.make("pre-ln", Linear(0.0), 600, D, norm="rms", eps=0.0)
    halving = dataclasses.replace(stack, scheme=dataclasses.replace(stack.scheme, alpha=stack.scheme.alpha / 2))
    x = np.random.default_rng(0).normal(size=(TOKENS, D))
    p = gradflow.profile(halving, x, weight_grad=True)
    per_layer = np.diff(np.log2(p.weight_grad[0, 100:500]))
    assert np.mean(per_layer) == pytest.approx(1, abs=0.05)
    assert p.log_exact[0, 0] / 600 == pytest.approx(-np.log(2), abs=0.02)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_nothing_under_or_overflows_at_depth_3000(dtype):
    stack = Stack.make("post-ln", "bias", 3000, 16, norm="rms", eps=0.0, dtype=dtype)
    p = gradflow.profile(stack, np.random.default_rng(0).normal(size=(2, 16)))
    assert -1100 < p.log_exact[0, 0] < -900
    close(p.log_exact, p.log_trunk, 1e-5)


def test_a_batch_is_each_state_alone_and_padding_changes_nothing():
    stack, x = made(block="attention"), np.random.default_rng(0).normal(size=(2, TOKENS, D))
    mask = np.ones((2, TOKENS), bool)
    mask[1, 3:] = False

    def loss(out):
        return jnp.sum(out[0] ** 3)

    both = gradflow.profile(stack, x, loss, mask=mask)
    alone = [gradflow.profile(stack, state, loss) for state in (x[0], x[1, :3])]
    for i, one in enumerate(alone):
        for f in dataclasses.fields(one):
            value = getattr(one, f.name)
            if isinstance(value, np.ndarray):
                close(getattr(both, f.name)[i], value[0], 1e-11)


def test_seeds_are_networks_of_their_own_and_the_same_call_gives_the_same_numbers():
    stack, x = made(block="mlp:gelu"), np.random.default_rng(0).normal(size=(TOKENS, D))
    p, again, other = (gradflow.profile(stack, x, seeds=3, key=key) for key in (0, 0, 1))
    assert p.net.shape == (3, 2)
    np.testing.assert_array_equal(p.net, again.net)
    assert len(np.unique([p.exact[:, 0], other.exact[:, 0]])) == 6


def test_probes_pool_their_powers():
    stack, x = made(block="mlp:gelu"), np.random.default_rng(0).normal(size=(TOKENS, D))
    p = gradflow.profile(stack, x, probes=4)
    assert p.settings["probes"] == 4
    close(p.net, np.prod([getattr(p, f) for f in FACTORS], 0), 1e-14)


def test_a_loss_is_followed_by_its_own_gradient(x64):
    stack, x = made(), normal(1, TOKENS, D)
    weights = given(stack)

    def loss(out):
        return jax.nn.logsumexp(out)

    p = gradflow.profile(stack, x, loss, weights=weights)
    sent = jax.grad(loss)(jnp.asarray(plain(stack, weights, np.asarray(x))))
    whole = oracle.pull(functools.partial(plain, stack, weights), x, sent)
    close(p.exact[0, 0], oracle.size(whole) / oracle.size(sent))
    assert p.settings["cotangent"] == "loss"


# --- lists of functions ----------------------------------------------------------------------------------------------


def test_a_list_of_residuals_is_the_stack_they_make(x64):
    stack = made(depth=1, final_norm=True)
    weights, x, c = given(stack), normal(1, TOKENS, D), normal(2, TOKENS, D)
    items = []
    for k, branch in enumerate(stack.block):
        p, slots = jax.tree.map(lambda leaf: leaf[0], (weights.params[k], weights.norms[k]))
        items.append(gradflow.Residual(functools.partial(branch.apply, p), norm_out=slots[2], name=branch.name))
    chain = gradflow.profile([*items, weights.last], x, c)
    whole = gradflow.profile(stack, x, c, weights=weights)
    for f in dataclasses.fields(whole):
        value = getattr(whole, f.name)
        if isinstance(value, np.ndarray):
            close(getattr(chain, f.name), value, 1e-12)
    assert chain.labels == ("1 attention", "2 mlp:gelu", "3 layernorm")


@pytest.mark.parametrize("factors", [(2, 3, 5), (7, 0.5, 3, 2)])
def test_gain_at_layer_l_is_from_its_input_to_the_output(factors):
    """Case chain-order: no off-by-one in what the gradient at layer l means."""
    p = gradflow.profile([lambda x, a=a: a * x for a in factors], 1.0)
    close(p.exact[0], [*np.cumprod(factors[::-1])[::-1], 1])


# --- what is refused --------------------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(TOKENS, D))
BAD = {
    "model: cannot profile a str": ("post-ln", {}),
    "model: needs at least one layer": ([], {}),
    "model: layer 2 is 3; needs a function": ([jnp.sin, 3], {}),
    "model: layer 1: returned dtype int32": ([lambda x: jnp.ones(3, jnp.int32)], {}),
    "model: layer 1: f returned shape": ([gradflow.Residual(lambda x: x[:1])], {}),
    "norm_out: unknown 'layernrom'; did you mean 'layernorm'": ([gradflow.Residual(jnp.sin, norm_out="layernrom")], {}),
    "weights: a list": ([jnp.sin], {"weights": Drawn(jax.random.key(0))}),
    "x: needs shape": (made(), {"x": np.ones((TOKENS, D + 1))}),
    "x: holds 1 NaN": (made(), {"x": np.where(X[0, 0] == X, np.nan, X)}),
    "cotangent: needs shape": (made(), {"cotangent": np.ones(D)}),
    "cotangent: is zero": (made(), {"cotangent": np.zeros((TOKENS, D))}),
    "cotangent: lies in the null space": (made(), {"cotangent": np.ones((TOKENS, D))}),
    "cotangent: a loss must return one real number": (made(), {"cotangent": lambda out: out}),
    "cotangent: unknown 'gausian'": (made(), {"cotangent": "gausian"}),
    "mask: needs booleans": (made(), {"mask": np.ones(TOKENS)}),
    "mask: leaves a state without": (made(), {"mask": np.zeros(TOKENS, bool)}),
    "memory: unknown 'tiny'": (made(), {"memory": "tiny"}),
    "probes: needs a whole number": (made(), {"probes": 0}),
    "seeds: given weights": (made(), {"seeds": 2, "weights": Drawn(jax.random.key(0))}),
    "weight_grad: comes with one": (made(), {"weight_grad": True, "probes": 2}),
    "heads: 3 heads do not divide d=8": (made(block=Attention(3)), {}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_in_one_line(message):
    model, arguments = BAD[message]
    refused(lambda: gradflow.profile(model, **{"x": X} | arguments), message)


def test_a_linear_map_of_no_bias_is_the_matrix():
    with jax.enable_x64(True):
        w, x = normal(0, 3, D), normal(1, TOKENS, D)
        close(linear({"w": w}, "", x), x @ w.T)
        close(linear({"w": w, "b": w[:, 0]}, "", x), x @ w.T + w[:, 0])
