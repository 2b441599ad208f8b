"""`sweep`: rows that are `compare`'s numbers, whatever else ran; a file that a run killed at any moment leaves whole."""

import csv
import functools
import json
import math
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
import sympy
from refusals import refused

import gradflow
from gradflow import Sweep, compare, sweep
from gradflow.branches import MLP
from gradflow.branches.matrices import alike
from gradflow.comparing.comparisons import ends
from gradflow.comparing.ensembles import seeds_of
from gradflow.stack import Drawn, Stack
from gradflow.sweeping.plan import Case, Plan
from gradflow.sweeping.store import FIGURES, MEASURED, read, writing

SMALL = dict(blocks="mlp:tanh", depths=2, widths=8)  # two programs to compile: one for each placement
SCHEMES = ("post-ln", "pre-ln", "gpt2")
GRADFLOW = str(Path(sys.executable).with_name("gradflow"))


def figures(path):
    """Every figure of every case; bytes, so that equal means equal."""
    return {case: np.array([row[name] for name in FIGURES], float).tobytes() for case, row in read(path)[1].items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return sweep(SCHEMES, **SMALL, seeds=6, path=tmp_path_factory.mktemp("sweep") / "whole.sqlite")


@pytest.fixture(scope="module")
def path(whole):
    return whole.path


# --- numbers -----------------------------------------------------------------------------------------------------------


def test_rows_are_what_compare_finds(whole):
    assert len(whole) == 18
    assert whole.missing == 0
    compared = compare(SCHEMES, "mlp:tanh", 2, 8, seeds=6)
    for row in whole:
        entry, at = compared[row["scheme"]], slice(row["seed"], row["seed"] + 1)
        for name in ("log_exact", "log_trunk"):
            np.testing.assert_allclose(row[name], getattr(entry.measured, name)[at.start, 0], rtol=1e-11)
            assert row[f"law_{name}"] == getattr(entry.law, name)[0, 0]
            assert row[f"law_sd_{name[4:]}"] == getattr(entry.law, f"sd_{name[4:]}")[0]
        for name in ("affine", "projection", "norm", "skip", "branch", "net"):
            mean = np.exp(np.log(getattr(entry.measured, name)[at]).mean())
            np.testing.assert_allclose(row[f"factor_{name}"], mean, rtol=1e-11)
        assert [row["error"], row["no_law"]] == [None, None]
        assert all(isinstance(row[name], float) for name in FIGURES)
    pools = {pool.scheme: pool for pool in whole.pools()}
    for entry in compared:
        found = ends(entry.measured, 1)
        np.testing.assert_allclose(pools[entry.name].seen("exact"), found["log_exact"], rtol=1e-11)
        seen = np.exp(np.mean(np.log([row["stream"] for row in pools[entry.name].rows])))
        np.testing.assert_allclose(seen, found["stream"], rtol=1e-11)


def test_rows_are_what_plain_autodiff_finds(whole, x64):
    for scheme in ("post-ln", "pre-ln"):
        stack = Stack.make(scheme, "mlp:tanh", 2, 8, norm="layernorm", eps=0.0)
        row = next(row for row in whole if (row["scheme"], row["seed"]) == (scheme, 3))
        k_x, k_weights, k_cotangent = jax.random.split(jax.random.split(jax.random.key(0), 6)[3], 3)
        x, sent = (np.asarray(alike(k, 1, 8, 0.0, "float64")) for k in (k_x, k_cotangent))
        network = oracle.Network(stack, Drawn(k_weights))
        x = x / np.sqrt(np.mean(x**2))
        for name, frozen in (("log_exact", False), ("log_trunk", True)):
            back = sent
            for s in reversed(range(2)):
                at = network.states(x).x[s]
                back = oracle.pull(functools.partial(network.sublayer, s, frozen=frozen), at, back)
            gain = np.linalg.norm(back) / np.linalg.norm(sent)
            np.testing.assert_allclose(row[name], math.log(gain), rtol=1e-9, atol=1e-9)


def test_a_row_depends_on_its_case_alone(whole, path, tmp_path):
    """Other company, another order, one by one: the same bits."""
    other = tmp_path / "other.sqlite"
    sweep("gpt2", **SMALL, seeds=1, path=other)
    sweep(["pre-ln", "gpt2"], **SMALL, seeds=1, path=other)
    grown = sweep(["pre-ln", "post-ln", "gpt2"], **SMALL, seeds=6, path=other)
    assert grown.plan.schemes == ("gpt2", "pre-ln", "post-ln")  # the order in which they came
    assert figures(other) == figures(path)


def test_a_network_does_not_depend_on_how_many_there_are():
    for partitionable in (True, False):
        with jax.threefry_partitionable(partitionable):
            few, many = (np.asarray(jax.random.key_data(seeds_of(5, n))) for n in (3, 11))
        np.testing.assert_array_equal(few, many[:3])


@pytest.mark.slow
def test_admin_profiles_one_network_for_all(tmp_path):
    """Its ω is seen on the first network, also where only a later one is still to be run."""
    options = dict(blocks="attention", depths=2, widths=8, tokens=3)
    rows = sweep("admin", **options, seeds=3, path=tmp_path / "a.sqlite").rows
    found = compare("admin", "attention", 2, 8, tokens=3, seeds=3)["admin"].measured.log_exact[:, 0]
    np.testing.assert_allclose([row["log_exact"] for row in rows], found, rtol=1e-11)
    with sqlite3.connect(tmp_path / "a.sqlite") as file:
        file.execute("DELETE FROM cases WHERE seed = 1")
    file.close()
    assert sweep("admin", **options, seeds=3, path=tmp_path / "a.sqlite").rows == rows


def test_every_figure_of_the_tables_is_measured(whole):
    assert set(MEASURED) <= set(FIGURES)
    assert {name for row in whole for name, value in row.items() if value is None} == {"no_law", "error"}


# --- killed at any moment ----------------------------------------------------------------------------------------------

ARGUMENTS = ("sweep", "post-ln", "pre-ln", "--block", "mlp:tanh", "--depth", "2", "--d", "8", "--seeds", "120")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    file = tmp_path_factory.mktemp("sweep") / "uninterrupted.sqlite"
    sweep(SCHEMES[:2], **SMALL, seeds=120, path=file)
    return figures(file)


def rows_of(path):
    """How many rows others see while it is written to."""
    try:
        return len(read(path)[1])
    except ValueError:
        return 0


def killed(file, rng, early):
    """Start the sweep in the shell and kill it: in its first seconds, or some milliseconds after some more rows."""
    before = rows_of(file)
    process = subprocess.Popen(
        [GRADFLOW, *ARGUMENTS, "--out", str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        if early:
            time.sleep(rng.uniform(0.2, 2.0))
        else:
            more = rng.randrange(1, 40)
            while rows_of(file) < before + more and process.poll() is None:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.01))
    finally:
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[1].decode()
    assert process.returncode == -signal.SIGKILL, said


@pytest.mark.repeats
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random_moments_nothing_is_lost_and_nothing_twice(tmp_path, uninterrupted, seed):
    rng, file, counts = random.Random(seed), tmp_path / "killed.sqlite", [0]
    for early in (False, False, *[True, False, False][: 3 * (seed % 2)]):
        killed(file, rng, early)
        held = figures(file) if rows_of(file) else {}
        assert held.items() <= uninterrupted.items()  # whole rows, each with the very bits
        assert len(held) >= counts[-1]  # nothing that was there is gone
        counts.append(len(held))
    assert 0 < counts[-1] < len(uninterrupted)
    result = sweep(SCHEMES[:2], **SMALL, seeds=120, path=file)
    assert result.missing == 0
    assert figures(file) == uninterrupted
    with sqlite3.connect(file) as connection:
        assert connection.execute("SELECT count(*) FROM cases").fetchone() == (240,)
    connection.close()
    assert [each.name for each in tmp_path.iterdir()] == ["killed.sqlite"]  # no journal beside it


WRITER = """
import sys
from gradflow.sweeping.plan import Plan
from gradflow.sweeping.store import writing
plan = Plan.from_json(sys.argv[2])
with writing(sys.argv[1], plan) as store:
    for case in plan.cases():
        if case not in store.done:
            store.add(case, {"log_exact": case.seed / 7, "made_by": "x" * (997 * case.seed % 3000)})
"""
PLAN = Plan(("post-ln",), ("mlp:tanh",), (2,), (8,), 20000, {"norm": "rms"}, {"post-ln": "a row"})


@pytest.mark.repeats
@pytest.mark.parametrize("kills", [6, 60])
def test_the_file_is_whole_after_a_kill_at_any_moment_of_its_life(tmp_path, kills):
    """The store alone, without JAX: killed from its making on, in the midst of commits; rows are whole and only ever more."""
    rng, file, held = random.Random(kills), tmp_path / "store.sqlite", 0
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", WRITER, tmp_path / "first.sqlite", replace(PLAN, seeds=1).to_json()], check=True
    )
    first = time.perf_counter() - start  # until a file has been made
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", WRITER, file, PLAN.to_json()])
        time.sleep(rng.uniform(0.6, 1.3) * first)
        process.kill()
        process.wait()
        if file.exists() and file.stat().st_size and rows_of(file):
            rows = read(file)[1]
            assert len(rows) >= held
            held = len(rows)
            assert [case.seed for case in sorted(rows)] == list(
                range(held)
            )  # no gap: each was on disk before the next began
            assert all(row["log_exact"] == case.seed / 7 for case, row in rows.items())
            assert all(len(row["made_by"]) == 997 * case.seed % 3000 for case, row in rows.items())
    with writing(file, PLAN) as store:
        assert len(store.done) == held
    assert held > 0


def test_interrupted_says_how_to_go_on_and_goes_on(shell, tmp_path, monkeypatch, path):
    import contextlib

    file, done = tmp_path / "half.sqlite", []
    arguments = ["sweep", *SCHEMES, "--block", "mlp:tanh", "--depth", 2, "--width", 8, "--seeds", 6, "--out", file]

    @contextlib.contextmanager
    def at_the_keyboard(what):
        def show(count, total):
            done.append((count, total))
            if count == 4:
                signal.raise_signal(signal.SIGINT)

        yield show

    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as xdist's workers have it
    try:
        with monkeypatch.context() as patch:
            patch.setattr("gradflow.shell.progress", at_the_keyboard)
            patch.setattr("os._exit", sys.exit)  # this process goes on
            code, out, err = shell(*arguments)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert (code, out) == (130, "")
    said = err.splitlines()
    assert said[0] == "gradflow: stopping after this network; Ctrl-C again stops at once"
    assert said[1:] == [f"gradflow: stopped; {file} holds 4 of 18 cases, the same command goes on"]
    assert done == [(n, 18) for n in range(5)]
    half = Sweep.open(file)
    assert (len(half), half.missing) == (4, 14)
    assert "14 of 18 cases are still to be run" in str(half)
    code, out, err = shell("sweep", "--out", file, "--csv", tmp_path / "half.csv")
    assert code == 0
    assert len((tmp_path / "half.csv").read_text().splitlines()) == 5
    code, out, err = shell(*arguments, "--json")
    assert (code, err) == (0, "")
    assert figures(file) == figures(path)
    assert [json.loads(out)[name] for name in ("cases", "missing", "failed")] == [18, 0, 0]


# --- failures ----------------------------------------------------------------------------------------------------------


def beyond(power):
    """A row whose stream leaves float32; of pre-ln's shape, so that one compilation serves both."""
    strong = sympy.Integer(10) ** power
    return gradflow.Scheme("beyond", "test", "too strong a branch", norm_in=True, beta=strong, outer=strong)


def test_a_case_that_fails_is_a_row_and_the_others_go_on(shell, tmp_path):
    file, seen = tmp_path / "failing.sqlite", []
    options = dict(**SMALL, seeds=2, dtype="float32", path=file)
    result = sweep([beyond(20), "pre-ln"], **options)
    assert result.missing == 0
    assert [bool(row["error"]) for row in result] == [True, True, False, False]
    assert result.rows[0]["log_exact"] is None
    assert "leaves the range of float32" in result.rows[0]["error"]
    assert result.rows[0]["law_log_exact"] > 50  # in float64, where the law is evaluated
    code, out, _ = shell("sweep", "--out", file)
    assert code == 1
    assert "2 of 4 networks failed: model: the stream" in " ".join(out.split())
    code, out, _ = shell("sweep", "--out", file, "--json")
    assert code == 1
    assert [pool["failed"] for pool in json.loads(out)["pools"]] == [2, 0]
    again = sweep([beyond(20), "pre-ln"], **options, progress=lambda *at: seen.append(at))
    assert (seen, again.rows) == ([(4, 4)], result.rows)
    again = sweep([beyond(20), "pre-ln"], **options, retry=True, progress=lambda *at: seen.append(at))
    assert (seen[1:], again.rows) == ([(2, 4), (3, 4), (4, 4)], result.rows)
    again.plot(str(tmp_path / "failing.png"))
    refused(lambda: sweep([beyond(21), "pre-ln"], **options), "path: .* another 'beyond'")
    refused(lambda: sweep([beyond(20), beyond(21)], **options), "schemes: two .* 'beyond'")


def test_several_streams_and_rows_without_a_law(tmp_path):
    """A row of several streams; one of a law that there is not: said, and no failure."""
    pure = gradflow.Scheme("pure", "test", "no skip", norm_out=True, alpha=sympy.Integer(0))
    result = sweep([pure, "residual"], "mlp:tanh", 2, 8, 2, path=tmp_path / "rows.sqlite")
    assert not result.failed
    assert {row["no_law"] for row in result if row["scheme"] == "pure"} == {
        "scheme: 'pure' has α = 0, which leaves no skip path for a law to follow"
    }
    assert "No law: scheme: 'pure'" in str(result)
    found = compare("residual", "mlp:tanh", 2, 8, seeds=2)[0]
    for row in result.rows[2:]:
        np.testing.assert_allclose(row["log_exact"], found.measured.log_exact[row["seed"], 0], rtol=1e-11)
        assert row["law_log_exact"] == found.law.log_exact[0, 0]


# --- what is read off --------------------------------------------------------------------------------------------------


def test_exports_read_back_as_they_were(whole, path, tmp_path, shell):
    import pandas as pd

    files = {kind: tmp_path / f"rows.{kind}" for kind in ("csv", "parquet", "png")}
    code, out, err = shell(
        "sweep", "--out", path, "--csv", files["csv"], "--parquet", files["parquet"], "--plot", files["png"]
    )
    assert code == 0
    assert out.strip() == str(whole)
    assert err.count("18 rows written to") == 2
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    frame = whole.to_pandas()
    assert frame.shape[0] == 18
    assert list(frame.columns) == list(whole.columns())
    assert set(frame["norm"]) == {"layernorm"}  # the setting; a factor is factor_norm
    with files["csv"].open(newline="") as stream:
        for held, row in zip(csv.DictReader(stream), whole, strict=True):
            assert all(float(held[name]) == row[name] for name in FIGURES)
            assert [held[name] for name in Case._fields] == [str(row[name]) for name in Case._fields]
    stored = pd.read_parquet(files["parquet"])
    assert list(stored.columns) == list(frame.columns)
    for name in (*Case._fields, *FIGURES, "key", "dtype"):
        assert stored[name].tolist() == frame[name].tolist(), name
    pooled = frame.groupby("scheme")["log_exact"].mean()
    for pool in whole.pools():
        assert pooled[pool.scheme] == pytest.approx(pool.seen("exact"), rel=1e-12)
        assert pool.sd("exact") == pytest.approx(frame[frame.scheme == pool.scheme]["log_exact"].std(), rel=1e-12)


@pytest.mark.parametrize(("package", "call"), [("pandas", "to_pandas"), ("pyarrow", "to_parquet")])
def test_a_missing_package_is_named_with_its_extra(whole, tmp_path, monkeypatch, package, call):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = () if call == "to_pandas" else (tmp_path / "rows.parquet",)
    with pytest.raises(ImportError, match=rf"{call} needs {package}: pip install 'gradflow\[sweep\]'"):
        getattr(whole, call)(*arguments)


def test_table_figure_and_notebook(whole):
    text = str(whole)
    assert max(map(len, text.splitlines())) <= 100
    for pool in whole.pools():
        (line,) = (line for line in text.splitlines() if line.startswith(f" {pool.scheme} "))
        assert f"{math.exp(pool.law('exact')):.3g}" in line
        assert f"{math.exp(pool.seen('exact')):.3g}" in line
    assert "Verdict:" in text
    assert "<img" in whole._repr_html_()
    for curve in ("exact", "trunk"):
        (ax,) = whole.plot(curve=curve).axes
        lines = {tuple(np.round(line.get_ydata(), 12)) for line in ax.lines}
        for pool in whole.pools():
            assert (round(math.exp(pool.law(curve)), 12),) in lines
            assert (round(math.exp(pool.seen(curve)), 12),) in lines
    refused(lambda: whole.plot(curve="exat"), "curve: .*'exact'")


# --- files that are not this sweep's, and bad input --------------------------------------------------------------------


def test_a_second_sweep_is_kept_out_while_others_may_read(whole, path, tmp_path):
    file = tmp_path / "held.sqlite"
    file.write_bytes(path.read_bytes())
    with writing(file, whole.plan):
        refused(
            lambda: sweep(SCHEMES, **SMALL, seeds=6, path=file), "path: 'held.sqlite' is being written to by another"
        )
        assert Sweep.open(file).rows == whole.rows
    assert sweep(SCHEMES, **SMALL, seeds=6, path=file).rows == whole.rows


def test_a_sweep_waits_for_who_is_reading(whole, path, tmp_path):
    """A finished file is read without a journal, and a reader's lock keeps the sweep's journal out for as long as it reads."""
    file = tmp_path / "read.sqlite"
    file.write_bytes(path.read_bytes())
    reader = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM cases").fetchone()
    gone, start = threading.Timer(0.3, reader.close), time.monotonic()
    gone.start()
    with writing(file, whole.plan) as store:
        assert time.monotonic() - start > 0.29
        assert len(store.done) == len(whole.rows)
    gone.join()


OTHER = {
    "norm": (dict(norm="rms"), "norm: 'other.sqlite' was made with 'layernorm', this is 'rms'; give the same, or name"),
    "key": (dict(key=1), "key: .* with 0, this is 1"),
    "tokens": (dict(tokens=2), "tokens: .* with 1"),
    "dtype": (dict(dtype="float32"), "dtype: "),
    "final norm": (dict(final_norm=True), "final_norm: "),
    "fewer seeds": (dict(seeds=5), "seeds: 'other.sqlite' has 6; a sweep may grow"),
    "other depths": (dict(depths=3), "depths: .* also holds 2; a sweep may grow"),
    "fewer schemes": (dict(schemes="pre-ln"), "schemes: .* also holds post-ln, gpt2;"),
}


@pytest.mark.parametrize("case", OTHER)
def test_another_sweep_is_refused_and_the_file_left(path, tmp_path, case):
    file = tmp_path / "other.sqlite"
    file.write_bytes(path.read_bytes())
    changed, message = OTHER[case]
    refused(lambda: sweep(**dict(schemes=SCHEMES, **SMALL, seeds=6, path=file) | changed), message)
    assert file.read_bytes() == path.read_bytes()


def foreign(file):
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()


def of_another_version(file):
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def without_a_plan(file):
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE sweep SET plan = '{\"schemes\": 3}'")
    connection.close()


SPOILT = {
    "text": (lambda file: file.write_text("a diary, not a table\n" * 300), "is no SQLite file; it is left as it is"),
    "a word": (lambda file: file.write_text("hi"), "is no SQLite file"),
    "cut": (lambda file: file.write_bytes(file.read_bytes()[:9000]), "is damaged"),
    "overwritten": (lambda file: file.write_bytes(file.read_bytes()[:4096] + b"\xff" * 8192), "is damaged"),
    "foreign": (lambda file: (file.unlink(), foreign(file)), "no sweep's; it is left as it is"),
    "another version": (of_another_version, "tables of version 99, this gradflow writes 1"),
    "no plan": (without_a_plan, "is damaged .its plan"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_and_foreign_files_are_refused_and_left_as_they_are(path, tmp_path, case, shell):
    file = tmp_path / "spoilt.sqlite"
    file.write_bytes(path.read_bytes())
    spoil, message = SPOILT[case]
    spoil(file)
    before = file.read_bytes()
    refused(lambda: Sweep.open(file), f"^path: 'spoilt.sqlite' .*{message}")
    refused(lambda: sweep(SCHEMES, **SMALL, seeds=6, path=file), message)
    code, out, err = shell("sweep", "pre-ln", "--out", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        file.read_bytes()[100:] == before[100:]
    )  # SQLite may note its journal's kind in the header of a file of its own
    assert [each.name for each in tmp_path.iterdir()] == ["spoilt.sqlite"]


def test_any_byte_spoilt_is_refused_or_read(path, tmp_path):
    file, data = tmp_path / "spoilt.sqlite", path.read_bytes()
    rng = random.Random(0)
    for at in [*range(100), *(rng.randrange(len(data)) for _ in range(200))]:
        file.write_bytes(data[:at] + bytes([data[at] ^ rng.randrange(1, 256)]) + data[at + 1 :])
        said = outcome(file)
        assert said is None or said.startswith("path: 'spoilt.sqlite' ")
        assert "\n" not in (said or "")


def outcome(file):
    """What a refusal says; ``None`` where the file is read."""
    try:
        Sweep.open(file)
    except ValueError as error:
        return str(error)


def test_an_empty_file_is_a_sweep_not_yet_begun(whole, tmp_path):
    """What a run killed at its very start leaves."""
    file = tmp_path / "empty.sqlite"
    file.touch()
    refused(lambda: Sweep.open(file), "path: 'empty.sqlite' is empty; run its sweep")
    assert sweep(SCHEMES, **SMALL, seeds=6, path=file).rows == whole.rows


def fill(file, plan, *, pages=2**30, twice=False):
    """Write every row that is not there, in a file of so many pages at most."""
    with writing(file, plan) as store:
        store.connection.execute(f"PRAGMA max_page_count = {pages}")
        for case in plan.cases():
            if case not in store.done:
                store.add(case, {"log_exact": case.seed, "made_by": "x" * 500})
                if twice:
                    store.add(case, {"log_exact": -1.0})


def test_a_full_disk_is_one_line_and_what_was_written_stays(tmp_path):
    plan, file = replace(PLAN, seeds=200), tmp_path / "full.sqlite"
    refused(
        lambda: fill(file, plan, pages=12),
        r"path: 'full.sqlite' cannot be used \(database or disk is full\); what was written before is in it",
    )
    held = rows_of(file)
    assert 0 < held < 200
    fill(file, plan)
    assert {case.seed: row["log_exact"] for case, row in read(file)[1].items()} == {n: n for n in range(200)}


def test_a_case_cannot_be_there_twice(tmp_path):
    refused(lambda: fill(tmp_path / "twice.sqlite", PLAN, twice=True), "UNIQUE")
    ((case, row),) = read(tmp_path / "twice.sqlite")[1].items()
    assert (case, row["log_exact"]) == (next(PLAN.cases()), 0.0)


BAD = {
    "scheme": (dict(schemes="postln"), "scheme: unknown 'postln'; did you mean .*'post-ln'"),
    "no scheme": (dict(schemes=[]), "schemes: needs at least one"),
    "block": (dict(blocks="mlp:rleu"), "mlp:relu"),
    "no block": (dict(blocks=[]), "blocks: needs at least one"),
    "blocks of one name": (
        dict(blocks=[MLP("tanh"), MLP("tanh", gain=2.0)]),
        "blocks: two of them have the name 'mlp:tanh'",
    ),
    "a branch with a hole": (dict(blocks="mlp:tanh,"), "branch"),
    "depth zero": (dict(depths=[2, 0]), "depths: needs a whole number of at least 1, got 0"),
    "no depth": (dict(depths=[]), "depths: needs at least one"),
    "a text of depths": (dict(depths="6,12"), "depths: needs a whole number"),
    "half a width": (dict(widths=[8.5]), "widths: "),
    "width one": (dict(widths=1), "widths: .*at least 2"),
    "width two under layernorm": (dict(widths=[8, 2]), "d: .*at least 3"),
    "seeds": (dict(seeds=0), "seeds: .*at least 1"),
    "norm": (dict(norm="layer-norm"), "norm: .*layernorm"),
    "init": (dict(init="xaver"), "init: .*xavier"),
    "dtype": (dict(dtype="float46"), "dtype: .*float64"),
    "key": (dict(key=-1), "key: "),
    "tokens": (dict(tokens=0), "tokens: "),
    "cosine": (dict(token_cosine=0.5), "token_cosine: one token"),
    "streams that take two branches": (dict(schemes="b2t"), "block: 'b2t' is of blocks of 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_a_file_is_made(tmp_path, case):
    bad, message = BAD[case]
    refused(lambda: sweep(**dict(schemes="pre-ln", **SMALL, seeds=2, path=tmp_path / "bad.sqlite") | bad), message)
    assert not list(tmp_path.iterdir())


def test_paths_where_no_file_can_stand(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, message in (
        (tmp_path, "is no file"),
        (tmp_path / "no" / "a.sqlite", "no such folder"),
        ("/dev/null", "is no file"),
    ):
        refused(lambda path=path: sweep("pre-ln", **SMALL, path=path), f"path: .*{message}")
    refused(lambda: sweep("pre-ln", **SMALL, path=tmp_path / "file" / "a.sqlite"), "path: no such folder")
    refused(lambda: Sweep.open(tmp_path / "none.sqlite"), "path: no such file .*; gradflow.sweep makes one")


SHELL_BAD = {
    "scheme": (("postln",), "did you mean 'post-ln'"),
    "depth": (("pre-ln", "--depth", "2,,4"), "depth: needs a whole number, or several"),
    "width": (("pre-ln", "--width", "wide"), "width: "),
    "nothing to read": ((), "no such file"),
    "options without schemes": (("--depth", "4"), "schemes: give at least one to run a sweep; depths says nothing"),
    "csv folder": (("pre-ln", "--csv", "/no/such/rows.csv"), "csv: no such folder"),
    "parquet folder": (("pre-ln", "--parquet", "/no/such/rows.parquet"), "parquet: no such folder"),
    "plot": (("pre-ln", "--plot", "figure.xyz"), "plot: "),
    "memory without cross-attention": (("pre-ln", "--memory", "4"), "memory: "),
}


@pytest.mark.parametrize("case", SHELL_BAD)
def test_bad_input_in_the_shell_is_one_line_and_exit_code_2(shell, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, message = SHELL_BAD[case]
    code, out, err = shell("sweep", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("gradflow: ")
    assert message in err
    assert not list(tmp_path.iterdir())


def test_extreme_plans(tmp_path):
    """Names with what SQL and file names could trip over; the largest key; one seed."""
    row = gradflow.Scheme("it's; DROP TABLE cases -- “ü”, %", "test", "a name", norm_in=True)
    folder = tmp_path / "a folder?with #marks %20"
    folder.mkdir()
    result = sweep(row, **SMALL, seeds=1, key=2**63 - 1, path=folder / "é?.sqlite")
    assert [each["scheme"] for each in result] == [row.name]
    assert Sweep.open(folder / "é?.sqlite").plan.settings["key"] == 2**63 - 1
    assert len(str(result).splitlines()) > 5
    result.to_csv(folder / "rows.csv")
    result.to_parquet(folder / "rows.parquet")
    assert sorted(each.name for each in folder.iterdir()) == ["rows.csv", "rows.parquet", "é?.sqlite"]
