"""An audit's further tables in full, as columns of numbers: (caption, heads, rows), for its page."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from gradflow.auditing.sinks import RATIO
from gradflow.auditing.tables import depth, word

Rows = list[tuple[str, list[float]]]
Columns = tuple[str, tuple[str, ...], Rows]


def tables(a: Any) -> Iterator[Columns]:
    """Those that there is something to show in."""
    found = [sink for sink in a.sinks if sink.found]
    if found:
        rows: Rows = [
            (
                f"{word(s)} at {s.position} of text {s.text + 1}, largest behind {depth(a, s.at)}",
                [s.ratio, s.rms, s.count],
            )
            for s in found
        ]
        caption = f"Tokens whose stream's rms is above {RATIO:g} times the median token's; first tokens are set apart with them"
        yield caption, ("token", "largest ratio", "rms there", f"depths of {a.sublayers + 1}"), rows
    for name, growth in (("all tokens", a.growth), ("the other tokens", a.apart and a.apart.growth)):
        if growth is not None:
            yield _growth(a, name, growth)
    if a.spectra is not None:
        yield _spectra(a.spectra)


def _growth(a: Any, name: str, growth: Any) -> Columns:
    """One row a part."""
    S, blank = a.sublayers, np.nan
    updates = [blank, *growth.update_rms.mean(0)]
    cosines = [blank, *growth.update_cosine.mean(0), blank]
    rms, walk, share, size = (getattr(growth, each).mean(0) for each in ("rms", "walk", "share", "size"))
    labels = ["embedding", *a.profile.labels[:S]]
    rows: Rows = [
        (label, [updates[i], rms[i], walk[i], share[i], size[i], cosines[i] if i else blank])
        for i, label in enumerate(labels)
    ]
    if np.any(share[-1]):
        rows.append(("norms' biases", [blank, blank, blank, share[-1], size[-1], blank]))
    heads = ("part", "rms added", "stream's rms behind", "√(x₀² + Σ‖Δ‖²)", "share", "size", "cosine with next")
    return f"What each part is of the last stream, over {name}: share ⟨x_S, c⟩/‖x_S‖², size ‖c‖/‖x_S‖", heads, rows


def _spectra(s: Any) -> Columns:
    """One row a block, and the whole."""
    values, whole = s.values.mean(0), s.whole.mean(0)
    rows: Rows = [
        (f"block {l + 1}", [*row, rms, gap])
        for l, (row, rms, gap) in enumerate(zip(values, np.exp(s.log_rms).mean(0), s.gaps, strict=True))
    ]
    rows.append(("whole stack", [*whole, float(np.exp(s.log_whole_rms).mean()), s.whole_gap]))
    heads = ("Jacobian", *(f"σ{i + 1}" for i in range(len(whole))), "‖J‖_F/√n", "residual/σ")
    return "Largest singular values of each block's Jacobian and of the whole stack's", heads, rows
