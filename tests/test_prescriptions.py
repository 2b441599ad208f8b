"""Constants: the papers' numbers written out, and what the law says of them by closed forms."""

import functools
import json
import math

import numpy as np
import pytest
import sympy
from refusals import refused

import gradflow
from gradflow import report
from gradflow.comparing import prescriptions
from gradflow.comparing.prescriptions import ACTS_ON, TWO_STACKS, constants, table
from gradflow.schemes import SCHEMES

FIGURES = ("alpha", "beta", "norm_scale", "weight_gain", "inner_gain", "last_gain", "closed_form")
FIXED = {"alpha": 1}
N = 6  # blocks, where one depth is enough
close = functools.partial(pytest.approx, rel=1e-12, abs=0)


@pytest.fixture
def bare(monkeypatch):
    """Leave the law out: most constants need no compiler."""
    monkeypatch.setattr(prescriptions, "FOLLOWED", 0)


def figures(found):
    return {key: found[key] for key in FIGURES if key in found}


def roots(count, power=0.5):
    return [i**power for i in range(1, count + 1)]


PUBLISHED = [
    ("deepnorm", dict(encoder=100), {"alpha": 200**0.25, "weight_gain": 800**-0.25}),
    ("deepnorm", dict(decoder=24), {"alpha": 48**0.25, "weight_gain": 192**-0.25}),
    ("deepnorm", dict(encoder=6), {"alpha": 12**0.25, "weight_gain": 48**-0.25}),
    ("deepnorm", dict(sublayers=7), {"alpha": 7**0.25, "weight_gain": 28**-0.25}),
    ("admin", dict(sublayers=200), {"alpha": roots(200), "closed_form": math.sqrt(201 / math.log(201) - 1)}),
    ("admin", dict(decoder=2), {"alpha": roots(4), "closed_form": math.sqrt(5 / math.log(5) - 1)}),
    ("sub-ln", dict(encoder=12), FIXED | {"weight_gain": math.sqrt(math.log(24))}),
    ("sub-ln", dict(decoder=1), FIXED | {"weight_gain": math.sqrt(math.log(2))}),
    ("sub-ln", dict(sublayers=5), FIXED | {"weight_gain": math.sqrt(math.log(5))}),
    ("t-fixup", dict(encoder=6), FIXED | {"weight_gain": 0.67 * 6**-0.25}),
    ("t-fixup", dict(sublayers=7), FIXED | {"weight_gain": 0.67 * 3.5**-0.25}),
    ("fixup", dict(encoder=4), FIXED | {"inner_gain": 8**-0.5, "last_gain": 0}),
    ("fixup", dict(sublayers=54, matrices=3), FIXED | {"inner_gain": 54**-0.25, "last_gain": 0}),
    ("fixup", dict(sublayers=7, matrices=5), FIXED | {"inner_gain": 7**-0.125, "last_gain": 0}),
    ("gpt2", dict(decoder=12), FIXED | {"last_gain": 24**-0.5}),
    ("residual-scaling", dict(encoder=12), FIXED | {"beta": 24**-0.5}),
    ("skipinit", dict(sublayers=9), FIXED | {"beta": 1 / 3}),
    ("rezero", dict(sublayers=9), FIXED | {"beta": 0}),
    ("layerscale", dict(encoder=18), FIXED | {"beta": 0.1}),
    ("layerscale", dict(encoder=19), FIXED | {"beta": 1e-5}),
    ("layerscale", dict(encoder=24), FIXED | {"beta": 1e-5}),
    ("layerscale", dict(encoder=36), FIXED | {"beta": 1e-6}),
    ("layernorm-scaling", dict(decoder=3), FIXED | {"norm_scale": np.repeat(roots(3, -0.5), 2).tolist()}),
    ("layernorm-scaling", dict(sublayers=4), FIXED | {"norm_scale": roots(4, -0.5)}),
    ("keel", dict(decoder=12), {"alpha": 24}),
    ("ngpt", dict(decoder=12), {"alpha": 0.95, "beta": 0.05}),
]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("name", "counts", "expected"), PUBLISHED)
def test_one_stack_has_the_papers_constants(name, counts, expected):
    found = constants(name, **counts)
    assert figures(found) == {key: close(value) for key, value in expected.items()}
    assert found["sublayers"] == counts.get("sublayers", 2 * sum(counts.values()))
    assert found["scheme"] == name
    assert ("blocks" in found, found["effect"]) == (False, None)


def test_every_row_with_constants_is_answered():
    plain = {row.name for row in SCHEMES if row.unit and row.alpha == row.beta == 1}
    assert set(ACTS_ON) == {row.name for row in SCHEMES} - plain - {"admin-closed"} | {"sub-ln"}


@pytest.mark.usefixtures("bare")
def test_deepnorm_of_an_encoder_with_a_decoder_is_not_that_of_one_stack():
    found = constants("deepnorm", encoder=6, decoder=6)
    encoder, decoder = found["encoder"], found["decoder"]
    # the case microsoft/torchscale#43, #16
    assert encoder["alpha"] == pytest.approx(1.417938, abs=5e-7)
    assert encoder["weight_gain"] == pytest.approx(0.496989, abs=5e-7)
    assert decoder["alpha"] == pytest.approx(2.059767, abs=5e-7)
    assert decoder["weight_gain"] == pytest.approx(0.343295, abs=5e-7)
    one = constants("deepnorm", encoder=6)
    assert (one["alpha"], one["weight_gain"]) == (pytest.approx(1.861210, abs=5e-7), pytest.approx(0.379918, abs=5e-7))


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("n", "m"), [(6, 6), (18, 3), (2, 100)])
def test_encoder_with_decoder(n, m):
    deep = (n**4 * m) ** (1 / 16)
    expected = {
        "deepnorm": (
            {"alpha": 0.81 * deep, "weight_gain": 0.87 / deep},
            {"alpha": (3 * m) ** 0.25, "weight_gain": (12 * m) ** -0.25},
        ),
        "admin": tuple(
            {"alpha": roots(size), "closed_form": math.sqrt((size + 1) / math.log(size + 1) - 1)}
            for size in (2 * n, 3 * m)
        ),
        "t-fixup": (FIXED | {"weight_gain": 0.67 / n**0.25}, FIXED | {"weight_gain": (9 * m) ** -0.25}),
        "sub-ln": (
            FIXED | {"weight_gain": math.sqrt(math.log(3 * m) * math.log(2 * n) / 3)},
            FIXED | {"weight_gain": math.sqrt(math.log(3 * m))},
        ),
    }
    assert expected.keys() == TWO_STACKS.keys()
    for name, stacks in expected.items():
        found = constants(name, encoder=n, decoder=m)
        for stack, figure, blocks, size in zip(("encoder", "decoder"), stacks, (n, m), (2, 3), strict=True):
            assert figures(found[stack]) == {key: close(value) for key, value in figure.items()}
            assert (found[stack]["blocks"], found[stack]["sublayers"]) == (blocks, size * blocks)


@pytest.mark.usefixtures("bare")
def test_unrounded_constants_round_to_the_published_ones():
    encoder = constants("deepnorm", encoder=1, decoder=1)["encoder"]
    assert encoder["alpha_unrounded"] == close(27 ** (-1 / 16))
    assert encoder["weight_gain_unrounded"] == close(27 ** (1 / 16) / math.sqrt(2))
    assert encoder["alpha_unrounded"] * encoder["weight_gain_unrounded"] == close(0.5**0.5)
    for key, published in (("alpha", 0.81), ("weight_gain", 0.87)):
        assert encoder[key] == close(published)
        assert round(encoder[f"{key}_unrounded"], 2) == published
    for n, m in ((6, 6), (18, 3)):
        other = constants("deepnorm", encoder=n, decoder=m)["encoder"]
        assert other["alpha_unrounded"] / other["alpha"] == close(27 ** (-1 / 16) / 0.81)
        assert other["weight_gain_unrounded"] / other["weight_gain"] == close(27 ** (1 / 16) / math.sqrt(2) / 0.87)


@pytest.mark.usefixtures("bare")
def test_alpha_multiplies_the_skip():
    # the case labmlai#145, constant branches of unit variance
    found = constants("deepnorm", sublayers=24)
    assert found["acts_on"].startswith("alpha multiplies the skip")
    for sign, trunk in ((-2, 0.1076), (2, 5.6e-10)):
        assert (1 + found["alpha"] ** sign) ** -12 == pytest.approx(trunk, rel=0.01)


SUB = 2 * N
EFFECTS = {  # (trunk, exact) of S sub-layers with q_f = χ_f = 1/2 at unit gain
    "deepnorm": ((1 + 1 / (8 * SUB) / SUB**0.5) ** (-SUB / 2), 1),
    "admin": ((1 + SUB / 2) ** -0.5, 1),
    "t-fixup": (1, (1 + 0.67**4 / N / 2) ** (SUB / 2)),
    "fixup": (1, 1),
    "gpt2": (1, 1.5**0.5),
    "residual-scaling": (1, 1.5**0.5),
    "layerscale": (1, (1 + SUB * 0.01 / 2) ** 0.5),
    "layernorm-scaling": (1, (1 + sum(1 / block for block in range(1, N + 1))) ** 0.5),
    "rezero": (1, 1),
    "skipinit": (1, (1 + 1 / (2 * SUB)) ** (SUB / 2)),
    "keel": ((1 + 1 / (2 * SUB**2)) ** (-SUB / 2), 1),
    "ngpt": ((1 + (0.05 / 0.95) ** 2) ** (-SUB / 2), 1),
    "sub-ln": None,
}


@pytest.mark.parametrize("name", ACTS_ON)
def test_effect_is_the_laws_closed_form(name):
    effect = constants(name, encoder=N)["effect"]
    if EFFECTS[name] is None:
        assert effect is None
    else:
        trunk, exact = EFFECTS[name]
        assert effect == {"branch": "mlp:relu", "trunk": close(trunk), "exact": close(exact)}


def test_effect_of_an_encoder_with_a_decoder_is_that_of_its_own_constants():
    found = constants("deepnorm", encoder=N, decoder=4)
    for stack in (found["encoder"], found["decoder"]):
        q = stack["weight_gain"] ** 4 / 2
        trunk = (1 + q / stack["alpha"] ** 2) ** (-stack["sublayers"] / 2)
        assert stack["effect"] == {"branch": "mlp:relu", "trunk": close(trunk), "exact": close(1)}


def test_effect_of_sublayers_takes_each_for_a_block():
    effect = constants("layernorm-scaling", sublayers=SUB)["effect"]
    assert effect["exact"] == close((1 + sum(1 / (2 * block) for block in range(1, SUB + 1))) ** 0.5)
    profile = gradflow.law("keel", "mlp:relu", depth=SUB, norm="layernorm")
    effect = constants("keel", sublayers=SUB)["effect"]
    assert (effect["trunk"], effect["exact"]) == (profile.trunk[0, 0], profile.exact[0, 0])


def test_deep_stacks_give_the_ends_alone(monkeypatch):
    assert constants("keel", sublayers=100_001)["effect"] is None
    monkeypatch.setattr(prescriptions, "FOLLOWED", 2)
    assert constants("keel", sublayers=2)["effect"] is not None
    for counts, blocks in ((dict(sublayers=1001), 1001), (dict(encoder=501), 501)):
        scales = constants("layernorm-scaling", **counts)["norm_scale"]
        assert scales == {"first": 1, "last": close(blocks**-0.5)}
    omega = constants("admin", sublayers=1000)["alpha"]
    assert (len(omega), omega[-1]) == (1000, close(1000**0.5))
    assert constants("admin", sublayers=10**15)["alpha"] == {"first": 1, "last": close(10**7.5)}


def plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (float, int, str)


def everything():
    """One answer of every shape."""
    for name in ACTS_ON:
        yield constants(name, encoder=np.int64(N))
        yield constants(name, sublayers=1001)
        if name in TWO_STACKS:
            yield constants(name, encoder=2, decoder=3)


@pytest.mark.usefixtures("bare")
def test_answers_are_plain_and_their_formulas_give_their_values():
    for found in everything():
        assert plain(found)
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        for stack in [found[key] for key in ("encoder", "decoder") if key in found] or [found]:
            size = 2 if stack["sublayers"] == 2 * N else 1
            for key, formula in stack["formula"].items():
                last = {"l": stack["sublayers"], "b": stack["sublayers"] // size, "N": 2, "M": 3}
                names = {name: sympy.Symbol(name) for name in (*last, "S")}
                value = sympy.sympify(formula, locals=names).subs(last | {"S": stack["sublayers"]})
                given = stack[key]
                given = given[-1] if isinstance(given, list) else given["last"] if isinstance(given, dict) else given
                assert given == close(float(value))
            numbers = {key for key in stack if key.removesuffix("_unrounded") in FIGURES}
            assert {key for key in numbers if stack[key] not in (0, 1, 0.05, 0.95)} == stack["formula"].keys()


@pytest.mark.parametrize("name", ["deepnorm", "sub-ln", "t-fixup"])
def test_gain_acts_on_ffn_value_and_output(name):
    text = ACTS_ON[name]
    assert all(part in text for part in ("FFN", "W_V and W_O", "not W_Q and W_K", "initialisation"))


def test_table_fits_and_says_it_all():
    shown = report.text(table(constants("deepnorm", encoder=N, decoder=4)))
    for piece in ("encoder", "decoder", "1.382", "1.861", "alpha_unrounded", "trunk gain", "W_V", "2203.00555"):
        assert piece in shown
    shown = report.text(table(constants("admin", sublayers=SUB)))
    for piece in ("alpha", "1 … 3.464", "closed_form", "2.017", "0.378", "alpha = sqrt(l)"):
        assert piece in shown
    assert "trunk gain" not in report.text(table(constants("sub-ln", encoder=N)))


@pytest.mark.usefixtures("bare")
def test_tables_take_a_hundred_columns():
    for found in everything():
        lines = report.text(table(found)).splitlines()
        assert max(map(len, lines)) <= 100
        assert "…" not in "".join(lines).replace(" … ", "")  # nothing is cut off


BAD = {
    "nothing": ("deepnorm", {}, "sublayers: give sublayers=S, or encoder=N and decoder=M"),
    "sublayers with encoder": ("deepnorm", dict(sublayers=4, encoder=2), "sublayers: counts one whole stack"),
    "sublayers with decoder": ("deepnorm", dict(sublayers=4, decoder=2), "sublayers: counts one whole stack"),
    "encoder zero": ("deepnorm", dict(encoder=0), "encoder: .*at least 1, got 0"),
    "decoder zero beside": ("deepnorm", dict(encoder=6, decoder=0), "decoder: .*at least 1, got 0"),
    "decoder negative": ("gpt2", dict(decoder=-3), "decoder: .*got -3"),
    "sublayers zero": ("admin", dict(sublayers=0), "sublayers: .*got 0"),
    "float": ("deepnorm", dict(encoder=6.0), "encoder: .*got 6.0"),
    "bool": ("deepnorm", dict(sublayers=True), "sublayers: .*got True"),
    "text": ("deepnorm", dict(decoder="6"), "decoder: .*got '6'"),
    "huge": ("keel", dict(encoder=10**15 + 1), "encoder: .*at most 1,000,000,000,000,000"),
    "near": ("deepnrm", dict(encoder=6), "name: unknown 'deepnrm'.*'deepnorm'"),
    "far": ("zzz", dict(encoder=6), "name: unknown 'zzz'.*admin, deepnorm.*t-fixup"),
    "without constants": ("pre-ln", dict(encoder=6), "name: unknown 'pre-ln'"),
    "number": (3, dict(encoder=6), "name: unknown 3"),
    "no form for both": ("gpt2", dict(encoder=6, decoder=4), "'gpt2'.*sublayers=12 and sublayers=12"),
    "no form for both, keel": ("keel", dict(encoder=3, decoder=5), "'keel'.*sublayers=6 and sublayers=15"),
    "decoder without cross-attention": ("t-fixup", dict(decoder=6), "decoder: .*encoder=6 for one stack"),
    "ln 1": ("sub-ln", dict(sublayers=1), "sublayers: .*√ln S is 0"),
    "matrices elsewhere": ("gpt2", dict(encoder=6, matrices=3), "matrices: only 'fixup' takes it, not 'gpt2'"),
    "one matrix": ("fixup", dict(encoder=6, matrices=1), "matrices: .*at least 2, got 1"),
    "half a matrix": ("fixup", dict(encoder=6, matrices=2.5), "matrices: .*got 2.5"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_one_line(what):
    name, counts, message = BAD[what]
    refused(lambda: constants(name, **counts), message)
