"""Causal models that mix tokens by a recurrence: RWKV-4."""

from typing import Any

from gradflow.branches.rwkv import ChannelMix, TimeMix
from gradflow.checkpoints.config import Config
from gradflow.checkpoints.plan import ALONE, Family, HeadNames, Sizes


def _rwkv(config: Config, s: Sizes) -> dict[str, Any]:
    """What runs is what is stored, as in training.

    At inference transformers halves the stream behind every ``rescale_every`` blocks, and the branches added to it alike. Each
    branch reads the stream behind a norm, so that this counts ε 4^k-fold after k times, and nothing else; nor does training it.
    """
    size = config.whole("attention_hidden_size") if config.get("attention_hidden_size") else s.d
    config.get("rescale_every")
    return {
        "attention": TimeMix(size),
        "mlp": ChannelMix(s.inner / s.d),
        "activation": "relu²",
        "final_eps": 1e-5,  # PyTorch's own, whatever the config says
    }


RECURRENT = (
    Family(
        name="rwkv",
        source="Peng et al. 2023 (2305.13048)",
        model_types=("rwkv",),
        details=_rwkv,
        scheme="pre-ln",
        norm="layernorm",
        prefix="rwkv.",
        layer="blocks.{l}.",
        word="embeddings",
        first="blocks.0.pre_ln",
        final="ln_out",
        attention=tuple(f"attention.{part}" for part in ("receptance", "key", "value", "output")),
        mlp=tuple(f"feed_forward.{part}" for part in ("key", "receptance", "value")),
        vectors=(
            (
                *(f"attention.time_mix_{part}" for part in ("receptance", "key", "value")),
                "attention.time_decay",
                "attention.time_first",
            ),
            tuple(f"feed_forward.time_mix_{part}" for part in ("key", "receptance")),
        ),
        norms=(("ln1",), ("ln2",)),
        head=HeadNames("head.weight"),
        heads=None,
        activation=None,
        eps="layer_norm_epsilon",
        table="context_length",
        defaults={
            "context_length": 1024,
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        },
        only=ALONE,
    ),
)
