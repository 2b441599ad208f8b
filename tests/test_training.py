"""Training: the model against plain JAX, the lens against plain gradients, resume against a run that was never stopped."""

import dataclasses
import functools
import json
import signal
import sqlite3
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import gradflow
from gradflow import precision
from gradflow.schemes import SCHEMES
from gradflow.stack import Drawn
from gradflow.training import data, library, model, results, rounding, run, schedules, store
from gradflow.training.first_step import first_step, many_tokens
from gradflow.training.optimizers import Optimizer
from gradflow.training.settings import Settings, product
from gradflow.training.watch import fed

SMALL = {"depth": 2, "d": 8, "heads": 2, "tokens": 6, "batch": 4, "steps": 45, "every": 5, "lr": 1e-2}
DEFAULTS = {
    **{
        "scheme": "post-ln",
        "warmup": 0,
        "key": 3,
        "optimizer": "adam",
        "norm": "layernorm",
        "init": "xavier",
        "eps": 1e-5,
    },
    **{"schedule": "constant", "b1": 0.9, "b2": 0.98, "weight_decay": 0.01, "dtype": "float32"},
    "block": ("attention:causal", "mlp:relu"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"line {i} of {i * i} is {'short' if i % 3 else 'a longer one'}\n" for i in range(2000)))
    return file


@pytest.fixture(scope="module")
def whole(text):
    """A run that nobody stopped."""
    return gradflow.warmup(**SMALL, key=3, text=text)


def settings(**options):
    return Settings(**DEFAULTS | SMALL | options)


def drawn(each, text):
    """Program, model, and what a stretch is handed."""
    train = jnp.asarray(data.text_of(text, 12).train)
    first, second = jax.random.split(jax.random.key(each.key))
    program = each.program
    found, _ = model.draw(each.stack, first, each.tokens, program.batch(train, second, jnp.int32(0)))
    return program, found, train, second


def normed(x, norm, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return norm.gain * centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + eps) + norm.bias


def attention(p, x, heads):
    q, k, v = (jnp.einsum("btd,ed->bte", x, p[w]).reshape(*x.shape[:2], heads, -1) for w in ("w_q", "w_k", "w_v"))
    logits = jnp.einsum("bihk,bjhk->bhij", q, k) / q.shape[-1] ** 0.5
    future = jnp.arange(x.shape[1])[:, None] < jnp.arange(x.shape[1])
    shares = jax.nn.softmax(jnp.where(future, -jnp.inf, logits), -1)
    return jnp.einsum("bhij,bjhk->bihk", shares, v).reshape(x.shape) @ p["w_o"].T


def behind_embedding(weights, unembed, x, nothing, targets, pre, heads=2):
    """The language model from its equations: loss, and last stream, of x = the embeddings; ``nothing`` is added to it."""
    for block in range(2):
        for k in range(2):
            p, slots = jax.tree.map(lambda leaf, block=block: leaf[block], (weights.params[k], weights.norms[k]))
            fed = normed(x, slots[0]) if pre else x
            f = attention(p, fed, heads) if k == 0 else jnp.maximum(fed @ p["w_in"].T, 0) @ p["w_out"].T
            x = x + f if pre else normed(x + f, slots[2])
    x = (normed(x, weights.last) if pre else x) + nothing
    logits = x @ unembed.T
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.scipy.special.logsumexp(logits, -1) - chosen), x


def plain(m, batch, pre):
    x = m.symbol[batch[:, :-1]] + m.position
    return behind_embedding(m.weights, m.unembed, x, 0.0, batch[:, 1:], pre)[0]


@pytest.mark.parametrize("scheme", ["post-ln", "pre-ln"])
def test_loss_and_every_gradient_are_those_of_a_plain_model(scheme, text, x64):
    program, m, train, key = drawn(settings(scheme=scheme, dtype="float64"), text)
    shake = iter(jax.random.split(jax.random.key(1), 99))  # γ and b that are not 1 and 0
    m = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(next(shake), leaf.shape, leaf.dtype), m)
    ones = {name: jnp.ones((2, 2)) for name in ("alpha", "beta")}
    m = dataclasses.replace(m, weights=dataclasses.replace(m.weights, **ones))
    batch = program.batch(train, key, jnp.int32(7))
    value, grad = jax.jit(program.gradient)(m, batch)
    wanted, slope = jax.jit(jax.value_and_grad(functools.partial(plain, pre=scheme == "pre-ln")))(m, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-12)
    for mine, theirs in zip(jax.tree.leaves(grad), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-13)


def test_the_lens_sees_the_step_that_is_made(text):
    program, m, train, key = drawn(settings(), text)
    rates = jnp.full(45, 1e-2, jnp.float32)
    batch = program.batch(train, key, jnp.int32(0))
    kept = jax.tree.map(jnp.copy, m)
    with precision.scope("float32"):  # as a run does: the same compilation
        state, losses, rows = program.stretch(program.start(m), train, key, rates, jnp.int32(1))
    assert np.isnan(losses[1:]).all()
    # every figure is a ratio over the whole batch: the exact gain is that of plain gradients
    x = kept.symbol[batch[:, :-1]] + kept.position
    of = functools.partial(behind_embedding, targets=batch[:, 1:], pre=False)
    plainly = jax.jit(jax.value_and_grad(of, (0, 2, 3), has_aux=True))

    def seen(m):
        return plainly(m.weights, m.unembed, m.symbol[batch[:, :-1]] + m.position, jnp.zeros_like(x))

    (value, out), (slopes, g_in, g_out) = seen(kept)
    np.testing.assert_allclose(losses[0], value, rtol=1e-5)
    net = np.prod(np.asarray(rows["net"], np.float64))
    np.testing.assert_allclose(net, np.linalg.norm(g_in) / np.linalg.norm(g_out), rtol=1e-4)
    product = rows["affine"] * rows["projection"] * rows["norm"] * rows["skip"] * rows["branch"]
    np.testing.assert_allclose(rows["net"], product, rtol=1e-5)
    # what the step did, from the weights before and after it
    for k in range(2):
        for block in range(2):
            at, pairs = (
                2 * block + k,
                zip(*(_flat(t, k, block) for t in (kept.weights, state.model.weights, slopes)), strict=True),
            )
            before, after, slope = (np.concatenate(each) for each in zip(*pairs, strict=True))
            np.testing.assert_allclose(rows["weight_norm"][at], np.linalg.norm(before), rtol=1e-5)
            np.testing.assert_allclose(rows["update_norm"][at], np.linalg.norm(after - before), rtol=1e-4)
            np.testing.assert_allclose(rows["weight_grad"][at], np.linalg.norm(slope), rtol=1e-4)
    # the first step of Adam is the gradient's sign
    np.testing.assert_allclose(rows["update_rms"], 1, rtol=1e-3)
    w = kept.weights.params[0]["w_q"][0]
    moved = np.asarray(state.model.weights.params[0]["w_q"][0] - w)
    np.testing.assert_allclose(np.abs(moved), 1e-2, rtol=2e-2)
    # η‖h‖₁ bounds what it does to a pre-activation of the first sub-layer, whose input is the embedding
    h = np.asarray(x.reshape(-1, 8), np.float64)
    names = ("w_q", "w_k", "w_v")
    moves = [
        h @ np.asarray(state.model.weights.params[0][n][0] - kept.weights.params[0][n][0], np.float64).T for n in names
    ]
    np.testing.assert_allclose(rows["preactivation_move"][0], np.sqrt(np.mean(np.square(moves))), rtol=1e-3)
    np.testing.assert_allclose(rows["preactivation_bound"][0], 1e-2 * np.abs(h).sum(1).mean(), rtol=1e-5)
    assert (np.abs(moves).max(axis=(0, 2)) <= 1e-2 * np.abs(h).sum(1) * 1.0001).all()
    assert (rows["preactivation_move"] < rows["preactivation_bound"]).all()
    (_, after), _ = seen(state.model)
    np.testing.assert_allclose(rows["stream_move"][-1], np.linalg.norm(after - out) / np.linalg.norm(out), rtol=1e-3)


def _flat(weights, k, block):
    return [np.asarray(leaf[block], np.float64).ravel() for leaf in weights.params[k].values()]


@pytest.mark.slow
@pytest.mark.repeats(keep=3)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda row: row.name)
def test_a_drawn_model_is_the_scheme_as_the_stack_draws_it(scheme, text, eager):
    each = settings(scheme=scheme, dtype="float64")
    train = jnp.asarray(data.text_of(text, 12).train)
    batch = data.batch(train, jax.random.key(0), jnp.int32(0), each.batch, each.tokens)
    m, shape = model.draw(each.stack, jax.random.key(5), each.tokens, batch)
    x = m.embed(batch[:, :-1])
    source = Drawn(jax.random.split(jax.random.key(5), 4)[0])
    if scheme.of_power:  # ω² is 1 + the branches' power below, as one pass with ω = 1 sees it
        ones = np.ones((2, 2))
        added = each.stack.trace(
            dataclasses.replace(source, numbers=each.stack.multipliers()._replace(alpha=ones)), x
        ).added
        power = np.mean(np.square(added), (1, 2)).reshape(2, 2).mean(0)
        omega = np.sqrt(1 + np.cumsum([0, *power, power[0]]))
        np.testing.assert_allclose(m.weights.alpha.reshape(-1), omega, rtol=1e-12)
        source = dataclasses.replace(source, numbers=each.stack.multipliers()._replace(alpha=omega.reshape(2, 2)))
    np.testing.assert_allclose(shape.trace(m.weights, x).out, each.stack.trace(source, x).out, rtol=1e-12)
    assert shape.final_norm == (
        scheme.name not in ("rezero", "skipinit", "fixup", "t-fixup", "no-norm") and not m_last(scheme)
    )


def m_last(scheme):
    """Whether the last block ends in a norm."""
    return (scheme.then or scheme).norm_out


@pytest.mark.repeats
@pytest.mark.parametrize(("scheme", "learned"), [("layerscale", True), ("deepnorm", False), ("rezero", True)])
def test_alpha_stays_and_beta_is_learned_where_the_row_says_so(scheme, learned, text):
    program, m, train, key = drawn(settings(scheme=scheme, depth=1), text)
    _, grad = jax.jit(program.gradient)(m, program.batch(train, key, jnp.int32(0)))
    assert bool(jnp.any(grad.weights.beta != 0)) is learned
    assert not jnp.any(grad.weights.alpha)
    assert m.weights.beta.shape == ((1, 2, 8) if scheme == "layerscale" else (1, 2))


def test_adam_on_iid_gradients_moves_as_the_theory_says():
    rng = np.random.default_rng(0)
    transformation = Optimizer("adam", b2=0.999).transformation
    state, m, v = transformation.init(jnp.zeros(200_000)), 0.0, 0.0
    seen = []
    for t in range(1, 81):
        g = rng.normal(size=200_000).astype(np.float32)
        direction, state = transformation.update(jnp.asarray(g), state)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2  # Kingma, Ba 2014, algorithm 1
        if t < 4:
            np.testing.assert_allclose(
                direction, m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8), rtol=2e-3, atol=1e-4
            )
        seen.append(float(np.sqrt(np.mean(np.square(direction)))))
    np.testing.assert_allclose(seen[:3], [1, 0.707, 0.579], atol=2e-3)
    assert seen[-1] == pytest.approx(np.sqrt(0.1 / 1.9), rel=0.02)


def test_radam_is_rectified_by_its_formula():
    transformation = Optimizer("radam").transformation
    state, b2 = transformation.init(jnp.zeros(())), 0.98
    most = 2 / (1 - b2) - 1
    for t in range(1, 30):
        direction, state = transformation.update(jnp.ones(()), state)  # a constant gradient: m̂ = v̂ = 1
        length = most - 2 * t * b2**t / (1 - b2**t)
        factor = np.sqrt((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)) if length >= 5 else 1
        assert float(direction) == pytest.approx(factor, rel=1e-4)


def test_adamw_decays_matrices_alone(text):
    program, m, *_ = drawn(settings(optimizer="adamw", weight_decay=0.5, depth=1), text)
    transformation = program.optimizer.transformation
    direction, _ = transformation.update(jax.tree.map(jnp.zeros_like, m), transformation.init(m), m)
    np.testing.assert_allclose(direction.weights.params[0]["w_q"], 0.5 * m.weights.params[0]["w_q"], rtol=1e-6)
    assert not jnp.any(direction.weights.norms[0][2].gain)
    assert not jnp.any(direction.weights.alpha)


@pytest.mark.slow
def test_what_is_said_of_the_first_step_is_what_it_does(text):
    each = settings()
    program, m, train, key = drawn(each, text)
    said = first_step(each, data.text_of(text, 12))
    batch = program.batch(train, key, jnp.int32(0))
    _, grad = jax.jit(program.gradient)(m, batch)
    direction = jax.tree.map(lambda g: g / (jnp.abs(g) + 1e-8), grad)
    ends = [
        jax.tree.map(lambda w, g, rate=rate: w - rate * g, m, direction).stream(program.stack, batch[:, :-1]).out
        for rate in (1e-4, -1e-4)
    ]
    states = m.stream(program.stack, batch[:, :-1], True)
    slope = np.linalg.norm(ends[0] - ends[1]) / 2e-4 / np.linalg.norm(states.out)
    assert slope == pytest.approx(said.stream, rel=1e-2)
    moves = []
    for k, names in enumerate([("w_q", "w_k", "w_v"), ("w_in",)]):
        h = np.asarray(fed(program.stack, m, states.x, k))
        signs = np.concatenate([direction.weights.params[k][name] for name in names], 1)
        moves.append(np.sqrt(np.mean(np.einsum("ltd,lkd->ltk", h, signs) ** 2, (1, 2))))
        np.testing.assert_allclose(said.bound[k::2], np.abs(h).sum(-1).mean(-1), rtol=1e-5)
        kept = np.array([many_tokens(n, 8) for n in said.effective[k::2]])
        np.testing.assert_allclose(kept * said.bound[k::2], said.move[k::2], rtol=1e-4)
        power = sum(np.sum(np.square(g), (1, 2)) for g in grad.weights.params[k].values())
        np.testing.assert_allclose(said.weight_grad[k::2], np.sqrt(power), rtol=1e-4)
    # Gaussian is what d = 8 entries are not
    assert np.mean(said.move / np.stack(moves, 1).ravel()) == pytest.approx(1, abs=0.1)
    # √(v² + w²)/α, v and w from the weights
    params = m.weights.params[1]
    v, w = (np.sqrt(np.mean(np.square(params[name]), (1, 2)) * n) for name, n in (("w_in", 8), ("w_out", 32)))
    np.testing.assert_allclose(said.update[1::2], np.hypot(v, w), rtol=1e-5)


@pytest.mark.slow
def test_a_stopped_map_goes_on_where_it_was(text, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SAVE", 0.0)
    options = SMALL | {"scheme": ["post-ln", "deepnorm"], "lr": [1e-2, 30.0], "warmup": 0, "key": 3, "text": text}
    said = []

    def stop(done, total):
        said.append((done, total))
        if done == 2 * (45 + 20):  # in the midst of the second run
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradflow.trainability(**options, out=tmp_path, progress=stop)
    assert said[0] == (2 * 5, 4 * 2 * 45)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    m, whole = gradflow.trainability(**options, out=tmp_path), gradflow.trainability(**options)
    assert m.cells == whole.cells
    assert m.to_dict() == whole.to_dict()
    assert all(c.learns is (c.held_out < m.level) for c in m)
    for file in files:
        one = results.read(file)
        assert m[one.settings["scheme"], 2, 0, one.settings["lr"]].loss == one.final_loss
    refused(lambda: gradflow.trainability(**options | {"lr": 0}), "lr: needs numbers above 0")
    refused(lambda: gradflow.trainability(**options, fit=("post-ln", 7)), "fit: unknown 'post-ln, 7'")
    refused(lambda: gradflow.trainability(**options, optimizer=["adam", "sgd"]), "optimizer: a map has one")


def test_schedules_are_their_formulas():
    steps = np.arange(1, 9001)
    original = schedules.rates("inverse-sqrt", 1.0, 4000, 9000)
    np.testing.assert_allclose(original[:4000], steps[:4000] / 4000, rtol=1e-5)
    np.testing.assert_allclose(original[4000:], np.sqrt(4000 / (steps[4000:] - 1)), rtol=1e-5)
    cosine = schedules.rates("cosine", 2.0, 10, 110)
    np.testing.assert_allclose(cosine[:10], 0.2 * steps[:10], rtol=1e-5)
    np.testing.assert_allclose(cosine[10:], 1 + np.cos(np.pi * np.arange(100) / 100), atol=1e-5)
    np.testing.assert_allclose(schedules.rates("constant", 3e-3, 0, 5), 3e-3, rtol=1e-6)
    np.testing.assert_allclose(schedules.rates("constant", 3e-3, 1, 5), 3e-3, rtol=1e-6)


def test_the_text_is_split_and_batches_are_windows_of_it(text):
    found = data.text_of(text, 12)
    raw = text.read_bytes()
    assert found.held_out.size + found.train.size == len(raw)
    assert found.held_out.tobytes()[:4096] == raw[9 * 4096 : 10 * 4096] or len(raw) < 40960
    counts = np.unique(found.train, return_counts=True)[1] / found.train.size
    assert found.unigram == pytest.approx(-np.sum(counts * np.log(counts)))
    train, key = jnp.asarray(found.train), jax.random.key(0)
    first, again, other = (np.asarray(data.batch(train, key, jnp.int32(s), 3, 20)) for s in (4, 4, 5))
    assert (first == again).all()
    assert (first != other).any()
    for window in (*first, *other):
        assert bytes(window.astype(np.uint8)) in found.train.tobytes()


def test_the_library_is_the_default_text():
    found = data.text_of(None, 100)
    assert found.train.size > 1_000_000
    assert found.digest == data.text_of(None, 100).digest
    assert b"def " in found.held_out.tobytes()


@pytest.mark.parametrize(
    ("steps", "every", "apart"), [(3, 1, 1), (40, 40, 40), (400, 10, 100), (2400, 10, 100), (240_000, 10, 10_000)]
)
def test_text_is_evaluated_every_hundred_steps_or_so(steps, every, apart):
    assert run.between(steps, every) == apart


def test_a_run_learns_and_says_what_it_saw(whole):
    assert whole.loss.shape == (45,)
    assert np.mean(whole.loss[-5:]) < whole.loss[0] - 0.5
    assert whole.steps.tolist() == list(range(0, 45, 5))
    p = whole.profile
    assert p.exact.shape == (9, 5)
    np.testing.assert_allclose(p.net, p.affine * p.projection * p.norm * p.skip * p.branch, rtol=1e-5)
    np.testing.assert_allclose(whole.at(12).log_exact[0], p.log_exact[2])
    assert "cotangent: the batch's loss" in str(whole.at(12))
    assert whole.evaluated.tolist() == [10, 20, 30, 40, 45]
    shown = json.loads(json.dumps(whole.to_dict(), allow_nan=False))
    assert shown["loss"] == whole.loss.tolist()
    assert "Verdict:" in str(whole)
    assert max(map(len, str(whole).splitlines())) <= 100
    assert "<img" in whole._repr_html_()


KILLED = """
import sys, gradflow
from gradflow.training import run
run.SAVE = 0.0
gradflow.warmup(**{small}, key=3, text={text!r}, out={out!r})
"""


def log_of(folder):
    (file,) = folder.glob("*.sqlite")
    base = sqlite3.connect(file)
    try:
        return base.execute("SELECT step, arrays FROM log ORDER BY step").fetchall(), file
    except sqlite3.OperationalError:
        return [], file
    finally:
        base.close()


def test_a_killed_run_goes_on_bit_for_bit(whole, text, tmp_path, monkeypatch):
    code = KILLED.format(small=SMALL, text=str(text), out=str(tmp_path))
    slow = "import time\nfrom gradflow.training import store\nold = store.Store.commit\n"
    slow += "store.Store.commit = lambda *a: (old(*a), time.sleep(0.3))\n"  # time to be killed in
    process = subprocess.Popen([sys.executable, "-c", slow + code])
    while process.poll() is None and not (list(tmp_path.glob("*.sqlite")) and len(log_of(tmp_path)[0]) >= 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    rows, file = log_of(tmp_path)
    assert 3 <= len(rows) < 9
    stopped = gradflow.training.read(file)
    assert stopped.loss.tolist() == whole.loss[: len(stopped.loss)].tolist()
    resumed = gradflow.warmup(**SMALL, key=3, text=text, out=tmp_path)
    assert resumed.to_dict() == whole.to_dict() | {"settings": resumed.to_dict()["settings"]}
    assert log_of(tmp_path)[0][: len(rows)] == rows  # nothing was run twice
    # the same command again only reports
    monkeypatch.setattr(run, "_stretches", lambda *a: pytest.fail("a finished run is run again"))
    again = gradflow.warmup(**SMALL, key=3, text=text, out=tmp_path)
    assert again.to_dict() == resumed.to_dict()
    for other, what in (({"steps": 50}, "steps = 45, not 50"), ({"d": 16}, "d = 8, not 16")):
        refused(lambda other=other: gradflow.warmup(**SMALL | other, key=3, text=text, out=tmp_path), f"out: .*{what}")


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path):
    options = SMALL | {"lr": 1e38}
    r = gradflow.warmup(**options, key=3, text=text, out=tmp_path)
    assert r.diverged is not None
    assert r.loss.size < 45
    assert "diverges" in r.verdict
    assert max(map(len, str(r).splitlines())) <= 100
    json.dumps(r.to_dict(), allow_nan=False)
    assert gradflow.warmup(**options, key=3, text=text, out=tmp_path).diverged == r.diverged
    r.plot()


def by_hand(w, bits, per):
    """Each row, or each matrix, on its own grid of whole numbers."""
    if w.ndim > (1 if per == "row" else 2):
        return np.stack([by_hand(each, bits, per) for each in w])
    levels = 2 ** (bits - 1) - 1
    step = np.abs(w).max() / levels
    return step * np.clip(np.rint(w / step), -levels, levels) if step else w


def test_rounding_is_that_of_a_plain_loop():
    w = np.random.default_rng(0).normal(size=(2, 3, 5)) * [[1], [100], [0]]
    for bits in (2, 4, 8):
        for per in ("row", "tensor"):
            found = np.asarray(rounding.rounded(jnp.asarray(w, jnp.float32), bits, per))
            np.testing.assert_allclose(found, by_hand(w.astype(np.float32), bits, per), rtol=1e-6)
    for bad, message in (
        (dict(bits=1), "bits: .*at least 2"),
        (dict(bits=17), "bits: .*to 16"),
        (dict(per="col"), "per: "),
    ):
        refused(lambda bad=bad: rounding.rounded(jnp.ones((2, 2)), **{"bits": 8, "per": "row"} | bad), message)


def test_a_stored_run_is_evaluated_with_rounded_matrices(whole, text, tmp_path):
    own = tmp_path / "own.txt"
    own.write_bytes(text.read_bytes())
    gradflow.warmup(**SMALL, key=3, text=own, out=tmp_path)
    (file,) = tmp_path.glob("*.sqlite")
    found = gradflow.training.rounded(file, bits=[16, 3])
    assert found["trained"] == whole.held_out[-1]
    assert found["16 bits, row"] == pytest.approx(found["trained"], abs=1e-3)
    each = settings()
    start, _ = run.initial(each, jnp.asarray(data.text_of(text, 12).train))
    held = store.Store(file)
    m = run.restored(start, held.state()).model
    held.close()
    batches = run.evaluation(each.program, data.text_of(text, 12).held_out)
    plain_loss = jax.jit(functools.partial(plain, pre=False))
    for per in ("row", "tensor"):
        params = [{k: jnp.asarray(by_hand(np.asarray(w), 3, per)) for k, w in p.items()} for p in m.weights.params]
        low = dataclasses.replace(m, weights=dataclasses.replace(m.weights, params=tuple(params)))
        plainly = np.mean([plain_loss(low, batch) for batch in batches])
        assert abs(plainly - found["trained"]) > 1e-3
        assert found[f"3 bits, {per}"] == pytest.approx(plainly, rel=1e-5)
    refused(lambda: gradflow.training.rounded(tmp_path / "none.sqlite"), "path: no such file")
    own.write_text(own.read_text() + "more")
    refused(lambda: gradflow.training.rounded(file), "path: the text of .* has changed")


def test_several_settings_are_compared(shell, text, tmp_path):
    sizes = [x for name, value in SMALL.items() if name != "lr" for x in (f"--{name}", value)]
    arguments = ("warmup", "--text", text, *sizes, "--key", 3, "--lr", "1e-2", "--warmup", "0,20", "--out", tmp_path)
    code, out, err = shell(*arguments, "--plot", tmp_path / "f.png")
    assert (code, err.count("\n")) == (0, 1)
    assert max(map(len, out.splitlines())) <= 100
    assert "post-ln, warm-up 20" in out
    assert "Verdict:" in out
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = shell(*arguments, "--json")
    found = json.loads(out)
    assert [each["settings"]["warmup"] for each in found["runs"]] == [0, 20]
    assert found["runs"][0]["loss"][0] == found["runs"][1]["loss"][0]  # the same start
    assert found["runs"][0]["rate"][0] == pytest.approx(20 * found["runs"][1]["rate"][0])


BAD = {
    "scheme": (dict(scheme="postln"), "scheme: .*'post-ln'"),
    "streams": (dict(scheme="mhc"), "scheme: unknown 'mhc'"),
    "optimizer": (dict(optimizer="adamm"), "optimizer: .*'adam'"),
    "schedule": (dict(schedule="cosin"), "schedule: .*'cosine'"),
    "attention that sees ahead": (dict(block=("attention", "mlp:relu")), "block: 'attention' sees"),
    "heads": (dict(heads=3), "heads: 3 heads do not divide"),
    "warmup": (dict(warmup=-1), "warmup: needs a whole number"),
    "warmup empty": (dict(warmup=[]), "warmup: needs at least one"),
    "lr": (dict(lr=float("nan")), "lr: needs a finite number"),
    "lr text": (dict(lr="fast"), "lr: needs a finite number"),
    "steps": (dict(steps=0), "steps: needs"),
    "every": (dict(every=True), "every: needs"),
    "seeds": (dict(seeds=0), "seeds: needs"),
    "b1": (dict(b1=1.0), "b1: needs"),
    "init": (dict(init="xavir"), "init: .*'xavier'"),
    "text": (dict(text="no/such.txt"), "text: no such file"),
    "out": (dict(out=__file__), "out: .*is a file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_one_line(case):
    options, message = BAD[case]
    refused(lambda: gradflow.warmup(**SMALL | options), message)


def test_bad_files_are_one_line(tmp_path, text, shell):
    short = tmp_path / "short.txt"
    short.write_text("too short")
    refused(lambda: gradflow.warmup(**SMALL, text=short), "text: .*has 9 bytes; needs at least 120")
    refused(lambda: gradflow.training.read(tmp_path / "none.sqlite"), "path: no such file")
    (each,), _ = product(dict(DEFAULTS | SMALL), 1)
    file = tmp_path / (each.name().replace(", ", "_").replace(" ", "-") + ".sqlite")
    with sqlite3.connect(tmp_path / "begun.sqlite") as base:
        base.execute("CREATE TABLE run (name TEXT PRIMARY KEY, value BLOB)")
        base.execute("INSERT INTO run VALUES ('settings', '{}')")
    base.close()
    refused(lambda: gradflow.training.read(tmp_path / "begun.sqlite"), "path: .*no steps yet")
    file.write_bytes(b"something else entirely" * 100)
    refused(lambda: gradflow.warmup(**SMALL, key=3, text=text, out=tmp_path), "out: .*cannot be used")
    for wrong, message in ((("--warmup", "0,x"), "warmup"), (("--lr", "x"), "lr"), (("--scheme", "prelm"), "pre-ln")):
        code, out, err = shell("warmup", *wrong)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_without_optax_the_extra_is_named(monkeypatch):
    library.optax.cache_clear()
    monkeypatch.setitem(sys.modules, "optax", None)
    refused(lambda: gradflow.warmup(**SMALL), r"pip install gradflow\[train\]")
