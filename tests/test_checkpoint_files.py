"""Damaged, hostile or unfit checkpoint folders: one line that says what and how to mend it, before anything is allocated."""

import json
import os
import pickle
import shutil
import struct

import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import load_file, save_file

import gradflow
from gradflow import checkpoints
from gradflow.checkpoints import memory
from gradflow.checkpoints.folder import Folder
from gradflow.checkpoints.parity import FIXTURES

SAFE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def unreadable(path, message):
    refused(lambda: checkpoints.load(path), message)


def configured(folder, **changes):
    stated = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in stated.items() if value != "absent"}))


# ---- the folder ----


@pytest.mark.parametrize("path", ["no/such/folder", "", "a\0b", "~nobody-at-all/x", None, 7, ["x"], "x" * 5000])
def test_no_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unreadable(path, "checkpoint: ")


def test_no_config(folder):
    (folder / "config.json").unlink()
    unreadable(folder, r"has no config.json; give the folder that save_pretrained wrote")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 10**5, b'{"hidden_size": ' + b"9" * 5000 + b"}"]
)
def test_a_config_that_is_no_object(folder, content):
    (folder / "config.json").write_bytes(content)
    unreadable(folder, "checkpoint: 'config.json' (is no JSON|holds)")


class Trap:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl", "x.ckpt"])
@pytest.mark.parametrize("direct", [False, True])
def test_pickles_are_refused_unread(folder, tmp_path, name, direct):
    sprung = tmp_path / "sprung"
    (folder / SAFE).unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(str(sprung))))
    unreadable(
        folder / name if direct else folder, f"'{name}' is a pickle.*never read.*save_pretrained.* writes {SAFE}"
    )
    assert not sprung.exists()


def test_no_weights(folder):
    (folder / SAFE).unlink()
    unreadable(folder, f"neither {SAFE} nor {INDEX}")


# ---- the safetensors file ----


def test_truncated_anywhere(folder):
    data = (folder / SAFE).read_bytes()
    for size in (0, 4, 8, 9, 100, len(data) // 2, len(data) - 1):
        (folder / SAFE).write_bytes(data[:size])
        unreadable(folder, f"'{SAFE}' is no whole safetensors file .*; copy or download it again")


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return json.dumps({"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}).encode()


@pytest.mark.parametrize(
    ("header", "stated"),
    [
        (entry(), 10**18),
        (entry(), 10**6),
        (entry(shape=(3,)), None),
        (entry(shape=(10**12,)), None),
        (entry(shape=(2**62, 4)), None),
        (entry(shape=(-2,)), None),
        (entry(offsets=(8, 16)), None),
        (entry(offsets=(8, 0)), None),
        (entry(dtype="Q7"), None),
        (entry()[:-1] + b", " + entry(shape=(1,), offsets=(4, 8)).replace(b'"a"', b'"b"')[1:], None),  # they overlap
        (b"{", None),
        (b"[]", None),
        (b'{"\xff": 1}', None),
    ],
)
def test_a_lying_header(folder, header, stated):
    (folder / SAFE).write_bytes(struct.pack("<Q", stated or len(header)) + header + bytes(8))
    unreadable(folder, f"'{SAFE}' is no whole safetensors file")


def test_a_flipped_byte_of_the_header_is_refused_or_harmless(folder, bert):
    data = (folder / SAFE).read_bytes()
    for at in range(0, 8 + struct.unpack("<Q", data[:8])[0], 211):
        (folder / SAFE).write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        outcome = read_or_refusal(folder)
        if isinstance(outcome, str):
            assert outcome.startswith("checkpoint: ")
            assert "\n" not in outcome
        else:
            np.testing.assert_array_equal(outcome.weights.params[0]["w_q"], bert.weights.params[0]["w_q"])


def read_or_refusal(folder):
    try:
        return checkpoints.load(folder)
    except ValueError as error:
        return str(error)


def spoilt(folder, name, change):
    tensors = load_file(folder / SAFE)
    tensors[name] = change(tensors[name])
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / SAFE)


QUERY = "bert.encoder.layer.2.attention.self.query.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (QUERY, lambda w: None, f"has no tensor '{QUERY}'"),
        (
            "bert.embeddings.word_embeddings.weight",
            lambda w: None,
            "has no tensor 'bert.embeddings.word_embeddings.weight'",
        ),
        ("cls.predictions.bias", lambda w: None, "has no tensor 'cls.predictions.bias'"),
        (QUERY, lambda w: w[:8], rf"'{QUERY}' has shape \(8, 16\), where config.json makes it \(16, 16\)"),
        (QUERY, lambda w: w.astype(np.int32), f"'{QUERY}' is stored as I32; needs one of F64"),
        (QUERY, lambda w: np.where(w == w[3, 5], np.nan, w), rf"'{QUERY}': holds 1 NaN .* at index \(3, 5\)"),
        (QUERY, lambda w: np.where(w > 0, np.inf, w), f"'{QUERY}': holds .* infinite entries"),
        (
            "bert.embeddings.word_embeddings.weight",
            lambda w: w * np.float32(np.nan),
            "word_embeddings.weight': holds 640",
        ),
        (
            "bert.encoder.layer.2.attention.self.gate.weight",
            lambda w: np.zeros((2, 2), np.float32),
            "the file holds 'bert.encoder.layer.2.attention.self.gate.weight', which bert by this config.json does not use",
        ),
        (
            QUERY.replace("2", "3"),
            lambda w: w,
            "'num_hidden_layers' is 3, but the file holds 'bert.encoder.layer.3.' too",
        ),
    ],
)
def test_a_tensor_that_does_not_fit(folder, name, change, message):
    tensors = load_file(folder / SAFE)
    tensors.setdefault(name, tensors[QUERY])
    save_file(tensors, folder / SAFE)
    spoilt(folder, name, change)
    unreadable(folder, message)


# ---- shards ----


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../model/x.safetensors"}}, "which is not a file of this folder; refused"),
        ({"weight_map": {"a": "/etc/passwd"}}, "which is not a file of this folder; refused"),
        ({"weight_map": {"a": ".."}}, "which is not a file of this folder; refused"),
        ({"weight_map": {"a": "..\\x.safetensors"}}, "which is not a file of this folder; refused"),
        ({"weight_map": {"a": "b.safetensors"}}, "names 'b.safetensors', which is missing"),
        ({"weight_map": {"absent": "x.safetensors"}}, "places 'absent' in 'x.safetensors', which lacks it"),
        ({"weight_map": {"a": "config.json"}}, "'config.json' is no whole safetensors file"),
        ({"weight_map": {"a": 7}}, "has no 'weight_map'"),
        ({"weight_map": []}, "has no 'weight_map'"),
        ({}, "has no 'weight_map'"),
        ([], "holds list"),
    ],
)
def test_an_index_that_lies(folder, index, message):
    (folder / SAFE).rename(folder / "x.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    unreadable(folder, message)


# ---- links ----


@pytest.mark.parametrize("name", [SAFE, "config.json", "tokenizer.json"])
@pytest.mark.parametrize("direct", [False, True])
def test_a_link_out_of_the_folder_is_refused(folder, tmp_path, name, direct):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(f"../{name}" if direct else tmp_path / name)
    unreadable(folder, f"'{name}' is a link out of .*; refused: put the file itself there")


def test_a_shard_may_be_no_link_out_either(folder, tmp_path):
    (folder / SAFE).rename(tmp_path / "x.safetensors")
    (folder / "x.safetensors").symlink_to(tmp_path / "x.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    unreadable(folder, "'x.safetensors' is a link out of")


def test_links_within_and_into_the_blobs_of_a_cache_are_followed(folder, tmp_path, bert):
    (folder / SAFE).rename(folder / "stored")
    (folder / SAFE).symlink_to("stored")
    assert checkpoints.load(folder).stack == bert.stack
    cache, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    shutil.copytree(FIXTURES / "bert", cache)
    blobs.mkdir()
    (cache / SAFE).rename(blobs / "4567")
    (cache / SAFE).symlink_to("../../blobs/4567")
    assert checkpoints.load(cache).stack == bert.stack
    (cache / SAFE).unlink()
    (cache / SAFE).symlink_to(FIXTURES / "bert" / SAFE)
    unreadable(cache, "is a link out of")


# ---- memory ----


def test_what_needs_more_memory_than_there_is_is_refused_before_a_weight_is_read(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(Folder, "tensor", lambda *a: pytest.fail("read a weight"))
    refused(
        lambda: checkpoints.load(folder, memory=0.1),
        r"memory: this needs about 0\.4 GiB in float64, and may take 0\.1 GiB",
    )
    text = "the gradient " * 5
    refused(
        lambda: gradflow.audit(folder, [text] * 10**4, memory=1, stream=False),
        r"memory: this needs about 2\.\d+ GiB.* shorter or fewer texts",
    )
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:     300000 kB\n")
    monkeypatch.setattr(memory, "free", lambda free=memory.free: free(tmp_path / "meminfo"))
    refused(lambda: checkpoints.load(folder), r"may take 0\.257 GiB")


@pytest.mark.parametrize("content", ["", "MemAvailable: many kB", "MemTotal: 3 kB"])
def test_a_system_that_does_not_say_what_is_free_refuses_nothing(content, tmp_path):
    (tmp_path / "meminfo").write_text(content)
    assert memory.free(tmp_path / "meminfo") is None
    assert memory.free(tmp_path / "none") is None
    assert memory.free() is None or memory.free() > 2**20


# ---- the config ----


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [10**12, 10**400, 0, -1, 16.0, "16", True, None, [16], "absent"])
def test_absurd_sizes(folder, key, value):
    configured(folder, **{key: value})
    unreadable(folder, f"config.json('s| has no) '{key}'")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "bart"},
            "'model_type' is 'bart'; read are bert, distilbert, roberta, xlm-roberta, camembert",
        ),
        ({"model_type": ["bert"]}, "'model_type' is "),
        ({"model_type": "absent"}, "'model_type' is None"),
        ({"hidden_act": "quick_gelu"}, "'hidden_act' is 'quick_gelu'; read are gelu, gelu_python, gelu_new"),
        ({"hidden_act": {}}, "'hidden_act' is "),
        ({"position_embedding_type": "relative_key"}, "'relative_key'; only 'absolute' is read"),
        ({"is_decoder": True}, "sets 'is_decoder'; only plain bidirectional encoders"),
        ({"add_cross_attention": True}, "sets 'add_cross_attention'"),
        ({"num_attention_heads": 3}, "'num_attention_heads' is 3, which does not divide 'hidden_size', 16"),
        ({"layer_norm_eps": -1e-5}, "'layer_norm_eps' is -1e-05; needs a number from 0 to 1"),
        ({"layer_norm_eps": float("nan")}, "'layer_norm_eps' is nan"),
        ({"layer_norm_eps": 10**400}, "'layer_norm_eps' is 1000"),
        ({"layer_norm_eps": "1e-12"}, "'layer_norm_eps' is '1e-12'"),
        ({"num_hidden_layers": 4}, "has no tensor 'bert.encoder.layer.3."),
        ({"num_hidden_layers": 2}, "'num_hidden_layers' is 2, but the file holds 'bert.encoder.layer.2.' too"),
        ({"num_hidden_layers": 2**24}, "has no tensor 'bert.encoder.layer.3."),
        (
            {"max_position_embeddings": 512},
            r"position_embeddings.weight' has shape \(20, 16\), where config.json makes it",
        ),
        ({"type_vocab_size": 2**24}, "token_type_embeddings.weight' has shape"),
        ({"tie_word_embeddings": False}, "has no tensor 'cls.predictions.decoder.weight'"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'; needs true or false"),
        (
            {"attention_scale": 2.0},
            "'attention_scale' is not known for 'bert' and might change what the model computes",
        ),
        ({"quantization_config": {"bits": 4}}, "'quantization_config' is not known for 'bert'"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "'auto_map' is not known for 'bert'"),
    ],
)
def test_a_config_that_is_not_read(folder, changes, message):
    configured(folder, **changes)
    unreadable(folder, message)


def test_padding_that_leaves_no_position(tmp_path):
    folder = shutil.copytree(FIXTURES / "roberta", tmp_path / "model")
    configured(folder, pad_token_id=19)
    unreadable(folder, "'pad_token_id' 19 leaves none of the 20 positions")
