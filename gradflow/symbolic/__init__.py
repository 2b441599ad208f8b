"""The formulas that gradflow stands on, derived by SymPy for symbolic width d (and depth L), and the checks on them.

``derive(name)`` returns a ``Derivation``: claim, steps, result, ``.text()``, ``.latex()``, ``.check()``; ``NAMES``
lists what there is. By module:

* ``index``: vectors, sums and ranged Kronecker deltas of symbolic length; derivative, contraction, exact evaluation;
* ``norms``: the normalisations' Jacobians, and two numbers that say what each does to a gradient;
* ``residual``: the Jacobian of one residual block, every slot optional;
* ``projections``: products of identities with a low-rank correction, and their spectra;
* ``depth``, ``streams``: the depth law at initialisation, of one residual stream and of several;
* ``readings``: the estimate (1−c)^L, from both of its readings.

Nothing is imported before it is asked for.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradflow.symbolic.derivation import NAMES, Check, Derivation, Step, derive

__all__ = ["NAMES", "Check", "Derivation", "Step", "derive"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("gradflow.symbolic.derivation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
