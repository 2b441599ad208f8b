"""Re-wired and edited networks against networks written by hand and plain autodiff."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import checkpoints, profiles
from gradflow.auditing.attribution import remedies
from gradflow.checkpoints.parity import FIXTURES
from gradflow.counterfactuals import placements as rewiring
from gradflow.counterfactuals import run as counterfactuals
from gradflow.counterfactuals.edits import Edit, edited
from gradflow.factors import FACTORS
from gradflow.schemes import BY_NAME

TEXT = "A stack flows"
BERT = FIXTURES / "bert"


EDITS = ("2 mlp/branch/0.5", "1 attention/gain", "2 attention/gain/1", "3 attention/skip/1.5", "1 mlp/branch/1")


@pytest.fixture(scope="module")
def whatif():
    """All of one shape, so that they share their programs."""
    return gradflow.what_if(BERT, TEXT, ("deepnorm",), edits=EDITS)


def size(array):
    return float(np.linalg.norm(np.ravel(array)))


def normed(x, eps, centred, gain=1.0, bias=0.0):
    y = x - x.mean(-1, keepdims=True) if centred else x
    return gain * y / jnp.sqrt((y * y).mean(-1, keepdims=True) + eps) + bias


def params_of(checkpoint, s):
    return jax.tree.map(lambda leaf: leaf[s // 2], checkpoint.weights.params[s % 2])


def affine(checkpoint):
    """γ and b of each sub-layer's norm, (S, d)."""
    norms = [next(norm for norm in slots if norm is not None) for slots in checkpoint.weights.norms]
    return [
        jnp.stack([getattr(norms[s % 2], n)[s // 2] for s in range(2 * checkpoint.stack.depth)])
        for n in ("gain", "bias")
    ]


def post_ln(checkpoint):
    """(x, α, β, γ, b) ↦ last hidden state of a post-LN model, written out."""

    def network(x, alpha, beta, gain, bias):
        for s in range(checkpoint.stack.sublayers):
            f = checkpoint.stack.block[s % 2].apply(params_of(checkpoint, s), x)
            x = normed(alpha[s] * x + beta[s] * f, checkpoint.stack.eps, True, gain[s], bias[s])
        return x

    return network


def changed(checkpoint, **at):
    """α, β, γ, b with one of them replaced at a sub-layer."""
    gain, bias = affine(checkpoint)
    parts = {"alpha": jnp.ones(len(gain)), "beta": jnp.ones(len(gain)), "gain": gain, "bias": bias}
    return list((parts | {name: parts[name].at[s].set(value) for name, (s, value) in at.items()}).values())


def test_measured_is_autodiff_of_the_network_written_by_hand(whatif, bert, x64):
    own = changed(bert)
    even = jnp.sqrt(own[2][0] @ own[2][0] / 16)
    cases = {
        "post-ln (own)": own,
        "deepnorm": [6**0.25 * own[0], *own[1:]],
        "2 mlp: branch × 0.5": changed(bert, beta=(3, 0.5)),
        "1 attention: γ even": changed(bert, gain=(0, even)),
        "2 attention: γ = 1": changed(bert, gain=(2, 1.0)),
        "3 attention: skip × 1.5": changed(bert, alpha=(4, 1.5)),
        "1 mlp: branch × 1": own,
    }
    assert [case.name for case in whatif.cases] == list(cases)
    x, network = jnp.asarray(bert.embed(bert.ids(TEXT))), post_ln(bert)
    g = jax.random.normal(jax.random.fold_in(jax.random.key(0), 1), (1, 1, *x.shape), jnp.float32)[0, 0].astype(float)

    @jax.jit
    def run(numbers):
        out, pull = jax.vjp(lambda x: network(x, *numbers), x)
        return out, pull(g)[0]

    was = np.asarray(run(own)[0])
    for case in whatif.cases:
        out, gradient = run(cases[case.name])
        assert case.exact[1] == pytest.approx(size(gradient) / size(g), rel=1e-9), case.name
        cosines = [a @ b / size(a) / size(b) for a, b in zip(np.asarray(out), was, strict=True)]
        assert case.output_cosine[0] == pytest.approx(np.mean(cosines), rel=1e-12), case.name
        assert case.worst.net == case.measured.net.min()


def test_what_is_foretold_is_the_own_way_at_the_new_lengths(whatif, bert, x64):
    same, a = whatif["1 mlp: branch × 1"], whatif.audit.profile
    for name in (*FACTORS, "net", "alignment", "stream_rms", "branch_rms", "branch_return"):
        np.testing.assert_allclose(getattr(same.predicted, name), getattr(a, name), rtol=1e-9, err_msg=name)
    assert np.isnan(same.predicted.log_trunk[:, 0]).all()
    # another placement by its definition: x̂ at the length that the sub-layers before leave, g as it arrives, one autodiff each
    gains, biases = affine(bert)
    x = jnp.asarray(bert.embed(bert.ids(TEXT)))
    g = jax.random.normal(jax.random.fold_in(jax.random.key(0), 1), (1, 1, *x.shape), jnp.float32)[0, 0].astype(float)

    def sublayer(k, params, alpha, gain, bias, x):
        return normed(alpha * x + bert.stack.block[k].apply(params, x), bert.stack.eps, True, gain, bias)

    def pulled(k, params, alpha, gain, bias, x, g):
        out, pull = jax.vjp(lambda x: sublayer(k, params, alpha, gain, bias, x), x)
        return out, pull(g)[0]

    run = jax.jit(pulled, static_argnums=0)
    parts, states, arriving = [(s % 2, params_of(bert, s)) for s in range(6)], [x], [g]
    for s in range(6):
        states.append(run(*parts[s], 1.0, gains[s], biases[s], states[-1], g)[0])
    for s in reversed(range(6)):
        arriving.insert(0, run(*parts[s], 1.0, gains[s], biases[s], states[s], arriving[0])[1])
    lengths = jnp.linalg.norm(x, axis=-1, keepdims=True)
    for s in range(6):
        at = states[s] / jnp.linalg.norm(states[s], axis=-1, keepdims=True) * lengths
        out, gradient = run(*parts[s], 6**0.25, gains[s], biases[s], at, arriving[s + 1])
        net = size(gradient) / size(arriving[s + 1])
        assert whatif["deepnorm"].predicted.net[0, s] == pytest.approx(net, rel=1e-9)
        lengths = jnp.linalg.norm(out, axis=-1, keepdims=True)


def rewired_by_hand(checkpoint, kind, x):
    """The last hidden state of the weights in another placement, written out."""
    eps, centred = checkpoint.stack.eps, checkpoint.stack.norm == "layernorm"
    post, read = checkpoint.stack.scheme.name == "post-ln", (1.0, 0.0)
    for s, own in enumerate(zip(*affine(checkpoint), strict=True)):

        def f(x, s=s):
            return checkpoint.stack.block[s % 2].apply(params_of(checkpoint, s), x)

        if kind == "post-ln":  # a pre-LN model's γ stays before the branch, the new norm is even
            x = normed(x + f(own[0] * x), eps, centred)
        else:
            added = f(normed(x, eps, centred, *(read if post else own)))
            x = x + (normed(added, eps, centred) if kind == "sandwich" else added)
        read = own
    return normed(x, eps, centred, *(read if post else (checkpoint.weights.last.gain, 0.0)))


@pytest.mark.repeats(keep=1)
@pytest.mark.parametrize(
    ("family", "kind"), [("bert", "pre-ln"), ("llama", "post-ln"), ("llama", "sandwich"), ("bert", "sandwich")]
)
def test_branches_read_through_the_gain_that_they_were_trained_behind(family, kind, x64):
    model = checkpoints.load(FIXTURES / family)
    x = jnp.asarray(model.embed(model.ids(TEXT)))
    stack, weights = rewiring.rewired(model.stack, model.weights, kind)
    out = weights.final(stack)(stack.trace(weights, x, None, False).out)
    np.testing.assert_allclose(out, rewired_by_hand(model, kind, x), rtol=1e-10, atol=1e-12)


def test_without_its_norm_a_gain_may_go_too(x64):
    llama = checkpoints.load(FIXTURES / "llama")
    for gains in ("kept", "unit"):
        _, weights = rewiring.rewired(llama.stack, llama.weights, "post-ln", gains)
        same = np.array_equal(weights.params[0]["w_q"], llama.weights.params[0]["w_q"])
        assert same == (gains == "unit")
        assert (np.asarray(weights.norms[1][2].gain) == 1).all()


def test_eps_is_of_all_norms(bert):
    stack, weights = edited(bert.stack, bert.weights, Edit.of("all/eps/0.1"), profiles.labels(bert.stack))
    assert {norm.eps for slots in weights.norms for norm in slots if norm} == {stack.eps} == {0.1}


def test_shares_add_up_to_the_log_end_to_end_and_remedies_are_of_the_largest(whatif):
    a = whatif.audit
    shares = a.responsible
    assert sum(part.log for part in shares) == pytest.approx(a.profile.log_exact[0, 0], rel=1e-12)
    assert sum(part.share for part in shares) == pytest.approx(1)
    assert [part.share for part in shares] == sorted((part.share for part in shares), reverse=True)
    first = shares[0]
    assert first.gain == pytest.approx(getattr(a.profile, first.factor)[0, first.index], rel=1e-14)
    edits = remedies(a.profile, 3)
    assert len(set(edits)) == 3
    assert edits[0].place == first.label.split(":")[0]


def test_table_json_and_lookup(whatif):
    lines = str(whatif).splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in str(whatif)
    assert "none is a drop-in" in str(whatif)
    assert f"{whatif['deepnorm'].exact[0]:.3g}" in str(whatif)
    found = json.loads(json.dumps(whatif.to_dict(), allow_nan=False))
    assert [case["name"] for case in found["cases"]] == [case.name for case in whatif.cases]
    assert found["cases"][1]["exact"] == list(whatif["deepnorm"].exact)
    assert (
        BY_NAME["deepnorm"].equation == whatif["deepnorm"].equation == whatif["deepnorm"].measured.settings["equation"]
    )


REFUSED = {
    "several streams": ("bert", {"schemes": ("mhc",)}, "schemes: 'mhc' has several streams"),
    "two placements": ("bert", {"schemes": ("mix-ln",)}, "schemes: 'mix-ln' changes"),
    "moments": ("bert", {"schemes": "admin"}, "admin-closed"),
    "unknown": ("bert", {"schemes": "prelm"}, "pre-ln"),
    "parallel residual": ("gpt_neox", {}, "parallel residual"),
    "recurrence": ("rwkv", {}, "'time-mix' is not re-wired"),
    "encoder and decoder": ("t5", {}, "'cross-attention' is not re-wired"),
    "gains": ("bert", {"gains": "keep"}, "gains: unknown"),
    "edit": ("bert", {"edits": "2 mlp/branch"}, "edits: 'branch' takes a number"),
    "form": ("bert", {"edits": "2 mlp"}, "edits: cannot read '2 mlp'; write PLACE/gain"),
    "everywhere": ("bert", {"edits": "all/branch/2"}, "edits: 'eps' is of all norms"),
    "no edits": ("bert", {"edits": 0}, "edits: needs a whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_one_line_before_a_weight_is_read(monkeypatch, name):
    monkeypatch.setattr(counterfactuals.audits, "audit", lambda *a, **b: pytest.fail("audited"))
    family, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        gradflow.what_if(FIXTURES / family, TEXT, **options)
    assert "\n" not in str(caught.value)


def test_the_shell(shell, monkeypatch, whatif):
    asked = []
    monkeypatch.setattr(counterfactuals, "what_if", lambda *a, **b: asked.append((a, b)) or whatif)
    code, out, _ = shell(
        "what-if", BERT, "--text", TEXT, "--scheme", "pre-ln", "--edit", "2 mlp/branch/0.5", "--key", "3"
    )
    assert (code, out.rstrip()) == (0, str(whatif))
    (arguments, options) = asked[0]
    assert arguments == (BERT, [TEXT], ["pre-ln"])
    assert (options["edits"], options["key"], options["gains"]) == (["2 mlp/branch/0.5"], 3, "kept")
    code, out, _ = shell("what-if", BERT, "--ids", "2 5 9", "--remedies", "2", "--json")
    assert (code, asked[1][1]["edits"], asked[1][1]["ids"]) == (0, 2, [[2, 5, 9]])
    for wrong in ((), ("--text", TEXT, "--edit", "2 mlp/gain", "--remedies", "2")):
        code, out, err = shell("what-if", BERT, *wrong)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_edits_are_refused_by_place(bert):
    labels = profiles.labels(bert.stack)
    with pytest.raises(ValueError, match="edits: place: unknown '9 mlp'"):
        edited(bert.stack, bert.weights, Edit("9 mlp", "gain"), labels)
    with pytest.raises(ValueError, match="the final norm has no branch"):
        Edit("final norm", "branch", 0.5).row((*labels, "final norm"), True)
