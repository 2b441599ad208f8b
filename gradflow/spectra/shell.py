"""``gradflow spectrum``: of a random stack, or of a checkpoint folder at a text."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gradflow import shell
from gradflow.options import Block, Dtype, FinalNorm, Json, Key, Norm, Plot, Width


def spectrum(
    model: Annotated[
        str, typer.Argument(help="A row of the catalogue, or a checkpoint (folder, or GGUF file).")
    ] = "post-ln",
    block: Block = "mlp:gelu",
    depth: Annotated[int, typer.Option(help="Blocks.")] = 24,
    d: Width = 512,
    tokens: Annotated[int, typer.Option(help="Tokens of the state.")] = 1,
    text: Annotated[str | None, typer.Option(help="What a checkpoint reads.")] = None,
    method: Annotated[str, typer.Option(help="auto, dense, compact, matrix-free or lyapunov.")] = "auto",
    path: Annotated[str, typer.Option(help="exact, or trunk (F = 0).")] = "exact",
    top: Annotated[
        int | None, typer.Option(help="Largest values wanted.  [default: 8 matrix-free, all by Lyapunov]")
    ] = None,
    norm: Norm = "layernorm",
    eps: Annotated[float, typer.Option(help="ε of the norms.")] = 0.0,
    final_norm: FinalNorm = False,
    seeds: Annotated[int, typer.Option(help="Random networks.")] = 1,
    key: Key = 0,
    dtype: Dtype = "float64",
    pairs: Annotated[int | None, typer.Option(help="Steps of Lanczos.  [default: 2·top + 12]")] = None,
    probes: Annotated[int, typer.Option(help="Random vectors for the rms gain (matrix-free).")] = 16,
    trace: Annotated[str, typer.Option(help="hutchinson or xtrace.")] = "hutchinson",
    every: Annotated[int | None, typer.Option(help="Sub-layers between QRs.  [default: by a pilot]")] = None,
    chunk: Annotated[int | None, typer.Option(help="Columns pushed at a time (dense).")] = None,
    limit: Annotated[float, typer.Option(help="Seconds above which a forecast is refused.")] = 600.0,
    force: Annotated[bool, typer.Option("--force", help="Run whatever the forecast says.")] = False,
    forecast: Annotated[bool, typer.Option("--forecast", help="Say what each way would cost; run none.")] = False,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Singular values or Lyapunov exponents of the whole-depth Jacobian, with their errors and their cost."""
    from gradflow.spectra import choice, report

    shell.check_plot(plot)
    if Path(model).exists() and model not in shell.rows(["all", "streams"]):
        network, x = _checkpoint(model, text)
        options: dict[str, Any] = {}
    else:
        if len(Path(model).parts) > 1:
            raise ValueError(f"model: {model!r} is no folder, and no file; check the path, or give a scheme")
        if text is not None:
            raise ValueError("text: is read by a checkpoint; give its folder in place of a scheme")
        network, x = _stack(model, block.split(","), depth, d, norm, eps, final_norm, dtype), None
        options = {"tokens": tokens, "seeds": seeds, "key": key}
    options |= {"path": path, "top": top, "pairs": pairs, "probes": probes}
    if forecast:
        _forecasts(choice.forecasts(network, x, **options), as_json)
        return
    with shell.progress("pushing directions") as progress:
        result = choice.spectrum(
            network,
            x,
            method=method,
            trace=trace,
            every=every,
            chunk=chunk,
            limit_seconds=limit,
            force=force,
            progress=progress,
            **options,
        )
    shell.emit(result, report.table(result), as_json, plot)
    if not as_json:
        typer.echo(report.cost(result), err=True)


def _stack(scheme: str, block: list[str], depth: int, d: int, norm: str, eps: float, final: bool, dtype: str) -> Any:
    from gradflow import precision
    from gradflow.streams.stack import stack_of

    options = {"norm": norm, "eps": eps, "final_norm": final, "dtype": precision.resolve(dtype)}
    return stack_of(scheme, block, depth, d, **options)


def _checkpoint(folder: str, text: str | None) -> tuple[Any, Any]:
    """The network, and the state that a text makes of it."""
    from gradflow.checkpoints import load

    if text is None:
        raise ValueError("text: a checkpoint needs something to read; give --text")
    checkpoint = load(folder)
    return checkpoint, checkpoint.embed(checkpoint.ids(text))


def _forecasts(found: dict[str, Any], as_json: bool) -> None:
    import json

    from gradflow.report import grid
    from gradflow.spectra.forecast import duration, size

    if as_json:
        typer.echo(json.dumps({name: each.to_dict() for name, each in found.items()}))
        return
    shown = grid("What each way would cost, after compilation", ["way", "time", "memory", "rates"])
    for name, each in found.items():
        shown.add_row(name, duration(each.seconds), size(each.bytes), "measured here" if each.measured else "typical")
    shell.show(shown)
