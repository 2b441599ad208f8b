"""Checkpoints against Hugging Face's own numbers: forward, gradients, loss, padding; and each planted fault fails the gate."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gradflow import checkpoints, precision
from gradflow.checkpoints import families
from gradflow.checkpoints.encoders import ENCODERS
from gradflow.checkpoints.parity import FIXTURES

FAMILIES = [row.name for row in ENCODERS]


def reference(family):
    return dict(np.load(FIXTURES / family / "reference.npz"))


def altered(root, family, edit=lambda tensors: None, **config):
    """A copy of a family's fixture with edited tensors and config, where ``gate`` can find it."""
    folder = root / family
    shutil.copytree(FIXTURES / family, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    stated = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


@pytest.fixture(scope="module")
def loaded():
    return {family: checkpoints.load(FIXTURES / family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_transformers_own(family):
    result = checkpoints.gate(family)
    assert (result.family, result.tested, result.states) == (family, "family-tested", 4)
    assert result.worst < 1e-13  # both sides are float64


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_logits_and_loss_are_transformers_own(loaded, family):
    checkpoint, wanted = loaded[family], reference(family)
    count, total = (wanted["labels"] >= 0).sum(), 0.0

    def share(last, labels):
        """This row's part of the mean cross-entropy."""
        logits = checkpoint.mlm_logits(last)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[:, None], 1)[:, 0]
        return -jnp.sum(jnp.where(labels >= 0, picked, 0)) / count, logits

    slope_of = jax.jit(jax.value_and_grad(share, has_aux=True))
    with precision.scope("float64"):
        for row, (ids, mask) in enumerate(zip(wanted["ids"], wanted["attention_mask"], strict=True)):
            weights, x = checkpoint.given(mask), checkpoint.embed(ids)
            out, pull = jax.vjp(lambda x, w=weights: checkpoint.stack.trace(w, x).out, x)
            np.testing.assert_allclose(pull(wanted["cotangent"][row])[0], wanted["gradient"][row], atol=1e-12, rtol=0)
            (loss, logits), slope = slope_of(out, wanted["labels"][row])
            np.testing.assert_allclose(logits, wanted["logits"][row], atol=1e-12, rtol=0)
            np.testing.assert_allclose(pull(slope)[0], wanted["loss_gradient"][row], atol=1e-12, rtol=0)
            total += float(loss)
    assert total == pytest.approx(wanted["loss"], rel=1e-12)


def test_padding_changes_nothing_for_the_real_tokens(loaded):
    ids, mask = (reference("roberta")[name][1] for name in ("ids", "attention_mask"))
    padded = np.asarray(loaded["roberta"].hidden_states(ids, mask))
    alone = np.asarray(loaded["roberta"].hidden_states(ids[mask == 1]))
    np.testing.assert_allclose(padded[:, mask == 1], alone, atol=1e-13)
    assert np.abs(np.asarray(loaded["roberta"].hidden_states(ids))[-1, mask == 1] - alone[-1]).max() > 1e-3


# ---- planted faults ----


def transposed(name):
    return lambda tensors: tensors.update({name: tensors[name].T})


def zeroed(name):
    return lambda tensors: tensors.update({name: 0 * tensors[name]})


def swapped(one, other):
    return lambda tensors: tensors.update({one: tensors[other], other: tensors[one]})


def gain_ignored(name):
    return lambda tensors: tensors.update({name: np.ones_like(tensors[name])})


def rolled(name, shift):
    return lambda tensors: tensors.update({name: np.roll(tensors[name], shift, axis=0)})


def parts(family):
    """Names of block 1's tensors by what they are."""
    row = next(row for row in checkpoints.FAMILIES if row.name == family)
    modules = dict(
        zip(("q", "k", "v", "o", "in", "out", "n1", "n2"), row.attention + row.mlp + sum(row.norms, ()), strict=True)
    )
    prefix = row.prefix + row.layer.format(l=1)
    return {
        f"{kind}_{short}": f"{prefix}{module}.{name}"
        for short, module in modules.items()
        for kind, name in KINDS.items()
    }


KINDS = {"w": "weight", "b": "bias"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_in_the_weights_fails_the_gate_at_its_layer(tmp_path, family):
    part = parts(family)
    faults = {
        **{f"{name} transposed": transposed(part[name]) for name in ("w_q", "w_k", "w_v", "w_o")},
        **{f"{name} left out": zeroed(part[name]) for name in part if name.startswith("b_") and name != "b_k"},
        **{f"gain of {name} ignored": gain_ignored(part[name]) for name in ("w_n1", "w_n2")},
        "q and k swapped": lambda t: (swapped(part["w_q"], part["w_k"])(t), swapped(part["b_q"], part["b_k"])(t)),
        "norms swapped": swapped(part["w_n1"], part["w_n2"]),
    }
    for name, fault in faults.items():
        root = tmp_path / name
        altered(root, family, fault)
        with pytest.raises(checkpoints.ParityError, match="after layer 2 of 3"):
            checkpoints.gate(family, root)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_keys_bias_is_no_fault_to_miss(tmp_path, family):
    # it adds q·b_k to every logit of a row, which softmax does not see
    altered(tmp_path, family, zeroed(parts(family)["b_k"]))
    assert checkpoints.gate(family, tmp_path).worst < 1e-13


@pytest.mark.parametrize(
    ("family", "edit", "where"),
    [
        *[(f, rolled(f"{f}.embeddings.position_embeddings.weight", 1), "of the embedding") for f in FAMILIES],
        *[(f, gain_ignored(f"{f}.embeddings.LayerNorm.weight"), "of the embedding") for f in FAMILIES],
        ("bert", rolled("bert.embeddings.token_type_embeddings.weight", 1), "of the embedding"),
    ],
)
def test_a_fault_in_the_embedding_fails_the_gate_there(tmp_path, family, edit, where):
    altered(tmp_path, family, edit)
    with pytest.raises(checkpoints.ParityError, match=where):
        checkpoints.gate(family, tmp_path)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("bert", {"layer_norm_eps": 1e-5}),
        ("bert", {"hidden_act": "gelu_new"}),
        ("bert", {"num_attention_heads": 2}),
        ("roberta", {"pad_token_id": 0}),
    ],
)
def test_another_config_fails_the_gate(tmp_path, family, config):
    altered(tmp_path, family, **config)
    with pytest.raises(checkpoints.ParityError):
        checkpoints.gate(family, tmp_path)


def test_another_eps_for_distilbert_fails_the_gate(monkeypatch):
    rows = tuple(replace(row, eps=1e-5) if row.name == "distilbert" else row for row in families.FAMILIES)
    monkeypatch.setattr(families, "FAMILIES", rows)
    with pytest.raises(checkpoints.ParityError, match="of the embedding"):
        checkpoints.gate("distilbert")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_ignored_fails_the_gate(monkeypatch, family):
    monkeypatch.setattr(checkpoints.Checkpoint, "given", lambda self, mask=None: self.weights)
    with pytest.raises(checkpoints.ParityError, match="after layer 1 of 3"):
        checkpoints.gate(family)


# ---- other ways of storing the same model ----


def same(one, other):
    assert one.stack == other.stack
    for a, b in zip(jax.tree.leaves(one.weights), jax.tree.leaves(other.weights), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.embedding.word, other.embedding.word)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prefix_may_be_absent(tmp_path, loaded, family):
    def bare(tensors):
        for name in list(tensors):
            value = tensors.pop(name)
            if name.startswith(f"{family}."):
                tensors[name.removeprefix(f"{family}.")] = value

    encoder = checkpoints.load(altered(tmp_path, family, bare))
    same(encoder, loaded[family])
    assert encoder.mlm_logits(jnp.zeros((2, 16))) is None


def test_norms_may_have_their_old_names(tmp_path, loaded):
    def old(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            tensors[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = (
                tensors.pop(name)
            )

    same(checkpoints.load(altered(tmp_path, "bert", old)), loaded["bert"])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_other_dtypes_become_float64(tmp_path, loaded, dtype):
    def cast(tensors):
        tensors.update({name: tensor.astype(dtype) for name, tensor in tensors.items()})

    stored = checkpoints.load(altered(tmp_path, "roberta", cast))
    for a, b in zip(jax.tree.leaves(stored.weights), jax.tree.leaves(loaded["roberta"].weights), strict=True):
        assert a.dtype == np.float64
        np.testing.assert_array_equal(a, np.asarray(b).astype(dtype).astype(np.float64))
    assert stored.embed([0, 2]).dtype == np.float64


def test_shards_are_one_model(tmp_path, loaded):
    folder = altered(tmp_path, "bert")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {name: f"model-0000{1 + (name in names[::2])}-of-00002.safetensors" for name in names}
    for shard in set(index.values()):
        save_file({name: tensors[name] for name in names if index[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    same(checkpoints.load(folder), loaded["bert"])


def test_an_untied_decoder_is_read_with_its_own_bias(tmp_path):
    rng, name = np.random.default_rng(0), "cls.predictions.decoder."
    own = {f"{name}weight": rng.normal(size=(40, 16)), f"{name}bias": rng.normal(size=40)}
    head = checkpoints.load(altered(tmp_path, "bert", lambda t: t.update(own), tie_word_embeddings=False)).head
    np.testing.assert_array_equal(head.decoder, own[f"{name}weight"])
    np.testing.assert_array_equal(head.bias, own[f"{name}bias"])


def test_the_file_itself_may_be_named(loaded):
    same(checkpoints.load(FIXTURES / "bert" / "model.safetensors"), loaded["bert"])


def test_a_checkpoint_says_what_it_is(loaded):
    bert, roberta = loaded["bert"], loaded["roberta"]
    assert (bert.family, bert.activation, bert.positions, bert.stack.depth) == ("bert", "gelu", 20, 3)
    assert roberta.positions == 18  # 20 rows less those up to pad_token_id = 1
    assert bert.weights.params[0]["w_q"].shape == (3, 16, 16)
    assert bert.weights.params[1]["w_in"].shape == (3, 40, 16)
    assert [slot and slot.gain.shape for slot in bert.weights.norms[1]] == [None, None, (3, 16)]
