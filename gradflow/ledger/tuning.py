"""Measures read off docs/training's runs over learning rates and norms (`benchmarks/training.py`)."""

from pathlib import Path

import numpy as np
from scipy.special import stdtrit

from gradflow.ledger.claim import Figure
from gradflow.ledger.trained import Figures, Run, over, runs

WITHIN = 0.1  # nats above the best


def _rates(root: Path, scheme: str) -> dict[float, list[Run]]:
    """Runs of 6 blocks by their peak rate."""
    found = runs(root, "rates", scheme=scheme)
    return {lr: [r for r in found if r["lr"] == lr] for lr in sorted({r["lr"] for r in found})}


def tolerated(rates: dict[float, list[Run]]) -> list[float]:
    """The rates whose mean held-out loss is within .1 nats of the best rate's."""
    means = {lr: float(np.mean([r["held_out"] for r in same])) for lr, same in rates.items()}
    return [lr for lr, mean in means.items() if mean <= min(means.values()) + WITHIN]


def pre_ln_rates(root: Path) -> Figures:
    """Rates that each learns at, and those that cost it little."""
    deep = {scheme: runs(root, "deep", scheme=scheme) for scheme in ("pre-ln", "post-ln")}
    pre_18 = max(r["lr"] for r in deep["pre-ln"] if r["learns"])
    post_18 = min(r["lr"] for r in deep["post-ln"] if not r["learns"])
    bare = [{r["key"]: r["learns"] for r in runs(root, "warm-up", scheme=s, warmup=0)} for s in ("pre-ln", "post-ln")]
    found = {
        "pre_18": over([pre_18]),
        "post_18": over([post_18]),
        "ratio_18": over([pre_18 / post_18]),
        "bare_6": over([float(bare[0][key]) - float(bare[1][key]) for key in bare[0]]),
    }
    largest, width = {}, {}
    for scheme in ("pre-ln", "post-ln"):
        rates = _rates(root, scheme)
        largest[scheme] = max(lr for lr, same in rates.items() if all(r["learns"] for r in same))
        near = tolerated(rates)
        width[scheme] = near[-1] / near[0]
        found[f"width_{scheme.removesuffix('-ln')}"] = over([width[scheme]])
    ratios = {
        name: over([each["pre-ln"] / each["post-ln"]]) for name, each in (("ratio_6", largest), ("width_6", width))
    }
    return found | ratios


def post_ln_lower(root: Path) -> Figures:
    """Held-out loss of post-LN less that of pre-LN, key by key, same rate or each at its best."""
    files = {"same": ("warm-up", {"warmup": 200}), "tuned": ("tuned", {})}
    found = {}
    for name, (file, settings) in files.items():
        post, pre = ({r["key"]: r for r in runs(root, file, scheme=s, **settings)} for s in ("post-ln", "pre-ln"))
        found[name] = over([post[key]["held_out"] - pre[key]["held_out"] for key in post])
    return found | regularises(root)


def regularises(root: Path) -> Figures:
    """A text that is read many times: held-out loss at the end, its gap to training loss, and where training losses are equal.

    Post-LN less pre-LN, key by key. Equal: at the higher of the two last training losses.
    """
    post, pre = ({r["key"]: r for r in runs(root, "small-text", scheme=s)} for s in ("post-ln", "pre-ln"))
    gaps = {key: [r["held_out"] - r["train"] for r in (post[key], pre[key])] for key in post}
    level = {key: max(post[key]["train"], pre[key]["train"]) for key in post}
    return {
        "small": over([post[key]["held_out"] - pre[key]["held_out"] for key in post]),
        "gap": over([a - b for a, b in gaps.values()]),
        "gap_post": over([a for a, _ in gaps.values()]),
        "gap_pre": over([b for _, b in gaps.values()]),
        "level": over([_held_out_at(post[key], level[key]) - _held_out_at(pre[key], level[key]) for key in post]),
    }


def _held_out_at(run: Run, loss: float) -> float:
    """Held-out loss where the training loss passes ``loss`` for the last time, linear between two evaluations."""
    train, held = (run["evaluated"][name] for name in ("train", "held_out"))
    for i in reversed(range(1, len(train))):
        if train[i] <= loss <= train[i - 1]:
            part = (train[i - 1] - loss) / (train[i - 1] - train[i])
            return held[i - 1] + part * (held[i] - held[i - 1])
    return held[-1]


def rms_trained(root: Path) -> Figures:
    """RMSNorm less LayerNorm after training, key by key: held-out loss, and what rounding the matrices adds to it."""
    found: dict[str, Figure] = {}
    for scheme in ("post-ln", "pre-ln"):
        layer, rms = ({r["key"]: r for r in runs(root, "norms", scheme=scheme, norm=n)} for n in ("layernorm", "rms"))
        name = scheme.replace("-ln", "")
        gaps = [rms[key]["held_out"] - layer[key]["held_out"] for key in layer]
        found[name] = over(gaps)
        t = abs(np.mean(gaps)) / (np.std(gaps, ddof=1) / len(gaps) ** 0.5)
        found[f"{name}_t"] = over([t / float(stdtrit(len(gaps) - 1, 0.975))])
        for bits in (8, 4):
            kind = f"{bits} bits, row"
            added = [
                {key: r["rounded"][kind] - r["rounded"]["trained"] for key, r in each.items()} for each in (rms, layer)
            ]
            found[f"{name}_{bits}"] = over([abs(added[0][key] - added[1][key]) for key in layer])
    return found
