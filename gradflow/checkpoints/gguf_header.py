"""A GGUF file's header: metadata, and where each tensor lies; each length is held against the file before anything is made of it.

Layout: the GGUF specification (ggml-org/ggml, docs/gguf.md), version 2 or 3, little-endian.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradflow.checkpoints.config import LARGEST

NUMBERS = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")  # by the value's type
STRING, ARRAY = 8, 9
MAGIC, ALIGNMENT, MOST_DIMENSIONS = b"GGUF", "general.alignment", 4


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: shape from rows to columns, the type's number, and its bytes' place in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


def library() -> Any:
    """The ``gguf`` package, an extra."""
    try:
        import gguf
    except ImportError:
        raise ValueError("checkpoint: a GGUF file needs the gguf package; pip install 'gradflow[gguf]'") from None
    return gguf


def stored(entry: Entry) -> tuple[Any, int]:
    """A tensor's quantisation and its size in bytes."""
    gguf = library()
    try:
        kind = gguf.GGMLQuantizationType(entry.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ValueError(f"checkpoint: the file's tensors are of type {entry.kind}, which gguf does not know") from None
    if entry.shape[-1] % block:
        raise ValueError(f"checkpoint: rows of {entry.shape[-1]} entries are no whole blocks of {kind.name}")
    return kind, math.prod(entry.shape) // block * size


class _Cursor:
    """Reads a header from front to back; nothing beyond the file's end, and no count that the rest has no room for."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"its header asks for {size} bytes at {self.at}, beyond the end")
        self.at += size
        return self.data[self.at - size : self.at]

    def whole(self, form: str = "<Q") -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, least: int) -> int:
        """A number of things of at least so many bytes each."""
        number = self.whole()
        if number > min(LARGEST, (len(self.data) - self.at) // least):
            raise ValueError(f"its header announces {number} entries at {self.at}, for which it has no room")
        return number

    def text(self) -> str:
        return self.take(self.count(1)).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner = self.whole("<I")
            if inner == STRING:
                return [self.text() for _ in range(self.count(8))]
            dtype = _number(inner)
            return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype)
        dtype = _number(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()


def _number(kind: int) -> np.dtype:
    name = NUMBERS[kind] if kind < len(NUMBERS) else None
    if name is None:
        raise ValueError(f"its header has a value of type {kind}")
    return np.dtype(name)


def _unique(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} stands twice in its header")
        found[name] = value
    return found


def header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Metadata, and tensors by their own names."""
    cursor = _Cursor(data)
    if cursor.take(4) != MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.whole("<I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}, where 2 and 3 are read, little-endian")
    tensors, pairs = cursor.count(24), cursor.count(12)
    metadata = _unique((cursor.text(), cursor.value(cursor.whole("<I"))) for _ in range(pairs))

    def entry() -> tuple[str, Entry]:
        name, dimensions = cursor.text(), cursor.whole("<I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"{name[:80]!r} has {dimensions} dimensions")
        shape = tuple(cursor.whole() for _ in range(dimensions))[::-1]
        if not all(1 <= size <= LARGEST for size in shape):
            raise ValueError(f"{name[:80]!r} has the shape {shape}")
        return name, Entry(shape, cursor.whole("<I"), cursor.whole())

    found = _unique(entry() for _ in range(tensors))
    alignment = metadata.get(ALIGNMENT, 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment > 2**20:
        raise ValueError(f"its {ALIGNMENT} is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    placed = {name: Entry(e.shape, e.kind, start + e.start) for name, e in found.items()}
    end = start
    for name, e in sorted(placed.items(), key=lambda item: item[1].start):
        size = stored(e)[1]
        if e.start < end or e.start + size > len(data):
            raise ValueError(f"{name[:80]!r} overlaps another tensor, or ends beyond the file")
        end = e.start + size
    return metadata, placed
