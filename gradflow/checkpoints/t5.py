"""Encoder–decoders of T5's kind: pre-RMSNorm, no biases, logits as they are, and positions by what is added to these."""

from dataclasses import replace
from typing import Any

from gradflow.branches.attention import Attention
from gradflow.branches.cross_attention import CrossAttention
from gradflow.branches.mlp import MLP
from gradflow.branches.relative import Buckets
from gradflow.checkpoints.config import ACTIVATIONS, LARGEST, Config
from gradflow.checkpoints.plan import Family, HeadNames, Sizes


def _encoder(config: Config, s: Sizes, both: bool = True) -> dict[str, Any]:
    """What both stacks share; a decoder's queries see earlier keys alone."""
    gated = config.get("feed_forward_proj").startswith("gated-")
    config.only("is_gated_act", gated)
    config.only("dense_act_fn", *(name for name, activation in ACTIVATIONS.items() if activation == s.activation))
    number = config.whole("relative_attention_num_buckets", 4)
    furthest = config.whole("relative_attention_max_distance", number // 2 + 1)
    for key in ("num_decoder_layers", "decoder_start_token_id", "scale_decoder_outputs", "pad_token_id"):
        config.get(key)
    return {
        "attention": Attention(s.heads, causal=not both, head_size=config.whole("d_kv"), scale=1.0),
        "mlp": MLP(s.activation, s.inner / s.d, gated=gated),
        "relative": Buckets(number, furthest, both),
        "norm_bias": False,
        "tied": False,
        "pad": config.whole("pad_token_id", 0),
        "fixture": "t5-gated" if gated else "t5",
    }


def _decoder(config: Config, s: Sizes) -> dict[str, Any]:
    """Where it is tied to the word table its last state is scaled; transformers 5 says so by a key of its own."""
    found = _encoder(config, s, both=False)
    tied = config.flag("tie_word_embeddings")
    if config.get("scale_decoder_outputs") is not None:
        config.only("tie_word_embeddings", True)
        tied = config.flag("scale_decoder_outputs")
    return found | {
        "depth": s.depth if config.get("num_decoder_layers") is None else config.whole("num_decoder_layers"),
        "cross": CrossAttention(s.heads, head_size=found["attention"].head_size, scale=1.0),
        "tied": tied,
        "head_scale": s.d**-0.5 if tied else 1.0,
        "start": config.whole("decoder_start_token_id", 0),
    }


def _mt5(config: Config, s: Sizes) -> dict[str, Any]:
    """Never tied, whatever its config says."""
    return _decoder(config, s) | {"tied": False, "head_scale": 1.0}


def _umt5(config: Config, s: Sizes) -> dict[str, Any]:
    return _decoder(config, s) | {"fixture": "umt5"}


def _modules(layer: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{layer}.{name}" for name in names)


def _mlp(layer: int) -> dict[str, Any]:
    module = f"layer.{layer}.DenseReluDense"
    return {"mlp": _modules(module, "wi", "wo"), "gated": _modules(module, "wi_0", "wi_1", "wo")}


TABLE = "block.{l}.layer.0.SelfAttention.relative_attention_bias"
FIRST = TABLE.format(l=0)
ENCODER = Family(
    name="t5",
    source="Raffel et al. 2020 (1910.10683); gated: Shazeer 2020 (2002.05202); Flan-T5: Chung et al. 2022 (2210.11416)",
    model_types=("t5",),
    details=_encoder,
    scheme="pre-ln",
    norm="rms",
    prefix="",
    layer="encoder.block.{l}.",
    word="shared",
    final="encoder.final_layer_norm",
    attention=_modules("layer.0.SelfAttention", *"qkvo"),
    norms=(("layer.0.layer_norm",), ("layer.1.layer_norm",)),
    relative=f"encoder.{FIRST}",
    head=HeadNames("lm_head.weight"),
    hidden="d_model",
    depth="num_layers",
    heads="num_heads",
    inner="d_ff",
    activation="feed_forward_proj",
    activations={"relu": "relu", "gated-gelu": "gelu_tanh", "gated-silu": "silu"},
    eps="layer_norm_epsilon",
    table=LARGEST,
    size="d_kv",
    defaults={
        "feed_forward_proj": "relu",
        "layer_norm_epsilon": 1e-6,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    only={"is_encoder_decoder": (True,), "is_decoder": (False,), "tie_encoder_decoder": (False,)},
    inert=("dropout_rate", "n_positions", "output_past"),
    **_mlp(1),
)
T5 = replace(
    ENCODER,
    details=_decoder,
    layer="decoder.block.{l}.",
    final="decoder.final_layer_norm",
    cross=_modules("layer.1.EncDecAttention", *"qkvo"),
    norms=(*ENCODER.norms, ("layer.2.layer_norm",)),
    relative=f"decoder.{FIRST}",
    encoder=ENCODER,
    unused=("embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
    **_mlp(2),
)


def _kin(name: str, source: str, details: Any, own: bool = False, **more: Any) -> Family:
    """A row that differs from T5's in what ``details`` say, and where ``own`` in that each block has a table."""
    shared: dict[str, Any] = {"name": name, "source": source, "model_types": (name,), **more}
    shared["defaults"] = {**T5.defaults, "feed_forward_proj": "gated-gelu"}
    tables = {side: {"relative": f"{side}.{TABLE}"} if own else {} for side in ("encoder", "decoder")}
    encoder = replace(ENCODER, **shared, **tables["encoder"])
    return replace(T5, **shared, **tables["decoder"], details=details, encoder=encoder)


ENCODER_DECODERS = (
    T5,
    _kin("mt5", "Xue et al. 2020 (2010.11934)", _mt5),
    _kin("umt5", "Chung et al. 2023 (2304.09151)", _umt5, own=True, inert=(*T5.inert, "scalable_attention")),
)
