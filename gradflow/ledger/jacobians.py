"""Measures of the norms themselves: Jacobian, rank, cost, and how two of them differ."""

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import norms, precision
from gradflow.branches import branches_of
from gradflow.ledger.claim import Figure
from gradflow.symbolic import derive

WIDTHS = (3, 64)
DRAWS = 4
ROWS, WIDTH = 512, 256  # of the norm whose cost is counted
PAIRS = 40  # timings of both norms in turn; of the processor, as the machine may have other work

Figures = dict[str, Figure]
LAYERS = {"rms": norms.RMSNorm, "layernorm": norms.LayerNorm}


def _inputs(d: int) -> jax.Array:
    """Vectors whose mean is as large as their deviation, (DRAWS, d)."""
    return 1 + jax.random.normal(jax.random.key(d), (DRAWS, d))


def _layers(d: int) -> dict[str, Any]:
    return {name: row.init(d, eps=0.0, dtype="float64") for name, row in LAYERS.items()}


def jacobian(root: Path) -> Figures:
    """Autodiff of each norm against the bare formula: relative Frobenius error."""
    checks = derive("unit").check()
    errors: dict[str, list[float]] = {"unit": [], "rms": [], "layernorm": []}
    with precision.scope("float64"):
        for d in WIDTHS:
            for u in _inputs(d):
                bare = (jnp.eye(d) - jnp.outer(u, u) / (u @ u)) / jnp.linalg.norm(u)
                for name, layer in {"unit": lambda u: u / jnp.linalg.norm(u), **_layers(d)}.items():
                    true = jax.jacfwd(layer)(u)
                    best = jnp.sum(true * bare) / jnp.sum(bare * bare)
                    factor = {"unit": 1.0, "rms": d**0.5}.get(name, best)
                    errors[name].append(float(jnp.linalg.norm(true - factor * bare) / jnp.linalg.norm(true)))
    draws = {
        name: Figure.over(values, f"inputs of d = {', '.join(map(str, WIDTHS))}") for name, values in errors.items()
    }
    return draws | {"derived": Figure.over([float(check.passed) for check in checks], "checks")}


def rank(root: Path) -> Figures:
    """Largest singular value in units of 1/(scale of u), and how many of them vanish."""
    found: dict[str, list[float]] = {}
    with precision.scope("float64"):
        for d in WIDTHS:
            for u in _inputs(d):
                for name, layer in _layers(d).items():
                    values = jnp.linalg.svd(jax.jacfwd(layer)(u), compute_uv=False)
                    scale = jnp.std(u) if name == "layernorm" else jnp.sqrt(jnp.mean(u**2))
                    found.setdefault(f"sigma_{name}", []).append(float(values[0] * scale))
                    found.setdefault(f"lost_{name}", []).append(float(jnp.sum(values < 1e-12 * values[0])))
    return {name: Figure.over(values, "inputs") for name, values in found.items()}


def differs(root: Path) -> Figures:
    """RMSNorm less LayerNorm, relative, at an input with a mean and at a centred one."""
    found: dict[str, list[float]] = {"values": [], "centred": [], "jacobians": []}
    with precision.scope("float64"):
        rms, layer = _layers(WIDTHS[-1]).values()
        for u in _inputs(WIDTHS[-1]):
            y = u - jnp.mean(u)
            found["values"].append(float(jnp.linalg.norm(rms(u) - layer(u)) / jnp.linalg.norm(layer(u))))
            found["centred"].append(float(jnp.linalg.norm(rms(y) - layer(y)) / jnp.linalg.norm(layer(y))))
            a, b = (jax.jacfwd(norm)(y) for norm in (rms, layer))
            found["jacobians"].append(float(jnp.linalg.norm(a - b, 2) / jnp.linalg.norm(b, 2)))
    return {name: Figure.over(values, "inputs") for name, values in found.items()}


def cheaper(root: Path) -> Figures:
    """RMSNorm's operations, as XLA counts them, and processor time, over LayerNorm's: value and gradient, float32."""
    with precision.scope("float32"):
        x, back = (jax.random.normal(jax.random.key(i), (ROWS, WIDTH), jnp.float32) for i in (0, 1))
        layers = {name: row.init(WIDTH) for name, row in LAYERS.items()}
        alone = {name: _compiled(layer, x, back) for name, layer in layers.items()}
        branches = [(b, b.init(jax.random.key(2), WIDTH, "float32")) for b in branches_of(["attention", "mlp:relu"])]
        block = {name: _compiled(functools.partial(_block, layer, branches), x, back) for name, layer in layers.items()}
        ratios = []
        for _ in range(PAIRS):
            seconds = {}
            for name, run in alone.items():
                began = time.process_time()
                for _ in range(20):
                    jax.block_until_ready(run(x, back))
                seconds[name] = time.process_time() - began
            ratios.append(seconds["rms"] / seconds["layernorm"])
    middle = np.sort(ratios)[PAIRS // 4 : -PAIRS // 4]  # a shared machine's interruptions lie outside
    counted = {
        name: Figure.over([_operations(runs["rms"]) / _operations(runs["layernorm"])], "program")
        for name, runs in {"norm": alone, "block": block}.items()
    }
    return counted | {"time": Figure.over(middle, "pairs in the middle half")}


def _block(norm: Any, branches: list[tuple[Any, Any]], x: jax.Array) -> jax.Array:
    """A pre-norm block."""
    for branch, params in branches:
        x = x + branch.apply(params, norm(x))
    return x


def _compiled(f: Callable[[jax.Array], jax.Array], x: jax.Array, back: jax.Array) -> Any:
    """Value and pulled-back cotangent of f, compiled."""

    def both(x: jax.Array, back: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pull = jax.vjp(f, x)
        return out, pull(back)[0]

    return jax.jit(both).lower(x, back).compile()


def _operations(compiled: Any) -> float:
    return float(compiled.cost_analysis()["flops"])
