"""The shell: output, exit codes, and one line on stderr for bad input."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gradflow

SMALL = ("contraction", "--depth", "3", "--d", "8", "--seeds", "2")
GRADFLOW = str(Path(sys.executable).with_name("gradflow"))


def test_json_is_the_result(shell):
    code, out, err = shell(*SMALL, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == gradflow.contraction(depth=3, d=8, seeds=2).to_dict()
    assert "NaN" not in out
    assert "Infinity" not in out


def test_table_is_at_most_100_columns_and_ends_in_the_verdict(shell):
    for extra in ((), ("--tokens", "2", "--branch", "mlp:gelu"), ("--dtype", "float32", "--norm", "layernorm")):
        code, out, err = shell(*SMALL, *extra)
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 100
        assert "Verdict:" in out
        assert "0.512" in out


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot_is_written_and_not_empty(shell, tmp_path, suffix):
    path = tmp_path / f"figure.{suffix}"
    code, out, _ = shell(*SMALL, "--plot", path, "--json")
    assert code == 0
    assert json.loads(out)
    data = path.read_bytes()
    assert len(data) > 2000
    assert data.startswith({"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF"}[suffix])


def test_several_depths_are_a_sweep(shell, tmp_path):
    code, out, _ = shell("contraction", "--depth", "2,4", "--d", "8", "--seeds", "2", "--plot", tmp_path / "s.png")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = shell("contraction", "--depth", "2,4", "--d", "8", "--seeds", "2", "--json")
    assert json.loads(out)["depths"] == [2, 4]


def test_recorded_activations(shell):
    file = Path(__file__).resolve().parent.parent / "examples" / "data" / "minilm_stream.npz"
    code, out, _ = shell("contraction", "--activations", file, "--probes", "1", "--json")
    assert code == 0
    assert json.loads(out)["settings"]["depth"] == 12


def test_law(shell):
    code, out, _ = shell("law", "pre-ln", "--block", "mlp:relu", "--depth", "24", "--json")
    assert code == 0
    assert json.loads(out)["exact"][0][0] ** 2 == pytest.approx(13, rel=1e-9)
    code, out, _ = shell("law", "pre-ln", "--block", "glu:linear+rms", "--depth", "1", "--init", "he", "--json")
    assert code == 0
    assert json.loads(out)["exact"][0][0] ** 2 == pytest.approx(1 + 2 * 2, rel=1e-9)  # the norm hides the first gain
    code, out, _ = shell(
        "design", "pre-ln", "--depth", "1", "--exact", "2", "--seeds", "0", "--init", "he", "--d", "4096"
    )
    assert code == 0
    assert "branch × 1.22" in out  # 1 + 2 s² = 4
    code, out, _ = shell("law", "post-ln", "--block", "linear,mlp:gelu", "--depth", "4", "--d", "64")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100


def test_derive_lists_prints_and_checks(shell):
    from gradflow.symbolic import NAMES

    code, out, err = shell("derive")
    assert (code, out.split(), err) == (0, list(NAMES), "")
    code, out, err = shell("derive", "layernorm")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    code, out, err = shell("derive", "layernorm", "--latex")
    assert code == 0
    assert out.isascii()
    assert "\\" in out
    code, out, err = shell("derive", "rms", "--check")
    assert code == 0


def test_a_check_that_fails_is_exit_code_1(shell, monkeypatch):
    import types

    import gradflow.symbolic

    failed = types.SimpleNamespace(passed=False)
    broken = types.SimpleNamespace(text=lambda: "text", latex=lambda: "", check=lambda: [failed])
    monkeypatch.setattr(gradflow.symbolic, "derive", lambda name: broken, raising=False)
    code, _, _ = shell("derive", "rms", "--check")
    assert code == 1


def test_version_and_help(shell):
    code, out, _ = shell("--version")
    assert (code, out.strip()) == (0, f"gradflow {gradflow.__version__}")
    for arguments in ((), ("--help",), ("contraction", "--help"), ("law", "-h"), ("derive", "--help")):
        code, out, _ = shell(*arguments)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 100
        assert "Usage" in out


BAD = {
    "depth zero": (("contraction", "--depth", "0"), "depth"),
    "depth text": (("contraction", "--depth", "many"), "depth"),
    "depth fraction": (("contraction", "--depth", "2.5"), "depth"),
    "depth list with a hole": (("contraction", "--depth", "2,,4"), "depth"),
    "depth list with a zero": (("contraction", "--depth", "0,4", "--d", "8"), "depth"),
    "d one": (("contraction", "--d", "1"), "d"),
    "d text": (("contraction", "--d", "wide"), "--d"),
    "c": (("contraction", "--c", "1.2"), "c"),
    "c nan": (("contraction", "--c", "nan"), "c"),
    "scheme": (("contraction", "--scheme", "postln"), "post-ln"),
    "branch": (("contraction", "--branch", "mlp:rleu"), "mlp:relu"),
    "norm": (("contraction", "--norm", "layer-norm"), "layernorm"),
    "reading": (("contraction", "--reading", "aligment"), "alignment"),
    "dtype": (("contraction", "--dtype", "float46"), "float64"),
    "seeds": (("contraction", "--seeds", "0"), "seeds"),
    "key": (("contraction", "--key", "-1"), "key"),
    "key huge": (("contraction", "--depth", "2", "--d", "8", "--key", str(2**80)), "key"),
    "cotangent": (("contraction", "--cotangent", "random"), "gaussian"),
    "no file": (("contraction", "--activations", "no.npz"), "no.npz"),
    "a directory": (("contraction", "--activations", "/"), "activations"),
    "plot format": (("contraction", "--plot", "figure.xyz"), "xyz"),
    "plot folder": (("contraction", "--depth", "2", "--d", "8", "--plot", "/no/such/folder/figure.png"), "folder"),
    "unknown option": (("contraction", "--deep", "3"), "--deep"),
    "unknown command": (("contract",), "contract"),
    "law scheme": (("law", "prelm"), "pre-ln"),
    "law without scheme": (("law",), "scheme|SCHEME"),
    "law block": (("law", "post-ln", "--block", "mlp:rleu"), "mlp:relu"),
    "law depth": (("law", "post-ln", "--depth", "0"), "depth"),
    "law block empty": (("law", "post-ln", "--block", ""), "branch|block"),
    "derivation": (("derive", "layernrom"), "layernorm"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(shell, case):
    import re

    arguments, message = BAD[case]
    code, out, err = shell(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("gradflow: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert re.search(message, err)
    assert "Traceback" not in err


def test_bad_files_through_the_shell(shell, tmp_path):
    u = np.random.default_rng(0).normal(size=(2, 3, 5))
    good = tmp_path / "good.npz"
    np.savez(good, u=u)
    data = good.read_bytes()
    files = {}
    for name, content in {"empty": b"", "half": data[: len(data) // 2], "cut": data[:-5], "text": b"hello"}.items():
        files[name] = tmp_path / f"{name}.npz"
        files[name].write_bytes(content)
    for name, array in {"nan": u * np.nan, "complex": u * 1j, "shape": u[0], "text": u.astype(str)}.items():
        files[f"{name} u"] = tmp_path / f"{name}-u.npz"
        np.savez(files[f"{name} u"], u=array)
    for name, path in files.items():
        code, out, err = shell("contraction", "--activations", path)
        assert (code, out, err.count("\n")) == (2, "", 1), name
        assert "activations" in err


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_real_process_refuses_in_one_line():
    done = run(GRADFLOW, "contraction", "--scheme", "post-lm")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "post-ln" in done.stderr


def test_a_real_process_writes_json_to_a_pipe():
    done = run(GRADFLOW, *SMALL, "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    assert json.loads(done.stdout)["settings"]["depth"] == 3


HEAVY = "jax,jaxlib,sympy,matplotlib,scipy,numpy"


@pytest.mark.parametrize(
    "code",
    [
        "import gradflow; dir(gradflow); gradflow.__version__",
        "import sys, gradflow.cli; sys.argv = ['gradflow', '--help']\ntry: gradflow.cli.main()\nexcept SystemExit: pass",
        "import sys, gradflow.cli; sys.argv = ['gradflow', 'contraction', '--help']\n"
        "try: gradflow.cli.main()\nexcept SystemExit: pass",
    ],
    ids=["import", "help", "contraction help"],
)
def test_import_and_help_load_nothing_heavy(code):
    report = f"\nimport sys\nprint('LOADED', [m for m in {HEAVY!r}.split(',') if m in sys.modules], file=sys.stderr)"
    done = run(sys.executable, "-c", code + report)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stderr


def test_names_load_lazily_and_are_listed():
    assert set(gradflow.__all__) <= set(dir(gradflow))
    for name in gradflow.__all__:
        assert getattr(gradflow, name) is not None
