"""Measures of schemes at initialisation: pre-LN's gradients and stream, DeepNorm, residual scaling, Admin."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from gradflow.comparing.comparisons import Comparison, compare
from gradflow.factors import Profile
from gradflow.ledger import trained
from gradflow.ledger.claim import Figure

D, SEEDS = 256, 4
MIXING = {"block": ("attention", "mlp:relu"), "d": 128, "tokens": 32}

Figures = dict[str, Figure]


@functools.lru_cache
def _mlps(schemes: tuple[str, ...], depth: int) -> Comparison:
    return compare(schemes, "mlp:relu", depth, D, seeds=SEEDS)


@functools.lru_cache
def _attentive(depth: int, final_norm: bool) -> Profile:
    options: dict[str, Any] = {**MIXING, "final_norm": final_norm, "seeds": SEEDS}
    return compare(["pre-ln"], depth=depth, **options)[0].measured


def _first_over_last(p: Profile, depth: int) -> np.ndarray:
    """Norm of the first block's weight gradients over the last's, (seeds,)."""
    assert p.weight_grad is not None
    size = len(MIXING["block"])
    blocks = np.sqrt((p.weight_grad[:, : size * depth].reshape(-1, depth, size) ** 2).sum(-1))
    return blocks[:, 0] / blocks[:, -1]


def pre_ln_even(root: Path) -> Figures:
    """First block over last, with a final norm: at initialisation, and in the second half of training."""
    deep, shallow = (_attentive(depth, True) for depth in (24, 6))
    found = {
        "stream": Figure.over(deep.exact[:, 0] / deep.exact[:, 2 * 23], geometric=True),
        "weights": Figure.over(_first_over_last(deep, 24), geometric=True),
        "weights_6": Figure.over(_first_over_last(shallow, 6), geometric=True),
    }
    for name, file in (("trained_6", "warm-up"), ("trained_18", "deep")):
        runs = trained.runs(root, file, scheme="pre-ln")
        found[name] = trained.over([trained.late(r, "weight_grad") for r in runs], True)
    return found


def pre_ln_stream(root: Path) -> Figures:
    """Exponent p of rms ∝ Lᵖ: between two sub-layers of one network; between two depths after training."""
    found = {}
    for name, p in (("relu", _mlps(("pre-ln",), 96)[0].measured), ("attention", _attentive(48, False))):
        assert p.stream_rms is not None
        found[name] = Figure.over(np.log(p.stream_rms[:, 95] / p.stream_rms[:, 12]) / np.log(95 / 12))
    sizes = [
        {(r["warmup"], r["key"]): 1 / r["series"]["radius_gain"][-1] for r in trained.runs(root, file, scheme="pre-ln")}
        for file in ("warm-up", "deep")
    ]  # of pre-LN the only norm on the identity path is the final one: 1/‖u‖ is the stream's
    pairs = [np.log(sizes[1][run] / sizes[0][run]) / np.log(18 / 6) for run in sizes[0] if run in sizes[1]]
    return found | {"trained": trained.over(pairs)}


def pre_ln_drowned(root: Path) -> Figures:
    """Share of the sum's power that the last sub-layer adds."""
    found = {}
    for depth in (48, 6):
        p = _mlps(("pre-ln",), depth)[0].measured
        assert p.branch_rms is not None
        assert p.stream_rms is not None
        found[f"last_{depth}"] = Figure.over(1 / (1 + (p.stream_rms[:, -1] / p.branch_rms[:, -1]) ** 2))
    return found


def both_books(root: Path) -> Figures:
    """Forward and backward over 24 sub-layers."""
    found = {}
    for row in ("deepnorm", "residual-scaling"):
        p = _mlps(("deepnorm", "residual-scaling"), 24)[row].measured
        assert p.stream_rms is not None
        assert p.weight_grad is not None
        found |= {
            f"{row}_stream": Figure.over(p.stream_rms[:, -1] / p.stream_rms[:, 0], geometric=True),
            f"{row}_gain": Figure.over(p.exact[:, 0], geometric=True),
            f"{row}_weights": Figure.over(p.weight_grad[:, 0] / p.weight_grad[:, -1], geometric=True),
        }
    return found


def admin_evens(root: Path) -> Figures:
    """Largest over least contribution of a branch to the output's power."""
    schemes = {"post_ln": "post-ln", "admin": "admin"}
    found = {}
    for name, row in schemes.items():
        p = _mlps(tuple(schemes.values()), 24)[row].measured
        assert p.branch_rms is not None
        assert p.sum_rms is not None
        share = (p.branch_rms / p.sum_rms) ** 2
        kept = np.cumprod((1 - share)[:, ::-1], 1)[:, ::-1]  # from a sub-layer's input to the output
        own = share * np.concatenate([kept[:, 1:], np.ones_like(kept[:, :1])], 1)
        found[name] = Figure.over(own.max(1) / own.min(1), geometric=True)
    return found
