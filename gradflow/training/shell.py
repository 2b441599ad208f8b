"""``gradflow warmup``: settings to runs, and what is printed of them."""

from typing import Annotated

import typer

from gradflow import shell
from gradflow.options import Batch, Block, Corpus, Dtype, Heads, Init, Json, Key, Plot, Runs, Width


def warmup(
    scheme: Annotated[
        str, typer.Option(help="post-ln, pre-ln, deepnorm, admin, …; several as in post-ln,pre-ln.")
    ] = "post-ln",
    depth: Annotated[str, typer.Option(help="Blocks; several as in 6,18.")] = "12",
    warmup: Annotated[str, typer.Option(help="Steps of linear warm-up; several as in 0,200.")] = "0",
    lr: Annotated[str, typer.Option(help="Peak learning rate; several as in 1e-3,3e-3.")] = "3e-3",
    optimizer: Annotated[str, typer.Option(help="adam, adamw, radam or sgd; or several.")] = "adam",
    norm: Annotated[str, typer.Option(help="layernorm, rms, dyt or none; or several.")] = "layernorm",
    schedule: Annotated[str, typer.Option(help="After the warm-up: constant, inverse-sqrt or cosine.")] = "constant",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 400,
    every: Annotated[int, typer.Option(help="Watch every so many steps.")] = 10,
    seeds: Annotated[int, typer.Option(help="Runs of each setting.")] = 1,
    key: Key = 0,
    block: Block = "attention:causal,mlp:relu",
    d: Width = 64,
    heads: Heads = 4,
    tokens: Annotated[int, typer.Option(help="Bytes of a sequence.")] = 64,
    batch: Batch = 16,
    init: Init = "xavier",
    text: Corpus = None,
    out: Runs = None,
    dtype: Dtype = "float32",
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Train a small language model under each setting, watch its factors, and say why it learns or not."""
    from gradflow.training import tables
    from gradflow.training.results import TrainingRun
    from gradflow.training.run import warmup as train

    shell.check_plot(plot)
    lists = {"scheme": scheme.split(","), "optimizer": optimizer.split(","), "norm": norm.split(",")}
    lists |= {"depth": shell.numbers("depth", depth, int), "warmup": shell.numbers("warmup", warmup, int)}
    lists |= {"lr": shell.numbers("lr", lr, float)}
    sizes = {
        "d": d,
        "heads": heads,
        "tokens": tokens,
        "batch": batch,
        "init": init,
        "dtype": dtype,
        "block": block.split(","),
    }
    with shell.progress("training") as progress:
        result = train(
            **lists,
            **sizes,
            schedule=schedule,
            steps=steps,
            every=every,
            seeds=seeds,
            key=key,
            text=text,
            out=out,
            progress=progress,
        )
    shell.emit(result, (tables.run if isinstance(result, TrainingRun) else tables.runs)(result), as_json, plot)  # type: ignore
