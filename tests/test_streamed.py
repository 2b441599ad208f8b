"""Models read block by block against the same ones read whole: figures, order of reading, memory, damage met half-way."""

import gc
import shutil
import weakref

import jax
import numpy as np
import pytest
from refusals import refused

import gradflow
from gradflow import audits, checkpoints
from gradflow.checkpoints import lazy, loading, losses, memory
from gradflow.checkpoints.folder import read
from gradflow.checkpoints.parity import FIXTURES

ENGLISH = ["The gradient flows through a deep stack", "A stack flows"]
SHORT = ["The gradient flows", "The gradient"]
CASES = {
    "gemma3": {},  # windows and turns that vary over depth, norms around the branch, a soft-capped loss
    "bert": {"cotangent": "mlm"},
    "gpt_neox": {},  # both branches at once
    "llama-gguf": {"cotangent": "gaussian", "probes": 2},
    "roberta": {"cotangent": "pooled"},
    "mixtral": {},
    "opt": {},
    "gpt2": {},
}


@pytest.fixture(autouse=True)
def ungated(monkeypatch):
    """The gate has tests of its own."""
    monkeypatch.setattr(audits, "_gate", lambda fixture: checkpoints.Parity(fixture, "family-tested", 0.0, 1e-5, 3))


@pytest.mark.repeats(keep=2)
@pytest.mark.parametrize("case", CASES)
def test_block_by_block_gives_the_figures_of_all_at_once(eager, monkeypatch, case):
    monkeypatch.setattr(losses, "SLICE", 150)  # the loss takes the decoder in pieces
    texts = ENGLISH if case in ("bert", "roberta") else SHORT
    whole, streamed = (gradflow.audit(FIXTURES / case, texts, stream=way, **CASES[case]) for way in (False, True))
    assert streamed.ids == whole.ids
    assert len({len(row) for row in whole.ids}) == 2  # one is padded
    assert streamed.settings["loss"] == (whole.settings["loss"] and pytest.approx(whole.settings["loss"], rel=1e-13))
    assert (whole.settings["memory"], streamed.settings["memory"]) == ("full", "streamed")
    assert "streamed block by block" in str(streamed)
    figures = {name: value for name, value in vars(whole.profile).items() if isinstance(value, np.ndarray)}
    assert len(figures) > 25
    for name, wanted in figures.items():
        np.testing.assert_allclose(getattr(streamed.profile, name), wanted, rtol=1e-11, atol=1e-13, err_msg=name)


def test_one_block_is_held_at_a_time_and_progress_tells_of_each(eager, monkeypatch):
    read_block, order, alive, told = lazy.layer, [], [], []

    def watched(reader, l):
        gc.collect()
        assert not any(held() is not None for held in alive), f"another block is held while {l} is read"
        order.append(l)
        layer = read_block(reader, l)
        alive.append(weakref.ref(layer.params[0]["w_q"]))
        return layer

    monkeypatch.setattr(lazy, "layer", watched)
    monkeypatch.setattr(loading.Reader, "weights", lambda self: pytest.fail("read all at once"))
    progress = lambda *counts: told.append(counts)  # noqa: E731
    gradflow.audit(FIXTURES / "bert", ENGLISH[0], stream=True, progress=progress)
    assert order == [0, 1, 2, 2, 1, 0]
    assert told == [(done, 6) for done in range(1, 7)]


@pytest.mark.parametrize("case", ["bert", "gemma2"])  # with biases and a transform; soft-capped
def test_a_decoder_in_pieces_gives_the_loss_and_gradient_of_the_whole(eager, monkeypatch, case):
    checkpoint = checkpoints.load(FIXTURES / case)
    rng = np.random.default_rng(0)
    outs, at = rng.standard_normal((2, 5, checkpoint.plan.d)), [np.arange(4), np.array([2])]
    labels = [rng.integers(checkpoint.plan.vocab, size=where.size) for where in at]

    def loss(outs):
        logs = [jax.nn.log_softmax(checkpoint.head(outs[row])) for row in (0, 1)]
        return jax.numpy.stack([-logs[row][at[row], labels[row]].mean() for row in (0, 1)])

    wanted, slopes = loss(outs), jax.grad(lambda outs: loss(outs).sum())(outs)
    for entries in (10**6, 7 * checkpoint.plan.d):
        monkeypatch.setattr(losses, "SLICE", entries)
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


def test_a_model_is_streamed_where_all_at_once_do_not_fit(eager, monkeypatch, shell):
    path, run = FIXTURES / "llama", memory.Run(1, 4)
    folder = read(path)
    plan = checkpoints.load(path).plan
    args = (folder.sizes(), plan, "model.layers.", run)
    ways = {False: memory.forecast(*args), True: memory.streamed(*args)}
    between = sum(ways.values()) / 2 / memory.GIB
    assert ways[True] < between * memory.GIB < ways[False]
    assert [memory.choose(ways, None, limit) for limit in (1e-3 + ways[False] / memory.GIB, between)] == [False, True]
    monkeypatch.setattr(memory, "free", lambda: None)
    assert [memory.choose(ways, stream, None) for stream in (None, True)] == [False, True]
    refused(lambda: memory.choose(ways, None, 0.1), "GiB in float64, streamed block by block, and may take 0.1 GiB")
    refused(lambda: memory.choose(ways, False, between), r"all at once, .*, or stream it \(stream=True\)")
    ids = ("--ids", "3 4 5 6")
    code, out, err = shell("audit", path, *ids, "--memory", repr(between))
    assert (code, err, "streamed block by block" in out) == (0, "", True)
    code, out, err = shell("audit", path, *ids, "--memory", repr(between), "--no-stream")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_streamed_weights_say_what_they_cannot_do(x64):
    checkpoint = checkpoints.load(FIXTURES / "llama", stream=True)
    states = np.ones((3, checkpoint.stack.d))
    refused(lambda: gradflow.spectrum(checkpoint, states), "weights: are read block by block.* with stream=False")
    refused(lambda: gradflow.profile(checkpoint, states, weight_grad=True), "weight_grad: .* not streamed")


def test_states_and_a_loss_of_ones_own_go_through_streamed_weights(eager):
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
    from safetensors.numpy import load_file, save_file

    name, file = "bert.encoder.layer.2.attention.self.query.weight", folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name][:-1].copy()}, file)
    refused(lambda: checkpoints.load(folder, stream=True), f"'{name}' has shape")
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    refused(lambda: checkpoints.load(folder, stream=True), f"no tensor '{name}'")
    save_file(tensors | {name: tensors[name] * np.nan}, file)
    checkpoint = checkpoints.load(folder, stream=True)
    refused(lambda: checkpoint.weights.read(2), f"{name}.*NaN")
