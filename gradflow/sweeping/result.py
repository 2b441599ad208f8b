"""`Sweep`: the rows of a sweep's file, one a network; pooled over seeds for reading, as a table for other programs."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradflow.factors import plain
from gradflow.files import new_file, whole
from gradflow.sweeping import store as sweep_store
from gradflow.sweeping.plan import Case, Plan

EXTRA = "pip install 'gradflow[sweep]'"


@dataclass(frozen=True)
class Pool:
    """The networks of one scheme, block, depth and width: those that were measured, and how many failed."""

    scheme: str
    block: str
    depth: int
    d: int
    rows: tuple[dict[str, Any], ...]
    failed: int

    def logs(self, curve: str) -> np.ndarray:
        """End-to-end log gains of a curve, ``"exact"`` or ``"trunk"``, (seeds,)."""
        return np.array([row[f"log_{curve}"] for row in self.rows], np.float64)

    def seen(self, curve: str) -> float:
        """Mean log gain: the log of the geometric mean."""
        return float(np.mean(self.logs(curve)))

    def sd(self, curve: str) -> float:
        """Standard deviation of the log gain over networks; NaN of a single one."""
        logs = self.logs(curve)
        return float(np.std(logs, ddof=1)) if logs.size > 1 and np.isfinite(logs).all() else np.nan

    def law(self, curve: str, what: str = "law_log") -> float:
        """The law's log gain, or (``"law_sd"``) its standard deviation over networks; NaN where there is none."""
        value = self.rows[0][f"{what}_{curve}"] if self.rows else None
        return np.nan if value is None else value

    def to_dict(self) -> dict[str, Any]:
        """Case, number of networks, and of both curves mean, sd over networks, and law of the log gain."""
        out: dict[str, Any] = {name: getattr(self, name) for name in Case._fields[:-1]}
        out |= {"seeds": len(self.rows), "failed": self.failed}
        for curve in ("exact", "trunk") if self.rows else ():
            figures = {"mean": self.seen(curve), "sd": self.sd(curve), "law": self.law(curve)}
            out |= {f"log_{curve}_{name}": plain(float(value)) for name, value in figures.items()}
        return out


@dataclass(frozen=True, repr=False)
class Sweep:
    """A sweep, finished or not; iterates over its rows, in the plan's order.

    Attributes
    ----------
    path : Path
        The file.
    plan : Plan
        What it runs over.
    rows : tuple of dict
        One a network: its case (scheme, block, depth, d, seed); measured, and by the law with ``law_`` before: ``log_exact``,
        ``log_trunk``, end-to-end log gain of gradient and trunk; ``factor_affine`` … ``factor_net``, geometric mean over
        sub-layers; ``stream``, ``share``, rms of the stream as it enters the last block, and its branches' share of the power
        there; ``weight_grad_ratio``, largest over smallest ‖dL/dW‖ of two blocks; ``law_sd_*``, the law's spread of the log
        gain over networks; ``no_law``, why there is none; ``error``, why it could not be measured; ``made_by``, versions.
    """

    path: Path
    plan: Plan
    rows: tuple[dict[str, Any], ...]

    @classmethod
    def open(cls, path: str | Path) -> "Sweep":
        """Read a sweep's file, be it finished, left half-done, or still being written to.

        Raises
        ------
        ValueError
            Where there is no such file, or it is no sweep's, or a damaged one.
        """
        plan, rows = sweep_store.read(path)
        return cls(Path(path), plan, tuple(rows[case] for case in plan.cases() if case in rows))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def missing(self) -> int:
        """Cases that are still to be run."""
        return len(self.plan) - len(self.rows)

    @property
    def failed(self) -> tuple[dict[str, Any], ...]:
        """Rows of cases that could not be measured."""
        return tuple(row for row in self.rows if row["error"])

    def pools(self) -> list[Pool]:
        """The rows by scheme, block, depth and width."""
        found: dict[tuple, list] = {}
        for row in self.rows:
            found.setdefault(tuple(row[name] for name in Case._fields[:-1]), []).append(row)
        good = {place: tuple(row for row in rows if not row["error"]) for place, rows in found.items()}
        return [Pool(*place, rows=good[place], failed=len(all_) - len(good[place])) for place, all_ in found.items()]  # type: ignore[call-arg]

    def columns(self) -> dict[str, list[Any]]:
        """The rows as columns: case, settings, figures; ``None`` where there is none."""
        cases, rest = Case._fields, sweep_store.COLUMNS[len(Case._fields) :]
        found = {name: [row[name] for row in self.rows] for name in cases}
        found |= {name: [value] * len(self.rows) for name, value in self.plan.settings.items()}
        return found | {name: [row[name] for row in self.rows] for name in rest}

    def to_dict(self) -> dict[str, Any]:
        """Plan, rows and pools as JSON-ready Python; what is undefined is ``None``."""
        axes = {name: getattr(self.plan, name) for name in ("schemes", "blocks", "depths", "widths", "seeds")}
        return {
            "settings": dict(self.plan.settings) | {k: list(v) if isinstance(v, tuple) else v for k, v in axes.items()},
            "cases": len(self.plan),
            "missing": self.missing,
            "failed": len(self.failed),
            "pools": [pool.to_dict() for pool in self.pools()],
            "rows": [{name: plain(value) for name, value in row.items()} for row in self.rows],
        }

    def to_pandas(self) -> Any:
        """One row a network, with the settings as columns.

        Raises
        ------
        ImportError
            Where pandas is not installed; the message says which extra has it.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(f"to_pandas needs pandas: {EXTRA}") from error
        return pd.DataFrame(self.columns())

    def to_csv(self, path: str | Path) -> None:
        """Write one line a network; every float reads back as it was.

        Raises
        ------
        ValueError
            For a path where no file can stand.
        """
        columns = self.columns()
        with whole(new_file("csv", path, ".csv")) as fresh, fresh.open("x", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))

    def to_parquet(self, path: str | Path) -> None:
        """Write one row a network.

        Raises
        ------
        ImportError
            Where pyarrow is not installed; the message says which extra has it.
        ValueError
            For a path where no file can stand.
        """
        file = new_file("parquet", path, ".parquet")
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError(f"to_parquet needs pyarrow: {EXTRA}") from error
        types = dict.fromkeys(sweep_store.FIGURES, pa.float64()) | dict.fromkeys(sweep_store.TEXTS, pa.string())
        table = pa.table({name: pa.array(values, types.get(name)) for name, values in self.columns().items()})
        with whole(file) as fresh:
            parquet.write_table(table, fresh)

    def plot(self, path: str | None = None, curve: str = "exact") -> Any:
        """Draw the end-to-end gain against depth (against width where there is one depth), a panel for each block and width.

        Laws are lines; measurements are markers at the geometric mean, with ± one standard deviation over networks. Written
        where ``path`` is given; ``curve`` is ``"exact"`` or ``"trunk"``.
        """
        from gradflow import plots
        from gradflow.sweeping import report as sweep_report

        return plots.save(sweep_report.figure(self, curve), path)

    def __str__(self) -> str:
        from gradflow import report
        from gradflow.sweeping import report as sweep_report

        return report.text(sweep_report.table(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report
        from gradflow.sweeping import report as sweep_report

        return report.html(sweep_report.table(self), figure=self.plot())
