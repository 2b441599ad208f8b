"""`what_if`: a trained network in other placements, and with single parts edited, on the very weights that it has."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import checks, precision, profiles
from gradflow.auditing import audits
from gradflow.auditing.attribution import remedies
from gradflow.auditing.result import Audit
from gradflow.checkpoints import Checkpoint, load
from gradflow.checkpoints.families import plan_of
from gradflow.checkpoints.folder import read
from gradflow.checkpoints.losses import gaussian
from gradflow.counterfactuals import foretelling
from gradflow.counterfactuals import placements as rewiring
from gradflow.counterfactuals.edits import Edit, edited
from gradflow.counterfactuals.result import Case, WhatIf
from gradflow.factors import Profile
from gradflow.schemes import Scheme
from gradflow.stack import Given, Stack

PLACEMENTS = ("pre-ln", "post-ln", "deepnorm", "sandwich")


def what_if(
    source: str | Path | Audit,
    text: str | Sequence[str] | None = None,
    schemes: Iterable[str | Scheme] | None = None,
    *,
    edits: int | Sequence[str | Edit] | None = None,
    gains: str = "kept",
    ids: Sequence[Any] | None = None,
    cotangent: str | None = None,
    key: int = 0,
    memory: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WhatIf:
    """Re-wire a trained network to other placements, or edit single parts of it, and say what its gradient would do.

    Every case is another function of the same weights: nothing is trained again, and what it computes is beside the gain, as
    loss and as cosine of its output with the network's own. Predicted: the own directions of stream and gradient at the lengths
    of the new network, with its norms' exact Jacobians there (`foretelling`). Measured: an exact profile of the new
    network, whose cotangent is that of its own loss.

    Parameters
    ----------
    source : path, or Audit
        A model as `gradflow.audit` reads it; or an audit, whose texts and cotangent are used again.
    text, ids, cotangent, key, memory
        As `gradflow.audit` takes them; not with an audit.
    schemes : sequence of str or Scheme
        Placements (`gradflow.schemes`); by default pre-ln, post-ln, deepnorm and sandwich, or none where there are edits. α, β
        and σ are the row's for this depth. Gains on matrices at initialisation, such as DeepNorm's, are not applied: the
        weights are what training made them.
    edits : int, or sequence of str or Edit
        `gradflow.counterfactuals.edits.Edit`, or as text: ``"3 mlp/gain"`` (γ even), ``"3 mlp/gain/1"``,
        ``"6 attention/branch/0.5"``, ``"6 attention/skip/1.4"``, ``"all/eps/1e-3"``. A number: that many, of the
        factors that are most to blame (`Audit.responsible`).
    gains : {"kept", "unit"}
        Norms in new places have γ = 1, b = 0. ``"kept"``: a branch still reads through the γ and b that it was trained behind,
        where their norm is taken away. ``"unit"``: they go with their norm.

    Returns
    -------
    WhatIf

    Raises
    ------
    ValueError
        For bad input, a parallel residual, or a placement that does not fit the weights; the message names it.
    """
    checks.one_of("gains", gains, rewiring.GAINS)
    count = checks.integer("edits", edits, 1) if isinstance(edits, int) else 0
    listed = [edits] if isinstance(edits, str) else [] if count or edits is None else edits
    wanted = [Edit.of(edit) for edit in listed]  # type: ignore[union-attr]
    if schemes is None:
        schemes = PLACEMENTS if edits is None else ()
    named = [schemes] if isinstance(schemes, str | Scheme) else schemes
    if isinstance(source, Audit):
        if any(value is not None for value in (text, ids, cotangent)):
            raise ValueError("text: an audit brings its text, ids and cotangent; leave them out")
        if source.settings["probes"] > 1:
            raise ValueError("source: an audit of several probes follows no single gradient; audit with probes=1")
        if source.settings.get("detached"):
            raise ValueError("source: a detached audit follows no gradient of the network; audit without detached")
    rows = [rewiring.checked(row) for row in named]
    rewiring.refuse(plan_of(read(source.path if isinstance(source, Audit) else source).config)[1].block)
    if not isinstance(source, Audit):
        source = audits.audit(source, text, ids=ids, cotangent=cotangent, key=key, memory=memory)
    a, labels = source, source.profile.labels
    for edit in wanted:
        if edit.what != "eps":
            edit.row(labels, a.settings["final_norm"])
    changes = [*rows, *wanted, *remedies(a.profile, count)]
    with precision.scope("float64"):
        bench = _Bench.of(a, load(a.path, memory=memory))
        cases = [bench.as_it_is()]
        for done, change in enumerate(changes):
            if progress is not None:
                progress(done, len(changes))
            if isinstance(change, Edit):
                cases.append(bench.edited(change))
            elif change.name != bench.checkpoint.stack.scheme.name:
                cases.append(bench.placed(change, gains))
    settings = {
        "text": a.settings["text"],
        "cotangent": a.settings["cotangent"],
        "key": a.settings["key"],
        "gains": gains,
    }
    return WhatIf(a, tuple(cases), settings | {"weight_gain": "not applied: the weights are as they were trained"})


@dataclass(frozen=True, eq=False)
class _Bench:
    """A checkpoint with what was run through it."""

    audit: Audit
    checkpoint: Checkpoint
    states: np.ndarray
    real: np.ndarray
    rows: list[np.ndarray]
    places: list[np.ndarray]
    outs: jax.Array
    losses: tuple[float, ...] | None
    ways: foretelling.Way

    @classmethod
    def of(cls, a: Audit, checkpoint: Checkpoint) -> "_Bench":
        """Run the network as it is once more."""
        s, run = a.settings, [np.array(row) for row in a.ids]
        states, real = audits._batch(checkpoint, run)
        rows = [checkpoint.ids(text) for text in s["text"]] if s["masked"] else run
        places = [np.array(where) for where in s["masked"] or ()]
        _, outs = audits.forward(checkpoint, states, real, record=False)
        bare = cls(a, checkpoint, states, real, rows, places, outs, None, None)  # type: ignore[arg-type]
        losses, sent = bare.sent(outs)
        if sent is None:
            sent = gaussian(states, real, s["key"])

        def one(x: jax.Array, sent: jax.Array, seen: jax.Array) -> foretelling.Way:
            return foretelling.way(checkpoint.stack, bare.seen(checkpoint.whole, seen), x, sent)

        ways = jax.vmap(one)(jnp.asarray(states), jnp.asarray(sent), jnp.asarray(real))
        return replace(bare, losses=losses, ways=ways)

    def seen(self, weights: Given, real: jax.Array) -> Given:
        """The weights with a text's padding marked."""
        return weights if self.real.all() else replace(weights, mask=real)

    def sent(self, outs: jax.Array) -> tuple[tuple[float, ...] | None, np.ndarray | None]:
        """Of each text the loss, where the head has one for it, and what is sent back; ``None``: a Gaussian."""
        s, model = self.audit.settings, self.checkpoint
        kind = s["cotangent"]
        causal = model.causal and model.head is not None and all(row.size > 1 for row in self.rows)
        of_loss = kind if self.places else "next-token" if causal else None
        values, gradient = None, None
        if of_loss:
            found, gradient = audits.sent_back(model, outs, self.real, self.rows, self.places, of_loss, s["key"])
            values = None if found is None else tuple(map(float, found))
        if kind == "gaussian":
            return values, None
        if kind == "pooled":
            gradient = audits.sent_back(model, outs, self.real, self.rows, [], kind, s["key"])[1]
        return values, gradient

    def as_it_is(self) -> Case:
        """The audit itself; what is foretold along its own way is what it measured."""
        p, scheme = self.audit.profile, self.checkpoint.stack.scheme
        return Case(f"{scheme.name} (own)", scheme.equation, True, None, p, p, self.losses, (1.0,) * len(self.rows))

    def placed(self, row: Scheme, gains: str) -> Case:
        """In another placement."""
        return self._case(
            row.name, row, None, *rewiring.rewired(self.checkpoint.stack, self.checkpoint.whole, row, gains)
        )

    def edited(self, edit: Edit) -> Case:
        """With one edit."""
        own = self.checkpoint.stack
        wired = rewiring.rewired(own, self.checkpoint.whole, own.scheme)
        return self._case(str(edit), own.scheme, edit, *edited(*wired, edit, self.audit.profile.labels))

    def _case(self, name: str, row: Scheme, edit: Edit | None, stack: Stack, weights: Given) -> Case:
        model = replace(self.checkpoint, stack=stack, weights=weights)
        _, outs = audits.forward(model, self.states, self.real, record=False)
        losses, sent = self.sent(outs)
        mask = None if self.real.all() else self.real
        measured = profiles.profile(model, self.states, sent, mask=mask, key=self.audit.settings["key"])
        settings = dict(measured.settings) | {"scheme": row.name, "equation": row.equation}

        def one(own: foretelling.Way, seen: jax.Array) -> Any:
            return foretelling.foretold(stack, self.seen(weights, seen), own)

        rows = jax.vmap(one)(self.ways, jnp.asarray(self.real))
        predicted = Profile.from_rows(jax.device_get(rows), profiles.labels(stack), settings | {"what": "predicted"})
        cosines = _cosines(np.asarray(outs), np.asarray(self.outs), self.real)
        return Case(name, row.equation, False, edit, predicted, replace(measured, settings=settings), losses, cosines)


def _cosines(one: np.ndarray, other: np.ndarray, real: np.ndarray) -> tuple[float, ...]:
    """Of each text: mean over its tokens."""
    each = np.sum(one * other, -1) / (np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1))
    return tuple(float(np.mean(row[seen])) for row, seen in zip(each, real, strict=True))
