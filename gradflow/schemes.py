"""The residual equation and its catalogue: one row of data is one scheme.

    x' = N_out( α x + β · N_branch( f( N_in(x) ) ) )

A row says which slots hold a norm, and gives α, β as SymPy expressions in l (the sub-layer, from 1) and S (their number).
"""

from dataclasses import dataclass

import numpy as np
import sympy

from gradflow import checks

l, S = sympy.symbols("l S", positive=True, integer=True)


@dataclass(frozen=True)
class Scheme:
    """One row of the residual equation.

    Attributes
    ----------
    name, source, purpose : str
        The field's name for it, where it comes from, and a sentence on what it is for.
    norm_in, norm_branch, norm_out : bool
        Which slots of the equation hold a norm.
    alpha, beta : sympy.Expr
        Skip and branch multipliers in (l, S).
    """

    name: str
    source: str
    purpose: str
    norm_in: bool = False
    norm_branch: bool = False
    norm_out: bool = False
    alpha: sympy.Expr = sympy.Integer(1)
    beta: sympy.Expr = sympy.Integer(1)

    @property
    def equation(self) -> str:
        """The row's equation as text, read off the slots."""

        def norm(inside: str, present: bool) -> str:
            return f"N({inside})" if present else inside

        def times(factor: sympy.Expr, text: str) -> str:
            return text if factor == 1 else f"{factor}·{text}"

        branch = norm(f"f({norm('x', self.norm_in)})", self.norm_branch)
        return "x' = " + norm(f"{times(self.alpha, 'x')} + {times(self.beta, branch)}", self.norm_out)

    def multipliers(self, sublayers: int) -> tuple[np.ndarray, np.ndarray]:
        """α and β of every sub-layer, each of shape (S,)."""
        index = np.arange(1, sublayers + 1)

        def along_depth(expression: sympy.Expr) -> np.ndarray:
            values = sympy.lambdify((l, S), expression, modules="numpy")(index, sublayers)
            return np.broadcast_to(np.asarray(values, float), (sublayers,)).copy()

        return along_depth(self.alpha), along_depth(self.beta)


SCHEMES = (
    Scheme(
        "post-ln",
        "Vaswani et al. 2017 (1706.03762)",
        "every sub-layer ends in a norm, which sits on the identity path",
        norm_out=True,
    ),
    Scheme(
        "pre-ln",
        "Xiong et al. 2020 (2002.04745)",
        "the norm feeds the branch alone: the identity path runs free",
        norm_in=True,
    ),
)

_BY_NAME = {row.name: row for row in SCHEMES}


def scheme_of(spec: str | Scheme) -> Scheme:
    """Return the catalogue's row of that name; a row of the user's own is returned as it is."""
    return spec if isinstance(spec, Scheme) else _BY_NAME[checks.one_of("scheme", spec, _BY_NAME)]
