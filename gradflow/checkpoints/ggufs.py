"""A GGUF file of a Llama-type model as the folder that it was made from: config, tensors by their Hugging Face names, tokenizer.

The header is read by `gradflow.checkpoints.gguf_header`; the ``gguf`` package dequantises.
"""

import contextlib
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from gradflow import checks
from gradflow.checkpoints.gguf_header import Entry, header, library, stored

ARCHITECTURE = "llama"
WORDS, CONTROL = "tokenizer.ggml.", 3
CUTS = {"gpt-2": False, "smollm": True}  # whether each digit is a word of its own
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")},
}


@dataclass(frozen=True, eq=False)
class Gguf:
    """A checked file, with the interface of `gradflow.checkpoints.folder.Folder`."""

    path: Path
    config: dict[str, Any]
    files: Mapping[str, Entry]
    metadata: Mapping[str, Any]
    fixture = "llama-gguf"

    def sizes(self) -> dict[str, int]:
        """Entries of every tensor."""
        return {name: math.prod(entry.shape) for name, entry in self.files.items()}

    def entry(self, name: str, shape: tuple[int, ...]) -> contextlib.AbstractContextManager[Entry]:
        """Where a tensor lies; raises as `gradflow.checkpoints.folder.Folder.entry`."""
        if name not in self.files:
            raise ValueError(f"checkpoint: {self.path.name!r} has no tensor {name!r}; is the file whole?")
        entry = self.files[name]
        if entry.shape != shape:
            raise ValueError(f"checkpoint: {name!r} has shape {entry.shape}, where the metadata make it {shape}")
        return contextlib.nullcontext(entry)

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: Any = np.float64, rows: slice = slice(None)
    ) -> np.ndarray:
        """Read and dequantise a tensor, or some of its rows; raises as `gradflow.checkpoints.folder.Folder.tensor`."""
        with self.entry(name, shape) as entry:
            kind, size = stored(entry)
        lines = range(math.prod(shape[:-1]))
        line, lines = size // len(lines), lines[rows]
        with self.path.open("rb") as file:
            file.seek(entry.start + line * lines.start)
            raw = np.frombuffer(file.read(line * len(lines)), np.uint8)
        if raw.size < line * len(lines):
            raise ValueError(f"checkpoint: {self.path.name!r} ends within {name!r}; copy or download it again")
        values = library().quants.dequantize(raw.reshape(len(lines), -1), kind).reshape(-1, *shape[1:])
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            heads = self.config["num_key_value_heads" if ".k_proj" in name else "num_attention_heads"]
            # llama.cpp turns neighbours where transformers turns halves, and stores a head's rows in its own order
            values = values.reshape(heads, -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        return checks.finite(f"checkpoint: {name!r}", values if dtype is None else values.astype(dtype))


def read(path: Path) -> Gguf:
    """Check a file's header.

    Raises
    ------
    ValueError
        For a damaged file, another architecture than Llama's, or a setting or tensor that is not read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors = header(data)
    except (ValueError, OSError, UnicodeDecodeError) as error:
        reason = str(error)
        if reason.startswith("checkpoint: "):
            raise
        raise ValueError(
            f"checkpoint: {path.name!r} is no whole GGUF file ({reason}); copy or download it again"
        ) from None
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(f"checkpoint: {path.name!r} is of the architecture {architecture!r}; read is {ARCHITECTURE!r}")
    files = {_named(path, name): entry for name, entry in tensors.items()}
    return Gguf(path, _config(metadata, files), files, metadata)


def _named(path: Path, name: str) -> str:
    """A tensor's name in the folder that the file was made from."""
    stem, dot, rest = name.removesuffix(".weight"), ".weight", name.endswith(".weight")
    if rest and stem in WHOLE:
        return WHOLE[stem] + dot
    block, _, module = stem.removeprefix("blk.").partition(".")
    if rest and stem.startswith("blk.") and block.isdecimal() and module in BLOCK:
        return f"model.layers.{int(block)}.{BLOCK[module]}{dot}"
    raise ValueError(f"checkpoint: {path.name!r} holds {name[:80]!r}, which is not read of a Llama-type model")


def _config(metadata: Mapping[str, Any], files: Mapping[str, Entry]) -> dict[str, Any]:
    """The metadata as config.json has them; a key that is not known stays, to be refused there."""
    own = {k.removeprefix(f"{ARCHITECTURE}."): v for k, v in metadata.items() if k.startswith(f"{ARCHITECTURE}.")}
    config = {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": "lm_head.weight" not in files}
    config |= {KEYS.get(name, name): value for name, value in own.items()}
    heads, d = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(d, int) and heads > 0:
        size = config.get("head_dim", d // heads)
        for same in ("rope.dimension_count", "attention.value_length"):  # another one would be refused
            if config.get(same) == size:
                del config[same]
        config.setdefault("num_key_value_heads", heads)
    word = files.get("model.embed_tokens.weight")
    if word is not None:
        config.setdefault("vocab_size", word.shape[0])
    return config


def tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The byte-level BPE in a file's metadata.

    Raises
    ------
    ValueError
        For another kind of tokenizer, or one that cuts words in a way that is not known.
    """
    own = {k.removeprefix(WORDS): v for k, v in metadata.items() if k.startswith(WORDS)}
    kind, cut = own.get("model"), own.get("pre", "default")
    if kind != "gpt2" or cut not in CUTS:
        raise ValueError(
            f"its kind is {kind!r} with {cut!r}; read are gpt2 with {', '.join(CUTS)}; give token ids instead"
        )
    words, kinds = own.get("tokens", []), own.get("token_type", [])
    merges = [tuple(pair.split(" ", 1)) for pair in own.get("merges", [])]
    made = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if CUTS[cut] else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    special = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL]
    made.add_special_tokens([tokenizers.AddedToken(word, normalized=False, special=True) for word in special])
    around = [("bos", "eos").index(end) for end in ("bos", "eos") if own.get(f"add_{end}_token", False)]
    if around:
        ends = [(words[own[f"{end}_token_id"]], own[f"{end}_token_id"]) for end in ("bos", "eos")]
        single = [ends[0][0]] * (0 in around) + ["$A"] + [ends[1][0]] * (1 in around)
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=[ends[i] for i in around])
    return made
