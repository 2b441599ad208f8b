"""Trainability maps: the law of a first step against Monte Carlo, boundaries and errors against their definitions.

One step of a real network, and a map that was stopped, are in test_training.py, whose compilation they share.
"""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from gradflow.training.first_step import PREDICTORS, many_tokens, moved
from gradflow.training.maps import Cell, TrainabilityMap


@pytest.mark.parametrize(("tokens", "d"), [(1, 64), (2, 64), (16, 256), (1024, 512)])
def test_a_sum_over_tokens_leaves_of_the_bound_what_the_law_says(tokens, d):
    rng = np.random.default_rng(tokens)
    drawn = [(rng.normal(size=(tokens, d)), rng.normal(size=(tokens, 64))) for _ in range(max(1, 512 // tokens))]
    powers = [np.mean((h @ np.sign(h.T @ delta)) ** 2) for h, delta in drawn]
    bound = np.mean([np.abs(h).sum(1).mean() for h, _ in drawn])
    assert math.sqrt(np.mean(powers)) / bound == pytest.approx(many_tokens(tokens, d), rel=0.04)


@pytest.mark.parametrize("cosine", [0.0, 0.5, 0.95])
def test_the_law_of_signs_holds_for_tokens_that_are_alike(cosine):
    rng = np.random.default_rng(1)
    seen, told = [], []
    for _ in range(40):  # one direction that all tokens share is far from Gaussian by itself
        h = math.sqrt(1 - cosine) * rng.normal(size=(48, 256)) + math.sqrt(cosine) * rng.normal(size=256)
        gradient = rng.normal(size=(64, 48)) @ h
        seen.append(np.mean((h @ np.sign(gradient).T) ** 2))
        told.append(moved(jnp.asarray(gradient), jnp.asarray(h)))
    assert np.mean(told) == pytest.approx(np.mean(seen), rel=0.03)


RATES = (1e-3, 1e-2, 1e-1)


def drawn_map(fit=None):
    """A map whose boundary lies at 10^-1.5/depth for a, between the last two rates for b, beyond them for c."""
    edges = {("a", 1): 2, ("a", 10): 1, ("b", 1): 2, ("b", 10): 2, ("c", 1): 3, ("c", 10): 0}
    cells = [
        Cell(*place, 0, rate, loss, loss, 0.1, i < edge)
        for place, edge in edges.items()
        for i, rate in enumerate(RATES)
        for loss in [2.0 if i < edge else math.nan if i == 2 else 3.2]
    ]
    slopes = {name: dict.fromkeys(edges, 1.0) for name in PREDICTORS}
    slopes["update bound"] = {place: float(place[1]) for place in edges}
    shared = {
        "text": "t",
        "text_digest": "0",
        "branch": "f",
        "norm": "layernorm",
        "init": "xavier",
        "optimizer": "adam",
    }
    shared |= {"schedule": "constant", "dtype": "float32", "eps": 1e-5, "b1": 0.9, "b2": 0.98, "unigram": 3.2}
    shared |= dict.fromkeys(("d", "heads", "batch", "tokens", "steps", "key"), 1)
    return TrainabilityMap(shared, tuple(cells), slopes, fit)


def test_boundaries_and_errors_are_as_defined(tmp_path):
    m = drawn_map()
    rates = {b.place: b.rate for b in m.boundaries}
    assert rates["a", 1] == pytest.approx(10**-1.5)
    assert rates["a", 10] == pytest.approx(10**-2.5)
    assert math.isnan(rates["c", 1])
    assert m.predictions["update bound"].rate("b", 10, 0) == pytest.approx(10**-2.5)
    # C is read off (a, 1); (a, 10), (b, 1) and (b, 10) are told; c is known from one side: above 0.1, and below 0.001
    law, plain = m.errors()["update bound"], m.errors()["one rate"]
    assert (law["median"], law["largest"]) == (pytest.approx(0, abs=1e-12), pytest.approx(1))
    assert (plain["median"], plain["largest"]) == (pytest.approx(0, abs=1e-12), pytest.approx(1))
    assert (law["known"], law["one_sided"], law["wrong_side"]) == (3, 2, 2)
    assert drawn_map(("b", 10)).predictions["update bound"].rate("a", 1, 0) == pytest.approx(10**-0.5)
    shown = str(m)
    assert max(map(len, shown.splitlines())) <= 100
    assert "diverges" in shown
    assert "3.200×" in shown
    assert "> 0.1" in shown
    assert "0.032*" in shown
    held = json.loads(json.dumps(m.to_dict(), allow_nan=False))
    assert held["errors"]["update bound"]["largest"] == pytest.approx(1)
    assert held["fitted"] == [{"scheme": "a", "depth": 1, "warmup": 0}]
    m.plot(str(tmp_path / "map.png"))
    walls = [line for line in m.plot().axes[0].lines if line.get_label() == "boundary as seen"]
    np.testing.assert_allclose([line.get_xdata()[0] for line in walls], [10**-1.5, 10**-2.5])
