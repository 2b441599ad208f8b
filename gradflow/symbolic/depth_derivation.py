"""The derivations ``depth-law`` and ``moments``: steps, and the checks that try to refute them."""

# SymPy's annotations want an iterable of pairs where its documentation has a dict.
# pyright: reportArgumentType=false, reportCallIssue=false

import math
from dataclasses import fields

import numpy as np
import sympy
from sympy import Eq, Function, Rational, Symbol

from gradflow.symbolic import depth, moments
from gradflow.symbolic.depth import alpha, chi, d, q
from gradflow.symbolic.derivation import Derivation, Step

Outcome = tuple[bool, str]
_OTHERS = {
    "alpha": alpha,
    "d": d,
    "centred": depth.centred,
    "Q": depth.Q,
    "mean": depth.mean_power,
    "var_Q": depth.var_Q,
}


def _at(**values: object) -> dict[Symbol, object]:
    """Substitutions by name: a branch's moments, and α, d, centred, Q, its mean and its variance."""
    return {(depth.MOMENTS | _OTHERS)[name]: value for name, value in values.items()}


def _leading(derivation: Derivation) -> Outcome:
    out, into = depth.output_norm(), depth.input_norm()
    behind = sympy.limit(out.log_norm + out.log_branch + sympy.log(alpha**2), d, sympy.oo)
    before = sympy.limit((into.log_branch + sympy.log(alpha**2)).subs(_at(var_Q=0, mean=0)), d, sympy.oo)
    gaps = [
        sympy.simplify(sympy.exp(behind) - derivation.result.rhs),
        sympy.simplify(sympy.exp(before) - (alpha**2 + chi / depth.Q)),
    ]
    return gaps == [0, 0], f"differences {gaps[0]} and {gaps[1]}"


def _linear_rate(_: Derivation) -> Outcome:
    law, t = depth.output_norm(), Symbol("t", positive=True)
    flat = dict.fromkeys(("defect", "overlap", "power_var", "slope_var", "slope_draw", "covariance", "cross"), 0)
    rate = law.log_norm + law.log_branch + sympy.log(1 - law.aligned)
    first = sympy.diff(rate.subs(_at(**flat, chi=q, alpha=1, centred=0, d=1 / t)), t).subs(t, 0)
    gap = sympy.simplify(first + (1 - 1 / (1 + q) ** 2))
    return gap == 0, f"d times the rate, plus 1 - 1/V^2, is {gap}"


def _trunk_projection(_: Derivation) -> Outcome:
    aligned = depth.output_norm().aligned.subs(_at(chi=0, defect=q, overlap=-q, alpha=1))
    gap = sympy.simplify(aligned - (1 - 1 / (1 + q)) / d)
    return gap == 0, f"difference {gap}"


def _euler(_: Derivation) -> Outcome:
    rows = [moments.mlp_moments(moments.ACTIVATIONS[name], 4.0) for name in ("linear", "relu")]
    return all(r.defect == 0 and r.q == r.chi for r in rows), ", ".join(f"q_f = chi_f = {r.q:g}" for r in rows)


def _monte_carlo(name: str, width: int, draws: int) -> Outcome:
    """One post-LN sub-layer (RMSNorm) in NumPy: mean log power of a tangent gradient, against the law."""
    rng = np.random.default_rng(0)
    activation = moments.ACTIVATIONS[name]
    phi = sympy.lambdify(moments.z, activation, "numpy")
    slope = sympy.lambdify(moments.z, moments.slope(activation), "numpy")
    m = 4 * width
    logs = np.empty(draws)
    for n in range(draws):
        x = rng.standard_normal(width)
        x *= math.sqrt(width) / np.linalg.norm(x)
        w_in, w_out = rng.standard_normal((m, width)) / math.sqrt(width), rng.standard_normal((width, m)) / math.sqrt(m)
        pre = w_in @ x
        u = x + w_out @ phi(pre)
        v = rng.standard_normal(width)
        v -= u * (u @ v) / (u @ u)
        back = v + w_in.T @ (slope(pre) * (w_out.T @ v))
        back -= x * (x @ back) / width  # the next norm's projection: its direction is x
        logs[n] = math.log((back @ back) / (v @ v) * width / (u @ u))
    row = moments.mlp_moments(activation, 4.0)
    law = depth.output_norm()
    rate = law.log_norm + law.log_branch + sympy.log(1 - law.aligned)
    values = {field: getattr(row, field) for field in depth.MOMENTS}
    expected = float(rate.subs(_at(**values, alpha=1, centred=0, d=width)))
    error = float(logs.std(ddof=1)) / math.sqrt(draws)
    gap = abs(float(logs.mean()) - expected)
    # what the expansion leaves out is of order 1/d²
    return gap < 4 * error + 2 / width**2, f"d = {width}: {logs.mean():+.4f} ± {error:.4f}, law {expected:+.4f}"


def depth_law() -> Derivation:
    """The depth law at initialisation, output and input norm, with its 1/d term."""
    out, into = depth.output_norm(), depth.input_norm()
    gain = (alpha**2 + chi) / (alpha**2 + q)
    steps = (
        Step(
            r"The norm divides by $t$, $t^2 = |\alpha x + f|^2/d$; $f$ has zero mean given $x$, so to leading order",
            Eq(Symbol("E t^2"), alpha**2 + q),
        ),
        Step(
            r"$|f|^2$ and $x \cdot f$ spread by $1/d$; with $E \log X = \log m - \sigma^2/(2 m^2)$ for a mean $m$, "
            "the typical log power of the norm is",
            out.log_norm,
        ),
        Step(
            r"Given $x$ and $f$ the rest of $F$ is isotropic. For a tangent gradient $v$, the typical log power of "
            r"$(\alpha I + F)^T v$ over $\alpha^2$ is",
            out.log_branch,
        ),
        Step(
            r"The share of it along the next norm's direction is that of $g \cdot x = v \cdot (Fx - f)$, zero for "
            "degree 1 (Euler):",
            out.aligned,
        ),
        Step("Output norm, leading order, per sub-layer:", Eq(Symbol("G"), gain)),
        Step("Input norm: the stream grows as", Eq(Symbol("Q_next"), into.next_Q)),
        Step(r"and the typical log power of the gradient over $\alpha^2$ is", into.log_branch),
        Step(
            "Variance of the log power over networks, per sub-layer, for one token and one cotangent:",
            out.spread_shared + out.spread_own,
        ),
    )
    tests = (
        ("leading order of both kinds", _leading),
        ("linear branch: rate -(1 - 1/V^2)/d", _linear_rate),
        ("trunk: the projection loses (1 - 1/V)/d", _trunk_projection),
        ("Euler: degree 1 gives q_f = chi_f", _euler),
        ("Monte Carlo in NumPy, linear", lambda _: _monte_carlo("linear", 32, 3000)),
        ("Monte Carlo in NumPy, tanh", lambda _: _monte_carlo("tanh", 32, 3000)),
    )
    claim = (
        r"With iid zero-mean weights the power of the gradient changes by $G = (\alpha^2 + \chi)/(\alpha^2 + q)$ per "
        r"sub-layer behind an output norm, and by $\alpha^2 + \chi/Q$ behind an input norm, where $Q$ grows by $q$; "
        r"$q$ and $\chi$ are moments of the branch and of no particular network."
    )
    assumed = (
        "iid zero-mean Gaussian weights",
        "unit-rms isotropic input",
        "no epsilon",
        "one token",
        "depth well below d",
    )
    title = "The depth law at initialisation"
    return Derivation("depth-law", title, claim, assumed, steps, Eq(Symbol("G"), gain), tests)


def _quadrature(_: Derivation) -> Outcome:
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    weights = weights / math.sqrt(2 * math.pi)
    worst = 0.0
    for phi in moments.ACTIVATIONS.values():
        if phi.has(sympy.Max, sympy.Abs):  # Gauss–Hermite converges slowly at a kink
            continue
        value, slope = sympy.lambdify(moments.z, (phi, moments.slope(phi)), ["scipy", "numpy"])(nodes)
        row = moments.mlp_moments(phi, 4.0)
        worst = max(worst, abs(weights @ value**2 - row.q), abs(weights @ (slope**2 + 0 * nodes) - row.chi))
    return worst < 1e-10, f"largest difference {worst:.1e}"


def _gelu(_: Derivation) -> Outcome:
    closed = float(Rational(1, 3) + 1 / (2 * sympy.pi * sympy.sqrt(3)))
    gap = abs(moments.mlp_moments(moments.ACTIVATIONS["gelu"], 4.0).q - closed)
    return gap < 1e-13, f"E z^2 Phi(z)^2 = 1/3 + 1/(2 pi sqrt 3), difference {gap:.1e}"


def _relu(_: Derivation) -> Outcome:
    phi = moments.ACTIVATIONS["relu"]
    pair = moments.gaussian_mean(phi**2), moments.gaussian_mean(moments.slope(phi) ** 2)
    return pair == (Rational(1, 2), Rational(1, 2)), f"{pair[0]} and {pair[1]}"


def _published(_: Derivation) -> Outcome:
    known = {"tanh": (0.39429, 0.46440), "gelu": (0.42522, 0.45585), "linear": (1, 1)}
    rows = {name: moments.mlp_moments(moments.ACTIVATIONS[name], 4.0) for name in known}
    worst = max(max(abs(rows[n].q - a), abs(rows[n].chi - b)) for n, (a, b) in known.items())
    return worst < 6e-6, f"largest difference {worst:.1e} from five published digits"


def _scaling(_: Derivation) -> Outcome:
    row = moments.mlp_moments(moments.ACTIVATIONS["tanh"], 4.0)
    again = row.scaled(2.0).scaled(0.5)
    gap = max(abs(getattr(row, f.name) - getattr(again, f.name)) for f in fields(row))
    return gap < 1e-15 and row.scaled(2.0).slope_var == 4 * row.slope_var, f"largest difference {gap:.1e}"


def gaussian_moments() -> Derivation:
    """q_f and χ_f of a two-matrix branch as Gaussian moments of its activation."""
    s, z = Symbol("s", positive=True), moments.z
    phi, E = Function("phi"), Function("E")
    relu = moments.ACTIVATIONS["relu"]
    slope_power = Eq(Symbol("chi_f"), s**2 * E(sympy.Derivative(phi(z), z) ** 2))
    steps = (
        Step(
            r"$f = W_2 \phi(W_1 x)$ with entries of $W_1$ of variance $1/d$: a pre-activation is Gaussian, of variance $|x|^2/d$",
            Eq(Symbol("Var z"), 1),
        ),
        Step(
            "Entries of $W_2$ have variance $s^2/m$ and are independent of $z$:",
            Eq(Symbol("q_f"), s**2 * E(phi(z) ** 2)),
        ),
        Step(r"$F^T g$ is $W_1^T$ on $\phi'(z) W_2^T g$, and $W_2^T g$ has variance $s^2 |g|^2/m$:", slope_power),
        Step("For ReLU, half of the Gaussian counts in both:", Eq(Symbol("E phi^2"), moments.gaussian_mean(relu**2))),
        Step(r"If $z \phi' = \phi$ (degree 1, Euler), the two are equal and $F x = f$."),
    )
    tests = (
        ("ReLU exactly", _relu),
        ("GELU against its closed form", _gelu),
        ("Gauss-Hermite, 200 nodes", _quadrature),
        ("published digits", _published),
        ("scaling of the branch", _scaling),
    )
    claim = (
        r"A branch enters the depth law by $q_f = s^2 E \phi(z)^2$ and $\chi_f = s^2 E \phi'(z)^2$, $z$ standard normal: "
        "exact where the activation is piecewise polynomial, by 18-digit quadrature of its SymPy expression elsewhere."
    )
    assumed = ("unit-rms input", "Gaussian weights, first matrix at unit gain")
    return Derivation("moments", "The moments of a branch", claim, assumed, steps, slope_power, tests)
