"""The shell, one command a job. Exit codes: 0 done, 1 a check failed, 2 bad input (one line)."""

import contextlib
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from gradflow import shell
from gradflow.ledger.shell import claims
from gradflow.options import Block, Dtype, FinalNorm, Html, Init, Json, Key, Memory, MemoryCosine, Plot
from gradflow.spectra.shell import spectrum
from gradflow.sweep_shell import sweep
from gradflow.training.map_shell import trainability
from gradflow.training.shell import warmup
from gradflow.what_if_shell import what_if

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
    norm: Annotated[str, typer.Option(help="layernorm, rms, dyt or none.")] = "layernorm",
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


class Cotangent(StrEnum):
    """What an audit sends back."""

    gaussian = "gaussian"
    pooled = "pooled"
    mlm = "mlm"
    next_token = "next-token"


class Apart(StrEnum):
    """Tokens without which an audit gives its figures once more."""

    auto = "auto"
    first = "first"
    sinks = "sinks"
    none = "none"


def _texts(texts: list[str] | None, file: Path | None) -> list[str]:
    """Texts of the options, then those of the file, one a line."""
    lines = []
    if file is not None:
        try:
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise ValueError(f"text-file: {str(file)!r} is no UTF-8 text") from None
    found = [*(texts or ()), *lines]
    if not found:
        raise ValueError(
            'text: give --text "a sentence" (again for each further one), or --text-file with one a line, or --ids'
        )
    return found


def _ids(rows: list[str] | None) -> list[list[int]] | None:
    """Rows of token ids."""
    try:
        return [[int(i) for i in row.replace(",", " ").split()] for row in rows] if rows else None
    except ValueError:
        raise ValueError('ids: needs whole numbers, as in --ids "1 5 9"') from None


@app.command()
def audit(
    path: Annotated[Path, typer.Argument(help="A model's folder: config.json, model.safetensors, tokenizer.")],
    text: Annotated[list[str] | None, typer.Option(help="A text; give it again for each further one.")] = None,
    text_file: Annotated[Path | None, typer.Option(help="A file with one text a line.")] = None,
    ids: Annotated[
        list[str] | None, typer.Option(help="Token ids in the place of a text, where there is no tokenizer.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="What an encoder–decoder is to write; again for each further text.")
    ] = None,
    target_ids: Annotated[list[str] | None, typer.Option(help="Token ids in the place of a target.")] = None,
    cotangent: Annotated[
        Cotangent | None,
        typer.Option(
            help="pooled: of the sentence embedding; mlm, next-token: of the loss. Default: gaussian, or next-token where causal."
        ),
    ] = None,
    probes: Annotated[int, typer.Option(help="Gaussian cotangents.")] = 1,
    key: Key = 0,
    reference: Annotated[
        Path | None, typer.Option(help="An .npz of outputs of these weights, recorded elsewhere, to be reproduced.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Most that it may take, in GiB; else 9/10 of what is free.")
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Read block by block; else where all at once need more memory."),
    ] = None,
    detached: Annotated[
        bool, typer.Option("--detached", help="Hold the norms' statistics constant in every Jacobian.")
    ] = False,
    apart: Annotated[
        Apart,
        typer.Option(help="Figures once more without first tokens, or sinks too; auto: where a token stands out."),
    ] = Apart.auto,
    spectrum: Annotated[
        int | None, typer.Option(help="Largest singular values wanted, of each block's Jacobian and of the whole.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write a baseline for 'gradflow check': FILE.json.")] = None,
    as_json: Json = False,
    plot: Plot = None,
    html: Html = None,
) -> None:
    """What a trained transformer does to the gradient, and which sub-layer and factor lose it.

    For folders of BERT and kin, of causal models (GPT-2, Llama and kin, …) and of T5 and kin, in float64.
    """
    rows = _ids(ids)
    texts = None if rows and not (text or text_file) else _texts(text, text_file)
    shell.check_plot(plot)
    shell.check_page(html)
    from gradflow import audit_report, audits
    from gradflow.files import new_file

    if save is not None:
        new_file("save", save, ".json")
    with shell.progress("auditing") as progress:
        sent = None if cotangent is None else cotangent.value
        options = {"cotangent": sent, "probes": probes, "key": key, "reference": reference, "memory": memory}
        options |= {"apart": None if apart is Apart.none else apart.value, "spectrum": spectrum, "progress": progress}
        options |= {"detached": detached, "stream": stream, "target": target or None, "target_ids": _ids(target_ids)}
        result = audits.audit(path, texts, ids=rows, **options)
    if save is not None:
        result.save(save)
    shell.emit(result, audit_report.audit(result), as_json, plot, html)
    if save is not None and not as_json:
        typer.echo(f"Baseline written to {save}", err=True)


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(help="An architecture: .toml, .json, or a Hugging Face config.json.")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="Or: what 'gradflow audit … --save' wrote.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="With --baseline: the model's folder, if not the baseline's.")
    ] = None,
    band: Annotated[float, typer.Option(help="With --baseline: largest |log(now/before)| that is no move.")] = 0.05,
    max_ratio: Annotated[
        float | None, typer.Option(help="With FILE: largest ratio of the gradients that reach any two blocks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find contradictions in an architecture, or hold a model against a saved audit; exit code 1 if there are any.

    A FILE says scheme, depth, d, block, norm, final_norm, alpha, weight_gain, …; the law says what they do together.
    """
    if (file is None) == (baseline is None):
        raise ValueError("check: give an architecture's FILE, or --baseline, one of them")
    result: Any
    if file is not None:
        from gradflow import architectures, lint

        result = lint.lint(architectures.read(file), max_ratio)
        shown = lint.table(result)
    else:
        from gradflow import audit_report, baselines

        with shell.progress("auditing"):
            result = baselines.check(baseline, model, band)  # type: ignore[arg-type]
        shown = audit_report.check(result)
    shell.emit(result, shown, as_json, None)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def constants(
    name: Annotated[str, typer.Argument(help="deepnorm, admin, sub-ln, t-fixup, fixup, gpt2, layerscale, …")],
    sublayers: Annotated[int | None, typer.Option(help="Residual sub-layers of one stack.")] = None,
    encoder: Annotated[int | None, typer.Option(help="Encoder blocks.")] = None,
    decoder: Annotated[int | None, typer.Option(help="Decoder blocks.")] = None,
    as_json: Json = False,
) -> None:
    """The constants that a scheme prescribes at a depth, and what they do to trunk and exact gain there."""
    from gradflow import prescriptions

    found = prescriptions.constants(name, sublayers=sublayers, encoder=encoder, decoder=decoder)
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False))
    else:
        shell.show(prescriptions.table(found))


@app.command()
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
    d: Annotated[int, typer.Option(help="Width.")] = 256,
    norm: Annotated[str, typer.Option(help="layernorm, rms, dyt or none.")] = "layernorm",
    init: Init = "unit",
    final_norm: FinalNorm = False,
    seeds: Annotated[int, typer.Option(help="Networks to measure at the solution.")] = 4,
    key: Key = 0,
    as_json: Json = False,
) -> None:
    """Solve the law for the scale that meets one target, and measure networks there."""
    from gradflow import designs

    asked = {"exact": exact, "trunk": trunk, "stream": stream, "weights": weights, "update": update}
    target = {name: value for name, value in asked.items() if value is not None}
    options = {"knob": knob, "d": d, "norm": norm, "init": init, "final_norm": final_norm, "seeds": seeds, "key": key}
    with shell.progress("solving and measuring"):
        result = designs.design(scheme, depth, block=block.split(","), **options, **target)  # type: ignore[arg-type]
    shell.emit(result, str(result), as_json, None)


@app.command()
def profile(
    scheme: Annotated[str, typer.Argument(help="post-ln or pre-ln.")] = "post-ln",
    block: Block = "attention,mlp:gelu",
    depth: Annotated[int, typer.Option(help="Blocks.")] = 12,
    d: Annotated[int, typer.Option(help="Width.")] = 256,
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
    from gradflow.stream_stack import stack_of

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
    d: Annotated[int, typer.Option(help="Width.")] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens of the state.")] = 32,
    token_cosine: Annotated[float, typer.Option(help="Cosine of every two tokens of the input.")] = 0.0,
    norm: Annotated[str, typer.Option(help="layernorm, rms, dyt or none.")] = "layernorm",
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


@app.command()
def compare(
    schemes: Annotated[
        list[str], typer.Argument(help="post-ln, pre-ln, pre-ln+final, deepnorm, b2t, mhc, …; or all, or streams.")
    ],
    block: Block = "attention,mlp:gelu",
    depth: Annotated[int, typer.Option(help="Blocks.")] = 24,
    d: Annotated[int, typer.Option(help="Width.")] = 512,
    norm: Annotated[str, typer.Option(help="layernorm, rms, dyt or none.")] = "layernorm",
    init: Init = "unit",
    final_norm: Annotated[bool, typer.Option("--final-norm", help="A norm after the last sub-layer, in all.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens; of one, attention is W_O W_V.")] = 1,
    token_cosine: Annotated[float, typer.Option(help="Cosine of every two tokens of the input.")] = 0.0,
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
    from gradflow import comparison_report, comparisons

    shell.check_plot(plot)
    options = {"norm": norm, "init": init, "final_norm": final_norm, "tokens": tokens, "seeds": seeds, "key": key}
    options |= {"token_cosine": token_cosine, "cotangent_cosine": cotangent_cosine}
    with shell.progress("measuring schemes") as progress:
        branches = shell.block(block, memory, memory_cosine)
        result = comparisons.compare(shell.rows(schemes), branches, depth, d, **options, dtype=dtype, progress=progress)
    shell.emit(result, comparison_report.table(result), as_json, plot)


for command in (spectrum, sweep, warmup, trainability, claims, what_if):
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
