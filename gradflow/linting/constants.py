"""Rules of `gradflow.linting.lint` on the constants: alpha, beta and weight_gain against the catalogue's at that S."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradflow.comparing.prescriptions import TWO_STACKS, M
from gradflow.linting.architectures import Architecture
from gradflow.report import number
from gradflow.schemes import SCHEMES, Multipliers, S, Scheme

if TYPE_CHECKING:
    from gradflow.linting.lint import Figures

TOLERANCE = 0.01  # papers round their constants to two digits, and so do configs
SLOTS = {"alpha": "alpha", "weight_gain": "outer"}
# (scheme, key) -> how the constant is written: an encoder's and a decoder's, one stack's of N blocks, and of S sub-layers
FORMS = {
    ("deepnorm", "alpha"): (".81(N^4 M)^(1/16)", "(3M)^(1/4)", "(2N)^(1/4)", "S^(1/4)"),
    ("deepnorm", "weight_gain"): (".87(N^4 M)^(-1/16)", "(12M)^(-1/4)", "(8N)^(-1/4)", "(4S)^(-1/4)"),
    ("t-fixup", "weight_gain"): (".67N^(-1/4)", "(9M)^(-1/4)", ".67N^(-1/4)", ".67(S/2)^(-1/4)"),
}


class Finding(NamedTuple):
    """``level`` is error, warning or note; ``key`` the file's; ``text`` says what contradicts what, and the way out."""

    level: str
    key: str
    text: str


@dataclass(frozen=True)
class Case:
    """What a rule sees: the file, its scheme's row, that row's numbers at S, both rows of two stacks, the law's figures."""

    a: Architecture
    row: Scheme
    numbers: Multipliers
    stacks: tuple[Scheme, ...]
    figures: "Figures"
    max_ratio: float | None

    @property
    def last(self) -> Scheme:
        """The row of the last block."""
        return self.row.then or self.row

    @property
    def at(self) -> str:
        """Depth in both counts."""
        return f"S = {self.a.sublayers} sub-layers ({self.a.depth} blocks of {len(self.a.block)})"

    @property
    def growth(self) -> str:
        """What becomes of the stream's rms."""
        rms = self.figures.output_rms
        return f"goes from 1 to {number(rms)}" if math.isfinite(rms) else "leaves float64"


def near(stated: float, meant: Any) -> bool:
    """Whether a stated number is that constant, rounded."""
    return math.isclose(stated, float(meant), rel_tol=TOLERANCE)


def _of(case: Case, key: str, meant: float) -> str:
    """The catalogue's constant: whose, formula, value, and the S that it is for."""
    expr = getattr(case.row, SLOTS.get(key, key))
    written = str(expr).replace("**", "^").replace("*", "·")
    if (case.row.name, key) in FORMS:
        written = FORMS[case.row.name, key][3]
    return f"{case.row.name}'s {'' if expr.is_number else f'{written} = '}{meant:.4g} at {case.at}"


def _readings(case: Case, key: str) -> Iterator[tuple[str, float]]:
    """Constants that a number might be instead: the right formula with the wrong count, or another scheme's."""
    blocks, sublayers, name = case.a.depth, case.a.sublayers, case.row.name
    if (name, key) in FORMS:
        _, second, one, _ = FORMS[name, key]
        stack = getattr(case.row, SLOTS[key])
        yield f"{one} with {blocks} for 2N, which is S = {sublayers}", stack.subs(S, blocks)
        yield f"{one} with {sublayers} for N, which counts blocks of two sub-layers", stack.subs(S, 2 * sublayers)
        yield f"{second}, of an encoder-decoder's decoder", getattr(TWO_STACKS[name][1], SLOTS[key]).subs(M, blocks)
    for other in SCHEMES:
        constant = getattr(other, key).subs(S, sublayers) if key in Multipliers._fields else None
        if other.slots == case.row.slots and constant is not None and constant.is_number:
            yield f"{other.name}'s", constant


def _instead(case: Case, key: str, value: float) -> str:
    return next((f" but {words}" for words, meant in _readings(case, key) if near(value, meant)), "")


def alpha_of_the_catalogue(case: Case) -> Iterator[Finding]:
    """One stack's alpha."""
    value, meant = case.a.alpha, case.numbers.alpha
    if value is None or not case.row.norm_out or case.stacks:
        return
    if not np.allclose(meant, meant[0]):
        yield Finding(
            "error",
            "alpha",
            f"alpha = {value:g} is one number where {case.row.name}'s goes from {meant[0]:.4g} to {meant[-1]:.4g} over "
            f"{case.at}; leave it out and set it per sub-layer, or name {case.row.name}-closed",
        )
    elif not near(value, meant[0]):
        yield Finding(
            "error",
            "alpha",
            f"alpha = {value:g} is not {_of(case, 'alpha', meant[0])}"
            f"{_instead(case, 'alpha', value)}; set alpha = {meant[0]:.4g}",
        )


def beta_of_the_catalogue(case: Case) -> Iterator[Finding]:
    """The branch's multiplier; often learned, hence no error."""
    value, meant = case.a.beta, float(case.numbers.beta[0])
    if value is not None and not near(value, meant):
        yield Finding(
            "warning",
            "beta",
            f"beta = {value:g} is not {_of(case, 'beta', meant)}"
            f"{_instead(case, 'beta', value)}; set beta = {meant:.4g}, or name the scheme that has it",
        )


def weight_gain_of_the_catalogue(case: Case) -> Iterator[Finding]:
    """One stack's gain at initialisation, without which alpha alone does half the work."""
    value, meant = case.a.weight_gain, float(case.numbers.outer[0])
    if case.row.inner == 1 or case.row.inner != case.row.outer or case.stacks:
        return
    right = _of(case, "weight_gain", meant)
    if value is None:
        yield Finding(
            "warning",
            "weight_gain",
            f"weight_gain is not given, and at initialisation FFN, V and O need {right}, which the figures take for granted; "
            f"set weight_gain = {meant:.4g}",
        )
    elif not near(value, meant):
        yield Finding(
            "error",
            "weight_gain",
            f"weight_gain = {value:g} is not {right}{_instead(case, 'weight_gain', value)}; set "
            f"weight_gain = {meant:.4g}",
        )


def constants_of_two_stacks(case: Case) -> Iterator[Finding]:
    """An encoder with a decoder has constants of its own."""
    a, name = case.a, case.row.name
    for key, slot in SLOTS.items():
        if not case.stacks or (name, key) not in FORMS:
            continue
        encoder, decoder = (float(getattr(row, slot)) for row in case.stacks)
        first, second, one, _ = FORMS[name, key]
        right = f"the encoder needs {first} = {encoder:.4g} and the decoder {second} = {decoder:.4g}"
        mend = f"set {key} = {encoder:.4g} and decoder_{key} = {decoder:.4g}"
        given = {k: v for k in (key, f"decoder_{key}") if (v := getattr(a, k)) is not None}
        says = ", ".join(f"{k} = {v:g}" for k, v in given.items())
        if not given:
            if key == "weight_gain":
                says = f"{key} is not given, and {name} has one for each stack"
                yield Finding("warning", key, f"{says}: {right}; {mend}")
            continue
        shared = given.get(f"decoder_{key}", given.get(key, decoder))
        if near(given.get(key, encoder), encoder) and near(shared, decoder):
            continue
        whose = [k for k, v in (("encoder", encoder), ("decoder", decoder)) if near(shared, v)]
        if whose and list(given) == [key]:
            yield Finding("warning", key, f"{says} is for the {whose[0]} alone: {right}; {mend}")
            continue
        n, m, value = a.encoder or 0, a.decoder or 0, next(iter(given.values()))
        hit = next((k for k in (n, m, n + m) if near(value, getattr(case.row, slot).subs(S, 2 * k))), None)
        says += f" is {one} of one stack of {hit} blocks" if hit else " is not that of two stacks"
        yield Finding("error", key, f"{says}: with {n} encoder and {m} decoder blocks {right}; {mend}")
