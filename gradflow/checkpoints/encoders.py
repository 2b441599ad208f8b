"""Post-LN encoders: BERT and kin."""

from typing import Any

from gradflow.branches.attention import Attention
from gradflow.checkpoints.config import Config
from gradflow.checkpoints.plan import ALL, Family, HeadNames, Sizes

DEFAULTS = {"tie_word_embeddings": True, "hidden_act": "gelu", "activation": "gelu", "layer_norm_eps": 1e-12}
BERT_BLOCK: dict[str, Any] = dict(
    layer="encoder.layer.{l}.",
    attention=(*(f"attention.self.{part}" for part in ("query", "key", "value")), "attention.output.dense"),
    mlp=("intermediate.dense", "output.dense"),
    norms=(("attention.output.LayerNorm",), ("output.LayerNorm",)),
)
EMBEDDING: dict[str, Any] = dict(
    scheme="post-ln",
    norm="layernorm",
    word="embeddings.word_embeddings",
    position="embeddings.position_embeddings",
    kind="embeddings.token_type_embeddings",
    first="embeddings.LayerNorm",
    defaults=DEFAULTS,
    only={"position_embedding_type": ("absolute",)},
    unused=("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"),
)


def _encoder(config: Config, s: Sizes) -> dict[str, Any]:
    for key in ("is_decoder", "add_cross_attention", "is_encoder_decoder", "pruned_heads"):
        if config.get(key):
            raise ValueError(f"checkpoint: config.json sets {key!r}; only plain bidirectional encoders are read")
    return {"attention": Attention(s.heads), "final_norm": False, "biases": ALL}


def _bert(config: Config, s: Sizes) -> dict[str, Any]:
    return _encoder(config, s) | {"types": config.whole("type_vocab_size")}


def _roberta(config: Config, s: Sizes) -> dict[str, Any]:
    """Positions start at ``pad_token_id`` + 1 and count what is not padding."""
    pad = config.whole("pad_token_id", 0)
    if pad + 1 >= s.positions:
        raise ValueError(f"checkpoint: config.json's 'pad_token_id' {pad} leaves none of the {s.positions} positions")
    return _bert(config, s) | {"skipped": pad + 1, "pad": pad, "counted": True, "positions": s.positions - pad - 1}


ENCODERS = (
    Family(
        name="bert",
        source="Devlin et al. 2018 (1810.04805)",
        model_types=("bert",),
        details=_bert,
        prefix="bert.",
        head=HeadNames(
            "cls.predictions.decoder.weight",
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            ("cls.predictions.bias", "cls.predictions.decoder.bias"),
        ),
        mask="[MASK]",
        **EMBEDDING | BERT_BLOCK,
    ),
    Family(
        name="distilbert",
        source="Sanh et al. 2019 (1910.01108)",
        model_types=("distilbert",),
        details=_encoder,
        prefix="distilbert.",
        head=HeadNames("vocab_projector.weight", "vocab_transform", "vocab_layer_norm", ("vocab_projector.bias",)),
        hidden="dim",
        depth="n_layers",
        heads="n_heads",
        inner="hidden_dim",
        activation="activation",
        eps=1e-12,
        layer="transformer.layer.{l}.",
        attention=("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
        mlp=("ffn.lin1", "ffn.lin2"),
        norms=(("sa_layer_norm",), ("output_layer_norm",)),
        mask="[MASK]",
        **{name: value for name, value in EMBEDDING.items() if name != "kind"},
    ),
    Family(
        name="roberta",
        source="Liu et al. 2019 (1907.11692)",
        model_types=("roberta", "xlm-roberta", "camembert"),
        details=_roberta,
        prefix="roberta.",
        head=HeadNames(
            "lm_head.decoder.weight",
            "lm_head.dense",
            "lm_head.layer_norm",
            ("lm_head.bias", "lm_head.decoder.bias"),
            "gelu",
        ),
        mask="<mask>",
        **EMBEDDING | BERT_BLOCK,
    ),
)
