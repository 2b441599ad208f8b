"""Questions about warm-up, each answered by runs of several seeds: `python benchmarks/training.py [NAME …] --out DIR`.

Writes docs/training/NAME.json (settings, losses, the lens's series) and NAME.png. Runs are kept in DIR, and taken up again.
--speed measures the price of the lens.
"""

import argparse
import dataclasses
import inspect
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import gradflow
from gradflow import precision
from gradflow.training.data import text_of
from gradflow.training.model import draw
from gradflow.training.results import TrainingRuns
from gradflow.training.settings import Settings, product

DOCS = Path(__file__).resolve().parent.parent / "docs" / "training"
SIX = {"depth": 6, "seeds": 3}
DEEP = {"depth": 18, "seeds": 2}

# name -> calls of gradflow.warmup whose runs stand in one figure
EXPERIMENTS = {
    "warm-up": [SIX | {"scheme": ["post-ln", "pre-ln"], "warmup": [0, 200]}],
    "optimizers": [
        SIX | {"optimizer": ["adam", "radam"], "warmup": [0, 200]},
        SIX | {"optimizer": "sgd", "warmup": [0, 200], "lr": [0.03, 0.1, 0.3]},
    ],
    "remedies": [SIX | {"scheme": ["post-ln", "admin", "admin-closed", "deepnorm"], "warmup": 0}],
    "deep": [
        DEEP | {"scheme": ["post-ln", "pre-ln"], "warmup": [0, 200]},
        DEEP | {"scheme": ["admin", "deepnorm"], "warmup": 0},
        DEEP | {"scheme": "post-ln", "warmup": 200, "lr": [3e-4, 1e-3]},
    ],
}
KEPT = ("scheme", "depth", "optimizer", "lr", "warmup", "key")


def run(name, out):
    """All runs of an experiment, named by what tells them apart."""
    runs = []
    for call in EXPERIMENTS[name]:
        found = gradflow.warmup(**call, out=out, progress=lambda done, total: None)
        runs += found.runs if isinstance(found, TrainingRuns) else [found]
    several = [k for k in KEPT if len({r.settings[k] for r in runs}) > 1]
    for r in runs:
        words = {"depth": "{} blocks", "lr": "lr {:g}", "warmup": "warm-up {}", "key": "key {}"}
        r.settings["name"] = ", ".join(words.get(k, "{}").format(r.settings[k]) for k in several)
    return TrainingRuns(tuple(runs))


def rounded(values, digits=4):
    """Floats of few digits, what is undefined as None."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in np.asarray(values, float).tolist()]


def summary(r):
    """What a reader may want to hold against the prose."""
    p = r.profile
    return {
        "name": r.name,
        **{k: r.settings[k] for k in KEPT},
        "loss": round(r.final_loss, 4),
        "train": round(float(r.train[-1]), 4),
        "held_out": round(float(r.held_out[-1]), 4),
        "learns": r.learns,
        "diverged": r.diverged,
        "spikes": r.spikes.tolist(),
        "steps": r.steps.tolist(),
        "losses": rounded(r.loss[: r.loss.size // 10 * 10].reshape(-1, 10).mean(1)),
        "series": {k: rounded(v) for k, v in r.series.items()},
        "radius_gain_by_sublayer": {str(r.steps[i]): rounded(p.radius_gain[i]) for i in (0, len(r.steps) // 4, -1)},
        "weight_grad_by_sublayer": {str(r.steps[i]): rounded(p.weight_grad[i]) for i in (0, len(r.steps) // 4, -1)},
    }


def speed(pairs=40):
    """Steps per second with the lens on every tenth step over those without it: ratio of medians, stretches in turn."""
    (each,), _ = product(defaults() | {"depth": 6}, 1)
    lens = each.program
    programs, times = (lens, dataclasses.replace(lens, lens=False)), ([], [])
    text, key = jnp.asarray(text_of(None, 128).train), jax.random.key(0)
    rate = jnp.full(each.steps, 3e-3, jnp.float32)
    with precision.scope(each.dtype):
        model, _ = draw(each.stack, key, each.tokens, lens.batch(text, key, jnp.int32(0)))
        start = lens.start(model)
        for turn in range(pairs + 1):
            for program, seconds in zip(programs, times, strict=True):
                state = jax.tree.map(jnp.copy, start)
                jax.block_until_ready(state)
                began = time.perf_counter()
                jax.block_until_ready(program.stretch(state, text, key, rate, jnp.int32(each.every)))
                seconds += [time.perf_counter() - began] if turn else []  # the first compiles
    watched, bare = (float(np.median(seconds)) for seconds in times)
    ratios = np.array(times[1]) / np.array(times[0])
    print(
        f"6 blocks: {each.every / bare:.1f} steps/s bare, {each.every / watched:.1f} watched: {bare / watched:.3f} "
        f"(medians; pairs' ratio from {np.quantile(ratios, 0.25):.2f} to {np.quantile(ratios, 0.75):.2f}, median "
        f"{np.median(ratios):.3f})"
    )
    began, cpu = time.perf_counter(), time.process_time()
    gradflow.warmup(depth=6, warmup=200)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(
        f"the reference, 6 blocks and 400 steps, compilation and evaluations included: {wall:.0f} s, {cpu:.0f} s of CPU"
    )


def defaults():
    """Defaults of `gradflow.warmup` that are settings of a run."""
    parameters = inspect.signature(gradflow.warmup).parameters
    return {name: parameters[name].default for name in Settings.__dataclass_fields__}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*EXPERIMENTS, []], help="of: " + ", ".join(EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--speed", action="store_true", help="measure the lens's price instead")
    arguments = parser.parse_args()
    if arguments.speed:
        return speed()
    DOCS.mkdir(exist_ok=True)
    for name in arguments.names or EXPERIMENTS:
        runs = run(name, arguments.out)
        shared = {k: v for k, v in runs[0].settings.items() if k not in (*KEPT, "name", "labels", "normed", "equation")}
        found = {"settings": shared, "verdict": runs.verdict, "runs": [summary(r) for r in runs.runs]}
        (DOCS / f"{name}.json").write_text(json.dumps(found, ensure_ascii=False, allow_nan=False) + "\n")
        runs.plot(str(DOCS / f"{name}.png"))
        print(f"== {name}\n{runs}", flush=True)


if __name__ == "__main__":
    main()
