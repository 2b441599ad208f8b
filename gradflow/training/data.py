"""Text that every machine has, as bytes: Python's own standard library, or a file of the user's."""

import functools
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8

SYMBOLS = 256
CHUNK = 4096  # bytes; every tenth chunk is held out
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, eq=False)
class Text:
    """Bytes to learn from, and bytes held out.

    Attributes
    ----------
    train, held_out : (n,) of uint8
    name : str
    digest : str
        SHA-256 of all of it, the first 16 digits.
    """

    train: UInt8[np.ndarray, " n"]
    held_out: UInt8[np.ndarray, " m"]
    name: str
    digest: str

    @functools.cached_property
    def unigram(self) -> float:
        """Entropy of one byte in nats: the loss of a model that has learned how often each byte stands, and no more."""
        counts = np.bincount(self.train, minlength=SYMBOLS)
        shares = counts[counts > 0] / self.train.size
        return float(-np.sum(shares * np.log(shares)))


def text_of(source: str | Path | None, least: int) -> Text:
    """Read a text and split it: every tenth chunk of it is held out.

    Parameters
    ----------
    source : path, optional
        A file; by default the standard library's ``*.py`` files in the order of their names, without its tests.
    least : int
        Bytes that either part must have.

    Raises
    ------
    ValueError
        For a file that is missing or too short.
    """
    data = _library() if source is None else _file(Path(source))
    chunk = min(CHUNK, max(1, len(data) // 10))
    held = np.arange(len(data)) // chunk % 10 == 9
    symbols = np.frombuffer(data, np.uint8)
    found = Text(
        symbols[~held],
        symbols[held],
        "Python standard library" if source is None else str(source),
        hashlib.sha256(data).hexdigest()[:16],
    )
    if min(found.train.size, found.held_out.size) < least:
        raise ValueError(f"text: {found.name} has {len(data)} bytes; needs at least {10 * least} for these sequences")
    return found


@functools.cache
def _library() -> bytes:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py") if not LEFT_OUT & set(p.parts))
    return b"".join((root / name).read_bytes() for name in files)


def _file(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"text: no such file {str(path)!r}")
    return path.read_bytes()


def batch(text: Array, key: Array, step: Array, sequences: int, tokens: int) -> Int[Array, "sequences tokens+1"]:
    """The batch of a step, a function of (key, step) alone: ``sequences`` windows of the text, each with its next byte."""
    # int32 whatever the precision: every one gets the very same batches
    starts = jax.random.randint(jax.random.fold_in(key, step), (sequences, 1), 0, text.size - tokens, jnp.int32)
    return text[starts + jnp.arange(tokens + 1)].astype(jnp.int32)
