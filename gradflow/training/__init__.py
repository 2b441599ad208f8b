"""Training under the lens: a small causal language model on any scheme's stack, and its factors while it learns.

    data → model, optimizers, schedules → watch, steps (jitted) → settings → run (loop, resume; store) → results → tables, figures

`gradflow.warmup` is the public call; `read` opens a stored run.
"""

from gradflow.training.results import TrainingRun, TrainingRuns, read

__all__ = ["TrainingRun", "TrainingRuns", "read"]
