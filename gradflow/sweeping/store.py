"""A sweep's rows in an SQLite file: one transaction a row, so that a process killed at any moment leaves whole rows only.

The file states its plan; its primary key is the case, so that none is there twice. Journal: write-ahead while a sweep runs, which
others may read meanwhile; none beside the file when it is closed.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradflow.factors import FACTORS
from gradflow.files import new_file
from gradflow.sweeping.plan import Case, Plan

APPLICATION = 0x67666C77  # "gflw", in the file's header: what tells it from anyone else's
VERSION = 1  # of the tables; a column more, or one of another meaning, is another version
MEASURED = ("log_exact", "log_trunk", *(f"factor_{name}" for name in (*FACTORS, "net")), "stream", "share")
MEASURED += ("weight_grad_ratio",)
FIGURES = (*MEASURED, *(f"law_{name}" for name in MEASURED), "law_sd_exact", "law_sd_trunk")
TEXTS = ("no_law", "error", "made_by")
COLUMNS = (*Case._fields, *FIGURES, *TEXTS)
PATIENCE = 10.0  # seconds that a lock may be waited for
MOMENT = 5  # ms for the lock of writing: a reader that recovers a killed sweep's journal has it that long, a sweep till its end

TABLES = (
    "CREATE TABLE sweep (plan TEXT NOT NULL)",
    "CREATE TABLE cases (scheme TEXT NOT NULL, block TEXT NOT NULL, depth INTEGER NOT NULL, d INTEGER NOT NULL, "
    f"seed INTEGER NOT NULL, {', '.join(f'{name} REAL' for name in FIGURES)}, {', '.join(f'{name} TEXT' for name in TEXTS)}, "
    f"PRIMARY KEY ({', '.join(Case._fields)})) WITHOUT ROWID",
)


@dataclass(frozen=True)
class Store:
    """A file that this process alone writes to; `writing` opens it.

    Between two rows a transaction is always open: it is what keeps a second sweep out, and the system ends it with the process.
    """

    connection: sqlite3.Connection
    plan: Plan
    done: frozenset[Case]

    def add(self, case: Case, row: Mapping[str, Any]) -> None:
        """Commit one row; when this returns it is on disk."""
        values = (*case, *(row.get(name) for name in (*FIGURES, *TEXTS)))
        self.connection.execute(f"INSERT INTO cases VALUES ({', '.join('?' * len(values))})", values)
        _commit(self.connection)


@contextlib.contextmanager
def writing(path: str | Path, plan: Plan, retry: bool = False) -> Iterator[Store]:
    """Open a sweep's file to go on with it, or make it.

    Parameters
    ----------
    retry : bool
        Whether cases that failed are to be run again.

    Raises
    ------
    ValueError
        For a path where no file can stand, a file that is no sweep's or a damaged one (which is left as it is), one that another
        sweep is writing to, or one of another plan.
    """
    file = new_file("path", path, ".sqlite")
    with _told(file), contextlib.closing(_connect(file, "rwc", PATIENCE)) as connection:
        _agreed(connection, file, plan)  # before a byte is written to it
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA busy_timeout = {MOMENT}")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * PATIENCE)}")
        plan, begun = _agreed(connection, file, plan)
        if begun:
            connection.execute("UPDATE sweep SET plan = ?", (plan.to_json(),))
        else:
            for statement in TABLES:
                connection.execute(statement)
            connection.execute("INSERT INTO sweep VALUES (?)", (plan.to_json(),))
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        if retry:
            connection.execute("DELETE FROM cases WHERE error IS NOT NULL")
        _commit(connection)
        done = connection.execute(f"SELECT {', '.join(Case._fields)} FROM cases")
        try:
            yield Store(connection, plan, frozenset(map(Case._make, done)))
        finally:
            connection.rollback()
            with contextlib.suppress(sqlite3.Error):  # someone is reading: the journal stays until the next run
                connection.execute("PRAGMA journal_mode = DELETE")


def read(path: str | Path) -> tuple[Plan, dict[Case, dict[str, Any]]]:
    """The plan and the rows of a file, whether finished, left half-done, or being written to.

    Raises
    ------
    ValueError
        Where there is no such file, or it is no sweep's, or a damaged one.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"path: no such file {str(path)!r}; gradflow.sweep makes one")
    with _told(file), contextlib.closing(_connect(file, "ro", PATIENCE)) as connection:
        connection.execute("BEGIN")
        if not _state(connection, file):
            raise ValueError(f"path: {file.name!r} is empty; run its sweep")
        found = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM cases").fetchall()
        rows = [dict(zip(COLUMNS, values, strict=True)) for values in found]
        return _plan(connection, file), {Case(*(row[name] for name in Case._fields)): row for row in rows}


def _commit(connection: sqlite3.Connection) -> None:
    """Commit, and hold the file again at once."""
    connection.execute("COMMIT")
    connection.execute("BEGIN IMMEDIATE")


def _connect(file: Path, mode: str, timeout: float) -> sqlite3.Connection:
    uri = f"{file.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, timeout, isolation_level=None, uri=True)


def _state(connection: sqlite3.Connection, file: Path) -> bool:
    """Whether the file holds a sweep; ``False`` for an empty one, as a run killed at its very start leaves it."""

    def value(what: str) -> Any:
        return connection.execute(what).fetchone()[0]

    application, version = value("PRAGMA application_id"), value("PRAGMA user_version")
    if not application and not value("SELECT count(*) FROM sqlite_master"):
        return False
    if application != APPLICATION:
        raise ValueError(f"path: {file.name!r} is an SQLite file, but no sweep's; it is left as it is, name another")
    if version != VERSION:
        raise ValueError(
            f"path: {file.name!r} has tables of version {version}, this gradflow writes {VERSION}; name another file"
        )
    found = value("PRAGMA quick_check(1)")
    if found != "ok":
        found = " ".join(found.split())
        raise ValueError(f"path: {file.name!r} is damaged ({found}); it is left as it is, name another file")
    return True


def _agreed(connection: sqlite3.Connection, file: Path, plan: Plan) -> tuple[Plan, bool]:
    """The plan to go on with, and whether the file has one."""
    begun = _state(connection, file)
    return plan.grown_from(_plan(connection, file), file.name) if begun else plan, begun


def _plan(connection: sqlite3.Connection, file: Path) -> Plan:
    try:
        ((text,),) = connection.execute("SELECT plan FROM sweep").fetchall()
        return Plan.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"path: {file.name!r} is damaged (its plan: {error}); name another file") from error


@contextlib.contextmanager
def _told(file: Path) -> Iterator[None]:
    """SQLite's errors as one line that says the way out."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        said = str(error)
        if "not a database" in said:
            said = "is no SQLite file; it is left as it is, name another"
        elif "locked" in said:
            said = "is being written to by another sweep; wait for it, or name another file"
        elif "malformed" in said or "codec" in said:
            said = "is damaged; it is left as it is, name another file"
        else:
            said = f"cannot be used ({said}); what was written before is in it"
        raise ValueError(f"path: {file.name!r} {said}") from error
