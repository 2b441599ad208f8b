"""RWKV-4 against Hugging Face's own numbers, each planted fault against the gate, and its branches in random stacks."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import sympy
from refusals import refused
from safetensors.numpy import load_file, save_file

import gradflow
from gradflow import checkpoints
from gradflow.auditing import audits
from gradflow.branches import rwkv
from gradflow.branches.rwkv import ChannelMix, TimeMix
from gradflow.checkpoints import families, losses
from gradflow.checkpoints.parity import FIXTURES
from gradflow.checkpoints.recurrent import RECURRENT
from gradflow.factors import FACTORS
from gradflow.stack import Given, Stack

FIXTURE = FIXTURES / "rwkv"
BLOCK = "rwkv.blocks.1."


@pytest.fixture(scope="module")
def checkpoint():
    return checkpoints.load(FIXTURE)


@pytest.fixture(scope="module")
def wanted():
    return dict(np.load(FIXTURE / "reference.npz"))


# ---- the recurrence ----


@pytest.mark.parametrize("size", [1.0, 400.0, 1e4])  # exp(1e4) is no number: only the running maximum keeps it one
def test_the_recurrence_is_its_sum(x64, size):
    rng = np.random.default_rng(0)
    k, v, (decay, first) = size * rng.normal(size=(9, 4)), rng.normal(size=(9, 4)), rng.normal(size=(2, 4))
    for t, row in enumerate(rwkv.wkv(*map(jnp.asarray, (decay, first, k, v)))):
        age = t - 1 - np.arange(t + 1)[:, None]
        logs = k[: t + 1] + np.where(age < 0, first, -age * np.exp(decay))
        w = np.exp(logs - logs.max(0))
        np.testing.assert_allclose(row, (w * v[: t + 1]).sum(0) / w.sum(0), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("branch", [TimeMix(size=4), ChannelMix(ratio=1.5)], ids=lambda branch: branch.name)
def test_derivatives_are_the_definitions(x64, branch):
    """Forward and back against complex steps through the definition; the matrices' gradients, as noted, against autodiff."""
    rng = np.random.default_rng(0)
    x, c, direction = map(jnp.asarray, rng.normal(size=(3, 5, 6)))
    params, notes = branch.init(jax.random.key(0), 6, "float64"), {f"note{n}": jnp.zeros(()) for n in branch.matrices}

    @jax.jit
    def run(params, notes):
        loss = lambda params, notes, x: jnp.sum(c * branch.apply(params | notes, x))  # noqa: E731
        plain, back = jax.grad(loss, (0, 2))(params, {}, x)
        return branch.push(params, x, direction[..., None]), back, plain, jax.grad(loss, 1)(params, notes, x)

    pushed, back, plain, watched = run(params, notes)
    truth = oracle.jacobian(functools.partial(oracle.branch, branch.name, jax.tree.map(np.asarray, params)), x)
    np.testing.assert_allclose(pushed[..., 0], np.einsum("tisj,sj->ti", truth, direction), atol=1e-13)
    np.testing.assert_allclose(back, np.einsum("tisj,ti->sj", truth, c), atol=1e-13)
    assert {n for n in params if n.startswith("w")} == {f"w{n}" for n in branch.matrices}
    for n in branch.matrices:
        assert watched[f"note{n}"] == pytest.approx(np.linalg.norm(plain[f"w{n}"]), rel=1e-12)


def test_drawn_vectors_are_the_papers(x64):
    params = TimeMix(along=0.25).init(jax.random.key(0), 8, "float64")
    i = np.arange(8)
    np.testing.assert_allclose(params["decay"], -5 + 8 * (i / 7) ** (0.7 + 1.3 * 0.25))
    np.testing.assert_allclose(params["first"], np.log(0.3) + 0.5 * np.array([0, 1, -1, 0, 1, -1, 0, 1]))
    np.testing.assert_allclose(params["mix_k"], (i / 8) ** 0.75)
    np.testing.assert_allclose(params["mix_v"], (i / 8) ** 0.75 + 0.075)
    np.testing.assert_allclose(params["mix_r"], (i / 8) ** 0.375)
    refused(lambda: ChannelMix(along=1.5), "along: needs a share of the depth from 0 to 1, got 1.5")
    refused(lambda: TimeMix(size=0), "size: needs a whole number of at least 1")


@pytest.mark.parametrize("name", ["time-mix", "channel-mix", "time-mix|mlp:relu"])
def test_no_law_is_made_up(name):
    message = "no law is derived for '(time|channel)-mix'; gradflow.profile measures it"
    for options in ({}, {"tokens": 4, "token_cosine": 0.5}):
        refused(lambda options=options: gradflow.law("pre-ln", name, 2, d=8, **options), message)
    refused(lambda: Stack.make("admin", name, 2, 8).multipliers(), message)


# ---- parity ----


def test_states_and_logits_are_transformers_own(x64, checkpoint, wanted):
    assert [row.name for row in RECURRENT] == [checkpoint.family] == [checkpoint.plan.fixture]
    result = checkpoints.gate("rwkv")
    assert (result.family, result.tested, result.states) == ("rwkv", "family-tested", 3)
    assert result.worst < 1e-13  # both sides are float64
    last = jnp.asarray(wanted["hidden_states"][-1, 0])
    np.testing.assert_allclose(checkpoint.logits(last), wanted["logits"][0], atol=1e-12)


@pytest.mark.slow
def test_the_gradient_of_the_loss_is_transformers_own_everywhere(x64, checkpoint, wanted):
    last, ids = wanted["hidden_states"][-1], wanted["ids"]
    _, sent = losses.at_places(checkpoint, last, [np.arange(ids.size - 1)], [ids[0, 1:]])
    run = lambda x: checkpoint.behind(checkpoint.stack.trace(checkpoint.weights, x).out)  # noqa: E731
    (found,) = jax.vjp(run, checkpoint.embed(ids[0]))[1](jnp.asarray(sent[0]))
    np.testing.assert_allclose(found, wanted["loss_gradient"][0], atol=1e-13)


def test_at_inference_the_same_network_runs_at_another_epsilon(x64, checkpoint, wanted):
    """Halved k times, a stream is the same to norms whose ε is 4^k-fold: block by block, against transformers' own."""
    stack, weights, x = checkpoint.stack, checkpoint.weights, checkpoint.embed(wanted["ids"][0])
    states = wanted["inference_states"][:, 0]
    for l in range(2):  # the fixture halves behind each block
        np.testing.assert_allclose(x, 2**l * states[l], atol=1e-13)
        own = jax.tree.map(lambda leaf, l=l: leaf[l : l + 1], (weights.params, weights.norms))
        eps = 4**l * stack.eps
        slots = tuple(tuple(n and dataclasses.replace(n, eps=eps) for n in each) for each in own[1])
        x = dataclasses.replace(stack, depth=1, eps=eps).trace(Given(own[0], slots), x).out
    last = dataclasses.replace(weights.last, eps=16 * weights.last.eps)
    np.testing.assert_allclose(last(x), states[2], atol=1e-13)
    assert np.max(np.abs(states[2] - wanted["hidden_states"][2, 0])) < 1e-2  # and that is all the difference


# ---- planted faults ----


def altered(root, edit=lambda tensors: None, **config):
    """A copy of the fixture with edited tensors and config, where ``gate`` can find it; ``None`` takes a key out."""
    folder = shutil.copytree(FIXTURE, root / "rwkv", dirs_exist_ok=True)
    tensors = load_file(FIXTURE / "model.safetensors")
    edit(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    stated = json.loads((FIXTURE / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: v for key, v in stated.items() if v is not None}))
    return folder


def put(name, value):
    """An edit of one tensor."""
    return lambda tensors: tensors.update({name: value(tensors[name])})


def swapped(a, b):
    return lambda tensors: tensors.update({a: tensors[b], b: tensors[a]})


WEIGHTS = {
    "transposed": put(f"{BLOCK}feed_forward.receptance.weight", np.transpose),
    "norms swapped": swapped(f"{BLOCK}ln1.weight", f"{BLOCK}ln2.weight"),
    "no gain behind the embedding": put("rwkv.blocks.0.pre_ln.weight", np.ones_like),
    "no last gain": put("rwkv.ln_out.weight", np.ones_like),
    "a token weighs itself as the next one will": put(f"{BLOCK}attention.time_first", np.zeros_like),
    "mixes the other way round": put(f"{BLOCK}attention.time_mix_value", lambda mix: 1 - mix),
    "keys and values swapped": swapped(f"{BLOCK}attention.key.weight", f"{BLOCK}attention.value.weight"),
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_fault_in_the_weights_fails_the_gate(x64, tmp_path, fault):
    altered(tmp_path, WEIGHTS[fault])
    with pytest.raises(checkpoints.ParityError, match="parity: "):
        checkpoints.gate("rwkv", tmp_path)


@pytest.mark.slow
def test_every_tensor_of_the_body_is_used(x64, tmp_path):
    for name in load_file(FIXTURE / "model.safetensors"):
        altered(tmp_path, put(name, np.zeros_like))
        with pytest.raises(checkpoints.ParityError, match="parity: "):
            checkpoints.gate("rwkv", tmp_path)


def changed(part, **fields):
    """Of a plan's part."""
    return lambda p: {part: dataclasses.replace(getattr(p, part), **fields)}


READINGS = {
    "another ε": lambda p: {"eps": p.eps / 10},
    "the config's ε at the end": lambda p: {"final_eps": None},
    "no residual": changed("scheme", alpha=sympy.Integer(0)),
    "a norm behind the branch": changed("scheme", norm_in=False, norm_branch=True),
    "no last norm": lambda p: {"final_norm": False},
}


@pytest.mark.parametrize("reading", READINGS)
def test_another_reading_of_the_config_fails_the_gate(eager, monkeypatch, reading):
    made = families.plan
    monkeypatch.setattr(families, "plan", lambda *a: dataclasses.replace(made(*a), **READINGS[reading](made(*a))))
    with pytest.raises(ValueError, match=r"parity: |does not use"):
        checkpoints.gate("rwkv")


held_blends, held_wkv = rwkv.blends, rwkv.wkv


def later(params, names, x):
    """Each token blended with the one behind it."""
    return [mixed[::-1] for mixed in held_blends(params, names, x[::-1])]


CODE = {
    "a shift the other way": ("blends", later),
    "no shift": ("blends", lambda params, names, x: [x for _ in names]),
    "no exponential of the decay": ("wkv", lambda decay, *rest: held_wkv(jnp.log(jnp.abs(decay)), *rest)),
    "the token itself twice": ("wkv", lambda decay, first, k, v: held_wkv(decay, first + np.log(2), k, v)),
}


@pytest.mark.parametrize("fault", CODE)
def test_another_recurrence_fails_the_gate(eager, monkeypatch, fault):
    monkeypatch.setattr(rwkv, *CODE[fault])
    with pytest.raises(checkpoints.ParityError, match="parity: "):
        checkpoints.gate("rwkv")


# ---- configs ----


REFUSED = [
    ({"a_new_switch": True}, "'a_new_switch' is not known for 'rwkv'"),
    ({"hidden_act": "relu"}, "'hidden_act' is not known for 'rwkv'"),
    (
        {"attention_hidden_size": None},
        r"attention.receptance.weight' has shape \(20, 16\), where config.json makes it \(16,",
    ),
    (
        {"intermediate_size": None},
        r"feed_forward.key.weight' has shape \(40, 16\), where config.json makes it \(64, 16\)",
    ),
    ({"num_hidden_layers": 3}, "no tensor 'rwkv.blocks.2.attention.receptance.weight'"),
    ({"layer_norm_epsilon": -1.0}, "'layer_norm_epsilon' is -1.0; needs a number from 0 to 1"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_config_that_is_not_read(tmp_path, changes, message):
    refused(lambda: checkpoints.load(altered(tmp_path, **changes)), message)


def test_what_a_config_leaves_out(tmp_path, checkpoint):
    found = checkpoints.load(altered(tmp_path, rescale_every=None, context_length=None, layer_norm_epsilon=None)).plan
    assert (found.positions, found.eps, found.tied) == (1024, 1e-5, False)
    assert found.sizes() == checkpoint.plan.sizes() | {"positions": 1024, "eps": 1e-5}
    assert found.sizes()["channels"] == 20
    assert "heads" not in found.sizes()


# ---- audits ----


@pytest.mark.slow
def test_texts_of_several_lengths_are_as_they_are_alone(x64, checkpoint, wanted):
    rows = [wanted["ids"][0], np.array([0, 22, 8, 21, 28])]
    states, real = audits._batch(checkpoint, rows)
    for row, out in zip(rows, audits.forward(checkpoint, states, real, record=False)[1], strict=True):
        np.testing.assert_allclose(out[: row.size], checkpoint.hidden_states(row)[-1], atol=1e-12)


@pytest.mark.slow
def test_an_audit_is_of_transformers_own_loss_and_gradient(checkpoint, wanted):
    a = gradflow.audit(FIXTURE, str(wanted["text"][0]))
    assert (a.family, a.settings["cotangent"], a.ids) == ("rwkv", "next-token", (tuple(wanted["ids"][0]),))
    assert a.settings["loss"][0] == pytest.approx(float(wanted["loss"]), rel=1e-12)
    last, ids = wanted["hidden_states"][-1], wanted["ids"][0]
    _, arriving = losses.at_places(checkpoint, last, [np.arange(ids.size - 1)], [ids[1:]])
    gain = np.linalg.norm(wanted["loss_gradient"]) / np.linalg.norm(arriving)
    assert a.profile.exact[0, 0] == pytest.approx(gain, rel=1e-10)
    np.testing.assert_allclose(a.profile.net, np.prod([getattr(a.profile, f) for f in FACTORS], 0), rtol=1e-13)
    lines = str(a).splitlines()
    assert max(map(len, lines)) <= 100
    assert [line for line in lines if "time-mix" in line]
    assert json.loads(json.dumps(a.to_dict()))["model"]["sizes"]["activation"] == "relu²"
