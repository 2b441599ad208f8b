"""Every notebook runs again, and the numbers that it shows are the ones that it gets.

Cells tagged ``check`` end in a dictionary of numbers; one tagged ``parameters`` has the sizes, and others may stand in its
place. To run notebooks again and keep their outputs: ``python tests/test_notebooks.py [NAME …]``.
"""

import ast
import shutil
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
REDUCED = {"warm_up": "depth, steps, warm, every = 1, 4, 2, 2"}  # what takes the place of the parameters
RTOL = {"warm_up": 1e-3}  # a first step in float32; what it checks of later ones is their order


def execute(source, folder, parameters=None):
    """The notebook run in ``folder``, without anything that changes from run to run."""
    notebook = nbformat.read(source, as_version=4)
    keep = dict(notebook.metadata)
    if parameters is not None:
        (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
        cell.source = parameters
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(folder)}}
    ).execute()
    notebook.metadata = keep  # the kernel's version is not the notebook's
    return notebook


def checks(notebook):
    """Cell id → the dictionary of numbers it shows, for cells tagged ``check``."""
    shown = {}
    for cell in notebook.cells:
        if "check" in cell.metadata.get("tags", ()):
            (result,) = (o for o in cell.outputs if o.output_type == "execute_result")
            shown[cell.id] = ast.literal_eval(result.data["text/plain"])
    return shown


def flat(value, path=()):
    """(path, number) pairs of nested dictionaries."""
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in flat(inner, (*path, key))]
    return [(path, value)]


def stale(stored, fresh, rtol=1e-6):
    """What differs between two results of ``checks``, in words."""
    old, new = dict(flat(stored)), dict(flat(fresh))
    if old.keys() != new.keys():
        return [f"not the same numbers: {sorted(map(str, old.keys() ^ new.keys()))}"]
    return [f"{key}: stored {old[key]}, now {new[key]}" for key in old if not np.isclose(old[key], new[key], rtol, 0)]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_executed_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(o.output_type == "error" or o.get("name") == "stderr" for cell in code for o in cell.outputs)
    assert not any("execution" in cell.metadata for cell in code)
    assert len(checks(notebook)) >= 3
    assert any("image/png" in o.get("data", {}) for cell in code for o in cell.outputs)
    assert path.stat().st_size < 1.5e6


@pytest.mark.slow  # other tests have the numbers as well
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_again_to_the_same_numbers(path, tmp_path):
    copy = shutil.copy(path, tmp_path)
    shutil.copytree(path.parent / "data", tmp_path / "data")
    stored, fresh = checks(nbformat.read(path, as_version=4)), checks(execute(copy, tmp_path))
    assert stale(stored, fresh, RTOL.get(path.stem, 1e-6)) == []


@pytest.mark.parametrize("name", REDUCED)
def test_notebook_runs_at_a_reduced_size(name, tmp_path):
    source = ROOT / "examples" / f"{name}.ipynb"
    reduced = execute(source, tmp_path, REDUCED[name])
    assert REDUCED[name] not in nbformat.read(source, as_version=4).cells[1].source
    found, stored = flat(checks(reduced)), flat(checks(nbformat.read(source, as_version=4)))
    assert len(found) == len(stored)
    assert all(np.isfinite(number) for _, number in found)
    assert "· 4 steps ·" in str(reduced)


def test_two_networks_has_the_stream_and_loss_that_transformers_recorded():
    shown = checks(nbformat.read(ROOT / "examples" / "two_networks.ipynb", as_version=4)).values()
    found = {key: value for cell in shown for key, value in cell.items()}
    recorded = dict(np.load(ROOT / "tests" / "fixtures" / "smollm2.npz"))
    size = recorded["states_rms"][:-1]  # the last is behind the final norm
    others = np.sqrt((size[:, 1:] ** 2).mean(1))
    big = np.flatnonzero(size[:, 0] > 100)
    wanted = {
        "first token above 100 behind blocks": {"first": big[0], "last": big[-1]},
        "largest of the first token": size[:, 0].max(),
        "largest of any other": size[:, 1:].max(),
        "others, behind block 1": others[1],
        "others, behind block 29": others[29],
    }
    assert stale(wanted, {name: found[name] for name in wanted}) == []
    own = found["SmolLM2"]
    assert own["loss"] == pytest.approx(float(recorded["loss"]), rel=1e-9)
    (line,) = (
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if f"{own['exact']:.4g}" in line and "end to end" in line
    )
    assert f"{own['trunk']:.4g}" in line  # the README's own test runs it


def test_a_stale_number_is_found():
    stored = {"cell-01": {"gain": 0.5, "planar": {"exact": 0.8}}}
    assert stale(stored, {"cell-01": {"gain": 0.5 + 1e-8, "planar": {"exact": 0.8}}}) == []
    assert len(stale(stored, {"cell-01": {"gain": 0.5, "planar": {"exact": 0.80001}}})) == 1
    assert len(stale(stored, {"cell-01": {"gain": 0.5}})) == 1
    assert len(stale(stored, {"cell-01": {"gain": float("nan"), "planar": {"exact": 0.8}}})) == 1


if __name__ == "__main__":
    for each in [path for path in NOTEBOOKS if path.stem in sys.argv[1:] or not sys.argv[1:]]:
        nbformat.write(execute(each, each.parent), each)
