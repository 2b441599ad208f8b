"""`gradflow audit` and `gradflow check`: a trained network's texts to its audit, and what a model is held against."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from gradflow import shell
from gradflow.options import Html, Json, Key, Plot


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
    from gradflow.auditing import audits
    from gradflow.auditing import report as audit_report
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
        from gradflow.linting import architectures, lint

        result = lint.lint(architectures.read(file), max_ratio)
        shown = lint.table(result)
    else:
        from gradflow.auditing import baselines
        from gradflow.auditing import report as audit_report

        with shell.progress("auditing"):
            result = baselines.check(baseline, model, band)  # type: ignore[arg-type]
        shown = audit_report.check(result)
    shell.emit(result, shown, as_json, None)
    if not result.passed:
        raise typer.Exit(1)
