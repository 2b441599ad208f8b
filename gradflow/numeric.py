"""SymPy expressions as JAX code: the one bridge from what is derived to what is evaluated."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import sympy

_SPECIAL = {"erf": jax.scipy.special.erf, "erfc": jax.scipy.special.erfc, "loggamma": jax.scipy.special.gammaln}


def to_jax(arguments: Sequence[sympy.Symbol | sympy.MatrixSymbol], expression: Any) -> Callable[..., Any]:
    """Compile an expression, or a tuple of them, to a JAX function of ``arguments``.

    SymPy's JAX printer maps special functions to Python's ``math``, which cannot be traced; they are named here.
    """
    return sympy.lambdify(arguments, expression, modules=[_SPECIAL, "jax"], cse=True)
