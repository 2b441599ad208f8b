"""`gradflow sweep`: options to arguments, a run or a file that is read, and what is written of it."""

import contextlib
import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gradflow import shell
from gradflow.files import new_file
from gradflow.options import Json, Memory, MemoryCosine, Plot


def sweep(
    schemes: Annotated[
        list[str] | None, typer.Argument(help="post-ln, pre-ln, …, all, streams; none: read the file alone.")
    ] = None,
    block: Annotated[
        list[str] | None, typer.Option(help="Branches of one block; again for each further.  [default: mlp:relu]")
    ] = None,
    depth: Annotated[str | None, typer.Option(help="Blocks, as in 6,12,24.  [default: 24]")] = None,
    width: Annotated[str | None, typer.Option("--width", "--d", help="As in 64,128.  [default: 128]")] = None,
    seeds: Annotated[int | None, typer.Option(help="Networks of each.  [default: 4]")] = None,
    out: Annotated[Path, typer.Option(help="The file; what it holds is not run again.")] = Path("sweep.sqlite"),
    norm: Annotated[str | None, typer.Option(help="layernorm, rms, dyt or none.  [default: layernorm]")] = None,
    init: Annotated[str | None, typer.Option(help="unit, xavier, he, gpt2 or torch.  [default: unit]")] = None,
    final_norm: Annotated[
        bool | None, typer.Option("--final-norm", help="A norm after the last sub-layer, in all.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the state.  [default: 1]")] = None,
    token_cosine: Annotated[
        float | None, typer.Option(help="Cosine of every two tokens of the input.  [default: 0]")
    ] = None,
    cotangent_cosine: Annotated[
        float | None, typer.Option(help="Cosine of every two tokens' cotangents.  [default: 0]")
    ] = None,
    memory: Memory = None,
    memory_cosine: MemoryCosine = None,
    key: Annotated[int | None, typer.Option(help="The integer that all randomness comes from.  [default: 0]")] = None,
    dtype: Annotated[str | None, typer.Option(help="float64 or float32.  [default: float64]")] = None,
    retry: Annotated[bool | None, typer.Option("--retry", help="Run cases again that failed before.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the rows: FILE.csv.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Write the rows: FILE.parquet (needs pyarrow).")] = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Scheme × block × depth × width × seed, a row on disk for each network as soon as it is measured.

    A sweep that was stopped, at whatever moment, goes on when the same command is given again; it may also grow. Exit code 1 if
    a network could not be measured.
    """
    asked: dict[str, Any] = {"norm": norm, "init": init, "final_norm": final_norm, "tokens": tokens, "seeds": seeds}
    asked |= {"token_cosine": token_cosine, "cotangent_cosine": cotangent_cosine, "key": key, "dtype": dtype}
    asked |= {"retry": retry, "memory": memory, "memory_cosine": memory_cosine, "blocks": block}
    asked |= {f"{n}s": None if v is None else shell.numbers(n, v, int) for n, v in (("depth", depth), ("width", width))}
    given = {name: value for name, value in asked.items() if value not in (None, [])}
    job(schemes or [], given, out, csv, parquet, as_json, plot)


def job(
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
    from gradflow.sweeping.result import Sweep

    if schemes:
        result = _run(schemes, options, out)
    elif options:
        raise ValueError(
            f"schemes: give at least one to run a sweep; {next(iter(options))} says nothing to {str(out)!r}"
        )
    else:
        result = Sweep.open(out)
    from gradflow.sweeping import report as sweep_report

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
            from gradflow.sweeping.run import sweep  # takes a second or two, in which Ctrl-C may come

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
            from gradflow.sweeping.result import EXTRA

            raise ValueError(f"parquet: needs pyarrow: {EXTRA}")
