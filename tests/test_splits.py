"""Gain split into what tokens share and what differs between them: against projections by hand, and the law."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import gradflow
from gradflow.report import text
from gradflow.split_report import table
from gradflow.splits import NAMES
from gradflow.stack import Drawn, Stack

STACK = Stack.make("post-ln", ("attention", "mlp:tanh"), 2, 8, eps=0.0)


def parts(g):
    """‖mean part‖, ‖differences‖."""
    mean = np.broadcast_to(g.mean(0), g.shape)
    return np.linalg.norm(mean), np.linalg.norm(g - mean)


def test_four_gains_are_autodiffs_projected_by_hand(x64):
    x = np.random.default_rng(0).standard_normal((3, 8))
    split = gradflow.subspaces(STACK, x, seeds=2, key=5)
    weights = [Drawn(k) for k in jax.random.split(jax.random.key(5), 2)]
    drawn = np.asarray(jax.random.normal(jax.random.fold_in(jax.random.key(5), 1), (3, 8), jnp.float32), np.float64)
    sent = {"consensus": np.broadcast_to(drawn.mean(0), drawn.shape), "differences": drawn - drawn.mean(0)}
    for start, cotangent in sent.items():
        for seed, w in enumerate(weights):
            _, pull = jax.vjp(lambda x, w=w: STACK.trace(w, x).out, jnp.asarray(x))
            wanted = np.array(parts(np.asarray(pull(jnp.asarray(cotangent))[0]))) / np.linalg.norm(cotangent)
            found = [split.gain(start, end)[seed, 0] for end in NAMES]
            np.testing.assert_allclose(found, wanted, rtol=1e-9)
            np.testing.assert_allclose(split.gain(start, start)[seed, -1], 1, rtol=1e-9)
    assert split.law is None
    assert "No law: the input is given." in str(split)


@pytest.mark.slow
def test_padding_is_in_neither_part():
    x, real = np.random.default_rng(1).standard_normal((5, 8)), np.array([1, 1, 1, 0, 0], bool)
    padded = gradflow.subspaces(STACK, x, seeds=1, mask=real)
    for name in NAMES:
        assert np.all(padded.measured[name].consensus <= 1 + 1e-12)
    np.testing.assert_allclose(padded.measured["consensus"].consensus[0, -1], 1, rtol=1e-12)
    np.testing.assert_allclose(padded.measured["differences"].consensus[0, -1], 0, atol=1e-12)


@pytest.mark.slow
def test_law_beside_networks():
    stack = Stack.make("pre-ln", ("attention", "mlp:relu"), 3, 128, eps=0.0, dtype="float32")
    split = gradflow.subspaces(stack, tokens=12, seeds=12)
    for start in NAMES:
        seen = np.log(sum(split.gain(start, end) ** 2 for end in NAMES).mean(0)[0]) / 2
        law = np.log(sum(split.gain(start, end, law=True) ** 2 for end in NAMES)[0, 0]) / 2
        assert abs(seen - law) / 6 < 0.02, (start, seen, law)
    # what tokens share comes back whole from attention; what differs does not
    total = [sum(split.gain(start, end, law=True)[0, 0] ** 2 for end in NAMES) for start in NAMES]
    assert total[0] > 2 * total[1]
    held = json.loads(json.dumps(split.to_dict(), allow_nan=False))
    assert len(held["measured"]["consensus to differences"]) == 12
    assert max(map(len, text(table(split)).splitlines())) <= 100
    assert "Verdict: a cotangent that lies in the consensus" in str(split)
    assert len(split.plot().axes) == 2


def test_a_list_of_functions_is_split_too():
    x = np.random.default_rng(2).standard_normal((4, 6))
    mix = jnp.asarray(np.full((4, 4), 0.25))
    split = gradflow.subspaces([lambda x: mix @ x], x)
    np.testing.assert_allclose(split.gain("consensus", "consensus")[0, 0], 1, rtol=1e-6)
    np.testing.assert_allclose(split.gain("differences", "differences")[0, 0], 0, atol=1e-6)


def test_what_cannot_be_split_is_refused():
    refused(lambda: gradflow.subspaces(STACK, np.ones((1, 8))), "x: needs at least two tokens")
    refused(lambda: gradflow.subspaces([jnp.tanh]), "x: only a random Stack is given an input")
    split = gradflow.subspaces([jnp.tanh], np.random.default_rng(0).standard_normal((3, 8)))
    refused(lambda: split.gain("consensus", "difference"), "subspace: unknown 'difference'; did you mean 'differences'")
    refused(lambda: split.gain("consensus", "consensus", law=True), "law: there is none here")
    one = gradflow.profile([jnp.tanh], np.ones((1, 8)))
    np.testing.assert_array_equal(one.consensus, 1.0)


@pytest.mark.parametrize("probes", [1, 2])
def test_cosine_at_the_input_is_of_the_gradient_there(probes, x64):
    x = np.random.default_rng(3).standard_normal((3, 8))
    stack = Stack.make("post-ln", "linear", 1, 8, eps=0.0)
    p = gradflow.profile(stack, x, key=1, probes=probes)
    _, pull = jax.vjp(lambda x: stack.trace(Drawn(jax.random.split(jax.random.key(1), 1)[0]), x).out, jnp.asarray(x))
    sent = jax.random.normal(jax.random.fold_in(jax.random.key(1), 1), (1, probes, 3, 8), jnp.float32)[0]
    g = np.stack([np.asarray(pull(c.astype(float))[0]) for c in sent])
    common = sum(3 * np.sum(one.mean(0) ** 2) for one in g) / np.sum(g**2)
    np.testing.assert_allclose(p.consensus[0, 0], common, rtol=1e-9)
