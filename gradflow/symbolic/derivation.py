"""A derivation as a value: claim, steps, result, and the checks that try to refute the result."""

import importlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy as sp
from sympy.printing.str import StrPrinter

from gradflow.checks import one_of

# name -> "module:function"; the function takes nothing and returns the Derivation. Resolved when asked for.
_CATALOGUE = {
    "unit": "gradflow.symbolic.norm_derivations:unit",
    "rms": "gradflow.symbolic.norm_derivations:rms",
    "rms-outside": "gradflow.symbolic.norm_derivations:rms_outside",
    "layernorm": "gradflow.symbolic.norm_derivations:layernorm",
    "second-derivative": "gradflow.symbolic.norm_derivations:second_derivative",
    "residual-block": "gradflow.symbolic.residual:derivation",
    "two-projections": "gradflow.symbolic.projection_derivations:two_projections",
    "projections": "gradflow.symbolic.projection_derivations:projections",
    "estimate": "gradflow.symbolic.reading_derivations:estimate",
    "moments": "gradflow.symbolic.depth_derivation:gaussian_moments",
    "depth-law": "gradflow.symbolic.depth_derivation:depth_law",
    "end-to-end": "gradflow.symbolic.telescope:derivation",
    "attention": "gradflow.symbolic.attention_derivation:derivation",
    "streams": "gradflow.symbolic.streams:derivation",
    "cross-attention": "gradflow.symbolic.cross_attention_derivation:derivation",
}

NAMES = tuple(_CATALOGUE)

_COLUMNS = 96

# Words may use these commands inside $…$; plain text shows the letter.
_LETTERS = {
    r"\varepsilon": "ε",
    r"\theta": "θ",
    r"\phi": "φ",
    r"\chi": "χ",
    r"\sigma": "σ",
    r"\lambda": "λ",
    r"\alpha": "α",
    r"\beta": "β",
    r"\cdot": "·",
    r"\otimes": "⊗",
    r"\arccos": "arccos",
    r"\cos": "cos",
    r"\log": "log",
    r"\det": "det",
}


@dataclass(frozen=True)
class Step:
    """One line of a derivation: what is done, and the equation that comes out. Words may hold ``$math$``."""

    text: str
    equation: object = None


@dataclass(frozen=True)
class Check:
    """One attempt to refute a derivation, and how it ended."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name}: {self.detail}"


Test = Callable[["Derivation"], tuple[bool, str]]
"""A test reads the derivation's ``result`` and returns ``(passed, detail)``."""


@dataclass(frozen=True)
class Derivation:
    """A proved formula.

    Attributes
    ----------
    name, title, claim : str
        What ``derive`` knows it by, a heading, and the statement in one or two sentences.
    assumptions : tuple of str
        What the proof takes for granted.
    steps : tuple of Step
        The proof.
    result : Expr or Eq
        The formula proved. The checks read it from here, so a wrong one fails.
    tests : tuple of (str, callable)
        Each callable takes the derivation and returns ``(passed, detail)``.
    """

    name: str
    title: str
    claim: str
    assumptions: tuple[str, ...]
    steps: tuple[Step, ...]
    result: Any  # an Eq, whose annotations SymPy lacks
    tests: tuple[tuple[str, Test], ...] = field(repr=False, compare=False)

    def check(self) -> tuple[Check, ...]:
        """Run every test (exact rationals at small d, JAX in float64); a test that raises counts as failed."""
        return tuple(_run(name, test, self) for name, test in self.tests)

    def text(self) -> str:
        """Return the derivation as plain text of at most 100 columns."""
        title = _wrap(self.title)
        parts = [title, "=" * len(title), _wrap(self.claim)]
        parts += [_wrap(f"Assumed: {'; '.join(self.assumptions)}.")] if self.assumptions else []
        for number, step in enumerate(self.steps, 1):
            parts += ["", _wrap(f"{number}. {step.text}", "   ")]
            parts += [textwrap.indent(_pretty(step.equation), "    ")] if step.equation is not None else []
        return "\n".join([*parts, "", "Result", textwrap.indent(_pretty(self.result), "    ")])

    __str__ = text

    def latex(self) -> str:
        """Return a LaTeX fragment (amsmath) that compiles inside a document."""
        head = [rf"\paragraph{{{_escape(self.title)}}} {_escape(self.claim)}"]
        head += [rf"Assumed: {_escape('; '.join(self.assumptions))}."] if self.assumptions else []
        items = [
            rf"\item {_escape(step.text)}" + (rf"\[ {sp.latex(step.equation)} \]" if step.equation is not None else "")
            for step in self.steps
        ]
        body = [r"\begin{enumerate}", *items, r"\end{enumerate}"]
        return "\n".join([*head, *body, rf"\begin{{align*}} {sp.latex(self.result)} \end{{align*}}"])

    def _repr_latex_(self) -> str:
        return rf"$\displaystyle {sp.latex(self.result)}$"

    def _repr_markdown_(self) -> str:
        lines = [f"### {self.title}", self.claim]
        lines += [f"*Assumed:* {'; '.join(self.assumptions)}."] if self.assumptions else []
        for number, step in enumerate(self.steps, 1):
            lines += [f"**{number}.** {step.text}"]
            lines += [f"$$ {sp.latex(step.equation)} $$"] if step.equation is not None else []
        return "\n\n".join([*lines, "**Result**", f"$$ {sp.latex(self.result)} $$"])


def derive(name: str) -> Derivation:
    """Return the derivation called ``name``, one of ``NAMES``.

    Raises
    ------
    ValueError
        For an unknown name; the message lists near ones.

    Examples
    --------
    >>> all(check.passed for check in derive("two-projections").check())
    True
    """
    module, _, function = _CATALOGUE[one_of("name", name, NAMES)].partition(":")
    return getattr(importlib.import_module(module), function)()


def agree(left: Any, right: Any) -> tuple[bool, str]:
    """Compare two exact scalars, matrices or arrays: equal iff every difference simplifies to 0."""
    pairs = list(zip(_flat(left), _flat(right), strict=True))
    wrong = [(a, b) for a, b in pairs if sp.simplify(a - b) != 0]
    if wrong:
        return False, f"{len(wrong)} of {len(pairs)} differ: {wrong[0]}"
    return True, f"{len(pairs)} exact values agree"


def near(left: Any, right: Any, tolerance: float = 1e-12) -> tuple[bool, str]:
    """Compare two float64 arrays, relative to the largest entry of the second."""
    a, b = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    error = float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
    return error <= tolerance, f"largest difference {error:.1e} of the largest entry, tolerance {tolerance:.0e}"


def every(outcomes: list[tuple[bool, str]]) -> tuple[bool, str]:
    """Join several outcomes: the first that failed speaks, else the last, with their number."""
    passed, detail = next((outcome for outcome in outcomes if not outcome[0]), outcomes[-1])
    return passed, f"{detail}; {len(outcomes)} cases" if passed else detail


def _run(name: str, test: Test, derivation: Derivation) -> Check:
    try:
        passed, detail = test(derivation)
    except Exception as error:  # a check reports; it never stops the others
        return Check(name, False, f"{type(error).__name__}: {error}")
    return Check(name, bool(passed), detail)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, sp.MatrixBase | sp.NDimArray):
        return [sp.sympify(entry) for entry in sp.flatten(value.tolist())]
    return [sp.sympify(value)]


def _wrap(words: str, indent: str = "") -> str:
    for command, letter in _LETTERS.items():
        words = words.replace(command, letter)
    return textwrap.fill(words.replace("$", ""), _COLUMNS, subsequent_indent=indent, break_long_words=False)


class _Line(StrPrinter):
    """Formulas on one line, for those too wide to be drawn."""

    def _print_Sum(self, expr: sp.Sum) -> str:  # noqa: N802 - SymPy's protocol
        return f"Σ_{','.join(str(limit[0]) for limit in expr.limits)}({self._print(expr.function)})"

    def _print_KroneckerDelta(self, expr: sp.KroneckerDelta) -> str:  # noqa: N802
        return f"δ[{expr.args[0]}, {expr.args[1]}]"

    def _print_Relational(self, expr: sp.Eq) -> str:  # noqa: N802
        return f"{self._print(expr.lhs)} = {self._print(expr.rhs)}"


def _pretty(equation: object) -> str:
    drawn = sp.pretty(equation, use_unicode=True, wrap_line=False)
    if max(map(len, drawn.splitlines())) <= _COLUMNS - 4:
        return drawn
    return textwrap.fill(_Line().doprint(equation), _COLUMNS - 4, subsequent_indent="    ")


def _escape(words: str) -> str:
    """Escape what LaTeX minds, outside of ``$…$``."""
    parts = words.split("$")
    return "$".join(
        part if position % 2 else "".join("\\" + c if c in "%&#_{}" else r"\^{}" if c == "^" else c for c in part)
        for position, part in enumerate(parts)
    )
