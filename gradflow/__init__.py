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
    "compare": "gradflow.comparing.comparisons",
    "constants": "gradflow.comparing.prescriptions",
    "design": "gradflow.comparing.designs",
    "audit": "gradflow.auditing.audits",
    "profile": "gradflow.profiles",
    "subspaces": "gradflow.splits",
    "spectrum": "gradflow.spectra.choice",
    "sweep": "gradflow.sweeping.run",
    "derive": "gradflow.symbolic",
    "warmup": "gradflow.training.run",
    "trainability": "gradflow.training.map_run",
    "claims": "gradflow.ledger.book",
    "what_if": "gradflow.counterfactuals.run",
    "Audit": "gradflow.auditing.result",
    "Comparison": "gradflow.comparing.comparisons",
    "Design": "gradflow.comparing.designs",
    "Contraction": "gradflow.contractions",
    "ContractionSweep": "gradflow.contractions",
    "Profile": "gradflow.factors",
    "Residual": "gradflow.chains",
    "Interval": "gradflow.intervals",
    "Ledger": "gradflow.ledger.book",
    "Scheme": "gradflow.schemes",
    "Spectrum": "gradflow.spectra.result",
    "Stack": "gradflow.stack",
    "Subspaces": "gradflow.splits",
    "Sweep": "gradflow.sweeping.result",
    "TrainabilityMap": "gradflow.training.maps",
    "TrainingRun": "gradflow.training.results",
    "TrainingRuns": "gradflow.training.results",
    "WhatIf": "gradflow.counterfactuals.result",
}
_MODULES = ("adapters", "branches", "checkpoints", "norms", "schemes", "stack", "symbolic", "torch", "training")

__all__ = [
    "Audit",
    "Comparison",
    "Contraction",
    "ContractionSweep",
    "Design",
    "Interval",
    "Ledger",
    "Profile",
    "Residual",
    "Scheme",
    "Spectrum",
    "Stack",
    "Subspaces",
    "Sweep",
    "TrainabilityMap",
    "TrainingRun",
    "TrainingRuns",
    "WhatIf",
    "__version__",
    "adapters",
    "audit",
    "branches",
    "checkpoints",
    "claims",
    "compare",
    "constants",
    "contraction",
    "derive",
    "design",
    "law",
    "norms",
    "profile",
    "schemes",
    "spectrum",
    "stack",
    "subspaces",
    "sweep",
    "symbolic",
    "torch",
    "trainability",
    "training",
    "warmup",
    "what_if",
]

if TYPE_CHECKING:
    from gradflow import adapters, branches, checkpoints, norms, schemes, stack, symbolic, torch, training
    from gradflow.auditing.audits import audit
    from gradflow.auditing.result import Audit
    from gradflow.chains import Residual
    from gradflow.comparing.comparisons import Comparison, compare
    from gradflow.comparing.designs import Design, design
    from gradflow.comparing.prescriptions import constants
    from gradflow.contractions import Contraction, ContractionSweep
    from gradflow.counterfactuals.result import WhatIf
    from gradflow.counterfactuals.run import what_if
    from gradflow.estimate import contraction
    from gradflow.factors import Profile
    from gradflow.intervals import Interval
    from gradflow.laws import law
    from gradflow.ledger.book import Ledger, claims
    from gradflow.profiles import profile
    from gradflow.schemes import Scheme
    from gradflow.spectra.choice import spectrum
    from gradflow.spectra.result import Spectrum
    from gradflow.splits import Subspaces, subspaces
    from gradflow.stack import Stack
    from gradflow.sweeping.result import Sweep
    from gradflow.sweeping.run import sweep
    from gradflow.symbolic import derive
    from gradflow.training.map_run import trainability
    from gradflow.training.maps import TrainabilityMap
    from gradflow.training.results import TrainingRun, TrainingRuns
    from gradflow.training.run import warmup


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
