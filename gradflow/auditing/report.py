"""An audit as a table and a sentence, every number of which is the measured profile's."""

from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradflow.auditing import tables as audit_tables
from gradflow.auditing.baselines import Check
from gradflow.auditing.result import Audit, C
from gradflow.branches.parallel import BETWEEN
from gradflow.factors import ENDS, Profile
from gradflow.report import grid, number, shown
from gradflow.verdicts import NOTHING, does, per_layer

MOVES_SHOWN = 24
_ON_NORM = ("affine", "projection", "norm")
_KINDS = {"mlp": "MLP", "glu": "gated MLP", "moe": "experts"}
_WORDS = {"affine": "γ", "projection": "the projection", "norm": "1/‖u‖", "skip": "the skip", "branch": "the branch"}
_NOTE = (
    "stream: rms of x as it enters; share: the branch's, ‖f‖/‖u‖, u = x + f(x), over all tokens; cos(x,u): mean over tokens; "
    "align: cosine of the arriving gradient with û; net: product of the factors{skip}; exact{trunk}: gain from the "
    "output back to the sub-layer's input."
)


def audit(a: Audit) -> Group:
    """One screen: what was run, the gains end to end, the factors of every sub-layer, the verdict; of an encoder too."""
    stacks: tuple = ("", _tables(a))
    if a.encoder is not None:
        stacks = (_crossing(a, a.encoder), "Decoder", _tables(a), "Encoder", _tables(a.encoder))
    parts: list[Any] = [heading(a), *stacks, _note(a)]
    if a.apart is not None:
        parts += ["", audit_tables.sinks(a), audit_tables.others(a)]
    if a.growth is not None:
        parts += [*([""] if a.apart is None else []), audit_tables.growth(a)]
    if a.spectra is not None:
        parts += [audit_tables.spectra(a)]
    below = audit_tables.findings(a)
    if below or isinstance(parts[-1], Text):  # a table ends with an empty line of its own
        below.append("")
    return Group(*parts, *below, Text(f"Verdict: {a.verdict}"))


def _tables(a: Audit) -> Group:
    return Group(_gains(a), _factors(a.profile, _norm_out(a)))


def _crossing(a: Audit, e: Audit) -> Text:
    """What the encoder is, and how much of the gradient comes to it."""
    gain = np.exp(np.mean(np.log(e.settings["crossing"])))
    lengths = ", ".join(map(str, e.settings["tokens"][:6])) + (", …" if len(e.ids) > 6 else "")
    said = (
        f"encoder: {e.settings['depth']} blocks, {e.sublayers} sub-layers · tokens = {lengths} · gradient: the sum of what "
        f"the decoder's {a.settings['depth']} cross-attentions hand on, {number(float(gain))} times that at the decoder's end"
    )
    return Text(said + "\n", style="dim")


def heading(a: Audit) -> Text:
    """Which model, on what, and what vouches for the figures."""
    s, parity = a.settings, a.parity
    lengths = ", ".join(map(str, s["tokens"][:6])) + (", …" if len(s["tokens"]) > 6 else "")
    probes = f" × {s['probes']} probes" if s["probes"] > 1 else ""
    parts = [
        f"{s['model']} ({a.family})",
        f"{s['depth']} blocks, {a.sublayers} sub-layers",
        f"d = {s['d']}",
        f"ε = {s['eps']:g}",
        f"tokens = {lengths}",
        f"cotangent: {s['cotangent']}{probes}",
        f"key {s['key']}",
        s["dtype"],
    ]
    if s["memory"] == "streamed":
        parts.append("streamed block by block")
    if s.get("detached"):
        parts.append("detached norms: σ held constant in every Jacobian")
    if s["loss"] is not None:
        parts.append(f"loss = {np.mean(s['loss']):.4g}")
    vouched = f"parity: {parity.tested} ({parity.states} states, off by {parity.worst:.1e} of their rms at most)"
    return Text(" · ".join(parts) + "\n" + vouched, style="dim")


def _gains(a: Audit) -> Table:
    """End-to-end gains beside the estimate."""
    p = a.profile
    several = (
        f", geometric mean over {len(a.ids)} {'texts' if a.settings['text'] else 'states'}" if len(a.ids) > 1 else ""
    )
    names = ("exact", "trunk", "local", "bound")
    table = grid(
        f"Gradient gain, last hidden state to embedding, over {_over(a)}{several}",
        ("", "exact", "trunk", "local", "bound ∏ (1 − c_j)/‖u_j‖", f"(1 − {C:g})^L"),
    )
    ends = [end(p, name) for name in names] + [a.closed_form]
    table.add_row("end to end", *map(number, ends))
    table.add_row("per sub-layer", *(number(gain ** (1 / a.sublayers)) for gain in ends))
    if a.apart is not None:
        table.add_row("end to end, other tokens", *(number(end(a.apart.profile, name)) for name in names), "")
    return table


def _over(a: Audit) -> str:
    """What the gains go over."""
    return f"{a.sublayers} sub-layers" + (" and a final norm" if a.settings["final_norm"] else "")


def end(p: Profile, name: str) -> float:
    """End-to-end gain of a cumulative curve, geometric mean over texts."""
    return float(np.exp(np.mean(getattr(p, f"log_{name}")[:, 0])))


def _factors(p: Profile, on_identity: bool) -> Table:
    """One row a sub-layer; the middle of a deep model is left out."""

    def mean(name: str) -> np.ndarray:
        return p.summary(name).mean

    columns = {
        "stream": mean("stream_rms"),
        "share": mean("branch_rms") / mean("sum_rms"),
        "cos(x,u)": mean("stream_cosine"),
        "align": mean("alignment"),
        "affine": mean("affine"),
        "proj": mean("projection"),
        "norm": mean("norm"),
        **({} if _unit_skip(p) else {"skip": mean("skip")}),
        "branch": mean("branch"),
        "net": mean("net"),
        "exact": mean("exact"),
        **({"trunk": mean("trunk")} if on_identity else {}),  # else it is the final norm's net everywhere
    }
    table = grid("Factors per sub-layer, input to output", ("", *columns))
    for i in shown(len(p.labels)):
        if i < 0:
            table.add_row("⋮")
            continue
        table.add_row(p.labels[i].split(":")[0], *(number(float(values[i]), 3) for values in columns.values()))
    return table


def _unit_skip(p: Profile) -> bool:
    return bool(np.all(p.skip == 1))


def _note(a: Audit) -> Text:
    skip = ", the skip's being 1 everywhere" if _unit_skip(a.profile) else ""
    trunk = ", trunk (F = 0)" if _norm_out(a) else ""
    return Text(_NOTE.format(skip=skip, trunk=trunk), style="dim")


def verdict(a: Audit) -> str:
    """Of one stack, or of decoder and encoder in turn."""
    return _verdict(a) if a.encoder is None else f"Decoder: {_verdict(a)} Encoder: {_verdict(a.encoder)}"


def _verdict(a: Audit) -> str:
    """Which block and factor lose most, what the branches return, and whether the argument's premise and conclusion hold."""
    p, S = a.profile, a.sublayers
    exact, trunk, bound = (end(p, name) for name in ("exact", "trunk", "bound"))
    estimate = np.log(a.closed_form)
    holds = exact > 0 and abs(np.log(exact) - estimate) < 0.25 * abs(estimate)
    says = (
        f"{'as' if holds else 'where'} (1 − {C:g})^{S} says {a.closed_form:.4g} and the argument's product {bound:.4g}"
    )
    whose = "With detached norms the gradient" if a.settings.get("detached") else "The gradient"
    parts = [
        f"{whose} keeps {exact:.4g} over {_over(a)} (trunk alone: {trunk:.4g}), {says}",
        _blame(a),
        _norms(a),
        _branch(per_layer(p, "branch") ** (len(p.labels) / S)),
        _premise(a),
        *audit_tables.stands_out(a),
        *audit_tables.grows(a),
    ]
    return "; ".join(parts) + "."


def _norm_out(a: Audit) -> bool:
    """Whether a sub-layer's own norm stands on the identity path; an empty slot's factors are 1 exactly."""
    return bool(np.any(a.profile.norm[:, : a.sublayers] != 1))


def _on_identity(a: Audit) -> slice:
    """The rows whose norm stands on the identity path: all of them, or the last one, or none."""
    if _norm_out(a):
        return slice(None)
    return slice(a.sublayers, None)


def _norms(a: Audit) -> str:
    """What the norms on the identity path take."""
    labels = a.profile.labels
    rows = labels[_on_identity(a)]
    if not rows:
        return "no norm stands on the identity path"
    each = {name: per_layer(a.profile, name) ** (len(labels) / len(rows)) for name in _ON_NORM}
    where = "per sub-layer" if len(rows) > 1 else "no norm but the final one stands on the identity path, where"
    return f"{where} {', '.join(f'{_WORDS[name]} {_short(gain)}' for name, gain in each.items())}"


def place(label: str) -> str:
    """'block 3's attention' from a row's label; 'the final norm'."""
    if label in ENDS:
        return f"the {label}"
    block, _, branch = label.partition(" ")
    kinds = (part.partition(":")[0] for part in branch.split(BETWEEN))
    return f"block {block}'s {' and '.join(_KINDS.get(kind, kind) for kind in kinds)}"


def _blame(a: Audit) -> str:
    w = a.worst
    if w.net > 1 - NOTHING:
        return f"no sub-layer loses: the least, {place(w.label)}, keeps {w.net:.4g}"
    return (
        f"the largest loss is at {place(w.label)}, which keeps {w.net:.4g}, by {_WORDS[w.factor]}, {w.value:.4g} there"
    )


def _short(gain: float) -> str:
    return does(gain).removesuffix(" per sub-layer")


def _branch(gain: float) -> str:
    if abs(gain - 1) < NOTHING:
        return "the branches return nothing"
    verb = "give back" if gain > 1 else "take another"
    return f"the branches, which the estimate leaves out, {verb} {100 * abs(gain - 1):.3g} %"


def _premise(a: Audit) -> str:
    x_u: Any = a.profile.stream_cosine
    x_u, align = x_u[:, : a.sublayers], np.asarray(a.profile.alignment)[:, _on_identity(a)]
    said = f"the premise, cos(x, u), is {x_u.min():.2f} to {x_u.max():.2f}"
    if not align.size:
        return said
    what = "what a detached norm leaves in" if a.settings.get("detached") else "what the projection acts on"
    return f"{said}; {what}, the gradient's cosine with u, is at most {align.max():.2f}"


def check(c: Check) -> Group:
    """What moved, or that nothing did."""
    against = f"{c.compared} figures against {c.baseline.file.name}, band ±{100 * c.band:g} % in the log"
    cut = [] if c.same_ids else [Text("The tokenizer cuts the texts otherwise than it did.", style="bold")]
    if c.passed:
        return Group(*cut, Text(f"Nothing moved: {against}"))
    table = grid("Moved, the largest change first", ("", "factor", "before", "now", "now/before"))
    for move in c.moved[:MOVES_SHOWN]:
        change = move.now / move.before if move.before else np.inf
        table.add_row(move.sublayer, move.factor, *(number(v) for v in (move.before, move.now, change)))
    if len(c.moved) > MOVES_SHOWN:
        table.add_row(f"and {len(c.moved) - MOVES_SHOWN} more")
    return Group(*cut, table, Text(f"{len(c.moved)} of {against}"))
