"""The rules of `gradflow.linting.lint`, one function each: what in a description contradicts the scheme that it names."""

import math
from collections.abc import Iterator

from gradflow.laws.leading import LENGTHS
from gradflow.linting.constants import (
    TOLERANCE,
    Case,
    Finding,
    alpha_of_the_catalogue,
    beta_of_the_catalogue,
    constants_of_two_stacks,
    near,
    weight_gain_of_the_catalogue,
)
from gradflow.report import number

SHALLOW = 12  # blocks up to which a pre-LN stream grows without a note


def alpha_without_output_norm(case: Case) -> Iterator[Finding]:
    """Nothing takes alpha out again."""
    for key in ("alpha", "decoder_alpha"):
        value = getattr(case.a, key)
        if case.row.norm_out or value is None or value == 1:  # 1 % off is much over depth
            continue
        if case.a.alpha_on == "branch":
            says = f"stands on the branch, where a factor is called beta: write beta = {value:g} and leave {key} out"
        else:
            grown = f"{value:g}^{case.a.sublayers} = 10^{case.a.sublayers * math.log10(value):.3g}"
            says = f"here multiplies the stream by {grown}: leave it at 1, or name a scheme with that norm, as deepnorm"
        yield Finding(
            "error", key, f"{key} = {value:g} belongs before an output norm, which {case.row.name} lacks, and {says}"
        )


def alpha_on_the_branch(case: Case) -> Iterator[Finding]:
    """DeepNorm and its kin strengthen the skip; alpha on the branch does the opposite."""
    if case.row.norm_out and case.row.alpha != 1 and case.a.alpha_on == "branch":
        equation = case.row.equation.replace("**", "^")
        yield Finding(
            "error",
            "alpha_on",
            f'alpha_on = "branch" contradicts {case.row.name}, {equation}: alpha strengthens the skip, and on the branch it '
            f"weakens it (trunk gain {number(case.figures.trunk)}); multiply x by alpha, not f(x)",
        )


def final_norm_missing(case: Case) -> Iterator[Finding]:
    """The skip of these schemes meets no norm on its way."""
    if case.a.norm != "none" and not case.a.final_norm and not case.last.norm_out and any(case.last.slots):
        yield Finding(
            "error",
            "final_norm",
            f"final_norm = false leaves {case.row.name}'s stream without any norm: by the law its rms {case.growth} at "
            f"the output; set final_norm = true",
        )


def final_norm_doubled(case: Case) -> Iterator[Finding]:
    """A norm of what a norm has just made."""
    if case.a.final_norm and case.last.norm_out and case.a.norm in LENGTHS:
        yield Finding(
            "warning",
            "final_norm",
            f"final_norm = true puts a norm behind {case.row.name}'s own output norm, where it does nothing (a no-op at "
            "initialisation, with a gain to learn twice); set final_norm = false",
        )


def residual_init(case: Case) -> Iterator[Finding]:
    """Without S^(−1/2) on the last matrices the stream grows with depth."""
    a, unit, figures = case.a, case.a.sublayers**-0.5, case.figures
    share = (1 if a.beta is None else a.beta) * (1 if a.output_gain is None else a.output_gain)
    if case.row.name == "gpt2" and a.output_gain is not None and not near(a.output_gain, unit):
        yield Finding(
            "error",
            "init.output_gain",
            f"output_gain = {a.output_gain:g} contradicts gpt2, which draws each branch's last matrix S^(-1/2) = {unit:.4g} "
            f"as large at {case.at}: by the law the stream's rms {case.growth}; set output_gain = "
            f"{unit:.4g}, or name the scheme pre-ln",
        )
    elif case.row.name == "gpt2" and a.init is not None:
        yield Finding(
            "note",
            "init",
            f"init is free text, which no rule reads, and the figures take gpt2's own, S^(-1/2) = {unit:.4g} on the last "
            f"matrices; init = {{output_gain = {unit:.4g}}} is checked",
        )
    elif case.row.name == "pre-ln" and a.depth > SHALLOW and share > unit * (1 + TOLERANCE):
        grown = f"by the law the stream's rms {case.growth} over {a.depth} blocks"
        if figures.weight_blocks:
            first, second = figures.weight_blocks
            grown += (
                f", and block {first}'s weight gradients are {number(figures.weight_ratio, 3)} times block {second}'s"
            )
        yield Finding(
            "note",
            "init",
            f"the residual init does not shrink with depth: {grown}; where that is not meant, draw the last matrices "
            f"S^(-1/2) = {unit:.4g} as large, init = {{output_gain = {unit:.4g}}}, as gpt2 does",
        )


def stacks(case: Case) -> Iterator[Finding]:
    """Which stack the figures are of."""
    a = case.a
    counts = {name: n for name in ("encoder", "decoder") if (n := getattr(a, name)) is not None}
    said = " and ".join(f"{name} = {n}" for name, n in counts.items())
    if counts and a.depth not in counts.values():
        yield Finding(
            "warning",
            "depth",
            f"depth = {a.depth} contradicts {said}: the figures are of one stack of {a.depth} blocks; leave depth out",
        )
    if len(counts) == 2:
        yield Finding(
            "note",
            "decoder",
            f"the figures are of one stack, {a.depth} blocks of {', '.join(a.block)}; the other stack needs a file of its "
            "own, a decoder's with cross-attention in its block",
        )


def attention_of_one_token(case: Case) -> Iterator[Finding]:
    """What the law takes attention for."""
    if any(name.startswith("attention") for name in case.a.block):
        yield Finding(
            "note",
            "block",
            "the law is at tokens = 1, where attention is W_O W_V; over many tokens it averages, adds less and returns less, "
            "so measure with gradflow.profile where that matters",
        )


def no_law(case: Case) -> Iterator[Finding]:
    """No number holds the stream, or no norm can stand where the branch is 0."""
    if case.a.output_gain == 0 and case.row.norm_branch:
        says = f"output_gain = 0 leaves {case.row.name}'s norm behind the branch nothing to divide; start its gain at 0 instead"
        yield Finding("error", "init.output_gain", says)
    elif not math.isfinite(case.figures.log_exact):
        reason = case.figures.refusal or "its gain is no finite number; check alpha, beta and the gains"
        yield Finding("error", "scheme", f"{case.row.name} has no law over {case.at}: {reason}")


def gradient_ratio(case: Case) -> Iterator[Finding]:
    """The bound that the caller asks for."""
    figures, most = case.figures, case.max_ratio
    if most is None or figures.gradient_blocks is None or figures.log_gradient_ratio <= math.log(most):
        return
    first, second = figures.gradient_blocks
    mend = "the branch, whose last matrices gpt2 draws S^(-1/2) as large"
    if case.last.norm_out:
        mend = "the branch against the skip, as deepnorm's alpha and weight_gain do"
    elif case.last.norm_branch:  # takes out what the matrices' gain puts in
        mend = "the gain of the branch's norm, beta = S^(-1/2)"
    yield Finding(
        "error",
        "max_ratio",
        f"by the law block {first} gets {number(figures.gradient_ratio)} times the gradient of block {second}, more than "
        f"max_ratio = {most:g}; weaken {mend}, or raise max_ratio",
    )


RULES = (
    alpha_without_output_norm,
    alpha_on_the_branch,
    alpha_of_the_catalogue,
    beta_of_the_catalogue,
    weight_gain_of_the_catalogue,
    constants_of_two_stacks,
    final_norm_missing,
    final_norm_doubled,
    residual_init,
    no_law,
    gradient_ratio,
    stacks,
    attention_of_one_token,
)
