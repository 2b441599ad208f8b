"""`warmup`: train the same small language model under one setting or several, and watch the factors while it learns."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradflow import precision
from gradflow.schemes import Scheme
from gradflow.training.data import Text, text_of
from gradflow.training.model import draw
from gradflow.training.results import TrainingRun, TrainingRuns
from gradflow.training.schedules import rates
from gradflow.training.settings import Settings, product
from gradflow.training.steps import Program, State
from gradflow.training.store import Arrays, Store

Progress = Callable[[int, int], None]
SAVE = 1.0  # seconds between two checkpoints: what a kill can cost
APART, EVALUATIONS = 100, (4, 24)  # steps between two, but so many of a run at least and at most
BATCHES = 16  # of either part of the text


def warmup(
    scheme: str | Scheme | Sequence[str | Scheme] = "post-ln",
    depth: int | Sequence[int] = 12,
    warmup: int | Sequence[int] = 0,
    *,
    lr: float | Sequence[float] = 3e-3,
    optimizer: str | Sequence[str] = "adam",
    norm: str | Sequence[str] = "layernorm",
    schedule: str = "constant",
    steps: int = 400,
    every: int = 10,
    seeds: int = 1,
    key: int = 0,
    block: Any = ("attention:causal", "mlp:relu"),
    d: int = 64,
    heads: int = 4,
    tokens: int = 64,
    batch: int = 16,
    init: str = "xavier",
    eps: float = 1e-5,
    b1: float = 0.9,
    b2: float = 0.98,
    weight_decay: float = 0.01,
    text: str | Path | None = None,
    out: str | Path | None = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> TrainingRun | TrainingRuns:
    """Train a causal byte-level language model under each setting, and follow its factors while it learns.

    ``scheme``, ``depth``, ``warmup``, ``lr``, ``optimizer`` and ``norm`` may be lists: then every combination is run, from the
    same key on the same batches.

    Parameters
    ----------
    scheme : str or Scheme
        A row of `gradflow.schemes`. Rows without an output norm, but with others, get a final norm. The multipliers of ReZero,
        SkipInit and LayerScale are learned; the other rows' stay as they start; Admin's ω is profiled on the first batch.
    depth, d, heads : int
        Blocks, width, attention heads.
    warmup : int
        Steps in which the learning rate rises linearly to ``lr``; 0 for none.
    lr : float
        The peak.
    optimizer : {"adam", "adamw", "radam", "sgd"}
        optax's; SGD's momentum is ``b1``.
    norm, eps : str, float
        What fills the scheme's slots, γ and b trainable.
    schedule : {"constant", "inverse-sqrt", "cosine"}
        What follows the warm-up. The original Transformer is ``"inverse-sqrt"`` with ``warmup=4000`` (1706.03762).
    steps, every : int
        Training steps, and how often one is watched.
    seeds, key : int
        Runs of each setting, and the integer that their randomness comes from (key, key + 1, …).
    block : str, Branch, or a sequence of them
        Branches of one block; attention must be causal. Matrices without biases.
    tokens, batch : int
        Length and number of sequences of a batch.
    init : {"unit", "xavier", "he", "gpt2", "torch"}
        Variance of the matrices, before the scheme's own gains.
    b1, b2, weight_decay : float
        The optimizer's.
    text : path, optional
        A file to learn from; by default the Python standard library's source. Every tenth 4 KiB are held out.
    out : path, optional
        A folder. Every run is a file there, written as it goes: the same call later takes a run up where it was killed, bit for
        bit as if it never had been, and only reports it when it is finished.
    dtype : {"float32", "float64"}
        Of all arrays.
    progress : callable, optional
        Called with (steps done, steps in all).

    Returns
    -------
    TrainingRun, or TrainingRuns where there are several.

    Raises
    ------
    ValueError
        For an argument out of range, a folder that holds a run of other settings, or where optax is missing.
    """
    options = {name: value for name, value in locals().items() if name in Settings.__dataclass_fields__}
    settings, varied = product(options, seeds)
    found = text_of(text, 2 * tokens)
    folder = None if out is None else Path(out)
    stores = [_store(folder, each, found, varied) for each in settings]
    total, runs = steps * len(settings), []
    for i, (each, store) in enumerate(zip(settings, stores, strict=True)):
        shown = progress and (lambda done, start=i * steps: progress(start + done, total))
        with precision.scope(each.dtype):
            runs.append(_train(each, found, store, shown))
        store.close()
    return runs[0] if len(runs) == 1 else TrainingRuns(tuple(runs))


def _store(folder: Path | None, settings: Settings, text: Text, varied: list[str]) -> Store:
    """The file of a run, named by all that a folder may vary; refused where it holds another."""
    facts = settings.to_dict() | {"text": text.name, "text_digest": text.digest, "unigram": text.unigram}
    facts["name"] = settings.name()
    if folder is None:
        path = None
    else:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"out: {str(folder)!r} is a file; name a folder")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / settings.file
    store = Store(path, facts)
    store.settings["name"] = settings.name(("scheme", *varied))
    return store


def _train(settings: Settings, text: Text, store: Store, progress: Callable[[int], None] | None) -> TrainingRun:
    """Take a run up where its store has it, and carry it to its end: the last step, or a loss that is not finite."""
    rate = rates(settings.schedule, settings.lr, settings.warmup, settings.steps)
    log = store.log()
    done = sum(len(row["loss"]) for row in log.values())
    if not _ended(log, settings.steps):
        for step, row in _stretches(settings, text, rate, store, done):
            log[step] = row
            if progress:
                progress(step + len(row["loss"]))
    return TrainingRun.from_log(store.settings, log, rate)


def _ended(log: dict[int, Arrays], steps: int) -> bool:
    last = log[max(log)] if log else None
    return last is not None and (max(log) + len(last["loss"]) == steps or not np.isfinite(last["loss"]).all())


def _stretches(settings: Settings, text: Text, rate: np.ndarray, store: Store, done: int) -> Any:
    """Stretches of steps from ``done`` on, each given out as a log row and its first step; committed as they come."""
    program, steps = settings.program, settings.steps
    train = jnp.asarray(text.train)
    fixed = {name: evaluation(program, part) for name, part in (("train", train), ("held_out", text.held_out))}
    state, data_key = initial(settings, train)
    state = restored(state, store.state())
    apart = between(steps, settings.every)
    pending: dict[int, Arrays] = {}
    saved = time.monotonic()
    while done < steps:
        count = min(settings.every, steps - done)
        state, losses, figures = program.stretch(state, train, data_key, jnp.asarray(rate), jnp.int32(count))
        row = {"loss": np.asarray(losses)[:count]} | {name: np.asarray(leaf) for name, leaf in figures.items()}
        step, done = done, done + count
        ended = done == steps or not np.isfinite(row["loss"]).all()
        if ended or done % apart == 0:
            row |= {name: np.asarray(program.loss(state.model, batches)) for name, batches in fixed.items()}
        pending[step] = row
        if ended or time.monotonic() - saved > SAVE:
            store.commit(pending, [np.asarray(leaf) for leaf in jax.tree.leaves(state)])
            pending, saved = {}, time.monotonic()
        yield step, row
        if ended:
            return


def initial(settings: Settings, train: Any) -> tuple[State, Array]:
    """The state at step 0, and the key of the batches."""
    program = settings.program
    model_key, data_key = jax.random.split(jax.random.key(settings.key))
    model, _ = draw(settings.stack, model_key, settings.tokens, program.batch(train, data_key, jnp.int32(0)))
    return program.start(model), data_key


def between(steps: int, every: int) -> int:
    """Steps from one evaluation to the next, a multiple of ``every``."""
    least, most = EVALUATIONS
    return every * max(1, round(np.clip(APART, steps / most, steps / least) / every))


def evaluation(program: Program, part: Any) -> Array:
    """The fixed batches of a part of the text, the same for all runs."""
    return jnp.stack([program.batch(jnp.asarray(part), jax.random.key(0), jnp.int32(i)) for i in range(BATCHES)])


def restored(state: State, leaves: list[np.ndarray] | None) -> State:
    """The state with a checkpoint's leaves."""
    if leaves is None:
        return state
    return jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(leaf) for leaf in leaves])
