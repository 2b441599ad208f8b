"""Texts, ids, masks and reference outputs beside a checkpoint: used whole, or refused in one line."""

import numpy as np
import pytest
from refusals import refused

from gradflow import checkpoints
from gradflow.checkpoints.parity import FIXTURES

# ---- texts and ids ----


@pytest.mark.parametrize("text", ["", "  \n\t", "\u200b", None, 7, b"text", "\ud800"])
def test_a_text_without_a_token(bert, text):
    refused(lambda: bert.ids(text), "text: ")


def test_a_text_beyond_the_position_table_is_not_cut(bert):
    assert bert.ids("the gradient " * 6).size == 20
    refused(lambda: bert.ids("the gradient " * 7), "text: has 23 tokens, where the model takes 1 to 20")


def test_the_vocabulary_alone_gives_the_same_ids(folder):
    text, before = "The gradient flows, deep.", checkpoints.load(folder)
    wanted = before.ids(text)
    (folder / "tokenizer.json").unlink()
    np.testing.assert_array_equal(before.ids(text), wanted)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert before.ids(text)[1] == 1  # "The", cased, is unknown
    (folder / "tokenizer_config.json").unlink()
    np.testing.assert_array_equal(before.ids(text), wanted)
    (folder / "vocab.txt").write_text("the\na\n")
    refused(lambda: before.ids(text), "'vocab.txt' is no tokenizer .*; copy or download it again")
    (folder / "vocab.txt").unlink()
    refused(lambda: before.ids(text), "neither tokenizer.json nor vocab.txt; add one, or give token ids")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"[]", b"\xff", b'{"model": {"type": "WordPiece", "vocab": {}}}']
)
def test_a_damaged_tokenizer(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    refused(lambda: checkpoints.load(folder).ids("a stack"), "'tokenizer.json' is no tokenizer")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([2, 40, 3], "ids: 40 is outside the embedding's 40 rows; is the tokenizer this model's?"),
        ([-1], "ids: -1 is outside"),
        ([0.5], "ids: needs one row of whole numbers"),
        ([], "ids: needs one row"),
        ([[2, 3]], "ids: needs one row"),
        ([[2], [2, 3]], "ids: needs one row"),
        ([2] * 21, "text: has 21 tokens"),
    ],
)
def test_ids_that_the_tables_do_not_hold(bert, ids, message):
    refused(lambda: bert.embed(ids), message)


@pytest.mark.parametrize("mask", [[1], [0, 0, 0], [1, 2, 0], [0.5, 1, 1], [[1, 1, 1]]])
def test_a_mask_that_is_none(bert, mask):
    refused(lambda: bert.hidden_states([2, 5, 3], mask), "mask: needs")


# ---- references ----


def recorded(**changes):
    """What the fixture's first row would be as a user's own file."""
    held = np.load(FIXTURES / "bert" / "reference.npz")
    arrays = {"ids": held["ids"][0], "hidden_states": held["hidden_states"][:, 0]} | changes
    return {name: value for name, value in arrays.items() if value is not None}


def write(tmp_path, arrays):
    np.savez(tmp_path / "reference.npz", **arrays)
    return tmp_path / "reference.npz"


LAST = recorded()["hidden_states"][-1]


@pytest.mark.parametrize(
    ("changes", "tolerance", "states"),
    [
        ({}, 1e-5, 4),
        ({"last_hidden_state": LAST}, 1e-5, 5),
        ({"last_hidden_state": LAST[None].astype(np.float32), "hidden_states": None}, 1e-4, 1),
        ({"ids": None, "text": np.array("The gradient flows through a deep stack")}, 1e-5, 4),
        ({"ids": recorded()["ids"][None], "attention_mask": np.ones((1, 11), int)}, 1e-5, 4),
    ],
)
def test_a_users_own_reference(tmp_path, bert, changes, tolerance, states):
    result = checkpoints.against(bert, write(tmp_path, recorded(**changes)))
    assert (result.tested, result.tolerance, result.states) == ("weights-tested", tolerance, states)
    assert result.worst < (1e-13 if tolerance == 1e-5 else 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": None}, "reference: needs 'hidden_states'"),
        ({"ids": None}, "reference: needs 'ids'"),
        ({"ids": np.array([0.5])}, "reference: 'ids' needs one row of whole numbers"),
        ({"ids": None, "text": np.array(["a", "b"])}, "reference: 'text' needs one string"),
        ({"logits": LAST}, "reference: unknown array 'logits'; known are ids"),
        ({"hidden_states": LAST}, r"reference: 'hidden_states' needs shape \(4, 11, 16\), got \(11, 16\)"),
        ({"last_hidden_state": LAST * np.nan}, "reference: 'last_hidden_state': holds 176 NaN"),
        (
            {"last_hidden_state": LAST.astype(np.float16)},
            "reference: holds float16, float64; record it in float64, or float32",
        ),
        ({"last_hidden_state": np.array([object()])}, "reference: 'last_hidden_state' is a pickled object"),
        (
            {"hidden_states": None, "last_hidden_state": 0 * LAST},
            "parity: bert's hidden state after layer 3 of 3 is off by inf",
        ),
        ({"last_hidden_state": LAST + 1e-3}, "parity: bert's hidden state after layer 3 of 3 is off by"),
    ],
)
def test_a_reference_that_does_not_fit(tmp_path, bert, changes, message):
    path = write(tmp_path, recorded(**changes))
    refused(lambda: checkpoints.against(bert, path), message)


def test_a_damaged_reference(tmp_path, bert):
    refused(lambda: checkpoints.against(bert, tmp_path / "none.npz"), "reference: no such file")
    path = write(tmp_path, recorded())
    path.write_bytes(path.read_bytes()[:500])
    refused(lambda: checkpoints.against(bert, path), "reference: .* is no .npz, or is truncated")


def test_an_unknown_family():
    refused(lambda: checkpoints.gate("berd"), "family: unknown 'berd'; did you mean 'bert'")
