"""The ledger as a table, one claim in full, a second measurement beside the first, and the page."""

from collections import Counter
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradflow.ledger.book import Entry, Ledger, Recheck
from gradflow.ledger.claim import FAILS, HOLDS, OPEN, PARTLY, Case, Verdict

SAID = {True: "holds", False: "does not hold", None: "open"}

PAGE = """# What holds of the article and the primer

Written by `{command} --write` from the figures in `gradflow/ledger/results.json`, which the same command
measures again ({date}: gradflow {gradflow}, JAX {jax}, Python {python}, {device}); in the shell `gradflow claims`.
Statements are in our words. No verdict is written by hand: each case has a figure and limits, and counts as *holds* or *does not
hold* only if all repetitions agree; else it is *open*, as is a case without a figure. A claim **holds** if it does in every case,
and **under conditions** if it does in some; if it does in none, it **does not hold** where any case fails, and is **not measured
yet** where all are open. In brackets: least and largest repetition. A case is of its own networks, width and length of training:
of others it says nothing.

{counts}.

| claim | whose | verdict |
|---|---|---|
{rows}
"""


def _grid(*columns: str) -> Table:
    """Columns that fold; the first is never broken."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i == 0)
    return table


def counts(ledger: Ledger) -> str:
    """How many claims got which verdict."""
    seen = Counter(entry.verdict.word for entry in ledger)  # type: ignore[attr-defined]
    return f"{len(ledger)} claims: " + ", ".join(
        f"{seen[word]} {word}" for word in (HOLDS, PARTLY, FAILS, OPEN) if seen[word]
    )


def ledger(found: Ledger) -> Any:
    """One row a claim; a single claim in full."""
    if len(found) == 1:
        return claim(found[0])
    table = _grid("claim", "found", "verdict")
    for entry in found:  # type: ignore[attr-defined]
        table.add_row(entry.claim.name, entry.found, str(entry.verdict))
    stored = "Stored {date}, gradflow {gradflow}, by {command}.".format(**found.settings)
    return Group(table, Text(f"{counts(found)}. {stored} 'gradflow claims NAME' says it in full."))


def claim(entry: Entry) -> Group:
    """Statement, command, every case, verdict."""
    c = entry.claim
    table = _grid("where", "seen", "limits", "")
    table.columns[0].no_wrap = False
    for case in c.cases:
        table.add_row(case.when, _seen(entry, case), case.limits, SAID[case.outcome(entry.figures)])
    head = [Text(f"{c.name} · {c.by}", style="bold"), Text(f"“{c.statement}”"), Text(f"See it: {c.command}")]
    tail = [
        Text(f"Verdict: {entry.verdict.word}."),
        *map(Text, _conditions(entry.verdict)),
        *map(Text, _missing(entry)),
    ]
    made = entry.made
    stored = f"Stored {made['date']} by {made['command']}." if made else "Nothing is stored."
    return Group(*head, "", table, *tail, Text(stored, style="dim"))


def recheck(found: Recheck) -> Group:
    """Verdicts, stored and now."""
    table = _grid("claim", "found now", "stored verdict", "now")
    for old, new in found.pairs:
        mark = "" if old.verdict == new.verdict else "  ← other cases"
        table.add_row(old.claim.name, new.found, str(old.verdict), f"{new.verdict}{mark}")
    said = f"Changed: {', '.join(found.changed)}." if found.changed else f"All {len(found.pairs)} as stored."
    rest = (
        f" {found.left_out} more read files of the repository: python benchmarks/claims.py." if found.left_out else ""
    )
    return Group(table, Text(said + rest))


def page(found: Ledger) -> str:
    """The ledger in Markdown."""
    entries: list[Entry] = list(found)  # type: ignore[call-overload]
    rows = "\n".join(f"| [{e.claim.statement}](#{e.claim.name}) | {e.claim.by} | {e.verdict} |" for e in entries)
    parts = [PAGE.format(counts=counts(found), rows=rows, **found.settings)]
    for e in entries:
        c = e.claim
        parts += [f"## {c.name}\n", f"{c.statement} ({c.by})\n", f"`{c.command}`\n", f"Found: {e.found}.\n"]
        parts += ["| where | seen | limits | |\n|---|---|---|---|"]
        parts += [
            f"| {_cell(case.when)} | {_cell(_seen(e, case))} | {case.limits} | {SAID[case.outcome(e.figures)]} |"
            for case in c.cases
        ]
        parts += [
            "",
            f"Verdict: **{e.verdict.word}**.\n",
            *(f"- {line}" for line in [*_conditions(e.verdict), *_missing(e)]),
            "",
        ]
    return "\n".join(parts)


def _seen(entry: Entry, case: Case) -> str:
    figure = entry.figures.get(case.figure)
    if figure is None:
        return "–"
    return f"{figure}, {figure.n} {figure.of}" if figure.n > 1 else str(figure)


def _conditions(verdict: Verdict) -> list[str]:
    """Which they are, where there are any."""
    sides = {"Where": verdict.holds, "Not where": verdict.fails} if verdict.word == PARTLY else {}
    return [f"{word}: {'; '.join(case.when for case in cases)}." for word, cases in sides.items() if cases]


def _missing(entry: Entry) -> list[str]:
    """What is wanted for the cases that are open."""
    return [f"Open: {case.when}. Wanted: {case.why_open(entry.figures)}." for case in entry.verdict.open]


def _cell(words: str) -> str:
    return words.replace("|", "\\|")
