"""Argument checks: every refusal is a ``ValueError`` of one line that names the argument and the way out."""

import difflib
import math
from collections.abc import Iterable, Sequence

import numpy as np


def one_of(argument: str, value: object, options: Iterable[str]) -> str:
    """Return ``value`` if it is one of ``options``; else raise, naming what is near.

    Raises
    ------
    ValueError
        The message lists near names, or all of them when nothing is near.
    """
    names = sorted(options)
    if isinstance(value, str) and value in names:
        return value
    near = difflib.get_close_matches(str(value).lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose from {', '.join(names)}"
    raise ValueError(f"{argument}: unknown {value!r}; {hint}")


def integer(argument: str, value: object, minimum: int, why: str = "") -> int:
    """Return ``value`` as an ``int`` not below ``minimum``; bools and fractions are refused."""
    bad = isinstance(value, bool) or not isinstance(value, int | np.integer)
    if bad or int(value) < minimum:  # type: ignore[call-overload]
        raise ValueError(f"{argument}: needs a whole number of at least {minimum}, got {value!r}{why and f' ({why})'}")
    return int(value)  # type: ignore[call-overload]


def key(value: object) -> int:
    """Return ``value`` as a random key's integer, from 0 to 2⁶³ − 1."""
    number = integer("key", value, 0)
    if number >= 2**63:
        raise ValueError(f"key: needs a whole number below 2**63, got {value!r}")
    return number


def real_array(argument: str, value: object) -> np.ndarray:
    """Return ``value`` as a float64 array of finite real numbers."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(
            f"{argument} needs a rectangular array of real numbers, got rows of different lengths"
        ) from None
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{argument} needs real numbers, got dtype {array.dtype}")
    return finite(argument.removesuffix(":"), array.astype(np.float64))


def fraction(argument: str, value: object) -> float:
    """Return ``value`` as a float strictly between 0 and 1."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0.0 < number < 1.0:
        raise ValueError(f"{argument}: needs a number strictly between 0 and 1, got {value!r}")
    return number


def finite(argument: str, array: np.ndarray) -> np.ndarray:
    """Return ``array`` if it holds finite numbers only."""
    bad = ~np.isfinite(array)
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{argument}: holds {int(bad.sum())} NaN or infinite entries, the first at index {where}")
    return array


def cosine(argument: str, value: object, tokens: int) -> float:
    """Return ``value`` as a float that ``tokens`` vectors can all have as their mutual cosine: from −1/(tokens − 1) to 1."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if tokens == 1:
        if number != 0:
            raise ValueError(f"{argument}: one token has no other to have a cosine with; give tokens, or leave it at 0")
    elif isinstance(value, bool) or not -1 / (tokens - 1) <= number <= 1:
        raise ValueError(
            f"{argument}: {tokens} tokens can share a cosine from {-1 / (tokens - 1):.3g} to 1, got {value!r}"
        )
    return number


def integers(argument: str, values: object, minimum: int) -> tuple[int, ...]:
    """Return one whole number, or several, as a tuple without repetitions; each not below ``minimum``."""
    several = isinstance(values, Sequence | np.ndarray | range) and not isinstance(values, str)
    found = tuple(dict.fromkeys(integer(argument, value, minimum) for value in (values if several else (values,))))  # type: ignore[union-attr]
    if not found:
        raise ValueError(f"{argument}: needs at least one whole number")
    return found
