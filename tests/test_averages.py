"""Gaussian averages from a table are those by quadrature, wherever the table is used."""

import jax
import numpy as np
import pytest
import sympy

from gradflow import precision
from gradflow.moments import averages
from gradflow.numeric import to_jax
from gradflow.symbolic import moments

OWN = {"kink": sympy.Max(0, moments.z - 1), "sine": sympy.sin(2 * moments.z), "square": moments.z**2 - 1}
SYMBOLS = (moments.z, moments.power)


def both(phi, gated, powers):
    """(table, quadrature), each (7, powers)."""
    expressions = tuple(moments.integrands(phi, gated).values())
    with precision.scope("float64"):
        found = jax.lax.map(averages.averages(SYMBOLS, expressions, (2, 3)), powers)
        exact = averages.by_quadrature(to_jax(SYMBOLS, expressions), np.asarray(powers), jax.numpy)
        return np.array(found), np.array(exact)


@pytest.mark.repeats(keep=6)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", [*moments.ACTIVATIONS, *OWN])
def test_table_is_the_quadrature(name, gated):
    """Within 1e-10 of each average; of those of the defect zφ' − φ, which is 0 at degree 1, within 1e-10 of E h²."""
    powers = 2.0 ** np.random.default_rng(0).uniform(-30, 45, 150)  # beyond the table at both ends
    found, exact = both((moments.ACTIVATIONS | OWN)[name], gated, powers)
    scale = {"defect": exact[0], "overlap": exact[0]}
    for key, wanted, seen in zip(moments.MEANS, exact, found, strict=True):
        if name == "sine" and key in scale:  # above a power of 2¹⁷ sin(2√p z) differs between NumPy and XLA
            continue
        assert np.all(np.abs(seen - wanted) <= 1e-10 * np.abs(scale.get(key, wanted))), key


def test_octaves_at_their_edges():
    edges = 2.0 ** np.arange(-24.0, 40)
    powers = np.concatenate([np.nextafter(edges, 0), edges, np.nextafter(edges, np.inf)])
    found, exact = both(moments.ACTIVATIONS["gelu"], False, powers)
    np.testing.assert_allclose(found[:2], exact[:2], rtol=1e-12)


def test_what_a_series_cannot_follow_is_not_tabled():
    def octaves(phi):
        values = sympy.lambdify(SYMBOLS, tuple(moments.integrands(phi, False).values()), ["scipy", "numpy"])
        polynomials, kept = averages.table(values, (2, 3))
        assert polynomials.shape == (7, len(kept), averages.TERMS)
        return kept

    assert octaves(moments.ACTIVATIONS["gelu"]) == averages.OCTAVES
    assert octaves(OWN["kink"]).stop <= -8  # below 2⁻⁸ all is 0; then it grows as e^(−1/2p), with a kink inside a panel
    assert octaves(OWN["sine"]).stop < 10  # faster than the nodes of the quadrature
