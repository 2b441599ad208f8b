"""An architecture as a file describes it: gradflow's own keys in TOML or JSON, or a Hugging Face config.json.

Files are data: sizes are capped, nothing is executed, and every refusal is one line that names the file and the key.
`gradflow.linting.lint` holds the description against the scheme that it names.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradflow import checks
from gradflow.branches import named
from gradflow.checkpoints.config import ACTIVATIONS
from gradflow.checkpoints.encoders import ENCODERS
from gradflow.laws.leading import LENGTHS
from gradflow.schemes import ALIASES, BY_NAME, scheme_of

BYTES = 1_000_000
DEEPEST = 20_000  # sub-layers that the law follows within seconds and a GiB
WIDEST = 2**24
SPAN = (1e-9, 1e9)  # of a multiplier; beyond it, its powers leave float64


@dataclass(frozen=True)
class Architecture:
    """What a file says. ``None`` is what it does not say: the catalogue's constant is meant.

    Attributes
    ----------
    file, scheme, norm, model_type : str
        The path as it was given; the catalogue's name, aliases resolved; the norm; of a Hugging Face config, its type.
    depth, d : int
        Blocks of the stack that the law follows, and width.
    block : tuple of str
        Branches of one block.
    alpha, beta, weight_gain : float, optional
        What the user's code multiplies skip, branch, and at initialisation FFN, V and O with; ``alpha_on``: where alpha stands.
    init, output_gain : str, float, optional
        Free text, which no rule reads; or the gain of each branch's last matrix at initialisation, over Var W = 1/fan_in.
    encoder, decoder : int, optional
        Blocks of both stacks of an encoder-decoder; alpha and weight_gain are the encoder's then, and the decoder's where
        ``decoder_alpha`` and ``decoder_weight_gain`` are not given.
    """

    file: str
    scheme: str
    depth: int
    d: int
    block: tuple[str, ...] = ("attention", "mlp:gelu")
    norm: str = "layernorm"
    final_norm: bool = False
    alpha: float | None = None
    beta: float | None = None
    weight_gain: float | None = None
    alpha_on: str = "skip"
    init: str | None = None
    output_gain: float | None = None
    encoder: int | None = None
    decoder: int | None = None
    decoder_alpha: float | None = None
    decoder_weight_gain: float | None = None
    model_type: str | None = None

    @property
    def sublayers(self) -> int:
        """S of the stack that the law follows."""
        return self.depth * len(self.block)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"block": list(self.block)}


@dataclass(frozen=True)
class Layout:
    """What a Hugging Face ``model_type`` stands for, and the names of its keys."""

    model_types: tuple[str, ...]
    scheme: str
    norm: str = "rms"
    final_norm: bool = True
    attention: str = "attention:causal"
    gated: bool = True
    depth: str = "num_hidden_layers"
    d: str = "hidden_size"
    activation: str = "hidden_act"
    default: str = "silu"
    decoder: str | None = None


_BERT: dict[str, Any] = dict(norm="layernorm", final_norm=False, attention="attention", gated=False, default="gelu")
_GPT2: dict[str, Any] = dict(norm="layernorm", gated=False, activation="activation_function", default="gelu_new")
_T5: dict[str, Any] = dict(attention="attention", gated=False, activation="feed_forward_proj", default="relu")
LAYOUTS = (
    # its own initialisation draws the output matrices S^(−1/2) as large: the catalogue's row of that name, a pre-LN
    Layout(("gpt2",), "gpt2", depth="n_layer", d="n_embd", **_GPT2),
    *(
        Layout(f.model_types, "post-ln", depth=f.depth, d=f.hidden, activation=str(f.activation), **_BERT)
        for f in ENCODERS
    ),
    Layout(("llama", "mistral", "qwen2"), "pre-ln"),
    Layout(("gemma2",), "sandwich", activation="hidden_activation", default="gelu_pytorch_tanh"),
    Layout(("olmo2",), "res-post-norm"),
    Layout(("t5",), "pre-ln", depth="num_layers", d="d_model", decoder="num_decoder_layers", **_T5),
)


def _scalar(where: str, value: Any) -> Any:
    """A value that is short enough to be shown in a refusal."""
    if isinstance(value, dict | list):
        raise ValueError(f"{where}: needs one value, got a {'table' if isinstance(value, dict) else 'list'}")
    if isinstance(value, str) and len(value) > 200:
        raise ValueError(f"{where}: needs at most 200 characters, got {len(value)}")
    if isinstance(value, int) and abs(value) > 2**63:
        raise ValueError(f"{where}: needs a number below 2**63")
    return value


def _one_of(options: Any) -> Callable[[str, Any], str]:
    return lambda where, value: checks.one_of(where, _scalar(where, value), options)


def _whole(minimum: int, most: int) -> Callable[[str, Any], int]:
    def read(where: str, value: Any) -> int:
        number = checks.integer(where, _scalar(where, value), minimum)
        if number > most:
            raise ValueError(f"{where}: needs at most {most}, got {number}")
        return number

    return read


def _multiplier(zero: bool = False) -> Callable[[str, Any], float]:
    def read(where: str, value: Any) -> float:
        good = isinstance(_scalar(where, value), int | float) and not isinstance(value, bool)
        if good and (SPAN[0] <= value <= SPAN[1] or (zero and value == 0)):  # NaN compares false
            return float(value)
        most = f"from {SPAN[0]:g} to {SPAN[1]:g}{' or 0' if zero else ''}"
        raise ValueError(f"{where}: needs a number {most}, got {value!r}")

    return read


def _flag(where: str, value: Any) -> bool:
    if not isinstance(_scalar(where, value), bool):
        raise ValueError(f"{where}: needs true or false, got {value!r}")
    return value


def _block(where: str, value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    if not 1 <= len(names) <= 16:
        raise ValueError(f"{where}: needs from 1 to 16 branches, got {len(names)}")
    return tuple(named(where, _scalar(where, name)).name for name in names)


def _init(where: str, value: Any) -> Any:
    """Free text, or the table's one number."""
    if not isinstance(value, dict):
        if not isinstance(_scalar(where, value), str):
            raise ValueError(f"{where}: needs a text or {{output_gain = NUMBER}}, got {value!r}")
        return value
    for key in value:
        checks.one_of(f"{where}, key", _scalar(where, key), ("output_gain",))
    return {key: _multiplier(zero=True)(f"{where}, {key!r}", number) for key, number in value.items()}


KEYS: dict[str, Callable[[str, Any], Any]] = {
    "scheme": _one_of((*BY_NAME, *ALIASES)),
    **dict.fromkeys(("depth", "encoder", "decoder"), _whole(1, DEEPEST)),
    "d": _whole(3, WIDEST),
    "block": _block,
    "norm": _one_of((*LENGTHS, "dyt", "none")),
    "final_norm": _flag,
    **dict.fromkeys(("alpha", "weight_gain", "decoder_alpha", "decoder_weight_gain"), _multiplier()),
    "beta": _multiplier(zero=True),
    "alpha_on": _one_of(("skip", "branch")),
    "init": _init,
}


def _own(file: str, held: Mapping[str, Any]) -> Architecture:
    """gradflow's own keys."""
    where = f"architecture: {file!r}"
    found: dict[str, Any] = {}
    for key, value in held.items():
        name = checks.one_of(f"{where}, key", _scalar(where, key), KEYS)
        if value is not None:  # JSON's null is what is left out
            found[name] = KEYS[name](f"{where}, {name!r}", value)
    found.setdefault("depth", found.get("encoder", found.get("decoder")))
    for key in ("scheme", "depth", "d"):
        if found.get(key) is None:
            raise ValueError(f"{where} has no {key!r}; it needs at least a scheme, a depth in blocks and a width d")
    for key in ("decoder_alpha", "decoder_weight_gain"):
        if key in found and not {"encoder", "decoder"} <= found.keys():
            raise ValueError(f"{where}, {key!r}: belongs to an encoder-decoder; give 'encoder' and 'decoder' in blocks")
    if isinstance(found.get("init"), dict):
        found |= found.pop("init")
    found["scheme"] = scheme_of(found["scheme"]).name
    return Architecture(file=file, **found)


def of_config(file: str, config: Mapping[str, Any]) -> Architecture:
    """A model's config.json; what the model's class fixes is in `LAYOUTS`."""
    where = f"architecture: {file!r}"
    stated = _scalar(f"{where}, 'model_type'", config["model_type"])
    layout = next((row for row in LAYOUTS if stated in row.model_types), None)
    if layout is None:
        known = ", ".join(name for row in LAYOUTS for name in row.model_types)
        raise ValueError(f"{where}, 'model_type': {stated!r} is not read; known are {known}")
    if config.get("add_cross_attention"):
        raise ValueError(
            f"{where}, 'add_cross_attention': does not say what memory the decoder asks; write its block as a .toml file, "
            "with 'cross-attention' (32 tokens of cosine 0)"
        )

    def whole(key: str, most: int, minimum: int = 1) -> int:
        if config.get(key) is None:
            raise ValueError(f"{where} has no {key!r}, which every {stated} config has; copy it again")
        return _whole(minimum, most)(f"{where}, {key!r}", config[key])

    act = config.get(layout.activation)
    act = layout.default if act is None else _scalar(f"{where}, {layout.activation!r}", act)
    gated, name = layout.gated, act
    if isinstance(act, str) and act.startswith("gated-"):  # T5 v1.1, whose gated-gelu is the tanh form
        gated, name = True, "gelu_new" if act == "gated-gelu" else act.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise ValueError(f"{where}, {layout.activation!r}: {act!r} is not read; known are {', '.join(ACTIVATIONS)}")
    depth, both = whole(layout.depth, DEEPEST), layout.decoder and config.get("is_encoder_decoder", True)
    decoder = whole(str(layout.decoder), DEEPEST) if both and config.get(str(layout.decoder)) is not None else depth
    return Architecture(
        file=file,
        scheme=layout.scheme,
        depth=depth,
        d=whole(layout.d, WIDEST, 3),
        block=(layout.attention, f"{'glu' if gated else 'mlp'}:{ACTIVATIONS[name]}"),
        norm=layout.norm,
        final_norm=layout.final_norm,
        encoder=depth if both else None,
        decoder=decoder if both else None,
        model_type=stated,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ; the last of two would win unseen."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:80]!r} stands twice")
        found[key] = value
    return found


def _held(path: str | Path) -> dict[str, Any]:
    """The table in a file."""
    try:
        file = Path(path).expanduser()
        is_file, is_folder = file.is_file(), file.is_dir()
    except (TypeError, ValueError, OSError, RuntimeError):
        raise ValueError(f"architecture: needs the path of a file, got {path!r:.80}") from None
    where, kind = f"architecture: {str(path)!r}", file.suffix.lower()
    if not is_file:
        raise ValueError(f"{where} is {'a folder; name a file, as its config.json' if is_folder else 'no file'}")
    if kind not in (".toml", ".json"):
        raise ValueError(f"{where} ends in {kind!r}; needs a .toml or a .json file")
    try:
        with file.open("rb") as stream:
            data = stream.read(BYTES + 1)
    except OSError as error:
        raise ValueError(f"{where} cannot be read ({error.strerror})") from error
    if len(data) > BYTES:
        raise ValueError(f"{where} holds more than {BYTES:,} bytes; an architecture is a few lines")
    try:
        text = data.decode("utf-8-sig")
        held = tomllib.loads(text) if kind == ".toml" else json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad syntax, or an endless integer
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{where} is no whole {kind[1:].upper()} file ({reason}); write or copy it again") from error
    if not isinstance(held, dict):
        raise ValueError(f"{where} holds a {type(held).__name__} where an object {{…}} is needed")
    return held


def read(path: str | Path) -> Architecture:
    """Read an architecture from TOML or JSON, or from a Hugging Face config.json, which has a ``model_type``.

    Keys: ``scheme``, ``depth`` (blocks) and ``d``; ``block``, ``norm``, ``final_norm``; what the code uses, ``alpha``, ``beta``,
    ``weight_gain``, ``alpha_on``, ``init``; for an encoder-decoder ``encoder`` and ``decoder`` (blocks; ``depth`` is the
    encoder's where it is left out), ``decoder_alpha`` and ``decoder_weight_gain``.

    Raises
    ------
    ValueError
        For a file that is missing, a folder, damaged or too long, and for a key that is unknown, missing, of the wrong type or
        out of range; one line with the file and the key.
    """
    held = _held(path)
    found = (of_config if "model_type" in held and "scheme" not in held else _own)(str(path), held)
    if found.sublayers > DEEPEST:
        raise ValueError(f"architecture: {str(path)!r}, 'depth': needs at most {DEEPEST:,} sub-layers in all")
    return found
