"""Index calculus for vectors of symbolic length d: ranged Kronecker deltas, derivatives, contraction, exact evaluation.

A vector is ``x[i]``, a matrix ``W[i, j]``, the identity ``delta(i, j)``, a scalar product ``total(x[k] * y[k], k)``.
Free indices are understood to lie in 0 … d−1, which is what the *ranged* delta says; with it every sum over a delta
collapses without a case distinction, for symbolic d. (SymPy's ``MatrixSymbol`` calculus is not used: for x/‖x‖ it is
silently wrong, as derivations/matrix_symbol.py shows.)
"""

# SymPy's annotations do not follow its operators: x[i] may be a Tuple there, a - b a Basic.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy as sp
from sympy import Expr, Indexed, IndexedBase, KroneckerDelta, Sum, Symbol

d = Symbol("d", integer=True, positive=True)
i, j, k, l, m = sp.symbols("i j k l m", integer=True)

# Names that `contract` gives to bound indices; those that stand free in the expression are passed over.
_NAMES = [Symbol(name, integer=True) for name in "klmnpqabceghuvw"]

Term = tuple[list[Expr], list[Symbol]]
"""A product of factors and the indices that it is summed over."""


def vector(name: str) -> IndexedBase:
    """Return a real vector of symbolic length d."""
    return IndexedBase(name, shape=(d,), real=True)


def matrix(name: str) -> IndexedBase:
    """Return a real d × d matrix."""
    return IndexedBase(name, shape=(d, d), real=True)


def delta(a: Expr, b: Expr) -> Expr:
    """Return the identity's entry δ_ab, its indices ranging over 0 … d−1."""
    return KroneckerDelta(a, b, (0, d - 1))


def total(summand: Expr, *indices: Symbol) -> Expr:
    """Return the sum of ``summand`` over 0 … d−1 for each of ``indices``."""
    return Sum(summand, *((index, 0, d - 1) for index in indices))


def partial(expr: Expr, variable: Indexed) -> Expr:
    """Return ∂``expr``/∂``variable``, contracted; ``variable`` is an entry such as ``x[j]`` with a free index.

    Examples
    --------
    >>> x = vector("x")
    >>> partial(total(x[k] ** 2, k), x[j])
    2*x[j]
    """
    # Bound indices are renamed first: a sum over the very letter j would otherwise capture it. Deltas are constants,
    # but SymPy cannot differentiate past a ranged one, so they step aside.
    fresh = _fresh(sp.sympify(expr))
    aside = {pair: sp.Dummy() for pair in fresh.atoms(KroneckerDelta)}
    derivative = fresh.xreplace(aside).diff(variable)
    ranged = derivative.replace(lambda e: isinstance(e, KroneckerDelta), lambda e: delta(*e.args[:2]))
    ranged = ranged.xreplace({mark: pair for pair, mark in aside.items()})
    return contract(ranged)


def contract(expr: Expr) -> Expr:
    """Return a normal form: products multiplied out, deltas summed away, each connected sum written once.

    A term is a product; factors that share a bound index hang together and make one ``Sum``, everything else comes
    out in front, and an index that nothing carries counts d. Bound indices get the names k, l, m, … in the order that
    sorts first, so that two sums that differ by names only are equal.
    """
    expr = sp.sympify(expr)
    names = [name for name in _NAMES if name not in expr.free_symbols]
    return sp.Add(*(_join(*_collapse(*term), names) for term in terms(expr)))


def terms(expr: Expr) -> list[Term]:
    """Return ``expr`` multiplied out, as products of factors with the (fresh) indices that each is summed over."""
    if isinstance(expr, sp.Add):
        return [term for arg in expr.args for term in terms(arg)]
    if isinstance(expr, sp.Mul):
        return _multiply([terms(arg) for arg in expr.args])
    if (
        isinstance(expr, sp.Pow)
        and expr.exp.is_Integer
        and expr.exp > 1
        and not isinstance(expr.base, Symbol | Indexed)
    ):
        return _multiply([terms(expr.base) for _ in range(int(expr.exp))])
    if isinstance(expr, Sum):
        renamed = {limit[0]: sp.Dummy(limit[0].name, integer=True) for limit in expr.limits}
        inner = terms(expr.function.xreplace(renamed))
        return [(factors, [*bound, *renamed.values()]) for factors, bound in inner]
    if isinstance(expr, sp.Pow) or (isinstance(expr, sp.Function) and not isinstance(expr, KroneckerDelta)):
        return [([expr.func(*map(contract, expr.args))], [])]  # opaque: √(…) and its like are only tidied inside
    return [([expr], [])]


def gather(expr: Expr, known: Mapping[Expr, Expr]) -> Expr:
    """Return ``contract(expr)`` with known sums replaced, such as ``{total(y[k] ** 2, k): d * r**2}``."""
    table = {contract(total_): value for total_, value in known.items()}
    return contract(expr).xreplace(table)


def evaluate(expr: Expr, size: int, values: Mapping[Any, object], free: Sequence[Symbol] = ()) -> Any:
    """Return ``expr`` at d = ``size`` exactly, entry by entry: a scalar, a column, a matrix or an array, by ``free``.

    Parameters
    ----------
    values : mapping
        From each ``IndexedBase`` to a sequence, ``Matrix`` or nested list of numbers, from each symbol to a number.
    free : sequence of Symbol
        The indices that stay: ``(i, j)`` gives the matrix with rows i and columns j.
    """
    table = {key: _tensor(value) for key, value in values.items()}
    entries = [
        _entry(sp.sympify(expr), size, table, dict(zip(free, place, strict=True)))
        for place in itertools.product(range(size), repeat=len(free))
    ]
    if len(free) == 0:
        return entries[0]
    if len(free) <= 2:
        return sp.Matrix(size, len(entries) // size, entries)
    return sp.ImmutableDenseNDimArray(entries, (size,) * len(free))


def _fresh(expr: Expr) -> Expr:
    if isinstance(expr, Sum):
        renamed = {limit[0]: sp.Dummy(limit[0].name, integer=True) for limit in expr.limits}
        limits = [(renamed[limit[0]], *limit[1:]) for limit in expr.limits]
        return Sum(_fresh(expr.function).xreplace(renamed), *limits)
    return expr.func(*map(_fresh, expr.args)) if expr.has(Sum) else expr


def _multiply(groups: Sequence[list[Term]]) -> list[Term]:
    return [
        ([f for factors, _ in choice for f in factors], [b for _, bound in choice for b in bound])
        for choice in itertools.product(*groups)
    ]


def _collapse(factors: list[Expr], bound: list[Symbol]) -> Term:
    """Sum the deltas away; one between two free indices stays and speaks for the whole term (δ_ij x_j = δ_ij x_i)."""
    kept: list[Expr] = []
    product = sp.Mul(*factors)
    while pairs := [f for f in sp.Mul.make_args(product) if isinstance(f, KroneckerDelta)]:
        pair, (a, b) = pairs[0], sorted(pairs[0].args[:2], key=lambda index: (index in bound, index.sort_key()))
        # b is bound wherever either is; if both are free, b is the later letter.
        product = (product / pair).xreplace({b: a})
        if b in bound:
            bound = [index for index in bound if index != b]
        else:
            kept.append(pair)
    return [*kept, *sp.Mul.make_args(product)], bound


def _join(factors: list[Expr], bound: list[Symbol], names: list[Symbol]) -> Expr:
    """Write a term back: one Sum for each set of factors that share bound indices."""
    result, left, rest = sp.Integer(1), list(bound), list(factors)
    while left:
        group, members = {left[0]}, []
        while True:
            touching = [f for f in rest if f.free_symbols & group]
            if not touching:
                break
            rest = [f for f in rest if f not in touching]
            members += touching
            group |= {b for f in touching for b in f.free_symbols if b in left}
        left = [b for b in left if b not in group]
        result *= _named(sp.Mul(*members), sorted(group, key=bound.index), names) if members else d
    return result * sp.Mul(*rest)


def _named(summand: Expr, group: list[Symbol], names: list[Symbol]) -> Expr:
    chosen = names[: len(group)]
    renamings = (summand.xreplace(dict(zip(order, chosen, strict=True))) for order in itertools.permutations(group))
    return total(min(renamings, key=sp.default_sort_key), *chosen)


def _tensor(value: Any) -> Any:
    """Return nested lists of SymPy numbers; a column ``Matrix`` becomes a plain list."""
    if hasattr(value, "tolist"):
        value = list(value) if isinstance(value, sp.MatrixBase) and value.cols == 1 else value.tolist()
    return [_tensor(entry) for entry in value] if isinstance(value, list | tuple) else sp.sympify(value)


def _entry(expr: Expr, size: int, table: Mapping[Any, Any], at: dict[Symbol, int]) -> Expr:
    if isinstance(expr, Symbol):
        return sp.sympify(at[expr] if expr in at else size if expr == d else table.get(expr, expr))
    if isinstance(expr, Indexed):
        value = table[expr.base]
        for index in expr.indices:
            value = value[at[index] if index in at else int(index)]
        return value
    if isinstance(expr, Sum):
        bound = [limit[0] for limit in expr.limits]
        places = itertools.product(range(size), repeat=len(bound))
        return sum(
            (_entry(expr.function, size, table, at | dict(zip(bound, p, strict=True))) for p in places), sp.Integer(0)
        )
    if not expr.args:
        return expr
    args = [_entry(arg, size, table, at) for arg in (expr.args[:2] if isinstance(expr, KroneckerDelta) else expr.args)]
    if isinstance(expr, KroneckerDelta):
        return sp.Integer(int(args[0] == args[1]))
    if isinstance(expr, sp.Mul):  # operators, not Mul(*args): for numbers they are many times faster
        return math.prod(args, start=sp.Integer(1))
    return sum(args, sp.Integer(0)) if isinstance(expr, sp.Add) else expr.func(*args)
