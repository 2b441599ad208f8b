"""The derivation ``attention``: steps, and the checks that try to refute them."""

# SymPy's annotations want an iterable of pairs where its documentation has a dict, and lack what sums of expressions are.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportReturnType=false, reportOperatorIssue=false

import itertools
import math

import mpmath
import numpy as np
import sympy
from sympy import Eq, Function, Symbol

from gradflow.symbolic import attention as law
from gradflow.symbolic.derivation import Derivation, Step, every, near

Outcome = tuple[bool, str]
N = 4  # tokens of the index sums


def _rows(same: sympy.Expr, kept: sympy.Expr) -> np.ndarray:
    """E a_j b_k of two exchangeable rows: ``same`` summed over j = k; all of it sums to ``kept``."""
    off = (kept - same) / (N * (N - 1))
    return np.array([[same / N if j == k else off for k in range(N)] for j in range(N)])


def _gram(own: sympy.Expr, other: sympy.Expr) -> np.ndarray:
    return np.array([[own if j == k else other for k in range(N)] for j in range(N)])


def _summed(left: np.ndarray, right: np.ndarray) -> sympy.Expr:
    return sum(a * b for a, b in zip(left.ravel(), right.ravel(), strict=True))


def _same(pair: law.Pair, own: sympy.Expr, other: sympy.Expr) -> Outcome:
    gaps = [
        sympy.simplify(seen - wanted.subs({law.n: N, law.others: N - 1}))
        for seen, wanted in zip((own, other), pair, strict=True)
    ]
    return gaps == [0, 0], f"index sums over {N} tokens differ by {gaps[0]} and {gaps[1]}"


def _forward(_: Derivation) -> Outcome:
    tokens = _gram(law.p, law.c)
    return _same(law.mixed(), *(_summed(_rows(k, sympy.Integer(1)), tokens) for k in (law.K1, law.K2)))


def _onto_keys(same: list[sympy.Expr], kept: int, queries: np.ndarray) -> tuple[sympy.Expr, sympy.Expr]:
    """Σ_ii' E A_ij A_i'j' ⟨·_i, ·_i'⟩ at j = j' = 0, and at j = 0, j' = 1; ``same``: A's sums over j = j' for i = i', i ≠ i'."""
    rows = [_rows(k, sympy.Integer(kept)) for k in same]
    found = [sympy.Integer(0)] * 2
    for i, k in itertools.product(range(N), repeat=2):
        for which in (0, 1):
            found[which] += rows[i != k][0, which] * queries[i, k]
    return found[0], found[1]


def _values(_: Derivation) -> Outcome:
    return _same(law.through_values(), *_onto_keys([law.K1, law.K2], 1, _gram(law.G, law.C)))


def _scores(_: Derivation) -> Outcome:
    own, other = law.score_gradient()
    queries = [law.kk * _summed(_rows(k, sympy.Integer(0)), _gram(law.p, law.c)) for k in (own, other)]
    keys = [law.qq * value for value in _onto_keys([own, other], 0, _gram(law.p, law.c))]
    return every([_same(law.through_queries(), *queries), _same(law.through_keys(), *keys)])


def _jacobians(_: Derivation) -> Outcome:
    a, b = (sympy.Matrix(sympy.symbols(f"{name}1:4")) for name in "ab")
    total = {row[2]: 1 - row[0] - row[1] for row in (a, b)}
    one, two = (sympy.diag(*row) - row * row.T for row in (a, b))
    dot = (a.T * b)[0]
    wanted = sum(a[j] * b[j] * (1 - a[j] - b[j] + dot) for j in range(3))
    # the same sum is Σ_j E D_j D'_j of D = a (β − a·β) over a Gaussian β with Cov(β_j, β_k) = δ_jk + any constant
    shift = Symbol("w")
    covariance = sympy.eye(3) + shift * sympy.ones(3, 3)
    gaps = [sympy.expand((e - wanted).subs(total)) for e in ((one.T * two).trace(), (one * covariance * two.T).trace())]
    return gaps == [0, 0], f"over 3 keys the differences are {gaps[0]} and {gaps[1]}"


def _two_keys(s2: float) -> tuple[list[float], list[float], np.ndarray]:
    """Two keys by 2-D Gauss–Hermite: K₁, M₃, M₂₂; and K₂, D₂ at the correlations 0, .2, .5, .8, 1."""
    x, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()

    def row(logit: np.ndarray) -> np.ndarray:
        return np.stack([1 / (1 + np.exp(-logit)), 1 / (1 + np.exp(logit))])

    root = math.sqrt(2 * s2)  # the difference of two logits
    a = row(root * x)
    moments = [float(w @ f) for f in ((a**2).sum(0), (a**3).sum(0), (a**2).sum(0) ** 2)]
    found, at = [], np.array([0, 0.2, 0.5, 0.8, 1])
    for r in at:
        b = row(root * (r * x[:, None] + math.sqrt(1 - r**2) * x))
        both = a[:, :, None] * b
        dot = both.sum(0)
        jacobians = (both * (1 - a[:, :, None] - b + dot)).sum(0)
        found += [float(w @ f @ w) for f in (dot, jacobians)]
    return moments, found, at


def _price(_: Derivation) -> Outcome:
    """K₂ and D₂ of two keys against their quadratic: exact at both ends, and how far off between."""
    worst, ends = 0.0, 0.0
    for s2 in (0.25, 1.0):
        moments, seen, at = _two_keys(s2)
        values = dict(zip((law.K1, law.M3, law.M22), moments, strict=True)) | {law.n: 2, law.others: 1, law.s2: s2}
        curves = [sympy.lambdify(law.r, e.subs(values)) for e in law.overlap()]
        law_says = [float(curve(r)) for r in at for curve in curves]
        off = np.abs(np.array(law_says) / seen - 1).reshape(-1, 2)
        ends, worst = max(ends, off[[0, -1]].max()), max(worst, off.max())
    return (
        ends < 1e-10 and worst < 0.01,
        f"two keys, s2 up to 1: at r = 0, 1 within {ends:.0e}, between within {worst:.2%}",
    )


def _integrals(_: Derivation) -> Outcome:
    """The λ-integrals for two keys against the logistic function's moments, mpmath."""
    moments = _two_keys(1.0)[0]
    names = (law.lam, law.n, *law.phi)
    found = []
    with mpmath.workdps(15):
        phi = sympy.lambdify((law.lam, law.z, law.s, law.order), law.PHI, "mpmath")
        for expression in law.INTEGRANDS.values():
            integrand = sympy.lambdify(names, expression, "mpmath")
            lam = [mpmath.exp(t / mpmath.mpf(2)) for t in range(-60, 24)]
            phis = [[sum(phi(v, z / mpmath.mpf(4), 1, m) for z in range(-32, 56)) / 4 for m in range(5)] for v in lam]
            found.append(float(sum(integrand(v, 2, *ps) * v for v, ps in zip(lam, phis, strict=True)) / 2))
    return near(found, moments, 1e-8)


def _monte_carlo(_: Derivation) -> Outcome:
    """One attention sub-layer in NumPy: the Grams of f and of Fᵀg over random weights, tokens and cotangents with cosines."""
    from gradflow.moments import softmax

    rng, n, d, heads, draws, rho, share = np.random.default_rng(0), 6, 192, 2, 300, 0.4, 0.3
    size, seen = d // heads, np.empty((draws, 4))
    off = ~np.eye(n, dtype=bool)
    for draw in range(draws):
        x, g = (
            math.sqrt(1 - c) * rng.standard_normal((n, d)) + math.sqrt(c) * rng.standard_normal(d) for c in (rho, share)
        )
        x *= math.sqrt(d) / np.linalg.norm(x, axis=1, keepdims=True)
        w_q, w_k, w_v, w_o = rng.standard_normal((4, d, d)) / math.sqrt(d)
        q, k, v = ((x @ w.T).reshape(n, heads, size).transpose(1, 0, 2) for w in (w_q, w_k, w_v))
        a = np.exp(q @ k.transpose(0, 2, 1) / math.sqrt(size))
        a /= a.sum(-1, keepdims=True)
        f = (a @ v).transpose(1, 0, 2).reshape(n, d) @ w_o.T
        upon = (g @ w_o).reshape(n, heads, size).transpose(1, 0, 2)
        b = upon @ v.transpose(0, 2, 1)
        D = a * (b - (a * b).sum(-1, keepdims=True)) / math.sqrt(size)
        parts = ((a.transpose(0, 2, 1) @ upon, w_v), (D @ k, w_q), (D.transpose(0, 2, 1) @ q, w_k))
        back = sum(part.transpose(1, 0, 2).reshape(n, d) @ w for part, w in parts)
        grams = [m @ m.T / d for m in (f, back)]
        seen[draw] = [value for gram in grams for value in (np.trace(gram) / n, gram[off].mean())]
    K1, M3, M22 = (float(m[0]) for m in softmax.narrow(np.array([n]), 1 - rho))
    values = {law.K1: K1, law.M3: M3, law.M22: M22, law.n: n, law.others: n - 1, law.s2: 1 - rho, law.r: rho}
    overlap = [e.subs(values) for e in law.overlap()]
    values |= {law.K2: overlap[0], law.D2: overlap[1], law.D1: law.sensitivity().subs(values)}
    values |= {law.p: 1, law.c: rho, law.G: 1, law.C: share, law.qq: 1, law.kk: 1}
    own, other = (
        sum(terms) for terms in zip(law.through_values(), law.through_queries(), law.through_keys(), strict=True)
    )
    wanted = np.array([float(e.subs(values)) for e in (*law.mixed(), own, other)])
    error = seen.std(0, ddof=1) / math.sqrt(draws)
    off_by = seen.mean(0) - wanted
    # what is left out is of order heads/d: the logits of finite heads are not Gaussian
    fits = np.abs(off_by) < 4 * error + 2 / size * np.abs(wanted)
    said = ", ".join(f"{s:.4f} ± {e:.4f} (law {w:.4f})" for s, e, w in zip(seen.mean(0), error, wanted, strict=True))
    return bool(fits.all()), said


def derivation() -> Derivation:
    """Attention's Grams, forward and back, at leading order."""
    S, k = sympy.symbols("S k", positive=True)
    K2, D2 = Function("K_2"), Function("D_2")
    names = {law.K1: "K_1", law.M3: "M_3", law.M22: "M_22", law.others: law.n - 1, law.s2: Symbol("s") ** 2}

    def shown(expression: sympy.Expr) -> sympy.Expr:
        return expression.subs({k: Symbol(v) if isinstance(v, str) else v for k, v in names.items()})

    def pair(left: str, found: law.Pair) -> Eq:
        return Eq(sympy.Matrix(sympy.symbols(f"{left}_own {left}_other")), sympy.Matrix([shown(e) for e in found]))

    at_0 = (1 - law.K1) ** 2 / law.others
    mean = (law.K1 - 1 / law.n) / law.s2
    r = law.r
    steps = (
        Step(
            "Given the tokens, a row of logits is Gaussian with the tokens' own Gram as covariance; what it shares cancels in "
            "the softmax, and what is left are n independent logits of variance",
            Eq(Symbol("s") ** 2, law.LOGIT_VARIANCE),
        ),
        Step(
            "One row: K_1 = n E a^2, M_3 = n E a^3, M_22 = E (sum a^2)^2. The softmax's denominator goes into an integral,",
            Eq(
                S**-k,
                sympy.Integral(law.lam ** (k - 1) * sympy.exp(-law.lam * S) / sympy.gamma(k), (law.lam, 0, sympy.oo)),
            ),
        ),
        Step(
            r"where S is a sum of independent terms: all that is left are means over one logit, $\phi_m(\lambda)$,",
            Eq(
                Function("phi_m")(law.lam),
                sympy.Integral(law.PHI.subs(law.order, Symbol("m")), (law.z, -sympy.oo, sympy.oo)),
            ),
        ),
        Step("K_1's integrand being", law.INTEGRANDS["K1"]),
        Step(
            "Forward, a_i sums to 1: what tokens share passes, what differs keeps K_1, and K_2 of two queries:",
            pair("f", law.mixed()),
        ),
        Step("Back through the values, where columns take the same sums:", pair("V", law.through_values())),
        Step(
            "The scores' gradient is D = J b, J = diag a - a a'; of b only what differs between keys counts. D_2 = E tr J'J:",
            pair("D", law.score_gradient()),
        ),
        Step("Back through the queries (rows of D sum to 0):", pair("Q", law.through_queries())),
        Step("and through the keys:", pair("K", law.through_keys())),
        Step(
            "Two rows of correlation r = c/p. Price's theorem: the derivative of K_2 is the mean trace of two Jacobians, D_2.",
            Eq(sympy.Derivative(K2(r), r), Symbol("s") ** 2 * D2(r)),
        ),
        Step("So D_2 is known at r = 0, where the rows are independent,", Eq(D2(0), shown(at_0))),
        Step("at r = 1,", Eq(D2(1), shown(law.sensitivity()))),
        Step(
            "and in its mean over r. The law takes the quadratic with these three, and its integral for K_2:",
            Eq(sympy.Integral(D2(r), (r, 0, 1)), shown(mean)),
        ),
    )
    tests = (
        ("forward, by index sums", _forward),
        ("through the values, by index sums", _values),
        ("through queries and keys, by index sums", _scores),
        ("Price: tr J'J, and the mean over b", _jacobians),
        ("the softmax's moments, two keys, by another integral", _integrals),
        ("K_2 and D_2 between the ends, two keys", _price),
        ("one sub-layer in NumPy", _monte_carlo),
    )
    claim = (
        "What attention with random weights does to the Gram of exchangeable tokens and of their gradients follows from five "
        "moments of a softmax over Gaussian logits."
    )
    assumed = ("iid zero-mean Gaussian W_Q, W_K, W_V, W_O", "exchangeable tokens", "leading order in 1/d and heads/d")
    return Derivation("attention", "Attention at initialisation", claim, assumed, steps, pair("f", law.mixed()), tests)
