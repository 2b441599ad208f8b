"""The block Jacobian of x' = N_out(α x + β N_branch(f(N_in(x)))), every slot optional, by perturbing the input.

Each map is known by one rule: it answers a perturbation h with its value plus Σ_j D_ij h_j. Feeding the perturbation
through the residual equation and differentiating the answer by h_j gives the Jacobian, for symbolic d and any maps.
"""

# SymPy's annotations do not follow its operators: x[i] may be a Tuple there, a - b a Basic.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import sympy as sp
from sympy import Eq, Expr, IndexedBase, Matrix, Symbol

from gradflow.symbolic.derivation import Derivation, Step, agree, every, near
from gradflow.symbolic.index import contract, evaluate, i, j, matrix, partial, total, vector

alpha, beta = Symbol("alpha", real=True), Symbol("beta", real=True)
D_out, D_branch, F, D_in = matrix("D_out"), matrix("D_branch"), matrix("F"), matrix("D_in")
x, h, u = vector("x"), vector("h"), vector("u")
J = IndexedBase("J")
_t = Symbol("t", real=True)  # the size of the perturbation


@dataclass(frozen=True)
class Perturbed:
    """A vector and its answer to the perturbation: v(x + t·h) = value + t·answer + O(t²), as functions of an index."""

    value: Callable[[Expr], Expr]
    answer: Callable[[Expr], Expr]

    def through(self, name: str, jacobian: IndexedBase) -> "Perturbed":
        """Send it through a map called ``name`` with that Jacobian: f_i(y + t a) = f_i(y) + t Σ_l F_il a_l."""
        value = vector(name)
        bound = sp.Dummy("l", integer=True)  # one of its own for each map: nested sums must not capture each other
        return Perturbed(lambda a: value[a], lambda a: total(jacobian[a, bound] * self.answer(bound), bound))

    def __add__(self, other: "Perturbed") -> "Perturbed":
        return Perturbed(lambda a: self.value(a) + other.value(a), lambda a: self.answer(a) + other.answer(a))

    def __rmul__(self, factor: Expr) -> "Perturbed":
        return Perturbed(lambda a: factor * self.value(a), lambda a: factor * self.answer(a))


def block_jacobian(*, n_out: bool = True, n_branch: bool = True, n_in: bool = True) -> Expr:
    """Return J_ij of one residual block as an index expression in D_out, D_branch, F, D_in, α and β.

    Equivalent, slot by slot, to D_out (α I + β D_branch F D_in) with I for each slot that is empty.

    Examples
    --------
    >>> block_jacobian(n_out=False, n_branch=False, n_in=False)
    alpha*KroneckerDelta(i, j, (0, d - 1)) + beta*F[i, j]
    """
    return partial(contract(_block(n_out, n_branch, n_in)[-1].answer(i)), h[j])


def _block(n_out: bool, n_branch: bool, n_in: bool) -> list[Perturbed]:
    """Return the perturbed branch, what the output norm sees, and the block's output."""
    stream = Perturbed(lambda a: x[a], lambda a: h[a])
    seen = stream.through("y", D_in) if n_in else stream
    branch = seen.through("f", F)
    branch = branch.through("z", D_branch) if n_branch else branch
    summed = alpha * stream + beta * branch
    return [branch, summed, summed.through("N", D_out) if n_out else summed]


def derivation() -> Derivation:
    """Derive the block Jacobian with every slot filled; the checks run all eight combinations."""
    branch, summed, output = _block(True, True, True)
    steps = (
        Step("The stream is perturbed.", x[i] + _t * h[i]),
        Step(
            "Each map answers linearly: here the branch, with norms at its input and output.",
            contract(branch.answer(i)),
        ),
        Step("What the output norm sees is the sum of skip and branch;", Eq(u[i], summed.value(i))),
        Step("its answer to the perturbation is", contract(summed.answer(i))),
        Step("and the output norm's", contract(output.answer(i))),
        Step("Differentiate by an entry of $h$.", Eq(J[i, j], block_jacobian())),
        Step("Post-norm: only the outer slot is filled.", Eq(J[i, j], block_jacobian(n_branch=False, n_in=False))),
        Step("Pre-norm: only the inner slot is filled.", Eq(J[i, j], block_jacobian(n_out=False, n_branch=False))),
    )
    claim = (
        r"The Jacobian of a residual block is $D_{out} (\alpha I + \beta D_{branch} F D_{in})$, "
        "where an empty slot is $I$."
    )
    tests = (
        ("exact rationals, d = 3, 4, 5", lambda proof: every([_exact(proof, size) for size in (3, 4, 5)])),
        ("all eight combinations of slots, exact, d = 3", lambda _: every([_slots(*slots) for slots in _COMBINATIONS])),
        ("jax.jacfwd in float64, a tanh branch between LayerNorms, d = 4", _autodiff),
    )
    assumed = ("each map has a derivative where it is used",)
    return Derivation(
        "residual-block", "Jacobian of a residual block", claim, assumed, steps, Eq(J[i, j], block_jacobian()), tests
    )


Map = Callable[[list], list]
_COMBINATIONS = tuple(itertools.product((False, True), repeat=3))
_ALPHA, _BETA = sp.Rational(3, 2), sp.Rational(-2, 3)


def _rational_norm(weight: int) -> Map:
    """Return y ↦ y/(weight + mean y²), which couples its entries as a norm does, yet stays rational."""
    return lambda y: [e / (sum(c * c for c in y) / len(y) + weight) for e in y]


def _rational_branch(y: list) -> list:
    return [sum((((1 + 3 * a + 5 * b) % 7) - 4) * (e + e * e) for b, e in enumerate(y)) / 4 for a in range(len(y))]


@dataclass(frozen=True)
class _Dual:
    """A rational number and its rate of change: exact forward-mode differentiation."""

    value: Fraction
    rate: Fraction = Fraction(0)

    def __add__(self, other: object) -> "_Dual":
        o = other if isinstance(other, _Dual) else _Dual(Fraction(other))
        return _Dual(self.value + o.value, self.rate + o.rate)

    def __mul__(self, other: object) -> "_Dual":
        o = other if isinstance(other, _Dual) else _Dual(Fraction(other))
        return _Dual(self.value * o.value, self.value * o.rate + self.rate * o.value)

    def __truediv__(self, other: object) -> "_Dual":
        o = other if isinstance(other, _Dual) else _Dual(Fraction(other))
        return _Dual(self.value / o.value, (self.rate * o.value - self.value * o.rate) / o.value**2)

    __radd__, __rmul__ = __add__, __mul__


def _jacobian(function: Map, point: list) -> Matrix:
    """Return the exact Jacobian at a rational point, one axis at a time."""
    moved = ([_Dual(e, Fraction(int(a == axis))) for a, e in enumerate(point)] for axis in range(len(point)))
    columns = [[sp.Rational(e.rate.numerator, e.rate.denominator) for e in function(p)] for p in moved]
    return Matrix(columns).T


def _maps(size: int, n_out: bool, n_branch: bool, n_in: bool) -> tuple[dict[object, object], Matrix]:
    """Return each map's own Jacobian at its own point, and the Jacobian of the whole block in one piece."""
    slots = ((D_in, _rational_norm(1), n_in), (F, _rational_branch, True), (D_branch, _rational_norm(2), n_branch))
    filled = [(base, function) for base, function, used in slots if used]
    last = _rational_norm(3)
    skip, weight = Fraction(3, 2), Fraction(-2, 3)

    def block(stream: list, note: Callable[[IndexedBase, Map, list], object] = lambda *_: None) -> list:
        y = stream
        for base, function in filled:
            note(base, function, y)
            y = function(y)
        summed = [skip * a + weight * b for a, b in zip(stream, y, strict=True)]
        note(D_out, last, summed)
        return last(summed) if n_out else summed

    point = [Fraction(a + 1, 2) for a in range(size)]
    jacobians: dict[object, object] = {alpha: _ALPHA, beta: _BETA}
    block(point, lambda base, function, y: jacobians.update({base: _jacobian(function, y)}))
    return jacobians, _jacobian(block, point)


def _exact(proof: Derivation, size: int) -> tuple[bool, str]:
    values, truth = _maps(size, True, True, True)
    return agree(evaluate(proof.result.rhs, size, values, (i, j)), truth)


def _slots(n_out: bool, n_branch: bool, n_in: bool) -> tuple[bool, str]:
    values, truth = _maps(3, n_out, n_branch, n_in)
    derived = block_jacobian(n_out=n_out, n_branch=n_branch, n_in=n_in)
    return agree(evaluate(derived, 3, values, (i, j)), truth)


def _autodiff(proof: Derivation) -> tuple[bool, str]:
    import jax
    import jax.numpy as jnp

    generator, size, skip, weight = np.random.default_rng(11), 4, 1.3, 0.7
    inner, outer = generator.normal(size=(2, size, size))

    def norm(a: "jax.Array") -> "jax.Array":
        return (a - a.mean()) / jnp.sqrt(jnp.var(a) + 1e-5)

    def branch(a: "jax.Array") -> "jax.Array":
        return outer @ jnp.tanh(inner @ a)

    with jax.enable_x64(True):
        point = jnp.asarray(generator.normal(size=size))
        seen = norm(point)
        raw = branch(seen)
        summed = skip * point + weight * norm(raw)
        truth = jax.jacfwd(lambda a: norm(skip * a + weight * norm(branch(norm(a)))))(point)
        slots = {D_in: (norm, point), F: (branch, seen), D_branch: (norm, raw), D_out: (norm, summed)}
        values = {base: np.asarray(jax.jacfwd(f)(at)).tolist() for base, (f, at) in slots.items()}
    return near(evaluate(proof.result.rhs, size, values | {alpha: skip, beta: weight}, (i, j)).tolist(), truth)
