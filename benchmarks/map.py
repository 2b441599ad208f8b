"""The trainability map of docs/training.md: `python benchmarks/map.py --out DIR [--depth 3,6,12] [--lr …]`.

Writes docs/training/map.json and map.png, and prints the table. Runs are kept in DIR, and taken up again; all 180 are about
half an hour of one core.
"""

import argparse
import json
from pathlib import Path

import gradflow

DOCS = Path(__file__).resolve().parent.parent / "docs" / "training"


def rounded(value):
    """Floats of few digits, wherever they are."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return {name: rounded(each) for name, each in value.items()} if isinstance(value, dict) else value


def main():
    parser = argparse.ArgumentParser(description="Make the trainability map of docs/training.md again.")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--depth", default="3,6,12")
    parser.add_argument("--lr", default="3e-4,1e-3,3e-3,1e-2,3e-2,1e-1")
    parser.add_argument("--to", type=Path, default=DOCS)
    arguments = parser.parse_args()
    axes = {"depth": [*map(int, arguments.depth.split(","))], "lr": [*map(float, arguments.lr.split(","))]}
    found = gradflow.trainability(**axes, out=arguments.out)
    arguments.to.mkdir(exist_ok=True)
    (arguments.to / "map.json").write_text(
        json.dumps(rounded(found.to_dict()), ensure_ascii=False, allow_nan=False) + "\n"
    )
    found.plot(str(arguments.to / "map.png"))
    print(found)


if __name__ == "__main__":
    main()
