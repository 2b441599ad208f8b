"""Every row's law: against the theory's numbers, a recursion in plain Python, and networks that it knows nothing of."""

import json
import math

import mpmath
import numpy as np
import pytest
import sympy
from refusals import refused

import gradflow
import gradflow.precision
from gradflow.branches import MLP, branch_of
from gradflow.comparing.comparisons import by_block, compare, figures
from gradflow.comparing.designs import design
from gradflow.inits import initialised
from gradflow.schemes import scheme_of
from gradflow.symbolic import moments

# of three shapes; benchmarks/agreement.py has all rows
ROWS = ["post-ln", "deepnorm", "admin", "pre-ln", "residual-scaling", "layernorm-scaling", "sandwich"]


def test_end_to_end_power_of_24_relu_sublayers():
    """The theory's list: pre-LN 13, with a final norm 1, Sandwich and res-post-norm 25, post-LN and DeepNorm 1, no norm 1.5²⁴."""
    wanted = {"pre-ln": 13, "sandwich": 25, "res-post-norm": 25, "post-ln": 1, "deepnorm": 1, "no-norm": 1.5**24}
    for name, power in wanted.items():
        assert gradflow.law(name, "mlp:relu", 24).exact[0, 0] ** 2 == pytest.approx(power, rel=1e-12)
    assert gradflow.law("pre-ln", "mlp:relu", 24, final_norm=True).exact[0, 0] == pytest.approx(1, rel=1e-12)


def test_streams_and_trunks_that_telescope():
    S = 24
    harmonic = sum(1 / l for l in range(1, S + 1))
    scaled = gradflow.law("layernorm-scaling", "mlp:relu", S)
    assert scaled.exact[0, 0] ** 2 == pytest.approx(1 + harmonic / 2, rel=1e-12)
    deep = gradflow.law("deepnorm", "mlp:relu", S)  # worst case χ = 0: ∏ α²/(α² + q), q = gain⁴/2
    assert deep.trunk[0, 0] ** 2 == pytest.approx((1 + (1 / (4 * S)) / 2 / math.sqrt(S)) ** -S, rel=1e-12)
    admin = gradflow.law("admin", "mlp:relu", S)  # ω² is pre-LN's stream: ∏ ω_s²/ω_{s+1}²
    assert admin.trunk[0, 0] ** 2 == pytest.approx(1 / (1 + S / 2), rel=1e-12)
    for name in ("rezero", "fixup"):
        p = gradflow.law(name, "mlp:gelu", S)
        np.testing.assert_array_equal(p.net, 1.0)


# the equation's slots as the papers have them: norms at (input, branch, output)
SLOTS = {"sandwich": (1, 1, 0), "res-post-norm": (0, 1, 0), "keel": (1, 0, 1), "ngpt": (0, 1, 1), "skipinit": (0, 0, 0)}


def gauss(f):
    """E f(z) by mpmath."""
    return float(mpmath.quad(lambda z: f(z) * mpmath.npdf(z), [-12, -4, -1, 0, 1, 4, 12]))


def recursion(name, depth):
    """(exact power, stream) of tanh branches, each norm and moment where it stands."""
    before, inside, after = SLOTS[name]
    alpha, beta = {"keel": (depth, 1), "ngpt": (0.95, 0.05), "skipinit": (1, depth**-0.5)}.get(name, (1, 1))
    Q, power = 1.0, 1.0
    for _ in range(depth):
        p = 1.0 if before else Q
        q = gauss(lambda z, p=p: mpmath.tanh(math.sqrt(p) * z) ** 2)
        chi = gauss(lambda z, p=p: mpmath.sech(math.sqrt(p) * z) ** 4) / (Q if before else 1)
        q, chi = (1, chi / q) if inside else (q, chi)
        V = alpha**2 * Q + beta**2 * q
        power *= (alpha**2 + beta**2 * chi) / (V if after else 1)
        Q = 1.0 if after else V
    return power, Q


@pytest.mark.parametrize("name", SLOTS)
def test_the_recursion_of_every_placement(name):
    p = gradflow.law(name, "mlp:tanh", 6)
    power, stream = recursion(name, 6)
    assert p.exact[0, 0] ** 2 == pytest.approx(power, rel=1e-10)
    if name != "ngpt":
        assert p.stream_rms[0, -1] ** 2 < stream + 1e-12


@pytest.mark.repeats(keep=4)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "relu", "gelu_tanh"])
def test_moments_at_a_power_are_mpmaths(name, gated):
    phi = moments.ACTIVATIONS[name]
    at = moments.moments_at(phi, 4.0, gated)
    value, slope = (sympy.lambdify(moments.z, e, "mpmath") for e in (phi, moments.slope(phi)))
    for p in (1e-4, 1.0, 40.0):
        root = math.sqrt(p)
        points = sorted({0.0, 1 / root, 5 / root, 25 / root, 1.0, 3.0, 12.0} - {x for x in [25 / root] if x > 12})
        points = [x for x in points if x <= 12]

        def mean(f, points=points):
            return float(sum(mpmath.quad(lambda z, s=s: f(s * z) * mpmath.npdf(z), points) for s in (1, -1)))

        q = mean(lambda z, root=root: value(root * z) ** 2)
        chi = p * mean(lambda z, root=root: slope(root * z) ** 2)
        q, chi = (p * q, p * q + p * chi) if gated else (q, chi)
        with gradflow.precision.scope("float64"):
            found = at(p)
        assert float(found.q) == pytest.approx(q, rel=1e-10)
        assert float(found.chi) == pytest.approx(chi, rel=1e-10)


def test_gated_moments_in_closed_form():
    bilinear = branch_of("glu:linear").moments()
    assert (bilinear.q, bilinear.chi, bilinear.defect) == (1, 2, 1)  # degree 2: Fx = 2f
    reglu = branch_of("glu:relu").moments()
    assert (reglu.q, reglu.chi) == (0.5, 1.0)
    assert MLP("relu", gain_in=3.0).moments().q == pytest.approx(4.5, rel=1e-12)


# --- measurement -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo():
    return compare(ROWS, "mlp:tanh", 6, 96, seeds=16)


def test_law_and_networks_agree_in_every_row(zoo):
    """Per sub-layer log rates within max(2 %, 3 s.e.), s.e. below 1 %; weight gradients at every sub-layer in the mean."""
    for entry in zoo:
        for curve in ("log_exact", "log_trunk"):
            rates = getattr(entry.measured, curve)[:, 0] / 6
            error = rates.std(ddof=1) / math.sqrt(len(rates))
            gap = rates.mean() - getattr(entry.law, curve)[0, 0] / 6
            assert error < 0.01, entry.name
            assert abs(gap) < max(0.02, 3 * error), f"{entry.name} {curve}: {gap:+.4f} ± {error:.4f}"
        np.testing.assert_allclose(figures(entry.measured)["stream"], figures(entry.law)["stream"], rtol=0.05)
        if entry.name not in ("rezero",):
            np.testing.assert_allclose(
                figures(entry.measured)["weight_grad"], figures(entry.law)["weight_grad"], rtol=0.12, err_msg=entry.name
            )


def test_laws_part_where_the_rows_do(zoo):
    """The agreement above cannot be had by any law: rows differ by far more than the band."""
    gains = [entry.law.log_exact[0, 0] for entry in zoo]
    assert max(gains) - min(gains) > 5 * 6 * 0.02


def test_comparison_as_data(zoo):
    table = zoo.to_pandas()
    assert len(table) == 6 * len(ROWS)
    assert {"scheme", "sublayer", "gradient_law", "gradient_measured"} <= set(table.columns)
    out = json.loads(json.dumps(zoo.to_dict(), allow_nan=False))
    assert [row["name"] for row in out["schemes"]] == ROWS
    assert max(map(len, str(zoo).splitlines())) <= 100
    assert "Verdict" in str(zoo)
    assert zoo["deepnorm"].scheme is scheme_of("deepnorm")
    refused(lambda: zoo["deepnrom"], "scheme: unknown 'deepnrom'")
    assert zoo._repr_html_().count("<img") == 1


def test_blocks_are_whole(zoo):
    found = by_block(zoo["pre-ln"].measured, 3)
    each = figures(zoo["pre-ln"].measured)
    assert {name: len(v) for name, v in found.items()} == dict.fromkeys(
        ("stream", "gradient", "share", "weight_grad"), 2
    )
    assert found["weight_grad"][0] == pytest.approx(np.linalg.norm(each["weight_grad"][:3]))
    assert found["gradient"][1] == each["gradient"][3]


def test_what_has_no_law_is_measured_alone():
    one = gradflow.law("pre-ln", ("attention", "mlp:relu"), 3)
    assert one.exact[0, 0] ** 2 == pytest.approx(1 + 3 * (1 + 0.5), rel=1e-12)
    several = compare("pre-ln+final", "attention", depth=1, d=16, seeds=2, tokens=3, norm="dyt")[0]
    assert several.law is None
    assert "norm: the law of several tokens knows layernorm, rms and none" in several.why
    assert several.measured.labels[-1] == "final norm"
    assert len(by_block(several.measured, 1)["stream"]) == 1  # a final norm is no block


@pytest.mark.parametrize(("init", "q"), [("xavier", 0.5 * (2 / 5) * (8 / 5)), ("he", 2.0), ("torch", 0.5 / 9)])
def test_inits_reach_the_law(init, q):
    law = gradflow.law("pre-ln", "mlp:relu", 1, init=init)
    assert law.branch_rms[0, 0] ** 2 == pytest.approx(q, rel=1e-12)
    assert law.settings["init"] == init


@pytest.mark.slow
def test_an_init_is_that_of_the_branches():
    """Given by name to law and design as to compare; attention's before it is taken for W_O W_V."""
    block = ("attention", "mlp:gelu")
    given = gradflow.law("pre-ln", initialised([branch_of(b) for b in block], "torch", 96), 2, d=96)
    named = gradflow.law("pre-ln", block, 2, d=96, init="torch")
    np.testing.assert_array_equal(named.exact, given.exact)
    assert named.branch_rms[0, 0] ** 2 == pytest.approx(1 / 9, rel=1e-12)  # of two matrices, and no bias
    entry = compare("pre-ln", block, 2, 96, seeds=1, init="torch")[0]
    np.testing.assert_array_equal(entry.law.exact, named.exact)
    # 1 + 24 q s² = 1.5², q = ½ · 2 · 2 of He's two matrices
    assert design("pre-ln", 24, exact=1.5, seeds=0, init="he", d=4096).scale == pytest.approx(
        math.sqrt((1.5**2 - 1) / 48), rel=1e-2
    )
    refused(lambda: gradflow.law("pre-ln", "mlp:relu", 2, init="gpt2"), "d: an init of fixed std needs the width")
    refused(lambda: design("pre-ln", 4, exact=1.5, seeds=0, init="xavir"), "init: unknown 'xavir'")


def test_design_meets_its_target_by_law_and_in_networks():
    found = design("pre-ln", 24, exact=1.5, seeds=0)
    assert found.scale == pytest.approx(math.sqrt((1.5**2 - 1) / 12), rel=1e-2)  # 1 + S q s² = 1.5², up to the 1/d term
    seen = design("residual-scaling", 6, weights=1.5, block="mlp:tanh", d=96, seeds=16)  # compiled for `zoo`
    assert seen.law == pytest.approx(1.5, rel=1e-6)
    np.testing.assert_allclose(np.exp(np.mean(np.log(seen.seen))), 1.5, rtol=0.1)


def test_deepnorms_gain_is_what_its_bound_asks_for():
    for depth in (8, 48):
        assert design("deepnorm", depth, knob="weights", update=1.0, seeds=0).scale == pytest.approx(1, rel=1e-9)


BAD = {
    "target: give exactly one of": ("pre-ln", {}),
    "exact: needs a positive number": ("pre-ln", {"exact": -1.0}),
    "exact: no scale gives 'post-ln'": ("post-ln", {"exact": 3.0}),
    "target: unknown 'exactt'; did you mean 'exact'": ("pre-ln", {"exactt": 1.0}),
    "knob: unknown 'skp'": ("pre-ln", {"exact": 1.0, "knob": "skp"}),
}


@pytest.mark.parametrize("message", BAD)
def test_design_refuses(message):
    scheme, arguments = BAD[message]
    refused(lambda: design(scheme, 4, seeds=0, **arguments), message)


def test_compare_refuses():
    refused(lambda: compare([]), "schemes: needs at least one")
    refused(lambda: compare(["post-ln", "preln"]), "scheme: unknown 'preln'; did you mean 'pre-ln'")
    refused(lambda: compare("post-ln", "mlp:relu", 2, 8, norm="layrnorm"), "norm: unknown 'layrnorm'")
    refused(lambda: compare("post-ln", "mlp:relu", 2, 8, init="xavir"), "init: unknown 'xavir'")
    refused(lambda: compare("post-ln", "mlp:relu", 0, 8), "depth: needs a whole number")
