"""A `WhatIf` as tables of at most 100 columns, and a sentence."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradflow.auditing import report as audit_report
from gradflow.counterfactuals.result import Case, WhatIf
from gradflow.report import grid, number

_NOTE = (
    "predicted: own directions of stream and gradient at the new lengths; measured: exact profile of the changed network; "
    "cos: of its last hidden state with the own one."
)
_PLACED = (
    "first/last: gradient at the first block over that at the last; stream: rms at the last block over that at the first. "
    "DeepNorm's α is of this depth; its gain on matrices at initialisation is not applied. {gains}"
)
_OTHER = "Each is another function of the same weights, not trained for it: none is a drop-in."
_GAINS = {
    "kept": "Norms in new places have γ = 1; branches still read through the γ that they were trained behind.",
    "unit": "Norms in new places have γ = 1; the γ of a norm that is taken away goes with it.",
}
SHARES_SHOWN = 3
_SHORT = {"attention": "attn", "final norm": "final", "projection": "proj"}


def table(w: WhatIf) -> Group:
    """What was run, a row a case, what it means."""
    own, *others = w.cases
    placed, edited = ([case for case in others if (case.edit is None) is kind] for kind in (True, False))
    notes, parts = [_NOTE], [audit_report.heading(w.audit), ""]
    several = f", geometric mean over {len(w.audit.ids)} texts" if len(w.audit.ids) > 1 else ""
    if placed:
        parts.append(
            _placements([own, *placed], f"Gradient gain end to end, the same weights in other placements{several}")
        )
        notes.append(_PLACED.format(gains=_GAINS[w.settings["gains"]]))
    if edited:
        parts.append(_edits([own, *edited], f"Gradient gain end to end, one part edited{several}"))
    notes += [_OTHER, _shares(w)]
    return Group(*parts, Text("\n".join(notes), style="dim"), "", Text(f"Verdict: {w.verdict}"))


def _shares(w: WhatIf) -> str:
    """The factors that are most to blame."""
    parts = w.audit.responsible[:SHARES_SHOWN]
    said = (f"{_least(part.label, part.factor)} × {part.gain:.3g} ({100 * part.share:.3g} %)" for part in parts)
    return f"Largest shares of the log of the own gain, of all factors: {', '.join(said)}."


def _least(label: str, factor: str) -> str:
    """A factor of a sub-layer, in short."""
    name = label.split(":")[0]
    words = [name] if name in _SHORT else name.split()
    return " ".join(_SHORT.get(word, word) for word in (*words, factor))


def _placements(cases: Sequence[Case], title: str) -> Table:
    rows = grid(title, ("", "predicted", "measured", "first/last", "least at", "", "stream", "loss", "cos"))
    for case in cases:
        worst, growth = case.worst, number(case.growth, 3)
        least = _least(worst.label, worst.factor)
        gains = [number(gain, 3) for gain in (*case.exact, case.first_to_last)]
        rows.add_row(case.name, *gains, least, number(worst.value, 3), growth, *_outcome(case))
    return rows


def _edits(cases: Sequence[Case], title: str) -> Table:
    rows = grid(title, ("", "predicted", "× own", "measured", "× own", "loss", "cos"))
    for case in cases:
        each = [number(value, 3) for gain in case.exact for value in (gain, gain / cases[0].exact[1])]
        rows.add_row(case.name, *each, *_outcome(case))
    return rows


def _outcome(case: Case) -> tuple[str, str]:
    """What it computes."""
    loss = "–" if case.loss is None else number(float(np.mean(case.loss)))
    return loss, number(float(np.mean(case.output_cosine)), 3)


def verdict(w: WhatIf) -> str:
    """What the network keeps, and what the case that is furthest from it would."""
    own, *others = w.cases
    said = f"{own.name} keeps {own.exact[1]:.4g} of the gradient"
    if not others:
        return f"{said}; nothing else was asked."
    logs: list[Any] = [abs(np.log(case.exact[1] / own.exact[1])) for case in others]
    most = others[int(np.argmax(logs))]
    parts = [said, f"the same weights under '{most.name}' {most.exact[1]:.4g}, where {most.exact[0]:.4g} was predicted"]
    errors = [abs(np.log(case.exact[0] / case.exact[1])) for case in others]
    parts.append(f"predictions are off by a factor of {np.exp(min(errors)):.3g} to {np.exp(max(errors)):.3g}")
    if own.loss is not None:
        rest = [float(np.mean(case.loss)) for case in others if case.loss is not None]
        parts.append(f"the loss goes from {np.mean(own.loss):.4g} to {min(rest):.4g} at best")
    return "; ".join(parts) + "."
