"""Models read block by block against the same ones read whole: figures, order of reading, memory, damage met half-way."""

import gc
import json
import shutil
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from safetensors.numpy import load_file, save_file

import gradflow
from gradflow import checkpoints
from gradflow.auditing import audits
from gradflow.checkpoints import lazy, loading, losses, memory
from gradflow.checkpoints.families import plan_of
from gradflow.checkpoints.folder import Folder, read
from gradflow.checkpoints.loading import checked
from gradflow.checkpoints.parity import FIXTURES

ENGLISH = ["The gradient flows through a deep stack", "A stack flows"]
SHORT = ["The gradient flows", "The gradient"]
CASES = {
    "bert": {"cotangent": "mlm"},
    "gemma3": {},  # windows and turns that vary over depth, norms around the branch, a soft-capped loss
    "gpt_neox": {},  # both branches at once
    "llama-gguf": {"cotangent": "gaussian", "probes": 2},
    "roberta": {"cotangent": "pooled"},
    "mixtral": {},
    "opt": {},
    "gpt2": {},
}


def refuse(message):
    raise ValueError(message)


@pytest.fixture(autouse=True)
def ungated(monkeypatch):
    """The gate has tests of its own."""
    monkeypatch.setattr(audits, "_gate", lambda fixture: checkpoints.Parity(fixture, "family-tested", 0.0, 1e-5, 3))


@pytest.mark.repeats
@pytest.mark.parametrize("case", CASES)
def test_block_by_block_gives_the_figures_of_all_at_once_and_holds_one_block(monkeypatch, case):
    texts, depth = ENGLISH if case in ("bert", "roberta") else SHORT, plan_of(read(FIXTURES / case).config)[1].depth
    whole = gradflow.audit(FIXTURES / case, texts, stream=False, **CASES[case])
    read_block, order, alive, told = lazy.layer, [], [], []

    def watched(reader, l):
        gc.collect()
        assert not any(held() is not None for held in alive), f"another block is held while {l} is read"
        order.append(l)
        layer = read_block(reader, l)
        alive.extend(map(weakref.ref, layer.params[0].values()))
        return layer

    gc.freeze()  # what other tests left is not looked through at every block
    monkeypatch.setattr(lazy, "layer", watched)
    monkeypatch.setattr(loading.Reader, "weights", lambda self: pytest.fail("read all at once"))
    monkeypatch.setattr(losses, "SLICE", 112)  # the loss takes the decoder in pieces, the last one shorter
    progress = lambda *counts: told.append(counts)  # noqa: E731
    streamed = gradflow.audit(FIXTURES / case, texts, stream=True, progress=progress, **CASES[case])
    gc.unfreeze()
    assert order == [*range(depth), *reversed(range(depth))]
    assert told == [(done, 2 * depth) for done in range(1, 2 * depth + 1)]

    assert streamed.ids == whole.ids
    assert len({len(row) for row in whole.ids}) == 2  # one is padded
    assert streamed.settings["loss"] == (whole.settings["loss"] and pytest.approx(whole.settings["loss"], rel=1e-13))
    assert (whole.settings["memory"], streamed.settings["memory"]) == ("full", "streamed")
    figures = {name: value for name, value in vars(whole.profile).items() if isinstance(value, np.ndarray)}
    assert len(figures) > 25
    for name, wanted in figures.items():
        np.testing.assert_allclose(getattr(streamed.profile, name), wanted, rtol=1e-11, atol=1e-13, err_msg=name)
    assert "streamed block by block" in str(streamed)


@pytest.mark.repeats
@pytest.mark.parametrize("case", ["bert", "gemma2"])  # with biases and a transform; soft-capped
def test_a_decoder_in_pieces_gives_the_loss_and_gradient_of_the_whole(x64, monkeypatch, case):
    checkpoint = checkpoints.load(FIXTURES / case)
    rng = np.random.default_rng(0)
    outs, at = rng.standard_normal((2, 5, checkpoint.plan.d)), [np.arange(4), np.array([2])]
    labels = [rng.integers(checkpoint.plan.vocab, size=where.size) for where in at]

    def loss(outs):
        logs = [jax.nn.log_softmax(checkpoint.head(outs[row])) for row in (0, 1)]
        each = jnp.stack([-logs[row][at[row], labels[row]].mean() for row in (0, 1)])
        return each.sum(), each

    slopes, wanted = jax.jit(jax.grad(loss, has_aux=True))(outs)
    monkeypatch.setattr(losses, "SLICE", 7 * checkpoint.plan.d)
    values, gradients = losses.at_places(checkpoint, outs, at, labels)
    np.testing.assert_allclose(values, wanted, rtol=1e-13)
    np.testing.assert_allclose(gradients, slopes, atol=1e-15)


def test_rows_of_a_table_are_read_where_they_lie():
    for case in ("llama", "llama-gguf"):
        folder, name = read(FIXTURES / case), "model.embed_tokens.weight"
        shape = (folder.config["vocab_size"], folder.config["hidden_size"])
        whole, table = folder.tensor(name, shape, None), lazy.Table(folder, name, shape)
        assert whole.shape == shape
        for rows in (slice(3, 8), slice(None), slice(shape[0] - 2, shape[0] + 5), np.array([4, 2, 4])):
            np.testing.assert_array_equal(table[rows], whole[rows])


# ---- the choice ----


def test_a_model_is_streamed_where_all_at_once_does_not_fit(monkeypatch, shell):
    path, run = FIXTURES / "bert", memory.Run(1, 4)
    folder = read(path)
    plan = plan_of(folder.config)[1]
    args = (folder.sizes(), plan, "bert.encoder.layer.", run)
    ways = {False: memory.forecast(*args), True: memory.streamed(*args)}
    between = sum(ways.values()) / 2 / memory.GIB
    assert ways[True] < between * memory.GIB < ways[False]
    assert [memory.choose(ways, None, limit) for limit in (1e-3 + ways[False] / memory.GIB, between)] == [False, True]
    monkeypatch.setattr(memory, "free", lambda: None)
    assert [memory.choose(ways, stream, None) for stream in (None, True)] == [False, True]
    refused(lambda: memory.choose(ways, None, 0.1), "GiB in float64, streamed block by block, and may take 0.1 GiB")
    refused(lambda: memory.choose(ways, False, between), r"in float64, and may take .*, or stream it \(stream=True\)")
    monkeypatch.setattr(Folder, "tensor", lambda *a: pytest.fail("read a weight"))
    assert [checked(path, between, run, stream).streams for stream in (None, True)] == [True, True]
    for options, stream in (((), None), (("--stream",), True), (("--no-stream",), False)):
        asked = []
        monkeypatch.setattr(audits, "audit", lambda *a, **o: asked.append(o) or refuse("text: none"))  # noqa: B023
        assert shell("audit", path, "--ids", "3 4 5 6", *options)[0] == 2
        assert asked[0]["stream"] is stream


def test_streamed_weights_say_what_they_cannot_do(x64):
    checkpoint = checkpoints.load(FIXTURES / "llama", stream=True)
    states = np.ones((3, checkpoint.stack.d))
    refused(lambda: gradflow.spectrum(checkpoint, states), "weights: are read block by block.* with stream=False")
    refused(lambda: gradflow.profile(checkpoint, states, weight_grad=True), "weight_grad: .* not streamed")


@pytest.mark.slow
def test_states_and_a_loss_of_ones_own_go_through_streamed_weights():
    whole, streamed = (checkpoints.load(FIXTURES / "llama", stream=way) for way in (False, True))
    np.testing.assert_allclose(streamed.hidden_states([3, 4, 5]), whole.hidden_states([3, 4, 5]), atol=1e-14)
    states, loss = np.random.default_rng(0).standard_normal((3, whole.stack.d)), lambda out: (out**3).sum()
    mask = np.array([True, True, False])
    a, b = (gradflow.profile(checkpoint, states, loss, mask=mask).log_exact for checkpoint in (whole, streamed))
    np.testing.assert_allclose(a, b, atol=1e-13)


# ---- damage ----


@pytest.mark.parametrize("case", ["llama", "llama-gguf"])
def test_a_file_cut_short_meanwhile_is_one_line(tmp_path, x64, case):
    path = shutil.copytree(FIXTURES / case, tmp_path / "m")
    checkpoint = checkpoints.load(path, stream=True)
    file = next(path.glob("model.[sg]*"))
    file.write_bytes(file.read_bytes()[:-600])
    refused(lambda: [checkpoint.weights.read(l) for l in range(2)], f"'{file.name}' (is no whole|ends within)")


def test_what_headers_tell_of_a_late_block_is_refused_before_it_is_read(folder, monkeypatch):
    name, file = "bert.encoder.layer.2.attention.self.query.weight", folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:-1].copy()}, file)
    refused(lambda: checkpoints.load(folder, stream=True), f"'{name}' has shape")
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    refused(lambda: checkpoints.load(folder, stream=True), f"no tensor '{name}'")
    save_file(tensors | {name: tensors[name] * np.nan}, file)
    checkpoint = checkpoints.load(folder, stream=True)
    refused(lambda: checkpoint.weights.read(2), f"{name}.*NaN")


# ---- memory, measured ----

LIMIT = 1  # GiB
MEASURED = """
import json, re, sys
from pathlib import Path
import gradflow
a = gradflow.audit(sys.argv[1], ids=list(range(2, 34)), **json.loads(sys.argv[2]))
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20  # ru_maxrss counts the parent's
print(json.dumps([peak, a.settings["memory"], a.settings["loss"], a.profile.log_exact.tolist()]))
"""


@pytest.mark.slow
def test_a_model_larger_than_the_limit_stays_under_it(tmp_path):
    d, inner, depth, vocab = 768, 2048, 12, 8000
    config = json.loads((FIXTURES / "llama" / "config.json").read_text())
    sizes = {"hidden_size": d, "intermediate_size": inner, "num_hidden_layers": depth, "vocab_size": vocab}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": d // 12, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | heads | {"max_position_embeddings": 64}))
    shapes = {"model.embed_tokens.weight": (vocab, d), "lm_head.weight": (vocab, d), "model.norm.weight": (d,)}
    for l in range(depth):
        block = {f"self_attn.{n}_proj": (d, d) for n in "qkvo"} | {"mlp.down_proj": (d, inner)}
        block |= {"mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d)}
        block |= {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
        shapes |= {f"model.layers.{l}.{name}.weight": shape for name, shape in block.items()}
    rng, placed = np.random.default_rng(0), {}
    for part in range(2):
        shard = f"model-{part + 1:05}-of-00002.safetensors"
        names = list(shapes)[part::2]
        held = {name: rng.standard_normal(shapes[name], np.float32) * shapes[name][-1] ** -0.5 for name in names}
        save_file({name: value.astype(np.float16) for name, value in held.items()}, tmp_path / shard)
        placed |= dict.fromkeys(names, shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))

    found = []
    for options in ({"memory": LIMIT}, {"memory": 8, "stream": False}):
        call = [sys.executable, "-c", MEASURED, str(tmp_path), json.dumps(options)]
        found.append(json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout))
    (streamed, way, *figures), (whole, other, *wanted) = found
    assert (way, other) == ("streamed", "full")
    assert streamed < LIMIT < whole
    for values, held in zip(figures, wanted, strict=True):
        np.testing.assert_allclose(values, held, atol=1e-11)
