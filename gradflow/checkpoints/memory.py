"""What an audit will take of the machine's memory, said before a weight is read."""

from pathlib import Path
from typing import NamedTuple

from gradflow.checkpoints.plan import Plan

GIB = 2**30
BASE = 0.4 * GIB  # Python, JAX and its compiler
SHARE = 0.9  # of what is free may be used
SLICE = 2**23  # entries of the decoder that the loss takes at once


class Run(NamedTuple):
    """What is to be run: texts, tokens of the longest, and cotangents of each."""

    texts: int = 0
    tokens: int = 0
    probes: int = 1


NOTHING = Run()


def forecast(entries: dict[str, int], plan: Plan, layer: str, run: Run = NOTHING) -> float:
    """Bytes of a checkpoint in float64 and of one run forward and back.

    Parameters
    ----------
    entries : dict
        Number of entries by tensor.
    layer : str
        What the names of the blocks' tensors begin with; theirs are held one and a half times while they are stacked. Of the
        others, tables as they are stored.
    run : Run
        What a backward pass keeps of each block is about 12 states, 3 hidden layers and 3 maps of attention. (Measured peak
        of SmolLM2-135M: 0.77 of this.)
    """
    blocks = sum(size for name, size in entries.items() if name.startswith(layer))
    tables = sum(entries.values()) - blocks
    depth = plan.depth + (plan.encoder.depth if plan.encoder else 0)
    return BASE + 8 * (1.5 * (blocks + tables) + run.texts * depth * _block(plan, run) + _slice(plan, run))


def streamed(entries: dict[str, int], plan: Plan, layer: str, run: Run = NOTHING) -> float:
    """Bytes of a run that reads block by block: one block's weights, its backward pass for one text, and every block's input.

    Parameters as `forecast`'s. The vocabulary's tables stay in the file. (Measured peaks: 0.80 to 0.88 of this.)
    """
    blocks = sum(size for name, size in entries.items() if name.startswith(layer))
    table = plan.vocab * (plan.projected or plan.d)
    others = sum(size for name, size in entries.items() if not name.startswith(layer) and size != table)
    states = run.texts * run.tokens * plan.d * (plan.depth + 1 + 4 * run.probes)
    return BASE + 8 * (
        4 * blocks / plan.depth + 1.5 * others + run.probes * _block(plan, run) + states + _slice(plan, run)
    )


def _block(plan: Plan, run: Run) -> int:
    """Entries that a backward pass keeps of one block and text."""
    return run.tokens * (12 * plan.d + 3 * plan.inner + 3 * plan.heads * run.tokens)


def _slice(plan: Plan, run: Run) -> int:
    """Entries that the loss takes at once: rows of the decoder, as read, in float64, and laid out for products; logits."""
    width = plan.projected or plan.d
    held = min(SLICE, plan.vocab * width)
    return 6 * held + 3 * run.tokens * held // width


def free(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """Bytes that a program may still take; ``None`` where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError, IndexError):
        return None


def choose(ways: dict[bool, float], stream: bool | None, limit: float | None) -> bool:
    """Whether to stream: as ``stream`` says, or where all at once needs more than ``limit`` GiB, by default 9/10 of what is free.

    Parameters
    ----------
    ways : dict
        Bytes by whether it streams.

    Raises
    ------
    ValueError
        If there is not enough, with both figures, and the way out.
    """
    there = free() if limit is None else limit * GIB / SHARE
    streams = stream if stream is not None else there is not None and ways[False] > SHARE * there
    if there is not None and ways[streams] > SHARE * there:
        way = ", streamed block by block" if streams else ""
        other = "" if streams else ", or stream it (stream=True)"
        raise ValueError(
            f"memory: this needs about {ways[streams] / GIB:.3g} GiB in float64{way}, and may take "
            f"{SHARE * there / GIB:.3g} GiB; take shorter or fewer texts, a smaller model or a larger machine, "
            f"or state another limit (memory=, in GiB){other}"
        )
    return streams
