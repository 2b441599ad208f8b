"""`gradflow what-if`: a checkpoint's weights in other placements, or with edits."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gradflow import shell
from gradflow.options import Json, Key


def what_if(
    path: Annotated[Path, typer.Argument(help="A model's folder or GGUF file, as 'gradflow audit' reads it.")],
    text: Annotated[list[str] | None, typer.Option(help="A text; give it again for each further one.")] = None,
    ids: Annotated[str | None, typer.Option(help="Token ids in the place of a text.")] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="A placement; again for each further.  [default: pre-ln, post-ln, deepnorm, sandwich]"),
    ] = None,
    edit: Annotated[
        list[str] | None, typer.Option(help="'3 mlp/gain/1', '3 mlp/branch/0.5', '3 mlp/skip/1.4', 'all/eps/1e-3'.")
    ] = None,
    remedies: Annotated[int | None, typer.Option(help="Edit that many of the factors most to blame.")] = None,
    gains: Annotated[str, typer.Option(help="kept, or unit: γ of a norm goes with it.")] = "kept",
    cotangent: Annotated[str | None, typer.Option(help="gaussian, pooled, mlm or next-token.")] = None,
    key: Key = 0,
    memory: Annotated[float | None, typer.Option(help="Most that it may take, in GiB.")] = None,
    as_json: Json = False,
) -> None:
    """The gradient of the same weights in other placements, or with single edits: predicted and measured.

    Every one is another function, whose loss is shown beside; nothing is trained again.
    """
    if edit and remedies is not None:
        raise ValueError("edit: name edits, or let --remedies choose them; give one of the two")
    row = None if ids is None else [shell.numbers("ids", ids.replace(" ", ","), int)]
    if not text and row is None:
        raise ValueError('text: give --text "a sentence" (again for each further one), or --ids')
    from gradflow.counterfactuals import report as what_if_report
    from gradflow.counterfactuals import run as counterfactuals

    options: dict[str, Any] = {"ids": row, "cotangent": cotangent, "key": key, "memory": memory, "gains": gains}
    with shell.progress("re-wiring") as progress:
        edits = edit or remedies
        result = counterfactuals.what_if(path, text or None, scheme or None, edits=edits, progress=progress, **options)
    shell.emit(result, what_if_report.table(result), as_json, None)
