"""Files that are written: refused before long work where none can stand, and replaced whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def new_file(argument: str, path: str | Path, ending: str) -> Path:
    """Return the path if a file can stand there; asked before long work, so that none is lost.

    Raises
    ------
    ValueError
        For a folder that does not exist, or a path that is something else than a file.
    """
    file = Path(path)
    if file.exists() and not file.is_file():
        raise ValueError(f"{argument}: {str(path)!r} is no file; name one that ends in {ending}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{argument}: no such folder {str(file.parent)!r}")
    return file


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A path beside ``file`` to write to, which takes its place when all is written, and goes when that fails."""
    target = file.resolve()
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield fresh
        with fresh.open("r+b") as stream:
            os.fsync(stream.fileno())
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
