"""Equinox and Flax models through their adapters, against the framework's own forward pass and plain ``jax.grad``."""

import subprocess
import sys

import equinox as eqx
import frameworks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from frameworks import FRAMEWORKS, TOKENS, D

import gradflow
from gradflow import Residual, adapters
from gradflow.norms import Norm

X = np.random.default_rng(0).standard_normal((TOKENS, D))
WEIGHT = np.random.default_rng(1).standard_normal((TOKENS, D))


def gain(f, x, sent):
    """‖Jᵀg‖/‖g‖ by reverse mode through the whole of ``f``."""
    with jax.disable_jit(False):
        back = jax.jit(lambda x, sent: jax.vjp(f, x)[1](sent)[0])(x, sent)
    return np.linalg.norm(back) / np.linalg.norm(sent)


def loss(out):
    return jnp.sum(WEIGHT * out + out**3)


@pytest.mark.parametrize(("framework", "post"), [(f, i != 1) for i, f in enumerate(FRAMEWORKS)], ids=FRAMEWORKS)
def test_a_transformer_against_the_frameworks_own_gradient(framework, post, x64):
    net = frameworks.network(framework, post)
    p = gradflow.profile(net.chain, X, loss)

    @jax.jit
    def reference(x):
        out = net.whole(x)
        sent = jax.grad(loss)(out)
        norm, u = net.last(x)
        returned = jnp.einsum("tij,ti->tj", jax.vmap(jax.jacfwd(norm))(u), sent)
        return sent, jax.grad(lambda x: loss(net.whole(x)))(x), returned

    with jax.disable_jit(False):
        sent, back, returned = reference(X)
    size = np.linalg.norm(sent)
    assert back.dtype == np.float64
    np.testing.assert_allclose(p.exact[0, 0], np.linalg.norm(back) / size, rtol=1e-12)
    np.testing.assert_allclose((p.affine * p.projection * p.norm)[0, -1], np.linalg.norm(returned) / size, rtol=1e-12)
    np.testing.assert_allclose(p.affine * p.projection * p.norm * p.skip * p.branch, p.net, rtol=1e-12)
    np.testing.assert_allclose(p.net.prod(), p.exact[0, 0], rtol=1e-12)
    assert p.settings["dtype"] == "float64"
    assert not p.settings["reverse_only"]


def equinox_norms():
    for kind in (eqx.nn.LayerNorm, eqx.nn.RMSNorm):
        for use in (True, False):
            norm = kind(D, eps=1e-2, use_weight=use, use_bias=use)
            if use:
                norm = eqx.tree_at(lambda n: (n.weight, n.bias), norm, tuple(jnp.asarray(WEIGHT[:2], "float32")))
            yield adapters.equinox(norm), norm, 1e-2


def linen_norms():
    scale, bias = (jnp.asarray(p, "float32") for p in WEIGHT[:2])
    for kind, params in ((nn.LayerNorm, {"scale": scale, "bias": bias}), (nn.RMSNorm, {"scale": scale})):
        yield adapters.linen(kind(), {"params": params}), lambda x, k=kind, p=params: k().apply({"params": p}, x), 1e-6
    bare = nn.LayerNorm(use_scale=False, use_bias=False, epsilon=1e-2, reduction_axes=(-1,))
    yield adapters.linen(bare, {}, d=D), lambda x: bare.apply({}, x), 1e-2


def nnx_norms():
    rngs = nnx.Rngs(0)
    start = {"scale_init": lambda *_: jnp.asarray(WEIGHT[0], "float32"), "rngs": rngs}
    for norm in (nnx.LayerNorm(D, **start), nnx.RMSNorm(D, **start), nnx.RMSNorm(D, use_scale=False, rngs=rngs)):
        yield adapters.nnx(norm), norm, 1e-6


@pytest.mark.parametrize("cases", [equinox_norms, linen_norms, nnx_norms], ids=FRAMEWORKS)
def test_norms_are_taken_over_exactly(cases, x64):
    for ours, theirs, eps in cases():
        assert isinstance(ours, Norm)
        assert ours.eps == eps

        @jax.jit
        def both(x, ours=ours, theirs=theirs):
            return (ours(x), ours.jacobian(x).dense()), (theirs(x), jax.jacfwd(theirs)(x))

        for found, expected in zip(*both(0.1 * X[0]), strict=True):  # small enough for ε to count
            np.testing.assert_allclose(found, expected, atol=1e-12 * abs(expected).max())


def test_norms_over_other_axes_stay_functions(x64):
    x = jnp.asarray(X)
    whole = eqx.nn.LayerNorm((TOKENS, D))
    flax = nnx.LayerNorm(D, reduction_axes=(-2, -1), rngs=nnx.Rngs(0))
    for ours, theirs in ((adapters.equinox(whole), whole), (adapters.nnx(flax), flax)):
        assert not isinstance(ours, Norm)
        np.testing.assert_allclose(*jax.jit(lambda x, ours=ours, theirs=theirs: (ours(x), theirs(x)))(x), rtol=1e-14)


def sequentials():
    block = frameworks.equinox_block()
    model = eqx.nn.Sequential([block.norm1, block.mlp])
    yield adapters.equinox(model), jax.vmap(model)
    linen = nn.Sequential([nn.LayerNorm(), nn.Sequential([nn.Dense(D), nn.gelu, nn.Dense(D)])])
    variables = frameworks.drawn(jax.eval_shape(linen.init, jax.random.key(0), X))
    yield adapters.linen(linen, variables), lambda x: linen.apply(variables, x)

    def build():
        rngs = nnx.Rngs(0)
        inner = nnx.Sequential(nnx.Linear(D, D, rngs=rngs), nnx.gelu, nnx.Linear(D, D, rngs=rngs))
        return nnx.Sequential(nnx.LayerNorm(D, rngs=rngs), inner)

    model = frameworks.nnx_module(build)
    yield adapters.nnx(model), model


@pytest.mark.repeats
@pytest.mark.parametrize("index", range(3), ids=FRAMEWORKS)
def test_a_sequential_is_a_list_and_a_function(index, x64):
    ours, theirs = list(sequentials())[index]
    p = gradflow.profile(ours, X, WEIGHT)
    assert p.net.shape == (1, 4)
    assert p.labels[0] == "1 layernorm"
    np.testing.assert_allclose(p.exact[0, 0], gain(theirs, X, WEIGHT), rtol=1e-12)
    inside = gradflow.profile([Residual(ours)], X, WEIGHT)
    assert inside.labels == ("1 Sequential",)
    np.testing.assert_allclose(inside.exact[0, 0], gain(lambda x: x + theirs(x), X, WEIGHT), rtol=1e-12)


class InlineDropout(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(D)(x))


class Counter(nnx.Module):
    """Changes a variable of its own, under no flag."""

    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return x + self.calls[...]


def training_equinox():
    dropout = eqx.nn.Dropout(0.1)
    attention = eqx.nn.inference_mode(frameworks.equinox_block().attn, value=False)
    hint = r"^module: Dropout is in training mode; pass eqx\.nn\.inference_mode\(model\)$"
    yield lambda: adapters.equinox(dropout), hint
    yield lambda: adapters.equinox(attention), hint
    yield lambda: adapters.equinox(eqx.nn.Sequential([eqx.nn.Lambda(jax.nn.relu), dropout])), hint
    yield lambda: adapters.equinox(eqx.nn.BatchNorm(D, "batch", mode="ema")), "^module: keeps state"


def training_linen():
    model = InlineDropout()
    variables = frameworks.drawn(jax.eval_shape(lambda: model.init(jax.random.key(0), X, train=False)))
    yield (
        lambda: gradflow.profile([adapters.linen(model, variables)], X),
        "layer 1 InlineDropout: asks for a random key",
    )
    norm = nn.BatchNorm(use_running_average=False)
    stats = frameworks.drawn(jax.eval_shape(norm.init, jax.random.key(0), X))
    yield lambda: gradflow.profile([adapters.linen(norm, stats)], X), "layer 1 BatchNorm: changes its variables"


def training_nnx():
    rngs = nnx.Rngs(0)
    dropout = nnx.Sequential(nnx.Linear(D, D, rngs=rngs), nnx.Dropout(0.1, rngs=rngs))
    yield lambda: adapters.nnx(dropout), r"^module: Dropout is in training mode; call model\.eval\(\) first$"
    attention = nnx.MultiHeadAttention(2, D, dropout_rate=0.1, rngs=rngs)
    yield lambda: adapters.nnx(attention), "^module: MultiHeadAttention is in training mode"
    yield lambda: adapters.nnx(nnx.BatchNorm(D, rngs=rngs)), "^module: BatchNorm is in training mode"
    yield lambda: gradflow.profile([adapters.nnx(Counter())], X), "layer 1 Counter: changes its own calls"


@pytest.mark.parametrize("cases", [training_equinox, training_linen, training_nnx], ids=FRAMEWORKS)
def test_training_mode_is_refused(cases):
    for call, message in cases():
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_evaluation_mode_is_not(x64):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(D, D, rngs=rngs), nnx.Dropout(0.1, rngs=rngs), nnx.BatchNorm(D, rngs=rngs))
    model.eval()
    dropout = eqx.nn.inference_mode(eqx.nn.Sequential([frameworks.equinox_block().mlp, eqx.nn.Dropout()]))
    inline = InlineDropout()
    variables = frameworks.drawn(jax.eval_shape(lambda: inline.init(jax.random.key(0), X, train=False)))
    functions = (
        adapters.nnx(model),
        adapters.equinox(dropout),
        adapters.equinox(eqx.nn.Dropout(0)),
        adapters.linen(inline, variables, train=False),
    )
    for f in functions:
        assert jax.eval_shape(f, jnp.asarray(X)).shape == X.shape


@pytest.mark.repeats
@pytest.mark.parametrize("shape", [(D,), (TOKENS, D), (2, TOKENS // 2, D)])
def test_states_of_one_to_three_axes(shape, x64):
    x, sent = np.random.default_rng(2).standard_normal((2, *shape))
    block = frameworks.equinox_block()
    items = [adapters.equinox(block.mlp)]
    whole = block.mlp
    if len(shape) > 1:
        items += [adapters.equinox(block.norm1), Residual(adapters.equinox(block.attn))]

        def whole(x):
            x = jax.vmap(lambda token: block.norm1(block.mlp(token)))(x)
            return x + block.attn(x, x, x)

    whole = jax.vmap(whole) if len(shape) > 2 else whole
    np.testing.assert_allclose(gradflow.profile(items, x, sent).exact[0, 0], gain(whole, x, sent), rtol=1e-12)


def test_attention_takes_a_mask(x64):
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    flax = nnx.MultiHeadAttention(2, D, rngs=nnx.Rngs(0))
    other = X.copy()
    other[1:] += 1  # the first token's output depends on the first token alone
    for layer in (adapters.equinox(frameworks.equinox_block().attn, mask=causal), adapters.nnx(flax, mask=causal)):
        one, two = map(jax.jit(layer), (X, other))
        np.testing.assert_allclose(one[0], two[0], rtol=1e-12)
        assert not np.allclose(one[1], two[1])


def test_tokenwise_maps_a_module_of_vectors(x64):
    class Gate(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x):
            assert x.shape == (D,), "one token at a time"
            return x * jax.nn.sigmoid(self.inner(x))

    gate = Gate(frameworks.drawn(eqx.filter_eval_shape(eqx.nn.Linear, D, D, key=jax.random.key(0))))
    ours = adapters.equinox(gate, tokenwise=True)
    np.testing.assert_array_equal(ours(jnp.asarray(X)), jax.vmap(gate)(jnp.asarray(X)))
    assert ours.__name__ == "Gate"  # labels its row


def test_weights_take_the_states_dtype():
    mlp = frameworks.equinox_block().mlp
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype("float64") if eqx.is_array(leaf) else leaf, mlp)
    double = gradflow.profile([adapters.equinox(mlp)], X, WEIGHT)
    single = gradflow.profile([adapters.equinox(wide)], X.astype("float32"), WEIGHT)
    assert (double.settings["dtype"], single.settings["dtype"]) == ("float64", "float32")
    assert 1e-12 < abs(single.exact / double.exact - 1)[0, 0] < 1e-5


def test_a_compute_dtype_of_its_own_is_named():
    narrow = nnx.Linear(D, D, dtype=jnp.float32, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^model: layer 1 Linear: returned float32 for float64; give x in float32"):
        gradflow.profile([Residual(adapters.nnx(narrow))], X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: adapters.equinox(3),
            "^module: adapters.equinox adapts an equinox.Module or another callable, got int$",
        ),
        (lambda: adapters.linen(jnp.tanh), "^module: adapters.linen adapts a flax.linen.Module"),
        (lambda: adapters.nnx(lambda x: None), "^model: layer 1: returned NoneType; needs one floating array"),
        (lambda: adapters.linen(nn.Dense(D)), "^variables: needs what init returned"),
        (lambda: adapters.linen(nn.Dense(D), {"kernel": 1})(X), "do the variables fit the module?"),
        (lambda: adapters.linen(nn.LayerNorm(), {"params": {}}), "^variables: hold no scale or bias"),
        (lambda: adapters.linen(nn.RMSNorm(use_scale=False), {}), "^d: a RMSNorm without scale and bias"),
        (lambda: adapters.equinox(frameworks.equinox_block().attn, tokenwise=True), "^tokenwise"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        gradflow.profile([call()], X)
    assert "\n" not in str(caught.value)


def test_no_framework_loads_before_it_is_asked_for():
    code = "import sys, gradflow.adapters; print(sorted({'jax', 'equinox', 'flax'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(("name", "extra"), [("equinox", "equinox"), ("linen", "flax"), ("nnx", "flax")])
def test_a_missing_framework_names_its_extra(name, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, extra, None)
    monkeypatch.delitem(sys.modules, f"gradflow.adapters.from_{name}", raising=False)
    monkeypatch.delattr(adapters, f"from_{name}", raising=False)
    with pytest.raises(ImportError, match=rf"^adapters: {extra} is not installed; pip install gradflow\[{extra}\]$"):
        getattr(adapters, name)(None)
