"""Further panels of an audit's figure: how the stream grows, whose it is in the end, and the largest singular values."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from gradflow.auditing.growth import Growth
from gradflow.auditing.tables import geometric

Panel = Callable[[Axes], None]
_ALL, _OTHERS, _WALK = "#0072B2", "#D55E00", "0.35"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")


def panels(a: Any) -> list[Panel]:
    """What of an audit there is to draw."""
    drawn: list[Panel] = []
    if a.growth is not None:
        drawn += [lambda ax: _stream(ax, a), lambda ax: _shares(ax, a)]
    if a.spectra is not None:
        drawn.append(lambda ax: _spectra(ax, a))
    if a.apart is not None and len(drawn) % 2:  # where there is room beside the last
        drawn.append(lambda ax: _gains(ax, a))
    return drawn


def _stream(ax: Axes, a: Any) -> None:
    """rms against depth, over all tokens and over the others, beside the orthogonal sum."""
    found = [("all tokens", a.growth, _ALL, "o")]
    if a.apart is not None:
        found.append(("the other tokens", a.apart.growth, _OTHERS, "s"))
    for name, growth, colour, marker in found:
        rms = geometric(growth.rms)
        ax.plot(rms, marker=marker, ms=3.5, lw=1, color=colour, label=f"rms, {name}")
        if not growth.reset:
            ax.plot(geometric(growth.walk), "--", lw=1, color=colour, label=f"√(x₀² + Σ‖Δ‖²), {name}")
    values = np.concatenate([geometric(growth.rms) for _, growth, *_ in found])
    if values.max() > 10 * values.min():
        ax.set_yscale("log")
    else:
        ax.set_ylim(0)
    ax.set_xlabel("sub-layers passed")
    ax.set_title("the stream", fontsize=10, loc="left")
    ax.legend(fontsize=7.5, frameon=False)


def _shares(ax: Axes, a: Any) -> None:
    """Share of every part in the last stream; one colour a branch of the block."""
    growth: Growth = a.growth if a.apart is None else a.apart.growth
    share, kinds = (
        growth.share.mean(0),
        [label.partition(" ")[2].split(":")[0] or "sub-layer" for label in a.profile.labels],
    )
    S = len(share) - 2
    ax.bar(0, share[0], color="0.35", label="embedding")
    for colour, kind in zip(_COLOURS, dict.fromkeys(kinds[:S]), strict=False):
        at = np.array([l + 1 for l in range(S) if kinds[l] == kind])
        ax.bar(at, share[at], color=colour, label=kind)
    if np.any(share[-1]):
        ax.bar(S + 1, share[-1], color="0.7", label="norms' biases")
    ax.axhline(0, color="0.7", lw=0.8)
    ax.set_xlabel("sub-layer (0: embedding)")
    which = "" if a.apart is None else ", the other tokens"
    ax.set_title(f"share of the last stream, ⟨x_S, c⟩/‖x_S‖²{which}", fontsize=10, loc="left")
    ax.legend(fontsize=7.5, frameon=False)


def _spectra(ax: Axes, a: Any) -> None:
    """Singular values of each block, and of the whole behind the last."""
    values, whole = geometric(a.spectra.values), geometric(a.spectra.whole)
    depth, top = values.shape
    for i in range(top):
        shade = 1 - 0.75 * i / max(top - 1, 1)
        ax.plot(np.arange(1, depth + 1), values[:, i], "o-", ms=3, lw=0.8, color=_ALL, alpha=shade)
        ax.plot(depth + 1, whole[i], "s", ms=5, color=_OTHERS, alpha=shade)
    ax.plot(np.arange(1, depth + 1), geometric(np.exp(a.spectra.log_rms)), "-", lw=1, color=_WALK, label="‖J‖_F/√n")
    ax.plot([], [], "o-", color=_ALL, label=f"largest {top} of a block")
    ax.plot([], [], "s", color=_OTHERS, label="of the whole stack")
    ax.set_yscale("log")
    ax.set_xlabel("block (last: the whole stack)")
    ax.set_title("singular values of the Jacobians", fontsize=10, loc="left")
    ax.legend(fontsize=7.5, frameon=False)


def _gains(ax: Axes, a: Any) -> None:
    """The true gradient's gain over all tokens and over the others."""
    for name, p, colour, marker in (
        ("all tokens", a.profile, _ALL, "o"),
        ("the other tokens", a.apart.profile, _OTHERS, "s"),
    ):
        ax.plot(np.exp(p.log_exact.mean(0)), marker=marker, ms=3.5, lw=1, color=colour, label=f"exact, {name}")
    ax.set_yscale("log")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("sub-layer l")
    ax.set_title("gain with and without the tokens set apart", fontsize=10, loc="left")
    ax.legend(fontsize=7.5, frameon=False)
