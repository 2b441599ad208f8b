"""Causal models: what config.json and the model's code say of each family."""

from typing import Any

from gradflow.attention import Attention
from gradflow.checkpoints.config import Config
from gradflow.checkpoints.plan import ALL, Family, HeadNames, Sizes

ALONE = {"add_cross_attention": (False,), "is_encoder_decoder": (False,), "pruned_heads": ({},)}


def _gpt2(config: Config, s: Sizes) -> dict[str, Any]:
    return {"attention": Attention(s.heads, causal=True), "biases": ALL}


DECODERS = (
    Family(
        name="gpt2",
        source="Radford et al. 2019",
        model_types=("gpt2",),
        details=_gpt2,
        scheme="pre-ln",
        norm="layernorm",
        prefix="transformer.",
        layer="h.{l}.",
        word="wte",
        position="wpe",
        final="ln_f",
        attention=("attn.c_attn", "attn.c_proj"),
        mlp=("mlp.c_fc", "mlp.c_proj"),
        norms=(("ln_1",), ("ln_2",)),
        in_out=True,
        head=HeadNames("lm_head.weight"),
        hidden="n_embd",
        depth="n_layer",
        heads="n_head",
        inner="n_inner",
        activation="activation_function",
        eps="layer_norm_epsilon",
        table="n_positions",
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "n_inner": None,
            "tie_word_embeddings": True,
        },
        only=ALONE | {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        inert=("n_ctx",),
        unused=("attn.bias", "attn.masked_bias"),
    ),
)
