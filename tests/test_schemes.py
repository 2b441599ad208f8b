"""The catalogue: constants against the papers', gains on drawn weights, placement along depth, norms of every kind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy
from networks import WIDTH, normal
from refusals import refused

import gradflow
from gradflow.branches import MLP, Attention, Bias, Linear, branch_of
from gradflow.dyt import DyT
from gradflow.inits import INITS, initialised
from gradflow.schemes import ALIASES, BY_NAME, SCHEMES, S, Scheme, scheme_of
from gradflow.stack import Drawn, Stack


def close(left, right, rtol=1e-12):
    np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol)


def numbers(name, sublayers, powers=(1.0,)):
    return scheme_of(name).multipliers(sublayers, powers)


def test_constants_are_the_papers():
    for N in (6, 100):  # blocks of two sub-layers
        deep = numbers("deepnorm", 2 * N)
        close(deep.alpha, (2 * N) ** 0.25)
        close(deep.inner, (8 * N) ** -0.25)
        close(deep.outer, deep.inner)
        close(numbers("t-fixup", 2 * N).inner, 0.67 * N**-0.25)
    close(numbers("gpt2", 24).outer, 24**-0.5)
    close(numbers("layernorm-scaling", 8, (1.0, 1.0)).scale, np.repeat([1, 2, 3, 4], 2) ** -0.5)  # l counts blocks
    close(numbers("residual-scaling", 16).beta, 0.25)
    close(numbers("keel", 12).alpha, 12)
    close(numbers("ngpt", 3)[:2], [[0.95] * 3, [0.05] * 3])
    close(numbers("fixup", 9).inner, 1 / 3)
    assert not numbers("fixup", 9).outer.any()
    assert not numbers("rezero", 9).beta.any()
    close([numbers("layerscale", n).beta[0] for n in (36, 37, 48, 49)], [0.1, 1e-5, 1e-5, 1e-6])


def test_admins_skip_is_the_power_of_the_branches_before():
    close(numbers("admin", 5, (0.5,)).alpha ** 2, 1 + 0.5 * np.arange(5))
    close(numbers("admin", 6, (0.5, 2.0)).alpha ** 2, [1, 1.5, 3.5, 4, 6, 6.5])
    close(numbers("admin-closed", 200).alpha, np.sqrt(201 / np.log(201) - 1))
    stack = Stack.make("admin", ("linear", "mlp:relu"), 3, 8)
    close(stack.multipliers().alpha ** 2, [[1, 2], [2.5, 3.5], [4, 5]])


def test_every_row_says_what_it_is():
    assert len(BY_NAME) == len(SCHEMES) == 19
    for row in SCHEMES:
        assert row.source
        assert row.purpose
        assert row.equation.startswith("x' = ")
        assert scheme_of(row.name) is row
        np.testing.assert_array_equal(row.shape.multipliers(4), 1.0)
    assert scheme_of("mix-ln").equation == "x' = N(x + f(x)), b ≤ 1/4·depth; then x' = x + f(N(x))"
    assert scheme_of("layernorm-scaling").equation == "x' = x + f(1/sqrt(b)·N(x))"
    assert {scheme_of(alias).name for alias in ALIASES} == {"sandwich", "res-post-norm"}
    refused(lambda: scheme_of("deepnrom"), "scheme: unknown 'deepnrom'; did you mean 'deepnorm'")


def test_mix_ln_is_post_ln_then_pre_ln():
    parts = scheme_of("mix-ln").parts(8)
    assert [(p.start, p.stop) for p, _ in parts] == [(0, 2), (2, 8)]
    assert [row.slots for _, row in parts] == [(False, False, True), (True, False, False)]
    assert [row.slots for _, row in scheme_of("mix-ln").parts(1)] == [(True, False, False)]


@pytest.mark.parametrize("branch", ["linear", "bias", "mlp:relu", "glu:silu", "attention"])
def test_gains_fall_on_the_inner_and_the_last_matrices(branch, x64):
    row = Scheme("gains", "test", "", norm_in=True, scale=sympy.Integer(2), inner=S / 10, outer=1 / S)
    stack, plain = (Stack.make(r, branch, 3, 8) for r in (row, "pre-ln"))
    weights = Drawn(jax.random.key(0))
    layers = [layer_of(weights, s, 1) for s in (stack, plain)]
    inner, outer = {"linear": ((), ("w",)), "bias": ((), ("b",))}.get(
        branch, (("w_in", "w_gate", "w_v"), ("w_out", "w_o"))
    )
    for name, value in layers[0].params[0].items():
        factor = 0.3 if name in inner else 1 / 3 if name in outer else 1.0
        close(value, factor * layers[1].params[0][name])
    close(layers[0].norms[0][0].gain, 2.0)


def layer_of(weights, stack, block):
    return weights.layer(stack, jax.tree.map(lambda leaf: leaf[block], weights.along_depth(stack)))


def test_numbers_given_are_the_schemes_own(x64):
    """What lets schemes of one shape share a compilation."""
    stack = Stack.make("deepnorm", "mlp:gelu", 3, WIDTH)
    bare = dataclasses.replace(stack, scheme=stack.scheme.shape)
    x, key = normal(1, 2, WIDTH), jax.random.key(0)
    own = stack.trace(Drawn(key), x)
    given = bare.trace(Drawn(key, None, stack.multipliers()), x)
    close(own.out, given.out)


def test_a_branch_that_lists_no_matrices_is_not_silently_left_unscaled():
    @dataclasses.dataclass(frozen=True)
    class Own:
        gain: float = 1.0
        name = "own"
        tokenwise = True
        init = apply = push = moments = None

    refused(lambda: Stack.make("deepnorm", Own(), 2, 8), "block: 'own' lists no inner matrices")
    assert Stack.make("pre-ln", Own(), 2, 8)


# --- norms -------------------------------------------------------------------------------------------------------------


def test_dyt_and_its_jacobian(x64):
    layer, x = DyT.init(6, dtype="float64"), normal(0, 3, 6)
    layer = dataclasses.replace(layer, gain=jnp.arange(1.0, 7), bias=jnp.ones(6))
    close(layer(x), np.arange(1, 7) * np.tanh(0.5 * np.asarray(x)) + 1)
    dense = jax.vmap(jax.jacfwd(layer))(x)
    close(layer.jacobian(x).dense(), dense)
    v = normal(1, 3, 6)
    close(layer.jacobian(x).mv(v), jnp.einsum("tij,tj->ti", dense, v))
    close(layer.jacobian(x).rmv(v), jnp.einsum("tij,ti->tj", dense, v))
    close(layer.jacobian(x).push(normal(2, 3, 6, 2)), dense @ normal(2, 3, 6, 2))
    refused(lambda: layer(jnp.ones(5)), "x: needs vectors of 6 entries")


def test_factors_of_dyt_are_affine_then_no_projection_then_the_slope(x64):
    stack = Stack.make("post-ln", "linear", 1, 8, norm="dyt")
    x, c = normal(1, 3, 8), normal(2, 3, 8)
    p = gradflow.profile(stack, x, c, weights=Drawn(jax.random.key(0)))
    w = layer_of(Drawn(jax.random.key(0)), stack, 0).params[0]["w"]
    u = x + x @ w.T
    slope = 0.5 / np.cosh(0.5 * np.asarray(u)) ** 2
    close(p.projection, 1)
    close(p.affine, 1)
    close(p.alignment, 0)
    close(p.norm[0, 0], np.linalg.norm(c * slope) / np.linalg.norm(c))
    close(p.radius_gain[0, 0], np.sqrt(np.mean(slope**2)))


def test_without_a_norm_all_rows_of_one_skip_are_the_skeleton():
    assert Stack.make("keel", "linear", 3, 8, norm="none").slots == ((None, None, None),)
    assert gradflow.law("post-ln", "linear", 3, norm="none").exact[0, 0] == pytest.approx(2**1.5)


# --- initialisations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", INITS)
def test_drawn_variance_is_the_rows(init, x64):
    d, ratio = 64, 4
    mlp, linear, attention, bias = initialised((MLP("relu"), Linear(), Attention(), Bias()), init, d)
    wanted = {
        "unit": (1 / d, 1 / (ratio * d), 1 / d),
        "xavier": (2 / (d + ratio * d), 2 / (d + ratio * d), 1 / d),
        "he": (2 / d, 2 / (ratio * d), 2 / d),
        "gpt2": (4e-4, 4e-4, 4e-4),
        "torch": (1 / (3 * d), 1 / (3 * ratio * d), 1 / (3 * d)),
    }[init]
    p = mlp.init(jax.random.key(0), d, "float64")
    for w, variance in zip((p["w_in"], p["w_out"]), wanted[:2], strict=True):
        np.testing.assert_allclose(np.var(w), variance, rtol=5 * np.sqrt(2 / w.size))
    np.testing.assert_allclose(np.var(linear.init(jax.random.key(0), d, "float64")["w"]), wanted[2], rtol=0.15)
    for w in attention.init(jax.random.key(0), d, "float64").values():
        np.testing.assert_allclose(np.var(w), wanted[2], rtol=0.15)
    assert bias == Bias()


def test_an_init_of_fixed_std_needs_the_width():
    refused(lambda: initialised((Linear(),), "gpt2", None), "d: an init of fixed std")
    refused(lambda: initialised((Linear(),), "xavir", 8), "init: unknown 'xavir'; did you mean 'xavier'")
    assert branch_of("glu:linear").gated
