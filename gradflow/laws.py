"""The depth law as a `Profile`: closed forms from `gradflow.symbolic.depth`, evaluated without building the network.

A law knows the scheme, the branches' moments, depth and width, and nothing of any measured network.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import checks, precision, token_laws
from gradflow.branches import Branch, branches_of, memory_of, of_one_token, powers_of
from gradflow.factors import Profile, backward_sum, safe_log
from gradflow.inits import initialised
from gradflow.leading import LENGTHS, distinct, leading
from gradflow.numeric import to_jax
from gradflow.schemes import ONE, Multipliers, Scheme
from gradflow.streams import StreamScheme, any_scheme
from gradflow.symbolic import depth as symbolic
from gradflow.symbolic import moments as gaussian

ASSUMPTIONS = (
    "iid zero-mean Gaussian weights, unit-rms isotropic input, ε = 0, independent tokens, L ≪ d; typical (mean-log) values "
    "with the 1/d term; the spread is over networks"
)

NO_SKIP = "scheme: {!r} has α = 0, which leaves no skip path for a law to follow"

COSINES = ("token_cosine", "gradient_cosine", "input_gradient_cosine")
Rows = dict[str, jax.Array]
_NAMES = tuple(f.name for f in dataclasses.fields(symbolic.SublayerLaw))


@dataclasses.dataclass(frozen=True)
class Case:
    """A law's arguments, checked and resolved: the branches in turn, S values of each multiplier, d (∞: leading order)."""

    branches: tuple[Branch, ...]
    numbers: Multipliers
    output_norm: bool
    centred: float
    final: bool
    d: float
    tokens: int
    probes: float

    def moments(self, frozen: bool) -> Rows:
        """Moments of β·f for every sub-layer, each of shape (S,); frozen: of the same branch with F = 0."""
        found = {name: np.empty(len(self.alpha)) for name in symbolic.MOMENTS}
        for k, branch in enumerate(self.branches):
            mine = slice(k, None, len(self.branches))
            scale, inner, outer = (a[mine] for a in self.numbers[2:])
            rows, where = distinct(scale**2, inner, outer)
            at = branch.moments() if np.all(rows == 1) else moments_of(branch, rows, where)
            at = at.scaled(self.beta[mine] ** 2)
            for name in found:
                found[name][mine] = getattr(gaussian.frozen(at) if frozen else at, name)
        return {name: jnp.asarray(values) for name, values in found.items()}

    @property
    def alpha(self) -> np.ndarray:
        """Skip multipliers, (S,)."""
        return self.numbers.alpha

    @property
    def beta(self) -> np.ndarray:
        """Branch multipliers, (S,)."""
        return self.numbers.beta


def moments_of(branch: Branch, rows: np.ndarray, where: np.ndarray) -> gaussian.BranchMoments:
    """A branch's moments at each distinct (power, inner, outer), put where they belong."""
    leaves = [jnp.broadcast_to(leaf, len(rows)) for leaf in _moments_at(branch, jnp.asarray(rows))]
    columns: list[Any] = [np.asarray(leaf)[where] for leaf in leaves]
    return gaussian.BranchMoments(*columns)


@functools.partial(jax.jit, static_argnums=0)
def _moments_at(branch: Branch, rows: jax.Array) -> tuple:
    return jax.lax.map(lambda row: dataclasses.astuple(branch.moments_at(*row)), rows)


@functools.lru_cache
def _sublayer_law(output_norm: bool) -> Callable[..., tuple]:
    law = symbolic.output_norm() if output_norm else symbolic.input_norm()
    return to_jax(symbolic.SYMBOLS, dataclasses.astuple(law))


@functools.lru_cache
def _extras() -> tuple[Callable[..., tuple], Callable[..., tuple]]:
    return to_jax(symbolic.SYMBOLS, symbolic.response()), to_jax(symbolic.SYMBOLS, symbolic.outermost_norm())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _recursion(
    output_norm: bool, final: bool, moments: Rows, alpha: jax.Array, d: float, centred: float
) -> tuple[Rows, jax.Array]:
    """Forward for the stream, backward for the gradient's share along it; all terms, and (Q, M, v_Q) at the end."""
    law, columns = _sublayer_law(output_norm), tuple(moments[name] for name in symbolic.MOMENTS)

    def terms_at(row: tuple, a: jax.Array, state: Sequence[Any], radial: Any) -> Rows:
        return dict(zip(_NAMES, law(*row, a, d, centred, *state, radial), strict=True))

    def forward(state: tuple, inputs: tuple) -> tuple[tuple, tuple]:
        row, a = inputs
        terms = terms_at(row, a, state, 0.0)
        return tuple(jnp.asarray(terms[k], float) for k in ("next_Q", "next_mean", "next_var")), state

    def backward(radial: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        row, a, state = inputs
        return jnp.asarray(terms_at(row, a, state, radial)["next_radial"], float), radial

    start = (jnp.ones(()), jnp.zeros(()), jnp.zeros(()))
    last, states = jax.lax.scan(forward, start, (columns, alpha))
    first = jnp.asarray(0.0 if final else 1.0)  # a final norm leaves nothing along x
    _, radial = jax.lax.scan(backward, first, (columns, alpha, states), reverse=True)
    terms = {k: jnp.broadcast_to(v, alpha.shape) for k, v in terms_at(columns, alpha, states, radial).items()}
    return terms | {"Q": states[0], "radial": radial}, jnp.stack(last)


def _pooled(case: Case, terms: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Shifts of log norm and log branch from pooling over tokens and cotangents, and the variance that is left.

    A pooled power averages before the log is taken, which gains half of the variance that it averages away.
    """
    shared, own, norm = terms["spread_shared"], terms["spread_own"], terms["shift_norm"]
    over_tokens, over_both = 1 - 1 / case.tokens, 1 - 1 / (case.tokens * case.probes)
    shift_norm = norm * over_tokens / 2
    shift = (shared * over_tokens + own * over_both) / 2
    return shift_norm, shift - shift_norm, shared * (1 - over_tokens) + own * (1 - over_both)


@jax.jit
def _summed_response(tail: jax.Array, slope: jax.Array, alpha: jax.Array) -> jax.Array:
    """What noise in the stream at each sub-layer does to all later log gains; one step on it is worth α²."""
    return jax.lax.scan(lambda r, row: (row[0] + row[1] ** 2 * r, r), tail, (slope, alpha), reverse=True)[1]


def _stream_noise(case: Case, moments: Rows, terms: Rows, last: jax.Array) -> jax.Array:
    """Variance from the growing stream of an input-norm scheme: noise at one sub-layer moves every later gain."""
    states = (terms["Q"], jnp.zeros(()), jnp.zeros(()), terms["radial"])
    alpha = jnp.asarray(case.alpha)
    slope, noise, overlap = _extras()[0](*moments.values(), alpha, case.d, case.centred, *states)
    tail = -1 / last[0] if case.final else jnp.zeros(())
    lag = _summed_response(tail, slope, alpha)
    return (lag**2 * noise + 2 * lag * overlap) / case.tokens


def _curve(case: Case, frozen: bool) -> dict[str, np.ndarray]:
    """Rows of one vector: the gradient, or the trunk where F is frozen; ``sd`` is that of the cumulative log gain."""
    moments = case.moments(frozen)
    terms, last = _recursion(case.output_norm, case.final, moments, jnp.asarray(case.alpha), case.d, case.centred)
    shift_norm, shift_branch, variance = _pooled(case, terms)
    outside = _extras()[1](*[0.0] * len(symbolic.MOMENTS), 0.0, case.d, case.centred, *last, 0.0)
    log_outer, *isotropic = map(jnp.asarray, outside)
    shares = [terms["aligned"], terms["along_mean"]]
    if case.output_norm:
        # A norm finds what the sub-layer above hands down; the last one an isotropic cotangent, or, behind a final norm,
        # what that left: nothing, as both have the same û.
        above = [jnp.zeros(())] * 2 if case.final else isotropic
        shares = [jnp.append(share[1:], value) for share, value in zip(shares, above, strict=True)]
    else:
        variance = variance + _stream_noise(case, moments, terms, last)
    rows = {
        "aligned": shares[0],
        "along_mean": shares[1],
        "norm": jnp.exp((terms["log_norm"] + shift_norm) / 2),
        "skip": jnp.abs(jnp.asarray(case.alpha)),
        "branch": jnp.exp((terms["log_branch"] + shift_branch) / 2),
        "Q": terms["Q"],
        "q": moments["q"],
        "alpha": jnp.asarray(case.alpha),
    }
    if case.final:
        end = {
            "aligned": isotropic[0],
            "along_mean": isotropic[1],
            "norm": jnp.exp(log_outer / 2),
            "Q": last[0],
            "q": 0.0,
        }
        rows = {name: jnp.append(values, jnp.asarray(end.get(name, 1.0))) for name, values in rows.items()}
        variance = jnp.append(variance, 0.0)
    rows["projection"] = jnp.sqrt(1 - rows["aligned"] - rows["along_mean"])
    sd = jnp.sqrt(jnp.append(jnp.cumsum(variance[::-1])[::-1], 0.0)) / 2
    return {name: np.asarray(values) for name, values in rows.items()} | {"sd": np.asarray(sd)}


def law(
    scheme: str | Scheme | StreamScheme,
    block: str | Branch | Sequence[str | Branch] = ("mlp:relu",),
    depth: int = 24,
    *,
    d: int | None = None,
    norm: str = "layernorm",
    init: str = "unit",
    final_norm: bool = False,
    tokens: int = 1,
    token_cosine: float = 0.0,
    cotangent_cosine: float = 0.0,
    probes: float = 1,
) -> Profile:
    """Predict the profile of a stack at initialisation, without building it.

    Leading order: E‖g_in‖²/‖g_out‖² = (α² + β²χ_f)/(α² + β²q_f) for a norm at the output, and α² + β²χ_f/Q with
    Q' = α²Q + β²q_f for one at the branch's input (derived in ``derive("depth-law")``, with the 1/d terms).

    Parameters
    ----------
    scheme, block, depth
        A catalogue name or row; one branch or several per block; number of blocks.
    d : int, optional
        Width, for the weight gradients, and for the 1/d term and the spread over networks of the rows that have one length
        norm, at the output or the branch's input, and no norm or dropout within it; the others are of leading order.
        ``None`` is the leading order alone.
    norm : {"layernorm", "rms", "dyt", "none"}
        What fills the scheme's slots (ε = 0).
    init : {"unit", "xavier", "he", "gpt2", "torch"}
        Variance of the matrices before the scheme's own gains; torch's biases, of order 1/d, need ``d``.
    final_norm : bool
        Whether a norm follows the last sub-layer.
    tokens, probes
        Independent tokens and cotangents that are pooled; ``math.inf`` probes give the rms gain over all directions. For
        several tokens the spread is a lower bound where E φ ≠ 0 (ReLU, GELU, SiLU): the part of f that all tokens share
        does not average out (seen: 1.2 times for 4 GELU tokens, 1.5 on the trunk for 8). The typical values hold.
    token_cosine, cotangent_cosine : float
        Cosine of every two tokens of the input, and of the cotangents that they get. Where one is not 0, or attention mixes
        several tokens, the law follows their Gram, at leading order, without a spread (derived in ``derive("attention")``).

    Returns
    -------
    Profile
        One "seed" of typical values; ``sd_exact`` and ``sd_trunk`` state the spread of the log gain over networks.

    Raises
    ------
    ValueError
        For an unknown name, a bad size, or a scheme without a law.
    """
    row = any_scheme(scheme)
    if isinstance(row, StreamScheme):
        from gradflow import stream_law  # which stands on this module

        return stream_law.law(row, block, depth, d=d, norm=norm, final_norm=final_norm, tokens=tokens)
    tokens = checks.integer("tokens", tokens, 1)
    if isinstance(probes, bool) or not probes >= 1:
        raise ValueError(f"probes: needs a number of at least 1, got {probes!r}")
    checks.integer("depth", depth, 1)
    centred = float(checks.one_of("norm", norm, (*LENGTHS, "dyt", "none")) == "layernorm")
    width = np.inf if d is None else float(checks.integer("d", d, 2 + int(centred)))
    branches = blocks_of(initialised(branches_of(block), init, d), tokens)
    cosines = {"token_cosine": token_cosine, "cotangent_cosine": cotangent_cosine}
    for name, value in cosines.items():
        checks.cosine(name, value, tokens)
    if any(cosines.values()) or not all(b.tokenwise for b in branches):
        with precision.scope("float64"):
            return _of_tokens(row, branches, depth, d, norm, bool(final_norm), tokens, cosines)
    with precision.scope("float64"):
        powers = powers_of(branches) if row.of_power else [1.0] * len(branches)
        numbers = row.multipliers(depth * len(branches), powers)
        if not numbers.alpha.all():
            raise ValueError(NO_SKIP.format(row.name))
        for branch in branches:
            if hasattr(branch, "branches") and not hasattr(branch, "inner") and np.any(numbers.inner != 1):
                raise ValueError(f"block: {branch.name!r} has no inner matrix in some part, which {row.name!r} scales")
        case = Case(branches, numbers, row.norm_out, centred, bool(final_norm), width, tokens, probes)
        refined = d is not None and row.then is None and row.norm_in != row.norm_out and not row.norm_branch
        refined = refined and norm in LENGTHS
        refined = refined and all(getattr(branch, "refined", True) for branch in branches)
        first = leading(row, numbers, branches, depth, norm, case.final)
        if not refined:
            _in_range(row, first["Q"] + first["net"])
        curves = [_curve(case, frozen) if refined else _plain(first, frozen) for frozen in (False, True)]
    settings = {
        "what": "law",
        "scheme": row.name,
        "block": [b.name for b in branches],
        **memory_of(branches),
        "depth": depth,
        "d": d,
        "norm": norm,
        "init": init,
        "final_norm": case.final,
        "tokens": tokens,
        "order": "with the 1/d term" if refined else "leading",
        "assumptions": ASSUMPTIONS,
    }
    found = _profile(curves[0], curves[1], labels(len(numbers.alpha), case.final), settings)
    return _with_weights(found, first["weights"], tokens, d)


def _of_tokens(
    row: Scheme,
    branches: tuple[Branch, ...],
    depth: int,
    d: int | None,
    norm: str,
    final: bool,
    tokens: int,
    cosines: dict[str, float],
) -> Profile:
    """The law of tokens that a branch mixes, or that have a cosine."""

    def follow(numbers: Multipliers) -> dict[str, np.ndarray]:
        return token_laws.follow(row, numbers, branches, depth, norm, final, tokens, *cosines.values())

    sublayers, powers = depth * len(branches), [1.0] * len(branches)
    if row.of_power:  # as Admin does: one pass with ω = 1, to see the branches
        added = follow(dataclasses.replace(row, alpha=ONE).multipliers(sublayers))["added"]
        powers = added[:sublayers].reshape(depth, -1).mean(0).tolist()
    numbers = row.multipliers(sublayers, powers)
    if not numbers.alpha.all():
        raise ValueError(NO_SKIP.format(row.name))
    rows = follow(numbers)
    _in_range(row, rows["Q"] + rows["back"])
    settings = {
        "what": "law",
        "scheme": row.name,
        "block": [b.name for b in branches],
        **memory_of(branches),
        "depth": depth,
        "d": d,
        "norm": norm,
        "final_norm": final,
        "tokens": tokens,
        **cosines,
        "order": "leading",
        "assumptions": token_laws.ASSUMPTIONS,
    }
    curves = [_plain(rows | {"norm": rows[name]}, name == "trunk_norm") for name in ("norm", "trunk_norm")]
    found = _profile(curves[0], curves[1], labels(sublayers, final), settings)
    more = {name: rows[name][None] for name in ("stream_cosine", *COSINES)}
    return _with_weights(dataclasses.replace(found, **more), rows["weights"], tokens, d)


def _in_range(row: Scheme, values: np.ndarray) -> None:
    lost = ~np.isfinite(values)
    if lost.any():
        raise ValueError(
            f"depth: the stream of {row.name!r} leaves the range of float64 at sub-layer {int(lost.argmax()) + 1}; "
            "use fewer layers, a smaller residual scale, or a norm"
        )


def _with_weights(found: Profile, weights: np.ndarray, tokens: int, d: int | None) -> Profile:
    """With ‖dL/dW‖, where there is a width: a standard Gaussian cotangent has the power tokens·d, and W's gradient is v hᵀ, of
    power ‖v‖²·d per unit of ``weights``.
    """
    if d is None:
        return found
    log_power = safe_log(weights) + 2 * found.log_exact[0, 1:] + math.log(tokens) + 2 * math.log(d)
    with np.errstate(over="ignore"):
        return dataclasses.replace(found, weight_grad=np.exp(log_power / 2)[None])


def blocks_of(block: str | Branch | Sequence[str | Branch], tokens: int) -> tuple[Branch, ...]:
    """The branches of a block as the law knows them: of one token, attention is W_O W_V."""
    branches = branches_of(block)
    return of_one_token(branches) if tokens == 1 else branches


def _plain(rows: dict[str, np.ndarray], frozen: bool) -> dict[str, np.ndarray]:
    """The leading order as `_curve` has it; no share is along û, and nothing spreads."""
    zero = np.zeros_like(rows["Q"])
    skip = np.abs(rows["alpha"])
    return {
        "aligned": zero,
        "along_mean": zero,
        "projection": zero + 1,
        "norm": np.sqrt(rows["norm"]),
        "skip": skip,
        "branch": zero + 1 if frozen else np.sqrt(rows["back"]) / skip,
        "Q": rows["Q"],
        "q": rows["added"],
        "alpha": rows["alpha"],
    }


def _profile(
    exact: dict[str, np.ndarray], trunk: dict[str, np.ndarray], names: tuple[str, ...], settings: dict[str, Any]
) -> Profile:
    """Rows to a profile; on the trunk the branch factor is 1 by definition."""
    local = exact["projection"] * exact["norm"] * exact["skip"]
    bound = trunk["projection"] * trunk["norm"] * trunk["skip"]
    curves = {"exact": local * exact["branch"], "trunk": bound, "local": local, "bound": bound}
    # tiny, not 0, where a shrinking stream underflows: its cosine is 0 then
    with np.errstate(over="ignore"):
        skip_power = np.maximum(exact["alpha"] ** 2 * exact["Q"], np.finfo(float).tiny)
    figures = {
        "affine": np.ones_like(local),
        **{name: exact[name] for name in ("projection", "norm", "skip", "branch")},
        "net": curves["exact"],
        "stream_rms": np.sqrt(exact["Q"]),
        "branch_rms": np.sqrt(exact["q"]),
        "stream_cosine": np.sign(exact["alpha"]) / np.sqrt(1 + exact["q"] / skip_power),
        "alignment": np.sqrt(exact["aligned"]),
        "mean_component": np.sqrt(exact["along_mean"]),
        "trunk_projection": trunk["projection"],
        "trunk_alignment": np.sqrt(trunk["aligned"]),
        "radius_gain": trunk["norm"],
    }
    return Profile(
        labels=names,
        settings=settings,
        sd_exact=exact.get("sd"),
        sd_trunk=trunk.get("sd"),
        **{f"log_{name}": backward_sum(np.log(gains)[None]) for name, gains in curves.items()},
        **{name: values[None] for name, values in figures.items()},
    )


def labels(sublayers: int, final_norm: bool) -> tuple[str, ...]:
    """Row names: sub-layers from 1, then the final norm."""
    return tuple(map(str, range(1, sublayers + 1))) + (("final norm",) if final_norm else ())
