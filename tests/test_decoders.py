"""Causal models against Hugging Face's own numbers, and each planted fault against the gate."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy
from refusals import refused
from safetensors.numpy import load_file, save_file

import gradflow
from gradflow import checkpoints, precision
from gradflow.auditing import audits
from gradflow.branches import attention, rotary
from gradflow.checkpoints import families, losses, positions
from gradflow.checkpoints.decoders import DECODERS
from gradflow.checkpoints.families import family_of
from gradflow.checkpoints.parity import FIXTURES
from gradflow.factors import FACTORS

NAMES = [row.name for row in DECODERS]
CASES = sorted(
    file.parent.name for file in FIXTURES.glob("*/config.json") if file.parent.name.partition("-")[0] in NAMES
)
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
def test_states_logits_and_loss_are_transformers_own(x64, loaded, case):
    checkpoint, wanted = loaded[case], reference(case)
    result = checkpoints.gate(case)
    assert (result.family, result.tested, result.states) == (checkpoint.family, "family-tested", 3)
    assert result.worst < 1e-13  # both sides are float64
    last, ids = wanted["hidden_states"][-1], wanted["ids"]
    np.testing.assert_allclose(checkpoint.logits(jnp.asarray(last[0])), wanted["logits"][0], atol=1e-12)
    values, _ = losses.at_places(checkpoint, last, [np.arange(ids.size - 1)], [ids[0, 1:]])
    assert values[0] == pytest.approx(wanted["loss"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_the_loss_is_transformers_own(loaded, case):
    checkpoint, wanted = loaded[case], reference(case)
    ids = wanted["ids"]
    states, real = audits._batch(checkpoint, ids)
    _, outs = audits.forward(checkpoint, states, real)
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
def test_a_fault_in_the_weights_fails_the_gate(x64, tmp_path, case):
    faults = weight_faults(case)
    assert len(faults) >= 3
    for fault in faults.values():
        altered(tmp_path, case, fault)
        fails(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_of_a_block_is_used(x64, tmp_path, loaded, case):
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


# ---- what a config may say ----


def spoilt(tmp_path, case, **changes):
    """Load a fixture whose config says something else; ``None`` takes a key out."""
    folder = altered(tmp_path, case)
    stated = {key: value for key, value in (config_of(case) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stated))
    return checkpoints.load(folder)


ROPE = {"rope_type": "default", "rope_theta": 100.0}
REFUSED = [
    *[(case, {"a_new_switch": True}, "'a_new_switch' is not known for") for case in KINDS],
    (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "'scale_attn_by_inverse_layer_idx' is True; only False is read",
    ),
    ("gpt2", {"scale_attn_weights": False}, "'scale_attn_weights' is False; only True is read"),
    ("gpt2", {"activation_function": "quick_gelu"}, "'activation_function' is 'quick_gelu'; read are gelu"),
    ("gpt2", {"n_head": 3}, "'n_head' is 3, which does not divide 'n_embd', 16"),
    ("gpt2", {"n_layer": 1}, "'n_layer' is 1, but the file holds 'transformer.h.1.' too"),
    ("gpt2", {"rope_theta": 100.0}, "'rope_theta' is not known for 'gpt2'"),
    ("llama", {"num_key_value_heads": 3}, "'num_key_value_heads' is 3, which does not divide the 4 heads"),
    ("llama", {"attention_bias": True}, "has no tensor 'model.layers.0.self_attn.q_proj.bias'"),
    (
        "llama-scaled",
        {"attention_bias": False},
        "holds 'model.layers.0.self_attn.k_proj.bias', which llama .* does not use",
    ),
    ("llama", {"tie_word_embeddings": None, "num_key_value_heads": 4}, r"k_proj.weight' has shape \(8, 16\)"),
    (
        "llama",
        {"rope_parameters": ROPE | {"rope_type": "yarn"}},
        "rope_type is 'yarn'; read are default, linear, llama3",
    ),
    (
        "llama",
        {"rope_parameters": ROPE | {"factor": 2.0}},
        "rotary positions of type 'default' a 'factor', which is not read",
    ),
    ("llama", {"rope_parameters": [1]}, "'rope_parameters' is .*; needs an object"),
    ("llama", {"rope_parameters": ROPE | {"rope_theta": 0}}, "'rope_theta' is 0; needs a number from 1 to 1e"),
    ("llama", {"rope_parameters": ROPE | {"rope_type": "linear"}}, "'factor' is None; needs a number"),
    (
        "llama",
        {"rope_parameters": ROPE | {"partial_rotary_factor": 0.3}},
        "turns 1 of a head's 4 entries, which makes no pairs",
    ),
    ("llama", {"rope_interleaved": True}, "'rope_interleaved' is True; only False is read"),
    ("mistral", {"sliding_window": 0}, "'sliding_window': needs a whole number of at least 1"),
    (
        "gemma2",
        {"layer_types": ["full_attention"]},
        "'layer_types' is .*; needs 'full_attention' or 'sliding_attention'",
    ),
    ("gemma2", {"layer_types": ["full_attention", "chunked_attention"]}, "'layer_types' is "),
    ("gemma2", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True; only False is read"),
    ("gemma3", {"rope_parameters": ROPE}, "needs an object for each kind of layer"),
    ("gemma2", {"query_pre_attn_scalar": None}, "'query_pre_attn_scalar' is None; needs a number"),
    ("gpt_neox", {"use_parallel_residual": 1}, "'use_parallel_residual' is 1; needs true or false"),
    ("opt", {"enable_bias": False}, "'enable_bias' is False; only True is read"),
    ("opt", {"_remove_final_layer_norm": True}, "'_remove_final_layer_norm' is True; only False is read"),
    ("opt", {"do_layer_norm_before": False}, "holds 'model.decoder.final_layer_norm.bias', which opt .* does not use"),
    ("mixtral", {"num_experts_per_tok": 4}, "'num_experts_per_tok' is 4, of 3 experts"),
    ("mixtral", {"num_local_experts": 2}, r"moe.gate.weight' has shape \(3, 16\)"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_a_config_that_is_not_read(tmp_path, case, changes, message):
    refused(lambda: spoilt(tmp_path, case, **changes), message)


OLDER = [  # what transformers 4 wrote of the same model
    ("llama", {"rope_parameters": None, "rope_theta": 100.0, "rope_scaling": None}),
    ("gpt_neox", {"rope_parameters": None, "rotary_emb_base": 100.0, "rotary_pct": 0.5}),
    ("gemma3", {"rope_parameters": None, "rope_theta": 300.0, "rope_local_base_freq": 30.0}),
    ("gemma3", {"layer_types": None, "sliding_window_pattern": 2}),
    ("gemma2", {"layer_types": None, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    ("llama-scaled", {"rope_parameters": None, "rope_theta": 100.0, "rope_scaling": "llama3"}),
    ("qwen2", {"layer_types": None, "sliding_window": 4}),
]


@pytest.mark.parametrize(("case", "changes"), OLDER)
def test_older_ways_of_saying_the_same(tmp_path, loaded, case, changes):
    if changes.get("rope_scaling") == "llama3":
        whole = config_of(case)["rope_parameters"]
        changes = changes | {"rope_scaling": {key: value for key, value in whole.items() if key != "rope_theta"}}
    found = dataclasses.asdict(spoilt(tmp_path, case, **changes).plan)
    for name, value in dataclasses.asdict(loaded[case].plan).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_windows_of_qwen_begin_where_it_says(tmp_path):
    kinds = {"layer_types": None, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    np.testing.assert_array_equal(spoilt(tmp_path, "qwen2", **kinds).plan.reach, [2**24, 4])
    assert spoilt(tmp_path, "mistral", sliding_window=16).plan.reach is None  # no text is longer


def test_frequencies_of_every_type():
    plain = rotary.frequencies(8, 100.0)
    np.testing.assert_allclose(positions.turns(ROPE, 8), plain)
    np.testing.assert_allclose(positions.turns(ROPE | {"partial_rotary_factor": 0.5}, 8), rotary.frequencies(4, 100.0))
    np.testing.assert_allclose(positions.turns(ROPE | {"rope_type": "linear", "factor": 4.0}, 8), plain / 4)
    scaled = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    length = 2 * np.pi * np.array([0.5, 2.5, 9.0]) / plain[1]  # so that the second turns that often
    for original, share in zip(length, (1 / 4, 0.5 + 0.5 / 4, 1.0), strict=True):
        found = positions.turns(ROPE | scaled | {"original_max_position_embeddings": original}, 8)
        assert found[1] == pytest.approx(share * plain[1])


# ---- audits ----


@pytest.mark.slow
def test_texts_of_several_lengths_are_as_they_are_alone(x64, loaded):
    checkpoint = loaded["gemma2"]
    rows = [reference("gemma2")["ids"][0], np.array([0, 22, 8, 21, 28])]
    states, real = audits._batch(checkpoint, rows)
    _, outs = audits.forward(checkpoint, states, real)
    for row, out in zip(rows, outs, strict=True):
        np.testing.assert_allclose(out[: row.size], checkpoint.hidden_states(row)[-1], atol=1e-12)


@pytest.mark.repeats
@pytest.mark.parametrize("case", sorted(CASES, key=lambda case: case != "gpt_neox"))
def test_an_audit_is_of_transformers_own_loss_and_gradient(loaded, shell, case):
    checkpoint, wanted = loaded[case], reference(case)
    ids, last = wanted["ids"][0], wanted["hidden_states"][-1]
    a = gradflow.audit(FIXTURES / case, [str(wanted["text"][0]), f"{wanted['text'][0]} a"])
    assert (a.family, a.settings["cotangent"], a.parity.tested) == (checkpoint.family, "next-token", "family-tested")
    assert a.ids[0] == tuple(ids)
    assert len(a.ids[1]) > len(ids)  # so that the first is padded
    assert a.settings["loss"][0] == pytest.approx(float(wanted["loss"]), rel=1e-12)
    _, arriving = losses.at_places(checkpoint, last, [np.arange(ids.size - 1)], [ids[1:]])
    gain = np.linalg.norm(wanted["loss_gradient"]) / np.linalg.norm(arriving)
    assert a.profile.exact[0, 0] == pytest.approx(gain, rel=1e-10)
    np.testing.assert_allclose(a.profile.net, np.prod([getattr(a.profile, f) for f in FACTORS], 0), rtol=1e-13)
    lines = str(a).splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in str(a)
    rows = [part for row in a.ids for part in ("--ids", " ".join(map(str, row)))]
    code, out, err = shell("audit", FIXTURES / case, *rows, "--json")
    assert (code, err) == (0, "")
    again = json.loads(out)
    assert (again["call"]["text"], again["ids"]) == ([], [list(row) for row in a.ids])
    assert again["profile"]["exact"] == a.to_dict()["profile"]["exact"]


BAD = {
    "no text": ({"text": None}, "text: needs a sentence"),
    "both": ({"ids": [1, 2]}, "ids: stand in the place of text; give one of them"),
    "no ids": ({"text": None, "ids": []}, "ids: needs one row of whole numbers|text: has 0 tokens"),
    "an id beyond the table": ({"text": None, "ids": [1, 99]}, "ids: 99 is outside the embedding's 32 rows"),
    "fractions": ({"text": None, "ids": [0.5, 1.0]}, "ids: needs one row of whole numbers"),
    "one token": ({"text": None, "ids": [3]}, "text: has one token, and 'next-token' needs one that follows"),
    "too long": ({"text": None, "ids": [3] * 17}, "text: has 17 tokens, where the model takes 1 to 16"),
    "masks": ({"cotangent": "mlm"}, "cotangent: 'mlm' is no loss of a causal language model; use 'next-token'"),
    "probes": ({"probes": 2}, "probes: are Gaussian cotangents"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_a_weight_is_read(monkeypatch, name):
    monkeypatch.setattr(audits, "load", lambda *a: pytest.fail("read weights"))
    options, message = BAD[name]
    refused(lambda: gradflow.audit(**{"path": FIXTURES / "llama", "text": "The gradient"} | options), message)


def test_encoders_have_no_next_token_and_a_body_no_loss(tmp_path):
    refused(
        lambda: gradflow.audit(FIXTURES / "bert", "A stack", cotangent="next-token"),
        "cotangent: 'next-token' is no loss of a masked language model; use 'mlm'",
    )
    body = altered(
        tmp_path, "bert", lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith("cls.")]
    )
    refused(
        lambda: gradflow.audit(body, "A stack", cotangent="next-token"), "use 'gaussian' or 'pooled': this checkpoint"
    )

    def headless(tensors):
        for name in [name for name in tensors if name.startswith("model.") or name == "lm_head.weight"]:
            value = tensors.pop(name)
            tensors |= {} if name == "lm_head.weight" else {name.removeprefix("model."): value}

    folder = altered(tmp_path, "mistral", headless)
    assert checkpoints.load(folder).logits(jnp.zeros((2, 16))) is None
    refused(
        lambda: gradflow.audit(folder, "The gradient", cotangent="next-token"),
        "cotangent: 'next-token' needs a language-model head, which this checkpoint lacks; use 'gaussian' or 'pooled'",
    )


@pytest.mark.slow
def test_a_saved_audit_of_ids_is_held_against(tmp_path, shell):
    model, saved = FIXTURES / "olmo2", tmp_path / "a.json"
    assert shell("audit", model, "--ids", "0 22 8 21", "--save", saved, "--json")[0] == 0
    code, out, _ = shell("check", "--baseline", saved)
    assert (code, "Nothing moved" in out) == (0, True)
