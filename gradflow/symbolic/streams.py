r"""The law of several residual streams at leading order, as matrix expressions for a symbolic number n of streams.

    X' = N_out( R X + w ⊗ N_branch( f( N_in( rᵀ X ) ) ) ),        X of shape (n, tokens, d)

r (``pre``) is what reads the streams, w (``post``) what writes to them, with β.

What is carried is the streams' Gram K_ab = E x_a·x_b/d forward and the gradient's Gram G_ab = E g_a·g_b back: f has zero mean
and is uncorrelated with every stream, and so is Fᵀv with every part of the gradient v. One stream is `depth.LeadingLaw`.
"""

# SymPy's annotations do not follow matrix expressions.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportIndexIssue=false

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy as sp
from sympy import Eq, MatrixExpr, MatrixSymbol, Symbol

from gradflow.symbolic.depth import chi, d_branch, d_in, fed, n_branch
from gradflow.symbolic.derivation import Derivation, Step, agree, every, near

n = Symbol("n", integer=True, positive=True)
K, G, R, D = (MatrixSymbol(name, n, n) for name in ("K", "G", "R", "D"))
pre, post = (MatrixSymbol(name, n, 1) for name in ("r", "w"))


@dataclass(frozen=True)
class StreamLaw:
    """One sub-layer, in powers; norms enter as in `depth.LeadingLaw`, and D is diagonal: the output norms' Jacobian *gains*.

    ``seen`` is the power that the branch's side finds in preᵀX, ``total`` the Gram of what the output norms see, ``after`` that
    of the streams behind length norms. ``at_sum`` is the gradient's Gram before the output norms, ``to_branch`` the power that
    goes up the branch, ``skip`` and ``back`` the Gram at the input, with F = 0 and in full.
    """

    seen: Any = pre.T * K * pre
    total: Any = R * K * R.T + n_branch * post * post.T
    after: Any = D * K * D
    at_sum: Any = D * G * D
    to_branch: Any = d_branch * post.T * G * post
    skip: Any = R.T * G * R
    back: Any = R.T * G * R + d_branch * chi / fed * d_in * pre * post.T * G * post * pre.T


_SIZE = 2
_x = sp.symbols(f"x_1:{_SIZE + 1}")
_f = Symbol("f")


def _explicit(expression: MatrixExpr) -> sp.Matrix:
    return sp.Matrix(expression.subs(n, _SIZE).as_explicit())


def _symmetric(letter: str) -> sp.Matrix:
    return sp.Matrix(_SIZE, _SIZE, lambda a, b: Symbol(f"{letter}_{min(a, b)}{max(a, b)}"))


def _grams(parts: list[sp.Expr], gram: sp.Matrix, own: sp.Expr) -> sp.Matrix:
    """Inner products of sums of vectors: x_a·x_b = gram_ab, x_a·f = 0, f·f = own."""

    def mean(product: sp.Expr) -> sp.Expr:
        total = sp.Integer(0)
        for powers, factor in sp.Poly(sp.expand(product), *_x, _f).terms():
            which = [index for index, times in enumerate(powers) for _ in range(times)]
            crossed = _SIZE in which
            total += factor * (gram[which[0], which[1]] if not crossed else own if which[0] == _SIZE else 0)
        return total

    return sp.Matrix(_SIZE, _SIZE, lambda a, b: mean(parts[a] * parts[b]))


def _forward(_: Derivation) -> tuple[bool, str]:
    """R K Rᵀ + q w wᵀ, by multiplying out the two sums."""
    law, k, r, s = StreamLaw(), _symmetric("k"), _explicit(R), _explicit(post)
    sums = [sum(r[a, c] * _x[c] for c in range(_SIZE)) + s[a] * _f for a in range(_SIZE)]
    claimed = _explicit(law.total).subs(dict(zip(_explicit(K), k, strict=True)))
    return agree(claimed, _grams(sums, k, n_branch))


def _backward(proof: Derivation) -> tuple[bool, str]:
    """The same for the gradient: Rᵀv + r h, with h = Fᵀ(wᵀv) of power χ/p times what goes up the branch."""
    g, r, s, p = _symmetric("g"), _explicit(R), _explicit(post), _explicit(pre)
    sent = sum(s[a] * s[b] * g[a, b] for a in range(_SIZE) for b in range(_SIZE))
    sums = [sum(r[c, a] * _x[c] for c in range(_SIZE)) + p[a] * _f for a in range(_SIZE)]
    claimed = _explicit(proof.result.rhs).subs(dict(zip(_explicit(G), g, strict=True)))
    return agree(claimed, _grams(sums, g, d_branch * chi / fed * d_in * sent))


def _one_stream(proof: Derivation) -> tuple[bool, str]:
    """n = 1 is the ordinary sub-layer with α = R and β in post."""
    from gradflow.symbolic import depth

    ordinary, law = depth.LeadingLaw(), StreamLaw()
    stands = {R: depth.alpha, post: depth.beta, pre: 1, D: sp.sqrt(depth.d_out), K: depth.Q}

    def scalar(expression: MatrixExpr, at: sp.Expr = sp.S.One) -> sp.Expr:
        """The expression's one entry, for a gradient of power ``at``."""
        entries = {symbol.subs(n, 1)[0, 0]: value for symbol, value in (stands | {G: at}).items()}
        return expression.subs(n, 1).as_explicit()[0, 0].subs(entries)

    pairs = [
        (scalar(law.total), ordinary.total),
        (scalar(proof.result.rhs, at=depth.d_out), ordinary.net.subs(depth.sigma, 1)),
        (scalar(law.skip, at=scalar(law.at_sum)), ordinary.trunk),
        (scalar(law.to_branch, at=depth.d_out), ordinary.to_branch),
    ]
    return every([agree(left, right) for left, right in pairs])


def _autodiff(_: Derivation) -> tuple[bool, str]:
    """DN_out (R ⊗ I + w ⊗ DN_b F DN_in ⊗ rᵀ) against jacfwd, two streams of width 3, the first with an output norm."""
    import jax
    import jax.numpy as jnp

    rng, size, width = np.random.default_rng(5), _SIZE, 3
    mix, into, out = rng.normal(size=(size, size)), rng.normal(size=size), rng.normal(size=size)

    def norm(a: Any) -> "jax.Array":
        return a / jnp.sqrt(jnp.mean(a**2) + 1e-3)

    def outer(u: "jax.Array") -> "jax.Array":
        return jnp.concatenate([norm(u[:1]), u[1:]])

    with jax.enable_x64(True):
        w, state = jnp.asarray(rng.normal(size=(width, width))), jnp.asarray(rng.normal(size=(size, width)))

        def branch(a: "jax.Array | np.ndarray") -> "jax.Array":
            return norm(jnp.tanh(w @ norm(a)))

        def summed(flat: "jax.Array") -> "jax.Array":
            streams = flat.reshape(size, width)
            return jnp.ravel(mix @ streams + jnp.outer(out, branch(into @ streams)))

        def whole(flat: "jax.Array") -> "jax.Array":
            return outer(summed(flat).reshape(size, width)).ravel()

        flat = state.ravel()
        inner = np.asarray(jax.jacfwd(branch)(into @ state))
        last = np.asarray(jax.jacfwd(lambda u: outer(u.reshape(size, width)).ravel())(summed(flat)))
        truth = np.asarray(jax.jacfwd(whole)(flat))
    claimed = last @ (np.kron(mix, np.eye(width)) + np.kron(np.outer(out, into), inner))
    return near(claimed, truth)


def _monte_carlo(proof: Derivation) -> tuple[bool, str]:
    """The gradient's Gram below one sub-layer of two streams, a linear branch, 4,000 draws."""
    rng, width, draws = np.random.default_rng(6), 64, 4000
    mix, into, out = rng.normal(size=(2, 2)), rng.normal(size=2), rng.normal(size=2)
    grams = np.empty((draws, 2, 2))
    shared = np.array([[1.0, 0.0], [0.6, 0.8]])  # gradients of two streams, of cosine 0.6
    for k in range(draws):
        v = shared @ rng.standard_normal((2, width))
        w = rng.standard_normal((width, width)) / math.sqrt(width)
        back = mix.T @ v + np.outer(into, w.T @ (out @ v))
        grams[k] = back @ back.T / width
    at = sp.lambdify((G, R, pre, post, chi, fed, d_in, d_branch), proof.result.rhs, "numpy")
    claimed = at(shared @ shared.T, mix, into[:, None], out[:, None], *np.ones(4))
    error = grams.std(0, ddof=1) / math.sqrt(draws)
    worst = float(np.abs((grams.mean(0) - claimed) / error).max())
    return worst < 4, f"largest difference {worst:.1f} standard errors, of {error.max() / np.abs(claimed).max():.1%}"


def derivation() -> Derivation:
    """Derive the recursion of both Grams; the checks multiply it out for two streams and hold it against networks."""
    law = StreamLaw()
    gram = MatrixSymbol("G_in", n, n)
    steps = (
        Step(r"Streams $x_a$ have the Gram $K$; the branch reads the sum of all $r_a x_a$, of power", law.seen),
        Step("f has zero mean given the streams, so what is summed has the Gram", law.total),
        Step("A length norm on a stream divides it by its rms; D holds these gains, and 1 elsewhere:", law.after),
        Step("The gradient's Gram passes the same D, as what a norm projects out is of order 1/d;", law.at_sum),
        Step("the branch is handed the sum over streams with the weights w, of power", law.to_branch),
        Step("and returns it to the streams with the weights r, uncorrelated with what comes by the skip:", law.back),
    )
    claim = (
        r"Streams of residual matrix R, read by r and written to by w, have the Jacobian "
        r"$D_{out} (R \otimes I + w \otimes D_{branch} F D_{in} \otimes r^T)$. At initialisation their Gram and that of the "
        "gradient follow a recursion of n by n matrices, to leading order in 1/d."
    )
    assumed = ("iid zero-mean Gaussian weights", "no epsilon", "one token", "depth well below d")
    tests = (
        ("forward Gram multiplied out, n = 2", _forward),
        ("backward Gram multiplied out, n = 2", _backward),
        ("n = 1 is the ordinary law", _one_stream),
        ("jax.jacfwd of a sub-layer of two streams", _autodiff),
        ("Monte Carlo in NumPy, two streams", _monte_carlo),
    )
    title = "The law of several residual streams"
    return Derivation("streams", title, claim, assumed, steps, Eq(gram, law.back), tests)
