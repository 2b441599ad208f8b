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

from gradflow import checkpoints
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
    ],
)
def test_a_config_that_is_not_read(folder, changes, message):
    configured(folder, **changes)
    unreadable(folder, message)


def test_padding_that_leaves_no_position(tmp_path):
    folder = shutil.copytree(FIXTURES / "roberta", tmp_path / "model")
    configured(folder, pad_token_id=19)
    unreadable(folder, "'pad_token_id' 19 leaves none of the 20 positions")
