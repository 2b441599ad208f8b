"""Measures read off stored runs: docs/training/*.json (`benchmarks/training.py`), docs/experts.md (`benchmarks/experts.py`)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradflow.ledger.claim import Figure

Run = dict[str, Any]
Figures = dict[str, Figure]


def stored(root: Path, name: str) -> dict[str, Any]:
    """One of docs/training's files.

    Raises
    ------
    ValueError
        Outside of a checkout, which alone has them.
    """
    file = root / "docs" / "training" / f"{name}.json"
    if not file.is_file():
        raise ValueError(f"root: no stored runs at {str(file)!r}; give the repository's root, which has docs/training")
    return json.loads(file.read_text(encoding="utf-8"))


def runs(root: Path, name: str, **settings: Any) -> list[Run]:
    """The runs of a file that have these settings."""
    return [r for r in stored(root, name)["runs"] if all(r[k] == v for k, v in settings.items())]


def over(values: Sequence[float], geometric: bool = False) -> Figure:
    """A figure of runs."""
    return Figure.over(values, "runs", geometric)


def late(run: Run, series: str) -> float:
    """Geometric mean of a series over the second half of training."""
    values = run["series"][series]
    return float(np.exp(np.mean(np.log(values[len(values) // 2 :]))))


def learn(found: Sequence[Run]) -> Figure:
    """1 for each run that learns, 0 for each that does not."""
    return over([float(r["learns"]) for r in found])


def early_norm(root: Path) -> Figures:
    """1/‖u‖ at the first step over that at the last watched one, geometric mean over norms."""
    found: dict[str, list[float]] = {"mlp": [], "attention": [], "bare": []}
    for warmup in (200, 0):
        for r in runs(root, "warm-up", scheme="post-ln", warmup=warmup):
            by_step = [np.log(values) for values in r["radius_gain_by_sublayer"].values()]
            fall = by_step[0] - by_step[-1]
            parts = {"attention": fall[::2], "mlp": fall[1::2]} if warmup else {"bare": fall}
            for name, logs in parts.items():
                found[name].append(float(np.exp(logs.mean())))
    return {name: over(values, True) for name, values in found.items()}


def adam_early(root: Path) -> Figures:
    """How large Adam's first update is."""
    warmed, bare = (runs(root, "warm-up", scheme="post-ln", warmup=steps) for steps in (200, 0))
    return {
        "update": over([r["series"]["update_rms"][0] / late(r, "update_rms") for r in warmed], True),
        "move": over([r["series"]["stream_move"][0] for r in bare]),
    }


def adam_cause(root: Path) -> Figures:
    """Whether what would follow from that is seen, without warm-up."""
    pre_ln = runs(root, "warm-up", scheme="pre-ln", warmup=0)
    optimizers = {name: runs(root, "optimizers", optimizer=name, warmup=0) for name in ("sgd", "radam")}
    return {
        "sgd": learn([r for r in optimizers["sgd"] if r["lr"] == 0.1]),
        "radam": learn(optimizers["radam"]),
        "pre_ln": learn(pre_ln),
        "pre_move": over([r["series"]["stream_move"][0] for r in pre_ln]),
    }


def warm_up_helps(root: Path) -> Figures:
    """Loss without warm-up less loss with it, key by key."""
    adam = {"scheme": "post-ln", "optimizer": "adam", "lr": 3e-3}
    cases = {
        "six": ("warm-up", adam),
        "deep": ("deep", adam),
        "radam": ("optimizers", {"optimizer": "radam"}),
        "sgd": ("optimizers", {"optimizer": "sgd", "lr": 0.1}),
    }
    found = {}
    for name, (file, settings) in cases.items():
        bare, warmed = (runs(root, file, **settings, warmup=steps) for steps in (0, 200))
        after = {r["key"]: r["loss"] for r in warmed}
        found[f"{name}_saved"] = over([r["loss"] - after[r["key"]] for r in bare])
        found |= {name: learn(warmed), f"{name}_bare": learn(bare)}
    return found


def warm_up_leaves(root: Path) -> Figures:
    """First sub-layer's weight gradient over the last's, second half of training."""
    post = {"scheme": "post-ln", "warmup": 200, "lr": 3e-3}
    files = {"six": "warm-up", "deep": "deep"}
    return {
        name: over([late(r, "weight_grad") for r in runs(root, file, **post)], True) for name, file in files.items()
    }


def _bare(root: Path) -> dict[str, list[Run]]:
    """Post-LN without warm-up, Adam at 3e-3."""
    files = {"learn_6": "warm-up", "learn_18": "deep"}
    return {name: runs(root, file, scheme="post-ln", warmup=0, lr=3e-3) for name, file in files.items()}


def post_ln_diverges(root: Path) -> Figures:
    """Whether the loss leaves the numbers, and where it ends."""
    found = [r for rows in _bare(root).values() for r in rows]
    unigram = stored(root, "warm-up")["settings"]["unigram"]
    return {
        "diverged": over([float(r["diverged"] is not None) for r in found]),
        "above": over([r["loss"] - unigram for r in found]),
        "larger": over([float(r["diverged"] is not None) for r in runs(root, "no-warm-up")]),
    }


def post_ln_stalls(root: Path) -> Figures:
    """Which runs without warm-up learn."""
    found = {name: learn(rows) for name, rows in _bare(root).items()}
    for name, settings in {"sgd": {"lr": 0.03}, "sgd_fast": {"lr": 0.1}, "radam": {}}.items():
        optimizer = name.removesuffix("_fast")
        found[f"learn_{name}"] = learn(runs(root, "optimizers", optimizer=optimizer, warmup=0, **settings))
    return found


def post_ln_deep(root: Path) -> Figures:
    """Which runs with warm-up learn, at 12 and at 36 sub-layers."""
    post = {"scheme": "post-ln", "warmup": 200}
    rates = {"at_36": 3e-3, "at_36_lower": 1e-3, "at_36_lowest": 3e-4}
    found = {name: learn(runs(root, "deep", **post, lr=lr)) for name, lr in rates.items()}
    pre = learn(runs(root, "deep", scheme="pre-ln"))
    longer = learn(runs(root, "deep-remedies", scheme="post-ln"))  # 1,200 steps, a third of them warm-up
    return found | {"at_12": learn(runs(root, "warm-up", **post, lr=3e-3)), "pre_36": pre, "longer": longer}


def admin_mitigates(root: Path) -> Figures:
    """Which runs of Admin (profiled) learn without warm-up, and of post-LN, of either depth."""
    files = {"learn_6": "remedies", "learn_18": "deep"}
    found = {name: learn(runs(root, file, scheme="admin", warmup=0)) for name, file in files.items()}
    return found | {"bare": learn([r for rows in _bare(root).values() for r in rows])}


def sandwich_experts(root: Path) -> Figures:
    """Sandwich's coefficients of variation over pre-LN's, row by row, and the drift of the gain over imbalances."""
    lines = (root / "docs" / "experts.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    rows = {(router, float(tilt), scheme): cells for router, tilt, scheme, *cells in table[2:]}
    columns = {"added": 4, "returned": 5, "gain": 6}

    def figure(router: str, tilt: float, scheme: str, name: str) -> float:
        return float(rows[router, tilt, scheme][columns[name]].split()[0])

    def ratios(name: str, routers: Sequence[str]) -> Figure:
        cases = [(router, tilt) for router, tilt, scheme in rows if scheme == "pre-ln" and router in routers]
        pairs = [(figure(*case, "sandwich", name), figure(*case, "pre-ln", name)) for case in cases]
        return Figure.over([after / before for after, before in pairs], "rows, means of four networks")

    def drift(router: str) -> Figure:
        logs = [np.log(figure(router, 3, s, "gain") / figure(router, 0, s, "gain")) for s in ("sandwich", "pre-ln")]
        return Figure.over([abs(logs[0]) / abs(logs[1])], "rows, means of four networks")

    dropping = [router for router, *_ in rows if "capacity" in router]
    return {
        "added": ratios("added", [router for router, *_ in rows if "capacity" not in router]),
        "added_dropped": ratios("added", dropping),
        "returned_switch": ratios("returned", ["switch:8x1"]),
        "returned_moe": ratios("returned", ["moe:8x2"]),
        "drift_switch": drift("switch:8x1"),
        "drift_moe": drift("moe:8x2"),
    }
