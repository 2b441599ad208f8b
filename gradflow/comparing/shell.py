"""`gradflow compare`, `gradflow constants` and `gradflow design`: options to arguments."""

import json
from typing import Annotated

import typer

from gradflow import shell
from gradflow.options import (
    Block,
    Dtype,
    FinalNorm,
    Init,
    Json,
    Key,
    Memory,
    MemoryCosine,
    Norm,
    Plot,
    TokenCosine,
    Width,
)


def constants(
    name: Annotated[str, typer.Argument(help="deepnorm, admin, sub-ln, t-fixup, fixup, gpt2, layerscale, …")],
    sublayers: Annotated[int | None, typer.Option(help="Residual sub-layers of one stack.")] = None,
    encoder: Annotated[int | None, typer.Option(help="Encoder blocks.")] = None,
    decoder: Annotated[int | None, typer.Option(help="Decoder blocks.")] = None,
    as_json: Json = False,
) -> None:
    """The constants that a scheme prescribes at a depth, and what they do to trunk and exact gain there."""
    from gradflow.comparing import prescriptions

    found = prescriptions.constants(name, sublayers=sublayers, encoder=encoder, decoder=decoder)
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False))
    else:
        shell.show(prescriptions.table(found))


def design(
    scheme: Annotated[str, typer.Argument(help="pre-ln, post-ln, deepnorm, …")],
    depth: Annotated[int, typer.Option(help="Blocks.")] = 24,
    knob: Annotated[str, typer.Option(help="What to scale: branch (β), skip (α), weights (gains at init).")] = "branch",
    exact: Annotated[float | None, typer.Option(help="Target: end-to-end gain of the gradient.")] = None,
    trunk: Annotated[float | None, typer.Option(help="Target: end-to-end gain with F = 0.")] = None,
    stream: Annotated[float | None, typer.Option(help="Target: rms of the stream at the last sub-layer.")] = None,
    weights: Annotated[float | None, typer.Option(help="Target: largest over smallest weight gradient.")] = None,
    update: Annotated[float | None, typer.Option(help="Target: DeepNorm's bound on the update (its own: 1).")] = None,
    block: Block = "mlp:relu",
    d: Width = 256,
    norm: Norm = "layernorm",
    init: Init = "unit",
    final_norm: FinalNorm = False,
    seeds: Annotated[int, typer.Option(help="Networks to measure at the solution.")] = 4,
    key: Key = 0,
    as_json: Json = False,
) -> None:
    """Solve the law for the scale that meets one target, and measure networks there."""
    from gradflow.comparing import designs

    asked = {"exact": exact, "trunk": trunk, "stream": stream, "weights": weights, "update": update}
    target = {name: value for name, value in asked.items() if value is not None}
    options = {"knob": knob, "d": d, "norm": norm, "init": init, "final_norm": final_norm, "seeds": seeds, "key": key}
    with shell.progress("solving and measuring"):
        result = designs.design(scheme, depth, block=block.split(","), **options, **target)  # type: ignore[arg-type]
    shell.emit(result, str(result), as_json, None)


def compare(
    schemes: Annotated[
        list[str], typer.Argument(help="post-ln, pre-ln, pre-ln+final, deepnorm, b2t, mhc, …; or all, or streams.")
    ],
    block: Block = "attention,mlp:gelu",
    depth: Annotated[int, typer.Option(help="Blocks.")] = 24,
    d: Width = 512,
    norm: Norm = "layernorm",
    init: Init = "unit",
    final_norm: Annotated[bool, typer.Option("--final-norm", help="A norm after the last sub-layer, in all.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens; of one, attention is W_O W_V.")] = 1,
    token_cosine: TokenCosine = 0.0,
    cotangent_cosine: Annotated[float, typer.Option(help="Cosine of every two tokens' cotangents.")] = 0.0,
    memory: Memory = None,
    memory_cosine: MemoryCosine = None,
    seeds: Annotated[int, typer.Option(help="Networks to measure.")] = 4,
    key: Key = 0,
    dtype: Dtype = "float64",
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Schemes against each other at initialisation: law and measurement, forward and backward."""
    from gradflow.comparing import comparisons
    from gradflow.comparing import report as comparison_report

    shell.check_plot(plot)
    options = {"norm": norm, "init": init, "final_norm": final_norm, "tokens": tokens, "seeds": seeds, "key": key}
    options |= {"token_cosine": token_cosine, "cotangent_cosine": cotangent_cosine}
    with shell.progress("measuring schemes") as progress:
        branches = shell.block(block, memory, memory_cosine)
        result = comparisons.compare(shell.rows(schemes), branches, depth, d, **options, dtype=dtype, progress=progress)
    shell.emit(result, comparison_report.table(result), as_json, plot)
