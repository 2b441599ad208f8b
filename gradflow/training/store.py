"""One run, one file: settings, checkpoint and log in a SQLite database, so that a kill at any moment leaves a consistent one."""

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

SUFFIX = ".sqlite"
Arrays = dict[str, np.ndarray]


class Store:
    """The file of a run, or without a path a run in memory.

    A commit writes new log rows and the checkpoint that stands behind the last of them in one transaction.

    Raises
    ------
    ValueError
        If the file is something else, or belongs to a run of other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any] | None = None) -> None:
        self.path = path
        try:
            self._base = sqlite3.connect(":memory:" if path is None else path)
            with self._base as base:
                base.execute("CREATE TABLE IF NOT EXISTS run (name TEXT PRIMARY KEY, value BLOB)")
                base.execute("CREATE TABLE IF NOT EXISTS log (step INTEGER PRIMARY KEY, arrays BLOB)")
                if settings is not None:
                    base.execute("INSERT OR IGNORE INTO run VALUES ('settings', ?)", [json.dumps(settings)])
            self.settings: dict[str, Any] = json.loads(self._value("settings") or b"null")
        except sqlite3.Error as error:
            raise ValueError(
                f"out: {str(path)!r} cannot be used as a run's file ({error}); give another folder"
            ) from None
        if self.settings is None:
            raise ValueError(f"out: {str(path)!r} holds no run")
        if settings is not None:
            self._refuse_others(json.loads(json.dumps(settings)))

    def _refuse_others(self, wanted: dict[str, Any]) -> None:
        here = self.settings
        other = [name for name in sorted({*wanted, *here}) if wanted.get(name) != here.get(name)]
        if other:
            name = other[0]
            more = f" and {len(other) - 1} more" if other[1:] else ""
            raise ValueError(
                f"out: {str(self.path)!r} is a run with {name} = {here.get(name)!r}, not {wanted.get(name)!r}{more}; "
                "give another folder"
            )

    def _value(self, name: str) -> bytes | None:
        row = self._base.execute("SELECT value FROM run WHERE name = ?", [name]).fetchone()
        return row and row[0]

    def commit(self, rows: Mapping[int, Arrays], state: list[np.ndarray]) -> None:
        """Append log rows by their first step, and replace the checkpoint."""
        leaves = save({f"{i:04d}": np.array(leaf, order="C") for i, leaf in enumerate(state)})
        try:
            with self._base as base:
                base.executemany("INSERT INTO log VALUES (?, ?)", [(step, save(row)) for step, row in rows.items()])
                base.execute("INSERT OR REPLACE INTO run VALUES ('state', ?)", [leaves])
        except sqlite3.IntegrityError:
            raise ValueError(f"out: another process is at work on {str(self.path)!r}; wait for it") from None
        except sqlite3.Error as error:
            raise ValueError(f"out: {str(self.path)!r} cannot be written ({error})") from None

    def log(self) -> dict[int, Arrays]:
        """All rows, by step."""
        rows = self._base.execute("SELECT step, arrays FROM log ORDER BY step")
        return {step: load(blob) for step, blob in rows}

    def state(self) -> list[np.ndarray] | None:
        """The checkpoint's leaves; ``None`` before the first commit."""
        blob = self._value("state")
        return None if blob is None else [leaf for _, leaf in sorted(load(blob).items())]

    def close(self) -> None:
        """Release the file."""
        self._base.close()
