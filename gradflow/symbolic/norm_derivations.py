"""The derivations of the normalisations' Jacobians, and of the second derivative of √d·x/‖x‖."""

# SymPy's annotations do not follow its operators: x[i] may be a Tuple there, a - b a Basic.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from collections.abc import Callable
from itertools import starmap

import numpy as np
import sympy as sp
from sympy import Eq, Expr, IndexedBase, Symbol

from gradflow.symbolic.derivation import Derivation, Step, Test, agree, every, near
from gradflow.symbolic.index import contract, d, evaluate, gather, i, j, k, l, partial, total, vector
from gradflow.symbolic.norms import (
    NormFormula,
    centred_entry,
    centred_sum,
    closed_jacobian,
    eps,
    frobenius_squared,
    gamma,
    in_length,
    norm_formula,
    r,
    rank,
    spectrum,
    x,
    y,
)

N, J, D2 = IndexedBase("N"), IndexedBase("J"), IndexedBase("D2")
n = Symbol("n", positive=True)  # ‖x‖
u, v, w = vector("u"), vector("v"), vector("w")

# Points at which everything is rational: rms 3, 3, 2 …
_PLAIN = {3: (5, 1, 1), 4: (1, 1, 3, 5), 5: (1, 1, 1, 1, 4)}
# … and, where P acts first, points whose r² + ε is the square 9, 9, 4.
_CENTRED = {3: ((0, 1, 5), sp.Rational(13, 3)), 4: ((2, 0, 4, -2), sp.Integer(4)), 5: ((4, 2, 5, 1, 3), sp.Integer(2))}


def unit() -> Derivation:
    """Derive the Jacobian of u/‖u‖."""
    return _norm("unit", "Jacobian of u/|u|", "The Jacobian of $u/|u|$ is the projection that removes $u$, over $|u|$")


def rms() -> Derivation:
    """Derive the Jacobian of RMSNorm with ε inside the root."""
    return _norm(
        "rms",
        "Jacobian of RMSNorm",
        r"RMSNorm's Jacobian removes the share $r^2/t^2$ along $x$ and scales by $1/t$, where $t^2 = r^2+\varepsilon$",
    )


def rms_outside() -> Derivation:
    """Derive the Jacobian of RMSNorm with ε outside the root."""
    return _norm(
        "rms-outside",
        "Jacobian of RMSNorm with eps outside the root",
        r"With $\varepsilon$ added to the rms itself, the Jacobian removes the share $r/(r+\varepsilon)$ along $x$ "
        r"and scales by $1/(r+\varepsilon)$",
    )


def layernorm() -> Derivation:
    """Derive the Jacobian of LayerNorm: RMSNorm's at y = Px, times P."""
    return _norm(
        "layernorm",
        "Jacobian of LayerNorm",
        r"LayerNorm is RMSNorm after centring: its Jacobian removes the mean and the share $r^2/t^2$ along $y$, "
        r"and scales by $1/t$, where $t^2 = r^2+\varepsilon$",
    )


def _norm(name: str, title: str, claim: str) -> Derivation:
    formula = norm_formula(name)
    s = formula.stream
    steps = [
        Step(
            f"The norm, with a gain and a bias, at ${'y' if formula.centred else 'x'}$.", Eq(N[i], formula.affine_value)
        )
    ]
    if formula.centred:
        steps += [
            Step(
                "Here $y$ is $x$ less its mean; the derivative is the centring matrix $P$.", Eq(y[i], centred_entry(i))
            ),
            Step("Summed over $i$ it vanishes.", Eq(total(y[i], i), centred_sum())),
        ]
    before = partial(formula.affine_value, s[l])
    steps += [Step("Differentiate by an entry.", Eq(sp.Derivative(N[i], s[l], evaluate=False), before))]
    if formula.centred:
        steps += [
            Step(
                "Chain rule: times $P$, contracted, with the sum of $y$ put to 0.", Eq(J[i, j], formula.affine_jacobian)
            )
        ]
    steps += [
        Step("Write the length as $d r^2$.", Eq(J[i, j], in_length(formula.affine_jacobian, s))),
        Step("Read off: the scale is the coefficient of the identity,", Eq(Symbol("A"), formula.scale)),
        Step("and the removed share that of the outer product.", Eq(Symbol("kappa"), formula.removed)),
        Step("The Frobenius norm at unit gain, squared.", Eq(total(J[i, j] ** 2, i, j), frobenius_squared(formula))),
    ]
    steps += [
        Step(f"Singular value at unit gain, multiplicity ${sp.sstr(count)}$.", Eq(Symbol("sigma"), value))
        for value, count in spectrum(formula)
    ]
    steps += [Step("Rank at zero eps.", Eq(Symbol("rank"), rank(formula)))]
    tests: list[tuple[str, Test]] = [
        ("closed form = contracted Jacobian, symbolic d", lambda p: _symbolic(p, formula)),
        ("exact rationals, d = 3, 4, 5", lambda p: every([_exact(p, formula, size) for size in (3, 4, 5)])),
        ("jax.jacfwd in float64, d = 3, 8", lambda p: every([_autodiff(p, formula, size) for size in (3, 8)])),
        ("Frobenius norm = sum of the squared singular values, symbolic d", lambda _: _frobenius(formula)),
        ("spectrum = SVD, d = 3, 8", lambda p: every([_singular(p, formula, size) for size in (3, 8)])),
    ]
    return Derivation(
        name,
        title,
        f"{claim}, for every $d$.",
        ("$r > 0$",),
        tuple(steps),
        Eq(J[i, j], closed_jacobian(formula)),
        tuple(tests),
    )


def second_derivative() -> Derivation:
    """Derive the second derivative of √d·x/‖x‖ as a symmetric bilinear map."""
    value = sp.sqrt(d) * x[i] / sp.sqrt(total(x[k] ** 2, k))
    first = partial(value, x[j])
    second = partial(first, x[l])
    bilinear = contract(total(second * v[j] * w[l], j, l))
    length = {total(x[k] ** 2, k): n**2}
    along_v, along_w = total(u[k] * v[k], k), total(u[k] * w[k], k)
    across = total(v[k] * w[k], k) - along_v * along_w
    result = (
        -sp.sqrt(d) / n**2 * (along_v * (w[i] - along_w * u[i]) + along_w * (v[i] - along_v * u[i]) + across * u[i])
    )
    # Degree 0 makes the first derivative homogeneous of degree −1; Euler: D²[x, w] = −DN w.
    euler = gather(total(second * x[j] * w[l], j, l) + total(first * w[j], j), length)
    steps = (
        Step("The norm.", Eq(N[i], value)),
        Step("First derivative, with $n=|x|$.", Eq(J[i, j], gather(first, length))),
        Step("Second derivative.", Eq(sp.Derivative(J[i, j], x[l], evaluate=False), gather(second, length))),
        Step("Contracted with $v$ and $w$.", Eq(D2[i], gather(bilinear, length))),
        Step("Euler: along $x$ it is minus the first derivative; the sum of the two contracts to", sp.simplify(euler)),
        Step("Put $x=n u$ with $u$ of unit length and collect.", Eq(D2[i], result)),
    )
    tests: tuple[tuple[str, Test], ...] = (
        ("closed form = contracted derivative, symbolic d", lambda p: _bilinear_symbolic(p, gather(bilinear, length))),
        ("exact, d = 3, 4, 5", lambda p: every(list(starmap(lambda *a: _bilinear_exact(p, *a), _UNIT.items())))),
        ("jax.jacfwd twice in float64, d = 7", _bilinear_autodiff),
    )
    claim = (
        r"The second derivative of $d^{1/2} x/|x|$ along $v$ and $w$ is "
        r"$-(d^{1/2}/n^2) [(u\cdot v) Q w + (u\cdot w) Q v + (v\cdot Q w) u]$, "
        "with $n = |x|$, $u = x/n$ and $Q = I - u u^T$."
    )
    return Derivation(
        "second-derivative",
        "Second derivative of the unit norm",
        claim,
        ("$x$ is not 0",),
        steps,
        Eq(D2[i], result),
        tests,
    )


_UNIT = {3: (1, 2, 2), 4: (1, 1, 1, 1), 5: (1, 1, 1, 2, 3)}  # of whole length 3, 2, 4


def _symbolic(proof: Derivation, formula: NormFormula) -> tuple[bool, str]:
    difference = contract(in_length(formula.affine_jacobian, formula.stream) - proof.result.rhs)
    return sp.simplify(difference) == 0, f"difference {sp.simplify(difference)}"


def _frobenius(formula: NormFormula) -> tuple[bool, str]:
    difference = sp.simplify(
        frobenius_squared(formula) - sp.Add(*(count * value**2 for value, count in spectrum(formula)))
    )
    return difference == 0, f"difference {difference}"


def _exact(proof: Derivation, formula: NormFormula, size: int) -> tuple[bool, str]:
    """Compare with SymPy's derivative of the written-out components, which knows no index calculus."""
    if formula.centred:
        point, epsilon = _CENTRED[size]
    else:
        point = _PLAIN[size]
        epsilon = (
            sp.Rational(9, 16) * sum(c * c for c in point) / size if formula.eps_degree == 2 else sp.Rational(1, 2)
        )
    gains = sp.Matrix([sp.Rational(a + 2, 3) for a in range(size)])
    entries = sp.symbols(f"x0:{size}", real=True)
    plain = evaluate(formula.value, size, {x: entries, eps: epsilon}, (i,))
    truth = sp.diag(*gains) * plain.jacobian(sp.Matrix(entries)).subs(dict(zip(entries, point, strict=True)))
    return agree(evaluate(proof.result.rhs, size, _at(formula, point, epsilon, gains), (i, j)), truth)


def _at(formula: NormFormula, point: object, epsilon: object, gains: object) -> dict[object, object]:
    column = sp.Matrix(point)
    if formula.centred:
        column = column - sp.ones(column.rows, 1) * sum(column) / column.rows
    return {
        formula.stream: list(column),
        gamma: list(gains),
        eps: epsilon,
        r: sp.sqrt(column.dot(column) / column.rows),
    }


def _draw(formula: NormFormula, size: int) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    """Return a point, gains, ε and the true Jacobian by forward-mode autodiff."""
    import jax
    import jax.numpy as jnp

    generator = np.random.default_rng(size)
    point, gains, shift = generator.normal(size=(3, size))
    functions: dict[str, Callable] = {
        "unit": lambda a: a / jnp.linalg.norm(a),
        "rms": lambda a: a / jnp.sqrt(jnp.mean(a**2) + 0.3),
        "rms-outside": lambda a: a / (jnp.sqrt(jnp.mean(a**2)) + 0.3),
        "layernorm": lambda a: (a - a.mean()) / jnp.sqrt(jnp.var(a) + 0.3),
    }
    with jax.enable_x64(True):
        truth = np.asarray(jax.jacfwd(lambda a: gains * functions[formula.name](a) + shift)(jnp.asarray(point)))
    return point, gains, 0.3, truth


def _autodiff(proof: Derivation, formula: NormFormula, size: int) -> tuple[bool, str]:
    point, gains, epsilon, truth = _draw(formula, size)
    values = _at(formula, point.tolist(), epsilon, gains.tolist())
    return near(evaluate(proof.result.rhs, size, values, (i, j)).tolist(), truth)


def _singular(proof: Derivation, formula: NormFormula, size: int) -> tuple[bool, str]:
    point, gains, epsilon, truth = _draw(formula, size)
    values = _at(formula, point.tolist(), epsilon, gains.tolist()) | {d: size}
    numbers = {key: value for key, value in values.items() if isinstance(key, Symbol)}
    listed = [float(s.subs(numbers)) for s, count in spectrum(formula) for _ in range(int(count.subs(d, size)))]
    return near(sorted(listed), np.sort(np.linalg.svd(truth / gains[:, None], compute_uv=False)))


def _bilinear_symbolic(proof: Derivation, bilinear: Expr) -> tuple[bool, str]:
    """Put x = n·u into the contracted derivative: the closed form must be left, for symbolic d."""
    in_unit = contract(bilinear.xreplace({x[i]: n * u[i], x[k]: n * u[k]}))
    difference = sp.simplify(contract(in_unit - proof.result.rhs))
    return difference == 0, f"difference {difference}"


def _bilinear_exact(proof: Derivation, size: int, point: tuple[int, ...]) -> tuple[bool, str]:
    length = sp.sqrt(sum(c * c for c in point))
    left, right = [sp.Integer(a - 1) for a in range(size)], [sp.Rational(1, a + 1) for a in range(size)]
    entries = sp.symbols(f"x0:{size}", real=True)
    value = sp.sqrt(size) * sp.Matrix(entries) / sp.sqrt(sum(e * e for e in entries))
    at = dict(zip(entries, point, strict=True))
    truth = [
        sum(
            sp.diff(c, a, b).subs(at) * left[p] * right[q] for p, a in enumerate(entries) for q, b in enumerate(entries)
        )
        for c in value
    ]
    values = {u: [c / length for c in point], v: left, w: right, n: length}
    return agree(evaluate(proof.result.rhs, size, values, (i,)), sp.Matrix(truth))


def _bilinear_autodiff(proof: Derivation) -> tuple[bool, str]:
    import jax
    import jax.numpy as jnp

    size = 7
    point, left, right = np.random.default_rng(2).normal(size=(3, size))
    with jax.enable_x64(True):
        hessian = jax.jacfwd(jax.jacfwd(lambda a: jnp.sqrt(size) * a / jnp.linalg.norm(a)))(jnp.asarray(point))
        truth = np.einsum("ijk,j,k->i", np.asarray(hessian), left, right)
    length = float(np.linalg.norm(point))
    values = {u: (point / length).tolist(), v: left.tolist(), w: right.tolist(), n: length}
    return near(np.asarray(evaluate(proof.result.rhs, size, values, (i,)).tolist(), dtype=float)[:, 0], truth)
