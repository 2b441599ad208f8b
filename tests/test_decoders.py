"""Causal models against Hugging Face's own numbers, and each planted fault against the gate."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy
from safetensors.numpy import load_file, save_file

from gradflow import attention, audits, checkpoints, precision, rotary
from gradflow.checkpoints import families, losses
from gradflow.checkpoints.decoders import DECODERS
from gradflow.checkpoints.families import family_of
from gradflow.checkpoints.parity import FIXTURES

NAMES = [row.name for row in DECODERS]
CASES = sorted(folder.name for folder in FIXTURES.iterdir() if folder.name.partition("-")[0] in NAMES)
# one of each kind runs always; what shares a row's names with it, or differs by a flag, in `make test-all`
KINDS = ("gpt2", "llama", "gpt_neox", "opt", "gemma2", "olmo2", "mixtral")
FAULTY = [pytest.param(case, marks=() if case in KINDS else pytest.mark.slow) for case in CASES]


def reference(case):
    return dict(np.load(FIXTURES / case / "reference.npz"))


def config_of(case):
    return json.loads((FIXTURES / case / "config.json").read_text())


@pytest.fixture(scope="module")
def loaded():
    return {case: checkpoints.load(FIXTURES / case) for case in CASES}


def test_every_family_has_a_fixture_and_every_fixture_vouches_for_its_own_plan(loaded):
    assert {case.partition("-")[0] for case in CASES} == set(NAMES)
    for case, checkpoint in loaded.items():
        assert (checkpoint.family, checkpoint.plan.fixture) == (case.partition("-")[0], case)
        assert checkpoint.causal


@pytest.mark.parametrize("case", CASES)
def test_states_logits_and_loss_are_transformers_own(eager, loaded, case):
    checkpoint, wanted = loaded[case], reference(case)
    result = checkpoints.gate(case)
    assert (result.family, result.tested, result.states) == (checkpoint.family, "family-tested", 3)
    assert result.worst < 1e-13  # both sides are float64
    last, ids = wanted["hidden_states"][-1], wanted["ids"]
    np.testing.assert_allclose(checkpoint.logits(jnp.asarray(last[0])), wanted["logits"][0], atol=1e-12)
    values, _ = losses.at_places(checkpoint, last, [np.arange(ids.size - 1)], [ids[0, 1:]])
    assert values[0] == pytest.approx(wanted["loss"], rel=1e-12)


@pytest.mark.repeats
@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case != "gemma2"))
def test_the_gradient_of_the_loss_is_transformers_own(loaded, case):
    checkpoint, wanted = loaded[case], reference(case)
    ids = wanted["ids"]
    states, real = audits._batch(checkpoint, ids)
    outs = audits._outputs(checkpoint, states, real)
    _, sent = losses.at_places(checkpoint, outs, [np.arange(ids.size - 1)], [ids[0, 1:]])
    with precision.scope("float64"):
        run = lambda x: checkpoint.behind(checkpoint.stack.trace(checkpoint.weights, x).out)  # noqa: E731
        (found,) = jax.vjp(run, jnp.asarray(states[0]))[1](jnp.asarray(sent[0]))
    np.testing.assert_allclose(found, wanted["loss_gradient"][0], atol=1e-13)


# ---- planted faults ----


def altered(root, case, edit=lambda tensors: None, **config):
    """A copy of a fixture with edited tensors and config, where ``gate`` can find it."""
    folder = shutil.copytree(FIXTURES / case, root / case, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(case) | config))
    return folder


def fails(case, root=FIXTURES):
    with pytest.raises(checkpoints.ParityError, match="parity: "):
        checkpoints.gate(case, root)


def block(case):
    """The row, and what its tensors of block 1 begin with."""
    row = family_of(config_of(case))
    return row, row.prefix + row.layer.format(l=1)


def put(name, value):
    """An edit of one tensor."""
    return lambda tensors: tensors.update({name: value(tensors[name])})


def weight_faults(case):
    """Name → edit of the tensors."""
    row, prefix = block(case)
    tensors = load_file(FIXTURES / case / "model.safetensors")
    norms = [f"{prefix}{module}.weight" for each in row.norms for module in each]
    modules = [f"{prefix}{module}.weight".format(e=1) for module in (*row.attention, *row.mlp)]
    final, square = f"{row.prefix}{row.final}.weight", [n for n in modules if len(set(tensors[n].shape)) == 1]
    return {
        "rows of a head in another order": put(modules[0], lambda w: np.roll(w, 1, row.in_out)),
        "norms swapped": lambda t: t.update({norms[0]: t[norms[-1]], norms[-1]: t[norms[0]]}),
        **{f"{n} is ignored": put(n, np.ones_like) for n in (norms[1], final) if n in tensors},
        **{f"{n} is transposed": put(n, np.transpose) for n in square[-1:]},
    }


@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_in_the_weights_fails_the_gate(eager, tmp_path, case):
    faults = weight_faults(case)
    assert len(faults) >= 3
    for fault in faults.values():
        altered(tmp_path, case, fault)
        fails(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_a_block_is_used(eager, tmp_path, loaded, case):
    _, prefix = block(case)
    for name in load_file(FIXTURES / case / "model.safetensors"):
        # without rotary positions the keys' bias adds the same to all logits of a row, which softmax does not see
        if name.startswith(prefix) and (loaded[case].plan.attention.rope or not name.endswith("k_proj.bias")):
            altered(tmp_path, case, put(name, np.zeros_like))
            fails(case, tmp_path)


def interleaved(x, turns):
    """Pairs of neighbours, not of halves."""
    half = turns.shape[-1]
    order = np.arange(2 * half).reshape(half, 2).T.ravel()
    rest = x[..., 2 * half :]
    turned = rotary.rotated(jnp.concatenate([x[..., order], rest], -1), turns)
    return jnp.concatenate([turned[..., np.argsort(order)], rest], -1)


def changed(part, **fields):
    """Of a plan's part."""
    return lambda p: {
        part: dataclasses.replace(getattr(p, part), **{n: f(getattr(p, part)) for n, f in fields.items()})
    }


OTHER = {"gelu": "gelu_tanh", "gelu_tanh": "gelu", "silu": "gelu", "relu": "gelu"}
READINGS = {  # of a config: what is changed of a plan; None where the plan has nothing of the kind
    "another ε": lambda p: {"eps": p.eps / 10},
    "another activation": changed("mlp", activation=lambda m: OTHER[m.activation]),
    "no residual": changed("scheme", alpha=lambda _: sympy.Integer(0)),
    "later tokens seen": changed("attention", causal=lambda _: False),
    "another scale of the logits": changed("attention", scale=lambda a: 0.9 * (a.scale or 0.5)),
    "another ε of queries and keys": lambda p: (
        p.attention.qk_norm and changed("attention", eps=lambda a: a.eps / 10)(p)
    ),
    "no cap of the scores": lambda p: p.attention.softcap and changed("attention", softcap=lambda _: None)(p),
    "no cap of the logits": lambda p: p.softcap and {"softcap": None},
    "another base of the positions": lambda p: p.turns is not None and {"turns": p.turns * 1.01},
    "the blocks' positions mixed up": lambda p: (
        p.turns is not None and (p.turns[0] != p.turns[1]).any() and {"turns": p.turns[::-1]}
    ),
    "no window": lambda p: p.reach is not None and {"reach": None},
    "a window one longer": lambda p: p.reach is not None and {"reach": p.reach + 1},
    "positions one on": lambda p: p.turns is None and {"skipped": p.skipped + 1, "positions": p.positions - 1},
    "the embedding as it is stored": lambda p: p.scale != 1 and {"scale": 1.0},
    "gains as they are stored": lambda p: p.unit and {"unit": 0.0},
    "one branch after the other": lambda p: p.parallel and {"parallel": False},
    "branches side by side": lambda p: p.fixture == "gpt_neox-sequential" and {"parallel": True},
    "experts weighed over all": lambda p: hasattr(p.mlp, "chosen") and changed("mlp", renormalised=lambda _: False)(p),
}


@pytest.mark.parametrize("case", FAULTY)
def test_another_reading_of_the_config_fails_the_gate(eager, monkeypatch, loaded, case):
    made, own = families.plan, loaded[case].plan
    readings = [change for change in READINGS.values() if change(own)]
    assert len(readings) >= 5
    for change in readings:
        monkeypatch.setattr(families, "plan", lambda *a, c=change: dataclasses.replace(made(*a), **c(made(*a))))
        fails(case)


@pytest.mark.parametrize("case", FAULTY)
def test_another_pairing_of_rotary_positions_fails_the_gate(eager, monkeypatch, loaded, case):
    monkeypatch.setattr(attention, "rotated", interleaved)
    if loaded[case].plan.attention.rope:
        fails(case)
    else:
        assert checkpoints.gate(case).worst < 1e-13
