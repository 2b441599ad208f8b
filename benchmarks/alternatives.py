"""The whole-depth Jacobian by gradflow and by what a user would write; keeps docs/alternatives.md and its figure.

Same network, weights, dtype and threads. All ways must agree on the Jacobian before any is timed. Times are interleaved medians;
exponents are slopes of log time against log size by least squares, ± their standard error.
"""

import argparse
import functools
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import plain
from bench import interleaved, machine
from matplotlib.figure import Figure

from gradflow import plots, precision
from gradflow.product import identity
from gradflow.stack import Stack

DOCS = Path(__file__).parents[1] / "docs"
AGREE = 1e-10
BLOCKS = {"MLP": ("mlp:gelu",), "attention + MLP": ("attention", "mlp:gelu")}
TORCH = importlib.util.find_spec("torch") is not None
STYLE = {  # Okabe–Ito, as in gradflow.plots
    "gradflow": ("#0072B2", "o"),
    "jax.jacrev per block, and products": ("#D55E00", "s"),
    "jax.jacrev": ("#009E73", "^"),
    "jax.jacfwd": ("#E69F00", "D"),
    "torch.func.jacrev": ("#CC79A7", "v"),
    "PyTorch, hooks, n backward passes": ("#000000", "x"),
}
Job = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A post-LN network of random weights."""

    block: str
    depth: int
    d: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.block}, L = {self.depth}, d = {self.d}, T = {self.tokens}"


REFERENCES = (Case("MLP", 12, 256, 1), Case("attention + MLP", 12, 64, 16))
SWEEPS = {
    "L": [Case("MLP", depth, 128, 1) for depth in (3, 6, 12, 24, 48)],
    "d": [Case("MLP", 6, d, 1) for d in (64, 128, 256, 512)],
    "T": [Case("attention + MLP", 3, 32, tokens) for tokens in (4, 8, 16, 32)],
}
SIZE = {"L": lambda c: c.depth, "d": lambda c: c.d, "T": lambda c: c.tokens}
LABELS = {
    "L": "L, blocks (MLP, d = 128, T = 1)",
    "d": "d, width (MLP, L = 6, T = 1)",
    "T": "T, tokens (attention + MLP, L = 3, d = 32)",
}
# a block pushes n = T·d directions through O(T d²) operations (and T² d in attention); a product of blocks is n³ beside
COUNTED = {"L": "1", "d": "3", "T": "2 to 3 (products: 3)"}


def per_block(stack: Stack, params: Any, x: jax.Array) -> jax.Array:
    """Every block's Jacobian at its input by reverse mode, and their product, in one scan."""

    def step(carry: tuple, p: Any) -> tuple[tuple, None]:
        x, product = carry
        local, x = jax.jacrev(lambda x: (plain.block(stack, p, x),) * 2, has_aux=True)(x)
        return (x, local.reshape(product.shape) @ product), None

    return jax.lax.scan(step, (x, jnp.eye(x.size, dtype=x.dtype)), params)[0][1]


def jobs(case: Case) -> dict[str, Job]:
    """Each way to the Jacobian, (n, n)."""
    stack = Stack.make("post-ln", BLOCKS[case.block], case.depth, case.d, eps=plain.EPS)
    given, x, _ = plain.drawn(stack, case.tokens)
    square, run = (x.size, x.size), functools.partial(plain.run, stack)
    eye = identity(stack, case.tokens)

    @jax.jit
    def pushed(given: Any, x: jax.Array) -> jax.Array:
        found = stack.trace(given, x, eye, False)
        return found.basis.reshape(square) * jnp.exp2(found.exponent.astype(x.dtype))

    names = iter(STYLE)
    product = jax.jit(functools.partial(per_block, stack))
    reverse, forward = (
        jax.jit(lambda params, x, d=d: d(run, 1)(params, x).reshape(square)) for d in (jax.jacrev, jax.jacfwd)
    )
    found: dict[str, Job] = {next(names): lambda: pushed(given, x)}
    found |= {
        name: functools.partial(f, given.params, x) for name, f in zip(names, (product, reverse, forward), strict=False)
    }
    if TORCH:
        import plain_torch
        import torch

        model, state = plain_torch.network(stack, given.params), torch.from_numpy(np.array(x))
        found["torch.func.jacrev"] = lambda: plain_torch.jacrev(model, state)
        found["PyTorch, hooks, n backward passes"] = lambda: plain_torch.hooked(model, state)
    return found


def agreed(found: dict[str, Job]) -> dict[str, float]:
    """Largest difference of each Jacobian from gradflow's, over the largest entry."""
    values = {name: np.asarray(job()) for name, job in found.items()}
    expected = values["gradflow"]
    gaps = {name: float(np.abs(value - expected).max() / np.abs(expected).max()) for name, value in values.items()}
    if bad := {name: gap for name, gap in gaps.items() if not gap <= AGREE}:
        raise SystemExit(f"alternatives: not the same Jacobian: {bad}")
    return gaps


def slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Least squares of y on x: the slope and its standard error."""
    x, y = x - x.mean(), y - y.mean()
    found = float(x @ y / (x @ x))
    return found, math.sqrt(float(np.sum((y - found * x) ** 2)) / (len(x) - 2) / float(x @ x))


def exponents(axis: str, rows: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Of every way's time along one sweep."""
    sizes = np.log([SIZE[axis](case) for case in SWEEPS[axis]])
    return {name: slope(sizes, np.log([row[name] for row in rows])) for name in rows[0]}


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def reference_table(rounds: int) -> list[str]:
    """Times at the reference sizes, and factors to gradflow's."""
    lines = []
    for case in REFERENCES:
        found = jobs(case)
        gaps, times = agreed(found), interleaved(found, rounds)
        lines += ["", f"## {case}", "", f"n = T·d = {case.tokens * case.d}", ""]
        lines += ["| way | ms | over gradflow | largest difference |", "|---|---:|---:|---:|"]
        for name, seconds in times.items():
            factor = seconds / times["gradflow"]
            lines.append(f"| {name} | {milliseconds(seconds)} | {factor:.3g} | {gaps[name]:.1e} |")
        print("\n".join(lines[-len(times) - 6 :]), flush=True)
    return lines


def sweep_table(axis: str, rows: list[dict[str, float]], slopes: dict[str, tuple[float, float]]) -> list[str]:
    """Times along one sweep, and their exponents."""
    cases = SWEEPS[axis]
    fixed = replace(cases[0], **{"L": {"depth": 0}, "d": {"d": 0}, "T": {"tokens": 0}}[axis])
    said = str(fixed).replace(f"{axis} = 0", f"{axis} varied")
    sizes = [f"{axis} = {SIZE[axis](case)}" for case in cases]
    lines = ["", f"## Cost against {axis}", "", f"{said}; ms; counted exponent: {COUNTED[axis]}", ""]
    lines += ["| way | " + " | ".join(sizes) + " | exponent |", "|---|" + "---:|" * (len(cases) + 1)]
    for name, (value, error) in slopes.items():
        cells = " | ".join(milliseconds(row[name]) for row in rows)
        lines.append(f"| {name} | {cells} | {value:.2f} ± {error:.2f} |")
    return lines


def figure(sweeps: dict[str, tuple[list[dict[str, float]], dict[str, tuple[float, float]]]]) -> Figure:
    """Time against L, d and T, exponents in the legends."""
    drawn = Figure(figsize=(13, 4.6), layout="constrained")
    for ax, (axis, (rows, slopes)) in zip(drawn.subplots(1, len(sweeps)), sweeps.items(), strict=True):
        sizes = [SIZE[axis](case) for case in SWEEPS[axis]]
        for name, (value, error) in slopes.items():
            colour, marker = STYLE[name]
            label = f"{name}: {value:.2f} ± {error:.2f}"
            ax.loglog(sizes, [row[name] for row in rows], color=colour, marker=marker, label=label, markersize=5)
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.minorticks_off()
        plots.plain(ax)
        ax.set_xlabel(LABELS[axis])
        ax.set_title(f"seconds ∝ {axis} to the power of", fontsize=10)
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * (high / low) ** 0.6)  # room for the legend
        ax.legend(fontsize=7.5, loc="upper left", frameon=False)
    drawn.axes[0].set_ylabel("seconds for the whole Jacobian")
    return drawn


HEAD = """# The whole-depth Jacobian: gradflow, and what a user would write

`{command}`: post-LN, LayerNorm, {dtype}, the same weights for all; {machine}.
Each way yields ∂out/∂x, n × n with n = T·d, and all agree within {agree:.0e} of its largest entry before they are timed.
Medians of {rounds} interleaved runs after compilation, in milliseconds; exponents by least squares in logs ± standard error,
over the sizes shown, of which the small ones also pay what does not grow.

* **gradflow**: the identity pushed through the derived Jacobians of norms and branches, with a running power of two.
* **jax.jacrev per block, and products**: each block's Jacobian at its input, multiplied up in one `lax.scan`.
* **jax.jacrev**, **jax.jacfwd**: of the whole network, jitted.
* **torch.func.jacrev**: of the whole network.
* **PyTorch, hooks, n backward passes**: one for each output coordinate, hooks keeping each block's gradient.
"""
MISSING = "\nPyTorch is not installed here: its two ways are left out.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--cores", type=int, default=1, help="one: what threads cost each other is not what is compared"
    )
    parser.add_argument("--out", type=Path, default=DOCS / "alternatives.md")
    parser.add_argument("--plot", type=Path, default=DOCS / "alternatives.png")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])  # before XLA and PyTorch start their threads
    about = machine(*["torch"] * TORCH)
    if not TORCH:
        print(MISSING.strip())
    with precision.scope("float64"):
        tables = reference_table(args.rounds)
        sweeps = {}
        for axis, cases in SWEEPS.items():
            rows = []
            for case in cases:
                found = jobs(case)
                agreed(found)
                rows.append(interleaved(found, args.rounds))
            sweeps[axis] = rows, exponents(axis, rows)
            tables += sweep_table(axis, *sweeps[axis])
            print("\n".join(tables[-len(rows[0]) - 6 :]), flush=True)
    plots.save(figure(sweeps), args.plot)
    head = HEAD.format(
        command="python benchmarks/alternatives.py", dtype="float64", machine=about, agree=AGREE, rounds=args.rounds
    )
    picture = f"\n![Time against depth, width and tokens]({os.path.relpath(args.plot, args.out.parent)})\n"
    args.out.write_text(head + ("" if TORCH else MISSING) + picture + "\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
