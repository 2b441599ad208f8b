"""Detached norms against plain autodiff with ``stop_gradient`` on every statistic, written by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy

import gradflow
from gradflow import checkpoints, norms
from gradflow.auditing import audits, baselines
from gradflow.branches.attention import Attention
from gradflow.branches.mlp import MLP
from gradflow.checkpoints.parity import FIXTURES
from gradflow.schemes import Scheme
from gradflow.stack import Drawn, Stack
from gradflow.symbolic import norms as symbolic

EPS = 1e-2
held = jax.lax.stop_gradient
LENGTH = {
    "layernorm": lambda y: jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + EPS),
    "rms": lambda y: jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + EPS),
    "rms-outside": lambda y: jnp.sqrt(jnp.mean(y**2, -1, keepdims=True)) + EPS,
    "unit": lambda y: jnp.sqrt(jnp.sum(y**2, -1, keepdims=True)),
}


def normed(x, row="layernorm", length=None):
    y = x - x.mean(-1, keepdims=True) if row == "layernorm" else x
    return y / held((length or LENGTH[row])(y))


def size(array):
    return float(np.linalg.norm(np.ravel(np.asarray(array, float))))


@pytest.mark.parametrize("row", norms.NORMS, ids=lambda row: row.name)
def test_the_jacobian_is_autodiffs_with_the_statistic_held(row, eager):
    gain, bias, x = np.random.default_rng(0).normal(size=(3, 5))
    exact = replace(row.init(5, EPS, "float64"), gain=jnp.asarray(gain), bias=jnp.asarray(bias))
    layer = replace(exact, detached=True)
    truth = jax.jacfwd(lambda x: gain * normed(x, row.name) + bias)(jnp.asarray(x))
    np.testing.assert_allclose(layer.jacobian(x).dense(), truth, atol=1e-14)
    np.testing.assert_allclose(jax.jacrev(layer)(jnp.asarray(x)), truth, atol=1e-14)
    np.testing.assert_array_equal(layer(x), exact(x))
    assert np.abs(np.asarray(exact.jacobian(x).dense()) - truth).max() > 1e-3


def test_it_is_derived_then_used(tamper, x64):
    layer, x = replace(norms.LayerNorm.init(5, EPS, "float64"), detached=True), np.arange(5.0) ** 2
    right = np.asarray(layer.jacobian(x).dense())
    tamper(symbolic, "detached", lambda formula: (2 * formula.scale, sympy.Integer(0)))
    np.testing.assert_allclose(layer.jacobian(x).dense(), 2 * right, rtol=1e-12)


@pytest.mark.repeats
@pytest.mark.parametrize("out", [False, True])
def test_every_curve_is_autodiffs_with_all_statistics_held(out, x64):
    d, tokens, length = 6, 3, lambda t: jnp.sqrt(jnp.mean(t**2, -1, keepdims=True))
    scheme = Scheme("all", "test", "", norm_in=True, norm_branch=True, norm_out=out, alpha=sympy.Integer(2))
    block = (Attention(1, qk_norm=True, hidden_norm="rms"), MLP("tanh", 2, hidden_norm="layernorm"))
    stack = Stack.make(scheme, block, 1, d, eps=EPS, final_norm=True)
    weights, x = Drawn(jax.random.key(3)), jnp.asarray(np.random.default_rng(1).normal(size=(tokens, d)))
    g = np.random.default_rng(2).normal(size=(tokens, d))
    a, m = weights.layer(stack, jax.tree.map(lambda leaf: leaf[0], weights.along_depth(stack))).params

    def attention(x):
        q, k, v = (x @ a[f"w_{n}"].T for n in "qkv")
        q, k = (normed(t, "rms", length) for t in (q, k))
        return normed(jax.nn.softmax(q @ k.T / d**0.5) @ v, "rms", length) @ a["w_o"].T

    def mlp(x):
        return normed(jnp.tanh(x @ m["w_in"].T), "layernorm", length) @ m["w_out"].T

    def sublayer(f, x, keep):
        u = 2 * x + keep(normed(f(normed(x))))
        return normed(u) if out else u

    def network(x, keep=lambda f: f):
        return normed(sublayer(mlp, sublayer(attention, x, keep), keep))

    p = gradflow.profile(stack, x, g, weights=weights, detached=True)
    for curve, keep in (("exact", lambda f: f), ("trunk", held)):
        gain = size(jax.vjp(lambda x, keep=keep: network(x, keep), x)[1](g)[0]) / size(g)
        assert getattr(p, curve)[0, 0] == pytest.approx(gain, rel=1e-11)
    np.testing.assert_allclose(
        p.net, np.prod([getattr(p, f) for f in ("affine", "projection", "norm", "skip", "branch")], 0)
    )
    np.testing.assert_allclose(
        p.projection**2 + np.asarray(p.mean_component) ** 2, 1, rtol=1e-12
    )  # the mean alone goes
    lengths = np.asarray(p.radius_gain) * np.asarray(p.trunk_projection) * p.skip
    np.testing.assert_allclose(p.bound[0, 0], lengths.prod(), rtol=1e-12)
    way = stack.trace(weights, x)
    np.testing.assert_allclose(
        p.stream_rms[0, :2], np.sqrt(np.mean(np.square(way.x), (1, 2))), rtol=1e-12
    )  # values are the same
    assert p.settings["detached"]
    assert "detached norms: σ held constant" in str(p)


@pytest.mark.slow
def test_an_audit_says_so_and_a_baseline_keeps_it(tmp_path, bert, shell, monkeypatch, x64):
    text = "A stack flows"
    vouched = checkpoints.Parity("bert", "family-tested", 0.0, 1e-5, 4)  # which other tests are of
    monkeypatch.setattr(audits, "_gate", lambda fixture: vouched)
    a = gradflow.audit(FIXTURES / "bert", text, detached=True)
    x, sent = (
        bert.embed(bert.ids(text)),
        jax.random.normal(jax.random.fold_in(jax.random.key(0), 1), (1, 1, 6, 16), "float32"),
    )

    def network(x):
        for l in range(3):
            for branch, params, (*_, norm) in zip(
                bert.stack.block, bert.weights.params, bert.weights.norms, strict=True
            ):
                y = x + branch.apply(jax.tree.map(lambda leaf, l=l: leaf[l], params), x)
                y = y - y.mean(-1, keepdims=True)
                x = norm.gain[l] * y / held(jnp.sqrt(jnp.mean(y**2, -1, keepdims=True) + norm.eps)) + norm.bias[l]
        return x

    gain = size(jax.vjp(network, x)[1](jnp.asarray(sent[0, 0], float))[0]) / size(sent)
    assert a.profile.exact[0, 0] == pytest.approx(gain, rel=1e-10)
    assert "detached norms: σ held constant in every" in " ".join(str(a).split())
    assert a.verdict.startswith("With detached norms the gradient keeps")
    assert "what a detached norm leaves in, the gradient's cosine with u," in a.verdict
    assert a.to_dict()["call"]["detached"] is a.to_dict()["settings"]["detached"] is True
    a.save(tmp_path / "a.json")
    assert baselines.load(tmp_path / "a.json").call["detached"] is True
    with pytest.raises(ValueError, match="source: a detached audit"):
        gradflow.what_if(a)
    asked = []
    monkeypatch.setattr(audits, "audit", lambda *_, **options: asked.append(options["detached"]) or a)
    assert shell("audit", FIXTURES / "bert", "--text", text, "--detached")[0] == 0
    assert asked == [True]


def test_what_cannot_be_detached_is_refused(eager):
    with pytest.raises(ValueError, match="detached: a list of functions carries its own"):
        gradflow.profile([jnp.tanh], np.ones((2, 3)), detached=True)
