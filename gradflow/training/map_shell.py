"""``gradflow trainability``: the axes of a map to runs, and what is printed of them."""

from typing import Annotated, Any

import typer

from gradflow import shell
from gradflow.options import Batch, Block, Corpus, Dtype, Heads, Init, Json, Key, Norm, Plot, Runs, Width


def trainability(
    schemes: Annotated[
        list[str] | None, typer.Argument(help="Schemes.  [default: post-ln pre-ln admin deepnorm sandwich]")
    ] = None,
    depth: Annotated[str, typer.Option(help="Blocks, as in 3,6,12.")] = "3,6,12",
    lr: Annotated[str, typer.Option(help="Peak learning rates.")] = "3e-4,1e-3,3e-3,1e-2,3e-2",
    warmup: Annotated[str, typer.Option(help="Steps of linear warm-up.")] = "0,100",
    steps: Annotated[int, typer.Option(help="Training steps of a run.")] = 300,
    fit: Annotated[
        str | None,
        typer.Option(help="SCHEME,DEPTH whose boundary sets the constant.  [default: the first with both sides]"),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adam, adamw, radam or sgd.")] = "adam",
    norm: Norm = "layernorm",
    key: Key = 0,
    block: Block = "attention:causal,mlp:relu",
    d: Width = 64,
    heads: Heads = 4,
    tokens: Annotated[int, typer.Option(help="Bytes of a sequence.")] = 32,
    batch: Batch = 8,
    init: Init = "xavier",
    text: Corpus = None,
    out: Runs = None,
    dtype: Dtype = "float32",
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Final loss over learning rate × depth × warm-up for each scheme, the boundary of training seen and predicted."""
    from gradflow.training import map_report
    from gradflow.training.map_run import trainability as trained

    shell.check_plot(plot)
    given: dict[str, Any] = {"depth": shell.numbers("depth", depth, int), "lr": shell.numbers("lr", lr, float)}
    given |= {"warmup": shell.numbers("warmup", warmup, int), "steps": steps, "optimizer": optimizer, "norm": norm}
    given |= {"key": key, "block": block.split(","), "d": d, "heads": heads, "tokens": tokens, "batch": batch}
    given |= {"init": init, "text": text, "out": out, "dtype": dtype, "fit": _place(fit)}
    if schemes:
        given["scheme"] = schemes
    with shell.progress("training", left=True) as progress:
        result = trained(**given, progress=progress)
    shell.emit(result, map_report.table(result), as_json, plot)


def _place(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    scheme, _, depth = text.partition(",")
    return scheme, *shell.numbers("fit", depth, int)
