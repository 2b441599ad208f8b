"""Recorded activations of a post-LN network, from any framework: read as data and checked.

What each output norm saw (u), with γ and ε, determines the trunk product, the bound and every projection and norm factor.
"""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradflow import checks

KEYS = ("u", "x", "gain", "eps", "cotangent")


@dataclass(frozen=True)
class Recording:
    """Checked activations of S post-LN sub-layers, from input to output, in float64.

    Attributes
    ----------
    u : (S, tokens, d)
        What each sub-layer's output norm sees, x + f(x).
    x : (S, tokens, d) or None
        The stream as it enters each sub-layer.
    gain : (S, d)
        γ of each norm.
    eps : float
        ε of the norms, inside the root.
    cotangent : (tokens, d) or None
        dLoss/d(output).
    """

    u: np.ndarray
    x: np.ndarray | None
    gain: np.ndarray
    eps: float
    cotangent: np.ndarray | None


def load(path: str | Path, argument: str = "activations") -> dict[str, np.ndarray]:
    """Read an ``.npz`` as data: pickles are refused, and each array's declared size is held against the file first.

    ``argument`` is the name that refusals give the file.

    Raises
    ------
    ValueError
        If the file is missing, truncated, not an ``.npz``, or holds Python objects.
    """
    try:
        file = Path(path)
        found = file.is_file()
    except (TypeError, ValueError):
        raise ValueError(f"{argument}: needs a path or a mapping, got {type(path).__name__}") from None
    if not found:
        raise ValueError(f"{argument}: no such file {str(path)!r}")
    try:
        with zipfile.ZipFile(file) as archive:
            names = [info.filename.removesuffix(".npy") for info in archive.infolist()]
            if len(set(names)) < len(names):
                raise ValueError(f"{argument}: {str(path)!r} holds an array twice; write it again")
            return {
                name: _member(archive, info, argument) for name, info in zip(names, archive.infolist(), strict=True)
            }
    except zipfile.BadZipFile as error:
        raise ValueError(f"{argument}: {str(path)!r} is no .npz, or is truncated ({error}); write it again") from error
    except (EOFError, OSError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise ValueError(f"{argument}: {str(path)!r} cannot be read ({error})") from error


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, argument: str) -> np.ndarray:
    """One array; its header is read and believed only if it agrees with the size of the member."""
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
            shape, fortran, dtype = read(stream)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{argument}: {name!r} has no valid .npy header; write it with numpy.savez") from error
        if dtype.hasobject:
            raise ValueError(f"{argument}: {name!r} is a pickled object, which is never read; save it as a plain array")
        if any(isinstance(n, bool) or n < 0 for n in shape):
            raise ValueError(f"{argument}: {name!r} declares the shape {shape}; write it with numpy.savez")
        stated = int(np.prod(shape, dtype=object)) * dtype.itemsize
        held = info.file_size - stream.tell()
        if stated != held:
            raise ValueError(f"{argument}: {name!r} declares {stated} bytes but holds {held}; the file is damaged")
        data = np.frombuffer(stream.read(), dtype)
    return data.reshape(shape, order="F" if fortran else "C")


def recording(source: str | Path | Mapping[str, Any]) -> Recording:
    """Check activations given as a file or as a mapping with the keys of `KEYS` (``u`` alone is required).

    Raises
    ------
    ValueError
        Naming the array that is missing, not finite, not numeric, or of a shape that disagrees with ``u``.
    """
    arrays = dict(source) if isinstance(source, Mapping) else load(source)
    unknown = sorted(set(arrays) - set(KEYS))
    if unknown:
        raise ValueError(f"activations: unknown array {unknown[0]!r}; known are {', '.join(KEYS)}")
    if "u" not in arrays:
        raise ValueError("activations: 'u' is missing; it holds x + f(x) of every sub-layer, shape (S, tokens, d)")
    checked = {name: checks.real_array(f"activations: {name!r}", value) for name, value in arrays.items()}
    u = checked["u"]
    if u.ndim != 3 or u.shape[0] < 1 or u.shape[1] < 1 or u.shape[2] < 2:
        raise ValueError(f"activations: 'u' needs shape (S, tokens, d) with d of at least 2, got {u.shape}")
    S, tokens, d = u.shape
    shapes = {"x": [u.shape], "gain": [(S, d), (d,)], "eps": [(), (1,)], "cotangent": [(tokens, d)]}
    for name, allowed in shapes.items():
        if name in checked and checked[name].shape not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise ValueError(
                f"activations: {name!r} needs shape {wanted} beside u's {u.shape}, got {checked[name].shape}"
            )
    eps = float(checked["eps"].reshape(())) if "eps" in checked else 0.0
    if eps < 0:
        raise ValueError(f"activations: 'eps' needs a number of at least 0, got {eps}")
    gain = np.broadcast_to(checked.get("gain", np.ones(d)), (S, d))
    return Recording(u, checked.get("x"), gain, eps, checked.get("cotangent"))
