"""Tokens whose stream is far larger than the others' (attention sinks, massive activations), and which tokens to set apart.

A model that has nothing to attend to attends to its first token (Xiong et al. 2023, 2309.17453), whose stream then holds a few
enormous entries over most of the depth (Sun et al. 2024, 2402.17762). A figure over all tokens is then a figure of that one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RATIO = 5.0  # to the median token's rms: 25 median tokens' power
APART = ("auto", "first", "sinks")


class Sink(NamedTuple):
    """A token that stands out, or the first.

    Attributes
    ----------
    text, position : int
        Which text, and which of its tokens, both from 0.
    token : str or None
        As the tokenizer has it.
    count : int
        At how many of the S + 1 depths (0: the embedding; l: x + f(x) of sub-layer l, before a norm) its rms is above `RATIO`
        times the median token's; ``first``, ``last`` are the first and the last of them, ``None`` where it does not stand out.
    ratio : float
        The largest ratio to the median token, at depth ``at``.
    rms : float
        Of its stream there.
    """

    text: int
    position: int
    token: str | None
    count: int
    first: int | None
    last: int | None
    ratio: float
    at: int
    rms: float

    @property
    def found(self) -> bool:
        """Whether it stands out; the first token is listed in any case."""
        return self.first is not None


def find(rms: np.ndarray, text: int, tokens: Sequence[str] | None, least: int = 2) -> list[Sink]:
    """The first token, and all whose rms is above `RATIO` times the median token's at ``least`` depths or more.

    Parameters
    ----------
    rms : (S + 1, tokens)
        Of every real token's stream: the embedding, and what each sub-layer adds it up to.
    tokens : sequence of str, optional
        Their texts.
    """
    median = np.median(rms, 1, keepdims=True)
    ratios = np.divide(rms, median, out=np.zeros_like(rms), where=median > 0)
    above = ratios > RATIO
    found = []
    for i in range(rms.shape[1]):
        where = np.flatnonzero(above[:, i])
        stands = where.size >= least
        if not stands and i:
            continue
        at = int(ratios[:, i].argmax())
        ends = (int(where[0]), int(where[-1])) if stands else (None, None)
        name = None if tokens is None else tokens[i]
        found.append(Sink(text, i, name, int(where.size), *ends, float(ratios[at, i]), at, float(rms[at, i])))
    return found


def others(sinks: Sequence[Sink], real: np.ndarray, apart: str | None) -> np.ndarray | None:
    """Real tokens that are not set apart, (texts, tokens); ``None`` where none is, or a text would have no other.

    ``"first"`` sets the first token apart, ``"sinks"`` those found too, and ``"auto"`` does that where any is found.
    """
    if apart is None or (apart == "auto" and not any(sink.found for sink in sinks)):
        return None
    left = real.copy()
    for sink in sinks:
        if sink.position == 0 or apart != "first":
            left[sink.text, sink.position] = False
    return left if left.any(1).all() else None
