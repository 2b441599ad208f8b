"""gradflow: analytic Jacobians and gradient flow of deep residual networks; law, exact product and factors side by side.

``gradflow.contraction(depth=24, d=512)`` is the main job. Names load when they are first used (PEP 562): importing gradflow
loads neither JAX, SymPy nor Matplotlib, and never changes a global JAX setting.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "contraction": "gradflow.estimate",
    "law": "gradflow.laws",
    "derive": "gradflow.symbolic",
    "Contraction": "gradflow.contractions",
    "ContractionSweep": "gradflow.contractions",
    "Profile": "gradflow.factors",
    "Interval": "gradflow.intervals",
    "Scheme": "gradflow.schemes",
    "Stack": "gradflow.stack",
}
_MODULES = ("branches", "norms", "schemes", "stack", "symbolic")

__all__ = [
    "Contraction",
    "ContractionSweep",
    "Interval",
    "Profile",
    "Scheme",
    "Stack",
    "__version__",
    "branches",
    "contraction",
    "derive",
    "law",
    "norms",
    "schemes",
    "stack",
    "symbolic",
]

if TYPE_CHECKING:
    from gradflow import branches, norms, schemes, stack, symbolic
    from gradflow.contractions import Contraction, ContractionSweep
    from gradflow.estimate import contraction
    from gradflow.factors import Profile
    from gradflow.intervals import Interval
    from gradflow.laws import law
    from gradflow.schemes import Scheme
    from gradflow.stack import Stack
    from gradflow.symbolic import derive


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"gradflow.{name}")
    raise AttributeError(f"module 'gradflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
