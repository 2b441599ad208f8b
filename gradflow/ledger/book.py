"""`claims`: the rows with their stored figures, and the same measured again."""

import datetime
import importlib
import json
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gradflow import checks
from gradflow.ledger.catalogue import BY_NAME, CLAIMS
from gradflow.ledger.claim import Claim, Figure, Verdict, judge

FILE = Path(__file__).with_name("results.json")
Progress = Callable[[int, int], None]


class _Cells(dict[str, float]):
    """Means of figures for a template; what is not measured shows as a dash."""

    def __missing__(self, name: str) -> "_Dash":
        return _Dash()


class _Dash:
    def __format__(self, spec: str) -> str:
        return "–"


@dataclass(frozen=True)
class Entry:
    """A claim with what was found; ``made`` says when, and by which versions."""

    claim: Claim
    figures: Mapping[str, Figure]
    made: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def verdict(self) -> Verdict:
        """Computed from the figures."""
        return judge(self.claim.cases, self.figures)

    @property
    def found(self) -> str:
        """The figures that matter most, in a line."""
        return self.claim.found.format_map(_Cells({name: figure.value for name, figure in self.figures.items()}))

    def to_dict(self) -> dict[str, Any]:
        """Row, figures, and what they come to."""
        c = self.claim
        cases = [
            {
                "when": case.when,
                "figure": case.figure,
                "limits": case.limits,
                "holds": case.outcome(self.figures),
                "missing": case.why_open(self.figures) if case in self.verdict.open else None,
            }
            for case in c.cases
        ]
        own = {"name": c.name, "by": c.by, "statement": c.statement, "command": c.command, "found": self.found}
        figures = {name: figure.to_dict() for name, figure in self.figures.items()}
        return own | {
            "verdict": self.verdict.word,
            "quick": c.quick,
            "cases": cases,
            "figures": figures,
            "made": dict(self.made),
        }


@dataclass(frozen=True, repr=False)
class Ledger:
    """All claims, or some; indexes and iterates like a tuple of `Entry`, and by name."""

    entries: tuple[Entry, ...]

    @property
    def settings(self) -> dict[str, str]:
        """What made the entries; several values where they were not made at once."""
        names = dict.fromkeys(name for entry in self.entries for name in entry.made)
        return {name: ", ".join(sorted({entry.made[name] for entry in self.entries if entry.made})) for name in names}

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, which: int | str) -> Entry:
        if isinstance(which, str):
            names = {entry.claim.name: entry for entry in self.entries}
            return names[checks.one_of("claim", which, names)]
        return self.entries[which]

    def check(self, progress: Progress | None = None) -> "Recheck":
        """Measure the quick ones again.

        Raises
        ------
        ValueError
            If none of them is quick.
        """
        quick = [entry for entry in self.entries if entry.claim.quick]
        if not quick:
            names = " ".join(entry.claim.name for entry in self.entries)
            raise ValueError(f"check: reads files of the repository; there, run python benchmarks/claims.py {names}")
        again = [Entry(c, figures) for c, figures in measured([e.claim for e in quick], Path(), progress)]
        return Recheck(tuple(zip(quick, again, strict=True)), len(self.entries) - len(quick))

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready Python."""
        return {"settings": self.settings, "claims": [entry.to_dict() for entry in self.entries]}

    def __str__(self) -> str:
        from gradflow import report
        from gradflow.ledger import tables

        return report.text(tables.ledger(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report
        from gradflow.ledger import tables

        return report.html(tables.ledger(self))


@dataclass(frozen=True)
class Recheck:
    """Stored entries beside the same measured again; ``left_out`` were not, as they read files of the repository."""

    pairs: tuple[tuple[Entry, Entry], ...]
    left_out: int

    @property
    def changed(self) -> tuple[str, ...]:
        """Claims whose verdict, or a case of it, is not the stored one."""
        return tuple(old.claim.name for old, new in self.pairs if old.verdict != new.verdict)

    @property
    def passed(self) -> bool:
        """Whether none has."""
        return not self.changed

    def to_dict(self) -> dict[str, Any]:
        """Both sides of every pair."""
        pairs = [{"name": old.claim.name, "stored": old.to_dict(), "now": new.to_dict()} for old, new in self.pairs]
        return {"passed": self.passed, "changed": list(self.changed), "left_out": self.left_out, "claims": pairs}


def claims(*names: str) -> Ledger:
    """Statements of the article and the primer with what was found and a verdict, from stored results.

    Parameters
    ----------
    *names : str
        Claims; all without any.

    Returns
    -------
    Ledger
        Prints as a table; ``ledger["estimate"].verdict``; ``ledger.check()`` measures the quick ones again.

    Raises
    ------
    ValueError
        For an unknown name; near ones are suggested.
    """
    chosen = [BY_NAME[checks.one_of("claim", name, BY_NAME)] for name in names] or CLAIMS
    held = json.loads(FILE.read_text(encoding="utf-8"))
    return Ledger(tuple(_entry(claim, **held.get(claim.name, {"made": {}, "figures": {}})) for claim in chosen))


def _entry(claim: Claim, made: dict[str, str], figures: dict[str, Any]) -> Entry:
    return Entry(claim, {name: Figure(**row) for name, row in figures.items()}, made)


def measured(
    rows: Iterable[Claim], root: Path, progress: Progress | None = None
) -> Iterable[tuple[Claim, dict[str, Figure]]]:
    """Each claim with its figures, measured now; ``root`` is the repository's."""
    rows = list(rows)
    for done, claim in enumerate(rows):
        if progress:
            progress(done, len(rows))
        module, _, function = claim.measure.partition(":")
        yield claim, getattr(importlib.import_module(f"gradflow.ledger.{module}"), function)(root)
    if progress:
        progress(len(rows), len(rows))


def remake(rows: Iterable[Claim], root: Path, progress: Progress | None = None) -> float:
    """Measure, and store beside what is stored of the others; returns seconds."""
    import jax

    from gradflow import __version__

    began = time.perf_counter()
    held = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    made = {
        "command": "python benchmarks/claims.py",
        "date": datetime.date.today().isoformat(),
        "gradflow": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.default_backend(),
    }
    for claim, figures in measured(rows, root, progress):  # stored one by one: an interruption costs one claim
        held[claim.name] = {"made": made, "figures": {name: figure.to_dict() for name, figure in figures.items()}}
        found = {c.name: held[c.name] for c in CLAIMS if c.name in held}
        FILE.write_text(json.dumps(found, ensure_ascii=False, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    return time.perf_counter() - began
