"""Llama and the causal models that came after it: RMSNorm, rotary positions, shared keys and values, gated MLPs or mixtures."""

from dataclasses import replace
from typing import Any

from gradflow.branches.attention import Attention
from gradflow.branches.experts import Experts
from gradflow.checkpoints import positions
from gradflow.checkpoints.config import Config
from gradflow.checkpoints.plan import ALONE, GATED, QKV, Family, HeadNames, Sizes
from gradflow.checkpoints.positions import FULL, SLIDING

O = frozenset("o")


def _grouped(config: Config, s: Sizes) -> Attention:
    """Causal attention with rotary positions, whose heads may share keys and values and be as wide as the config says."""
    few = config.whole("num_key_value_heads") if config.get("num_key_value_heads") else s.heads
    if s.heads % few:
        raise ValueError(
            f"checkpoint: config.json's 'num_key_value_heads' is {few}, which does not divide the {s.heads} heads"
        )
    size = config.whole("head_dim", 2) if config.get("head_dim") else s.d // s.heads
    return Attention(
        s.heads,
        causal=True,
        rope=True,
        kv_heads=None if few == s.heads else few,
        head_size=None if size * s.heads == s.d else size,
    )


def _modern(config: Config, s: Sizes, biases: frozenset[str] = frozenset()) -> dict[str, Any]:
    """What Llama and all that came after it share."""
    attention = _grouped(config, s)
    turns = positions.rope(config, s, attention.size_of(s.d))
    return {"attention": attention, "turns": turns, "biases": biases, "norm_bias": False}


def _llama(config: Config, s: Sizes) -> dict[str, Any]:
    biases = config.names("attention_bias", QKV | O) | config.names("mlp_bias", GATED)
    found = _modern(config, s, biases)
    return found | {"fixture": "llama-scaled" if biases or positions.scaled(config) else "llama"}


def _mistral(config: Config, s: Sizes) -> dict[str, Any]:
    return _modern(config, s) | {"reach": positions.reach(config, s, [SLIDING] * s.depth)}


def _qwen(config: Config, s: Sizes, biases: frozenset[str]) -> dict[str, Any]:
    slides, first = config.flag("use_sliding_window"), config.get("max_window_layers")
    whole = s.depth if not slides or first is None else config.whole("max_window_layers", 0)
    kinds = positions.layer_kinds(config, s, [FULL if l < whole else SLIDING for l in range(s.depth)])
    if not slides:  # then transformers reads no window
        config.asked.add("sliding_window")
    return _modern(config, s, biases) | {"reach": positions.reach(config, s, kinds) if slides else None}


def _qwen2(config: Config, s: Sizes) -> dict[str, Any]:
    return _qwen(config, s, QKV)


def _qwen3(config: Config, s: Sizes) -> dict[str, Any]:
    found = _qwen(config, s, config.names("attention_bias", QKV | O))
    return found | {"attention": replace(found["attention"], qk_norm=True, eps=s.eps)}


def _gemma(config: Config, s: Sizes, kinds: list[str]) -> dict[str, Any]:
    attention = replace(_grouped(config, s), scale=config.number("query_pre_attn_scalar", 1e-6, 1e9) ** -0.5)
    caps = {}
    for name in ("attn", "final"):
        key = f"{name}_logit_softcapping"
        caps[name] = None if config.get(key) is None else config.number(key, 1e-6, 1e9)
    return {
        "attention": replace(attention, softcap=caps["attn"]),
        "softcap": caps["final"],
        "reach": positions.reach(config, s, kinds),
        "biases": config.names("attention_bias", QKV | O),
        "norm_bias": False,
        "unit": 1.0,
        "scale": s.d**0.5,
    }


def _gemma2(config: Config, s: Sizes) -> dict[str, Any]:
    """Every other block slides, from the first."""
    kinds = list(positions.layer_kinds(config, s, [FULL if l % 2 else SLIDING for l in range(s.depth)]))
    found = _gemma(config, s, kinds)
    return found | {"turns": positions.rope(config, s, found["attention"].size_of(s.d))}


def _gemma3(config: Config, s: Sizes) -> dict[str, Any]:
    """Every sixth block sees all, with frequencies of its own."""
    every = config.whole("sliding_window_pattern") if config.get("sliding_window_pattern") else 6
    config.asked.add("_sliding_window_pattern")  # what layer_types were made by
    kinds = list(positions.layer_kinds(config, s, [SLIDING if (l + 1) % every else FULL for l in range(s.depth)]))
    found = _gemma(config, s, kinds)
    attention = replace(found["attention"], qk_norm=True, eps=s.eps)
    turns = positions.rope_by_kind(config, attention.size_of(s.d), kinds, "rope_local_base_freq")
    return found | {"attention": attention, "turns": turns}


def _olmo2(config: Config, s: Sizes) -> dict[str, Any]:
    found = _modern(config, s, config.names("attention_bias", QKV | O))
    return found | {"attention": replace(found["attention"], qk_norm=True, qk_whole=True, eps=s.eps)}


def _mixtral(config: Config, s: Sizes) -> dict[str, Any]:
    number, chosen = config.whole("num_local_experts"), config.whole("num_experts_per_tok")
    if chosen > number:
        raise ValueError(f"checkpoint: config.json's 'num_experts_per_tok' is {chosen}, of {number} experts")
    return _mistral(config, s) | {"mlp": Experts(number, chosen, s.activation, ratio=s.inner / s.d)}


LLAMA = Family(
    name="llama",
    source="Touvron et al. 2023 (2302.13971); SmolLM2: Allal et al. 2025 (2502.02737)",
    model_types=("llama",),
    details=_llama,
    scheme="pre-ln",
    norm="rms",
    prefix="model.",
    layer="layers.{l}.",
    word="embed_tokens",
    final="norm",
    attention=(*(f"self_attn.{n}_proj" for n in "qkv"), "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    norms=(("input_layernorm",), ("post_attention_layernorm",)),
    head=HeadNames("lm_head.weight"),
    eps="rms_norm_eps",
    size="head_dim",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    only=ALONE | {"rope_interleaved": (False,)},
    inert=("is_llama_config",),
    unused=("rotary_emb.inv_freq",),
)
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
QWEN = {**LLAMA.defaults, "use_sliding_window": False}
GEMMA2 = replace(
    LLAMA,
    name="gemma2",
    source="Gemma Team 2024 (2408.00118)",
    model_types=("gemma2",),
    details=_gemma2,
    scheme="sandwich",
    norms=(
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    activation="hidden_activation",
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "head_dim": 256,
    },
    only=ALONE | {"use_bidirectional_attention": (False,), "hidden_act": ("gelu_pytorch_tanh",)},
    inert=(),
)
LLAMAS = (
    LLAMA,
    replace(LLAMA, name="mistral", source="Jiang et al. 2023 (2310.06825)", model_types=("mistral",), details=_mistral),
    replace(
        LLAMA,
        name="qwen2",
        source="Yang et al. 2024 (2407.10671)",
        model_types=("qwen2",),
        details=_qwen2,
        defaults=QWEN,
        only={**ALONE, "use_mrope": (False,)},
    ),
    replace(
        LLAMA,
        name="qwen3",
        source="Yang et al. 2025 (2505.09388)",
        model_types=("qwen3",),
        details=_qwen3,
        qk_norms=QK_NORMS,
        defaults=QWEN,
    ),
    GEMMA2,
    replace(
        GEMMA2,
        name="gemma3",
        source="Gemma Team 2025 (2503.19786)",
        model_types=("gemma3_text",),
        details=_gemma3,
        qk_norms=QK_NORMS,
        defaults={**GEMMA2.defaults, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0},
    ),
    replace(
        LLAMA,
        name="olmo2",
        source="OLMo Team 2025 (2501.00656)",
        model_types=("olmo2",),
        details=_olmo2,
        scheme="res-post-norm",
        norms=(("post_attention_layernorm",), ("post_feedforward_layernorm",)),
        qk_norms=QK_NORMS,
        defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    ),
    replace(
        LLAMA,
        name="mixtral",
        source="Jiang et al. 2024 (2401.04088)",
        model_types=("mixtral",),
        details=_mixtral,
        mlp=tuple(f"block_sparse_moe.experts.{{e}}.w{n}" for n in (1, 3, 2)),
        router="block_sparse_moe.gate",
        defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        inert=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    ),
)
