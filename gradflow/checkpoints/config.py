"""A config.json, asked key by key: what is asked is checked, and what nobody asks may not be there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradflow import checks

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
# dropout, training, generation, what is returned and how it is computed: nothing that an evaluation's numbers depend on
INERT = frozenset(
    " ".join(
        (
            "_name_or_path architectures attention_dropout attention_probs_dropout_prob attn_pdrop begin_suppress_tokens",
            "cross_attention_hidden_size is_decoder tie_encoder_decoder",
            "bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout diversity_penalty do_sample",
            "dropout dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id",
            "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id",
            "gradient_checkpointing hidden_dropout hidden_dropout_prob id2label init_std initializer_factor",
            "initializer_range label2id language layerdrop length_penalty max_length min_length model_type",
            "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states",
            "output_scores pad_token_id prefix pretraining_tp problem_type qa_dropout remove_invalid_values",
            "reorder_and_upcast_attn repetition_penalty resid_pdrop return_dict return_dict_in_generate sep_token_id",
            "seq_classif_dropout sinusoidal_pos_embds summary_activation summary_first_dropout summary_proj_to_labels",
            "summary_type summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class",
            "top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p use_bfloat16",
            "use_cache",
        )
    ).split()
)


@dataclass(frozen=True)
class Config:
    """What a config states, with a family's defaults (transformers' own) where it is silent; ``None`` is silence.

    Every method raises a ``ValueError`` that names the key and what it may be.
    """

    stated: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    def get(self, key: str) -> Any:
        """The value, unchecked."""
        self.asked.add(key)
        value = self.stated.get(key)
        return self.defaults.get(key) if value is None else value

    def whole(self, key: str, minimum: int = 1) -> int:
        """A size."""
        value = self.get(key)
        if value is None:
            raise ValueError(f"checkpoint: config.json has no {key!r}; copy it from the model's folder again")
        number = checks.integer(f"checkpoint: config.json's {key!r}", value, minimum)
        if number > LARGEST:
            raise ValueError(f"checkpoint: config.json's {key!r} is {number}; needs at most {LARGEST}")
        return number

    def number(self, key: str, least: float, most: float) -> float:
        """A real number between the two, which count."""
        return number(key, self.get(key), least, most)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise ValueError(f"checkpoint: config.json's {key!r} is {value!r}; needs true or false")
        return value

    def names(self, key: str, those: frozenset[str]) -> frozenset[str]:
        """Those, where a flag says so."""
        return those if self.flag(key) else frozenset()

    def activation(self, key: str, those: Mapping[str, str] = ACTIVATIONS) -> str:
        """An activation, as `gradflow.branches.MLP` names it."""
        value = self.get(key)
        if not isinstance(value, str) or value not in those:
            known = ", ".join(those)
            raise ValueError(f"checkpoint: config.json's {key!r} is {value!r}; read are {known}")
        return those[value]

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse another value than these; silence is allowed."""
        value = self.get(key)
        if value is not None and not any(
            value is one or (value == one and type(value) is type(one)) for one in allowed
        ):
            read = " or ".join(map(repr, allowed))
            raise ValueError(f"checkpoint: config.json's {key!r} is {value!r}; only {read} is read")

    def refuse_others(self, known: Iterable[str] = ()) -> None:
        """Refuse a key that has a value, was not asked for and is not known to change nothing."""
        settled = self.asked | INERT | set(known)
        left = sorted(key for key, value in self.stated.items() if value is not None and key not in settled)
        if left:
            raise ValueError(
                f"checkpoint: config.json's {left[0]!r} is not known for {self.stated.get('model_type')!r} and might change "
                "what the model computes; if it does not, take it out of a copy of the file"
            )


def number(key: str, value: Any, least: float, most: float) -> float:
    """A real number between the two, which count."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"checkpoint: config.json's {key!r} is {value!r}; needs a number from {least:g} to {most:g}")
    return float(value)
