"""Questions about training, each answered by runs of several seeds: `python benchmarks/training.py [NAME …] --out DIR`.

Writes docs/training/NAME.json (settings, losses, the lens's series) and NAME.png. Runs are kept in DIR, and taken up again.
--speed measures the price of the lens, --norms that of a norm.
"""

import argparse
import dataclasses
import inspect
import json
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import training_figures as figures

import gradflow
from gradflow import precision
from gradflow.training.data import text_of
from gradflow.training.results import TrainingRuns
from gradflow.training.run import initial
from gradflow.training.settings import Settings, product

DOCS = Path(__file__).resolve().parent.parent / "docs" / "training"
SIX = {"depth": 6, "seeds": 3}
DEEP = {"depth": 18, "seeds": 2}
RATES = [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
BOTH = SIX | {"scheme": ["post-ln", "pre-ln"], "warmup": 200}
# three times the 400 steps of "rates", each scheme at the rate that did best there
TUNED = {"depth": 6, "seeds": 2, "warmup": 200, "steps": 1200, "schedule": "cosine"}
# one file of the library, some 90 kB to learn from: 2,400 steps of 1,024 bytes read it 27 times
SMALL = TUNED | {"seeds": 3, "steps": 2400, "text": Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"}

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
    "rates": [BOTH | {"seeds": 2, "lr": RATES}],
    "norms": [BOTH | {"norm": ["layernorm", "rms"]}],
    "tuned": [TUNED | {"scheme": "post-ln", "lr": 3e-3}, TUNED | {"scheme": "pre-ln", "lr": 1e-2}],
    "small-text": [SMALL | {"scheme": "post-ln", "lr": 3e-3}, SMALL | {"scheme": "pre-ln", "lr": 1e-2}],
    "deep-remedies": [
        {"depth": 18, "seeds": 1, "scheme": ["admin-closed", "sandwich"], "warmup": 0},
        {"depth": 18, "seeds": 1, "scheme": "post-ln", "warmup": 400, "lr": 1e-3, "steps": 1200},
    ],
    "no-warm-up": [{"depth": 6, "seeds": 2, "scheme": "post-ln", "warmup": 0, "lr": RATES[3:]}],
}
KEPT = ("scheme", "depth", "optimizer", "norm", "lr", "warmup", "steps", "key")
APART = ("name", "labels", "normed", "equation", "rounded")  # of a run
OWN = {"rates": figures.rates, "norms": figures.norms, "small-text": figures.small_text}
DPI = {True: 110, False: 85}  # the others have six panels, in 400 kB


def folder(out, call):
    """Where a call's runs are: files there are named by what a folder may vary, which schedule, steps and text are not."""
    return out / "-".join(Path(str(call[k])).stem for k in ("schedule", "steps", "text") if k in call)


def run(name, out):
    """All runs of an experiment, named by what tells them apart."""
    runs = []
    for call in EXPERIMENTS[name]:
        into = folder(out, call)
        found = gradflow.warmup(**call, out=into)
        settings, _ = product({k: v for k, v in (defaults() | call).items() if k in defaults()}, call["seeds"])
        for r, each in zip(found.runs if isinstance(found, TrainingRuns) else [found], settings, strict=True):
            r.settings["text"] = Path(r.settings["text"]).name  # the machine's own folders stay out of the page
            if name == "norms":
                r.settings["rounded"] = gradflow.training.rounded(into / each.file, bits=(8, 4, 3))
            runs.append(r)
    several = [k for k in KEPT if len({r.settings[k] for r in runs}) > 1]
    for r in runs:
        words = {"depth": "{} blocks", "lr": "lr {:g}", "warmup": "warm-up {}", "steps": "{} steps", "key": "key {}"}
        r.settings["name"] = ", ".join(words.get(k, "{}").format(r.settings[k]) for k in several)
    return TrainingRuns(tuple(runs))


def rounded(values, digits=4):
    """Floats of few digits, what is undefined as None."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in np.asarray(values, float).tolist()]


def summary(r):
    """What a reader may want to hold against the prose."""
    p = r.profile
    own = {"rounded": {name: round(loss, 5) for name, loss in r.settings.get("rounded", {}).items()}}
    return {name: value for name, value in own.items() if value} | {
        "name": r.name,
        **{k: r.settings[k] for k in KEPT},
        "loss": round(r.final_loss, 4),
        "train": round(float(r.train[-1]), 4),
        "held_out": round(float(r.held_out[-1]), 4),
        "evaluated": {"steps": r.evaluated.tolist(), "train": rounded(r.train, 5), "held_out": rounded(r.held_out, 5)},
        "learns": r.learns,
        "diverged": r.diverged,
        "spikes": r.spikes.tolist(),
        "steps": r.steps.tolist(),
        "losses": rounded(r.loss[: r.loss.size // 10 * 10].reshape(-1, 10).mean(1)),
        "series": {k: rounded(v) for k, v in r.series.items()},
        "radius_gain_by_sublayer": {str(r.steps[i]): rounded(p.radius_gain[i]) for i in (0, len(r.steps) // 4, -1)},
        "weight_grad_by_sublayer": {str(r.steps[i]): rounded(p.weight_grad[i]) for i in (0, len(r.steps) // 4, -1)},
    }


def in_turn(settings, programs, pairs=40, clock=time.perf_counter):
    """Seconds of a stretch of each program, (programs, pairs): one after the other, so that a busy machine meets both."""
    times = [[] for _ in programs]
    text, key = jnp.asarray(text_of(None, 128).train), jax.random.key(0)
    with precision.scope("float32"):
        starts = [initial(each, text)[0] for each in settings]
        rate = jnp.full(settings[0].steps, 3e-3, jnp.float32)
        for turn in range(pairs + 1):
            for program, start, seconds in zip(programs, starts, times, strict=True):
                state = jax.tree.map(jnp.copy, start)
                jax.block_until_ready(state)
                began = clock()
                jax.block_until_ready(program.stretch(state, text, key, rate, jnp.int32(settings[0].every)))
                seconds += [clock() - began] if turn else []  # the first compiles
    return np.array(times)


def compared(names, times, every):
    """Steps per second of two programs, and their ratio."""
    first, second = (every / float(np.median(seconds)) for seconds in times)
    ratios = times[0] / times[1]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    print(
        f"6 blocks: {first:.1f} steps/s {names[0]}, {second:.1f} {names[1]}: {second / first:.3f} "
        f"(medians; pairs' ratio from {low:.2f} to {high:.2f}, median {middle:.3f})",
        flush=True,
    )


def norms():
    """Steps per second of processor time with RMSNorm over those with LayerNorm, without the lens."""
    for scheme in ("post-ln", "pre-ln"):
        settings, _ = product(defaults() | {"depth": 6, "scheme": scheme, "norm": ["layernorm", "rms"]}, 1)
        programs = [dataclasses.replace(each.program, lens=False) for each in settings]
        compared((f"{scheme} layernorm", "rms"), in_turn(settings, programs, 12, time.process_time), settings[0].every)


def speed():
    """Steps per second with the lens on every tenth step over those without it: ratio of medians, stretches in turn."""
    (each,), _ = product(defaults() | {"depth": 6}, 1)
    lens = each.program
    programs = dataclasses.replace(lens, lens=False), lens
    compared(("bare", "watched"), in_turn((each, each), programs), each.every)
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
    parser.add_argument("--norms", action="store_true", help="measure RMSNorm's price beside LayerNorm's instead")
    arguments = parser.parse_args()
    if arguments.speed or arguments.norms:
        return speed() if arguments.speed else norms()
    DOCS.mkdir(exist_ok=True)
    for name in arguments.names or EXPERIMENTS:
        runs = run(name, arguments.out)
        shared = {k: v for k, v in runs[0].settings.items() if k not in (*KEPT, *APART)}
        found = {"settings": shared, "verdict": runs.verdict, "runs": [summary(r) for r in runs.runs]}
        (DOCS / f"{name}.json").write_text(json.dumps(found, ensure_ascii=False, allow_nan=False) + "\n")
        picture = OWN[name](found) if name in OWN else runs.plot()
        picture.savefig(DOCS / f"{name}.png", dpi=DPI[name in OWN], metadata={"Software": None})
        print(f"== {name}\n{runs}", flush=True)


if __name__ == "__main__":
    main()
