"""Products over depth against plain jacfwd, for norms × branches × schemes; and the algebra that they obey."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import sympy
from networks import BARE, BRANCH_NAMES, PLAIN, TABLE, TOKENS, WIDTH, eye, name, normal, run
from oracle import params_at

from gradflow.branches import MLP, Bias, Linear, branch_of
from gradflow.norms import NORMS
from gradflow.schemes import SCHEMES, Scheme, scheme_of
from gradflow.stack import Drawn, Given, Stack

table = pytest.mark.parametrize(("norm", "scheme", "block", "final"), TABLE, ids=name)
scheme_norm = pytest.mark.parametrize("norm", [row.name for row in NORMS])
schemes = pytest.mark.parametrize("scheme", PLAIN, ids=name)


def close(left, right, rtol=1e-11):
    right = np.asarray(right)
    np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol * np.abs(right).max(initial=0))


def product(trace):
    return np.asarray(trace.basis, np.float64) * 2.0 ** int(trace.exponent)


def stacked(weights, stack):
    """Drawn weights, written out with a leading axis of depth."""
    return Given(jax.tree.map(lambda *p: jnp.stack(p), *(params_at(weights, stack, l) for l in range(stack.depth))))


@table
@pytest.mark.usefixtures("x64")
def test_product_is_jacfwd_of_the_whole_network_and_the_stream_its_equation(norm, scheme, block, final):
    r = run(norm, scheme, block, final)
    close(r.product, r.oracle.product(r.x))
    truth = r.oracle.states(r.x)
    for figure in ("x", "u", "added", "out"):
        close(getattr(r.trace, figure), getattr(truth, figure))


@pytest.mark.parametrize("scheme", [row for row in SCHEMES if row.name in oracle.SCHEMES], ids=name)
@pytest.mark.usefixtures("x64")
def test_catalogue_row_is_the_equation_of_its_paper(scheme):
    r = run("layernorm", scheme, ("mlp:gelu",), False)
    (params,) = jax.tree.map(np.asarray, params_at(r.weights, r.stack, 0))

    layer = functools.partial(oracle.norm, "layernorm", r.stack.eps)

    def branch(x):
        return oracle.branch("mlp:gelu", params, x[None])[0]

    close(r.trace.x[1, 0], oracle.SCHEMES[scheme.name](layer, branch, np.asarray(r.x[0])))


@pytest.mark.parametrize(("scheme", "block"), [("post-ln", ("linear",)), ("pre-ln", ("mlp:silu", "bias"))])
def test_compiled_is_eager_and_log_scaled_is_plain(scheme, block, x64):
    stack = Stack.make(scheme, block, 4, WIDTH, norm="layernorm", eps=0.0, final_norm=True)
    weights, x = Drawn(jax.random.key(7)), normal(1, TOKENS, WIDTH)
    trace = stack.trace(weights, x, eye(TOKENS, WIDTH))
    assert 0.75 <= float(jnp.abs(trace.basis).max()) <= 1.5
    close(product(trace), oracle.Network(stack, weights).product(x))


@schemes
def test_product_over_a_sum_of_depths_is_the_product_of_products(scheme, x64):
    whole = Stack.make(scheme, ("mlp:tanh", "linear"), 5, WIDTH, norm="layernorm")
    weights = stacked(Drawn(jax.random.key(3)), whole)
    first, second = (dataclasses.replace(whole, depth=n) for n in (2, 3))
    head, tail = (Given(jax.tree.map(lambda p, part=part: p[part], weights.params)) for part in (slice(2), slice(2, 5)))
    x = normal(1, TOKENS, WIDTH)
    a = first.trace(head, x, eye(TOKENS, WIDTH))
    b = second.trace(tail, a.out, eye(TOKENS, WIDTH))
    c = whole.trace(weights, x, eye(TOKENS, WIDTH))
    close(product(c), product(b) @ product(a))
    pushed = second.trace(tail, a.out, a.basis)
    close(product(c), product(pushed) * 2.0 ** int(a.exponent))
    close(c.out, b.out)


@schemes
@scheme_norm
@pytest.mark.usefixtures("x64")
def test_zero_branch_leaves_the_trunk(scheme, norm):
    stack = Stack.make(scheme, (Linear(gain=0.0), MLP("gelu", gain=0.0)), 1, WIDTH, norm=norm, eps=0.0)
    x, layer = normal(1, TOKENS, WIDTH), stack.layer
    trunk = jax.vmap(lambda v: jax.jacfwd(lambda v: layer(layer(v)))(v))(x)
    trace = stack.trace(Drawn(jax.random.key(0)), x, eye(TOKENS, WIDTH))
    close(product(trace), trunk if scheme.norm_out else eye(TOKENS, WIDTH), 1e-12)


@schemes
@pytest.mark.usefixtures("x64")
def test_constant_branch_product_is_the_trunk_at_its_trajectory(scheme):
    r = run("layernorm", scheme, ("bias",), False)
    close(r.product[0], oracle.jacobian(functools.partial(r.oracle.run, frozen=True), r.x)[0, :, 0])


@pytest.mark.parametrize("block", [("linear",), ("mlp:gelu", "bias")], ids=name)
@pytest.mark.usefixtures("x64")
def test_drawn_given_and_tied_weights_agree(block):
    stack = Stack.make("post-ln", block, 3, WIDTH)
    drawn, x = Drawn(jax.random.key(5)), normal(1, TOKENS, WIDTH)
    given = stacked(drawn, stack)
    for a, b in zip(
        jax.tree.leaves(stack.trace(drawn, x, eye(TOKENS, WIDTH))),
        jax.tree.leaves(stack.trace(given, x, eye(TOKENS, WIDTH))),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    once = params_at(drawn, stack, 0)
    tied = stack.trace(Given(once, tied=True), x, eye(TOKENS, WIDTH))
    repeated = stack.trace(Given(jax.tree.map(lambda p: jnp.stack([p] * 3), once)), x, eye(TOKENS, WIDTH))
    close(product(tied), product(repeated), 1e-15)


def test_every_block_and_branch_draws_its_own_weights(x64):
    stack = Stack.make("post-ln", ("linear", "linear"), 3, WIDTH)
    weights = Drawn(jax.random.key(0))
    drawn = [np.asarray(p["w"]) for l in range(3) for p in params_at(weights, stack, l)]
    assert len({w.tobytes() for w in drawn}) == 6


@pytest.mark.parametrize("branch", [b for b in BRANCH_NAMES if b != "bias"])
def test_weights_have_variance_one_over_fan_in_times_gain(branch, x64):
    d = 128
    made = dataclasses.replace(branch_of(branch), gain=0.5)
    params = made.init(jax.random.key(0), d, "float64")
    for key, w in params.items():
        if key == "memory" or w.ndim < 2:  # no matrix
            continue
        gain = 0.5 if key in made.outer else 1.0
        n = w.size
        np.testing.assert_allclose(np.var(w) * w.shape[1] / gain**2, 1, atol=5 * np.sqrt(2 / n))
        np.testing.assert_allclose(np.mean(w) * np.sqrt(w.shape[1]) / gain, 0, atol=5 / np.sqrt(n))


@pytest.mark.parametrize(
    "branch", [pytest.param(b, marks=pytest.mark.slow if b.endswith("-mix") else ()) for b in BRANCH_NAMES]
)
@pytest.mark.usefixtures("x64")
def test_push_is_jacfwd_of_the_branch(branch):
    f, d = branch_of(branch), 6 if "attention" in branch else WIDTH  # two heads, or the shapes of the table
    params, x = f.init(jax.random.key(0), d, "float64"), normal(1, 3, d)
    truth = oracle.jacobian(functools.partial(oracle.branch, branch, jax.tree.map(np.asarray, params)), x)
    bases = [normal(2, 3, d, k) for k in (2, d)]  # a thin basis and a full one go by different orders

    @jax.jit
    def run(x, bases):
        value = functools.partial(f.apply, params)
        return value(x), jax.jacrev(value)(x), [f.push(params, x, basis) for basis in bases]

    value, jacobian, pushed = run(x, bases)
    close(value, oracle.branch(branch, params, np.asarray(x)))
    close(jacobian, truth)
    for basis, found in zip(bases, pushed, strict=True):
        close(found, np.einsum("tisj,sjk->tik", truth, basis))
    assert f.tokenwise == (not np.any([truth[i, :, j] for i in range(3) for j in range(3) if i != j]))


def test_a_thin_basis_is_pushed_like_the_columns_of_the_whole(x64):
    stack = Stack.make("post-ln", "mlp:gelu", 3, WIDTH)
    weights, x, thin = Drawn(jax.random.key(0)), normal(1, TOKENS, WIDTH), normal(2, TOKENS, WIDTH, 2)
    close(product(stack.trace(weights, x, thin)), product(stack.trace(weights, x, eye(TOKENS, WIDTH))) @ thin)


z = sympy.Symbol("t")
OWN_ACTIVATIONS = {
    "cubic": (z + z**3 / 10, lambda t: t + t**3 / 10),
    "sine": (sympy.sin(2 * z), lambda t: np.sin(2 * t)),
    "swish-like": (z / (1 + sympy.exp(-2 * z)), lambda t: t / (1 + np.exp(-2 * t))),
    "leaky": (sympy.Max(z, z / 10), lambda t: np.where(t.real > 0, t, t / 10)),
}


@pytest.mark.parametrize(
    "kind", ["cubic", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(OWN_ACTIVATIONS)[1:])]
)
@schemes
@pytest.mark.usefixtures("x64")
def test_a_users_own_activation_as_a_sympy_expression(kind, scheme):
    expression, phi = OWN_ACTIVATIONS[kind]
    stack = Stack.make(scheme, MLP(expression), 2, WIDTH)
    weights, x = Drawn(jax.random.key(0)), normal(1, TOKENS, WIDTH)
    close(product(stack.trace(weights, x, eye(TOKENS, WIDTH))), oracle.Network(stack, weights, phi).product(x))


@pytest.mark.parametrize(("scheme", "branch"), [("post-ln", "mlp:gelu"), ("pre-ln", "linear")])
def test_float32_leg_agrees_to_its_own_precision(scheme, branch):
    stack = Stack.make(scheme, branch, 4, 16, norm="layernorm", dtype="float32")
    key = jax.random.key(0)
    x = jax.random.normal(jax.random.key(1), (2, 16), jnp.float32)
    trace = stack.trace(Drawn(key), x, eye(2, 16, jnp.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(trace)} == {np.dtype("float32"), np.dtype("int32")}
    params = [params_at(Drawn(key), stack, l) for l in range(4)]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda *p: jnp.stack(p).astype(jnp.float64), *params)
        double = dataclasses.replace(stack, dtype="float64")
        truth = double.trace(Given(wide), x.astype(jnp.float64), eye(2, 16))
    close(product(trace), product(truth), 2e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_under_or_overflows_at_depth_20000(dtype):
    for c, sign in ((0.5, -1), (2.0, 1)):
        scheme = Scheme("scaled", "test", "J = c", alpha=sympy.Float(c), beta=sympy.Integer(0))
        stack = Stack.make(scheme, "bias", 20_000, 2, norm="rms", dtype=dtype)
        with jax.enable_x64(dtype == "float64"):
            x = jnp.zeros((1, 2), dtype)
            trace = stack.trace(Drawn(jax.random.key(0)), x, eye(1, 2, dtype))
        assert int(trace.exponent) + np.log2(float(trace.basis[0, 0, 0])) == sign * 20_000
        assert float(trace.basis[0, 0, 1]) == 0


def test_a_zero_product_stays_zero_and_finite(x64):
    scheme = Scheme("nothing", "test", "J = 0", alpha=sympy.Integer(0), beta=sympy.Integer(0))
    trace = Stack.make(scheme, "bias", 3, 2, norm="rms").trace(Drawn(jax.random.key(0)), normal(0, 1, 2), eye(1, 2))
    np.testing.assert_array_equal(trace.basis, np.zeros((1, 2, 2)))


def test_multipliers_follow_the_sublayer_and_their_number():
    from gradflow.schemes import S, l

    row = Scheme("x", "test", "", alpha=S ** sympy.Rational(1, 4), beta=1 / sympy.sqrt(l))
    alpha, beta, *_ = row.multipliers(16)
    close(alpha, np.full(16, 2.0))
    close(beta, 1 / np.sqrt(np.arange(1, 17)))
    alpha, beta, *_ = Stack.make(row, ("linear", "bias"), 8, 4).multipliers()
    assert alpha.shape == beta.shape == (8, 2)
    close(beta.ravel(), 1 / np.sqrt(np.arange(1, 17)))


def test_equations_read_as_their_rows():
    assert [row.equation.replace(" ", "") for row in (*PLAIN, BARE)] == [
        "x'=N(x+f(x))",
        "x'=x+f(N(x))",
        "x'=x+-1/S·f(x)",
    ]
    assert scheme_of("pre-ln") is SCHEMES[1] is PLAIN[1]
    assert scheme_of("peri-ln") is scheme_of("sandwich")
    assert scheme_of(BARE) is BARE


def test_stacks_are_hashable_and_equal_by_value():
    a, b = (Stack.make("post-ln", ("linear", "mlp:gelu"), 3, 8) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a.sublayers == 6
    assert isinstance(branch_of(Bias(2.0)), Bias)
