"""What every command does: show progress, print a table or JSON, write a figure."""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import typer


@contextlib.contextmanager
def progress(what: str, left: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while a person is looking, with an estimate of the time ``left`` where asked for; silent in a pipe."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *((TextColumn("left"), TimeRemainingColumn()) if left else ()),
    )
    console = Console(stderr=True)
    # speed over the last quarter of an hour: a run of deep networks is as slow as it is
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=900
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(renderable: Any) -> None:
    """Print a table: at most 100 columns, never narrower than it needs in a pipe."""
    from rich.console import Console

    from gradflow.report import WIDTH, text

    console = Console()
    if console.is_terminal:
        Console(width=min(console.width, WIDTH), highlight=False).print(renderable)
    else:
        typer.echo(text(renderable))


def leave(code: int) -> NoReturn:
    """End the process without Python's shutdown, in which JAX may crash after a compilation was interrupted."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def check_plot(plot: Path | None) -> None:
    """Refuse a figure that could not be written before any work is done."""
    if plot is not None:
        from gradflow.plots import check_path

        check_path(plot)


def check_page(page: Path | None) -> None:
    """The same of a page."""
    if page is not None:
        from gradflow.files import new_file

        new_file("html", page, ".html")


def emit(
    result: Any, renderable: Any, as_json: bool, plot: Path | None, page: Path | None = None, law: Any = None
) -> None:
    """Write the figure, and the page that names this command, then print the result as JSON or as a table."""
    if plot is not None:
        result.plot(str(plot))
    if page is not None:
        from gradflow.page import save

        save(result, page, shlex.join(["gradflow", *sys.argv[1:]]), law)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), allow_nan=False))
    else:
        show(renderable)
        for what, file in (("Figure", plot), ("Page", page)):
            if file is not None:
                typer.echo(f"{what} written to {file}", err=True)


def numbers(argument: str, text: str, kind: type) -> list[Any]:
    """The numbers of an option that takes one or several."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        example, what = ("6,12,24", "a whole number") if kind is int else ("1e-3,3e-3", "a number")
        raise ValueError(f"{argument}: needs {what}, or several as in {example}, got {text!r}") from None


def block(text: str, memory: int | None, cosine: float | None) -> list[Any]:
    """Branches by name, cross-attention's with the memory asked for."""
    from dataclasses import replace

    from gradflow.branches import CrossAttention, branches_of

    names, given = text.split(","), {"memory": memory, "memory_cosine": cosine}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return names
    branches = branches_of(names)
    if not any(isinstance(branch, CrossAttention) for branch in branches):
        raise ValueError(f"memory: no branch of {text!r} has one; give a block with cross-attention")
    return [replace(branch, **given) if isinstance(branch, CrossAttention) else branch for branch in branches]


def rows(names: list[str]) -> list[str]:
    """Schemes by name; ``all`` and ``streams`` stand for the two catalogues."""
    from gradflow import streams
    from gradflow.schemes import BY_NAME

    groups = {"all": list(BY_NAME), "streams": list(streams.BY_NAME)}
    return [name for group in names for name in groups.get(group, [group])]
