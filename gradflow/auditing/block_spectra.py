"""The largest singular values of each block's Jacobian and of the whole stack's, on given texts, by `gradflow.spectrum`."""

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gradflow import precision
from gradflow.checkpoints import Checkpoint
from gradflow.factors import plain
from gradflow.intervals import exp
from gradflow.spectra import choice
from gradflow.spectra.forecast import duration
from gradflow.spectra.result import Spectrum
from gradflow.stack import Given, Stack

METHOD = "matrix-free"
Progress = Callable[[int, int], None] | None


@dataclass(frozen=True)
class BlockSpectra:
    """Singular values of J_l = ∂x_{l+1}/∂x_l of every block, and of ∂h/∂x_0, over all real tokens of a text.

    Attributes
    ----------
    log_values, log_residuals : (texts, depth, top)
        Natural logs of the largest singular values of each block, descending, and of the residuals ‖Jᵀu − σv‖: a singular
        value lies within that distance of each.
    log_whole, log_whole_residuals : (texts, top)
        The same of the whole stack, a final norm included.
    log_rms, log_whole_rms : (texts, depth) and (texts,)
        log ‖J‖_F/√n by random vectors.
    pairs : int
        Steps of Lanczos, one J v and one Jᵀ g each.
    forecast, seconds : float
        What it was to take, and what it took, compilation included.
    """

    log_values: np.ndarray
    log_residuals: np.ndarray
    log_whole: np.ndarray
    log_whole_residuals: np.ndarray
    log_rms: np.ndarray
    log_whole_rms: np.ndarray
    pairs: int
    forecast: float
    seconds: float

    @property
    def values(self) -> np.ndarray:
        """(texts, depth, top)."""
        return exp(self.log_values)

    @property
    def whole(self) -> np.ndarray:
        """(texts, top)."""
        return exp(self.log_whole)

    @property
    def gaps(self) -> np.ndarray:
        """Of each block, the largest residual over its singular value: (depth,)."""
        return np.exp(np.nanmax(self.log_residuals - self.log_values, (0, 2)))

    @property
    def whole_gap(self) -> float:
        """The same of the whole stack."""
        return float(np.exp(np.nanmax(self.log_whole_residuals - self.log_whole)))

    @property
    def residual(self) -> float:
        """The largest residual over its singular value."""
        return max(float(np.nanmax(self.gaps)), self.whole_gap)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)} | {"method": METHOD}


def fits(top: int, least: int) -> None:
    """Refuse to look for more singular values than the shortest text has.

    Raises
    ------
    ValueError
    """
    if top > least:
        raise ValueError(f"spectrum: the Jacobian of the shortest text has {least} singular values, got {top}")


def of(
    checkpoint: Checkpoint, states: np.ndarray, real: np.ndarray, top: int, key: int, progress: Progress = None
) -> BlockSpectra:
    """Find them, the forecast said before where it is above `gradflow.spectra.choice.SLOW`; every text `fits`."""
    stack, texts = checkpoint.stack, [state[seen] for state, seen in zip(states, real, strict=True)]
    assert stack.scheme.alpha == 1 == stack.scheme.beta  # else a block alone has other multipliers
    one, total = dataclasses.replace(stack, depth=1, final_norm=False), len(texts) * (stack.depth + 1)
    cost = sum(_forecast(stack, text, checkpoint.whole, top) for text in texts)
    cost += sum(stack.depth * _forecast(one, text, _block(checkpoint, 0), top) for text in texts)
    if cost > choice.SLOW:
        said = f"{total} spectra of {top} values: about {duration(cost)} after compilation"
        print(f"gradflow audit: {said}", file=sys.stderr)
    start, blocks, whole, done = time.perf_counter(), [], [], 0
    for text in texts:
        found, x = [], text
        for l in range(stack.depth):
            found.append(_largest(one, x, _block(checkpoint, l), top, key))
            x = _through(one, x, _block(checkpoint, l))
            done += 1
            if progress is not None:
                progress(done, total)
        blocks.append(found)
        whole.append(_largest(stack, text, checkpoint.whole, top, key))
        done += 1
        if progress is not None:
            progress(done, total)
    seconds = time.perf_counter() - start
    return BlockSpectra(
        log_values=np.array([[each.log_singular_values[0] for each in row] for row in blocks]),
        log_residuals=np.array([[each.log_error[0] for each in row] for row in blocks]),  # type: ignore[index]
        log_whole=np.array([each.log_singular_values[0] for each in whole]),
        log_whole_residuals=np.array([each.log_error[0] for each in whole]),  # type: ignore[index]
        log_rms=np.array([[each.log_rms_gain[0] for each in row] for row in blocks]),
        log_whole_rms=np.array([each.log_rms_gain[0] for each in whole]),
        pairs=int(whole[0].settings["pairs"]),
        forecast=cost,
        seconds=seconds,
    )


def _block(checkpoint: Checkpoint, l: int) -> Given:
    """One block's weights, as a stack of depth 1 takes them."""
    weights = checkpoint.whole
    params, norms = jax.tree.map(lambda leaf: leaf[l : l + 1], (weights.params, weights.norms))
    return Given(params, norms)


def _through(one: Stack, x: np.ndarray, weights: Given) -> np.ndarray:
    """What enters the next block."""
    with precision.scope(one.dtype):
        return np.asarray(one.trace(weights, precision.as_array(x), None, False).out)


def _largest(stack: Stack, x: np.ndarray, weights: Given, top: int, key: int) -> Spectrum:
    options: dict[str, Any] = {"weights": weights, "top": top, "key": key, "force": True}
    return choice.spectrum(stack, x, method=METHOD, announce=lambda _: None, **options)


def _forecast(stack: Stack, x: np.ndarray, weights: Given, top: int) -> float:
    return choice.forecasts(stack, x, weights=weights, top=top)[METHOD].seconds
