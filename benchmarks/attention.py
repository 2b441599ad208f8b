"""The law of several tokens against random networks, at every depth; prints the tables and keeps them in docs/attention.md.

Compared is the power of the gradient, pooled over tokens, at the input of every block over that at the output: its mean over
networks. It agrees where the difference is within max(5 %, 3 s.e.) (post-LN) or max(2 %, 3 s.e.) (pre-LN).
"""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import gradflow
from gradflow.branches import Attention

FILE = Path(__file__).parents[1] / "docs" / "attention.md"
BAND = {"post-ln": 0.05, "pre-ln": 0.02}
BATCH = 20
FEW = 0.2  # of the networks, where a row only follows from the first four


@dataclass(frozen=True)
class Case:
    """What is drawn, and how often."""

    scheme: str
    attention: Any = "attention"
    mlp: str = "mlp:relu"
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0  # of the networks asked for

    def __str__(self) -> str:
        said = [self.scheme, getattr(self.attention, "name", self.attention), self.mlp]
        heads = getattr(self.attention, "heads", None)
        said += [f"{heads} heads"] if heads else []
        return ", ".join(said + [f"{k.replace('_', ' ')} {v}" for k, v in self.options.items()])


def cases() -> list[Case]:
    """The four at full number, then what follows from them."""
    main = [Case(s, a) for s in BAND for a in ("attention", "attention:causal")]
    more = [
        Case("post-ln", Attention(heads=heads, causal=causal), share=FEW)
        for heads in (4, 16)
        for causal in (False, True)
    ]
    more += [Case(s, a, "mlp:gelu", share=FEW) for s in BAND for a in ("attention", "attention:causal")]
    more += [Case(s, "attention", "glu:silu", share=FEW) for s in BAND]
    more += [Case(s, a, options={"init": "xavier"}, share=FEW) for s in BAND for a in ("attention", "attention:causal")]
    more += [Case(s, "attention", options={"cotangent_cosine": 1.0}, share=FEW) for s in BAND]
    more += [Case(s, "attention", options={"token_cosine": 0.5}, share=FEW) for s in BAND]
    more += [
        Case("post-ln", f"attention:{o}", share=FEW) for o in ("qk-norm", "rope", "causal:rope", "causal:rope:qk-norm")
    ]
    return main + more


def measure(case: Case, depth: int, d: int, tokens: int, networks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Power at every block's input over the output's: law, mean over networks, its s.e."""
    powers = []
    for batch in range(max(2, round(networks * case.share / BATCH))):
        entry = gradflow.compare(
            [case.scheme],
            (case.attention, case.mlp),
            depth,
            d,
            norm="layernorm",
            tokens=tokens,
            seeds=BATCH,
            key=batch,
            dtype="float32",
            **case.options,
        )[0]
        powers.append(np.exp(2 * entry.measured.log_exact[:, ::2]))
    found = np.concatenate(powers)
    return np.exp(2 * entry.law.log_exact[0, ::2]), found.mean(0), found.std(0, ddof=1) / math.sqrt(len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("depth", 12), ("d", 512), ("tokens", 32), ("networks", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = vars(parser.parse_args())
    head = [
        "# The law of several tokens against measurement",
        "",
        "`python benchmarks/attention.py`: depth {depth} (attention + MLP), T = {tokens}, d = {d}, 8 heads, LayerNorm, "
        "{networks} networks (a fifth of them below the first four rows), float32.".format(**options),
        "Power of the gradient at a block's input over that at the output, mean over networks ± s.e.; worst: the depth where the",
        "law misses it by most; ✗ beyond max(5 %, 3 s.e.) for post-LN, max(2 %, 3 s.e.) for pre-LN, at any depth.",
        "",
        "| network | input: law | input: seen | worst | at block | agrees |",
        "|---|---:|---:|---:|---:|---|",
    ]
    rows, curves, failed = [], [], 0
    for case in cases():
        law, seen, error = measure(case, **options)
        gap, errors = law / seen - 1, error / seen
        agrees = bool(np.all(np.abs(gap) <= np.maximum(BAND[case.scheme], 3 * errors)))
        failed += not agrees
        worst = int(np.argmax(np.abs(gap)))
        rows.append(
            f"| {case} | {law[0]:.4g} | {seen[0]:.4g} ± {error[0]:.2g} | {100 * gap[worst]:+.1f} ± {100 * errors[worst]:.1f} % | "
            f"{worst + 1} | {'yes' if agrees else '✗'} |"
        )
        if case.share == 1:
            curves += ["", f"## {case}", "", "| block | law | seen | law over seen |", "|---:|---:|---:|---:|"]
            curves += [
                f"| {n + 1} | {a:.4f} | {b:.4f} ± {e:.4f} | {100 * (a / b - 1):+.1f} ± {100 * e / b:.1f} % |"
                for n, (a, b, e) in enumerate(zip(law[:-1], seen, error, strict=False))
            ]
        print(rows[-1], flush=True)
        FILE.write_text("\n".join([*head, *rows, *curves, "", f"Beyond the band: {failed}."]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
