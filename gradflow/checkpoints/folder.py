"""A model's folder as data: its config and the tensors of its safetensors files. Nothing is unpickled, nothing executed.

The safetensors library holds every header against its file (lengths, offsets, shape × dtype) before a tensor is touched;
here its refusals get the file's name and a way out, and each shape is held against the config before the tensor is read.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from gradflow import checks
from gradflow.checkpoints import ggufs
from gradflow.checkpoints.ggufs import Gguf

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
GGUF = ".gguf"
DATA = ("config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "vocab.txt")
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, eq=False)
class Folder:
    """A checked folder; tensors are read when asked for.

    Attributes
    ----------
    path : Path
        The folder.
    config : dict
        ``config.json``.
    files : dict
        Tensor's name → the safetensors file that holds it.
    """

    path: Path
    config: dict[str, Any]
    files: Mapping[str, Path]

    fixture = None

    def sizes(self) -> dict[str, int]:
        """Entries of every tensor, from the headers."""
        found = {}
        for path in sorted(set(self.files.values())):
            with _opened(path) as file:
                found |= {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return {name: found[name] for name in self.files}

    @contextlib.contextmanager
    def entry(self, name: str, shape: tuple[int, ...]) -> Iterator[Any]:
        """A tensor in its open file, of which nothing is read yet.

        Raises
        ------
        ValueError
            If it is missing, has another shape than the config asks for, or is no float.
        """
        if name not in self.files:
            raise ValueError(f"checkpoint: {self.path.name!r} has no tensor {name!r}; is config.json of this model?")
        with _opened(self.files[name]) as file:
            entry = file.get_slice(name)
            if tuple(entry.get_shape()) != shape:
                raise ValueError(
                    f"checkpoint: {name!r} has shape {tuple(entry.get_shape())}, where config.json makes it {shape}"
                )
            if entry.get_dtype() not in FLOATS:
                raise ValueError(
                    f"checkpoint: {name!r} is stored as {entry.get_dtype()}; needs one of {', '.join(FLOATS)}"
                )
            yield entry

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: Any = np.float64, rows: slice = slice(None)
    ) -> np.ndarray:
        """Read a tensor, or some of its rows, as ``dtype`` (``None``: as stored).

        Raises
        ------
        ValueError
            As `entry`, or if it holds NaN or infinity.
        """
        with self.entry(name, shape) as entry:
            first, stop, _ = rows.indices(shape[0])  # the library refuses rows beyond the end
            stored = entry[first:stop]
        return checks.finite(f"checkpoint: {name!r}", stored if dtype is None else stored.astype(dtype))


def _opened(file: Path) -> Any:
    """A safetensors file whose header agrees with its size."""
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"checkpoint: {file.name!r} is no whole safetensors file ({reason}); copy or download it again"
        ) from error


def json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"checkpoint: {file.name!r} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, or an endless integer
        raise ValueError(f"checkpoint: {file.name!r} is no JSON ({error}); copy or download it again") from error
    if not isinstance(read, dict):
        raise ValueError(f"checkpoint: {file.name!r} holds {type(read).__name__} where an object {{…}} is needed")
    return read


def inside(folder: Path, name: str) -> Path:
    """A file of a folder; a link may not lead out of it, but into the blobs beside a snapshot of the Hugging Face cache.

    Raises
    ------
    ValueError
        If it does.
    """
    home, target = folder.resolve(), (folder / name).resolve()
    roots = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(root) for root in roots):
        raise ValueError(f"checkpoint: {name!r} is a link out of {str(folder)!r}; refused: put the file itself there")
    return folder / name


def read(path: str | Path) -> Folder | Gguf:
    """Check a model's folder, or the safetensors file in one, or a GGUF file, or a folder with nothing but one.

    Raises
    ------
    ValueError
        Naming the file that is missing, damaged or of a kind that is not read, and how to mend it.
    """
    try:
        given = Path(path).expanduser()
        is_file, is_folder = given.is_file(), given.is_dir()
    except (TypeError, ValueError, OSError, RuntimeError):
        raise ValueError(f"checkpoint: needs the path of a model's folder, got {path!r:.80}") from None
    if is_file and given.suffix in PICKLES:
        raise ValueError(_pickled(given))
    if is_file and given.suffix == GGUF:
        return ggufs.read(given)
    if not is_folder and not (is_file and given.suffix == ".safetensors"):
        raise ValueError(
            f"checkpoint: {str(path)!r} is no folder; give the one that holds config.json and {WEIGHTS}, or a .gguf file"
        )
    folder = given if is_folder else given.parent
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob(f"*{GGUF}"))
        if len(files) == 1:
            return ggufs.read(inside(folder, files[0].name))
        if files:
            raise ValueError(f"checkpoint: {str(folder)!r} holds {len(files)} GGUF files; name one of them")
        raise ValueError(f"checkpoint: {str(folder)!r} has no config.json; give the folder that save_pretrained wrote")
    for name in (*DATA, given.name if is_file else WEIGHTS):
        inside(folder, name)
    config = json_object(folder / "config.json")
    return Folder(folder, config, _tensor_files(folder, given if is_file else folder / WEIGHTS))


def _tensor_files(folder: Path, whole: Path) -> dict[str, Path]:
    """Tensor's name → file, from one file or from the index of several."""
    if whole.is_file():
        with _opened(whole) as file:
            return dict.fromkeys(file.keys(), whole)
    if not (folder / INDEX).is_file():
        pickles = sorted(file for file in folder.iterdir() if file.suffix in PICKLES)
        if pickles:
            raise ValueError(_pickled(pickles[0]))
        raise ValueError(
            f"checkpoint: {str(folder)!r} has neither {WEIGHTS} nor {INDEX}; save the model as safetensors"
        )
    listed = json_object(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"checkpoint: {INDEX!r} has no 'weight_map' from tensors to files; save the model again")
    held: dict[str, set[str]] = {}
    for shard in sorted(set(listed.values())):
        if shard in ("", "..") or any(mark in shard for mark in "/\\:\0"):
            raise ValueError(f"checkpoint: {INDEX!r} names {shard!r}, which is not a file of this folder; refused")
        if not inside(folder, shard).is_file():
            raise ValueError(f"checkpoint: {INDEX!r} names {shard!r}, which is missing; copy or download it too")
        with _opened(folder / shard) as file:
            held[shard] = set(file.keys())
    for name, shard in listed.items():
        if name not in held[shard]:
            raise ValueError(
                f"checkpoint: {INDEX!r} places {name!r} in {shard!r}, which lacks it; save the model again"
            )
    return {name: folder / shard for name, shard in listed.items()}


def _pickled(file: Path) -> str:
    """Why a pickle is refused, and what to do."""
    return (
        f"checkpoint: {file.name!r} is a pickle, which could run code and is never read; where you trust it, "
        f"load it with transformers and save_pretrained() writes {WEIGHTS}"
    )
