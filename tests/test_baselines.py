"""A saved audit as a baseline: it holds for the same model, names what moved in another, and is read as data."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gradflow.auditing import audits, baselines
from gradflow.checkpoints.parity import FIXTURES

TEXTS = ("--text", "The gradient flows through a deep stack", "--text", "A stack flows")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model's folder beside its baseline."""
    root = tmp_path_factory.mktemp("saved")
    folder = shutil.copytree(FIXTURES / "bert", root / "model")
    audits.audit(folder, list(TEXTS[1::2]), key=5).save(root / "profile.json")
    return root


@pytest.fixture
def root(saved, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(saved, tmp_path / "root")


def plant(root, name, change):
    file = root / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, file)


def test_the_same_model_has_not_moved(root, shell, monkeypatch):
    monkeypatch.chdir(root.parent)  # the model's path is as seen from the file
    held = json.loads((root / "profile.json").read_text())
    assert (held["schema"], held["version"], held["model"]["path"]) == ("gradflow.audit", 1, "model")
    code, out, err = shell("check", "--baseline", root / "profile.json")
    assert (code, err) == (0, "")
    assert "Nothing moved: 32 figures against profile.json" in out
    code, out, _ = shell("check", "--baseline", root / "profile.json", "--band", "1e-9", "--json")
    assert (code, json.loads(out)["passed"], json.loads(out)["compared"]) == (0, True, 32)


def test_a_changed_gain_is_named_with_its_sublayer(root, shell):
    plant(root, "bert.encoder.layer.1.output.LayerNorm.weight", lambda gain: 1.2 * gain)
    code, out, err = shell("check", "--baseline", root / "profile.json", "--json")
    assert (code, err) == (1, "")
    moved = {(m["sublayer"], m["factor"]): m["now"] / m["before"] for m in json.loads(out)["moved"]}
    assert moved["2 mlp:gelu", "affine"] == pytest.approx(1.2, rel=0.1)  # later sub-layers send another gradient
    assert all(abs(np.log(change)) > 0.05 for change in moved.values())
    code, out, _ = shell("check", "--baseline", root / "profile.json")
    assert code == 1
    assert any(line.split()[:3] == ["2", "mlp:gelu", "affine"] for line in out.splitlines())
    assert max(map(len, out.splitlines())) <= 100
    # a wide band holds it
    assert shell("check", "--baseline", root / "profile.json", "--band", "0.9")[0] == 0


def test_a_scaled_gain_is_the_only_affine_that_moves(root):
    # all of a last norm's gain by 1.2: nothing else can change, and the change is the factor
    plant(root, "bert.encoder.layer.2.output.LayerNorm.weight", lambda gain: 1.2 * gain)
    result = baselines.check(root / "profile.json")
    moved = {(move.sublayer, move.factor): move.now / move.before for move in result.moved}
    assert set(moved) == {("3 mlp:gelu", "affine"), ("end to end", "exact"), ("end to end", "trunk")}
    np.testing.assert_allclose(list(moved.values()), 1.2, rtol=1e-6)  # float32 rounds the stored gain
    assert not result.passed


def test_another_tokenizer_is_said(root, shell):
    held = json.loads((root / "profile.json").read_text())
    held["ids"][0][1] += 1
    (root / "profile.json").write_text(json.dumps(held))
    code, out, _ = shell("check", "--baseline", root / "profile.json")
    assert code == 0
    assert "The tokenizer cuts the texts otherwise" in out


def test_the_model_may_lie_elsewhere(root, shell):
    (root / "model").rename(root / "other")
    code, _, err = shell("check", "--baseline", root / "profile.json")
    assert (code, "does not exist; name the model's folder" in err) == (2, True)
    assert shell("check", "--baseline", root / "profile.json", "--model", root / "other")[0] == 0


def test_saving_replaces_whole_or_not_at_all(saved, tmp_path, monkeypatch):
    file = tmp_path / "profile.json"
    file.write_text("older")
    a = audits.audit(saved / "model", list(TEXTS[1::2]), key=5)
    with monkeypatch.context() as broken:
        broken.setattr(baselines.os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            a.save(file)
    assert (file.read_text(), [f.name for f in tmp_path.iterdir()]) == ("older", ["profile.json"])
    a.save(file)
    assert baselines.load(file).call["key"] == 5
    with pytest.raises(ValueError, match="save: no such folder"):
        a.save(tmp_path / "nowhere" / "p.json")
    with pytest.raises(ValueError, match="is no file"):
        a.save(tmp_path)


# ---- bad baselines ----


def spoil(*keys, value):
    """Set or (``...``) drop an entry."""

    def change(held):
        for key in keys[:-1]:
            held = held[key]
        if value is ...:
            del held[keys[-1]]
        else:
            held[keys[-1]] = value

    return change


SPOILT = {
    "schema": spoil("schema", value="gradflow.profile"),
    "no schema": spoil("schema", value=...),
    "version": spoil("version", value=2),
    "no model": spoil("model", value=...),
    "model no object": spoil("model", value=[1]),
    "no path": spoil("model", "path", value=...),
    "family": spoil("model", "family", value="gpt"),
    "other family": spoil("model", "family", value="roberta"),
    "other depth": spoil("model", "sizes", "depth", value=4),
    "no text": spoil("call", "text", value=[]),
    "text of numbers": spoil("call", "text", value=[1, 2]),
    "cotangent": spoil("call", "cotangent", value="none"),
    "probes": spoil("call", "probes", value=True),
    "key": spoil("call", "key", value=-1),
    "no factor": spoil("profile", "branch", value=...),
    "null": spoil("profile", "norm", 0, 1, value=None),
    "negative": spoil("profile", "norm", 0, 1, value=-1.0),
    "string": spoil("profile", "norm", 0, 1, value="x"),
    "huge": spoil("profile", "norm", 0, 1, value=10**400),
    "NaN": spoil("profile", "exact", 0, 0, value=float("nan")),
    "infinite": spoil("profile", "exact", 0, 0, value=float("inf")),
    "ragged": spoil("profile", "affine", 0, value=[1.0]),
    "fewer sub-layers": spoil("profile", "labels", value=["1 attention"]),
    "other labels": spoil("profile", "labels", value=list("abcdef")),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_baseline_is_one_line(root, shell, monkeypatch, name):
    if name != "other labels":
        monkeypatch.setattr(audits, "load", lambda path: pytest.fail("read weights"))
    file = root / "profile.json"
    held = json.loads(file.read_text())
    SPOILT[name](held)
    file.write_text(json.dumps(held))
    code, out, err = shell("check", "--baseline", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(("gradflow: baseline: ", "gradflow: key: ")), err


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"schema": Infinity}'])
def test_what_is_no_baseline_at_all(tmp_path, shell, content):
    (tmp_path / "p.json").write_bytes(content)
    code, out, err = shell("check", "--baseline", tmp_path / "p.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("gradflow: baseline: ")


def test_other_refusals_of_the_shell(root, shell):
    for arguments in (
        ("check",),
        ("check", "--baseline", root / "nowhere.json"),
        ("check", "--baseline", root),
        ("check", "--baseline", root / "profile.json", "--band", "0"),
        ("check", "--baseline", root / "profile.json", "--band", "nan"),
        ("check", "--baseline", root / "profile.json", "--model", root),
    ):
        code, out, err = shell(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), arguments
