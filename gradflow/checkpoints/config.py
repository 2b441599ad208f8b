"""What a config.json must say: every size and switch that the forward pass depends on, checked before a tensor is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradflow import checks
from gradflow.checkpoints.families import Family

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
LARGEST = 2**24  # no size of a model is larger; refuses absurd ones before anything is allocated


@dataclass(frozen=True)
class Sizes:
    """What a config says, checked. ``skipped`` rows of the position table are never used; ``pad`` is the padding's id."""

    hidden: int
    depth: int
    heads: int
    inner: int
    vocab: int
    table: int
    types: int
    skipped: int
    pad: int
    activation: str
    eps: float
    tied: bool


def sizes(family: Family, config: Mapping[str, Any]) -> Sizes:
    """Check everything in a config that the forward pass depends on.

    Raises
    ------
    ValueError
        Naming the key, and what it may be.
    """

    def whole(key: str, minimum: int = 1) -> int:
        if key not in config:
            raise ValueError(f"checkpoint: config.json has no {key!r}; copy it from the model's folder again")
        number = checks.integer(f"checkpoint: config.json's {key!r}", config[key], minimum)
        if number > LARGEST:
            raise ValueError(f"checkpoint: config.json's {key!r} is {number}; needs at most {LARGEST}")
        return number

    for key in ("is_decoder", "add_cross_attention", "is_encoder_decoder", "pruned_heads"):
        if config.get(key):
            raise ValueError(f"checkpoint: config.json sets {key!r}; only plain bidirectional encoders are read")
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ValueError(f"checkpoint: config.json's 'position_embedding_type' is {kind!r}; only 'absolute' is read")
    act = config.get(family.activation, "gelu")
    if not isinstance(act, str) or act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"checkpoint: config.json's {family.activation!r} is {act!r}; read are {known}")
    hidden, heads = whole(family.hidden, 3), whole(family.heads)
    if hidden % heads:
        raise ValueError(
            f"checkpoint: config.json's {family.heads!r} is {heads}, which does not divide {family.hidden!r}, {hidden}"
        )
    table, pad = whole("max_position_embeddings"), 0
    if family.pad_offset:
        pad = whole("pad_token_id", 0)
        if pad + 1 >= table:
            raise ValueError(f"checkpoint: config.json's 'pad_token_id' {pad} leaves none of the {table} positions")
    return Sizes(
        hidden=hidden,
        depth=whole(family.depth),
        heads=heads,
        inner=whole(family.inner),
        vocab=whole("vocab_size"),
        table=table,
        types=whole("type_vocab_size") if family.types else 0,
        skipped=pad + 1 if family.pad_offset else 0,
        pad=pad,
        activation=ACTIVATIONS[act],
        eps=_eps(family.eps, config),
        tied=config.get("tie_word_embeddings", True) is not False,
    )


def _eps(key: str | float, config: Mapping[str, Any]) -> float:
    """ε of every norm; transformers' default, 1e-12, where the config leaves it out."""
    if not isinstance(key, str):
        return float(key)
    value = config.get(key, 1e-12)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"checkpoint: config.json's {key!r} is {value!r}; needs a number from 0 to 1")
    return float(value)
