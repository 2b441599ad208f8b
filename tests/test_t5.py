"""T5 and kin against Hugging Face's own numbers, each planted fault against the gate, and audits of both stacks."""

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
from gradflow import checkpoints, page, precision
from gradflow.auditing import audits, baselines
from gradflow.branches.relative import Buckets, added
from gradflow.checkpoints import families
from gradflow.checkpoints.parity import FIXTURES
from gradflow.factors import FACTORS

CASES = ("t5", "t5-gated", "umt5")
TEXTS, TARGETS = ["The gradient flows back", "It flows"], ["and back it flows", "so it"]


def reference(case):
    return dict(np.load(FIXTURES / case / "reference.npz"))


def size(array):
    return float(np.linalg.norm(np.asarray(array)))


@pytest.fixture(scope="module")
def loaded():
    return {case: checkpoints.load(FIXTURES / case) for case in CASES}


# ---- relative positions ----


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("number", "furthest"), [(32, 128), (8, 6), (16, 100)])
def test_buckets_begin_where_whole_numbers_say(both, number, furthest):
    buckets, offsets = Buckets(number, furthest, both), np.arange(-2 * furthest, 2 * furthest + 1)
    each = number // 2 if both else number
    near = each // 2

    def bucket(offset):
        far = abs(offset) if both else max(-offset, 0)
        # near + k from the distance n on where (n/near)^(each − near) ≥ (furthest/near)^k
        wide = [k for k in range(each - near) if far ** (each - near) >= furthest**k * near ** (each - near - k)]
        return (far if far < near else near + wide[-1]) + each * (both and offset > 0)

    np.testing.assert_array_equal(buckets.at(offsets), [bucket(int(offset)) for offset in offsets])


def test_a_table_by_offset_is_the_table_of_buckets(x64):
    buckets, table = Buckets(8, 6, both=True), np.random.default_rng(0).normal(size=(8, 3))
    found = added(jnp.asarray(buckets.by_offset(table)), 9, 20)
    offsets = np.arange(20) - np.arange(9)[:, None]
    np.testing.assert_array_equal(found, np.moveaxis(table[buckets.at(offsets.ravel())].reshape(9, 20, 3), -1, 0))
    refused(lambda: Buckets(2, 6, both=True), "relative: 2 buckets up to distance 6 leave none that widens")


# ---- parity ----


@pytest.mark.parametrize("case", CASES)
def test_states_and_logits_of_both_stacks_are_transformers_own(x64, loaded, case):
    checkpoint = loaded[case]
    assert (checkpoint.plan.fixture, checkpoint.causal, checkpoint.encoder.causal) == (case, True, False)
    result = checkpoints.gate(case)
    states = checkpoint.plan.depth + checkpoint.encoder.plan.depth + 2
    assert (result.family, result.tested, result.states) == (case.removesuffix("-gated"), "family-tested", states)
    assert result.worst < 1e-13


def altered(root, case, edit=lambda tensors: None, **config):
    """A copy of a fixture with edited tensors and config; ``None`` takes a key out."""
    folder = shutil.copytree(FIXTURES / case, root / case, dirs_exist_ok=True)
    tensors = load_file(FIXTURES / case / "model.safetensors")
    edit(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    stated = json.loads((FIXTURES / case / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: v for key, v in stated.items() if v is not None}))
    return folder


def fails(case, root=FIXTURES):
    with pytest.raises(ValueError, match=r"parity: |does not use"):  # a tensor without use is refused before
        checkpoints.gate(case, root)


def swapped(one, other):
    return lambda tensors: tensors.update({one: tensors[other], other: tensors[one]})


def put(name, value):
    return lambda tensors: tensors.update({name: value(tensors[name])})


FINAL = "{}.final_layer_norm.weight"
TABLE = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
ASKS = "decoder.block.1.layer.1.EncDecAttention.{}.weight"
WEIGHTS = {
    "the encoder's norms swapped": swapped(*(f"encoder.block.1.layer.{n}.layer_norm.weight" for n in (0, 1))),
    "the decoder's norms swapped": swapped(*(f"decoder.block.1.layer.{n}.layer_norm.weight" for n in (1, 2))),
    "the stacks' norms swapped": swapped(FINAL.format("encoder"), FINAL.format("decoder")),
    **{f"no table in the {side}": put(TABLE.format(side), np.zeros_like) for side in ("encoder", "decoder")},
    "one table for both": lambda t: t.update({TABLE.format("decoder"): t[TABLE.format("encoder")]}),
    "another order of a head": put(ASKS.format("q"), lambda w: np.roll(w, 1, 0)),
    "keys are values": swapped(ASKS.format("k"), ASKS.format("v")),
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_fault_in_the_weights_fails_the_gate(x64, tmp_path, fault):
    altered(tmp_path, "t5", WEIGHTS[fault])
    fails("t5", tmp_path)


def part(name, **fields):
    return lambda p: {name: dataclasses.replace(getattr(p, name), **fields)}


EACH = {
    "another ε": lambda p: {"eps": p.eps / 10},
    "another activation": lambda p: {
        "mlp": dataclasses.replace(p.mlp, activation="silu" if p.mlp.activation == "relu" else "gelu")
    },
    "no residual": lambda p: {"scheme": dataclasses.replace(p.scheme, alpha=sympy.Integer(0))},
    "scaled logits": part("attention", scale=6**-0.5),
    "buckets the other way": lambda p: {"relative": Mirrored(**vars(p.relative))},
    "buckets of the other stack": lambda p: {"relative": dataclasses.replace(p.relative, both=not p.relative.both)},
    "another furthest distance": lambda p: {"relative": dataclasses.replace(p.relative, furthest=9)},
    "no final norm": lambda p: {"final_norm": False},
}
DECODER = {
    "later tokens seen": part("attention", causal=False),
    "scaled logits of the memory": part("cross", scale=6**-0.5),
    "the last state as it is": lambda p: {"head_scale": p.head_scale * 16**0.5},
    "another start": lambda p: {"start": 1},
}


class Mirrored(Buckets):
    """Later keys in the earlier ones' buckets."""

    def at(self, offsets):
        return super().at(-offsets)


@pytest.mark.repeats
@pytest.mark.parametrize("case", ["t5", "t5-gated"])
@pytest.mark.parametrize("stack", ["decoder", "encoder"])
def test_another_reading_of_the_config_fails_the_gate(eager, monkeypatch, case, stack):
    made = families.plan
    own = [lambda p, c=change: dataclasses.replace(p, **c(p)) for change in (*EACH.values(), *DECODER.values())]
    inner = [
        lambda p, c=change: dataclasses.replace(p, encoder=dataclasses.replace(p.encoder, **c(p.encoder)))
        for change in EACH.values()
    ]
    for change in own if stack == "decoder" else inner:
        monkeypatch.setattr(families, "plan", lambda *a, c=change: c(made(*a)))
        fails(case)


# ---- what a config may say ----

REFUSED = [
    ("t5", {"a_new_switch": True}, "'a_new_switch' is not known for 't5'"),
    (
        "t5",
        {"feed_forward_proj": "gated-tanh"},
        "'feed_forward_proj' is 'gated-tanh'; read are relu, gated-gelu, gated-silu",
    ),
    ("t5", {"dense_act_fn": "silu"}, "'dense_act_fn' is 'silu'; only 'relu' is read"),
    ("t5-gated", {"is_gated_act": False}, "'is_gated_act' is False; only True is read"),
    ("t5", {"is_encoder_decoder": False}, "'is_encoder_decoder' is False; only True is read"),
    ("t5", {"decoder_start_token_id": None}, "config.json has no 'decoder_start_token_id'"),
    ("t5", {"tie_word_embeddings": False}, "'tie_word_embeddings' is False; only True is read"),
    (
        "t5",
        {"relative_attention_num_buckets": 2},
        "'relative_attention_num_buckets': needs a whole number of at least 4",
    ),
    (
        "t5",
        {"relative_attention_max_distance": 4},
        "'relative_attention_max_distance': needs a whole number of at least 5",
    ),
    ("t5", {"relative_attention_num_buckets": 6}, r"relative_attention_bias.weight' has shape \(8, 4\)"),
    ("t5", {"d_kv": 4}, r"SelfAttention.q.weight' has shape \(24, 16\)"),
    ("t5", {"num_decoder_layers": 1}, "but the file holds 'decoder.block.1.' too"),
    ("t5-gated", {"num_layers": 1}, "'num_layers' is 1, but the file holds 'encoder.block.1.' too"),
    ("umt5", {"model_type": "t5"}, "holds '.*block.1.*relative_attention_bias.weight', which t5 .* does not use"),
]


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED)
def test_a_config_that_is_not_read(tmp_path, case, changes, message):
    folder = altered(tmp_path, case, **changes)
    refused(lambda: checkpoints.load(folder), message)


def test_a_transposed_matrix_and_a_cross_attention_with_a_table(tmp_path):
    folder = altered(tmp_path, "t5", put(ASKS.format("q"), np.transpose))
    refused(lambda: checkpoints.load(folder), r"EncDecAttention.q.weight' has shape \(16, 24\)")
    other = (
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"  # T5's first files, which nobody reads
    )
    checkpoints.load(altered(tmp_path, "t5", lambda tensors: tensors.update({other: np.zeros((8, 4), np.float16)})))


OLDER = {"scale_decoder_outputs": None, "dense_act_fn": None, "is_gated_act": None, "n_positions": 512}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("t5", OLDER | {"tie_word_embeddings": None, "num_decoder_layers": None}),
        ("t5-gated", OLDER | {"tie_word_embeddings": False}),
        ("t5-gated", OLDER | {"tie_word_embeddings": False, "model_type": "mt5", "feed_forward_proj": None}),
    ],
)
def test_older_ways_of_saying_the_same(tmp_path, loaded, case, changes):
    found = dataclasses.asdict(checkpoints.load(altered(tmp_path, case, **changes)).plan)
    assert found == dataclasses.asdict(loaded[case].plan)


# ---- audits ----


def whole(checkpoint):
    """(encoder's, decoder's embedded ids) ↦ the decoder's last hidden state, without `Stack`."""

    def run(one, x, memory):
        params, norms = one.weights.params, one.weights.norms
        for l in range(one.plan.depth):
            for branch, p, slots in zip(one.stack.block, params, norms, strict=True):
                p, norm = jax.tree.map(lambda leaf, l=l: leaf[l], (p, slots[0]))
                more = {"memory": memory} if branch.name == "cross-attention" else {}
                x = x + branch.apply(p | more, norm(x))
        return one.weights.last(x)

    return lambda source, own: run(checkpoint, own, run(checkpoint.encoder, source, None))


@pytest.mark.slow
def test_exact_is_transformers_own_gradient_in_both_stacks(monkeypatch, tmp_path):
    wanted, saved = reference("t5"), tmp_path / "t5.json"
    monkeypatch.setattr(
        audits, "_gate", lambda case: checkpoints.Parity("t5", "family-tested", 0.0, 1e-5, 6)
    )  # has a test
    a = gradflow.audit(FIXTURES / "t5", TEXTS, target=TARGETS)
    e = a.encoder
    assert (a.settings["cotangent"], a.settings["tokens"], e.settings["tokens"]) == ("next-token", [6, 4], [11, 3])
    assert a.profile.labels[:3] == ("1 attention:causal", "1 cross-attention", "1 mlp:relu")
    np.testing.assert_allclose(a.settings["loss"], wanted["loss"], rtol=1e-12)
    for row in range(2):
        gains = a.profile.exact[row, 0], e.settings["crossing"][row] * e.profile.exact[row, 0]
        sizes = [size(wanted[name][row]) for name in ("decoder_loss_gradient", "loss_gradient")]
        assert gains[1] / gains[0] == pytest.approx(sizes[1] / sizes[0], rel=1e-11)
    for p in (a.profile, e.profile):
        np.testing.assert_allclose(p.net, np.prod([getattr(p, factor) for factor in FACTORS], 0), rtol=1e-13)
    lines = str(a).splitlines()
    assert max(map(len, lines)) <= 100
    assert {"Decoder", "Encoder"} <= set(lines)
    a.save(saved)
    asked = []
    other = dataclasses.replace(e, profile=dataclasses.replace(e.profile, branch=2 * e.profile.branch))
    for now in (a, dataclasses.replace(a, encoder=other)):
        monkeypatch.setattr(audits, "audit", lambda path, now=now, **call: asked.append(call) or now)
        check = baselines.check(saved)
        assert check.compared == len(FACTORS) * (len(a.profile.labels) + len(e.profile.labels)) + 4
        wanted_moves = [] if now is a else [f"encoder {label}" for label in e.profile.labels]
        assert sorted(move.sublayer for move in check.moved) == sorted(wanted_moves)
    assert (asked[0]["text"], asked[0]["target"], asked[0]["ids"]) == (TEXTS, TARGETS, None)
    assert "Encoder</h3>" in page.page(a)


@pytest.mark.slow
def test_a_gaussian_goes_through_both_stacks_as_plain_autodiff_says(loaded):
    checkpoint, ids = loaded["t5-gated"], reference("t5-gated")["ids"][0]
    a = gradflow.audit(FIXTURES / "t5-gated", ids=ids, target_ids=[37, 8, 1], cotangent="gaussian", key=3)
    with precision.scope("float64"):
        source, own = checkpoint.encoder.embed(ids), checkpoint.embed(checkpoint.shifted([37, 8, 1]))
        sent = precision.normal(jax.random.fold_in(jax.random.key(3), 1), (1, 1, *own.shape), "float64")[0, 0]
        gradients = jax.vjp(whole(checkpoint), source, own)[1](sent)
    assert a.profile.exact[0, 0] == pytest.approx(size(gradients[1]) / size(sent), rel=1e-11)
    e = a.encoder
    assert e.settings["crossing"][0] * e.profile.exact[0, 0] == pytest.approx(
        size(gradients[0]) / size(sent), rel=1e-11
    )


@pytest.mark.slow
def test_without_a_target_the_decoder_reads_its_start_alone(shell):
    code, out, err = shell("audit", FIXTURES / "t5", "--ids", "35 9 22 1", "--json")
    found = json.loads(out)
    assert (code, err, found["settings"]["cotangent"], found["settings"]["tokens"]) == (0, "", "gaussian", [1])
    assert (found["encoder"]["settings"]["tokens"], found["encoder"]["ids"]) == ([4], [[35, 9, 22, 1]])


BAD = {
    "a target of another model": ("llama", {"target": "so it"}, "target: is what an encoder–decoder writes"),
    "targets of fewer texts": (
        "t5",
        {"text": TEXTS, "target": "so it"},
        "target: needs one for each of the 2 texts, got 1",
    ),
    "a loss without a target": ("t5", {"cotangent": "next-token"}, "target: 'next-token' is the loss of a target"),
    "no words": ("t5", {"target": " "}, "text: needs a sentence or more, got none"),
    "two targets in one": ("t5", {"target": "so", "target_ids": [1]}, "ids: stand in the place of target"),
    "ids beyond the table": ("t5", {"target_ids": [99]}, "ids: 99 is outside the embedding's 40 rows"),
    "masks": ("t5", {"target": "so", "cotangent": "mlm"}, "cotangent: 'mlm' is no loss of a causal"),
    "probes": ("t5", {"probes": 2}, "probes: an encoder–decoder's gradient is followed for one cotangent"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_a_weight_is_read(monkeypatch, name):
    monkeypatch.setattr(audits, "load", lambda *a, **k: pytest.fail("read weights"))
    case, options, message = BAD[name]
    refused(lambda: gradflow.audit(**{"path": FIXTURES / case, "text": "It flows"} | options), message)


@pytest.mark.slow
def test_a_recording_of_the_weights_is_of_the_decoders_states(x64, loaded, tmp_path):
    wanted, file = reference("t5"), tmp_path / "r.npz"
    held = {"ids": wanted["ids"][1], "attention_mask": wanted["attention_mask"][1]}
    held["hidden_states"] = wanted["decoder_hidden_states"][:, 1]
    np.savez(file, **held)
    refused(lambda: checkpoints.against(loaded["t5"], file), "reference: needs 'decoder_ids'")
    np.savez(file, **held, decoder_ids=wanted["decoder_ids"][1])
    assert checkpoints.against(loaded["t5"], file).worst < 1e-13
    refused(lambda: gradflow.profile(loaded["t5"], np.zeros((2, 16))), "weights: hold no memory for cross-attention")
