"""Each rule fires on a file that has its fault and not on the mended twin; figures are the law's; bad files are one line."""

import json
import math
import re
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st
from refusals import refused

from gradflow.linting.architectures import BYTES, KEYS, LAYOUTS, Architecture, read
from gradflow.linting.constants import Case
from gradflow.linting.lint import lint, table
from gradflow.linting.rules import residual_init
from gradflow.report import text
from gradflow.schemes import scheme_of

SIZE = {"depth": 4, "d": 64}  # S = 8
PRE = {"scheme": "pre-ln", "final_norm": True}
ALPHA, GAIN, UNIT = 8**0.25, 32**-0.25, 8**-0.5
DEEP = {"scheme": "deepnorm", "alpha": round(ALPHA, 3), "weight_gain": round(GAIN, 3)}
BOTH = {"scheme": "deepnorm", "encoder": 4, "decoder": 2, "d": 64}
ENCODER = {"alpha": 0.81 * (4**4 * 2) ** (1 / 16), "weight_gain": 0.87 * (4**4 * 2) ** (-1 / 16)}
DECODER = {"decoder_alpha": 6**0.25, "decoder_weight_gain": 24**-0.25}


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(v)}" for key, v in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture
def file(tmp_path):
    """Write a description; keys that are ``None`` are left out."""

    def write(keys, name="model.toml"):
        held = {key: value for key, value in keys.items() if value is not None}
        path = tmp_path / name
        path.write_text(
            "".join(f"{key} = {toml(v)}\n" for key, v in held.items()) if ".toml" in name else json.dumps(held)
        )
        return path

    return write


# fault -> (the file, what mends it, level, key, what the sentence says)
FAULTS = {
    "alpha with pre-LN": (PRE | {"alpha": 1.5}, {"alpha": 1}, "error", "alpha", "output norm.*1.5^8 = 10^1.41"),
    "alpha on pre-LN's branch": (
        PRE | {"alpha": UNIT, "alpha_on": "branch"},
        {"scheme": "residual-scaling", "alpha": None, "alpha_on": None, "beta": UNIT},
        "error",
        "alpha",
        "write beta = 0.353553",
    ),
    "alpha without any norm": ({"scheme": "skipinit", "alpha": 2}, {"alpha": None}, "error", "alpha", "skipinit lacks"),
    "alpha on DeepNorm's branch": (
        DEEP | {"alpha_on": "branch"},
        {"alpha_on": "skip"},
        "error",
        "alpha_on",
        "multiply x by alpha",
    ),
    "pre-LN without final norm": (
        {"scheme": "pre-ln"},
        {"final_norm": True},
        "error",
        "final_norm",
        "rms goes from 1 to 2.589 at",
    ),
    "sandwich without final norm": (
        {"scheme": "peri-ln"},
        {"final_norm": True},
        "error",
        "final_norm",
        "goes from 1 to 3 at",
    ),
    "res-post-norm without final norm": (
        {"scheme": "olmo2", "norm": "rms"},
        {"final_norm": True},
        "error",
        "final_norm",
        "goes from 1 to 3 at",
    ),
    "mix-LN without final norm": (
        {"scheme": "mix-ln"},
        {"final_norm": True},
        "error",
        "final_norm",
        "final_norm = true",
    ),
    "post-LN with final norm": (
        {"scheme": "post-ln", "final_norm": True},
        {"final_norm": False},
        "warning",
        "final_norm",
        "no-op",
    ),
    "DeepNorm with final norm": (DEEP | {"final_norm": True}, {"final_norm": None}, "warning", "final_norm", "no-op"),
    "alpha of N blocks for 2N": (
        DEEP | {"alpha": 4**0.25},
        {"alpha": ALPHA},
        "error",
        "alpha",
        "S^(1/4) = 1.682 at S = 8 .*(2N)^(1/4) with 4 for 2N",
    ),
    "alpha of S for N": (DEEP | {"alpha": 2.0}, {"alpha": ALPHA}, "error", "alpha", "(2N)^(1/4) with 8 for N"),
    "alpha of a decoder": (DEEP | {"alpha": 12**0.25}, {"alpha": ALPHA}, "error", "alpha", "(3M)^(1/4).*decoder"),
    "DeepNorm without alpha's power": (DEEP | {"alpha": 1}, {"alpha": ALPHA}, "error", "alpha", "but post-ln's"),
    "alpha 2 % off": (DEEP | {"alpha": 1.02 * ALPHA}, {"alpha": 1.005 * ALPHA}, "error", "alpha", "set alpha = 1.682"),
    "post-LN with DeepNorm's alpha": (
        {"scheme": "post-ln", "alpha": 1.68},
        {"scheme": "deepnorm", "weight_gain": GAIN},
        "error",
        "alpha",
        "but deepnorm's",
    ),
    "one alpha for Admin": ({"scheme": "admin", "alpha": 2}, {"alpha": None}, "error", "alpha", "from 1 to 2"),
    "pre-LN with a scaled branch": (
        PRE | {"beta": UNIT},
        {"scheme": "residual-scaling"},
        "warning",
        "beta",
        "but residual-scaling's",
    ),
    "ReZero that does not start at 0": (
        {"scheme": "rezero", "beta": 1},
        {"beta": 0},
        "warning",
        "beta",
        "rezero's 0 at",
    ),
    "DeepNorm without gain": (
        DEEP | {"weight_gain": None},
        {"weight_gain": GAIN},
        "warning",
        "weight_gain",
        "(4S)^(-1/4) = 0.4204",
    ),
    "gain of N blocks for S": (
        DEEP | {"weight_gain": 16**-0.25},
        {"weight_gain": GAIN},
        "error",
        "weight_gain",
        "(8N)^(-1/4) with 4 for 2N",
    ),
    "DeepNorm with unit gain": (DEEP | {"weight_gain": 1}, {"weight_gain": GAIN}, "error", "weight_gain", "0.4204"),
    "T-Fixup without gain": (
        {"scheme": "t-fixup"},
        {"weight_gain": 0.67 * 4**-0.25},
        "warning",
        "weight_gain",
        ".67(S/2)^(-1/4) = 0.4738",
    ),
    "GPT-2 with unit init": (
        PRE | {"scheme": "gpt2", "init": {"output_gain": 1}},
        {"init": {"output_gain": 0.354}},
        "error",
        "init.output_gain",
        "S^(-1/2) = 0.3536 .*rms goes from 1 to 2.589",
    ),
    "GPT-2 with free text": (
        PRE | {"scheme": "gpt2", "init": "normal(0.02)"},
        {"init": {"output_gain": UNIT}},
        "note",
        "init",
        "free text",
    ),
    "deep pre-LN": (
        PRE | {"depth": 13},
        {"init": {"output_gain": 26**-0.5}},
        "note",
        "init",
        "rms goes from 1 to 4.419 over 13 blocks, and block 1's weight gradients are 2.97 times block 13's",
    ),
    "deep pre-LN of another scheme": (PRE | {"depth": 13}, {"scheme": "gpt2"}, "note", "init", "as gpt2 does"),
    "no norm, and deep": (
        {"scheme": "no-norm", "depth": 5000},
        {"scheme": "skipinit"},
        "error",
        "scheme",
        "no law over S = 10000 .*leaves the range of float64",
    ),
    "a normed branch of 0": (
        PRE | {"scheme": "sandwich", "init": {"output_gain": 0}},
        {"init": None},
        "error",
        "init.output_gain",
        "nothing to divide",
    ),
    "one stack's alpha in two": (
        BOTH | {"alpha": ALPHA},
        ENCODER | DECODER,
        "error",
        "alpha",
        "(2N)^(1/4) of one stack of 4 blocks.*.81(N^4 M)^(1/16) = 1.196 .*(3M)^(1/4) = 1.565",
    ),
    "both stacks' blocks as one": (
        BOTH | {"alpha": 12**0.25},
        ENCODER | DECODER,
        "error",
        "alpha",
        "stack of 6 blocks",
    ),
    "one stack's gain in two": (
        BOTH | ENCODER | {"weight_gain": GAIN},
        ENCODER | DECODER,
        "error",
        "weight_gain",
        "(8N)^(-1/4) of one stack of 4 blocks.*.87(N^4 M)^(-1/16) = 0.5891 .*(12M)^(-1/4) = 0.4518",
    ),
    "the encoder's alpha for both": (BOTH | ENCODER, DECODER, "warning", "alpha", "for the encoder alone"),
    "the decoder's gain for both": (
        BOTH | {"weight_gain": 24**-0.25},
        ENCODER | DECODER,
        "warning",
        "weight_gain",
        "for the decoder alone",
    ),
    "a wrong decoder": (BOTH | ENCODER | DECODER | {"decoder_alpha": 3}, DECODER, "error", "alpha", "not that of two"),
    "no gain for two stacks": (BOTH, ENCODER | DECODER, "warning", "weight_gain", "one for each stack"),
    "depth beside the stacks'": (
        {"scheme": "post-ln", "encoder": 5, "decoder": 2, "depth": 4, "d": 64},
        {"encoder": 4},
        "warning",
        "depth",
        "depth = 4 contradicts encoder = 5 and decoder = 2",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_and_its_mended_twin_is_clean(file, fault):
    keys, mend, level, key, says = FAULTS[fault]
    keys = keys if "encoder" in keys else SIZE | keys
    result = lint(read(file(keys)))
    (found,) = [f for f in result.findings if (f.level, f.key) == (level, key)]
    said = re.escape(says).replace(re.escape(".*"), ".*")
    assert re.search(said, found.text), found.text
    assert "\n" not in found.text
    assert result.passed == (level != "error")
    twin = lint(read(file(keys | mend)))
    assert twin.passed
    # a note on what the figures are of is no fault
    assert {(f.level, f.key) for f in twin.findings} <= {("note", "block"), ("note", "decoder")}


def test_a_stream_that_grows_is_noted_from_13_blocks_on(file):
    architecture = read(file(SIZE | PRE))
    figures, row = lint(architecture).figures, scheme_of("pre-ln")
    for depth in (12, 13):
        case = Case(replace(architecture, depth=depth), row, row.multipliers(2 * depth), (), figures, None)
        assert [f.key for f in residual_init(case)] == ["init"] * (depth > 12)


def test_figures_are_those_of_the_law_in_closed_form(file):
    # linear sandwich: power (1 + S)/Q_b at block b's output, Q_b = 1 + 2b; no 1/d term
    sandwich = SIZE | {"scheme": "sandwich", "block": ["linear", "linear"], "norm": "rms"}
    figures = lint(read(file(sandwich))).figures
    assert (figures.exact, figures.trunk, figures.output_rms) == pytest.approx((3, 1, 3))
    assert figures.gradient_ratio == pytest.approx(3**0.5)
    assert (figures.gradient_blocks, figures.weight_blocks) == ((1, 4), (1, 4))
    # dL/dW of sub-layer l, its own Jacobian unit: ‖g_l‖, a block's two in quadrature
    power = [1 / (2 * b) + 1 / (2 * b + 1) for b in (1, 4)]
    assert figures.weight_ratio == pytest.approx((power[0] / power[1]) ** 0.5)


def test_figures_take_the_numbers_that_the_file_states(file):
    wide = {"depth": 4, "d": 10**6, "scheme": "deepnorm", "block": ["linear", "linear"]}

    def trunk(**keys):
        return lint(read(file(wide | keys))).figures.trunk

    def power(a, b):
        return (a**2 / (a**2 + b**2)) ** 4

    assert trunk() == pytest.approx(power(ALPHA, GAIN), rel=1e-4)
    assert trunk(alpha=3, weight_gain=0.5) == pytest.approx(power(3, 0.5), rel=1e-4)
    assert trunk(alpha=3, beta=0.2, weight_gain=0.5) == pytest.approx(power(3, 0.1), rel=1e-4)
    assert trunk(alpha=3, weight_gain=0.5, alpha_on="branch") == pytest.approx(power(1, 1.5), rel=1e-4)
    assert trunk(alpha=3, weight_gain=0.5, init={"output_gain": 0.7}) == pytest.approx(power(3, 0.7), rel=1e-4)
    both = {"encoder": 4, "decoder": 2}
    assert trunk(**both) == pytest.approx(power(ENCODER["alpha"], ENCODER["weight_gain"]), rel=1e-4)


def test_two_blocks_beyond_the_ratio_are_named(file):
    architecture = read(file(SIZE | PRE | {"scheme": "sandwich", "block": ["linear", "linear"], "norm": "rms"}))
    assert lint(architecture, 1.74).passed  # √3
    failed = lint(architecture, 1.73)
    (found,) = [f for f in failed.findings if f.level == "error"]
    assert found.key == "max_ratio"
    assert "block 1 gets 1.732 times the gradient of block 4, more than max_ratio = 1.73" in found.text
    assert failed.to_dict()["max_ratio"] == 1.73
    for bad in (0.5, -1, math.nan, math.inf, True, "2"):
        refused(lambda bad=bad: lint(architecture, bad), "max_ratio: needs a number of at least 1")


def test_attention_is_said_to_be_that_of_one_token(file):
    (note,) = lint(read(file(SIZE | PRE))).findings
    assert (note.level, note.key) == ("note", "block")
    assert "tokens = 1" in note.text
    assert not lint(read(file(SIZE | PRE | {"block": ["linear", "mlp:gelu"]}))).findings


@pytest.mark.parametrize("name", ["deep pre-LN", "one stack's alpha in two", "no norm, and deep"])
def test_a_result_is_json_and_a_table_of_100_columns(file, name):
    keys = SIZE | FAULTS[name][0] | {"init": "[bold]\x1b[31m text"}
    result = lint(read(file(keys)))
    held = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert held["passed"] is result.passed
    assert [f["text"] for f in held["findings"]] == [f.text for f in result.findings]
    levels = [f["level"] for f in held["findings"]]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    assert held["architecture"]["block"] == ["attention", "mlp:gelu"]
    shown = text(table(result))
    assert str(result) == shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "\x1b" not in shown
    for finding in result.findings:
        assert finding.text.split()[-1] in shown


def test_toml_and_json_say_the_same(file):
    keys = SIZE | DEEP | {"block": ["attention", "glu:silu"], "norm": "rms", "init": {"output_gain": 0.5}, "beta": 1}
    a, b = (read(file(keys, name)) for name in ("a.toml", "a.json"))
    assert a.to_dict() | {"file": b.file} == b.to_dict()
    assert (a.scheme, a.depth, a.d, a.output_gain, a.sublayers) == ("deepnorm", 4, 64, 0.5, 8)
    assert read(file({"scheme": "peri-ln", "encoder": 3, "d": 64, "alpha": None})) == Architecture(
        file=a.file.replace("a.toml", "model.toml"), scheme="sandwich", depth=3, d=64, encoder=3
    )


LLAMA = {"num_hidden_layers": 3, "hidden_size": 64, "hidden_act": "silu"}
FOREIGN = {
    "gpt2": (
        {"n_layer": 3, "n_embd": 64, "activation_function": "gelu_new"},
        "gpt2",
        "mlp:gelu_tanh",
        "layernorm",
        True,
    ),
    "bert": (LLAMA | {"hidden_act": "gelu"}, "post-ln", "mlp:gelu", "layernorm", False),
    "roberta": (LLAMA | {"hidden_act": "gelu"}, "post-ln", "mlp:gelu", "layernorm", False),
    "distilbert": ({"n_layers": 3, "dim": 64, "activation": "relu"}, "post-ln", "mlp:relu", "layernorm", False),
    "llama": (LLAMA, "pre-ln", "glu:silu", "rms", True),
    "mistral": (LLAMA, "pre-ln", "glu:silu", "rms", True),
    "qwen2": (LLAMA, "pre-ln", "glu:silu", "rms", True),
    "gemma2": (LLAMA | {"hidden_activation": None}, "sandwich", "glu:gelu_tanh", "rms", True),
    "olmo2": (LLAMA, "res-post-norm", "glu:silu", "rms", True),
    "t5": ({"num_layers": 3, "d_model": 64, "feed_forward_proj": "gated-gelu"}, "pre-ln", "glu:gelu_tanh", "rms", True),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_hugging_face_config_is_read(tmp_path, kind):
    config, scheme, mlp, norm, final = FOREIGN[kind]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "vocab_size": 9, "anything": [math.inf]} | config))
    found = read(path)
    assert (found.scheme, found.depth, found.d) == (scheme, 3, 64)
    assert (found.block[1], found.norm, found.final_norm, found.model_type) == (mlp, norm, final, kind)
    assert (found.encoder, found.decoder) == ((3, 3) if kind == "t5" else (None, None))
    for key in [key for key, value in config.items() if isinstance(value, int)]:
        for bad in (None, 0, "3", 2.5, True, 10**400, [3]):
            path.write_text(json.dumps({"model_type": kind} | config | {key: bad}))
            refused(lambda: read(path), f"config.json'.*'{key}'")


def test_t5_has_two_stacks(file):
    config = {"model_type": "t5", "num_layers": 3, "num_decoder_layers": 2, "d_model": 64}
    assert (a := read(file(config, "t5.json"))).block == ("attention", "mlp:relu")
    assert (a.depth, a.encoder, a.decoder) == (3, 3, 2)
    alone = read(file(config | {"is_encoder_decoder": False}, "t5.json"))
    assert (alone.encoder, alone.decoder) == (None, None)


GOOD = SIZE | {"scheme": "pre-ln"}
BAD = {
    "unknown key": (GOOD | {"shceme": "pre-ln"}, "key: unknown 'shceme'; did you mean 'scheme'"),
    "key of no kind": (GOOD | {"zzz": 1}, "key: unknown 'zzz'; choose from"),
    "unknown scheme": (GOOD | {"scheme": "preln"}, "'scheme': unknown 'preln'; did you mean 'pre-ln'"),
    "no scheme": (SIZE, "has no 'scheme'"),
    "no depth": ({"scheme": "pre-ln", "d": 64}, "has no 'depth'"),
    "no width": ({"scheme": "pre-ln", "depth": 4}, "has no 'd'"),
    "depth 0": (GOOD | {"depth": 0}, "'depth': needs a whole number of at least 1, got 0"),
    "depth of text": (GOOD | {"depth": "4"}, "'depth': needs a whole number"),
    "depth of a fraction": (GOOD | {"depth": 4.0}, "'depth': needs a whole number"),
    "depth true": (GOOD | {"depth": True}, "'depth': needs a whole number"),
    "depth of a list": (GOOD | {"depth": [4]}, "'depth': needs one value, got a list"),
    "endless depth": (GOOD | {"depth": 10**100}, "'depth': needs a number below"),
    "too deep": (GOOD | {"depth": 10**6}, "'depth': needs at most 20000"),
    "too deep in all": (GOOD | {"depth": 10**4, "block": ["linear"] * 3}, "'depth': needs at most 20,000 sub-layers"),
    "narrow": (GOOD | {"d": 2}, "'d': needs a whole number of at least 3"),
    "alpha NaN": (GOOD | {"alpha": math.nan}, "'alpha': needs a number from 1e-09 to 1e.09, got nan"),
    "alpha infinite": (GOOD | {"alpha": math.inf}, "'alpha': needs a number"),
    "alpha 0": (GOOD | {"alpha": 0}, "'alpha': needs a number"),
    "beta of text": (GOOD | {"beta": "1"}, "'beta': needs a number from 1e-09 to 1e.09 or 0, got '1'"),
    "beta true": (GOOD | {"beta": True}, "'beta': needs a number"),
    "gain negative": (GOOD | {"weight_gain": -1}, "'weight_gain': needs a number"),
    "alpha elsewhere": (GOOD | {"alpha_on": "skips"}, "'alpha_on': unknown 'skips'; did you mean 'skip'"),
    "final norm of text": (GOOD | {"final_norm": "yes"}, "'final_norm': needs true or false, got 'yes'"),
    "unknown norm": (GOOD | {"norm": "rmsnorm"}, "'norm': unknown 'rmsnorm'; did you mean 'layernorm' or 'rms'"),
    "unknown branch": (GOOD | {"block": ["atention"]}, "'block': unknown 'atention'; did you mean 'attention'"),
    "no branch": (GOOD | {"block": []}, "'block': needs from 1 to 16 branches, got 0"),
    "branch of a number": (GOOD | {"block": [3]}, "'block': unknown 3"),
    "init of a number": (GOOD | {"init": 1}, "'init': needs a text or"),
    "init with a near key": (GOOD | {"init": {"outputgain": 1}}, "'init', key: unknown 'outputgain'; did you mean"),
    "init of text": (GOOD | {"init": {"output_gain": "1"}}, "'init', 'output_gain': needs a number"),
    "long text": (GOOD | {"init": "x" * 201}, "'init': needs at most 200 characters, got 201"),
    "a decoder's alpha alone": (
        GOOD | {"decoder_alpha": 2, "encoder": 3},
        "'decoder_alpha': belongs to an encoder-decoder",
    ),
    "unknown model": ({"model_type": "mamba"}, "'model_type': 'mamba' is not read; known are gpt2, bert, .*t5"),
    "a model of a list": ({"model_type": [1]}, "'model_type': needs one value"),
    "a model's activation": (LLAMA | {"model_type": "llama", "hidden_act": "mish"}, "'hidden_act': 'mish' is not read"),
    "a model's cross-attention": (LLAMA | {"model_type": "bert", "add_cross_attention": True}, "'add_cross_attention'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_key_is_one_line_with_file_and_key(file, name):
    keys, says = BAD[name]
    refused(lambda: read(file(keys, "bad.json")), f"architecture: .*bad.json'.*{says}")


CONTENT = {
    "empty": (b"", "bad.json' is no whole JSON file"),
    "a list": (b"[1]", "holds a list where an object"),
    "no JSON": (b"{'depth': 4}", "is no whole JSON"),
    "no text": (b"\xff\xfe{}", "is no whole JSON"),
    "twice": (b'{"depth": 1, "depth": 2}', "key 'depth' stands twice"),
    "nested without end": (b"[" * 100_000, "is no whole JSON"),
    "endless number": (b'{"depth": ' + b"9" * 5000 + b"}", "is no whole JSON"),
    "more than 1 MB": (b" " * BYTES + b"{}", "holds more than 1,000,000 bytes"),
}


@pytest.mark.parametrize("name", CONTENT)
def test_a_bad_file_is_one_line(tmp_path, name):
    data, says = CONTENT[name]
    (tmp_path / "bad.json").write_bytes(data)
    refused(lambda: read(tmp_path / "bad.json"), f"architecture: .*{says}")


def test_a_path_that_is_no_file_is_one_line(tmp_path):
    refused(lambda: read(tmp_path / "none.toml"), "none.toml' is no file")
    refused(lambda: read(tmp_path), "is a folder; name a file")
    refused(lambda: read(tmp_path / "a\0b.toml"), "architecture: ")
    refused(lambda: read(3), "needs the path of a file")  # type: ignore[arg-type]
    (tmp_path / "model.yaml").write_text("depth: 4")
    refused(lambda: read(tmp_path / "model.yaml"), "ends in '.yaml'; needs a .toml or a .json")
    (tmp_path / "bad.toml").write_text("depth = 4\ndepth = 5\n")
    refused(lambda: read(tmp_path / "bad.toml"), "is no whole TOML file")


def test_a_file_cut_anywhere_is_refused(file):
    path = file(SIZE | DEEP | {"init": {"output_gain": 0.5}}, "cut.json")
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        refused(lambda: read(path), "cut.json' is no whole JSON")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from(["pre-ln", "skip", 4, 64]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | st.just("output_gain"), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(
    [*KEYS, "model_type", *{name for row in LAYOUTS for name in (row.depth, row.d, row.activation)}]
)


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.dictionaries(NAMES, VALUES, max_size=6), st.sampled_from([row.model_types[0] for row in LAYOUTS]))
def test_any_values_are_read_or_refused_in_a_line(tmp_path_factory, keys, kind):
    path = tmp_path_factory.getbasetemp() / "drawn.json"
    for held in (GOOD | keys, keys | {"model_type": kind}):
        path.write_text(json.dumps(held))
        said = ""
        try:
            assert read(path).sublayers >= 1
        except ValueError as error:
            said = str(error)
        assert not said or said.startswith("architecture: ")
        assert len(said.splitlines()) <= 1
