"""What an audit says beside its factors: tokens that stand out, the stream's growth and parts, spectra, contradictions."""

from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from gradflow.auditing.growth import Growth
from gradflow.auditing.sinks import RATIO, Sink
from gradflow.report import grid, number, shown

SINKS_SHOWN, VALUES_SHOWN, FINDINGS_SHOWN = 6, 5, 4
DEPARTS = 0.05  # of an exponent from 1/2 that is worth a word, where its error is smaller


def sinks(a: Any) -> Table:
    """Tokens that stand out, the largest first, and where."""
    found = sorted((sink for sink in a.sinks if sink.found), key=lambda sink: -sink.ratio)
    table = grid(
        f"Tokens whose stream's rms is above {RATIO:g} × the median token's (first tokens are set apart too)",
        ("token", *(("text",) if len(a.ids) > 1 else ()), "position", "behind", "largest ratio", "rms", "behind"),
    )
    for sink in found[:SINKS_SHOWN]:
        text = (str(sink.text + 1),) if len(a.ids) > 1 else ()
        where = f"{depth(a, sink.first)} to {depth(a, sink.last)}, {sink.count} of {a.sublayers + 1}"
        cells = (where, number(sink.ratio), number(sink.rms), depth(a, sink.at))
        table.add_row(word(sink), *text, str(sink.position), *cells)
    if len(found) > SINKS_SHOWN:
        table.add_row(f"and {len(found) - SINKS_SHOWN} more")
    return table


def word(sink: Sink, width: int = 16) -> str:
    """The token in quotes, or nothing where no tokenizer tells."""
    if sink.token is None:
        return "–"
    said = repr(sink.token)
    return said if len(said) <= width else f"{said[: width - 2]}…'"


def depth(a: Any, l: int) -> str:
    """The sub-layer that the stream at depth l is behind."""
    return a.profile.labels[l - 1].split(":")[0] if l else "embedding"


def _kinds(a: Any) -> list[str]:
    """What the branches of a block are called, in few letters."""
    labels = a.profile.labels[: a.sublayers // a.settings["depth"]]
    names = [label.partition(" ")[2].split(":")[0].split("|")[0] for label in labels]
    return ["att" if name == "attention" else name for name in names]


def others(a: Any) -> Table:
    """One row a block, over the other tokens; what is a gain is the product over its sub-layers."""
    p, kinds = a.apart.profile, _kinds(a)
    S, size = a.sublayers, len(kinds)
    mean = {
        n: p.summary(n).mean for n in ("stream_rms", "branch_rms", "sum_rms", "alignment", "branch", "net", "exact")
    }
    share = mean["branch_rms"] / mean["sum_rms"]
    on_norm = ("align",) if mean["alignment"][:S].any() else ()
    table = grid(
        "Over the other tokens, by block (the gradient is the whole network's; exchange is in 'branch')",
        ("", "stream", *(f"share {kind}".strip() for kind in kinds), *on_norm, "branch", "net", "exact"),
    )
    for l in shown(S // size):
        if l < 0:
            table.add_row("⋮")
            continue
        at = slice(l * size, (l + 1) * size)
        gains = [float(np.prod(mean[name][at])) for name in ("branch", "net")]
        align = [mean["alignment"][at].max()] if on_norm else []
        cells = [mean["stream_rms"][at][0], *share[at], *align, *gains, mean["exact"][at][0]]
        table.add_row(str(l + 1), *(number(float(v), 3) for v in cells))
    return table


def growth(a: Any) -> Table:
    """One row a block: the stream behind it, and each of its updates in the last stream."""
    g: Growth = a.growth if a.apart is None else a.apart.growth
    S, size = a.sublayers, a.sublayers // a.settings["depth"]
    kinds = _kinds(a)
    share, large, cosine = g.share.mean(0), geometric(g.size), g.update_cosine.mean(0)
    columns = [f"share {kind}".strip() for kind in kinds] + [f"size {kind}".strip() for kind in kinds]
    rms = {"rms": geometric(a.growth.rms)} | ({} if a.apart is None else {"others": geometric(g.rms)})
    rms |= {} if g.reset else {"√Σ‖Δ‖²": geometric(g.walk)}
    of = "the last stream" if a.apart is None else "the others' last stream"
    table = grid(
        f"Each block in {of}: share ⟨x_S, c⟩/‖x_S‖², size ‖c‖/‖x_S‖, cos to next",
        ("", *rms, *columns, *(f"cos {kind}".strip() for kind in kinds)),
    )
    first = [number(float(v[0]), 3) for v in rms.values()]
    blank = [""] * (size - 1)
    table.add_row(
        "embedding", *first, number(float(share[0]), 3), *blank, number(float(large[0]), 3), *blank, *[""] * size
    )
    for l in shown(S // size):
        if l < 0:
            table.add_row("⋮")
            continue
        at = np.arange(l * size, (l + 1) * size)
        cells = [v[at[-1] + 1] for v in rms.values()] + [*share[at + 1], *large[at + 1]]
        cells += [cosine[i] if i < len(cosine) else np.nan for i in at]
        table.add_row(str(l + 1), *(number(float(v), 3) for v in cells))
    if np.any(share[-1]):
        table.add_row("biases", *[""] * len(rms), number(float(share[-1]), 3), *blank, number(float(large[-1]), 3))
    return table


def spectra(a: Any) -> Table:
    """The largest singular values of every block and of the whole."""
    s = a.spectra
    values, whole, top = geometric(s.values), geometric(s.whole), s.values.shape[-1]
    picks = range(top) if top <= VALUES_SHOWN + 1 else [*range(VALUES_SHOWN), top - 1]
    table = grid(
        f"Largest singular values of each block's Jacobian and of the whole ({s.pairs} pairs of products each)",
        ("", *(f"σ{i + 1}" for i in picks), "‖J‖_F/√n", "residual/σ"),
    )
    rms = geometric(np.exp(s.log_rms))
    for l in shown(len(values)):
        if l < 0:
            table.add_row("⋮")
            continue
        cells = [*values[l][list(picks)], rms[l]]
        table.add_row(f"block {l + 1}", *(number(float(v)) for v in cells), f"{s.gaps[l]:.1e}")
    cells = [*whole[list(picks)], geometric(np.exp(s.log_whole_rms))]
    table.add_row("whole stack", *(number(float(v)) for v in cells), f"{s.whole_gap:.1e}")
    return table


def findings(a: Any) -> list[Any]:
    """What contradicts what, errors first."""
    if not a.findings:
        return []
    rows = Table.grid(padding=(0, 1, 0, 0))
    for finding in a.findings[:FINDINGS_SHOWN]:
        style = "bold" if finding.level == "error" else ""
        rows.add_row(Text(finding.level, style), Text(finding.key, style), Text(finding.text))
    return [Text("Architecture, as 'gradflow check' has it:", style="bold"), rows]


def stands_out(a: Any) -> list[str]:
    """For the verdict: that some tokens rule the figures, and what is left without them."""
    found = [sink for sink in a.sinks if sink.found]
    if not found or a.apart is None:
        return []
    largest, several = max(found, key=lambda sink: sink.ratio), len(found) > 1
    who = f"{len(found)} tokens stand out" if several else "one token stands out"
    token = "" if largest.token is None else f" {word(largest)}"
    alone, every = (float(np.exp(p.log_exact[:, 0].mean())) for p in (a.apart.profile, a.profile))
    return [
        f"{who} ({'the largest, ' if several else ''}token {largest.position}{token}, has {number(largest.ratio, 3)} times the "
        f"median token's rms behind {depth(a, largest.at)}): over the other tokens the gradient keeps {alone:.4g} "
        f"where over all it keeps {every:.4g}"
    ]


def grows(a: Any) -> list[str]:
    """For the verdict: where the stream does not grow as the root of depth, or whose it is in the end."""
    if a.growth is None:
        return []
    g: Growth = a.growth if a.apart is None else a.apart.growth
    whose = "the other tokens' stream" if a.apart is not None else "the stream"
    share, kept = float(g.share[:, 0].mean()), float(g.kept.mean())
    if g.reset:
        return [
            f"of {whose} that leaves, the embedding is {_percent(share)} (orthogonal updates would leave {_percent(kept)})"
        ]
    p, se = float(g.exponent.mean()), float(np.sqrt(np.mean(g.exponent_se**2)))
    if not abs(p - 0.5) > max(DEPARTS, 2 * se):
        return []
    ratio = float(geometric(g.rms)[-1] / geometric(g.walk)[-1])
    return [
        f"{whose} grows as l^{p:.2f} (± {se:.2f}), where independent updates of one size give l^0.5: its rms is "
        f"{number(ratio, 3)} times what orthogonal updates of these sizes add up to"
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def geometric(values: np.ndarray) -> np.ndarray:
    """Geometric mean over texts."""
    with np.errstate(divide="ignore"):
        return np.exp(np.mean(np.log(values), 0))
