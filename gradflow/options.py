"""Options that several commands of the shell share."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Plot = Annotated[Path | None, typer.Option(help="Write a figure: FILE.png, .svg or .pdf.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page with charts and tables: FILE.html.")]
Key = Annotated[int, typer.Option(help="The integer that all randomness comes from.")]
FinalNorm = Annotated[bool, typer.Option("--final-norm", help="A norm after the last sub-layer.")]
Dtype = Annotated[str, typer.Option(help="float64 or float32.")]
Init = Annotated[str, typer.Option(help="unit, xavier, he, gpt2 or torch.")]
Block = Annotated[str, typer.Option(help="Branches of one block.")]
Width = Annotated[int, typer.Option(help="Width.")]
Norm = Annotated[str, typer.Option(help="layernorm, rms, dyt or none.")]
TokenCosine = Annotated[float, typer.Option(help="Cosine of every two tokens of the input.")]
Memory = Annotated[int | None, typer.Option(help="Tokens of cross-attention's memory.  [default: 32]")]
Heads = Annotated[int, typer.Option(help="Attention heads.")]
Batch = Annotated[int, typer.Option(help="Sequences of a batch.")]
Corpus = Annotated[Path | None, typer.Option(help="A file to learn from.  [default: the Python standard library]")]
Runs = Annotated[Path | None, typer.Option(help="A folder for the runs; the same command takes them up again.")]
MemoryCosine = Annotated[float | None, typer.Option(help="Cosine of every two of them.  [default: 0]")]
