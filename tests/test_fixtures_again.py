"""The fixtures made again, where torch and transformers are installed: other versions than theirs say the same."""

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from gradflow import checkpoints
from gradflow.checkpoints.parity import FIXTURES

MAKERS = {
    "make_families": ("bert", "distilbert", "roberta"),
    "make_recurrent": ("rwkv",),
    "make_t5": ("t5", "t5-gated", "umt5"),
    "make_decoders": None,
}
pytestmark = pytest.mark.slow


def made_by(maker):
    """The names that a script makes: those of its table, or, where it cannot be imported here, of the folders left."""
    others = {name for names in MAKERS.values() for name in names or ()}
    return MAKERS[maker] or sorted(f.parent.name for f in FIXTURES.glob("*/config.json") if f.parent.name not in others)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("maker", "name"), [(maker, name) for maker in MAKERS for name in made_by(maker)])
def test_transformers_makes_the_same_again(tmp_path, monkeypatch, maker, name):
    pytest.importorskip("torch", exc_type=ImportError)
    pytest.importorskip("transformers", exc_type=ImportError)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent / "fixtures"), *sys.path])
    script = __import__(maker)
    folder = script.make(tmp_path, name, list(script.models()).index(name))
    again, held = (dict(np.load(root / name / "reference.npz")) for root in (tmp_path, FIXTURES))
    for array in ("ids", "hidden_states", "logits", "loss_gradient", "loss"):
        np.testing.assert_allclose(again[array], held[array], atol=1e-12, err_msg=array)
    for tensor, value in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(value, load_file(FIXTURES / name / "model.safetensors")[tensor])
    assert checkpoints.gate(name, tmp_path).worst < 1e-13
