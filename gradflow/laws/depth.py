"""The depth law as a `Profile`: closed forms from `gradflow.symbolic.depth`, evaluated without building the network.

A law knows the scheme, the branches' moments, depth and width, and nothing of any measured network.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradflow import checks, precision
from gradflow.branches import Branch, branches_of, memory_of, of_one_token, powers_of
from gradflow.factors import Profile, backward_sum, safe_log
from gradflow.inits import initialised
from gradflow.laws import tokens as token_laws
from gradflow.laws.finite_width import Case, curve
from gradflow.laws.leading import LENGTHS, leading
from gradflow.schemes import ONE, Multipliers, Scheme
from gradflow.streams import StreamScheme, any_scheme

ASSUMPTIONS = (
    "iid zero-mean Gaussian weights, unit-rms isotropic input, ε = 0, independent tokens, L ≪ d; typical (mean-log) values "
    "with the 1/d term; the spread is over networks"
)

NO_SKIP = "scheme: {!r} has α = 0, which leaves no skip path for a law to follow"

COSINES = ("token_cosine", "gradient_cosine", "input_gradient_cosine")


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
        from gradflow.streams import law as stream_law

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
        curves = [curve(case, frozen) if refined else _plain(first, frozen) for frozen in (False, True)]
    order, said = "with the 1/d term" if refined else "leading", ASSUMPTIONS
    settings = about(row, branches, depth, d, norm, case.final, tokens, init=init, order=order, assumptions=said)
    found = _profile(curves[0], curves[1], labels(len(numbers.alpha), case.final), settings)
    return with_weights(found, first["weights"], tokens, d)


def about(
    row: Scheme | StreamScheme,
    branches: Sequence[Branch],
    depth: int,
    d: int | None,
    norm: str,
    final: bool,
    tokens: int,
    **more: Any,
) -> dict[str, Any]:
    """A law's settings; ``more`` is what one law has and another has not."""
    case = {"depth": depth, "d": d, "norm": norm, "final_norm": bool(final), "tokens": tokens}
    return {
        "what": "law",
        "scheme": row.name,
        "block": [b.name for b in branches],
        **memory_of(branches),
        **case,
        **more,
    }


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
    said = token_laws.ASSUMPTIONS
    settings = about(row, branches, depth, d, norm, final, tokens, **cosines, order="leading", assumptions=said)
    curves = [_plain(rows | {"norm": rows[name]}, name == "trunk_norm") for name in ("norm", "trunk_norm")]
    found = _profile(curves[0], curves[1], labels(sublayers, final), settings)
    more = {name: rows[name][None] for name in ("stream_cosine", *COSINES)}
    return with_weights(dataclasses.replace(found, **more), rows["weights"], tokens, d)


def _in_range(row: Scheme, values: np.ndarray) -> None:
    lost = ~np.isfinite(values)
    if lost.any():
        raise ValueError(
            f"depth: the stream of {row.name!r} leaves the range of float64 at sub-layer {int(lost.argmax()) + 1}; "
            "use fewer layers, a smaller residual scale, or a norm"
        )


def with_weights(found: Profile, weights: np.ndarray, tokens: int, d: int | None) -> Profile:
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
    """The leading order as `gradflow.laws.finite_width.curve` has it; no share is along û, and nothing spreads."""
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
