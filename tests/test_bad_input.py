"""Bad arguments: each is one ``ValueError`` line that names the argument, before anything is measured."""

import math

import numpy as np
import pytest
import sympy

import gradflow
from gradflow.branches import MLP, branch_of
from gradflow.schemes import Scheme, scheme_of
from gradflow.stack import Stack

NAN, INF = math.nan, math.inf

# what is wrong -> (options, what the message must say)
BAD = {
    "depth zero": (dict(depth=0), "depth"),
    "depth negative": (dict(depth=-3), "depth"),
    "depth fraction": (dict(depth=2.5), "depth"),
    "depth whole float": (dict(depth=24.0), "depth"),
    "depth bool": (dict(depth=True), "depth"),
    "depth numpy bool": (dict(depth=np.bool_(True)), "depth"),
    "depth text": (dict(depth="24"), "depth"),
    "depth none": (dict(depth=None), "depth"),
    "depth empty": (dict(depth=[]), "depth"),
    "depth empty array": (dict(depth=np.array([], int)), "depth"),
    "depth in a list": (dict(depth=[2, 0]), "depth"),
    "depth float in a list": (dict(depth=[2, 3.5]), "depth"),
    "depth 0-d array": (dict(depth=np.array(3.0)), "depth"),
    "depth nested": (dict(depth=[[2, 3]]), "depth"),
    "d one": (dict(d=1), "d: .*2"),
    "d zero": (dict(d=0), "d: "),
    "d negative": (dict(d=-8), "d: "),
    "d fraction": (dict(d=7.5), "d: "),
    "d bool": (dict(d=True), "d: "),
    "d text": (dict(d="512"), "d: "),
    "d none": (dict(d=None), "d: "),
    "d two under layernorm": (dict(d=2, norm="layernorm"), "d: .*3.*LayerNorm.*rank"),
    "d huge without probes": (dict(d=40_000), "d: .*GiB.*probes"),
    "c zero": (dict(c=0), "c: "),
    "c one": (dict(c=1), "c: "),
    "c negative": (dict(c=-0.2), "c: "),
    "c above one": (dict(c=1.5), "c: "),
    "c nan": (dict(c=NAN), "c: "),
    "c infinite": (dict(c=INF), "c: "),
    "c text": (dict(c="big"), "c: "),
    "c none": (dict(c=None), "c: "),
    "c bool": (dict(c=True), "c: "),
    "c array": (dict(c=np.array([0.1, 0.2])), "c: "),
    "c complex": (dict(c=0.2 + 0.1j), "c: "),
    "scheme near": (dict(scheme="postln"), "scheme: unknown 'postln'.*'post-ln'"),
    "scheme upper": (dict(scheme="Pre-LN"), "scheme: unknown 'Pre-LN'.*'pre-ln'"),
    "scheme far": (dict(scheme="qqq"), "scheme: unknown 'qqq'.*post-ln.*pre-ln"),
    "scheme number": (dict(scheme=3), "scheme"),
    "branch near": (dict(branch="lineer"), "branch: unknown 'lineer'.*'linear'"),
    "branch activation": (dict(branch="mlp:rleu"), "branch: unknown 'mlp:rleu'.*'mlp:relu'"),
    "branch empty": (dict(branch=""), "branch"),
    "branch none": (dict(branch=None), "branch"),
    "branch number": (dict(branch=7), "branch"),
    "norm near": (dict(norm="layer-norm"), "norm: unknown 'layer-norm'.*'layernorm'"),
    "norm outside eps": (dict(norm="rms-outside"), "norm"),
    "norm number": (dict(norm=5), "norm"),
    "reading near": (dict(reading="aligment"), "reading: unknown 'aligment'.*'alignment'"),
    "reading none": (dict(reading=None), "reading"),
    "tokens zero": (dict(tokens=0), "tokens"),
    "tokens fraction": (dict(tokens=1.5), "tokens"),
    "seeds zero": (dict(seeds=0), "seeds"),
    "seeds bool": (dict(seeds=True), "seeds"),
    "seeds negative": (dict(seeds=-1), "seeds"),
    "key negative": (dict(key=-1), "key"),
    "key text": (dict(key="a"), "key"),
    "key too large": (dict(key=2**80), "key"),
    "probes zero": (dict(probes=0), "probes"),
    "probes fraction": (dict(probes=2.5), "probes"),
    "dtype near": (dict(dtype="float46"), "dtype: unknown 'float46'.*'float64'"),
    "dtype half": (dict(dtype="float16"), "dtype"),
    "dtype none": (dict(dtype=None), "dtype"),
    "cotangent name": (dict(cotangent="gausian"), "cotangent: unknown 'gausian'.*'gaussian'"),
    "cotangent aligned in the norm reading": (dict(cotangent="aligned"), "cotangent.*alignment"),
    "cotangent nan": (dict(d=4, cotangent=[1, NAN, 0, 0]), "cotangent: .*NaN"),
    "cotangent infinite": (dict(d=4, cotangent=[1, INF, 0, 0]), "cotangent: .*infinite"),
    "cotangent zero": (dict(d=4, cotangent=np.zeros(4)), "cotangent: is zero"),
    "cotangent short": (dict(d=4, cotangent=np.ones(3)), "cotangent: needs shape"),
    "cotangent of one token": (dict(d=4, tokens=2, cotangent=np.ones(4)), "cotangent: needs shape"),
    "cotangent ragged": (dict(d=4, cotangent=[[1, 2], [3]]), "cotangent"),
    "cotangent complex": (dict(d=4, cotangent=np.ones(4, complex)), "cotangent: .*complex"),
    "cotangent text": (dict(d=4, cotangent=np.array(["a"] * 4)), "cotangent"),
    "cotangent objects": (dict(d=4, cotangent=np.array([None] * 4)), "cotangent"),
    "cotangent bools": (dict(d=4, cotangent=np.ones(4, bool)), "cotangent"),
    "cotangent in the null space": (dict(d=4, norm="layernorm", cotangent=np.ones(4)), "cotangent: .*null space"),
    "cotangent in the null space, float32": (
        dict(d=100, norm="layernorm", cotangent=np.full(100, 0.1), dtype="float32"),
        "cotangent: .*null space",
    ),
    "cotangent with probes": (dict(d=4, cotangent=np.ones(4), probes=2), "probes: .*cotangent"),
    "alignment reading of an mlp": (dict(reading="alignment", branch="mlp:relu"), "reading"),
    "alignment reading of pre-ln": (dict(reading="alignment", scheme="pre-ln"), "reading"),
    "alignment reading of tokens": (dict(reading="alignment", tokens=2), "reading"),
    "alignment reading with a final norm": (dict(reading="alignment", final_norm=True), "reading"),
    "alignment cotangent with probes": (dict(reading="alignment", cotangent="aligned", probes=2), "probes"),
}


def refused(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400


@pytest.mark.parametrize("case", BAD)
def test_contraction_refuses(case):
    options, message = BAD[case]
    refused(lambda: gradflow.contraction(**(dict(depth=2, d=8, seeds=1) | options)), f"^{message}")


def test_c_has_no_meaning_where_the_branch_is_normalised():
    for row in (
        Scheme("peri", "test", "", norm_in=True, norm_branch=True),
        Scheme("res-post-norm", "test", "", norm_branch=True),
    ):
        refused(lambda row=row: gradflow.contraction(depth=2, d=8, seeds=1, scheme=row), "^c: .*normalised")


@pytest.mark.parametrize(
    "row",
    [
        Scheme("bare", "test", "no norm"),
        Scheme("both", "test", "two norms", norm_in=True, norm_out=True),
        Scheme("pure", "test", "α = 0", norm_out=True, alpha=sympy.Integer(0)),
        "deepnorm",
        "mix-ln",
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_c_is_for_rows_of_one_length_norm(row):
    refused(lambda: gradflow.contraction(depth=2, d=8, seeds=1, scheme=row), "^scheme: ")


def test_a_law_needs_a_skip_path():
    row = Scheme("pure", "test", "α = 0", norm_out=True, alpha=sympy.Integer(0))
    refused(lambda: gradflow.law(row, "linear", 2), "^scheme: .*α = 0")


LAW = {
    "depth": (dict(depth=0), "depth"),
    "depth float": (dict(depth=2.0), "depth"),
    "depth bool": (dict(depth=True), "depth"),
    "scheme": (dict(scheme="prelm"), "scheme: unknown 'prelm'.*'pre-ln'"),
    "block": (dict(block=("mlp:rleu",)), "branch: unknown 'mlp:rleu'.*'mlp:relu'"),
    "empty block": (dict(block=()), "block"),
    "norm": (dict(norm="batchnorm"), "norm: unknown 'batchnorm'"),
    "d": (dict(d=2), "d: "),
    "d rms": (dict(d=1, norm="rms"), "d: "),
    "d nan": (dict(d=NAN), "d: "),
    "tokens": (dict(tokens=0), "tokens"),
    "probes": (dict(probes=0), "probes"),
    "probes nan": (dict(probes=NAN), "probes"),
}


@pytest.mark.parametrize("case", LAW)
def test_law_refuses(case):
    options, message = LAW[case]
    refused(lambda: gradflow.law(**(dict(scheme="post-ln", depth=2) | options)), f"^{message}")


STACK = {
    "depth": (dict(depth=0), "depth"),
    "depth bool": (dict(depth=True), "depth"),
    "d": (dict(d=1, norm="rms"), "d: "),
    "d under layernorm": (dict(d=2), "d: .*3.*LayerNorm"),
    "norm": (dict(norm="rmsnorm"), "norm: unknown 'rmsnorm'.*'rms'"),
    "scheme": (dict(scheme="post_ln"), "scheme: unknown 'post_ln'.*'post-ln'"),
    "branch": (dict(block="mlp"), "branch: unknown 'mlp'.*mlp:"),
    "empty block": (dict(block=()), "block"),
    "eps": (dict(eps=-1.0), "eps"),
    "dtype": (dict(dtype="float16"), "dtype"),
}


@pytest.mark.parametrize("case", STACK)
def test_stack_make_refuses(case):
    options, message = STACK[case]
    refused(lambda: Stack.make(**(dict(scheme="post-ln", block="linear", depth=2, d=8) | options)), f"^{message}")


@pytest.mark.parametrize("activation", ["rleu", sympy.Symbol("a") * sympy.Symbol("b"), sympy.Integer(3)])
def test_an_activation_is_a_name_or_an_expression_in_one_symbol(activation):
    refused(lambda: MLP(activation), "^activation: ")


def test_lookups_return_objects_as_they_are():
    f = MLP("tanh", ratio=2)
    assert branch_of(f) is f
    row = Scheme("mine", "test", "")
    assert scheme_of(row) is row


def test_derive_and_names_refuse_with_near_names():
    refused(lambda: gradflow.derive("layernrom"), "layernorm")
    with pytest.raises(AttributeError, match="contractoin"):
        _ = gradflow.contractoin


def test_a_figure_that_is_not_there_is_named():
    profile = gradflow.law("post-ln", depth=2)
    refused(lambda: profile.summary("gains"), "gains")


def test_a_plot_wants_a_format_that_it_can_write(tmp_path):
    r = gradflow.contraction(depth=2, d=8, seeds=1)
    refused(lambda: r.plot(str(tmp_path / "figure.xyz")), "xyz|png")
    refused(lambda: r.plot(str(tmp_path / "none" / "figure.png")), "none|path|folder|directory")
