"""`audit`: what happens to the gradient in a trained transformer, sub-layer by sub-layer, after its parity is shown."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import checks, precision, profiles
from gradflow.auditing import block_spectra, encoded
from gradflow.auditing.apart import Streams
from gradflow.auditing.contradictions import architecture_of
from gradflow.auditing.result import Audit
from gradflow.auditing.sinks import APART
from gradflow.auditing.streamed import Blocks, Progress
from gradflow.checkpoints import Checkpoint, Parity, against, gate, load, losses, tokens
from gradflow.checkpoints.families import plan_of
from gradflow.checkpoints.folder import read
from gradflow.checkpoints.loading import checked, has_head
from gradflow.checkpoints.memory import Run
from gradflow.factors import Profile
from gradflow.stack import Trajectory

COTANGENTS = ("gaussian", "pooled", "mlm", "next-token")


def audit(
    path: str | Path,
    text: str | Sequence[str] | None = None,
    *,
    ids: Sequence[Any] | None = None,
    target: str | Sequence[str] | None = None,
    target_ids: Sequence[Any] | None = None,
    cotangent: str | None = None,
    probes: int = 1,
    key: int = 0,
    reference: str | Path | None = None,
    memory: float | None = None,
    stream: bool | None = None,
    detached: bool = False,
    apart: str | None = "auto",
    spectrum: int | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Follow the gradient back through a trained transformer and name the sub-layer and the factor that lose it.

    The audited stack runs from the embedding (behind its norm, where it has one) to the last hidden state, a final norm included,
    in float64. The embedding and the head are outside: the head only makes a cotangent.

    Parameters
    ----------
    path : str or Path
        A folder as ``save_pretrained`` writes it: config.json, model.safetensors, tokenizer.json or vocab.txt.
    text : str or sequence of str
        Each text is a row of the profile. Several are padded to one batch; no figure counts the padding.
    ids : sequence of int, or of such sequences
        Token ids, in the place of ``text``, where the folder has no tokenizer.
    target, target_ids : str or ids, or a sequence of such
        What an encoder–decoder is to write for each text. Without it the decoder reads its start alone.
    cotangent : {"gaussian", "pooled", "mlm", "next-token"}
        What is sent back from the last hidden state h; by default ``"next-token"`` for a causal model with a head, and for an
        encoder–decoder with a target, else ``"gaussian"``. ``"gaussian"``: a standard Gaussian over all tokens. ``"pooled"``:
        the gradient of ⟨v, m/‖m‖⟩, where m is the mean of h over real tokens, so that m/‖m‖ is the sentence embedding, and
        v one standard Gaussian (d,) of ``key``, the same for all texts. ``"mlm"``: the gradient of the masked-token loss;
        15 % of a text's tokens, at least one and no special one, are masked, chosen by ``key``, and the loss is the mean
        cross-entropy of the checkpoint's own head there. The text is then run with its masks. ``"next-token"``: the gradient
        of the mean cross-entropy of every token but the first, and of every one of a target, as a causal model's own head
        foretells it.
    probes : int
        Gaussian cotangents, pooled in every ratio; of an encoder–decoder one.
    key : int
        What all randomness comes from.
    reference : str or Path, optional
        An ``.npz`` of outputs of these very weights, recorded elsewhere (`gradflow.checkpoints.against`).
    memory : float, optional
        The most that it may take, in GiB; by default nine tenths of what is free.
    stream : bool, optional
        Whether weights stay in the file, to be read block by block, forward and again on the way back, which gives the same
        factors and gains, but neither growth nor sinks nor spectra; ``None``: where all at once need more than ``memory``.
    detached : bool
        Hold the statistics of all the stack's norms constant in every Jacobian (`gradflow.profile`); the cotangent is the true
        gradient of its scalar all the same.
    apart : {"auto", "first", "sinks"} or None
        Tokens without which every figure is given a second time: the first of each text; the first and all whose stream's rms is
        above `auditing.sinks.RATIO` times the median token's at as many depths as a block has sub-layers; by default these where
        there are any such, else none.
    spectrum : int, optional
        How many of the largest singular values of each block's Jacobian, and of the whole stack's, to find.
    progress : callable, optional
        Called with blocks done and blocks in all where it streams, else with spectra.

    Returns
    -------
    Audit

    Raises
    ------
    ValueError
        For bad input, before a weight is read where that can be; the message names what is wrong and the way out.
    ParityError
        If the family's fixture, or ``reference``, is not reproduced: then there is no figure.
    """
    texts, given = _texts(text, ids)
    words, heard = ([], []) if target is None and target_ids is None else _texts(target, target_ids, "target")
    if cotangent is not None:
        checks.one_of("cotangent", cotangent, COTANGENTS)
    checks.integer("probes", probes, 1)
    checks.key(key)
    if apart is not None:
        checks.one_of("apart", apart, APART)
    if spectrum is not None:
        checks.integer("spectrum", spectrum, 1)
    rows, targets, cotangent = _readable(path, (texts, given), (words, heard), cotangent, probes)
    reader = checked(path, memory, Run(len(rows), max(row.size for row in rows + targets), probes), stream)
    asked = {"apart": apart not in (None, "auto"), "spectrum": spectrum is not None, "detached": detached}
    needed = next((name for name, given in asked.items() if given), None)
    if reader.streams and needed:
        raise ValueError(f"{needed}: needs all weights at once; leave it out, or take stream=False and memory enough")
    if reader.beside is not None and needed:
        raise ValueError(f"{needed}: is of one stack, and an encoder–decoder has two; leave it out")
    checkpoint = load(path, memory=memory, stream=reader.streams)
    if spectrum is not None:
        block_spectra.fits(spectrum, min(row.size for row in rows) * checkpoint.plan.d)
    parity = _gate(checkpoint.plan.fixture)
    if reference is not None:
        parity = against(checkpoint, reference)
    made = functools.partial(_made, Path(path), parity, texts)
    if checkpoint.encoder is not None:
        return _both(checkpoint, checkpoint.encoder, rows, targets, words, cotangent, key, made)
    run, places = rows, []
    if cotangent == "mlm":
        run, places = zip(*(losses.masked(checkpoint, row, key, n) for n, row in enumerate(rows)), strict=True)
    states, real = _batch(checkpoint, run)
    mask = None if real.all() else real
    if isinstance(checkpoint.weights, Blocks):
        weights = dataclasses.replace(checkpoint.weights, progress=progress).run(checkpoint.stack, states, mask)
        checkpoint, ways = dataclasses.replace(checkpoint, weights=weights), None
        with precision.scope("float64"):
            outs = checkpoint.behind(jnp.asarray(weights.out))
    else:
        way, outs = forward(checkpoint, states, real)
        ways = Streams.of(checkpoint, way, real, run, apart)
        del way
    sent, values = None, None
    if cotangent != "gaussian":
        values, sent = sent_back(checkpoint, outs, real, rows, list(places), cotangent, key)
    options: dict[str, Any] = {"mask": mask, "key": key, "probes": probes, "detached": detached}
    profile = profiles.profile(checkpoint, states, sent, **options)
    besides = None if ways is None else ways.apart(checkpoint, states, sent, **options)
    found = None
    if spectrum is not None:
        found = block_spectra.of(checkpoint, states, real, spectrum, key, progress)
    said = {"cotangent": cotangent, "masked": [where.tolist() for where in places] or None, "loss": _listed(values)}
    a = made(checkpoint, profile, run, run, said)
    parts = {"growth": ways and ways.growth, "sinks": ways.sinks if ways else (), "apart": besides, "spectra": found}
    return dataclasses.replace(a, **parts, architecture=architecture_of(checkpoint))


def _both(
    decoder: Checkpoint,
    encoder: Checkpoint,
    rows: list[np.ndarray],
    targets: list[np.ndarray],
    words: list[str],
    cotangent: str,
    key: int,
    made: Callable[..., Audit],
) -> Audit:
    """An encoder–decoder's audit: the decoder's, and beside it the encoder's of what the cross-attentions hand on."""
    sources, seen = _batch(encoder, rows)
    _, memories = forward(encoder, sources, seen, record=False)
    source = encoded.Encoded(decoder, encoder, sources, memories, None if seen.all() else seen)
    run = [decoder.shifted(row) for row in targets] or [np.array([decoder.plan.start])] * len(rows)
    states, real = _batch(decoder, run)
    outs, crossing = source.run(states, real)
    if cotangent == "gaussian":
        values, sent = None, losses.gaussian(states, real, key)
    else:
        everywhere = [np.arange(row.size) for row in targets]
        values, sent = sent_back(decoder, outs, real, targets, everywhere, cotangent, key)
    told = {"target": words, "target_ids": None if words else [row.tolist() for row in targets]}
    said = {"cotangent": cotangent, "masked": None, "loss": _listed(values)} | told
    a = made(decoder, source.profile(states, sent, None if real.all() else real, key), run, rows, said)
    arriving = crossing(sent)
    ratio = np.linalg.norm(arriving, axis=(1, 2)) / np.linalg.norm(sent, axis=(1, 2))
    said = {"cotangent": "the decoder's", "masked": None, "loss": None, "crossing": ratio.tolist()}
    return dataclasses.replace(a, encoder=made(encoder, source.encoder_profile(arriving, key), rows, rows, said))


def _listed(values: np.ndarray | None) -> list[float] | None:
    return None if values is None else values.tolist()


def _made(
    path: Path,
    parity: Parity,
    texts: list[str],
    checkpoint: Checkpoint,
    profile: Profile,
    run: Sequence[np.ndarray],
    ids: Sequence[np.ndarray],
    found: Mapping[str, Any],
) -> Audit:
    """An audit of what was ``run``, for what was given as ``ids``."""
    settings = {
        **profile.settings,
        "model": checkpoint.path.resolve().name,
        "family": checkpoint.family,
        "sizes": checkpoint.plan.sizes(),
        "text": texts,
        "tokens": [row.size for row in run],
        **found,
        "path": "embedding's output to last hidden state",
    }
    profile = dataclasses.replace(profile, settings={**profile.settings, "cotangent": found["cotangent"]})
    held = tuple(tuple(row.tolist()) for row in ids)
    return Audit(path, checkpoint.family, parity, profile, held, settings)


_gate = functools.cache(gate)  # one run of the fixture vouches for the code of this process


def _texts(text: Any, ids: Any, name: str = "text") -> tuple[list[str], list[Any]]:
    """Texts or rows of ids, one of them empty, as lists."""
    if ids is not None:
        if text is not None:
            raise ValueError(f"ids: stand in the place of {name}; give one of them")
        rows = ids if isinstance(ids, Sequence | np.ndarray) and len(ids) else [[]]
        return [], list(rows) if isinstance(rows[0], Sequence | np.ndarray) else [rows]
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, Sequence) or isinstance(texts, bytes) or not texts:
        raise ValueError(f"{name}: needs a sentence, or a list of them, got {text!r:.60}")
    return list(texts), []


Given = tuple[list[str], list[Any]]  # texts, or rows of ids


def _readable(
    path: Any, text: Given, target: Given, cotangent: str | None, probes: int
) -> tuple[list[np.ndarray], list[np.ndarray], str]:
    """Token ids of every text and target, and the cotangent; all that can be refused from config, header and tokenizer is,
    before a weight is read.
    """
    folder = read(path)
    family, plan = plan_of(folder.config)
    causal, headed = plan.attention.causal, has_head(family, plan, folder.files)
    targeted = any(target)
    encoded.refuse(plan, targeted, cotangent, probes)
    foretells = causal and headed and (plan.encoder is None or targeted)
    cotangent = cotangent or ("next-token" if foretells else "gaussian")
    if cotangent != "gaussian" and probes != 1:
        raise ValueError(f"probes: are Gaussian cotangents; leave it out with cotangent={cotangent!r}")
    if (cotangent == "mlm" and causal) or (cotangent == "next-token" and not causal):
        own = ("causal", "next-token") if causal else ("masked", "mlm")
        use = repr(own[1]) if headed else "'gaussian' or 'pooled': this checkpoint has no head"
        raise ValueError(f"cotangent: {cotangent!r} is no loss of a {own[0]} language model; use {use}")
    if cotangent in ("mlm", "next-token") and not headed:
        head = "a masked-language-model" if cotangent == "mlm" else "a language-model"
        raise ValueError(
            f"cotangent: {cotangent!r} needs {head} head, which this checkpoint lacks; use 'gaussian' or 'pooled'"
        )
    if cotangent == "mlm" and text[1]:
        raise ValueError("cotangent: 'mlm' chooses among a text's words; give text, not ids")
    each = []
    for texts, given in (text, target):
        rows = [tokens.encode(folder.path, text) for text in texts]
        each.append(rows + [tokens.checked(row, plan.vocab, plan.positions) for row in given])
    rows, targets = each
    for row in rows + targets:
        tokens.fits(row.size, plan.positions)
        if cotangent == "next-token" and row.size < 2 and not targets:
            raise ValueError("text: has one token, and 'next-token' needs one that follows; give a longer text")
    if targets and len(targets) != len(rows):
        raise ValueError(f"target: needs one for each of the {len(rows)} texts, got {len(targets)}")
    return rows, targets, cotangent


def _batch(checkpoint: Checkpoint, ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Embedded texts, padded to (texts, tokens, d), and which tokens are real."""
    lengths = np.array([row.size for row in ids])
    real = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(real.shape, checkpoint.plan.pad)
    padded[real] = np.concatenate(ids)
    with precision.scope("float64"):
        return np.stack([np.asarray(checkpoint.embed(row)) for row in padded]), real


def sent_back(
    checkpoint: Checkpoint,
    outs: jax.Array,
    real: np.ndarray,
    rows: Sequence[np.ndarray],
    places: list[np.ndarray],
    cotangent: str,
    key: int,
) -> tuple[np.ndarray | None, np.ndarray]:
    """The loss of each text (of a pooled embedding none) and its gradient in that text's output.

    ``rows`` are ids before anything was masked, ``places`` what was; of a causal model none.
    """
    if cotangent == "pooled":
        return None, np.stack([losses.pooled_gradient(out, seen, key) for out, seen in zip(outs, real, strict=True)])
    at = places or [np.arange(row.size - 1) for row in rows]
    labels = [row[where + (not places)] for row, where in zip(rows, at, strict=True)]
    return losses.at_places(checkpoint, outs, at, labels)


def forward(
    checkpoint: Checkpoint, states: np.ndarray, real: np.ndarray, record: bool = True
) -> tuple[Trajectory, jax.Array]:
    """The way forward of every text, with what enters each sub-layer where recorded, and last states, (texts, tokens, d)."""

    def run(x: jax.Array, seen: jax.Array) -> tuple[Trajectory, jax.Array]:
        weights = dataclasses.replace(checkpoint.weights, mask=None if real.all() else seen)
        way = checkpoint.stack.trace(weights, x, None, record)
        return way, checkpoint.behind(way.out, weights)

    with precision.scope("float64"):
        return jax.vmap(run)(jnp.asarray(states), jnp.asarray(real))
