"""The shell, one command a job. Exit codes: 0 done, 1 a check failed, 2 bad input (one line)."""

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from gradflow import shell
from gradflow.auditing.shell import audit, check
from gradflow.comparing.shell import compare, constants, design
from gradflow.counterfactuals.shell import what_if
from gradflow.ledger.shell import claims
from gradflow.options import (
    Block,
    Dtype,
    FinalNorm,
    Html,
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
from gradflow.spectra.shell import spectrum
from gradflow.sweeping.shell import sweep
from gradflow.training.map_shell import trainability
from gradflow.training.shell import warmup

app = typer.Typer(
    help="Gradient flow through deep residual networks: law, exact product and factors side by side.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class Reading(StrEnum):
    """The two readings of the estimate."""

    norm = "norm"
    alignment = "alignment"


def _version(value: bool) -> None:
    if value:
        from gradflow import __version__

        typer.echo(f"gradflow {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def contraction(
    depth: Annotated[
        str | None, typer.Option(help="Sub-layers; several as in 6,12,24,48 give gain against depth.  [default: 24]")
    ] = None,
    d: Annotated[int | None, typer.Option(help="Width.  [default: 512]")] = None,
    c: Annotated[float, typer.Option(help="The article's loss per layer, in (0, 1).")] = 0.2,
    scheme: Annotated[str, typer.Option(help="post-ln or pre-ln.")] = "post-ln",
    branch: Annotated[
        str, typer.Option(help="linear, bias (constant), mlp:relu, mlp:gelu, mlp:silu, mlp:tanh, …")
    ] = "linear",
    norm: Annotated[
        str | None, typer.Option(help="rms or layernorm.  [default: rms; layernorm with --activations]")
    ] = None,
    reading: Annotated[
        Reading, typer.Option(help="norm: iid weights; alignment: û turns in one plane.")
    ] = Reading.norm,
    tokens: Annotated[int, typer.Option(help="Tokens of the state.")] = 1,
    seeds: Annotated[int, typer.Option(help="Networks to measure.")] = 8,
    key: Key = 0,
    cotangent: Annotated[str | None, typer.Option(help="gaussian, or aligned (alignment reading only).")] = None,
    probes: Annotated[
        int | None, typer.Option(help="Measure with that many cotangents; leave out the whole product.")
    ] = None,
    final_norm: FinalNorm = False,
    activations: Annotated[
        Path | None, typer.Option(help="An .npz of recorded activations: u, and x, gain, eps, cotangent.")
    ] = None,
    dtype: Dtype = "float64",
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """How much gradient survives depth, and why.

    The estimate (1 − c)^L beside the law and the exact product, with the factors of each sub-layer.
    """
    from gradflow import estimate, report
    from gradflow.contractions import ContractionSweep

    shell.check_plot(plot)
    depths = [] if depth is None else shell.numbers("depth", depth, int)
    sizes: dict[str, Any] = {"depth": depths if len(depths) > 1 else depths[0]} if depths else {}
    sizes |= {} if d is None else {"d": d}
    with shell.progress("measuring networks") as progress:
        result = estimate.contraction(
            **sizes,
            c=c,
            scheme=scheme,
            branch=branch,
            norm=norm,
            reading=reading.value,
            tokens=tokens,
            seeds=seeds,
            key=key,
            cotangent=cotangent,
            probes=probes,
            final_norm=final_norm,
            activations=activations,
            dtype=dtype,
            progress=progress,
        )
    render = report.sweep if isinstance(result, ContractionSweep) else report.contraction
    shell.emit(result, render(result), as_json, plot)  # type: ignore[arg-type]


@app.command()
def law(
    scheme: Annotated[str, typer.Argument(help="post-ln, pre-ln, sandwich, deepnorm, admin, …")],
    block: Annotated[
        str, typer.Option(help="Branches of one block, as in mlp:relu or attention,glu:silu+rms.")
    ] = "mlp:relu",
    depth: Annotated[int, typer.Option(help="Blocks.")] = 24,
    d: Annotated[int | None, typer.Option(help="Width, for the 1/d term; without it the leading order.")] = None,
    norm: Norm = "layernorm",
    init: Init = "unit",
    final_norm: FinalNorm = False,
    tokens: Annotated[int, typer.Option(help="Tokens; of one, attention is W_O W_V.")] = 1,
    memory: Memory = None,
    memory_cosine: MemoryCosine = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """The depth law alone, without a network.

    Every factor of every sub-layer at initialisation; with --d also its 1/d term.
    """
    from gradflow import laws, report

    shell.check_plot(plot)
    options = {"d": d, "norm": norm, "init": init, "final_norm": final_norm, "tokens": tokens}
    profile = laws.law(scheme, shell.block(block, memory, memory_cosine), depth, **options)
    shell.emit(profile, report.profile_table(profile), as_json, plot)


@app.command()
def profile(
    scheme: Annotated[str, typer.Argument(help="post-ln or pre-ln.")] = "post-ln",
    block: Block = "attention,mlp:gelu",
    depth: Annotated[int, typer.Option(help="Blocks.")] = 12,
    d: Width = 256,
    tokens: Annotated[int, typer.Option(help="Tokens of the state, a standard Gaussian each.")] = 64,
    memory: Memory = None,
    memory_cosine: MemoryCosine = None,
    norm: Annotated[str, typer.Option(help="layernorm or rms.")] = "layernorm",
    eps: Annotated[float, typer.Option(help="The norm's ε.")] = 1e-5,
    final_norm: FinalNorm = False,
    seeds: Annotated[int, typer.Option(help="Random networks to measure.")] = 4,
    key: Key = 0,
    probes: Annotated[int, typer.Option(help="Gaussian cotangents per network.")] = 1,
    weight_grad: Annotated[bool, typer.Option("--weight-grad", help="Also ‖dL/dW‖ of each sub-layer.")] = False,
    dtype: Dtype = "float64",
    as_json: Json = False,
    plot: Plot = None,
    html: Html = None,
) -> None:
    """Every factor of every sub-layer of random networks.

    Where gradient is lost, where gained, and by which factor; exact, trunk, local and bound side by side.
    """
    from gradflow import laws, precision, profile_report, profiles
    from gradflow.streams.stack import stack_of

    shell.check_plot(plot)
    shell.check_page(html)
    options = {"norm": norm, "eps": eps, "final_norm": final_norm, "dtype": precision.resolve(dtype)}
    stack = stack_of(scheme, shell.block(block, memory, memory_cosine), depth, d, **options)
    result = profiles.profile(
        stack, profiles.gaussian_state(stack, tokens, key), seeds=seeds, key=key, probes=probes, weight_grad=weight_grad
    )
    law = None
    if html is not None:
        with contextlib.suppress(ValueError):  # a row without a law is drawn alone
            sizes = {"d": d, "norm": norm, "final_norm": final_norm, "tokens": tokens, "probes": probes}
            law = laws.law(scheme, stack.block, depth, **sizes)
    shell.emit(result, profile_report.profile(result), as_json, plot, html, law)


@app.command()
def subspaces(
    scheme: Annotated[str, typer.Argument(help="A row of the catalogue.")] = "post-ln",
    block: Block = "attention,mlp:gelu",
    depth: Annotated[int, typer.Option(help="Blocks.")] = 12,
    d: Width = 256,
    tokens: Annotated[int, typer.Option(help="Tokens of the state.")] = 32,
    token_cosine: TokenCosine = 0.0,
    norm: Norm = "layernorm",
    final_norm: FinalNorm = False,
    seeds: Annotated[int, typer.Option(help="Random networks to measure.")] = 4,
    key: Key = 0,
    dtype: Dtype = "float64",
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Gain of what tokens have in common, and of what differs between them."""
    from gradflow import precision, split_report
    from gradflow.splits import subspaces as split
    from gradflow.stack import Stack

    shell.check_plot(plot)
    options = {"norm": norm, "eps": 0.0, "final_norm": final_norm, "dtype": precision.resolve(dtype)}
    stack = Stack.make(scheme, block.split(","), depth, d, **options)
    result = split(stack, tokens=tokens, token_cosine=token_cosine, seeds=seeds, key=key)
    shell.emit(result, split_report.table(result), as_json, plot)


for command in (compare, constants, design, sweep, spectrum, audit, what_if, check, warmup, trainability, claims):
    app.command()(command)


@app.command()
def derive(
    name: Annotated[str | None, typer.Argument(help="A derivation; without a name they are listed.")] = None,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Also run its checks; exit code 1 if one fails.")] = False,
) -> None:
    """Print a derivation: claim, proof, result."""
    from gradflow.symbolic import NAMES
    from gradflow.symbolic import derive as derivation

    if name is None:
        typer.echo("\n".join(NAMES))
        return
    result = derivation(name)
    typer.echo(result.latex() if latex else result.text())
    if check:
        outcomes = result.check()
        typer.echo("\n" + "\n".join(map(str, outcomes)))
        if not all(outcome.passed for outcome in outcomes):
            raise typer.Exit(1)


def main() -> None:
    """Run the command line; bad input is one line on stderr and exit code 2, never a traceback."""
    message = ""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (ValueError, OSError) as error:
        message = str(error)
    except KeyboardInterrupt:
        shell.leave(130)
    except Exception as error:
        # Typer's own refusals (unknown option, wrong type) can say themselves in a line; anything else is a bug of ours.
        if not hasattr(error, "format_message"):
            raise
        message = f"{error.format_message()} ('gradflow --help' lists what there is)"  # type: ignore[attr-defined]
    else:
        if code == 130:  # Typer's own reading of Ctrl-C
            shell.leave(130)
        sys.exit(code if isinstance(code, int) else 0)
    sys.stderr.write(f"gradflow: {' '.join(message.split())}\n")
    sys.exit(2)
