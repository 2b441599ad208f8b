"""Schemes that one residual stream cannot hold: one equation for all, and the catalogue of its rows.

    X' = N_out( R X + w ⊗ N_branch( f( N_in( rᵀ X ) ) ) ),        X of shape (n, tokens, d)

For every sub-layer, R (n × n) is what streams keep and swap, r (n) what reads the branch's input off them, w (n) what writes its
output to them; a row says which streams carry an output norm, by the sub-layer's place in the block. The input x is expanded to
e ⊗ x, and the output is Σ_i s_i X_i, where a stream may pass a norm first. The ordinary `gradflow.schemes.Scheme` is n = 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import sympy
from sympy import Integer, KroneckerDelta, Mod

from gradflow import checks, schemes
from gradflow.schemes import Scheme, l, scheme_of


class StreamNumbers(NamedTuple):
    """R, r and w of every sub-layer: residual (S, n, n), pre (S, n), post (S, n)."""

    residual: np.ndarray
    pre: np.ndarray
    post: np.ndarray


@dataclass(frozen=True)
class Written:
    """Numbers written down: for every place of the block R, r, w with entries in the sub-layer ``l``, from 1."""

    residual: tuple
    pre: tuple
    post: tuple

    def __call__(self, sublayers: int) -> StreamNumbers:
        """Evaluate them; places repeat along depth."""
        found = []
        for entries in (self.residual, self.pre, self.post):
            each = [sympy.lambdify(l, sympy.Array(place), "numpy") for place in entries]
            found.append(np.asarray([each[s % len(each)](s + 1) for s in range(sublayers)], np.float64))
        return StreamNumbers(*found)


@dataclass(frozen=True)
class Static:
    """Given matrices, the same at every sub-layer: R (n, n), r (n), w (n), as nested tuples."""

    residual: tuple
    pre: tuple
    post: tuple

    def __call__(self, sublayers: int) -> StreamNumbers:
        """Repeat them."""
        each = [np.asarray(a, np.float64) for a in (self.residual, self.pre, self.post)]
        return StreamNumbers(*(np.broadcast_to(a, (sublayers, *a.shape)) for a in each))


@dataclass(frozen=True)
class Manifold:
    """mHC's maps (2512.24880) of drawn logits, z ~ N(0, spread²) independently for every entry and sub-layer.

    R = Sinkhorn–Knopp of exp(z), r = sigmoid(z), w = 2 sigmoid(z). In the paper logits are learned functions of the stream;
    drawn ones stand for any trained state, and ``spread`` for how far it is from the uniform mixture (spread 0).
    """

    streams: int = 4
    spread: float = 1.0
    iterations: int = 20
    key: int = 0

    def __call__(self, sublayers: int) -> StreamNumbers:
        """Draw them, sub-layer by sub-layer, so that a deeper stack begins as a shallow one does."""
        n = self.streams
        logits = np.random.default_rng(self.key).standard_normal((sublayers, n + 2, n)) * self.spread
        pre, post = (1 / (1 + np.exp(-logits[:, n + k])) for k in (0, 1))
        return StreamNumbers(sinkhorn(np.exp(logits[:, :n]), self.iterations), pre, 2 * post)


def sinkhorn(matrix: np.ndarray, iterations: int = 20) -> np.ndarray:
    """Scale positive matrices (…, n, n) towards doubly stochastic ones: columns to sum 1, then rows, again and again.

    Sinkhorn, Knopp 1967; rows last, as in 2512.24880. Row sums are 1 to rounding, column sums as far as it has converged.
    """
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdims=True)
        matrix = matrix / matrix.sum(-1, keepdims=True)
    return matrix


class Place(NamedTuple):
    """What stands at one place of the block: norms at the branch's input and output, and which streams carry an output norm."""

    norm_in: bool
    norm_branch: bool
    norm_out: tuple[bool, ...]


@dataclass(frozen=True)
class StreamScheme:
    """One row of the equation of several streams.

    Attributes
    ----------
    name, source, purpose, equation : str
        As of a `Scheme`; the equation is text.
    numbers : callable
        S ↦ `StreamNumbers`.
    places : tuple of Place
        One for all sub-layers, or one for each branch of the block.
    expand, readout : tuple of float
        e and s, (n,).
    readout_norm : tuple of bool
        Which streams pass a norm before they are summed.
    joined : bool
        Whether the branches of a block read the same input and add up, as one sub-layer.
    qkv_norm : bool
        Whether attention norms its queries, keys and values.
    """

    name: str
    source: str
    purpose: str
    equation: str
    numbers: Callable[[int], StreamNumbers]
    places: tuple[Place, ...]
    expand: tuple[float, ...] = (1.0,)
    readout: tuple[float, ...] = (1.0,)
    readout_norm: tuple[bool, ...] = (False,)
    joined: bool = False
    qkv_norm: bool = False
    unit = True  # as of a `Scheme`: norms and matrices keep their unit gains

    @property
    def streams(self) -> int:
        """n."""
        return len(self.expand)

    def place(self, k: int) -> Place:
        """Of a block's k-th branch."""
        return self.places[k % len(self.places)]


class Composite(NamedTuple):
    """How far ∏R alone can stretch what enters sub-layer l, (S,) each: mHC's "Amax gain magnitudes" (2512.24880).

    ``forward`` is the largest |row sum| of R_S ⋯ R_l, ``backward`` the largest |column sum|.
    """

    forward: np.ndarray
    backward: np.ndarray


def composite(row: StreamScheme, sublayers: int) -> Composite:
    """The gains of the composite map of a row's residual matrices; exact powers of two are not taken out: n is small."""
    maps = row.numbers(checks.integer("sublayers", sublayers, 1)).residual
    product, forward, backward = np.eye(row.streams), [], []
    for residual in maps[::-1]:
        product = product @ residual
        forward.append(np.abs(product.sum(1)).max())
        backward.append(np.abs(product.sum(0)).max())
    return Composite(np.asarray(forward[::-1]), np.asarray(backward[::-1]))


def hyper_connections(residual: Any, pre: Any, post: Any, name: str = "hyper-connections given") -> StreamScheme:
    """Hyper-connections with static matrices of one's own, pre-norm: X' = R X + w ⊗ f(N(rᵀX)).

    Parameters
    ----------
    residual, pre, post : array-like
        R (n, n), r (n,) and w (n,). The paper's A_r is Rᵀ, its A_m r, its B w.

    Raises
    ------
    ValueError
        For shapes that do not fit, or entries that are no finite real numbers.
    """
    arrays = {"residual": residual, "pre": pre, "post": post}
    found = {argument: checks.real_array(f"{argument}:", value) for argument, value in arrays.items()}
    n = len(found["pre"]) if found["pre"].ndim == 1 else 0
    for argument, shape in {"pre": (n,), "post": (n,), "residual": (n, n)}.items():
        if not n or found[argument].shape != shape:
            raise ValueError(f"{argument}: needs shape {shape if n else '(n,)'}, got {found[argument].shape}")
    static = Static(*(_tuples(found[argument].tolist()) for argument in arrays))
    return _hyper(name, "Zhu et al. 2024 (2409.19606)", "hyper-connections with given static matrices", static, n)


def manifold(streams: int = 4, spread: float = 1.0, key: int = 0, name: str = "mhc") -> StreamScheme:
    """Manifold-constrained hyper-connections of drawn logits (`Manifold`)."""
    n = checks.integer("streams", streams, 1)
    if isinstance(spread, bool) or not 0 <= spread < np.inf:
        raise ValueError(f"spread: needs a finite number of at least 0, got {spread!r}")
    purpose = (
        "hyper-connections whose residual matrix is doubly stochastic, so that no product of them grows; drawn logits"
    )
    source = "mHC: DeepSeek 2025 (2512.24880)"
    return _hyper(name, source, purpose, Manifold(n, float(spread), key=checks.key(key)), n)


def _hyper(name: str, source: str, purpose: str, numbers: Callable[[int], StreamNumbers], n: int) -> StreamScheme:
    """n copies of the input, read out as their mean: the papers' sum, over n; the final norm takes no notice of n."""
    equation = "X' = R X + w ⊗ f(N(rᵀX))"
    return StreamScheme(
        *(name, source, purpose, equation, numbers, (Place(True, False, (False,) * n),)),
        expand=(1.0,) * n,
        readout=(1.0 / n,) * n,
        readout_norm=(False,) * n,
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_HYPER = 4
_ONE, _TWO = ((1,),), ((1, 0), (0, 1))

STREAM_SCHEMES = (
    StreamScheme(
        "parallel",
        "GPT-J: Wang, Komatsuzaki 2021; GPT-NeoX: Black et al. 2022 (2204.06745); PaLM: Chowdhery et al. 2022 (2204.02311)",
        "pre-LN whose attention and MLP read the same normed input and are added at once",
        "x' = x + attn(N(x)) + mlp(N(x))",
        Written((_ONE,), ((1,),), ((1,),)),
        (Place(True, False, (False,)),),
        joined=True,
    ),
    StreamScheme(
        "b2t",
        "Takase et al. 2022 (2206.00330)",
        "post-LN with a connection from the block's input to its last norm, which passes the norms between",
        "y = N(x + attn(x)), x' = N(x + y + mlp(y))",
        # the second stream holds the block's input from its first sub-layer to its last, and is 0 between blocks
        Written((((1, 0), (1, 0)), ((1, 1), (0, 0))), ((1, 0), (1, 0)), ((1, 0), (1, 0))),
        (Place(False, False, (True, False)), Place(False, False, (True, False))),
        expand=(1.0, 0.0),
        readout=(1.0, 0.0),
        readout_norm=(False, False),
    ),
    StreamScheme(
        "hybridnorm",
        "Zhuo et al. 2025 (2503.04598)",
        "norms on Q, K and V inside attention, none on its skip; one norm before the MLP and its skip part",
        "y = x + attn_QKV(x), x' = N(y) + mlp(N(y))",
        # the norm before the split is the output norm of the sub-layer below it
        Written((_ONE,), ((1,),), ((1,),)),
        (Place(False, False, (True,)), Place(False, False, (False,))),
        qkv_norm=True,
    ),
    StreamScheme(
        "residual",
        "ResiDual: Xie et al. 2023 (2304.14802)",
        "a post-LN stream that feeds the branches, and a pre-LN stream that only gathers what they add",
        "x' = N(x + f(x)), y' = y + f(x); at the end x + N(y)",
        Written((_TWO,), ((1, 0),), ((1, 1),)),
        (Place(False, False, (True, False)),),
        expand=(1.0, 1.0),
        readout=(1.0, 1.0),
        readout_norm=(False, True),
    ),
    _hyper(
        "hyper-connections",
        "Zhu et al. 2024 (2409.19606)",
        "four streams that learn what to read and write; at initialisation R = I, w = 1, r = e_(l mod 4): pre-LN, four times",
        Written(
            (tuple(tuple(int(i == j) for j in range(_HYPER)) for i in range(_HYPER)),),
            (tuple(KroneckerDelta(Mod(l - 1, _HYPER), Integer(i)) for i in range(_HYPER)),),
            ((1,) * _HYPER,),
        ),
        _HYPER,
    ),
    manifold(),
)

ALIASES = {"hc": "hyper-connections", "gpt-j": "parallel", "palm": "parallel"}
BY_NAME = {row.name: row for row in STREAM_SCHEMES}


def any_scheme(spec: str | Scheme | StreamScheme) -> Scheme | StreamScheme:
    """The row of that name, of one stream or of several; a row of the user's own is returned as it is."""
    if isinstance(spec, Scheme | StreamScheme):
        return spec
    known: Sequence[str] = (*schemes.BY_NAME, *schemes.ALIASES, *BY_NAME, *ALIASES)
    name = checks.one_of("scheme", spec.lower() if isinstance(spec, str) and spec.lower() in BY_NAME else spec, known)
    return BY_NAME[ALIASES.get(name, name)] if name in BY_NAME or name in ALIASES else scheme_of(name)
