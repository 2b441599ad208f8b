"""Parity: the hidden states of a checkpoint against those that another implementation computed.

``gate`` runs a family's own fixture through the code that a user's folder goes through; ``against`` takes outputs that a user
recorded from the very weights that are audited.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradflow import checks, recorded
from gradflow.checkpoints.loading import load
from gradflow.checkpoints.model import Checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
TOLERANCE = {"float64": 1e-5, "float32": 1e-4}
KEYS = ("ids", "text", "attention_mask", "hidden_states", "last_hidden_state")


class ParityError(ValueError):
    """The hidden states depart from the reference."""


@dataclass(frozen=True)
class Parity:
    """A comparison that held.

    Attributes
    ----------
    family : str
        Of the checkpoint.
    tested : str
        ``"family-tested"`` (a fixture of that family) or ``"weights-tested"`` (outputs of these weights).
    worst : float
        Largest error of an entry over the rms of its layer's reference state.
    tolerance : float
        What it was held to.
    states : int
        How many hidden states were compared, the embedding's output included.
    """

    family: str
    tested: str
    worst: float
    tolerance: float
    states: int


def gate(fixture: str, fixtures: Path = FIXTURES) -> Parity:
    """Run a fixture, a tiny model that transformers made, and hold every hidden state and the logits against transformers' own.

    ``fixture`` is a family's name, or that of a variant of it, as a plan's ``fixture`` says.

    Raises
    ------
    ParityError
        Naming the first layer that departs by more than 1e-5 of its rms.
    """
    checks.one_of("family", fixture, [folder.name for folder in fixtures.iterdir()])
    checkpoint, reference = load(fixtures / fixture), recorded.load(fixtures / fixture / "reference.npz")
    family, worst, tolerance = checkpoint.family, 0.0, TOLERANCE["float64"]
    states = [
        reference[name].swapaxes(0, 1) for name in ("hidden_states", "decoder_hidden_states") if name in reference
    ]
    for row, (ids, mask) in enumerate(zip(reference["ids"], reference["attention_mask"], strict=True)):
        text = checkpoint.ids(str(reference["text"][row]))
        _same_ids(family, text, ids[mask == 1])
        seen = None if mask.all() else mask
        found = (checkpoint.encoder or checkpoint).hidden_states(ids, seen)
        worst = max(worst, _worst(family, np.asarray(found), list(enumerate(states[0][row])), tolerance))
        if checkpoint.encoder is not None:
            heard, real = reference["decoder_ids"][row], reference["decoder_mask"][row]
            _same_ids(family, checkpoint.shifted(checkpoint.ids(str(reference["target"][row]))), heard[real == 1])
            found = checkpoint.reading(found[-1], seen).hidden_states(heard)
            worst = max(
                worst, _worst(f"{family}'s decoder", np.asarray(found), list(enumerate(states[1][row])), tolerance)
            )
        logits = np.asarray(checkpoint.logits(found[-1]))
        _error(f"{family}'s logits are", logits, reference["logits"][row], tolerance)
    return Parity(family, "family-tested", worst, tolerance, sum(held.shape[1] for held in states))


def against(checkpoint: Checkpoint, reference_file: str | Path) -> Parity:
    """Hold a checkpoint against outputs that were recorded from the same weights elsewhere.

    The file is an ``.npz`` with ``ids`` (tokens,) or ``text``, with ``hidden_states`` (layers + 1, tokens, d) or
    ``last_hidden_state`` (tokens, d) or both, and, where the ids hold padding, ``attention_mask`` (tokens,). A batch axis of
    length 1 is dropped. Of an encoder–decoder the ids or the text are the source's, ``decoder_ids`` (tokens,) what the decoder
    read, and the states the decoder's. Float64 outputs are held to 1e-5 of the state's rms, float32 outputs to 1e-4.

    Raises
    ------
    ParityError
        Naming the first layer that departs.
    ValueError
        If the file is missing, damaged, or its arrays do not fit the model.
    """
    arrays = recorded.load(reference_file, "reference")
    known = KEYS if checkpoint.encoder is None else (*KEYS, "decoder_ids")
    unknown = sorted(set(arrays) - set(known))
    if unknown:
        raise ValueError(f"reference: unknown array {unknown[0]!r}; known are {', '.join(known)}")
    if "decoder_ids" in known and "decoder_ids" not in arrays:
        raise ValueError("reference: needs 'decoder_ids' (tokens,), what the decoder read to come to these states")
    if not {"hidden_states", "last_hidden_state"} & set(arrays):
        raise ValueError("reference: needs 'hidden_states' (layers + 1, tokens, d) or 'last_hidden_state' (tokens, d)")
    ids = _row(arrays, "ids") if "ids" in arrays else checkpoint.ids(_text(arrays))
    mask = _row(arrays, "attention_mask") if "attention_mask" in arrays else None
    if checkpoint.encoder is not None:
        checkpoint = checkpoint.reading(checkpoint.encoder.hidden_states(ids, mask)[-1], mask)
        ids, mask = _row(arrays, "decoder_ids"), None
    found = np.asarray(checkpoint.hidden_states(ids, mask))
    wanted: list[tuple[int, np.ndarray]] = []
    precisions = set()
    for name, shape in (("hidden_states", found.shape), ("last_hidden_state", found.shape[1:])):
        if name in arrays:
            batched = (*shape[:-2], 1, *shape[-2:])
            if arrays[name].shape not in (shape, batched):
                raise ValueError(f"reference: {name!r} needs shape {shape}, got {arrays[name].shape}")
            precisions.add(arrays[name].dtype.name)
            states = checks.real_array(f"reference: {name!r}", arrays[name]).reshape(-1, *shape[-2:])
            wanted += zip(range(len(found) - len(states), len(found)), states, strict=True)
    if not precisions <= set(TOLERANCE):
        raise ValueError(f"reference: holds {', '.join(sorted(precisions))}; record it in float64, or float32")
    tolerance = max(TOLERANCE[name] for name in precisions)
    worst = _worst(checkpoint.family, found, wanted, tolerance)
    return Parity(checkpoint.family, "weights-tested", worst, tolerance, len(wanted))


def _worst(family: str, found: np.ndarray, wanted: list[tuple[int, np.ndarray]], tolerance: float) -> float:
    """Largest relative error over the states, in order; the first beyond the tolerance ends it."""
    worst = 0.0
    for layer, state in wanted:
        where = f"after layer {layer} of {len(found) - 1}" if layer else "of the embedding"
        worst = max(worst, _error(f"{family}'s hidden state {where} is", found[layer], state, tolerance))
    return worst


def _error(what: str, found: np.ndarray, wanted: np.ndarray, tolerance: float) -> float:
    """Largest error of an entry over the rms of what is wanted."""
    off, rms = float(np.max(np.abs(found - wanted))), float(np.sqrt(np.mean(wanted**2)))
    error = off / rms if rms > 0 else np.inf
    if not error <= tolerance:
        raise ParityError(f"parity: {what} off by {error:.2g} of its rms (at most {tolerance:g} is rounding)")
    return error


def _same_ids(family: str, found: np.ndarray, wanted: np.ndarray) -> None:
    if not np.array_equal(found, wanted):
        raise ParityError(f"parity: {family}'s tokenizer gives {found.tolist()}, transformers {wanted.tolist()}")


def _row(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    """One row of ids or of a mask."""
    row = arrays[name]
    row = row[0] if row.ndim == 2 and len(row) == 1 else row
    if row.ndim != 1 or row.dtype.kind not in "iub":
        raise ValueError(
            f"reference: {name!r} needs one row of whole numbers, got {row.dtype} of shape {arrays[name].shape}"
        )
    return row


def _text(arrays: dict[str, np.ndarray]) -> str:
    """The text, stored as an array of one string."""
    text = arrays.get("text")
    if text is None:
        raise ValueError("reference: needs 'ids', the token ids that were run, or 'text'")
    if text.dtype.kind != "U" or text.size != 1:
        raise ValueError(f"reference: 'text' needs one string, got {text.dtype} of shape {text.shape}")
    return str(text.reshape(()))
