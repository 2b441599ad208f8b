"""The symbolic half: every essay runs, formulas survive autodiff and exact rationals, and a wrong one is caught."""

import dataclasses
import itertools
import math
import runpy
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from gradflow.symbolic import NAMES, Derivation, derive
from gradflow.symbolic.index import contract, delta, evaluate, i, j, k, l, matrix, partial, total, vector
from gradflow.symbolic.norms import NORM_NAMES, closed_jacobian, eps, gamma, norm_formula, norm_of, r, rank, spectrum
from gradflow.symbolic.projections import L, LowRank, projection_product, theta
from gradflow.symbolic.readings import c, expectation, readings
from gradflow.symbolic.residual import D_in, D_out, F, alpha, beta, block_jacobian

ROOT = Path(__file__).resolve().parent.parent
ESSAYS = sorted((ROOT / "derivations").glob("*.py"))
SIZE = 4

few = settings(max_examples=12, deadline=None, derandomize=True)
numbers = st.integers(-3, 3)
reals = st.floats(-3, 3, allow_subnormal=False).map(lambda value: round(value, 3))


def vectors(size, entries=numbers):
    return st.lists(entries, min_size=size, max_size=size)


# tests of their own hold the same formulas
LATE = ("attention", "cross_attention", "experts", "moments", "streams", "second_derivative")


@pytest.mark.parametrize(
    "essay",
    [pytest.param(e, marks=pytest.mark.slow) if e.stem in LATE else e for e in ESSAYS],
    ids=lambda path: path.stem,
)
def test_essay_runs_and_its_asserts_hold(essay, capsys):
    runpy.run_path(str(essay), run_name="__main__")
    assert "FAIL" not in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_every_derivation_has_an_essay_that_runs_its_checks(name):
    assert any(f'derive("{name}").check()' in essay.read_text() for essay in ESSAYS)


@pytest.mark.parametrize("name", NAMES)
def test_derivation_prints_within_100_columns_and_as_latex(name):
    derivation = derive(name)
    assert derivation.name == name
    assert max(map(len, str(derivation).splitlines())) <= 100
    latex = derivation.latex()
    assert latex.isascii()
    assert latex.count("{") == latex.count("}")
    assert latex.count(r"\begin{") == latex.count(r"\end{")
    assert latex.count("$") % 2 == 0
    assert derivation._repr_markdown_().startswith("### ")
    assert derivation._repr_latex_().startswith("$")


def test_derive_names_what_is_near():
    with pytest.raises(ValueError, match="layernorm"):
        derive("layer-norm")


def scaled(formula):
    return formula * sp.Rational(1001, 1000)


def bent(formula):
    """Change an angle: a factor in front would leave the roots of a characteristic polynomial where they are."""
    return formula.subs(sp.cos(theta), sp.cos(theta) * sp.Rational(1001, 1000))


CORRUPTIONS = {
    "unit": scaled,
    "rms-outside": scaled,
    "layernorm": scaled,
    "second-derivative": scaled,
    "residual-block": scaled,
    "two-projections": bent,
    "projections": bent,
    "streams": scaled,
}


MARKED = [pytest.param(*row, marks=pytest.mark.slow) if row[0] == "streams" else row for row in CORRUPTIONS.items()]


@pytest.mark.parametrize(("name", "corrupt"), MARKED, ids=CORRUPTIONS.keys())
def test_a_corrupted_formula_fails_its_checks(name, corrupt):
    derivation = derive(name)
    wrong = dataclasses.replace(derivation, result=sp.Eq(derivation.result.lhs, corrupt(derivation.result.rhs)))
    failed = [check for check in wrong.check() if not check.passed]
    assert len(failed) >= 2  # both the exact comparison and the numeric one


def test_a_wrong_law_fails_against_the_stacks():
    derivation = derive("estimate")
    wrong = dataclasses.replace(derivation, result=sp.Eq(derivation.result.lhs, (1 - c) ** (L - 1)))
    alignment = [check for check in wrong.check() if check.name.startswith("alignment")]
    assert not any(check.passed for check in alignment)


def test_a_check_that_raises_is_reported_and_stops_no_other():
    def broken(_):
        raise RuntimeError("no machine")

    derivation = Derivation(
        "x", "t", "c", (), (), sp.Eq(r, r, evaluate=False), (("a", broken), ("b", lambda _: (True, "fine")))
    )
    first, second = derivation.check()
    assert not first.passed
    assert "no machine" in first.detail
    assert second.passed


# --- index calculus ---------------------------------------------------------------------------------------------------

x, y = vector("x"), vector("y")
W = matrix("W")
FACTORS = (
    x[k],
    x[l],
    y[k],
    W[k, l],
    W[l, k],
    W[i, k],
    delta(k, l),
    delta(i, k),
    delta(j, l),
    delta(i, j),
    x[i],
    W[k, k],
)


@st.composite
def index_expressions(draw):
    """Sums over k and l of products, some of them squared, so that bound names collide."""
    parts = draw(st.lists(st.lists(st.sampled_from(FACTORS), min_size=1, max_size=3), min_size=1, max_size=2))
    summed = sp.Add(*(total(sp.Mul(*part), k, l) for part in parts))
    return summed ** draw(st.sampled_from((1, 2))) + draw(numbers) * x[i] * total(y[k] * x[k], k)


@given(index_expressions(), vectors(2), vectors(2), vectors(4))
@few
def test_contraction_changes_no_value(expr, left, right, entries):
    values = {x: left, y: right, W: sp.Matrix(2, 2, entries)}
    assert evaluate(contract(expr), 2, values, (i, j)) == evaluate(expr, 2, values, (i, j))


@given(index_expressions(), vectors(2), vectors(4))
@few
def test_partial_equals_the_derivative_of_the_written_out_components(expr, right, entries):
    symbols = sp.symbols("x0:2", real=True)
    fixed = {y: right, W: sp.Matrix(2, 2, entries)}
    at_i = expr.xreplace({j: i})  # j is the index of the derivative
    explicit = evaluate(at_i, 2, fixed | {x: symbols}, (i,))
    derived = evaluate(partial(at_i, x[j]), 2, fixed | {x: symbols}, (i, j))
    assert (derived - explicit.jacobian(sp.Matrix(symbols))).applyfunc(sp.expand) == sp.zeros(2)


def test_partial_does_not_capture_a_bound_index():
    assert partial(total(x[j] ** 2, j), x[j]) == 2 * x[j]


@given(st.lists(st.sampled_from([(i, k), (k, i), (k, k), (k, l), (l, k)]), min_size=1, max_size=4), vectors(2))
@few
def test_wick_equals_the_gaussian_moments_entry_by_entry(places, left):
    expr = total(sp.Mul(*(W[place] for place in places)) * x[k] * x[l], k, l)
    entries = sp.symbols("w0:4", real=True)
    explicit = evaluate(expr, 2, {x: left, W: sp.Matrix(2, 2, entries)}, (i,))
    moments = {power: math.prod(range(power - 1, 0, -2)) if power % 2 == 0 else 0 for power in range(9)}
    truth = [
        sum(
            number * math.prod(sp.Rational(moments[p]) / 3 ** (p // 2) for p in powers)
            for powers, number in sp.Poly(e, *entries).terms()
        )
        for e in explicit
    ]
    assert list(evaluate(expectation(expr, W, sp.Rational(1, 3)), 2, {x: left}, (i,))) == truth


# --- norms ------------------------------------------------------------------------------------------------------------


def plain_norm(name, a, epsilon):
    y_ = a - a.mean() if name == "layernorm" else a
    square = jnp.mean(y_**2)
    lengths = {"unit": jnp.sqrt(square * a.size), "rms-outside": jnp.sqrt(square) + epsilon}
    return y_ / lengths.get(name, jnp.sqrt(square + epsilon))


@cache
def autodiff(name):
    return jax.jit(jax.jacfwd(lambda a, gain, epsilon: gain * plain_norm(name, a, epsilon)))


@cache
def formula_in_numpy(name):
    formula = norm_formula(name)
    symbols = [*sp.symbols(f"y0:{SIZE}"), *sp.symbols(f"g0:{SIZE}"), r, eps]
    values = {formula.stream: symbols[:SIZE], gamma: symbols[SIZE : 2 * SIZE]}
    return sp.lambdify([symbols], evaluate(closed_jacobian(formula), SIZE, values, (i, j)), "numpy")


@pytest.mark.parametrize("name", NORM_NAMES)
@given(vectors(SIZE, reals), vectors(SIZE, reals), st.sampled_from([1e-6, 1.0, 1e5]), st.sampled_from([0.0, 1e-5, 2.0]))
@few
def test_norm_jacobian_equals_jacfwd(name, point, gain, scale, epsilon):
    stream = np.array(point) * scale
    centred = stream - stream.mean() if name == "layernorm" else stream
    rms = float(np.sqrt(np.mean(centred**2)))
    if rms < 1e-2 * scale:  # near the point where no Jacobian exists
        return
    with jax.enable_x64(True):
        truth = np.asarray(autodiff(name)(jnp.asarray(stream), jnp.asarray(gain), epsilon))
    here = formula_in_numpy(name)([*centred, *gain, rms, epsilon])
    # Relative to the scale 1/t of a norm whose gain is of order 1, so that a gain of zeros is no trap.
    scale_of_norm = float(
        norm_formula(name).scale.subs({r: rms, eps: epsilon, sp.Symbol("d", integer=True, positive=True): SIZE})
    )
    assert np.max(np.abs(here - truth)) <= 1e-11 * scale_of_norm


EXPECTED = {
    "unit": (lambda d: 1 / (sp.sqrt(d) * r), 1),
    "rms": (lambda _: 1 / sp.sqrt(r**2 + eps), r**2 / (r**2 + eps)),
    "rms-outside": (lambda _: 1 / (r + eps), r / (r + eps)),
    "layernorm": (lambda _: 1 / sp.sqrt(r**2 + eps), r**2 / (r**2 + eps)),
}


@pytest.mark.parametrize("name", NORM_NAMES)
def test_scale_and_removed_are_the_textbook_ones_and_have_the_right_degree(name):
    from gradflow.symbolic.index import d

    formula = norm_formula(name)
    scale, removed = EXPECTED[name]
    assert sp.simplify(formula.scale - scale(d)) == 0
    assert sp.simplify(formula.removed - removed) == 0
    # Scaling the stream by a length and ε by its power `eps_degree` divides J by that length (Euler).
    euler = r * formula.scale.diff(r) + formula.eps_degree * eps * formula.scale.diff(eps) + formula.scale
    assert sp.simplify(euler) == 0
    assert sp.expand(sum(count for _, count in spectrum(formula)) - d) == 0
    assert rank(formula) == d - (2 if formula.centred else 1)


@pytest.mark.parametrize("g", [1 / (1 + r), sp.tanh(r) / r, 1 / sp.sqrt(1 + r**4)], ids=str)
def test_a_norm_of_ones_own_is_derived_the_same_way(g):
    formula = norm_of(g)
    assert sp.simplify(formula.scale - g) == 0
    assert sp.simplify(formula.removed + r * g.diff(r) / g) == 0


# --- residual block, projections, readings ----------------------------------------------------------------------------


@pytest.mark.parametrize("slots", list(itertools.product((False, True), repeat=2)), ids=str)
@given(vectors(4), vectors(4), vectors(4), numbers, numbers)
@few
def test_block_jacobian_is_the_matrix_product(slots, outer, inner, slope, skip, weight):
    n_out, n_in = slots
    a, b, f = (sp.Matrix(2, 2, entries) for entries in (outer, inner, slope))
    derived = block_jacobian(n_out=n_out, n_branch=False, n_in=n_in)
    truth = (a if n_out else sp.eye(2)) * (skip * sp.eye(2) + weight * f * (b if n_in else sp.eye(2)))
    assert evaluate(derived, 2, {D_out: a, D_in: b, F: f, alpha: skip, beta: weight}, (i, j)) == truth


@given(vectors(8), vectors(4), vectors(4))
@few
def test_low_rank_algebra_equals_explicit_matrices(columns, left, right):
    from gradflow.symbolic.index import d

    u = sp.Matrix(4, 2, columns)
    first, second = (LowRank((u.T * u).as_immutable(), sp.ImmutableMatrix(2, 2, entries)) for entries in (left, right))
    product = first @ second.T
    explicit = (sp.eye(4) + u * first.core * u.T) * (sp.eye(4) + u * second.core.T * u.T)
    assert sp.eye(4) + u * product.core * u.T == explicit
    assert product.trace().subs(d, 4) == explicit.trace()
    lam = sp.Symbol("lambda")
    assert sp.expand(product.charpoly().subs(d, 4) - explicit.charpoly(lam).as_expr()) == 0


@given(vectors(12), vectors(3))
@few
def test_projection_product_equals_explicit_matrices(columns, removed):
    u, kappa = sp.Matrix(4, 3, columns), sp.Matrix(removed) / 2
    explicit = sp.eye(4)
    for column in range(3):
        explicit *= sp.eye(4) - kappa[column] * u[:, column] * u[:, column].T
    assert sp.eye(4) + u * projection_product(u.T * u, kappa).core * u.T == explicit


def test_both_readings_give_the_article_s_numbers():
    law = readings()
    at = {c: sp.Rational(1, 5), L: 24, sp.Symbol("d", integer=True, positive=True): 512}
    assert law.strength.subs(at) == sp.Rational(3, 4)
    assert law.cosine.subs(at) == sp.Rational(3, 5)
    assert law.trunk.subs(at) == sp.Rational(4, 5) ** 24
    assert float(law.trunk.subs(at)) == pytest.approx(0.004722366, rel=1e-6)
    assert law.exact_linear.subs(at) == sp.Rational(4, 5)
    assert law.smallest.subs(at) == sp.Rational(4, 5) ** 23
    assert float(law.random_gain.subs(at)) == pytest.approx(0.998, abs=1e-3)
