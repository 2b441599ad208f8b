"""Does a norm behind the experts steady them? Pre-LN against Sandwich over a router's k and imbalance; keeps docs/experts.md.

A row is one scheme, one router, one imbalance. All networks of a router share a compilation: the imbalance multiplies its bias.
"""

import argparse
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import gradflow
from gradflow import precision, probes
from gradflow.branches.experts import Experts
from gradflow.flow import through
from gradflow.loads import variation
from gradflow.moments import top_k
from gradflow.stack import Drawn, Layer, Stack

FILE = Path(__file__).parents[1] / "docs" / "experts.md"
SCHEMES = ("pre-ln", "sandwich")
ROUTERS = (
    Experts(8, 1, renormalised=False, ratio=1),
    Experts(8, 1, ratio=1),
    Experts(8, 2, ratio=1),
    Experts(8, 8, ratio=1),
    Experts(8, 2, ratio=1, capacity=1.25),
)
IMBALANCES = (0.0, 1.0, 3.0)
PROBES = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tilted(Drawn):
    """Drawn weights with the router's bias multiplied."""

    by: Any = 1.0

    def layer(self, stack: Stack, piece: Any) -> Layer:
        found = super().layer(stack, piece)
        return found._replace(params=tuple(p | {"b_router": self.by * p["b_router"]} for p in found.params))


@functools.partial(jax.jit, static_argnums=(0, 1))
def measure(stack: Stack, tokens: int, cases: tuple[Array, Array]) -> dict[str, Array]:
    """For every (imbalance, key): figures of each sub-layer, and the end-to-end gain."""
    branch: Any = stack.block[0]

    def one(case: tuple[Array, Array]) -> dict[str, Array]:
        imbalance, key = case
        k_x, k_weights, k_back, k_probes = jax.random.split(key, 4)
        weights = Tilted(k_weights, by=imbalance)
        x, sent = (precision.normal(k, (tokens, stack.d), stack.dtype) for k in (k_x, k_back))
        isotropic = precision.normal(k_probes, (PROBES, *x.shape), stack.dtype)

        def block(part: Stack, x: Array, inputs: tuple) -> tuple[Array, dict[str, Array]]:
            piece, alphas, betas = inputs
            layer = weights.layer(part, piece)
            step = stack.sublayer(layer, 0, alphas[0], betas[0], x)
            into = through(step.norm_branch, step.beta * isotropic).out
            returned = through(step.norm_in, jax.vmap(step.branch_pullback())(into)).out
            asked, served = branch.choice(layer.params[0], step.fed)
            return step.out, {
                "load": jnp.std(jnp.sum(asked, 0)) / jnp.mean(jnp.sum(asked, 0)),
                "dropped": 1 - jnp.sum(served) / jnp.sum(asked),
                "output": variation(branch.apply(layer.params[0], step.fed)),
                "added": variation(step.added),
                "returned": variation(jnp.concatenate(list(returned), -1)),
            }

        _, figures = stack.over_depth(block, x, (weights.along_depth(stack), *weights.multipliers(stack)[:2]))
        net = probes.profile(stack, weights, x, sent)[2]["net"]
        return {name: jnp.mean(leaf) for name, leaf in figures.items()} | {"gain": jnp.prod(net)}

    return jax.lax.map(one, cases)


def law(scheme: str, router: Any, depth: int) -> tuple[str, str]:
    """Coefficient of variation of ‖f‖², from Σw² alone, and end-to-end gain."""
    if router.capacity is not None:
        return "–", "–"
    tau = (router.router_gain**2 + router.imbalance**2) ** 0.5
    s, _, squared = top_k.means(router.number, router.chosen, router.renormalised, tau)
    spread = max(squared - s**2, 0.0) ** 0.5 / s
    return f"{spread:.3f}", f"{gradflow.law(scheme, router, depth).exact[0, 0]:.3f}"


HEAD = """# A norm behind the experts

`python benchmarks/experts.py`: depth {depth}, d = {d}, T = {tokens}, 8 gated SiLU experts of width d, LayerNorm, {seeds} networks
a row, float32. Coefficients of variation are over tokens, means over sub-layers and networks; *load* is over experts.
*output* is ‖f‖², its *law* that of Σw² alone; *added* is what the stream gets, ‖f‖² or ‖N(f)‖²; *returned* the power of the
gradient that comes back through the branch ({probes} isotropic cotangents, their own noise included). The gain is that of the
whole network, geometric mean ± s.d. of its log over networks.

| router | imbalance | scheme | load | dropped | output | law | added | returned | gain | law |
|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("depth", 12), ("d", 256), ("tokens", 64), ("seeds", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    # what stands below the table is written by hand, and stays
    below = FILE.read_text(encoding="utf-8").partition("\n\n## ")[1:] if FILE.exists() else ()
    rows = [HEAD.format(probes=PROBES, **vars(args))]
    print(rows[0])
    keys = jax.random.split(jax.random.key(0), args.seeds)
    for router in ROUTERS:
        for scheme in SCHEMES:
            stack = Stack.make(scheme, replace(router, imbalance=1.0), args.depth, args.d, dtype="float32")
            with precision.scope("float32"):
                cases = (jnp.repeat(jnp.asarray(IMBALANCES), args.seeds), jnp.tile(keys, len(IMBALANCES)))
                found = {
                    name: np.asarray(v).reshape(-1, args.seeds)
                    for name, v in measure(stack, args.tokens, cases).items()
                }
            for i, imbalance in enumerate(IMBALANCES):
                row = {name: values[i] for name, values in found.items()}
                spread, gain = law(scheme, replace(router, imbalance=imbalance), args.depth)
                seen = np.log(row["gain"])
                name = router.name.removesuffix(f":{router.expert.name}")
                name += "" if router.capacity is None else f", capacity {router.capacity}"
                load, dropped, output, added, returned = (
                    f"{row[n].mean():.3f}" for n in ("load", "dropped", "output", "added", "returned")
                )
                rows.append(
                    f"| {name} | {imbalance:g} | {scheme} | {load} | {dropped} | {output} | {spread} | {added} | {returned} | "
                    f"{np.exp(seen.mean()):.3f} ± {seen.std(ddof=1):.3f} | {gain} |"
                )
                print(rows[-1], flush=True)
    FILE.write_text("\n".join(rows) + ("".join(below) or "\n"), encoding="utf-8")


if __name__ == "__main__":
    main()
