"""A number with its interval, and the statistics of log gains over seeds."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit


@dataclass(frozen=True)
class Interval:
    """A value with the limits of its interval; ``float()`` gives the value. What the interval covers is in ``of``."""

    value: float
    low: float
    high: float
    of: str

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def to_dict(self) -> dict[str, float | str | None]:
        """Plain numbers; an undefined limit is ``None``."""
        numbers = {k: getattr(self, k) for k in ("value", "low", "high")}
        return {k: v if math.isfinite(v) else None for k, v in numbers.items()} | {"of": self.of}


def over_seeds(logs: np.ndarray, level: float = 0.95) -> Interval:
    """Mean of log gains over seeds, with Student's t interval of the mean (NaN limits for one seed)."""
    n, mean = logs.size, float(np.mean(logs))
    if n < 2:
        return Interval(mean, math.nan, math.nan, "one seed has no interval")
    half = float(stdtrit(n - 1, 0.5 + level / 2) * np.std(logs, ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half, f"{level:.0%} interval of the mean over {n} seeds")


def exp(logs: np.ndarray | float) -> np.ndarray:
    """The gain of a log gain; inf beyond the range of float64, without a warning: the log is there too."""
    with np.errstate(over="ignore"):
        return np.exp(logs)


def gain_of(log: Interval) -> Interval:
    """exp of a log-gain interval."""
    return Interval(float(exp(log.value)), float(exp(log.low)), float(exp(log.high)), log.of)


def loss_per_layer(log: Interval, layers: int) -> Interval:
    """1 − gain^(1/layers) of a log-gain interval, limits in order."""
    value, high, low = (float(-np.expm1(v / layers)) for v in (log.value, log.low, log.high))
    return Interval(value, low, high, log.of)


def band(log_gain: float, sd: float, what: str) -> Interval:
    """A law's gain with the band in which 95 % of networks fall, ±1.96 sd of the log gain."""
    half = 1.959964 * sd
    return gain_of(Interval(log_gain, log_gain - half, log_gain + half, what))
