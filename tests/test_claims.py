"""The claims ledger: verdicts follow from stored figures, page and store agree, and what is stored comes out again."""

import importlib
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import typer

import gradflow
from gradflow.cli import app
from gradflow.ledger import book, tables, trained, tuning
from gradflow.ledger.catalogue import BY_NAME, CLAIMS
from gradflow.ledger.claim import FAILS, HOLDS, OPEN, PARTLY, Case, Figure, judge

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "derivations" / "claims.md"
LOW, HIGH, BOTH = (Figure.over(values) for values in ([0.1, 0.2], [0.8, 0.9], [0.2, 0.8]))
AT_MOST, AT_LEAST = Case("low", "x", most=0.5), Case("high", "x", least=0.5)


@pytest.mark.parametrize(
    ("cases", "figure", "word"),
    [
        ((AT_MOST,), LOW, HOLDS),
        ((AT_MOST,), HIGH, FAILS),
        ((AT_MOST, AT_LEAST), LOW, PARTLY),
        ((AT_MOST,), BOTH, OPEN),  # repetitions disagree
        ((AT_MOST, Case("else", "y", most=0.5)), LOW, PARTLY),  # one case is not measured
        ((AT_MOST, Case("else", "y", most=0.5)), HIGH, FAILS),
        ((Case("else", "y", most=0.5),), HIGH, OPEN),
    ],
)
def test_verdict_is_computed_from_figures_and_their_spread(cases, figure, word):
    assert judge(cases, {"x": figure}).word == word


def test_a_verdict_turns_when_its_figure_does():
    entry = gradflow.claims("estimate")[0]
    turned = dict(entry.figures) | {"exact": entry.figures["trunk"]}
    case = next(c for c in entry.claim.cases if c.figure == "exact")
    assert case in entry.verdict.fails
    assert case in judge(entry.claim.cases, turned).holds


def test_limits_in_words():
    cases = [{"least": 1, "most": 1}, {"least": 1 - 1e-12, "most": 1 + 1e-12}, {"least": 0.5, "most": 2}, {"most": 0.1}]
    said = [Case("", "x", **limits).limits for limits in cases]
    assert said == ["1", "1 ± 1e-12", "0.5 … 2", "≤ 0.1"]


@pytest.mark.parametrize("values", [[], [np.nan], [1.0, np.inf]])
def test_a_figure_needs_finite_numbers(values):
    with pytest.raises(ValueError, match="values: a figure needs finite numbers"):
        Figure.over(values)


def test_spread_is_least_and_largest():
    figure = Figure.over([1.0, 4.0, 16.0], "runs", geometric=True)
    assert (figure.value, figure.low, figure.high, figure.n) == (pytest.approx(4), 1, 16, 3)
    assert str(figure) == "4 (1 … 16)"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_rows_are_whole(claim):
    entry = gradflow.claims(claim.name)[0]
    assert claim.by in ("the article", "the primer")
    assert {c.figure for c in claim.cases if not c.missing} <= set(entry.figures)
    assert {c.figure for c in claim.cases if c.missing}.isdisjoint(entry.figures)
    assert "–" not in entry.found.split()
    module, _, function = claim.measure.partition(":")
    assert callable(getattr(importlib.import_module(f"gradflow.ledger.{module}"), function))
    assert len({c.when for c in claim.cases}) == len(claim.cases)


def test_names_are_unique_and_all_are_stored():
    held = json.loads(book.FILE.read_text(encoding="utf-8"))
    assert list(held) == list(BY_NAME) == [claim.name for claim in CLAIMS]
    for row in held.values():
        assert set(row["made"]) == {"command", "date", "gradflow", "jax", "python", "device"}


def test_page_is_written_from_the_store():
    text = PAGE.read_text(encoding="utf-8")
    assert text == tables.page(gradflow.claims())
    said = dict(
        zip(re.findall(r"^## (\S+)$", text, re.M), re.findall(r"^Verdict: \*\*(.+)\*\*\.$", text, re.M), strict=True)
    )
    assert said == {entry.claim.name: entry.verdict.word for entry in gradflow.claims()}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_commands_are_understood(claim):
    commands = typer.main.get_command(app).commands
    for line in claim.command.split("; "):
        program, name, *arguments = shlex.split(line)
        if program == "gradflow":
            commands[name].make_context(name, arguments)
        else:
            assert (program, (ROOT / name).is_file()) == ("python", True)


# A second route to each of three: the closed form, the definition by hand, the runs' own file.


@pytest.mark.parametrize(
    "name", ["projection-rank", "rms-differs", pytest.param("pre-ln-drowned", marks=pytest.mark.slow)]
)
def test_quick_ones_come_out_again(name):
    found = gradflow.claims(name).check()
    assert found.passed
    assert [old.claim.name for old, _ in found.pairs] == [name]
    for old, new in found.pairs:
        for figure in old.figures:
            assert new.figures[figure].value == pytest.approx(old.figures[figure].value, rel=1e-6, abs=1e-12)


def test_stored_figures_agree_with_laws():
    figures = gradflow.claims("pre-ln-drowned")[0].figures
    for depth in (6, 48):  # q = 1 + (l − 1)/2 as it enters, and 1/2 is added
        assert figures[f"last_{depth}"].value == pytest.approx(0.5 / (1 + depth / 2), rel=0.15)
    assert gradflow.claims("admin-evens")[0].figures["post_ln"].value == pytest.approx(1.5**23, rel=0.6)
    figures = gradflow.claims("rms-differs")[0].figures
    assert figures["jacobians"].value == pytest.approx(1)  # on a centred input they differ by 11ᵀ/(d·rms)
    figures = gradflow.claims("trunk-norm")[0].figures
    assert figures["trunk"].value == pytest.approx((0.6 / 0.9) ** 24, rel=0.3)


STORED = {"trained": trained, "tuning": tuning}
OF_RUNS = [c for c in CLAIMS if c.measure.partition(":")[0] in STORED]


@pytest.mark.parametrize("claim", OF_RUNS, ids=lambda claim: claim.name)
def test_training_claims_are_those_of_the_stored_runs(claim):
    module, _, function = claim.measure.partition(":")
    found = getattr(STORED[module], function)(ROOT)
    stored = gradflow.claims(claim.name)[0].figures
    assert found.keys() == stored.keys()
    for name, figure in found.items():
        numbers, kept = ((f.value, f.low, f.high, f.n) for f in (figure, stored[name]))
        assert numbers == pytest.approx(kept, rel=1e-9)


def test_stored_runs_by_hand():
    runs = json.loads((ROOT / "docs" / "training" / "warm-up.json").read_text(encoding="utf-8"))["runs"]
    held = {r["name"]: r["held_out"] for r in runs}
    gaps = [held[f"post-ln, warm-up 200, key {k}"] - held[f"pre-ln, warm-up 200, key {k}"] for k in range(3)]
    assert gradflow.claims("post-ln-lower")[0].figures["same"].value == pytest.approx(sum(gaps) / 3)
    small = json.loads((ROOT / "docs" / "training" / "small-text.json").read_text(encoding="utf-8"))["runs"]
    assert [r["scheme"] for r in small] == ["post-ln"] * 3 + ["pre-ln"] * 3
    gap = np.reshape([r["evaluated"]["held_out"][-1] - r["evaluated"]["train"][-1] for r in small], (2, 3)).mean(1)
    assert gradflow.claims("post-ln-lower")[0].figures["gap"].value == pytest.approx(gap[0] - gap[1], abs=1e-4)
    with pytest.raises(ValueError, match="root: no stored runs"):
        trained.stored(ROOT / "nowhere", "warm-up")


@pytest.mark.parametrize(("loss", "held_out"), [(2.0, 2.5), (1.25, 1.75), (1.05, 1.9), (0.9, 2.0)])
def test_held_out_loss_is_read_where_training_loss_is_passed_last(loss, held_out):
    curve = {"train": [2.0, 1.5, 1.0, 1.2, 0.9], "held_out": [2.5, 2.0, 1.5, 1.8, 2.0]}
    assert tuning._held_out_at({"evaluated": curve}, loss) == pytest.approx(held_out)


def test_shell(shell):
    code, out, err = shell("claims")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100
    assert all(re.search(rf"^ {name} ", out, re.M) for name in BY_NAME)
    code, out, _ = shell("claims", "--json")
    assert {c["name"]: c["verdict"] for c in json.loads(out)["claims"]} == {
        e.claim.name: e.verdict.word for e in gradflow.claims()
    }
    for name in BY_NAME:
        code, out, _ = shell("claims", name)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 100
        assert f"Verdict: {gradflow.claims(name)[0].verdict.word}." in out
    code, out, err = shell("claims", "estimat")
    assert (code, out) == (2, "")
    assert err == "gradflow: claim: unknown 'estimat'; did you mean 'estimate'?\n"
    code, out, err = shell("claims", "early-norm", "--check")
    assert (code, out) == (2, "")
    assert "python benchmarks/claims.py early-norm" in err


def test_shell_check_fails_where_a_verdict_changed(shell, monkeypatch):
    code, out, _ = shell("claims", "projection-rank", "early-norm", "--check")
    assert code == 0
    assert "All 1 as stored. 1 more" in out
    held = gradflow.claims("projection-rank")[0]
    wrong = dict(held.figures) | {"lost_rms": Figure.over([2.0])}
    monkeypatch.setattr(book, "measured", lambda rows, root, progress=None: [(held.claim, wrong)])
    code, out, _ = shell("claims", "projection-rank", "--check", "--json")
    assert code == 1
    assert json.loads(out)["changed"] == ["projection-rank"]
