"""The families of post-LN encoders that are read: one row of data each, with names in config.json and of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HeadNames:
    """Where a masked-language-model head lies: φ(dense), its norm, then the (tied) decoder and a bias."""

    dense: str
    norm: str
    decoder: str
    bias: tuple[str, ...]
    activation: str | None = None
    """``None``: the encoder's own."""


@dataclass(frozen=True)
class Family:
    """One row: names in config.json and names of tensors, without the prefix that a model with a head puts before them.

    Attributes
    ----------
    model_types : tuple of str
        The values of ``model_type`` that share this layout.
    prefix : str
        What comes before the encoder's tensors in a model with a head.
    hidden, depth, heads, inner, activation : str
        Keys of config.json (``vocab_size``, ``max_position_embeddings``, ``pad_token_id`` are the same everywhere).
    eps : str or float
        Key of ε, or the number that the model's code fixes.
    layer : str
        Prefix of block ``l``.
    attention : tuple of str
        Modules W_Q, W_K, W_V, W_O of a block; ``mlp`` its two, ``norms`` the norms after attention and after the MLP.
    types : bool
        Whether there are token-type embeddings; type 0 is used.
    pad_offset : bool
        Whether positions start at ``pad_token_id`` + 1 and count what is not padding.
    mask : str
        The tokenizer's word for a masked token.
    """

    name: str
    source: str
    model_types: tuple[str, ...]
    prefix: str
    head: HeadNames
    hidden: str = "hidden_size"
    depth: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    inner: str = "intermediate_size"
    activation: str = "hidden_act"
    eps: str | float = "layer_norm_eps"
    layer: str = "encoder.layer.{l}."
    attention: tuple[str, ...] = (
        *(f"attention.self.{part}" for part in ("query", "key", "value")),
        "attention.output.dense",
    )
    mlp: tuple[str, ...] = ("intermediate.dense", "output.dense")
    norms: tuple[str, ...] = ("attention.output.LayerNorm", "output.LayerNorm")
    types: bool = True
    pad_offset: bool = False
    mask: str = "[MASK]"


FAMILIES = (
    Family(
        name="bert",
        source="Devlin et al. 2018 (1810.04805)",
        model_types=("bert",),
        prefix="bert.",
        head=HeadNames(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.decoder.weight",
            ("cls.predictions.bias", "cls.predictions.decoder.bias"),
        ),
    ),
    Family(
        name="distilbert",
        source="Sanh et al. 2019 (1910.01108)",
        model_types=("distilbert",),
        prefix="distilbert.",
        head=HeadNames("vocab_transform", "vocab_layer_norm", "vocab_projector.weight", ("vocab_projector.bias",)),
        hidden="dim",
        depth="n_layers",
        heads="n_heads",
        inner="hidden_dim",
        activation="activation",
        eps=1e-12,
        layer="transformer.layer.{l}.",
        attention=("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
        mlp=("ffn.lin1", "ffn.lin2"),
        norms=("sa_layer_norm", "output_layer_norm"),
        types=False,
    ),
    Family(
        name="roberta",
        source="Liu et al. 2019 (1907.11692)",
        model_types=("roberta", "xlm-roberta", "camembert"),
        mask="<mask>",
        prefix="roberta.",
        head=HeadNames(
            "lm_head.dense",
            "lm_head.layer_norm",
            "lm_head.decoder.weight",
            ("lm_head.bias", "lm_head.decoder.bias"),
            "gelu",
        ),
        pad_offset=True,
    ),
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the row that a config's ``model_type`` names.

    Raises
    ------
    ValueError
        If it names none; the message lists those that are read.
    """
    stated = config.get("model_type")
    for family in FAMILIES:
        if stated in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(f"checkpoint: config.json's 'model_type' is {stated!r}; read are the post-LN encoders {known}")
