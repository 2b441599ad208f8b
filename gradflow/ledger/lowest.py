"""Measure of what reaches the lowest layers of post-LN: an encoder, a decoder, and networks after training."""

from pathlib import Path
from typing import Any

from gradflow import profiles
from gradflow.branches import CrossAttention
from gradflow.ledger import initial, trained
from gradflow.ledger.claim import Figure
from gradflow.stack import Stack

TOKENS, D, SEEDS = 32, 128, 4


def lowest_layers(root: Path) -> dict[str, Figure]:
    """Gain of the gradient at initialisation; first over last weight gradient after training."""
    stacks: dict[str, tuple[list[Any], int]] = {"encoder": (["attention", "mlp:relu"], 24)}
    for name, cosine in (("decoder", 0.9), ("decoder_unlike", 0.0)):
        stacks[name] = (["attention:causal", CrossAttention(memory=32, memory_cosine=cosine), "mlp:relu"], 12)
    found = {}
    for name, (block, depth) in stacks.items():
        stack = Stack.make("post-ln", block, depth, D, eps=0.0)
        profile = profiles.profile(stack, profiles.gaussian_state(stack, TOKENS, 0), seeds=SEEDS)
        found[name] = Figure.over(profile.exact[:, 0], geometric=True)
    post = {"scheme": "post-ln", "lr": 3e-3}
    runs = {
        "trained_18": trained.runs(root, "deep", **post, warmup=200),
        "trained_18_bare": trained.runs(root, "deep", **post, warmup=0),
        "trained_6": trained.runs(root, "warm-up", **post, warmup=200),
    }
    found |= {name: trained.over([trained.late(r, "weight_grad") for r in rows], True) for name, rows in runs.items()}
    return found | {"minilm": Figure.over(initial.recorded(root).trunk, "text")}
