"""The residual equation and its catalogue: one row of data is one scheme.

    x' = N_out( α x + β · N_branch( f( σ · N_in(x) ) ) )

A row says which slots hold a norm, and gives α, β, σ and the gains on the branch's matrices at initialisation as SymPy
expressions in l (the sub-layer, from 1), S (their number), b (the block, from 1) and W (the sum of q_f over the sub-layers
before l). Constants: THEORY.md §5; papers count transformer blocks of two sub-layers where the rows count S.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import sympy
from sympy import Integer, Piecewise, Rational, log, sqrt

from gradflow import checks

l, S, b = sympy.symbols("l S b", positive=True, integer=True)
W = sympy.Symbol("W", nonnegative=True)
ONE = Integer(1)


class Multipliers(NamedTuple):
    """A scheme's numbers for every sub-layer of a stack, arrays of one shape: what multiplies skip, branch, the input norm's
    output, and, at initialisation only, the branch's inner and last matrices.
    """

    alpha: Any
    beta: Any
    scale: Any
    inner: Any
    outer: Any


@dataclass(frozen=True)
class Scheme:
    """One row of the residual equation.

    Attributes
    ----------
    name, source, purpose : str
        The field's name for it, where it comes from, and a sentence on what it is for.
    norm_in, norm_branch, norm_out : bool
        Which slots of the equation hold a norm.
    alpha, beta, scale : sympy.Expr
        Multipliers of the skip, the branch and the input norm's output (σ).
    inner, outer : sympy.Expr
        Gains at initialisation on the branch's inner matrices (an MLP's first, attention's V) and on its last one, over
        unit-gain weights.
    until : sympy.Expr
        The fraction of blocks that the row holds for; ``then`` is the row of the others.
    """

    name: str
    source: str
    purpose: str
    norm_in: bool = False
    norm_branch: bool = False
    norm_out: bool = False
    alpha: sympy.Expr = ONE
    beta: sympy.Expr = ONE
    scale: sympy.Expr = ONE
    inner: sympy.Expr = ONE
    outer: sympy.Expr = ONE
    until: sympy.Expr = ONE
    then: "Scheme | None" = None

    @property
    def slots(self) -> tuple[bool, bool, bool]:
        """Whether a norm stands at the branch's input, at its output, and at the output."""
        return self.norm_in, self.norm_branch, self.norm_out

    @property
    def shape(self) -> "Scheme":
        """The slots alone: rows of one shape are the same row, and share a compilation."""
        blank = dict.fromkeys(Multipliers._fields, ONE) | {"name": "", "source": "", "purpose": ""}
        return replace(self, **blank, then=None if self.then is None else self.then.shape)

    @property
    def unit(self) -> bool:
        """Whether norms and matrices keep their unit gains."""
        own = all(getattr(self, name) == 1 for name in Multipliers._fields[2:])
        return own and (self.then is None or self.then.unit)

    @property
    def of_power(self) -> bool:
        """Whether a multiplier takes the branches' q_f."""
        return any(getattr(self, name).has(W) for name in Multipliers._fields)

    @property
    def equation(self) -> str:
        """The row's equation as text, read off the slots."""

        def norm(inside: str, present: bool) -> str:
            return f"N({inside})" if present else inside

        def times(factor: sympy.Expr, text: str) -> str:
            if factor == 1:
                return text
            return f"({factor})·{text}" if factor.is_Add or factor.is_Piecewise else f"{factor}·{text}"

        branch = norm(f"f({times(self.scale, norm('x', self.norm_in))})", self.norm_branch)
        whole = "x' = " + norm(f"{times(self.alpha, 'x')} + {times(self.beta, branch)}", self.norm_out)
        return whole if self.then is None else f"{whole}, b ≤ {self.until}·depth; then {self.then.equation}"

    def scaled(self, factor: sympy.Expr | float) -> "Scheme":
        """The same row with its branch multiplied by ``factor``, a number or an expression in the row's symbols."""
        return replace(self, name=f"{self.name} × {factor}", beta=self.beta * sympy.sympify(factor))

    def parts(self, depth: int) -> "list[tuple[slice, Scheme]]":
        """The blocks that each row holds for: one part, unless the placement changes along depth."""
        if self.then is None:
            return [(slice(0, depth), self)]
        cut = round(float(self.until) * depth)
        parts = [(slice(0, cut), replace(self, then=None)), (slice(cut, depth), self.then)]
        return [(part, row) for part, row in parts if part.start < part.stop]

    def multipliers(self, sublayers: int, powers: Sequence[float] = (1.0,)) -> Multipliers:
        """Every multiplier of every sub-layer, each of shape (S,).

        Parameters
        ----------
        powers : sequence of float
            q_f of each branch of a block at unit gain and unit input, in turn; Admin's ω takes it.
        """
        index, size = np.arange(1, sublayers + 1), len(powers)
        each = np.tile(np.asarray(powers, float), -(-sublayers // size))[:sublayers]
        before = np.cumsum(each) - each
        blocks = (index - 1) // size + 1
        found = np.empty((len(Multipliers._fields), sublayers))
        for part, row in self.parts(sublayers // size if self.then else 1):
            columns = slice(part.start * size, part.stop * size) if self.then else slice(None)
            for n, name in enumerate(Multipliers._fields):
                values = sympy.lambdify((l, S, b, W), getattr(row, name), modules="numpy")
                found[n, columns] = np.broadcast_to(values(index, sublayers, blocks, before), sublayers)[columns]
        return Multipliers(*found)


PRE_LN = Scheme(
    "pre-ln",
    "Xiong et al. 2020 (2002.04745)",
    "the norm feeds the branch alone: the identity path runs free",
    norm_in=True,
)

SCHEMES = (
    Scheme(
        "post-ln",
        "Vaswani et al. 2017 (1706.03762)",
        "every sub-layer ends in a norm, which sits on the identity path",
        norm_out=True,
    ),
    PRE_LN,
    Scheme(
        "sandwich",
        "Ding et al. 2021 (2105.13290); Peri-LN: Kim et al. 2025 (2502.02732); Gemma 2",
        "norms on both sides of the branch: each sub-layer adds the same power",
        norm_in=True,
        norm_branch=True,
    ),
    Scheme(
        "res-post-norm",
        "Liu et al. 2021, Swin v2 (2111.09883); OLMo 2 (2501.00656)",
        "the norm behind the branch, inside the skip: what is added has unit power whatever the branch does",
        norm_branch=True,
    ),
    Scheme(
        "deepnorm",
        "Wang et al. 2022 (2203.00555)",
        "post-LN with a stronger skip and weaker weights, for a bounded update at any depth",
        norm_out=True,
        alpha=S ** Rational(1, 4),
        inner=(4 * S) ** Rational(-1, 4),
        outer=(4 * S) ** Rational(-1, 4),
    ),
    Scheme(
        "admin",
        "Liu et al. 2020 (2004.08249)",
        "post-LN whose skip is as strong as pre-LN's stream would be at that depth",
        norm_out=True,
        alpha=sqrt(1 + W),
    ),
    Scheme(
        "admin-closed",
        "closed form √((S + 1)/ln(S + 1) − 1) of Admin's ω (2004.08249)",
        "Admin without its profiling pass: one ω for all sub-layers",
        norm_out=True,
        alpha=sqrt((S + 1) / log(S + 1) - 1),
    ),
    Scheme(
        "residual-scaling",
        "Hanin, Rolnick 2018 (1803.01719); Noci et al. 2022 (2206.03126)",
        "pre-LN with the branch divided by √S: the stream's power stays bounded",
        norm_in=True,
        beta=S ** Rational(-1, 2),
    ),
    Scheme(
        "gpt2",
        "Radford et al. 2019",
        "pre-LN whose output matrices are drawn 1/√S as large",
        norm_in=True,
        outer=S ** Rational(-1, 2),
    ),
    Scheme(
        "layernorm-scaling",
        "Sun et al. 2025 (2502.05795)",
        "pre-LN with the norm's output divided by √b, so that deep blocks add less",
        norm_in=True,
        scale=1 / sqrt(b),
    ),
    Scheme(
        "layerscale",
        "Touvron et al. 2021 (2103.17239)",
        "pre-LN with a small diagonal gain on the branch, smaller for deeper networks",
        norm_in=True,
        beta=Piecewise((Rational(1, 10), S <= 36), (Rational(1, 10**5), S <= 48), (Rational(1, 10**6), True)),
    ),
    Scheme(
        "rezero",
        "Bachlechner et al. 2020 (2003.04887)",
        "no norm; the branch starts at 0, so that J = I",
        beta=Integer(0),
    ),
    Scheme(
        "skipinit",
        "De, Smith 2020 (2002.10444)",
        "no norm; the branch starts at 1/√S",
        beta=S ** Rational(-1, 2),
    ),
    Scheme(
        "fixup",
        "Zhang et al. 2019 (1901.09321), two matrices a branch",
        "no norm; inner matrices scaled down, the last one 0",
        inner=S ** Rational(-1, 2),
        outer=Integer(0),
    ),
    Scheme(
        "t-fixup",
        "Huang et al. 2020, encoder: .67 N^(−1/4)",
        "no norm; the matrices of FFN, V and O scaled down",
        inner=Rational(67, 100) * (S / 2) ** Rational(-1, 4),
        outer=Rational(67, 100) * (S / 2) ** Rational(-1, 4),
    ),
    Scheme(
        "keel",
        "KEEL: Chen, Wei 2026 (2601.19895)",
        "post-LN with a skip as strong as the stack is deep, and a norm before the branch",
        norm_in=True,
        norm_out=True,
        alpha=S,
    ),
    Scheme(
        "ngpt",
        "Loshchilov et al. 2024 (2410.01131): N(h + a(N(F h) − h)), a = 0.05",
        "everything on the sphere: a small step from h towards the normalised branch",
        norm_branch=True,
        norm_out=True,
        alpha=Rational(19, 20),
        beta=Rational(1, 20),
    ),
    Scheme(
        "mix-ln",
        "Li et al. 2024 (2412.13795)",
        "post-LN in the first quarter of the blocks, pre-LN in the others",
        norm_out=True,
        until=Rational(1, 4),
        then=PRE_LN,
    ),
    Scheme("no-norm", "the skeleton without any norm", "what all the others mend: power (1 + q_f) a sub-layer"),
)

ALIASES = {"peri-ln": "sandwich", "olmo2": "res-post-norm", "swin-v2": "res-post-norm"}
BY_NAME = {row.name: row for row in SCHEMES}


def scheme_of(spec: str | Scheme) -> Scheme:
    """Return the catalogue's row of that name (or alias); a row of the user's own is returned as it is."""
    if isinstance(spec, Scheme):
        return spec
    name = checks.one_of("scheme", spec, (*BY_NAME, *ALIASES))
    return BY_NAME[ALIASES.get(name, name)]
