"""Branches with biases, with a norm over the hidden units, and with dropout: Jacobians, moments, and the law on networks."""

import math

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import oracle
import pytest
import sympy
from networks import WIDTH, normal
from oracle import params_at
from refusals import refused

import gradflow
from gradflow import precision
from gradflow.branches import MLP, Attention, branch_of, named, of_one_token, with_power
from gradflow.branches.dropout import Dropout
from gradflow.branches.matrices import linear
from gradflow.comparing.comparisons import compare, figures
from gradflow.inits import initialised
from gradflow.stack import Drawn, Stack
from gradflow.symbolic import moments, variants

z = sympy.Symbol("z")


def close(left, right, rtol=1e-12):
    np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol)


# --- Jacobians ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("hidden", [None, "layernorm"])
@pytest.mark.usefixtures("x64")
def test_push_with_biases_is_jacfwd(gated, hidden):
    f = MLP("gelu", gated=gated, hidden_norm=hidden, bias=0.3, bias_in=0.7)
    params, x = f.init(jax.random.key(0), WIDTH, "float64"), normal(1, 3, WIDTH)
    assert {k for k in params if k[0] == "b"} == {"b_in", "b_out"} | ({"b_gate"} if gated else set())
    truth = oracle.jacobian(lambda x: oracle.branch(f.name, jax.tree.map(np.asarray, params), x), x)
    for k in (2, WIDTH):
        basis = normal(2, 3, WIDTH, k)
        close(f.push(params, x, basis), jnp.einsum("tisj,sjk->tik", truth, basis))
    close(f.apply(params, x), oracle.branch(f.name, params, np.asarray(x)))


def test_biases_are_drawn_beside_the_same_weights(x64):
    plain, biased = (MLP("relu", gated=True, **b).init(jax.random.key(3), 64, "float64") for b in ({}, {"bias_in": 2}))
    for name, value in plain.items():
        np.testing.assert_array_equal(value, biased[name])
    both = np.concatenate([biased["b_in"], biased["b_gate"]])
    np.testing.assert_allclose(np.var(both), 4, rtol=5 * np.sqrt(2 / both.size))
    assert abs(np.corrcoef(biased["b_in"], biased["b_gate"])[0, 1]) < 0.3
    assert "b_out" not in biased


@pytest.mark.repeats
@pytest.mark.parametrize("name", ["mlp:gelu", "attention"])
@pytest.mark.usefixtures("x64")
def test_dropout_is_one_mask_on_value_and_jacobian(name):
    f, plain, d = Dropout(name, 0.25), branch_of(name), 6
    params, x, basis = f.init(jax.random.key(0), d, "float64"), normal(1, 3, d), normal(2, 3, d, 4)
    mask = np.asarray(f.apply(params, x) / plain.apply(params, x))
    kept = mask > 0.5
    close(mask, kept / 0.75)
    assert 0 < kept.sum() < kept.size  # tokens and units have their own
    assert len({row.tobytes() for row in kept}) > 1
    close(f.push(params, x, basis), mask[..., None] * np.asarray(plain.push(params, x, basis)))
    dense = jax.jacfwd(lambda v: f.apply(params, v))(x)
    close(f.push(params, x, basis), jnp.einsum("tisj,sjk->tik", dense, basis))
    again = Dropout(name, 0.0)
    np.testing.assert_array_equal(again.apply(again.init(jax.random.key(0), d, "float64"), x), plain.apply(params, x))


def test_a_networks_mask_stays_and_every_precision_has_it():
    stack = [Stack.make("post-ln", Dropout("linear", 0.5), 3, 32, dtype=dtype) for dtype in ("float32", "float64")]
    x = np.random.default_rng(0).standard_normal((2, 32))
    single, double = (gradflow.profile(s, x, weight_grad=True, seeds=2) for s in stack)
    np.testing.assert_allclose(single.branch_rms, double.branch_rms, rtol=1e-4)
    np.testing.assert_allclose(single.weight_grad, double.weight_grad, rtol=1e-3)
    masks = [params_at(Drawn(jax.random.key(0)), stack[0], l)[0]["key"] for l in range(3)]
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 3


@pytest.mark.slow
def test_probes_and_products_agree_under_dropout(x64):
    """Backward through the stack, against the whole product pushed forward."""
    stack = Stack.make("pre-ln", (Dropout("attention+rms", 0.2), Dropout("mlp:gelu+layernorm", 0.2)), 2, 8)
    weights, x, g = Drawn(jax.random.key(1)), normal(1, 3, 8), normal(2, 3, 8)
    eye = jnp.eye(24).reshape(3, 8, 24)
    trace = stack.trace(weights, x, eye)
    product = np.asarray(trace.basis * 2.0**trace.exponent).reshape(24, 24)
    p = gradflow.profile(stack, x, g, weights=weights)
    close(p.exact[0, 0], np.linalg.norm(np.ravel(g) @ product) / np.linalg.norm(g), 1e-10)


@pytest.mark.slow
def test_weight_gradients_see_the_hidden_norm(x64):
    f, x, g = MLP("gelu", gated=True, hidden_norm="layernorm"), normal(1, 3, 8), normal(2, 3, 8)
    params = f.init(jax.random.key(0), 8, "float64")
    grads = jax.grad(lambda w: jnp.sum(g * f.apply(w, x)))(params)
    notes = {f"note{name}": jnp.zeros(()) for name in f.matrices}
    seen = jax.grad(lambda n: jnp.sum(g * f.apply(params | n, x)))(notes)
    for name in f.matrices:
        close(seen[f"note{name}"], np.linalg.norm(grads[f"w{name}"]), 1e-10)
    assert linear(params, "_in", x).shape == (3, 32)


# --- moments -----------------------------------------------------------------------------------------------------------


@pytest.mark.repeats(keep=5)
@pytest.mark.parametrize(
    ("branch", "chi"),
    [
        ("mlp:relu+layernorm", 0.5 / (0.5 - 0.5 / math.pi)),  # E φ'²/Var φ = 1.4669…
        ("mlp:relu+rms", 1.0),
        ("mlp:linear+layernorm", 1.0),
        ("glu:linear+layernorm", 2.0),  # degree 2, of zero mean: as RMSNorm
        ("attention+layernorm", 1.0),
        (MLP(z**3, hidden_norm="rms"), 27 / 15),  # 9 E z⁴ / E z⁶
        (MLP(z**2 + z, hidden_norm="layernorm"), 5 / 3),  # (4 E z² + 1)/(E z⁴ + E z² − 1)
        (MLP(z**2 + z, hidden_norm="rms"), 5 / 4),
        (MLP(z**2 + z, hidden_norm="layernorm", gain_in=2.0), 4 * 17 / (16 * 2 + 4)),
        (MLP(z**2 + z, hidden_norm="rms", bias_in=1.0, gain=3.0), 9 * 9 / 14),  # E|φ'|² = 9, E φ² = 14 at power 2
    ],
    ids=str,
)
def test_a_hidden_norm_divides_by_what_it_sees(branch, chi):
    (f,) = of_one_token([branch_of(branch)])
    found = f.moments()
    assert found.q == pytest.approx(f.gain**2, rel=1e-12)
    assert found.chi == pytest.approx(chi, rel=1e-12)
    assert math.isnan(found.defect)
    assert not f.refined


def test_the_variance_of_a_small_signal_on_a_large_mean():
    """Softplus at a power of 1e-12: E h² and (E h)² agree in 12 digits."""
    phi, p = moments.ACTIVATIONS["softplus"], 1e-12
    with mpmath.workdps(50):
        mean, square = (
            mpmath.quad(
                lambda z, n=n: mpmath.log(1 + mpmath.exp(mpmath.sqrt(p) * z)) ** n * mpmath.npdf(z), [-20, 0, 20]
            )
            for n in (1, 2)
        )
        wanted = float(square - mean**2)
    with precision.scope("float64"):
        assert float(moments.variance_at(phi)(p)) == pytest.approx(wanted, rel=1e-9, abs=0)


@pytest.mark.parametrize("gated", [False, True])
def test_moments_with_biases_are_a_quadrature_in_input_and_bias(gated):
    """Every moment of q, χ and the 1/d term by Gauss–Hermite over x's part and the bias's, φ = z² + z written out."""
    f = MLP(z**2 + z, gated=gated, gain=0.8, gain_in=1.3, bias=0.4, bias_in=0.6)
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    weights = weights / weights.sum()
    u, b, v, c = np.meshgrid(1.3 * nodes, 0.6 * nodes, 1.3 * nodes, 0.6 * nodes, indexing="ij")
    mass = np.einsum("i,j,k,l->ijkl", *[weights] * 4)
    pre, gate = u + b, v + c
    phi, slope = pre**2 + pre, 2 * pre + 1
    h, parts, along = (
        (phi * gate, (slope * gate, phi), slope * gate * u + phi * v) if gated else (phi, (slope,), slope * u)
    )
    grad = 1.3**2 * sum(p**2 for p in parts)

    def mean(g):
        return float(np.sum(mass * g))

    s2, q = 0.64, mean(h**2)
    wanted = {
        "q": s2 * q + 0.16,
        "chi": s2 * mean(grad),
        "defect": s2 * mean((along - h) ** 2) + 0.16,
        "overlap": s2 * mean((along - h) * h) - 0.16,
        "power_var": s2**2 * (mean(h**4) - q**2) / 4,
        "slope_var": s2**2 * (mean(grad**2) - mean(grad) ** 2) / 4,
        "slope_draw": 2 * s2**2 * mean(grad**2) / 4,
        "covariance": s2**2 * (mean(h**2 * grad) - q * mean(grad)) / 4,
        "cross": s2 * mean(h**2 * grad) / q / 4 * (s2 * q) / (s2 * q + 0.16),
    }
    found = vars(f.moments())
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-10), name


def test_dropout_multiplies_both_moments():
    plain, dropped = branch_of("mlp:gelu").moments(), Dropout("mlp:gelu", 0.2).moments()
    assert (dropped.q, dropped.chi) == pytest.approx((plain.q / 0.8, plain.chi / 0.8), rel=1e-14)
    assert Dropout("mlp:gelu", 0.0).moments() == plain
    assert of_one_token([Dropout("attention+rms", 0.5)])[0].moments().q == pytest.approx(2)
    assert with_power(Dropout("mlp:relu", 0.5), 3.0).moments().q == pytest.approx(3, rel=1e-14)
    (he,) = initialised([Dropout("mlp:relu", 0.5)], "he", None)
    assert he.moments().q == pytest.approx(2 * initialised([branch_of("mlp:relu")], "he", None)[0].moments().q)


def test_torchs_biases_are_of_order_1_over_d():
    (f,) = initialised([branch_of("mlp:relu")], "torch", 96)
    assert (f.bias**2, f.bias_in**2) == pytest.approx((1 / (3 * 4 * 96), 1 / (3 * 96)))
    wanted = (1 / 3 + 1 / 288) / 6 + 1 / 1152  # gain² · ½ (p·gain_in² + bias_in²) + bias²
    assert gradflow.law("pre-ln", f, 1).branch_rms[0, 0] ** 2 == pytest.approx(wanted, rel=1e-12)
    (attention,) = initialised([Attention()], "torch", 96)  # nn.MultiheadAttention starts its biases at 0
    assert of_one_token([attention])[0].bias == 0


def test_maps_of_moments_compose():
    """A bias in two parts is one bias; no dropout changes nothing."""
    at = MLP("tanh").moments()
    twice, once = variants.biased_in(variants.biased_in(at, 0.6), 0.5), variants.biased_in(at, 0.3)
    for name, value in vars(once).items():
        assert vars(twice)[name] == pytest.approx(value, rel=1e-12), name
    assert variants.dropped(at, 0.0) is at


# --- the law -----------------------------------------------------------------------------------------------------------

BLOCKS = {
    "a norm over the hidden units": ("mlp:relu+layernorm", "glu:silu+rms", "attention+layernorm"),
    "biases and dropout": (MLP("tanh", bias=0.5, bias_in=0.8), Dropout("mlp:gelu", 0.3), MLP("relu", bias=0.4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_law_and_networks_agree(block):
    """Rates per sub-layer within max(2 %, 3 s.e.), s.e. below 1 %, and what a law of the plain branches misses by far more."""
    schemes, depth = ["post-ln", "pre-ln", "res-post-norm"], 2
    for entry in compare(schemes, BLOCKS[block], depth, 192, seeds=24):
        sublayers = 3 * depth
        for curve in ("log_exact", "log_trunk"):
            rates = getattr(entry.measured, curve)[:, 0] / sublayers
            error = rates.std(ddof=1) / math.sqrt(len(rates))
            gap = rates.mean() - getattr(entry.law, curve)[0, 0] / sublayers
            assert error < 0.01, entry.name
            assert abs(gap) < max(0.02, 3 * error), f"{entry.name} {curve}: {gap:+.4f} ± {error:.4f}"
        seen, said = figures(entry.measured), figures(entry.law)
        np.testing.assert_allclose(seen["stream"], said["stream"], rtol=0.05)
        np.testing.assert_allclose(seen["weight_grad"], said["weight_grad"], rtol=0.12, err_msg=entry.name)
        assert entry.law.settings["order"] == "leading"


@pytest.mark.slow
def test_a_branch_says_that_its_law_is_of_leading_order():
    for branch in ("mlp:gelu+rms", "attention+layernorm", Dropout("linear", 0.1)):
        law = gradflow.law("pre-ln", branch, 3, d=64)
        assert law.settings["order"] == "leading"
        assert law.sd_exact is None
        assert np.isfinite(law.weight_grad).all()
    for branch in ("mlp:gelu", MLP("gelu", bias=1.0, bias_in=1.0), Dropout("linear", 0.0)):
        assert gradflow.law("pre-ln", branch, 3, d=64).settings["order"] == "with the 1/d term"
    r = gradflow.contraction(3, 16, branch="mlp:gelu+rms", seeds=2)
    assert r.law is None
    assert r.law_profile.trunk[0, 0] == pytest.approx(0.8**3)
    assert max(map(len, str(r).splitlines())) <= 100


BAD = {
    "hidden_norm: unknown 'layrnorm'; did you mean 'layernorm'": lambda: MLP("relu", hidden_norm="layrnorm"),
    "hidden_norm: unknown 'dyt'": lambda: Attention(hidden_norm="dyt"),
    "bias: needs a standard deviation": lambda: MLP("relu", bias=-1.0),
    "bias_in: needs a standard deviation": lambda: MLP("relu", bias_in=math.inf),
    "rate: needs a number strictly between 0 and 1, got 1.0": lambda: Dropout("linear", 1.0),
    "branch: unknown 'mpl:relu'": lambda: Dropout("mpl:relu", 0.5),
    "branch: has a dropout already": lambda: Dropout(Dropout("linear", 0.5), 0.5),
    "branch: unknown 'mlp:gelu.rms'; did you mean 'mlp:gelu'": lambda: branch_of("mlp:gelu.rms"),
    "branch: unknown 'layrnorm'; did you mean 'layernorm'": lambda: branch_of("mlp:gelu+layrnorm"),
    "branch: 'linear' has no hidden units": lambda: branch_of("linear+rms"),
    "block: unknown 'rsm'; did you mean 'rms'": lambda: named("block", "glu:silu+rsm"),
}


@pytest.mark.parametrize("message", BAD)
def test_refusals(message):
    refused(BAD[message], message)
