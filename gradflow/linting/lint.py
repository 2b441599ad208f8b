"""Hold an architecture against the scheme that it names: what contradicts what, and what the law says of the stack.

The law is that of a stack at initialisation, with the constants that the file states and the catalogue's where it states none.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import sympy
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradflow import precision
from gradflow.branches import branches_of, powers_of
from gradflow.comparing.prescriptions import TWO_STACKS, M, N
from gradflow.factors import plain
from gradflow.intervals import exp
from gradflow.laws.depth import ASSUMPTIONS, law
from gradflow.laws.leading import norm_powers
from gradflow.linting.architectures import Architecture
from gradflow.linting.constants import Case, Finding
from gradflow.linting.rules import RULES
from gradflow.report import grid, number, text
from gradflow.schemes import Scheme, scheme_of

LEVELS = ("error", "warning", "note")
FIXED = ("deepnorm", "t-fixup")  # schemes whose two stacks have constants of their own, known without a profile


@dataclass(frozen=True)
class Figures:
    """What the law says of the stack, NaN where it says nothing.

    Attributes
    ----------
    log_exact, log_trunk : float
        Natural logs of the end-to-end gains, output to input.
    output_rms : float
        Of the stream behind the last block, before a final norm, for a unit-rms input.
    log_gradient_ratio : float
        Of the gradients that reach the outputs of any two blocks, the largest over the smallest; ``gradient_blocks`` are these.
    weight_ratio, weight_blocks
        The same for the norms of the blocks' weight gradients.
    refusal : str, optional
        Why there is no law, in its own words; all figures are NaN then.
    """

    log_exact: float = math.nan
    log_trunk: float = math.nan
    output_rms: float = math.nan
    log_gradient_ratio: float = math.nan
    gradient_blocks: tuple[int, int] | None = None
    weight_ratio: float = math.nan
    weight_blocks: tuple[int, int] | None = None
    refusal: str | None = None

    @property
    def exact(self) -> float:
        """End-to-end gain of the gradient."""
        return float(exp(self.log_exact))

    @property
    def trunk(self) -> float:
        """End-to-end gain with F = 0."""
        return float(exp(self.log_trunk))

    @property
    def gradient_ratio(self) -> float:
        """Largest over smallest gradient at a block."""
        return float(exp(self.log_gradient_ratio))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; what is not finite is ``None``."""
        names = ("exact", "trunk", "gradient_ratio", *(f.name for f in fields(self)))
        found = {name: getattr(self, name) for name in names}
        return {name: list(v) if isinstance(v, tuple) else plain(v) for name, v in found.items()}


@dataclass(frozen=True, repr=False)
class Findings:
    """What `lint` found, errors first, and the law's figures."""

    architecture: Architecture
    findings: tuple[Finding, ...]
    figures: Figures
    max_ratio: float | None = None

    @property
    def passed(self) -> bool:
        """Whether there is no error; warnings and notes pass."""
        return all(finding.level != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "passed": self.passed,
            "findings": [finding._asdict() for finding in self.findings],
            "figures": self.figures.to_dict(),
            "max_ratio": self.max_ratio,
            "architecture": self.architecture.to_dict(),
            "assumptions": ASSUMPTIONS,
        }

    def __str__(self) -> str:
        return text(table(self))

    __repr__ = __str__


def lint(architecture: Architecture, max_ratio: float | None = None) -> Findings:
    """Find what contradicts what.

    Parameters
    ----------
    architecture : Architecture
        From `gradflow.linting.architectures.read`.
    max_ratio : float, optional
        Largest ratio between the gradients that reach two blocks; beyond it is an error.

    Raises
    ------
    ValueError
        If ``max_ratio`` is no number of at least 1.
    """
    bad = isinstance(max_ratio, bool) or not isinstance(max_ratio, int | float | None)
    if bad or not (max_ratio is None or 1 <= max_ratio < math.inf):
        raise ValueError(f"max_ratio: needs a number of at least 1, got {max_ratio!r}")
    row, both = scheme_of(architecture.scheme), two_stacks(architecture)
    powers = [1.0] * len(architecture.block)
    if row.of_power:
        with precision.scope("float64"):
            powers = powers_of(branches_of(architecture.block))
    numbers = row.multipliers(architecture.sublayers, powers)
    case = Case(architecture, row, numbers, both, figures_of(architecture), max_ratio)
    found = [finding for rule in RULES for finding in rule(case)]
    found.sort(key=lambda finding: LEVELS.index(finding.level))
    return Findings(architecture, tuple(found), case.figures, None if max_ratio is None else float(max_ratio))


def two_stacks(a: Architecture) -> tuple[Scheme, ...]:
    """Encoder's and decoder's row with their numbers; nothing for one stack, or a scheme with one form for all stacks."""
    if a.encoder is None or a.decoder is None or a.scheme not in FIXED:
        return ()
    depths = {N: a.encoder, M: a.decoder}
    slots = ("alpha", "inner", "outer")
    return tuple(
        replace(row, **{slot: getattr(row, slot).subs(depths) for slot in slots}) for row in TWO_STACKS[a.scheme]
    )


def as_stated(a: Architecture) -> Scheme:
    """The scheme's row with the file's numbers in place of the catalogue's."""
    decoder = a.encoder is not None and a.depth == a.decoder != a.encoder
    both = two_stacks(a)
    row = both[decoder] if both else scheme_of(a.scheme)
    alpha, gain = a.alpha, a.weight_gain
    if decoder:
        alpha, gain = a.decoder_alpha or alpha, a.decoder_weight_gain or gain
    named = {"alpha": alpha, "beta": a.beta, "inner": gain, "outer": gain if a.output_gain is None else a.output_gain}
    stated = {slot: sympy.Rational(value) for slot, value in named.items() if value is not None}

    def of(row: Scheme) -> Scheme:
        row = replace(row, **stated)
        return replace(row, alpha=sympy.Integer(1), beta=row.alpha * row.beta) if a.alpha_on == "branch" else row

    return replace(of(row), then=row.then and of(row.then))


def figures_of(a: Architecture) -> Figures:
    """Evaluate the law of the stack."""
    row = as_stated(a)
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            p = law(row, a.block, a.depth, d=a.d, norm=a.norm, final_norm=a.final_norm)
        except ValueError as error:  # a stream that leaves float64 is a finding
            return Figures(refusal=str(error))
        size, S = len(a.block), a.sublayers
        weights = np.linalg.norm(p.weight_grad[0, :S].reshape(a.depth, size), axis=1)  # type: ignore[index]
        rms = np.hypot(p.skip[0, S - 1] * p.stream_rms[0, S - 1], p.branch_rms[0, S - 1])  # type: ignore[index]
    if a.final_norm:
        rms = p.stream_rms[0, S]  # type: ignore[index]
    elif (row.then or row).norm_out:
        with precision.scope("float64"):
            rms = np.sqrt(norm_powers(a.norm, True, rms**2)[0])
    gradients, gradient_blocks = _extremes(p.log_exact[0, size : S + 1 : size])
    with np.errstate(divide="ignore"):
        log_weights, weight_blocks = _extremes(np.log(weights))
    return Figures(
        log_exact=float(p.log_exact[0, 0]),
        log_trunk=float(p.log_trunk[0, 0]),
        output_rms=float(rms),
        log_gradient_ratio=gradients,
        gradient_blocks=gradient_blocks,
        weight_ratio=float(np.exp(log_weights)),
        weight_blocks=weight_blocks,
    )


def _extremes(logs: np.ndarray) -> tuple[float, tuple[int, int] | None]:
    """Log of the largest over the smallest, and their blocks from 1."""
    if not np.isfinite(logs).all():
        return math.nan, None
    most, least = int(logs.argmax()), int(logs.argmin())
    return float(logs[most] - logs[least]), (most + 1, least + 1)


def table(found: Findings) -> Group:
    """Show the law's figures, then the findings, errors first; at most 100 columns."""
    a, figures = found.architecture, found.figures
    parts = [repr(a.file), a.model_type, f"{a.scheme}, {a.depth} blocks of {', '.join(a.block)}", f"d = {a.d}", a.norm]
    parts += ["final norm" if a.final_norm else "no final norm"]
    out = grid("Law at initialisation, one token", ("", "value", "largest at", "smallest at"))
    out.add_row("exact gain, output to input", number(figures.exact))
    out.add_row("trunk gain (F = 0)", number(figures.trunk))
    out.add_row("stream's rms at the output", number(figures.output_rms))
    for name, value, blocks in (
        ("gradients of two blocks, largest ratio", figures.gradient_ratio, figures.gradient_blocks),
        ("weight gradients of two blocks, largest ratio", figures.weight_ratio, figures.weight_blocks),
    ):
        out.add_row(name, number(value), *(f"block {block}" for block in blocks or ()))
    rows = Table.grid(padding=(0, 1, 0, 0))
    for finding in found.findings:
        style = "bold" if finding.level == "error" else ""
        rows.add_row(Text(finding.level, style), Text(finding.key, style), Text(finding.text))
    counts = {level: sum(finding.level == level for finding in found.findings) for level in LEVELS}
    said = ", ".join(f"{n} {level}{'s' * (n != 1)}" for level, n in counts.items() if n) or "nothing found"
    verdict = Text(f"{'Passed' if found.passed else 'Failed'}: {said}", style="bold")
    heading = Text(" · ".join(part for part in parts if part), style="dim")
    return Group(heading, "", out, *([rows, ""] if found.findings else []), verdict)
