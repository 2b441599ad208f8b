"""How the stream grows with depth, and what each sub-layer's update is of the stream that leaves the last one.

With the norms' statistics as they are, every norm on the identity path is an affine map, so the last stream is a sum: the
embedding's part, one part for each update, and the biases' of such norms. A part's share is ⟨x_S, c⟩/‖x_S‖²; all add up to 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from scipy import stats

from gradflow.factors import plain


@dataclass(frozen=True)
class Growth:
    """The stream of each text, and its parts. S sub-layers; a final norm is not among them.

    Attributes
    ----------
    rms : (texts, S + 1)
        Of the stream as it enters each sub-layer, and behind the last.
    update_rms : (texts, S)
        Of each update, β·N_branch(f), as it is added.
    walk : (texts, S + 1)
        √(x₀² + Σ‖Δ‖²), the rms if all updates were orthogonal to the stream that they meet: rms₀·√(1 + S·share²) for a mean
        square share of the embedding. NaN where a norm resets the stream.
    share, size : (texts, S + 2)
        ⟨x_S, c⟩/‖x_S‖² and ‖c‖/‖x_S‖ of each part: the embedding, every update, the biases of norms on the identity path.
    kept : (texts,)
        The embedding's share if every update were orthogonal to its token's stream: ∏ ‖αx‖²/‖αx + Δ‖² of each token, weighted
        by its ‖x_S‖².
    update_cosine : (texts, S − 1)
        Of successive updates, mean over tokens.
    exponent, exponent_se : (texts,)
        p of rms ∝ l^p over l = 1 … S sub-layers, by least squares of the logs, and its standard error (neighbouring depths
        are not independent, so it is too small rather than too large); NaN where a norm resets the stream or S < 3.
    """

    rms: np.ndarray
    update_rms: np.ndarray
    walk: np.ndarray
    share: np.ndarray
    size: np.ndarray
    kept: np.ndarray
    update_cosine: np.ndarray
    exponent: np.ndarray
    exponent_se: np.ndarray

    @property
    def reset(self) -> bool:
        """Whether a norm on the identity path sets the stream's length anew, so that it does not grow."""
        return bool(np.isnan(self.walk).all())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; what is undefined is ``None``."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def of(cls, texts: Sequence[Mapping[str, Any]]) -> "Growth":
        """One row a text."""
        return cls(**{f.name: np.array([text[f.name] for text in texts]) for f in fields(cls)})


@dataclass(frozen=True)
class Path:
    """One text's way forward on the host.

    Attributes
    ----------
    x : (S + 1, tokens, d)
        The stream as it enters each sub-layer, and behind the last.
    u, added : (S, tokens, d)
        αx + Δ, and Δ.
    alpha : (S,)
    norms : tuple of (gain, bias, centred) or None
        The norm on the identity path behind each sub-layer.
    """

    x: np.ndarray
    u: np.ndarray
    added: np.ndarray
    alpha: np.ndarray
    norms: tuple[tuple[np.ndarray, np.ndarray, bool] | None, ...]

    @property
    def token_rms(self) -> np.ndarray:
        """(S + 1, tokens), of every token's stream before a norm sees it: the embedding, and u of each sub-layer."""
        return np.sqrt(np.mean(np.concatenate([self.x[:1], self.u]) ** 2, -1))

    def parts(self) -> np.ndarray:
        """Embedding, updates, and biases of norms, each as it is found in the last stream, (S + 2, tokens, d)."""
        S = len(self.added)
        parts = np.zeros((S + 2, *self.x.shape[1:]))
        parts[0] = self.x[0]
        for l, norm in enumerate(self.norms):
            if self.alpha[l] != 1:
                parts *= self.alpha[l]
            parts[l + 1] = self.added[l]
            if norm is not None:
                gain, bias, centred = norm
                centre = (lambda v: v - v.mean(-1, keepdims=True)) if centred else (lambda v: v)
                before, after = gain * centre(self.u[l]), self.x[l + 1] - bias
                scale = _ratio(_length(after), _length(before))[:, None]  # 1/t, from what the norm did
                held = [*range(l + 2), S + 1]
                parts[held] = gain * centre(parts[held]) * scale
                parts[S + 1] += bias
        return parts


def growth(path: Path, parts: np.ndarray, counted: np.ndarray) -> dict[str, Any]:
    """Every figure of one text over the tokens that are ``counted``, (tokens,) of bool."""
    x, added, parts = (a[:, counted] for a in (path.x, path.added, parts))
    rms, updates = (np.sqrt(np.mean(a**2, (1, 2))) for a in (x, added))
    free = all(norm is None for norm in path.norms)
    powers = np.sum(x**2, -1)
    last = np.sum(powers[-1])
    q, kept, walk = powers[0], np.ones(len(powers[0])), [rms[0]]
    for l, update in enumerate(np.sum(added**2, -1)):
        skip = path.alpha[l] ** 2 * (q if free else powers[l])
        q = skip + update
        kept = kept * _ratio(skip, q)
        walk.append(np.sqrt(np.sum(q) / x[0].size))
    cosines = _ratio(np.sum(added[1:] * added[:-1], -1), _length(added[1:]) * _length(added[:-1]))
    p, se = _exponent(rms[1:]) if free else (np.nan, np.nan)
    return {
        "rms": rms,
        "update_rms": updates,
        "walk": np.array(walk) if free else np.full(len(rms), np.nan),
        "share": np.sum(parts * x[-1], (1, 2)) / last,
        "size": np.sqrt(np.sum(parts**2, (1, 2)) / last),
        "kept": np.sum(kept * powers[-1]) / last,
        "update_cosine": cosines.mean(-1),
        "exponent": p,
        "exponent_se": se,
    }


def _length(a: np.ndarray) -> np.ndarray:
    return np.sqrt(np.sum(a**2, -1))


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a/b, and 0 where b is."""
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _exponent(rms: np.ndarray) -> tuple[float, float]:
    """p and its standard error, of rms ∝ l^p."""
    if len(rms) < 3 or not (rms > 0).all():
        return np.nan, np.nan
    found: Any = stats.linregress(np.log(np.arange(1, len(rms) + 1)), np.log(rms))
    return float(found.slope), float(found.stderr)
