"""Attention's options against one written by hand, its push against plain autodiff, and what the law refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import gradflow
from gradflow.branches import joined
from gradflow.branches.attention import Attention
from gradflow.branches.rotary import frequencies
from gradflow.stack import Stack

T, D = 5, 8
OPTIONS = {
    "grouped": {"kv_heads": 2},
    "one for all": {"kv_heads": 1, "head_size": 3},
    "wide": {"head_size": 6, "scale": 0.3, "rope": True},
    "soft": {"softcap": 0.7, "causal": True, "rope": True},
    "normed": {"qk_norm": True, "eps": 0.1, "kv_heads": 2},
    "normed whole": {"qk_norm": True, "qk_whole": True, "eps": 0.1, "kv_heads": 2, "rope": True},
}
BROUGHT = {"rope": np.array([0.9]), "reach": np.array(2), "mask": np.array([True, True, False, True, True])}


def by_hand(branch, params, x):
    """One query, one head, one key at a time."""
    size, few = branch.size_of(D), branch.kv_heads or 4
    params, x = {n: np.asarray(p) for n, p in params.items()}, np.asarray(x)
    q, k, v = (x @ params[f"w_{n}"].T for n in "qkv")
    if branch.qk_norm:
        share = {"q": q, "k": k} if branch.qk_whole else {"q": q.reshape(T, -1, size), "k": k.reshape(T, -1, size)}
        q, k = (
            t / np.sqrt((t**2).mean(-1, keepdims=True) + branch.eps) * params[f"gain_{n}"] for n, t in share.items()
        )
    q, k, v = (t.reshape(T, -1, size) for t in (q, k, v))
    turns = params.get("rope", frequencies(size)) if branch.rope else np.zeros(0)
    half, out = len(turns), np.zeros((T, 4, size))

    def turned(row, at):
        row = row.copy()
        for i, turn in enumerate(turns):
            z = (row[i] + 1j * row[i + half]) * np.exp(1j * at * turn)
            row[i], row[i + half] = z.real, z.imag
        return row

    for i in range(T):
        seen = [
            j
            for j in range(T)
            if (j <= i or not branch.causal) and i - j < params.get("reach", T) and params.get("mask", np.ones(T))[j]
        ]
        for h in range(4):
            g = h // (4 // few)
            logits = np.array([turned(q[i, h], i) @ turned(k[j, g], j) for j in seen]) * (branch.scale or size**-0.5)
            logits = branch.softcap * np.tanh(logits / branch.softcap) if branch.softcap else logits
            a = np.exp(logits) / np.exp(logits).sum() if seen else np.full(T, 1 / T)
            out[i, h] = a @ v[seen or range(T), g]
    return out.reshape(T, -1) @ params["w_o"].T


@pytest.mark.parametrize("brought", [(), ("rope", "reach", "mask")])
@pytest.mark.parametrize("name", OPTIONS)
def test_against_one_written_by_hand(x64, name, brought):
    branch, rng = Attention(4, **OPTIONS[name]), np.random.default_rng(0)
    params = branch.init(jax.random.key(0), D, "float64") | {n: jnp.asarray(BROUGHT[n]) for n in brought}
    if branch.qk_norm:
        sizes = {"q": 8, "k": 4} if branch.qk_whole else {"q": branch.size_of(D), "k": branch.size_of(D)}
        params |= {f"gain_{n}": jnp.asarray(rng.normal(size=size)) for n, size in sizes.items()}
    x = jnp.asarray(rng.normal(size=(T, D)))
    np.testing.assert_allclose(branch.apply(params, x), by_hand(branch, params, x), atol=1e-13)


def test_push_and_the_sum_of_branches(x64):
    branch = joined((Attention(4, **OPTIONS["normed whole"], softcap=2.0), Attention(4, True, kv_heads=2)))
    params = branch.init(jax.random.key(1), D, "float64")
    params |= {"gain0:_q": jnp.full(8, 2.0), "gain0:_k": jnp.full(4, 0.5)}
    params |= {"rope0:": jnp.array([0.4]), "reach1:": jnp.asarray(2)}
    x, basis = (np.random.default_rng(0).normal(size=shape) for shape in ((T, D), (T, D, 2)))
    J = jax.jit(jax.jacfwd(lambda x: branch.apply(params, x)))(x)
    np.testing.assert_allclose(jax.jit(branch.push)(params, x, basis), np.einsum("abij,ijk->abk", J, basis), atol=1e-12)
    alone = [part.apply(mine, jnp.asarray(x)) for part, mine in branch._parts(params)]
    np.testing.assert_allclose(branch.apply(params, x), sum(alone), atol=1e-13)
    assert set(branch._parts(params)[1][1]) == {"w_q", "w_k", "w_v", "w_o", "reach"}


def test_a_network_with_it_is_profiled_and_its_weights_are_at_unit_gain():
    branch = Attention(4, True, kv_heads=2, head_size=64, rope=True)
    params = branch.init(jax.random.key(0), 256, "float32")
    shapes = {"w_q": (256, 256), "w_k": (128, 256), "w_v": (128, 256), "w_o": (256, 256)}
    assert {n: w.shape for n, w in params.items()} == shapes
    for w in params.values():
        assert float(jnp.std(w)) * w.shape[1] ** 0.5 == pytest.approx(1, abs=0.02)
    assert branch.name == "attention:causal:rope:grouped"


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", ["grouped", "wide", "soft", "normed whole"])
def test_the_law_refuses_what_it_does_not_know(name, tokens):
    branch = Attention(4, **OPTIONS[name])
    for block in ((branch, "mlp:relu"), joined((branch, Attention()))):
        refused(
            lambda block=block: gradflow.law("pre-ln", block, 2, tokens=tokens),
            "(kv_heads|head_size|softcap): attention with it has no derived law; gradflow.profile measures it",
        )
    refused(
        lambda: Attention(4, qk_norm=True, qk_whole=True).of_law(), "qk_whole: attention with it has no derived law"
    )
    assert Attention(4, rope=True, qk_norm=True).of_law()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 0}, "kv_heads: needs a whole number"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads: 3 do not divide 4 heads"),
        ({"head_size": 4}, "heads: say how many"),
        ({"softcap": 0.0}, "softcap: needs a finite number above 0"),
        ({"scale": float("nan")}, "scale: needs a finite number above 0"),
        ({"qk_whole": True}, "qk_whole: says how far qk_norm goes"),
    ],
)
def test_options_that_do_not_fit(options, message):
    refused(lambda: Attention(**options).init(jax.random.key(0), 8, "float32"), message)


def test_frequencies():
    np.testing.assert_allclose(frequencies(8, 16.0), [1, 0.5, 0.25, 0.125])
    assert Stack.make("pre-ln", Attention(2, rope=True), 1, 6).block[0].rope
