"""What the benchmarks time is what gradflow runs: they call its inner functions, whose arguments change."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_the_profiles_that_are_timed_take_the_arguments_given(monkeypatch, x64):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import profiles

    monkeypatch.setattr(profiles, "D", 16)
    monkeypatch.setattr(profiles, "T", 3)
    found = {name: f.eval_shape(*arguments) for name, (f, arguments) in profiles.programs(2, "float64").items()}
    value, gradient = found.pop("gradient")
    assert (value.shape, gradient.shape) == ((), (3, 16))
    for rows in found.values():
        assert rows["net"].shape == (1, 4)
    assert ["weight_grad" in rows for rows in found.values()] == [False, True, False]


@pytest.mark.slow
def test_every_row_is_measured(tmp_path):
    file = tmp_path / "rows.json"
    subprocess.run([sys.executable, BENCHMARKS / "bench.py", "--rounds", "1", "--json", file], check=True)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) > 40
    assert all(math.isfinite(value) and value >= 0 for _, value, _ in rows)
