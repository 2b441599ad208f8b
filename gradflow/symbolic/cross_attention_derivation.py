"""The derivation ``cross-attention``: steps, and the checks that try to refute them."""

import math
from typing import Any

import numpy as np
import sympy
from sympy import Eq, Symbol

from gradflow.symbolic import attention as law
from gradflow.symbolic import cross_attention as cross
from gradflow.symbolic.attention_derivation import Outcome, _gram, _rows, _same, _summed
from gradflow.symbolic.derivation import Derivation, Step


def _forward(_: Derivation) -> Outcome:
    memory = _gram(sympy.Integer(1), cross.rho)
    return _same(cross.mixed(), *(_summed(_rows(k, sympy.Integer(1)), memory) for k in (law.K1, law.K2)))


def _back(_: Derivation) -> Outcome:
    """dL/dq_i = Σ_j D_ij k_j, D = J b with b_ij = ⟨g_i, v_j⟩: Σ_jj' E D_ij D_i'j' M_jj', E D from J's trace by index sums."""
    memory, found = _gram(sympy.Integer(1), cross.rho), []
    for of_g, trace in ((law.G, law.D1), (law.C, law.D2)):
        jacobians = _rows(trace, sympy.Integer(0))  # E (J J'ᵀ)_jk of exchangeable keys: rows of J sum to 0
        scores = of_g * (1 - cross.rho) * jacobians  # b's covariance is (1 − ρ_m) δ_jk and a constant, which J deletes
        found.append(law.qq * law.kk * _summed(scores, memory))
    return _same(cross.returned(), *found)


def _limits(_: Derivation) -> Outcome:
    same = [e.subs(cross.rho, 1) for e in (*cross.mixed(), *cross.returned(), cross.LOGIT_VARIANCE)]
    blind = [e.subs(law.qq, 0) for e in (*cross.returned(), cross.LOGIT_VARIANCE)]
    return same == [1, 1, 0, 0, 0] and blind == [0, 0, 0], f"equal tokens of memory: {same}; W_Q = 0: {blind}"


def _monte_carlo(_: Derivation) -> Outcome:
    """One cross-attention in NumPy: the Grams of f and of Fᵀg over random weights, memories, tokens and cotangents."""
    from gradflow.moments import softmax

    rng, keys, tokens, d, heads, draws = np.random.default_rng(0), 6, 5, 192, 2, 300
    rho_m, rho, share = 0.3, 0.4, 0.5
    size, seen, off = d // heads, np.empty((draws, 4)), ~np.eye(tokens, dtype=bool)

    def vectors(n: int, cosine: float) -> np.ndarray:
        return math.sqrt(1 - cosine) * rng.standard_normal((n, d)) + math.sqrt(cosine) * rng.standard_normal(d)

    def by_head(states: np.ndarray) -> np.ndarray:
        return states.reshape(len(states), heads, size).transpose(1, 0, 2)

    for draw in range(draws):
        x, memory, g = vectors(tokens, rho), vectors(keys, rho_m), vectors(tokens, share)
        x, memory = (s * math.sqrt(d) / np.linalg.norm(s, axis=1, keepdims=True) for s in (x, memory))
        w_q, w_k, w_v, w_o = rng.standard_normal((4, d, d)) / math.sqrt(d)
        q, k, v = by_head(x @ w_q.T), by_head(memory @ w_k.T), by_head(memory @ w_v.T)
        a = np.exp(q @ k.transpose(0, 2, 1) / math.sqrt(size))
        a /= a.sum(-1, keepdims=True)
        f = (a @ v).transpose(1, 0, 2).reshape(tokens, d) @ w_o.T
        b = by_head(g @ w_o) @ v.transpose(0, 2, 1)
        D = a * (b - (a * b).sum(-1, keepdims=True)) / math.sqrt(size)
        back = (D @ k).transpose(1, 0, 2).reshape(tokens, d) @ w_q
        seen[draw] = [value for m in (f, back) for value in (np.trace(m @ m.T) / d / tokens, (m @ m.T / d)[off].mean())]
    K1, M3, M22 = (float(m[0]) for m in softmax.narrow(np.array([keys]), 1 - rho_m))
    values = {law.K1: K1, law.M3: M3, law.M22: M22, law.n: keys, law.others: keys - 1, law.s2: 1 - rho_m, law.r: rho}
    overlap = [e.subs(values) for e in law.overlap()]
    values |= {law.K2: overlap[0], law.D2: overlap[1], law.D1: law.sensitivity().subs(values)}
    values |= {cross.rho: rho_m, law.p: 1, law.G: 1, law.C: share, law.qq: 1, law.kk: 1}
    wanted = np.array([float(e.subs(values)) for e in (*cross.mixed(), *cross.returned())])
    error = seen.std(0, ddof=1) / math.sqrt(draws)
    # what is left out is of order heads/d: the logits of finite heads are not Gaussian
    fits = np.abs(seen.mean(0) - wanted) < 4 * error + 2 / size * np.abs(wanted)
    said = ", ".join(f"{s:.4f} ± {e:.4f} (law {w:.4f})" for s, e, w in zip(seen.mean(0), error, wanted, strict=True))
    return bool(fits.all()), said


def derivation() -> Derivation:
    """Cross-attention's Grams, forward and back, at leading order."""
    shown: Any = {law.K1: Symbol("K_1"), law.M3: Symbol("M_3"), law.M22: Symbol("M_22")}

    def pair(left: str, found: law.Pair) -> Any:
        wanted = [e.subs(shown) for e in found]
        return Eq(sympy.Matrix(sympy.symbols(f"{left}_own {left}_other")), sympy.Matrix(wanted))

    returned = pair("x", cross.returned())
    steps = (
        Step(
            "Keys are a memory's, unit rms and mutual cosine rho_m. What they share cancels in the softmax; what is left are n "
            "independent logits, whose variance a query of power p sets:",
            Eq(Symbol("s") ** 2, cross.LOGIT_VARIANCE),
        ),
        Step(
            "Forward it is self-attention over the memory's Gram, two queries' rows having the correlation r of the queries "
            'themselves (K_2 at r: derive("attention")):',
            pair("f", cross.mixed()),
        ),
        Step("One row's sensitivity,", Eq(law.D1, law.sensitivity().subs(shown))),
        Step(
            "and with it all that comes back: keys and values are not of the stream, so nothing returns through them; through "
            "the queries returns what the memory's differences let through, once in the values and once in the keys:",
            returned,
        ),
        Step(
            "A memory of equal tokens, or W_Q = 0, returns nothing: q_f = 1, or the mean of the memory, and chi_f = 0. "
            "Post-LN then loses at every cross-attention the power",
            1 / (1 + cross.mixed().own),
        ),
    )
    tests = (
        ("forward, by index sums", _forward),
        ("through the queries, by index sums", _back),
        ("a memory of equal tokens, and queries that are 0", _limits),
        ("one sub-layer in NumPy", _monte_carlo),
    )
    claim = (
        "Cross-attention with random weights adds the memory's mixture, and returns through its queries, at unit gains, less "
        "than it adds: of alike keys nothing."
    )
    assumed = (
        "iid zero-mean Gaussian W_Q, W_K, W_V, W_O",
        "a memory of unit-rms tokens of one cosine, independent of the weights",
        "leading order in 1/d and heads/d",
    )
    return Derivation("cross-attention", "Cross-attention at initialisation", claim, assumed, steps, returned, tests)
