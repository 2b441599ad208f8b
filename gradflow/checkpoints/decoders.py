"""Causal models: GPT-2, GPT-NeoX, OPT, and `gradflow.checkpoints.llamas`."""

from typing import Any

from gradflow.branches.attention import Attention
from gradflow.checkpoints import positions
from gradflow.checkpoints.config import Config
from gradflow.checkpoints.llamas import LLAMAS
from gradflow.checkpoints.plan import ALL, ALONE, GATED, QKV, Family, HeadNames, Sizes
from gradflow.schemes import BY_NAME


def _neox(config: Config, s: Sizes) -> dict[str, Any]:
    parallel = config.flag("use_parallel_residual")
    attention = Attention(s.heads, causal=True, rope=True)
    return {
        "attention": attention,
        "turns": positions.rope(config, s, attention.size_of(s.d), "rotary_emb_base", "rotary_pct"),
        "biases": GATED | config.names("attention_bias", QKV | {"o"}),
        "parallel": parallel,
        "fixture": "gpt_neox" if parallel else "gpt_neox-sequential",
    }


def _opt(config: Config, s: Sizes) -> dict[str, Any]:
    before, width = config.flag("do_layer_norm_before"), config.whole("word_embed_proj_dim")
    return {
        "attention": Attention(s.heads, causal=True),
        "biases": ALL,
        "scheme": BY_NAME["pre-ln" if before else "post-ln"],
        "final_norm": before,
        "skipped": 2,  # the table's first two rows were meant for padding
        "projected": 0 if width == s.d else width,
        "fixture": "opt" if before else "opt-post",
    }


DECODERS = (
    Family(
        name="gpt2",
        source="Radford et al. 2019",
        model_types=("gpt2",),
        details=lambda config, s: {"attention": Attention(s.heads, causal=True), "biases": ALL},
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
    Family(
        name="gpt_neox",
        source="Black et al. 2022 (2204.06745); Pythia: Biderman et al. 2023 (2304.01373)",
        model_types=("gpt_neox",),
        details=_neox,
        scheme="pre-ln",
        norm="layernorm",
        prefix="gpt_neox.",
        layer="layers.{l}.",
        word="embed_in",
        final="final_layer_norm",
        attention=("attention.query_key_value", "attention.dense"),
        by_head=True,
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norms=(("input_layernorm",), ("post_attention_layernorm",)),
        head=HeadNames("embed_out.weight"),
        defaults={
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "rotary_emb_base": 10_000.0,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        only=ALONE,
        unused=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    ),
    Family(
        name="opt",
        source="Zhang et al. 2022 (2205.01068)",
        model_types=("opt",),
        details=_opt,
        scheme="pre-ln",
        norm="layernorm",
        prefix="model.decoder.",
        layer="layers.{l}.",
        word="embed_tokens",
        position="embed_positions",
        final="final_layer_norm",
        attention=(*(f"self_attn.{n}_proj" for n in "qkv"), "self_attn.out_proj"),
        mlp=("fc1", "fc2"),
        norms=(("self_attn_layer_norm",), ("final_layer_norm",)),
        projection=("project_in", "project_out"),
        head=HeadNames("lm_head.weight"),
        inner="ffn_dim",
        activation="activation_function",
        eps=1e-5,
        defaults={"activation_function": "relu", "do_layer_norm_before": True, "tie_word_embeddings": True},
        only=ALONE
        | {"_remove_final_layer_norm": (False,), "enable_bias": (True,), "layer_norm_elementwise_affine": (True,)},
        inert=("activation_dropout",),
    ),
    *LLAMAS,
)
