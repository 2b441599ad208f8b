"""End-to-end powers in closed form, where the leading-order recursion telescopes: degree-1 branches, χ = q (Euler).

Each row's sub-layer factor is a ratio Q_l/Q_{l−1} of one sequence, proved from `gradflow.symbolic.depth.LeadingLaw` by
induction over l; hence the product over S sub-layers is Q_S/Q_0.
"""

# SymPy's annotations want an iterable of pairs where its documentation has a dict.
# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass

import sympy
from sympy import Eq, Expr, Function, Integer, Rational, harmonic

from gradflow.symbolic import depth
from gradflow.symbolic.derivation import Derivation, Step

l, S = sympy.symbols("l S", positive=True, integer=True)
q = depth.q


@dataclass(frozen=True)
class Telescope:
    """One row: its slots and multipliers at sub-layer l, and the sequence whose ratio is the sub-layer's power factor.

    Attributes
    ----------
    stream, added : Expr
        Power of the stream as it enters sub-layer l, and of the branch's own output (before β and an inner norm).
    sequence : Expr
        Q_l, in l, S and q.
    of_trunk : bool
        Whether it is the trunk's factor that telescopes (else the exact gradient's).
    """

    sequence: Expr
    stream: Expr
    added: Expr = q
    norm_in: bool = False
    norm_branch: bool = False
    norm_out: bool = False
    alpha: Expr = Integer(1)
    beta: Expr = Integer(1)
    of_trunk: bool = False

    def factor(self) -> Expr:
        """The sub-layer's power factor, from the leading law at these slots."""
        one, law = Integer(1), depth.LeadingLaw()
        into = one if self.norm_in else self.stream
        at = {
            depth.alpha: self.alpha,
            depth.beta: self.beta,
            depth.sigma: one,
            depth.Q: self.stream,
            depth.fed: into,
            depth.chi: self.added,  # degree 1: χ = q at the same input
            depth.d_in: 1 / self.stream if self.norm_in else one,
            depth.n_branch: one if self.norm_branch else self.added,
            depth.d_branch: 1 / self.added if self.norm_branch else one,
        }
        total = law.total.subs(at)
        at[depth.d_out] = 1 / total if self.norm_out else one
        return sympy.simplify((law.trunk if self.of_trunk else law.net).subs(at))

    def end_to_end(self) -> Expr:
        """The product over l = 1 … S."""
        return sympy.simplify(self.sequence.subs(l, S) / self.sequence.subs(l, 0))

    def gap(self) -> Expr:
        """What the factor and the ratio of the sequence differ by: 0."""
        return sympy.simplify((self.factor() - self.sequence / self.sequence.subs(l, l - 1)).rewrite(sympy.gamma))


def _pre(sequence: Expr, **options: Expr | bool) -> Telescope:
    return Telescope(sequence, sequence.subs(l, l - 1), norm_in=True, **options)  # type: ignore[arg-type]


DEEPNORM_ALPHA = S ** Rational(1, 4)
DEEPNORM_GAIN = (4 * S) ** Rational(-1, 4)

ROWS: dict[str, Telescope] = {
    "post-ln": Telescope(Integer(1) + 0 * l, Integer(1), norm_out=True),
    "post-ln trunk": Telescope((1 + q) ** (-l), Integer(1), norm_out=True, of_trunk=True),
    "pre-ln": _pre(1 + q * l),
    "sandwich": _pre(1 + l + 0 * q, norm_branch=True),
    "residual-scaling": _pre(1 + q * l / S, beta=S ** Rational(-1, 2)),
    "layernorm-scaling": _pre(1 + q * harmonic(l), added=q / l),
    "no-norm": Telescope((1 + q) ** l, (1 + q) ** (l - 1), added=q * (1 + q) ** (l - 1)),
    "admin trunk": Telescope(
        1 / (1 + q * l), Integer(1), norm_out=True, alpha=sympy.sqrt(1 + q * (l - 1)), of_trunk=True
    ),
    "deepnorm trunk": Telescope(
        (1 + q * DEEPNORM_GAIN**4 / DEEPNORM_ALPHA**2) ** (-l),
        Integer(1),
        q * DEEPNORM_GAIN**4,
        norm_out=True,
        alpha=DEEPNORM_ALPHA,
        of_trunk=True,
    ),
}


def end_to_end(name: str) -> Expr:
    """Power of a row's end-to-end gain at leading order, in S and q_f = χ_f; ``NAME trunk`` is the worst case χ = 0.

    Raises
    ------
    ValueError
        For a row that does not telescope.
    """
    from gradflow.checks import one_of

    return ROWS[one_of("name", name, ROWS)].end_to_end()


def derivation() -> Derivation:
    """End-to-end powers of the rows that telescope."""
    Q = Function("Q")
    names = {
        "pre-ln": "Pre-LN",
        "sandwich": "Sandwich",
        "layernorm-scaling": "LayerNorm Scaling",
        "admin trunk": r"Admin, $\chi = 0$",
    }
    steps = (
        Step(
            r"For degree 1, $\chi = q$ (Euler): behind an output norm the factor is 1, so post-LN's power is 1 at any depth; "
            "of it the norm alone takes",
            Eq(sympy.Symbol("norm"), 1 / (1 + q)),
        ),
        Step(
            r"which at q = 1/2 (ReLU) is Xiong's factor $2/3$; the branch, which it leaves out, returns",
            Eq(sympy.Symbol("branch"), 1 + q),
        ),
        Step(
            "Behind an input norm the factor is the ratio of two powers of the stream:",
            Eq(1 + q / Q(l - 1), Q(l) / Q(l - 1)),
        ),
        *(Step(f"{title}:", Eq(sympy.Symbol("G"), end_to_end(name))) for name, title in names.items()),
        Step(
            r"DeepNorm's worst case, with $\alpha^2 = S^{1/2}$ and gains $(4S)^{-1/4}$, and for large S:",
            Eq(sympy.Symbol("G"), sympy.exp(-q / (4 * sympy.sqrt(S)))),
        ),
    )
    tests = (
        ("every factor is the ratio of its sequence, symbolic l", lambda _: _induction()),
        ("DeepNorm's worst case is exp(-q/(4 sqrt S)) for large S", _deepnorm),
        ("against the numeric recursion at S = 1, 5, 24", lambda _: _numeric()),
    )
    claim = (
        r"For branches of degree 1 the leading-order power telescopes: post-LN 1, pre-LN $1 + S q$, Sandwich $1 + S$, "
        "LayerNorm Scaling 1 + q H_S; with F = 0 Admin 1/(1 + S q), a power law where post-LN has an exponential one."
    )
    assumed = ("iid zero-mean weights", "degree-1 branches, so that chi = q", "leading order in 1/d")
    result = Eq(sympy.Symbol("G"), end_to_end("pre-ln"))
    return Derivation("end-to-end", "End-to-end powers that telescope", claim, assumed, steps, result, tests)


def _induction() -> tuple[bool, str]:
    gaps = {}
    for name, row in ROWS.items():
        gap = row.gap()
        if gap != 0:  # harmonic numbers: H_l − H_{l−1} = 1/l
            gap = sympy.simplify(gap.subs(harmonic(l), harmonic(l - 1) + 1 / l))
        gaps[name] = gap
    return all(gap == 0 for gap in gaps.values()), f"{len(gaps)} rows, differences {set(gaps.values())}"


def _deepnorm(_: Derivation) -> tuple[bool, str]:
    exponent = sympy.log(end_to_end("deepnorm trunk")) * sympy.sqrt(S)
    limit = sympy.limit(sympy.expand_log(exponent, force=True).subs(q, Rational(1, 2)), S, sympy.oo)
    return limit == Rational(-1, 8), f"sqrt S log G tends to {limit} at q = 1/2"


def _numeric() -> tuple[bool, str]:
    from gradflow.branches import Linear
    from gradflow.laws import law

    worst = 0.0
    for name, row in ROWS.items():
        scheme, _, what = name.partition(" ")
        for size in (1, 5, 24):
            found = getattr(law(scheme, Linear(0.75), size), what or "exact")[0, 0] ** 2
            gain = 1.0
            if scheme == "deepnorm":  # a linear branch has one matrix: it carries the gain once, not twice
                gain = float(1 / DEEPNORM_GAIN.subs(S, size) ** 2)
            wanted = float(row.end_to_end().subs({q: 0.75**2 * gain, S: size}))
            worst = max(worst, abs(found / wanted - 1))
    return worst < 1e-12, f"largest relative difference {worst:.1e}"
