"""What rounding costs a trained network: the held-out loss of a stored run with its matrices rounded to few bits."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gradflow import checks, precision
from gradflow.training.data import text_of
from gradflow.training.optimizers import matrices
from gradflow.training.run import evaluation, initial, restored
from gradflow.training.settings import Settings
from gradflow.training.store import Store

AXES = {"row": -1, "tensor": (-2, -1)}  # over which one step size is shared
MOST = 16


def rounded(w: Float[Array, "*k n m"], bits: int, per: str) -> Float[Array, "*k n m"]:
    """Symmetric rounding: s·round(W/s) with s = max|W|/(2^(bits − 1) − 1), of each row or of the whole matrix.

    No zero point, no outlier kept aside: the plainest of the roundings that Dettmers et al. 2022 (2208.07339) compare.

    Raises
    ------
    ValueError
        For bits outside 2 … 16, or another ``per``.
    """
    if checks.integer("bits", bits, 2) > MOST:
        raise ValueError(f"bits: needs a whole number from 2 to {MOST}, got {bits!r}")
    largest = jnp.max(jnp.abs(w), AXES[checks.one_of("per", per, AXES)], keepdims=True)
    step = largest / (2 ** (bits - 1) - 1)
    return step * jnp.round(w / jnp.where(step > 0, step, 1))


def losses(path: str | Path, bits: Sequence[int] = (8, 4), per: Sequence[str] = ("row", "tensor")) -> dict[str, float]:
    """Held-out loss of a finished run as it was trained, and with the matrices of its branches rounded.

    Embeddings, the unembedding, the norms' γ and b and the multipliers stay as they are; so does what is computed with.

    Parameters
    ----------
    path : str or Path
        A run's file, of those that ``gradflow.warmup(out=…)`` leaves.
    bits, per : sequences
        Roundings; every combination (`rounded`).

    Returns
    -------
    dict of str to float
        Nats a byte: ``"trained"``, and one such as ``"8 bits, row"`` for each rounding. The first is the run's own last
        ``held_out``.

    Raises
    ------
    ValueError
        If there is no such run, its text has changed, it was made of parts of one's own, or for a bad rounding.
    """
    if not Path(path).is_file():
        raise ValueError(f"path: no such file {str(path)!r}; runs are the .sqlite files in a folder that --out named")
    store = Store(Path(path))
    facts, leaves = store.settings, store.state()
    store.close()
    if leaves is None:
        raise ValueError(f"path: {str(path)!r} has no steps yet")
    settings = Settings.stored(facts, str(path))
    source = None if facts["text"] == text_of(None, 1).name else facts["text"]
    text = text_of(source, 2 * settings.tokens)
    if text.digest != facts["text_digest"]:
        raise ValueError(f"path: the text of {str(path)!r} ({text.name}) has changed since; give a run of this one")
    with precision.scope(settings.dtype):
        program = settings.program
        model = restored(initial(settings, jnp.asarray(text.train))[0], leaves).model
        batches = evaluation(program, text.held_out)
        found = {"trained": program.loss(model, batches)}
        for b in bits:
            for p in per:
                found[f"{b} bits, {p}"] = program.loss(_rounded(model, b, p), batches)
        return {name: float(loss) for name, loss in found.items()}


def _rounded(model: Any, bits: int, per: str) -> Any:
    weights = jax.tree.map(
        lambda leaf, matrix: rounded(leaf, bits, per) if matrix else leaf, model.weights, matrices(model.weights)
    )
    return replace(model, weights=weights)
