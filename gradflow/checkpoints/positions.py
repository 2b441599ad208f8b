"""What a config says of positions: the frequencies of rotary pairs, and how far back each block's queries see."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradflow.branches.rotary import frequencies
from gradflow.checkpoints.config import LARGEST, Config, number
from gradflow.checkpoints.plan import Sizes

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE = "rope_parameters"
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": LLAMA3,
}  # by type; each besides its base and the share of a head


def turns(settings: Mapping[str, Any], size: int) -> np.ndarray:
    """Frequencies of a head's pairs.

    Parameters
    ----------
    settings : mapping
        ``rope_type``, ``rope_theta``, ``partial_rotary_factor`` and what the type takes, as in transformers' rope_parameters.
        ``"linear"`` divides all by ``factor``; ``"llama3"`` divides those that turn less than ``low_freq_factor`` times within
        the original length, keeps those that turn more than ``high_freq_factor`` times, and goes linearly between (Llama 3:
        2407.21783).
    size : int
        Width of a head.
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in SETTINGS:
        raise ValueError(f"checkpoint: config.json's rope_type is {kind!r}; read are {', '.join(SETTINGS)}")
    named = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *SETTINGS[kind]}
    left = sorted(key for key, value in settings.items() if key not in named and value is not None)
    if left:
        raise ValueError(
            f"checkpoint: config.json gives rotary positions of type {kind!r} a {left[0]!r}, which is not read"
        )
    base = number("rope_theta", settings.get("rope_theta"), 1, 1e12)
    width = int(size * number("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0), 0, 1))
    if width % 2 or not width:
        raise ValueError(f"checkpoint: config.json turns {width} of a head's {size} entries, which makes no pairs")
    plain = frequencies(width, base)
    given = {key: number(key, settings.get(key), 1e-6, 1e9) for key in SETTINGS[kind]}
    if kind == "llama3":
        factor, low, high, length = (given[key] for key in LLAMA3)
        if low >= high:
            raise ValueError(
                f"checkpoint: config.json's 'low_freq_factor' is {low:g}, not below 'high_freq_factor', {high:g}"
            )
        kept = np.clip((length * plain / (2 * np.pi) - low) / (high - low), 0, 1)
        return plain * (kept + (1 - kept) / factor)
    return plain / given.get("factor", 1.0)


def scaled(config: Config) -> bool:
    """Whether the frequencies are other than their base says."""
    stated = config.get(ROPE) or config.get("rope_scaling")
    return isinstance(stated, Mapping) and stated.get("rope_type", stated.get("type", "default")) != "default"


def rope(config: Config, s: Sizes, size: int, base: str = "rope_theta", share: str | None = None) -> np.ndarray:
    """The same frequencies in every block, (depth, pairs), by either way of stating them."""
    settings = config.get(ROPE)
    if settings is None:
        settings = (config.get("rope_scaling") or {}) | {"rope_theta": config.get(base)}
        settings |= {"partial_rotary_factor": config.get(share)} if share else {}
    if not isinstance(settings, Mapping):
        raise ValueError(f"checkpoint: config.json's {ROPE!r} is {settings!r:.60}; needs an object {{…}}")
    config.asked.update((base, "rope_scaling", share or base))
    return np.tile(turns(settings, size), (s.depth, 1))


def rope_by_kind(config: Config, size: int, kinds: Sequence[str], local: str) -> np.ndarray:
    """Frequencies that hang on whether a block's window slides, (depth, pairs); ``local`` is that kind's base."""
    settings = config.get(ROPE)
    if settings is None:
        whole = (config.get("rope_scaling") or {}) | {"rope_theta": config.get("rope_theta")}
        settings = {FULL: whole, SLIDING: {"rope_theta": config.get(local)}}
    if not isinstance(settings, Mapping) or not all(isinstance(settings.get(kind), Mapping) for kind in set(kinds)):
        raise ValueError(
            f"checkpoint: config.json's {ROPE!r} is {settings!r:.60}; needs an object for each kind of layer"
        )
    config.asked.update((local, "rope_theta", "rope_scaling"))
    each = {kind: turns(settings[kind], size) for kind in set(kinds)}
    return np.stack([each[kind] for kind in kinds])


def layer_kinds(config: Config, s: Sizes, default: Sequence[str]) -> Sequence[str]:
    """Whether each block's window slides."""
    stated = config.get("layer_types")
    kinds = default if stated is None else stated
    if not isinstance(kinds, Sequence) or len(kinds) != s.depth or not set(kinds) <= {FULL, SLIDING}:
        raise ValueError(
            f"checkpoint: config.json's 'layer_types' is {stated!r:.60}; needs {FULL!r} or {SLIDING!r} for each block"
        )
    return kinds


def reach(config: Config, s: Sizes, kinds: Sequence[str]) -> np.ndarray | None:
    """How many tokens back each block sees, (depth,); ``None`` where every one sees all of any text."""
    if SLIDING not in kinds or config.get("sliding_window") is None:
        config.asked.add("sliding_window")
        return None
    window = config.whole("sliding_window")
    return None if window >= s.positions else np.array([window if kind == SLIDING else LARGEST for kind in kinds])
