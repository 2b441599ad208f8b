"""Training under the lens: a small causal language model on any scheme's stack, and its factors while it learns.

    data → model, optimizers, schedules → watch, steps (jitted) → settings → run (loop, resume; store) → results → tables, figures
    run → map_run (first_step) → maps (boundaries) → map_report, map_figure

`gradflow.warmup` and `gradflow.trainability` are the public calls; `read` opens a stored run, `rounded` rounds its weights.
"""

from pathlib import Path
from typing import Any


def read(path: str | Path) -> Any:
    """A stored run, finished or not, as `gradflow.TrainingRun` (`gradflow.training.results.read`)."""
    from gradflow.training import results  # not at the top: the shell's --help passes here

    return results.read(path)


def rounded(path: str | Path, **options: Any) -> dict[str, float]:
    """Held-out loss of a stored run with its matrices rounded to few bits (`gradflow.training.rounding.losses`)."""
    from gradflow.training import rounding

    return rounding.losses(path, **options)
