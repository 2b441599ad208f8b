"""`gradflow sweep`: options to arguments, a run or a file that is read, and what is written of it."""

import contextlib
import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from gradflow import shell
from gradflow.files import new_file


def sweep(
    schemes: list[str],
    options: dict[str, Any],
    out: Path,
    csv: Path | None,
    parquet: Path | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Run or resume where there are schemes, else read; write and print."""
    _check(csv, parquet, plot)
    from gradflow.sweeps import Sweep

    if schemes:
        result = _run(schemes, options, out)
    elif options:
        raise ValueError(
            f"schemes: give at least one to run a sweep; {next(iter(options))} says nothing to {str(out)!r}"
        )
    else:
        result = Sweep.open(out)
    from gradflow import sweep_report

    for path, write in ((csv, result.to_csv), (parquet, result.to_parquet)):
        if path is not None:
            write(path)
            typer.echo(f"{len(result)} rows written to {path}", err=True)
    shell.emit(result, sweep_report.table(result), as_json, plot)
    if result.failed:
        raise typer.Exit(1)


def _run(schemes: list[str], options: dict[str, Any], out: Path) -> Any:
    seen = (0, 0)
    try:
        with shell.progress("measuring networks") as progress, _until_asked() as stop:
            from gradflow.sweep_run import sweep  # takes a second or two, in which Ctrl-C may come

            def show(done: int, total: int) -> None:
                nonlocal seen
                seen = done, total
                progress(done, total)
                stop()

            memory = [options.pop(name, None) for name in ("memory", "memory_cosine")]
            if "blocks" in options or memory != [None, None]:
                options["blocks"] = [shell.block(text, *memory) for text in options.get("blocks", ["mlp:relu"])]
            return sweep(shell.rows(schemes), **options, path=out, progress=show)
    except KeyboardInterrupt:
        typer.echo(f"gradflow: stopped; {out} holds {seen[0]} of {seen[1]} cases, the same command goes on", err=True)
        raise


@contextlib.contextmanager
def _until_asked() -> Iterator[Callable[[], None]]:
    """A function that raises ``KeyboardInterrupt`` once Ctrl-C was pressed, so that the network at hand is finished; pressed
    again, it interrupts as ever. In the midst of a compilation JAX may lose the exception.
    """
    asked = False

    def pressed(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        typer.echo("gradflow: stopping after this network; Ctrl-C again stops at once", err=True)

    def stop() -> None:
        if asked:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as a shell's background jobs have it
        signal.signal(signal.SIGINT, pressed)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _check(csv: Path | None, parquet: Path | None, plot: Path | None) -> None:
    """Refuse what could not be written before any work is done."""
    shell.check_plot(plot)
    if csv is not None:
        new_file("csv", csv, ".csv")
    if parquet is not None:
        new_file("parquet", parquet, ".parquet")
        if importlib.util.find_spec("pyarrow") is None:
            from gradflow.sweeps import EXTRA

            raise ValueError(f"parquet: needs pyarrow: {EXTRA}")
