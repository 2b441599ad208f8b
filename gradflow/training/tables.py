"""Training runs as tables of at most 100 columns."""

from collections.abc import Sequence

import numpy as np
from rich.console import Group
from rich.text import Text

from gradflow.report import grid, number
from gradflow.training.results import TrainingRun, TrainingRuns

SHOWN = 12  # watched steps in a table
DIGITS: dict[str, int] = dict.fromkeys(("weight_grad", "update_rms", "stream_move", "preactivation"), 2)


def heading(runs: Sequence[TrainingRun]) -> Text:
    """What all of these have in common, in a few lines."""
    each = [_facts(run) for run in runs]
    return Text(" · ".join(fact for fact in each[0] if all(fact in facts for facts in each)), style="dim")


def _facts(run: TrainingRun) -> list[str]:
    """What was run."""
    s = run.settings
    decay = f", weight decay {s['weight_decay']:g}" if s["optimizer"] == "adamw" else ""
    betas = f"momentum {s['b1']:g}" if s["optimizer"] == "sgd" else f"{s['b1']:g}, {s['b2']:g}{decay}"
    return [
        f"byte-level language model on {s['text']} ({s['text_digest']})",
        *(f"f = {s['branch']}", f"{s['norm']} (ε = {s['eps']:g})", f"init {s['init']}", f"{s['depth']} blocks"),
        *(f"d = {s['d']}", f"{s['heads']} heads", f"{s['batch']} sequences of {s['tokens']}"),
        *(f"{s['optimizer']}({betas})", f"{s['schedule']} schedule", f"{s['steps']} steps", s["dtype"]),
    ]


def run(r: TrainingRun) -> Group:
    """One row a watched step, then the losses on fixed batches and the verdict."""
    s, series = r.settings, r.series
    columns = (
        "step",
        "rate",
        "loss",
        "1/‖u‖",
        "cos tok",
        "exact",
        "trunk",
        "bound",
        "dW 1:L",
        "update",
        "moved",
        "pre-act",
    )
    shown = grid(f"{s['scheme']}, {s['equation']}, lr {s['lr']:g}, warm-up {s['warmup']}, key {s['key']}", columns)
    for i in _spread(len(r.steps)):
        step = int(r.steps[i])
        figures = ("radius_gain", "token_cosine", "exact", "trunk", "bound", "weight_grad", "update_rms", "stream_move")
        cells = [number(float(series[name][i]), DIGITS.get(name, 3)) for name in (*figures, "preactivation")]
        shown.add_row(str(step), number(float(r.rate[step]), 3), f"{r.loss[step]:.3f}", *cells)
    return Group(heading([r]), "", shown, *map(Text, [*_losses(r), NOTE]), "", Text(f"Verdict: {r.verdict}"))


NOTE = (
    "1/‖u‖: geometric mean over the norms on the identity path. cos tok: mean cosine of two tokens of the last stream. exact, "
    "trunk, bound: gain, output to input. dW 1:L: weight gradient of the first sub-layer over that of the last. update: rms of "
    "the optimizer's direction. moved: what the step does to the last stream, relative. pre-act: its move of a pre-activation "
    "over η‖h‖₁."
)


def _losses(r: TrainingRun) -> list[str]:
    if not r.evaluated.size:
        return []
    n = r.evaluated.size
    quarters = sorted({-(-n * part // 4) - 1 for part in (1, 2, 3, 4)})
    each = [f"step {r.evaluated[i]}: {r.train[i]:.3f}, {r.held_out[i]:.3f}" for i in quarters]
    spikes = f" Spikes of the loss: {len(r.spikes)}." if len(r.spikes) else ""
    return [f"Losses on fixed batches, training text and held out, after {'; '.join(each)}.{spikes}"]


def _spread(n: int) -> list[int]:
    """At most `SHOWN` of n, dense at the beginning, with the first and the last."""
    if n <= SHOWN:
        return list(range(n))
    return sorted({0, 1, 2, 3, *np.geomspace(4, n - 1, SHOWN - 4).round().astype(int).tolist()})


def runs(c: TrainingRuns) -> Group:
    """One row a setting, means over its keys."""
    several = len(c) > len(c.groups)
    columns = ("", *(("learn", "loss", "±") if several else ("loss",)), "held", "1/‖u‖", "exact", "least", "cos tok")
    shown = grid(f"Loss in nats a byte ({c[0].settings['unigram']:.3f}: their frequencies alone)", columns)
    for name, group in c.groups.items():
        shown.add_row(name, *_row(group, several))
    keys = "Means over keys, gains' geometric; ±: standard deviation. " if several else ""
    notes = [
        f"{keys}loss: of the last 50 steps. held: held out, at the end, on fixed batches. 1/‖u‖, exact (gain of the gradient, "
        "output to input) and cos tok (mean cosine of two tokens of the last stream): at the end. least: of exact, on the way."
    ]
    return Group(heading(c.runs), "", shown, *map(Text, notes), "", Text(f"Verdict: {c.verdict}"))


def _row(group: Sequence[TrainingRun], several: bool) -> list[str]:
    losses = [r.final_loss for r in group]
    loss = f"{np.mean(losses):.3f}" if np.isfinite(losses).all() else "diverges"
    spread = f"{np.std(losses, ddof=1):.3f}" if len(group) > 1 and np.isfinite(losses).all() else "–"
    learn = [f"{sum(r.learns for r in group)}/{len(group)}", loss, spread] if several else [loss]
    held = [r.held_out[-1] for r in group if r.held_out.size]
    rows = []
    for r in group:
        s = r.series
        rows.append([s["radius_gain"][-1], s["exact"][-1], np.nanmin(s["exact"]), s["token_cosine"][-1]])
    with np.errstate(divide="ignore", invalid="ignore"):
        means = [*np.exp(np.mean(np.log(rows), 0))[:-1], np.mean(rows, 0)[-1]]
    return [*learn, f"{np.mean(held):.3f}" if held else "–", *(number(float(value), 2) for value in means)]
