"""What an audit says further, by a second route: autodiff for tokens set apart, frozen norms for the stream, SVD for spectra."""

import functools
import itertools
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import gradflow
from gradflow import checkpoints, precision
from gradflow.auditing import block_spectra, contradictions, growth, sinks
from gradflow.checkpoints.parity import FIXTURES
from gradflow.linting import architectures, lint

IDS, SINK, LARGER = [3, 22, 8, 21, 5, 9], 2, 600.0


def planted(folder, where):
    """A copy of a Llama whose word table makes one token's stream far larger than the others'."""
    from safetensors.numpy import load_file, save_file

    model = shutil.copytree(folder, where)
    tensors = load_file(model / "model.safetensors")
    table = next(n for n in tensors if n.endswith("embed_tokens.weight"))
    tensors[table][IDS[SINK]] *= LARGER
    save_file(tensors, model / "model.safetensors")
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The checkpoint and its audit."""
    model = planted(FIXTURES / "llama", tmp_path_factory.mktemp("sink") / "model")
    return checkpoints.load(model), gradflow.audit(model, ids=IDS)


@pytest.fixture(scope="module")
def spectra(llama):
    """The two largest singular values."""
    with precision.scope("float64"):
        states = np.asarray(llama[0].embed(np.array(IDS)))[None]
    told = []
    found = block_spectra.of(llama[0], states, np.ones(states.shape[:2], bool), 2, 0, lambda *done: told.append(done))
    assert told == [(n + 1, len(found.values[0]) + 1) for n in range(len(told))]
    return found


def taps(checkpoint, x, extra):
    """Last hidden state with something added to x and to u of every sub-layer, block by block without `Stack`; and x, u, f."""
    stack, weights = checkpoint.stack, checkpoint.weights
    seen, k = [], 0
    for l in range(stack.depth):
        params, norms = jax.tree.map(lambda leaf, l=l: leaf[l], (weights.params, weights.norms))
        for branch, p, (before, inside, after) in zip(stack.block, params, norms, strict=True):
            x = x + extra[0][k]
            f = branch.apply(p, x if before is None else before(x))
            f = f if inside is None else inside(f)
            u = x + f + extra[1][k]
            seen.append((x, u, f))
            x, k = u if after is None else after(u), k + 1
    out = x if weights.last is None else weights.last(x + extra[0][k])
    return out, (seen, x)


def followed(checkpoint, x, cotangent):
    """Gradients at x (S + 1) and u (S) of every sub-layer by one plain vjp; x, u, f on the way, and the last stream."""
    S = checkpoint.stack.sublayers
    with precision.scope("float64"):
        zeros = jnp.zeros((S + 1, *x.shape)), jnp.zeros((S, *x.shape))

        @jax.jit
        def run(x, zeros, cotangent):
            _, pull, seen = jax.vjp(functools.partial(taps, checkpoint, x), zeros, has_aux=True)
            return pull(cotangent)[0], seen

        (at_x, at_u), (seen, last) = jax.device_get(run(jnp.asarray(x), zeros, jnp.asarray(cotangent)))
    x, u, f = (np.array(each) for each in zip(*seen, strict=True))
    return at_x, at_u, x, u, f, last


def size(array, *axis):
    return np.sqrt(np.sum(array**2, axis or None))


# ---- tokens set apart ----


def test_a_planted_sink_is_found_and_the_other_tokens_gradient_is_plain_autodiff(llama):
    checkpoint, a = llama
    S = a.sublayers
    (first, sink) = sorted(a.sinks, key=lambda found: found.position)
    assert (first.position, first.found, sink.position, sink.found) == (0, False, SINK, True)
    assert (sink.first, sink.last, sink.count) == (0, S, S + 1)
    others = np.ones(len(IDS), bool)
    others[[0, SINK]] = False
    np.testing.assert_array_equal(a.apart.counted, [others])

    out = checkpoint.hidden_states(np.array(IDS))[-1]

    def loss(h):
        logp = jax.nn.log_softmax(checkpoint.logits(h)[:-1])
        return -jnp.mean(logp[jnp.arange(len(IDS) - 1), jnp.array(IDS[1:])])

    with precision.scope("float64"):
        cotangent = jax.jit(jax.grad(loss))(out)
        x0 = checkpoint.embed(np.array(IDS))
    at_x, _, x, u, f, last = followed(checkpoint, x0, cotangent)
    for p, kept in ((a.profile, np.ones(len(IDS), bool)), (a.apart.profile, others)):
        sent = size(np.asarray(cotangent)[kept])
        lengths = size(at_x[:, kept], 1, 2)
        np.testing.assert_allclose(p.exact[0], [*(lengths / sent), 1], rtol=1e-10)
        np.testing.assert_allclose(p.branch[0, :S], lengths[:-1] / lengths[1:], rtol=1e-10)
        np.testing.assert_allclose(p.stream_rms[0, :S], np.sqrt(np.mean(x[:, kept] ** 2, (1, 2))), rtol=1e-12)
        np.testing.assert_allclose(p.branch_rms[0, :S], np.sqrt(np.mean(f[:, kept] ** 2, (1, 2))), rtol=1e-12)
        cosines = np.sum(x * u, -1) / size(x, -1) / size(u, -1)
        np.testing.assert_allclose(p.stream_cosine[0, :S], cosines[:, kept].mean(1), rtol=1e-12)
    # the last norm: h = γ ⊙ g, û of what enters it
    gain = np.asarray(checkpoint.weights.last.gain)
    h, unit = (np.asarray(cotangent) * gain)[others], (last / size(last, -1)[:, None])[others]
    alignment = np.sqrt(np.sum(np.sum(h * unit, -1) ** 2) / np.sum(h**2))
    assert a.apart.profile.alignment[0, -1] == pytest.approx(alignment, rel=1e-10)
    assert a.apart.profile.affine[0, -1] == pytest.approx(size(h) / size(np.asarray(cotangent)[others]), rel=1e-12)
    assert a.profile.stream_rms[0, 0] > 10 * a.apart.profile.stream_rms[0, 0]


@pytest.mark.slow
def test_behind_output_norms_too_with_padding_and_probes(bert):
    rows = [np.array([2, 9, 8, 11, 7, 3]), np.array([2, 10, 12, 3])]
    real = np.arange(6) < np.array([[6], [4]])
    states = np.zeros((2, 6, 16))
    with precision.scope("float64"):
        for state, seen, row in zip(states, real, rows, strict=True):
            state[seen] = bert.embed(row)
    cotangent = np.random.default_rng(0).standard_normal(states.shape)
    counted = real & (np.arange(6) > 0)
    p = gradflow.profile(bert, states, cotangent, mask=real, counted=counted)
    at_x, at_u, _, u, _, _ = followed(bert, states[1, :4], cotangent[1, :4])
    norms = [slots[2] for slots in bert.weights.norms]
    for l in range(6):
        gain, eps = np.asarray(norms[l % 2].gain)[l // 2], norms[l % 2].eps
        arriving = at_x[l + 1][1:] if l < 5 else cotangent[1, 1:4]
        t = np.sqrt(np.var(u[l, 1:], -1) + eps)[:, None]
        steps = [size(arriving), size(gain * arriving), size(t * at_u[l, 1:]), size(at_u[l, 1:]), size(at_x[l, 1:])]
        factors = [getattr(p, name)[1, l] for name in ("affine", "projection", "norm", "branch")]
        np.testing.assert_allclose(factors, np.divide(steps[1:], steps[:-1]), rtol=1e-10)
        assert p.net[1, l] == pytest.approx(np.prod(factors), rel=1e-12)
    assert p.exact[1, 0] == pytest.approx(size(at_x[0, 1:]) / size(cotangent[1, 1:4]), rel=1e-10)
    assert p.settings["tokens"] == [5, 3]
    assert p.settings["set_apart"] == [1, 1]
    every = gradflow.profile(bert, states, cotangent, mask=real, counted=real)  # nothing set apart
    whole = gradflow.profile(bert, states, cotangent, mask=real)
    for name in ("net", "log_trunk", "alignment", "branch_rms", "gradient_cosine", "branch_in_norm"):
        np.testing.assert_allclose(getattr(every, name), getattr(whole, name), rtol=1e-11, atol=1e-13)
    refused(
        lambda: gradflow.profile(bert, states, cotangent, mask=real, counted=np.ones((2, 6), bool)),
        "counted: has a token",
    )
    sent = cotangent * (np.arange(6) == 0)[:, None]
    refused(lambda: gradflow.profile(bert, states, sent, mask=real, counted=counted), "counted: no gradient arrives")


def test_the_rule_is_a_ratio_to_the_median_at_enough_depths():
    rms = np.ones((5, 7))
    rms[1:3, 4] = sinks.RATIO * 1.01  # at two depths
    rms[3, 2] = 100  # at one
    rms[:, 5] = sinks.RATIO * 0.99
    found = {sink.position: sink for sink in sinks.find(rms, 0, list("abcdefg"), 2)}
    assert set(found) == {0, 4}
    assert (found[4].token, found[4].first, found[4].last, found[4].count) == ("e", 1, 2, 2)
    assert not found[0].found
    assert {sink.position for sink in sinks.find(rms, 0, None, 1)} == {0, 2, 4}
    real, listed = np.ones((1, 7), bool), list(found.values())
    left = {apart: sinks.others(listed, real, apart) for apart in (None, "auto", "first", "sinks")}
    assert left[None] is None
    assert [np.flatnonzero(~left[name][0]).tolist() for name in ("auto", "first", "sinks")] == [[0, 4], [0], [0, 4]]  # type: ignore[index]
    assert sinks.others(listed[:1], real, "auto") is None  # none stands out
    assert sinks.others(listed[:1], np.ones((1, 1), bool), "first") is None  # there is no other


# ---- the stream ----


def test_parts_of_a_post_norm_stream_are_its_derivatives_by_their_factors(bert):
    """With statistics and updates frozen the last stream is linear in a factor before each part."""
    from gradflow.auditing import apart, audits

    row = np.array([2, 9, 8, 11, 7, 3])
    states, real = audits._batch(bert, [row])
    way, _ = audits.forward(bert, states, real)
    path = apart._path(bert, way, 0, real[0])
    slots = [slots[2] for slots in bert.weights.norms]

    def last(factors):
        x = factors[0] * path.x[0]
        for l in range(6):
            u = x + factors[l + 1] * path.added[l]
            norm = slots[l % 2]
            t = np.sqrt(np.var(path.u[l], -1, keepdims=True) + norm.eps)
            x = norm.gain[l // 2] * (u - u.mean(-1, keepdims=True)) / t + factors[7] * norm.bias[l // 2]
        return x

    with precision.scope("float64"), jax.disable_jit():
        wanted = np.moveaxis(np.asarray(jax.jacfwd(last)(jnp.ones(8))), -1, 0)
    parts = path.parts()
    np.testing.assert_allclose(parts, wanted, atol=1e-12)
    np.testing.assert_allclose(parts.sum(0), path.x[-1], atol=1e-12)
    some = np.arange(6) != 2
    g = growth.growth(path, parts, some)
    flat = wanted[:, some].reshape(8, -1)
    whole = path.x[-1][some].ravel()
    np.testing.assert_allclose(g["share"], flat @ whole / (whole @ whole), atol=1e-12)
    np.testing.assert_allclose(g["size"], np.linalg.norm(flat, axis=1) / np.linalg.norm(whole), rtol=1e-12)
    assert g["share"].sum() == pytest.approx(1, abs=1e-12)
    assert np.isnan(g["exponent"])
    assert np.isnan(g["walk"]).all()


def test_growth_of_a_pre_norm_stream(llama):
    checkpoint, a = llama
    states = []
    with precision.scope("float64"):
        _, (seen, last) = jax.jit(lambda x: taps(checkpoint, x, (np.zeros(9), np.zeros(9))))(
            checkpoint.embed(np.array(IDS))
        )
    states = np.array([*(np.asarray(x) for x, _, _ in seen), np.asarray(last)])
    updates = np.diff(states, axis=0)
    for g, kept in ((a.growth, np.ones(len(IDS), bool)), (a.apart.growth, a.apart.counted[0])):
        x, steps = states[:, kept], updates[:, kept]
        np.testing.assert_allclose(g.rms[0], np.sqrt(np.mean(x**2, (1, 2))), rtol=1e-11)
        shares = [np.sum(part * x[-1]) / np.sum(x[-1] ** 2) for part in (x[0], *steps)]
        np.testing.assert_allclose(g.share[0], [*shares, 0], atol=1e-11)
        assert g.share[0].sum() == pytest.approx(1, abs=1e-12)
        walk = np.sqrt(np.cumsum([np.sum(part**2) for part in (x[0], *steps)]) / x[0].size)
        np.testing.assert_allclose(g.walk[0], walk, rtol=1e-11)
        cosines = [np.mean(np.sum(p * q, -1) / size(p, -1) / size(q, -1)) for p, q in itertools.pairwise(steps)]
        np.testing.assert_allclose(g.update_cosine[0], cosines, atol=1e-11)
        (slope, _), cov = np.polyfit(np.log(np.arange(1, len(x))), np.log(g.rms[0, 1:]), 1, cov=True)
        assert g.exponent[0] == pytest.approx(slope, rel=1e-9)
        assert g.exponent_se[0] == pytest.approx(np.sqrt(cov[0, 0]), rel=1e-6)


def test_independent_updates_grow_as_the_root_of_depth():
    rng, S = np.random.default_rng(0), 40
    added = rng.standard_normal((S, 3, 2000))
    x = np.cumsum(np.concatenate([0.1 * rng.standard_normal((1, 3, 2000)), added]), 0)
    path = growth.Path(x, x[1:], added, np.ones(S), (None,) * S)
    g = growth.growth(path, path.parts(), np.ones(3, bool))
    assert g["exponent"] == pytest.approx(0.5, abs=0.01)
    np.testing.assert_allclose(g["rms"] / g["walk"], 1, atol=0.02)
    np.testing.assert_allclose(g["share"][1:-1], 1 / S, atol=0.1 / S**0.5)
    assert g["kept"] == pytest.approx(0.01 / (0.01 + S), rel=0.1)


# ---- spectra ----


@pytest.mark.slow
def test_spectra_are_those_of_dense_jacobians(llama, spectra):
    checkpoint, s = llama[0], spectra
    stack = checkpoint.stack
    n = len(IDS) * stack.d
    with precision.scope("float64"):
        x = checkpoint.embed(np.array(IDS))
        states = [*checkpoint.hidden_states(np.array(IDS))[: stack.depth]]

        def block(weights, x):
            params, norms = weights
            for branch, p, (before, _, _) in zip(stack.block, params, norms, strict=True):
                x = x + branch.apply(p, before(x))
            return x

        dense = jax.jit(jax.jacrev(block, 1))
        each = [
            dense(
                jax.tree.map(lambda leaf, l=l: leaf[l], (checkpoint.weights.params, checkpoint.weights.norms)),
                states[l],
            )
            for l in range(stack.depth)
        ]
    jacobians = [np.asarray(J).reshape(n, n) for J in each]
    with precision.scope("float64"):
        end = np.asarray(checkpoint.weights.last.jacobian(checkpoint.stack.trace(checkpoint.weights, x).out).dense())
    whole = np.zeros((n, n))
    for i, J in enumerate(end):
        at = slice(i * stack.d, (i + 1) * stack.d)
        whole[at, at] = J
    for J in jacobians[::-1]:
        whole = whole @ J
    assert s.values.shape == (1, stack.depth, 2)
    rows = [*zip(jacobians, s.values[0], np.exp(s.log_residuals[0]), strict=True)]
    for J, found, residual in [*rows, (whole, s.whole[0], np.exp(s.log_whole_residuals[0]))]:
        wanted = np.linalg.svd(J, compute_uv=False)
        gaps = np.abs(found[:, None] - wanted).min(1)
        assert (gaps <= residual + 1e-10 * wanted[0]).all()
        assert (residual < 1e-2 * found).all()
        assert found[0] == pytest.approx(wanted[0], rel=1e-4)
    assert s.residual < 1e-2


# ---- what is said ----


def test_it_is_said_within_a_screen_in_json_and_on_the_page(llama, spectra, tmp_path):
    from gradflow import page

    a = replace(llama[1], spectra=spectra)
    lines = str(a).splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in str(a)
    assert "one token stands out" in a.verdict
    assert f"over the other tokens the gradient keeps {a.apart.profile.exact[0, 0]:.4g}" in a.verdict
    held = json.loads(json.dumps(a.to_dict(), allow_nan=False))
    assert held["sinks"][1]["position"] == SINK
    np.testing.assert_array_equal(held["growth"]["share"], a.growth.share)
    np.testing.assert_array_equal(held["apart"]["profile"]["net"], a.apart.profile.net)
    np.testing.assert_array_equal(held["spectra"]["log_values"], a.spectra.log_values)
    text = page.page(a)
    for said in ("Factors over the other tokens", "What each part is of the last stream", "Largest singular values"):
        assert said in text
    assert f'data-value="{float(a.spectra.whole[0, 0])!r}"' in text
    a.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_shell_sets_apart_what_it_is_told(shell, tmp_path):
    code, out, _ = shell("audit", FIXTURES / "llama", "--ids", " ".join(map(str, IDS)), "--apart", "first", "--json")
    held = json.loads(out)
    assert code == 0
    assert held["apart"]["counted"] == [[1, 2, 3, 4, 5]]
    assert held["spectra"] is None
    assert [sink["position"] for sink in held["sinks"]] == [0]
    for options, said in (
        (("--apart", "last"), "'last'"),
        (("--spectrum", "0"), "spectrum: needs a whole number of at least 1"),
        (("--spectrum", "9999"), "spectrum: the Jacobian of the shortest text has"),
    ):
        code, out, err = shell("audit", FIXTURES / "llama", "--ids", "3 22", *options)
        assert (code, out, said in err) == (2, "", True), err


def test_contradictions_are_those_of_the_architectures_check(bert, llama):
    checkpoint, a = llama
    config = checkpoint.config | {"num_hidden_layers": 30}
    deep = replace(checkpoint, config=config, plan=replace(checkpoint.plan, depth=30))
    found = lint.lint(architectures.of_config("config.json", config)).findings
    said = contradictions.contradictions(contradictions.architecture_of(deep))
    assert said == tuple(f for f in found if f.key != "block")
    assert [f.key for f in said] == ["init"]  # nothing shrinks the branches with depth
    assert a.findings == ()
    other = replace(deep, config=config | {"model_type": "qwen3"})  # not of the catalogue: by its plan
    assert [f.key for f in contradictions.contradictions(contradictions.architecture_of(other))] == ["init"]
