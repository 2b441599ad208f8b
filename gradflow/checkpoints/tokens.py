"""Text to token ids through the ``tokenizers`` library, whole: a text that does not fit is refused, never cut."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from gradflow.checkpoints import ggufs
from gradflow.checkpoints.folder import json_object


def fits(count: int, positions: int) -> None:
    """Refuse a number of tokens that the position table has no room for, or none at all."""
    if not 1 <= count <= positions:
        raise ValueError(
            f"text: has {count} tokens, where the model takes 1 to {positions}; give a shorter piece of it"
        )


def checked(ids: Any, vocab: int, positions: int) -> np.ndarray:
    """One text's token ids, (tokens,), where both tables have room for them."""
    try:
        given = np.asarray(ids)
    except ValueError:
        given = np.empty((0, 0))
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise ValueError("ids: needs one row of whole numbers, the token ids of one text")
    fits(given.size, positions)
    if given.min() < 0 or given.max() >= vocab:
        bad = given[(given < 0) | (given >= vocab)][0]
        raise ValueError(f"ids: {bad} is outside the embedding's {vocab} rows; is the tokenizer this model's?")
    return given.astype(np.int64)


def encode(folder: Path, text: str) -> np.ndarray:
    """Token ids of one text, with the special tokens that the model's tokenizer puts around it.

    Raises
    ------
    ValueError
        If the text is empty or has no token, or the folder no tokenizer that can be read.
    """
    if not isinstance(text, str) or not text.strip():
        got = "none" if isinstance(text, str) else type(text).__name__
        raise ValueError(f"text: needs a sentence or more, got {got}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "text: holds half of a surrogate pair, which is no character; read the text as UTF-8"
        ) from None
    found = _encoded(folder, text)
    if all(found.special_tokens_mask):
        raise ValueError(f"text: the model's tokenizer finds no token in {text!r:.60}; write words of its language")
    return np.array(found.ids, np.int64)


def pieces(folder: Path, ids: Any) -> list[str] | None:
    """The tokenizer's word for each id; ``None`` where the folder has no tokenizer that can be read."""
    used = _used(folder)
    if used is None:
        return None
    try:
        stat = used.stat()
        made = _made(used, stat.st_mtime_ns, stat.st_size, **_switches_of(used))
        return [made.decode([int(i)], skip_special_tokens=False) for i in ids]
    except Exception:  # the library raises bare Exception; who gives ids needs no tokenizer
        return None


def _used(folder: Path) -> Path | None:
    """``tokenizer.json``, else ``vocab.txt``; a GGUF file has its own."""
    return next((f for f in (folder / "tokenizer.json", folder / "vocab.txt", folder) if f.is_file()), None)


def _encoded(folder: Path, text: str) -> Any:
    """By ``tokenizer.json``, else by WordPiece from ``vocab.txt``; a GGUF file has its own."""
    used = _used(folder)
    if used is None:
        raise ValueError(
            f"checkpoint: {str(folder)!r} has neither tokenizer.json nor vocab.txt; add one, or give token ids instead"
        )
    switches = _switches_of(used)
    try:
        stat = used.stat()
        return _made(used, stat.st_mtime_ns, stat.st_size, **switches).encode(text)
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise ValueError(f"checkpoint: {used.name!r} is no tokenizer ({reason}); copy or download it again") from error


def _switches_of(used: Path) -> dict[str, Any]:
    """WordPiece's switches from ``tokenizer_config.json``; transformers' defaults where it is silent."""
    if used.name != "vocab.txt":
        return {}
    settings = used.with_name("tokenizer_config.json")
    stated = json_object(settings) if settings.is_file() else {}
    return {
        "lowercase": bool(stated.get("do_lower_case", True)),
        "strip_accents": stated.get("strip_accents"),
        "handle_chinese_chars": bool(stated.get("tokenize_chinese_chars", True)),
    }


@functools.lru_cache(maxsize=4)
def _made(used: Path, mtime: int, size: int, **switches: Any) -> Any:
    """The tokenizer of a file, read once for many texts; another ``mtime`` or ``size`` is another file."""
    if used.suffix == ".gguf":
        made: Any = ggufs.tokenizer(ggufs.read(used).metadata)
    elif used.suffix == ".json":
        made = tokenizers.Tokenizer.from_file(str(used))
    else:
        made = BertWordPieceTokenizer(str(used), **switches)
    made.no_truncation()  # tokenizer.json often carries both, for the batches that it was used on
    made.no_padding()
    return made
