"""``gradflow claims``: the ledger, one claim, or the quick ones measured again."""

from typing import Annotated

import typer

from gradflow import shell
from gradflow.options import Json


def claims(
    names: Annotated[list[str] | None, typer.Argument(help="Claims; all without any.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure the quick ones again; exit code 1 if a verdict changed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Statements of the article and the primer, what was found, and whether they hold.

    From stored results; one NAME shows every case of a claim with its figures and limits.
    """
    from gradflow.ledger import book, tables

    found = book.claims(*(names or ()))
    if not check:
        shell.emit(found, tables.ledger(found), as_json, None)
        return
    with shell.progress("measuring") as progress:
        again = found.check(progress)
    shell.emit(again, tables.recheck(again), as_json, None)
    if not again.passed:
        raise typer.Exit(1)
