"""Law against measurement for every scheme and branch; prints the table and keeps it in docs/agreement.md.

Per sub-layer log rates of exact gradient, trunk, stream and weight gradient, pooled over depth and seeds. A rate agrees where
the difference is within max(2 %, 3 s.e.); the s.e. is over networks and stays below 1 %.
"""

import argparse
import math
from pathlib import Path

import numpy as np

import gradflow
from gradflow.factors import Profile
from gradflow.schemes import SCHEMES

BRANCHES = ("linear", "mlp:relu", "mlp:gelu", "mlp:tanh", "glu:silu")
FILE = Path(__file__).parents[1] / "docs" / "agreement.md"
FIGURES = ("exact", "trunk", "stream", "dW")


def rates(p: Profile) -> dict[str, np.ndarray]:
    """Mean log per sub-layer of every seed; a stream or weight gradient that is 0 has none."""
    n = p.net.shape[1]
    with np.errstate(divide="ignore"):
        found = {"exact": p.log_exact[:, 0] / n, "trunk": p.log_trunk[:, 0] / n}
        found["stream"] = np.log(p.stream_rms[:, -1] / p.stream_rms[:, 0]) / n
        weights = np.where(p.weight_grad > 0, p.weight_grad, np.nan)
        found["dW"] = np.log(weights[:, 0] / weights[:, -1]) / (n - 1)
    return found


def misses(depth: int, d: int, seeds: int, branch: str, schemes=SCHEMES) -> list[tuple[str, str, float, float, bool]]:
    """(scheme, figure, difference, s.e., agrees) of one branch."""
    rows = []
    for entry in gradflow.compare(schemes, branch, depth, d, seeds=seeds):
        law, measured = rates(entry.law), rates(entry.measured)
        for name in FIGURES:
            gaps = measured[name] - law[name][0]
            if np.isfinite(gaps).all():
                gap, error = float(gaps.mean()), float(gaps.std(ddof=1) / math.sqrt(seeds))
                rows.append((entry.name, name, gap, error, error < 0.01 and abs(gap) <= max(0.02, 3 * error)))
    return rows


def cell(gap: float, error: float, agrees: bool) -> str:
    return f"{100 * gap:+.2f} ± {100 * error:.2f}{'' if agrees else ' ✗'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("depth", 12), ("d", 256), ("seeds", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = vars(parser.parse_args())
    lines = [
        "# Law against measurement",
        "",
        "`python benchmarks/agreement.py`: depth {depth}, d = {d}, {seeds} networks, LayerNorm, float64.".format(
            **options
        ),
        "Measured minus law, in per cent per sub-layer, ± s.e. over networks; ✗ beyond max(2 %, 3 s.e.). dW: first over last",
        "sub-layer's ‖∂L/∂W‖; – where a gradient is zero.",
        "",
        "| scheme | branch | " + " | ".join(FIGURES) + " |",
        "|---|---|" + "---:|" * len(FIGURES),
    ]
    failed = 0
    for branch in BRANCHES:
        found: dict[str, dict[str, str]] = {}
        for scheme, name, gap, error, agrees in misses(**options, branch=branch):
            found.setdefault(scheme, {})[name] = cell(gap, error, agrees)
            failed += not agrees
        lines += [f"| {s} | {branch} | " + " | ".join(r.get(n, "–") for n in FIGURES) + " |" for s, r in found.items()]
        print("\n".join(lines[-len(found) :]), flush=True)
    lines += ["", f"Beyond the band: {failed}."]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(lines[-1])


if __name__ == "__main__":
    main()
