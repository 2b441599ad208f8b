"""What a run's factors say of why it learns or does not, in plain sentences."""

from collections.abc import Sequence

import numpy as np

from gradflow.report import number
from gradflow.training.results import TrainingRun, TrainingRuns


def outcome(run: TrainingRun) -> str:
    """Whether it learned."""
    done, unigram = run.loss.size, run.settings["unigram"]
    if run.diverged is not None:
        return f"diverges: the loss is not finite at step {run.diverged}, where the run ends"
    level = f"{run.final_loss:.3f} nats after {done} steps"
    if run.learns:
        return f"learns: {level}, below the {unigram:.3f} of the bytes' frequencies alone"
    if run.final_loss > run.loss[0] - 0.15:
        return f"does not learn: {level}, no lower than at the start ({run.loss[0]:.3f})"
    return f"fails: {level}, no lower than the bytes' frequencies alone ({unigram:.3f})"


def reason(run: TrainingRun) -> str:
    """The figures that matter most: what the first step did, and the least gain of the gradient on the way."""
    s = run.series
    worst = int(np.argmin(np.nan_to_num(s["exact"], nan=np.inf)))
    said = [
        f"Its first step moves the last stream by {number(100 * s['stream_move'][0], 3)} % and pre-activations by "
        f"{number(s['preactivation'][0], 2)} of η‖h‖₁.",
        f"1/‖u‖ goes from {number(s['radius_gain'][0], 3)} to {number(s['radius_gain'][-1], 3)}, the mean cosine of two tokens "
        f"of the last stream from {number(s['token_cosine'][0], 3)} to {number(s['token_cosine'][-1], 3)}.",
        f"The gradient's gain from output to input is {number(s['exact'][0], 3)} at first, least at step {run.steps[worst]} "
        f"({number(s['exact'][worst], 3)}), and {number(s['exact'][-1], 3)} at the end.",
    ]
    return " ".join(said)


def of_run(run: TrainingRun) -> str:
    """Outcome, and the figures behind it."""
    return f"{run.name} {outcome(run)}. {reason(run)}".strip()


def of_runs(runs: TrainingRuns) -> str:
    """Which learn, which do not, and which figure parts the two kinds."""
    good = [run for run in runs.runs if run.learns]
    bad = [run for run in runs.runs if not run.learns]
    if not bad or not good:
        best = min(runs.runs, key=lambda run: run.final_loss if run.diverged is None else np.inf)
        which = "All learn" if good else "None learns"
        return f"{which}; the lowest loss is {best.final_loss:.3f} nats ({best.name})."
    said = [f"Learning: {_names(runs, good)}. Not learning: {_names(runs, bad)}."]
    for name, words in PARTING.items():
        ends = [[_typical(run, name) for run in kind] for kind in (bad, good)]
        low, high = sorted(ends, key=np.median)
        if np.isfinite([*low, *high]).all() and max(low) < min(high):
            said.append(f"{words}: {_range(ends[0])} where it fails, {_range(ends[1])} where it learns.")
    return " ".join(said)


PARTING = {  # what may part them, mean over the last half of the watched steps
    "exact": "The gradient's gain from output to input",
    "radius_gain": "1/‖u‖",
    "token_cosine": "The mean cosine of two tokens of the last stream",
}


def _typical(run: TrainingRun, name: str) -> float:
    values = run.series[name][len(run.steps) // 2 :]
    return float(np.exp(np.mean(np.log(values)))) if name != "token_cosine" and values.size else float(np.mean(values))


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values), 3), number(max(values), 3)
    return low if low == high else f"{low} to {high}"


def _names(runs: TrainingRuns, kind: Sequence[TrainingRun]) -> str:
    """Their settings; how many keys of it, where not all."""
    found = []
    for name, group in runs.groups.items():
        n = sum(run in kind for run in group)
        if n:
            found.append(f"({name})" + f" in {n} of {len(group)}" * (n < len(group)))
    return ", ".join(found)
