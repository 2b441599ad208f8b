"""A saved audit as a baseline, and the check that holds a model against it: for CI, where a factor must not move unseen."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradflow import checks
from gradflow.auditing import audits
from gradflow.auditing.result import SCHEMA, VERSION, Audit
from gradflow.checkpoints.families import FAMILIES, plan_of
from gradflow.checkpoints.folder import read
from gradflow.factors import FACTORS, Profile
from gradflow.factors import safe_log as log
from gradflow.files import new_file, whole

ENDS = ("exact", "trunk")
SHAPE = ("depth", "hidden")  # what a model must share with its baseline for rows to be comparable
BAND = 0.05
END = "end to end"


class Move(NamedTuple):
    """A figure that left the band; ``sublayer`` is a row's label, or ``"end to end"``."""

    sublayer: str
    factor: str
    before: float
    now: float


class Figures(NamedTuple):
    """A profile's labels, and figure → log of its geometric mean over texts: (S,) for a factor, () for an end-to-end gain."""

    labels: tuple[str, ...]
    logs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Baseline:
    """A saved audit, checked.

    Attributes
    ----------
    file : Path
    model : Path
        The model's folder, as seen from the file's.
    family, sizes
        What the model was.
    call : mapping
        ``text`` or ``ids``, targets, ``cotangent``, ``probes`` and ``key``: with the model, all that an audit takes.
    ids : list
        Token ids of every text.
    figures, encoder : Figures, Figures or None
        The profile's, and those of an encoder beside it.
    """

    file: Path
    model: Path
    family: str
    sizes: Mapping[str, Any]
    call: Mapping[str, Any]
    ids: list[list[int]]
    figures: Figures
    encoder: Figures | None


@dataclass(frozen=True, repr=False)
class Check:
    """What moved between a baseline and an audit of now.

    Attributes
    ----------
    moved : tuple of Move
        Every figure with |log(now/before)| > ``band``, the largest change first.
    compared : int
        Figures that were compared.
    band : float
    same_ids : bool
        Whether the tokenizer still cuts the texts as it did.
    baseline : Baseline
    audit : Audit
        Of now.
    """

    moved: tuple[Move, ...]
    compared: int
    band: float
    same_ids: bool
    baseline: Baseline
    audit: Audit

    @property
    def passed(self) -> bool:
        """Whether nothing moved."""
        return not self.moved

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "passed": self.passed,
            "band": self.band,
            "compared": self.compared,
            "same_ids": self.same_ids,
            "moved": [move._asdict() for move in self.moved],
            "audit": self.audit.to_dict(),
        }

    def __str__(self) -> str:
        from gradflow import report
        from gradflow.auditing import report as audit_report

        return report.text(audit_report.check(self))

    __repr__ = __str__


def save(audit: Audit, path: str | Path) -> None:
    """Write an audit as JSON, the model's path relative to the file; an older file is replaced whole or not at all."""
    file = new_file("save", path, ".json")
    out, model = audit.to_dict(), audit.path.absolute()
    try:
        out["model"]["path"] = Path(os.path.relpath(model, file.absolute().parent)).as_posix()
    except ValueError:  # another drive
        out["model"]["path"] = model.as_posix()
    with whole(file) as fresh, fresh.open("x", encoding="utf-8") as stream:
        json.dump(out, stream, allow_nan=False, ensure_ascii=False)
        stream.write("\n")


def load(path: str | Path) -> Baseline:
    """Read a baseline as data and check all of it.

    Raises
    ------
    ValueError
        If it is no JSON, of another schema or version, incomplete, or holds what is no finite number.
    """
    file = Path(path)

    def constant(name: str) -> Any:
        raise ValueError(f"baseline: {file.name!r} holds {name}, which is no number; save the audit again")

    if not file.is_file():
        raise ValueError(f"baseline: no such file {str(path)!r}; 'gradflow audit … --save FILE' writes one")
    try:
        held = json.loads(file.read_text(encoding="utf-8"), parse_constant=constant)
    except OSError as error:
        raise ValueError(f"baseline: {file.name!r} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if str(error).startswith("baseline: "):
            raise
        raise ValueError(f"baseline: {file.name!r} is no JSON ({error}); save the audit again") from error
    stated = held.get("schema") if isinstance(held, dict) else None
    if stated != SCHEMA:
        raise ValueError(f"baseline: {file.name!r} has the schema {stated!r}, needs {SCHEMA!r}; save an audit")
    if held.get("version") != VERSION:
        raise ValueError(
            f"baseline: {file.name!r} is of version {held.get('version')!r}, this gradflow reads {VERSION}; save it again"
        )
    model, call = (_part(held, name, dict) for name in ("model", "call"))
    texts, ids = _part(call, "text", list), _part(held, "ids", list)
    by_ids = call.get("ids") is True
    if bool(texts) == by_ids or not (texts or ids) or not all(isinstance(text, str) for text in texts):
        raise ValueError("baseline: 'text' needs a list of texts; save the audit again")
    settings = {
        "text": None if by_ids else texts,
        "ids": ids if by_ids else None,
        "cotangent": checks.one_of("baseline: 'cotangent'", _part(call, "cotangent", str), audits.COTANGENTS),
        "probes": checks.integer("baseline: 'probes'", call.get("probes"), 1),
        "key": checks.key(call.get("key")),
        "detached": call.get("detached") is True,
    }
    settings |= {name: call[name] for name in ("target", "target_ids") if call.get(name)}
    return Baseline(
        file=file,
        model=file.parent / _part(model, "path", str),
        family=checks.one_of("baseline: 'family'", _part(model, "family", str), [row.name for row in FAMILIES]),
        sizes=_part(model, "sizes", dict),
        call=settings,
        ids=ids,
        figures=_figures(held, len(texts or ids)),
        encoder=_figures(_part(held, "encoder", dict), len(texts or ids)) if "encoder" in held else None,
    )


def check(baseline: str | Path, path: str | Path | None = None, band: float = BAND) -> Check:
    """Audit a model again as a baseline says, and compare every factor of every sub-layer and both end-to-end gains.

    Parameters
    ----------
    baseline : str or Path
        What `Audit.save` wrote.
    path : str or Path, optional
        The model's folder, where it is not the one that the baseline names.
    band : float
        Largest |log(now/before)| that counts as unmoved; of geometric means over texts.

    Raises
    ------
    ValueError
        For a bad baseline, or a model of another family, depth or width; before a weight is read.
    """
    checks.fraction("band", band)
    held = load(baseline)
    if path is None and not held.model.exists():
        raise ValueError(f"model: the baseline's {str(held.model)!r} does not exist; name the model's folder")
    source = held.model if path is None else path
    _comparable(held, source)
    now = audits.audit(source, **held.call, apart=None)
    moved, compared = _moved(held.figures, now.profile, band)
    if held.encoder is not None and now.encoder is not None:
        others, more = _moved(held.encoder, now.encoder.profile, band)
        moved, compared = (
            moved + [move._replace(sublayer=f"encoder {move.sublayer}") for move in others],
            compared + more,
        )
    moved.sort(key=lambda move: -abs(float(log(np.array(move.now))) - float(log(np.array(move.before)))))
    return Check(tuple(moved), compared, float(band), [list(row) for row in now.ids] == held.ids, held, now)


def _moved(held: Figures, now: Profile, band: float) -> tuple[list[Move], int]:
    """The figures of one stack that left the band, and how many were compared."""
    if now.labels != held.labels:
        raise ValueError(f"baseline: has the sub-layers {held.labels}, the model {now.labels}; save it again")
    moved = []
    for name, before in held.logs.items():
        values = log(getattr(now, name)).mean(0)
        values = values[:1] if name in ENDS else values
        rows = (END,) if name in ENDS else held.labels
        for row, b, v in zip(rows, np.atleast_1d(before), values, strict=True):
            if b != v and not abs(v - b) <= band:  # both −inf is no move
                moved.append(Move(row, name, float(np.exp(b)), float(np.exp(v))))
    return moved, len(FACTORS) * len(held.labels) + len(ENDS)


def _comparable(held: Baseline, source: str | Path) -> None:
    """Refuse a model of another family, depth or width by its config alone."""
    family, plan = plan_of(read(source).config)
    if family.name != held.family:
        raise ValueError(f"baseline: is of a {held.family} model, this one is {family.name}; save a baseline of it")
    found = plan.sizes()
    for name in SHAPE:
        if found[name] != held.sizes.get(name):
            raise ValueError(
                f"baseline: is of a model with {name} {held.sizes.get(name)!r}, this one has {found[name]}; "
                "save a baseline of it"
            )


def _part(held: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(held.get(name), kind):
        raise ValueError(f"baseline: {name!r} is missing or no {kind.__name__}; save the audit again")
    return held[name]


def _figures(held: Mapping[str, Any], texts: int) -> Figures:
    """What is compared of one stack's profile."""
    profile = _part(held, "profile", dict)
    labels = _part(profile, "labels", list)
    if not labels or not all(isinstance(label, str) for label in labels):
        raise ValueError("baseline: 'labels' needs a list of names; save the audit again")
    logs = {name: _figure(profile, name, (texts, len(labels))) for name in FACTORS}
    return Figures(tuple(labels), logs | {name: _figure(profile, name, (texts, len(labels) + 1))[0] for name in ENDS})


def _figure(profile: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Log of a figure's geometric mean over texts."""
    try:
        values = np.array(_part(profile, name, list), np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.empty(0)
    if values.shape != shape or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"baseline: {name!r} needs numbers of shape {shape}, finite and not negative; save it again")
    return log(values).mean(0)
