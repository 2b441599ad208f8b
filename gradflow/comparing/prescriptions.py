"""Constants that a scheme prescribes at a depth, read off the catalogue's rows, and what they do there by the law.

A row holds the formulas of one stack in S. Written here is only what no row holds: the forms for an encoder with a decoder, in
N and M blocks, and Sub-LN. Constants: THEORY.md §5.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import sympy
from rich.console import Group
from rich.text import Text
from sympy import Rational, log, sqrt

from gradflow import checks
from gradflow.laws import law
from gradflow.report import grid, number
from gradflow.schemes import BY_NAME, S, Scheme, W, b, l

N, M = sympy.symbols("N M", positive=True, integer=True)
BRANCH = "mlp:relu"
LISTED, FOLLOWED, LARGEST = 1_000, 100_000, 10**15  # sub-layers: values in full; the law's effect; whole in a float


def _weights(row: Scheme, gain: sympy.Expr, alpha: sympy.Expr | None = None) -> Scheme:
    return replace(row, alpha=row.alpha if alpha is None else alpha, inner=gain, outer=gain)


DEEPNORM, T_FIXUP, ADMIN = (BY_NAME[name] for name in ("deepnorm", "t-fixup", "admin"))
SUB_LN = Scheme(
    "sub-ln",
    "Wang et al. 2022, Magneto (2210.06423)",
    "pre-LN with a second norm before each branch's last matrix",
    norm_in=True,
    inner=sqrt(log(S)),
    outer=sqrt(log(S)),
)
DEEP = (N**4 * M) ** Rational(1, 16)
TWO_STACKS = {
    "deepnorm": (
        _weights(DEEPNORM, Rational(87, 100) / DEEP, Rational(81, 100) * DEEP),
        _weights(DEEPNORM, (12 * M) ** Rational(-1, 4), (3 * M) ** Rational(1, 4)),
    ),
    "admin": (ADMIN, ADMIN),  # each stack is profiled from ω = 1, as in the authors' own profile
    "t-fixup": (
        _weights(T_FIXUP, Rational(67, 100) * N ** Rational(-1, 4)),
        _weights(T_FIXUP, (9 * M) ** Rational(-1, 4)),
    ),
    "sub-ln": (_weights(SUB_LN, sqrt(log(3 * M) * log(2 * N) / 3)), _weights(SUB_LN, sqrt(log(3 * M)))),
}
UNROUNDED = _weights(DEEPNORM, 27 ** Rational(1, 16) / sqrt(2) / DEEP, 27 ** Rational(-1, 16) * DEEP)

ACTS_ON = {
    "deepnorm": "alpha multiplies the skip in LN(alpha·x + f(x)); weight_gain multiplies both FFN matrices, W_V and W_O at "
    "initialisation (cross-attention's too), not W_Q and W_K",
    "admin": "alpha (the paper's ω) multiplies each sub-layer's skip in LN(alpha·x + f(x)). Listed for branches of unit "
    "variance: a profiling batch sets it, ω² = 1 + Σ Var f over the sub-layers before, variance over all elements; the effect "
    "is with its own branch's. closed_form needs no profile: one value for all sub-layers",
    "sub-ln": "weight_gain multiplies the FFN matrices, W_V and W_O at initialisation, not W_Q and W_K (the authors' code "
    "leaves cross-attention out); a norm stands before the branch and another before its last matrix",
    "t-fixup": "weight_gain multiplies the FFN matrices, W_V and W_O at initialisation, not W_Q and W_K; there is no norm. The "
    "paper scales the embeddings as well, by the decoder's gain",
    "fixup": "inner_gain multiplies a branch's matrices but the last at initialisation, last_gain its last one; there is no norm",
    "gpt2": "last_gain multiplies the standard deviation of each branch's last matrix (W_O, the FFN's second) at initialisation",
    "layerscale": "beta is the start of a learned diagonal gain on the branch's output",
    "rezero": "beta is the start of a learned scalar on the branch, so that J = I; there is no norm",
    "skipinit": "beta is the start of a learned scalar on the branch (0 is published too); there is no norm",
    "layernorm-scaling": "norm_scale multiplies the output of the norm before the branch, by the block's index from 1; "
    "sublayers= takes each sub-layer for a block",
    "keel": "alpha multiplies the skip in LN(alpha·x + f(LN x))",
    "ngpt": "alpha = 1 − a and beta = a weigh the state and the normalised branch in N(alpha·h + beta·N(f(h))); a is the start "
    "of a learned step",
    "residual-scaling": "beta multiplies the branch",
}


def constants(
    name: str,
    *,
    sublayers: int | None = None,
    encoder: int | None = None,
    decoder: int | None = None,
    matrices: int = 2,
) -> dict[str, Any]:
    """Give the constants that a scheme prescribes at a depth, where they act, and what they do there.

    One stack takes the catalogue's formula in S, its sub-layers: DeepNorm α = S^¼ and gain (4S)^−¼, the paper's (2N)^¼ and
    (8N)^−¼. An encoder of N blocks with a decoder of M takes the papers' other form: DeepNorm .81 (N⁴M)^{1/16} and
    .87 (N⁴M)^{−1/16}, (3M)^¼ and (12M)^−¼.

    Parameters
    ----------
    name : str
        A scheme with constants, from ``"admin"`` to ``"t-fixup"``.
    sublayers : int, optional
        S, for one stack.
    encoder, decoder : int, optional
        Transformer blocks. One of them alone is one stack of two sub-layers a block; with both, a decoder block has a third,
        cross-attention.
    matrices : int
        Matrices in a branch (Fixup).

    Returns
    -------
    dict
        JSON-ready. ``scheme``, ``source``, ``acts_on``; for one stack ``sublayers``, ``alpha`` (on the skip), where they are
        not 1 ``beta`` (on the branch), ``norm_scale``, ``weight_gain`` (all matrices) or ``inner_gain`` and ``last_gain``,
        then ``formula`` and ``effect``: end-to-end ``trunk`` and ``exact`` gain of a ReLU MLP stack under LayerNorm by
        `gradflow.law` (``None`` beyond 100,000 sub-layers and for Sub-LN). What changes with the sub-layer is a list, and
        beyond 1,000 its ``first`` and ``last``. For two stacks the same is under ``encoder`` and ``decoder``; rounded
        constants are as published, with ``alpha_unrounded`` and ``weight_gain_unrounded`` beside.

    Raises
    ------
    ValueError
        For an unknown name, a bad count, none or contradicting counts, or a form that no paper gives.
    """
    name = checks.one_of("name", name, ACTS_ON)
    row = SUB_LN if name == "sub-ln" else BY_NAME[name]
    if (m := checks.integer("matrices", matrices, 2)) != 2:
        row = _fixup(row, m)
    counts = _counts(sublayers, encoder, decoder)
    head = {"scheme": name, "source": row.source, "acts_on": ACTS_ON[name]}
    if len(counts) == 1:
        ((argument, count),) = counts.items()
        if name == "t-fixup" and argument == "decoder":
            raise ValueError(
                f"decoder: T-Fixup's decoder has cross-attention; give encoder= too, or encoder={count} for one stack"
            )
        if name == "sub-ln" and (argument, count) == ("sublayers", 1):
            raise ValueError(
                "sublayers: Sub-LN's gain √ln S is 0 for one sub-layer, which cuts the branch; needs at least 2"
            )
        size = 1 if argument == "sublayers" else 2
        return head | _stack(row, count * size, size)
    if name not in TWO_STACKS:
        raise ValueError(
            f"encoder, decoder: {name!r} has no published form for both; ask for each stack by itself, "
            f"sublayers={2 * counts['encoder']} and sublayers={3 * counts['decoder']}"
        )
    return head | _both(name, counts)


def rows(name: str, *, encoder: int, decoder: int) -> dict[str, Scheme]:
    """The schemes of an encoder of N blocks and of its decoder of M, for `gradflow.law`, `compare` and `Stack`.

    Parameters
    ----------
    name : {"deepnorm", "admin", "t-fixup"}
    encoder, decoder : int
        Transformer blocks: of two sub-layers, and of three with cross-attention.

    Returns
    -------
    dict of Scheme
        ``encoder`` and ``decoder``, named after their stack, with the constants that `constants` lists.

    Raises
    ------
    ValueError
        For a scheme without a row for two stacks (Sub-LN has a norm inside its branch), or a bad count.
    """
    name = checks.one_of("name", name, sorted(TWO_STACKS.keys() & BY_NAME.keys()))
    depths = {N: checks.integer("encoder", encoder, 1), M: checks.integer("decoder", decoder, 1)}
    stacks = zip(("encoder", "decoder"), TWO_STACKS[name], strict=True)
    return {stack: replace(_at(row, depths), name=f"{name} {stack}") for stack, row in stacks}


def _at(row: Scheme, depths: Any) -> Scheme:
    """The row with the N and M of its formulas filled in."""
    return replace(row, **{key: getattr(row, key).subs(depths) for key in ("alpha", "inner", "outer")})


def _both(name: str, counts: dict[str, int]) -> dict[str, Any]:
    """The answer for an encoder with a decoder."""
    depths = {N: counts["encoder"], M: counts["decoder"]}
    sizes = (("encoder", 2), ("decoder", 3))  # sub-layers in a block
    found: dict[str, dict[str, Any]] = {
        stack: {"blocks": counts[stack]} | _stack(row, counts[stack] * size, size, depths)
        for (stack, size), row in zip(sizes, TWO_STACKS[name], strict=True)
    }
    if name == "deepnorm":
        exact = {f"{key}_unrounded": expr for key, expr in _expressions(UNROUNDED).items()}
        found["encoder"] |= {key: _value(expr.subs(depths), 1, 1) for key, expr in exact.items()}
        found["encoder"]["formula"] |= {key: str(expr) for key, expr in exact.items()}
    return found


def _fixup(row: Scheme, matrices: int) -> Scheme:
    """Fixup for a branch of m matrices: S^{−1/(2m−2)}, the row's power shared by m − 1 matrices."""
    if row.name != "fixup":
        raise ValueError(f"matrices: only 'fixup' takes it, not {row.name!r}")
    source = row.source.replace("two matrices", f"{matrices} matrices")
    return replace(row, source=source, inner=row.inner ** Rational(1, matrices - 1))


def _counts(sublayers: int | None, encoder: int | None, decoder: int | None) -> dict[str, int]:
    """The counts that were given, by argument."""
    asked = {"sublayers": sublayers, "encoder": encoder, "decoder": decoder}
    given = {name: checks.integer(name, value, 1) for name, value in asked.items() if value is not None}
    if not given:
        raise ValueError("sublayers: give sublayers=S, or encoder=N and decoder=M in blocks, or one of these")
    if "sublayers" in given and len(given) > 1:
        raise ValueError("sublayers: counts one whole stack; give either it or encoder and decoder, not both")
    for name, value in given.items():
        if value > LARGEST:
            raise ValueError(f"{name}: needs a whole number of at most {LARGEST:,}, got {value!r}")
    return given


def _expressions(row: Scheme) -> dict[str, Any]:
    """The row's formulas under their public names, for branches of unit variance: Admin's W is l − 1."""
    same = row.inner == row.outer
    weights = {"weight_gain": row.inner} if same else {"inner_gain": row.inner, "last_gain": row.outer}
    rest = {"beta": row.beta, "norm_scale": row.scale} | weights
    found = {"alpha": row.alpha.subs(W, l - 1)} | {key: expr for key, expr in rest.items() if expr != 1}
    return found | ({"closed_form": BY_NAME["admin-closed"].alpha} if row.name == "admin" else {})


def _value(expr: Any, sublayers: int, size: int) -> float | list[float] | dict[str, float]:
    """A number, or one for each sub-layer where the formula changes along depth."""
    fixed = expr.subs(S, sublayers)
    if not fixed.has(l, b):
        return float(fixed)
    index = np.arange(1, sublayers + 1) if sublayers <= LISTED else np.array([1, sublayers])
    values = [float(v) for v in sympy.lambdify((l, b), fixed)(index, (index - 1) // size + 1)]
    return values if sublayers <= LISTED else dict(zip(("first", "last"), values, strict=True))


def _stack(row: Scheme, sublayers: int, size: int, depths: Any = ()) -> dict[str, Any]:
    """One stack's part of the answer; ``depths`` are the N and M of its formulas."""
    formulas = _expressions(row)
    effect = None
    if row.name in BY_NAME and sublayers <= FOLLOWED:
        profile = law(_at(row, depths), (BRANCH,) * size, depth=sublayers // size, norm="layernorm")
        effect = {"branch": BRANCH, "trunk": float(profile.trunk[0, 0]), "exact": float(profile.exact[0, 0])}
    return {
        "sublayers": sublayers,
        **{key: _value(expr.subs(depths), sublayers, size) for key, expr in formulas.items()},
        "formula": {key: str(expr) for key, expr in formulas.items() if not expr.is_number},
        "effect": effect,
    }


def table(found: dict[str, Any]) -> Group:
    """Show what `constants` returned: one column a stack, then the formulas and where they act."""
    stacks = {name: found[name] for name in ("encoder", "decoder") if name in found} or {"": found}
    out = grid(f"Constants of {found['scheme']}", ("", *(name or "value" for name in stacks)))
    words = ("scheme", "source", "acts_on", "formula", "effect")
    for key in dict.fromkeys(key for stack in stacks.values() for key in stack if key not in words):
        out.add_row(key, *(_cell(stack.get(key)) for stack in stacks.values()))
    for key in ("trunk", "exact"):
        if any(stack["effect"] for stack in stacks.values()):
            cells = [_cell(stack["effect"] and stack["effect"][key]) for stack in stacks.values()]
            out.add_row(f"{key} gain, {BRANCH} stack, by the law", *cells)
    formulas = [f"{name} {key} = {e}".strip() for name, stack in stacks.items() for key, e in stack["formula"].items()]
    return Group(out, *map(Text, formulas), Text(f"{found['acts_on']}."), Text(found["source"], style="dim"))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = {"first": value[0], "last": value[-1]}
    if isinstance(value, dict):
        return f"{number(value['first'])} … {number(value['last'])}"
    return str(value) if isinstance(value, int) else number(value)
