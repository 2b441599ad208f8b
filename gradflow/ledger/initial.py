"""Measures of the article's argument: what trunk, projection and true gradient do at initialisation and in MiniLM's stream."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from gradflow import profiles
from gradflow.contractions import Contraction
from gradflow.estimate import contraction
from gradflow.factors import Profile
from gradflow.ledger.claim import Figure
from gradflow.stack import Stack

DEPTH, D, SEEDS = 24, 256, 4
STREAM = Path("examples") / "data" / "minilm_stream.npz"

Figures = dict[str, Figure]


@functools.lru_cache
def _measured(branch: str, c: float = 0.2, **options: Any) -> Contraction:
    """Networks of the article's skeleton; a Gaussian cotangent needs one backward pass each."""
    probes = None if options.get("reading") == "alignment" else 1
    found = contraction(DEPTH, D, branch=branch, c=c, seeds=SEEDS, probes=probes, **options)
    assert isinstance(found, Contraction)
    return found


@functools.lru_cache
def recorded(root: Path) -> Contraction:
    """MiniLM's stream on one sentence, with the cotangent recorded there."""
    found = contraction(activations=root / STREAM)
    assert isinstance(found, Contraction)
    return found


@functools.lru_cache
def _encoder(norm: str = "layernorm", block: tuple[str, ...] = ("attention", "mlp:relu"), probes: int = 1) -> Profile:
    """Post-LN networks: 12 blocks, d = 128, 32 tokens."""
    stack = Stack.make("post-ln", list(block), 12, 128, norm=norm, eps=0.0)
    return profiles.profile(stack, profiles.gaussian_state(stack, 32, 0), seeds=SEEDS, probes=probes)


def _over(logs: np.ndarray, of: str = "networks") -> Figure:
    return Figure.over(np.exp(logs), of, geometric=True)


def trunk_norm(root: Path) -> Figures:
    """Gain over 24 sub-layers at c = .4, ‖u‖ = 1.67, over that at c = .1, ‖u‖ = 1.11."""
    strong, weak = (_measured("linear", c) for c in (0.4, 0.1))
    found = {"trunk": _over(strong.log_trunk - weak.log_trunk)}
    for name, branch in (("exact", "linear"), ("bias", "bias"), ("relu", "mlp:relu")):
        strong, weak = (_measured(branch, c).log_exact for c in (0.4, 0.1))
        found[name] = _over(strong - weak)  # type: ignore[operator]
    return found


def correlated(root: Path) -> Figures:
    """cos(x, u) of every sub-layer and network."""
    seen, trained = _encoder().stream_cosine, recorded(root).profile.stream_cosine
    assert seen is not None
    assert trained is not None
    unit = _measured("linear", 1 - 0.5**0.5).profile.stream_cosine
    return {
        "linear": Figure.over(unit, "sub-layers and networks"),
        "attention": Figure.over(seen[:, ::2], "sub-layers and networks"),
        "relu": Figure.over(seen[:, 1::2], "sub-layers and networks"),
        "minilm": Figure.over(trained[0, :-1], "sub-layers"),
        "minilm_last": Figure.over(trained[0, -1:], "sub-layer"),
    }


def projected_away(root: Path) -> Figures:
    """Share of the gradient's power that a sub-layer's projection deletes: the largest of a network, or the least."""
    deleted = {
        "init": _deleted(_encoder()).max(1),
        "minilm": _deleted(recorded(root).profile).max(1),
        "planar": _deleted(_planar("bias").profile).min(1),
        "planar_linear": _deleted(_planar("linear").profile).min(1),
    }
    return {name: Figure.over(values, "text" if name == "minilm" else "networks") for name, values in deleted.items()}


def one_direction(root: Path) -> Figures:
    """Deleted share times d, 256 cotangents a network: 1 if one direction of d is lost."""
    linear, layer = (_encoder(norm, ("linear",), 8) for norm in ("rms", "layernorm"))
    d = linear.settings["d"]
    return {
        "first": Figure.over(d * _deleted(linear)[:, -1]),
        "later": Figure.over(d * _deleted(linear)[:, :-1].mean(1)),
        "layernorm": Figure.over(d * _deleted(layer)[:, -1]),
    }


def product_bound(root: Path) -> Figures:
    """Gain over the article's product with the measured c_j."""
    linear, trained = _measured("linear"), recorded(root)
    found = {"trunk": linear.log_trunk - linear.log_bound, "minilm": trained.log_trunk - trained.log_bound}
    for name, branch in (("exact", "linear"), ("bias", "bias"), ("relu", "mlp:relu")):
        r = _measured(branch)
        found[name] = r.log_exact - r.log_bound  # type: ignore[operator]
    return {name: _over(logs, "text" if name == "minilm" else "networks") for name, logs in found.items()}


def estimate(root: Path) -> Figures:
    """(1 − c)^L in both readings, end to end."""
    linear = _measured("linear")
    found = {
        "trunk": linear.trunk,
        "exact": linear.exact,
        "bias": _measured("bias").exact,
        "planar_bias": _planar("bias").exact,
        "planar_linear": _planar("linear").exact,
        "planar_random": _measured("bias", reading="alignment", cotangent="gaussian").exact,
    }
    figures = {name: Figure.over(gains, geometric=True) for name, gains in found.items()}
    return figures | {"arithmetic": Figure.over([linear.closed_form], "formula")}


def _planar(branch: str) -> Contraction:
    return _measured(branch, reading="alignment")


def _deleted(p: Profile) -> np.ndarray:
    return np.clip(1 - p.projection**2, 0, None)  # below rounding there is nothing
