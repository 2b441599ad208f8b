"""What an audit will take of the machine's memory, said before a weight is read."""

from pathlib import Path

from gradflow.checkpoints.plan import Plan

GIB = 2**30
BASE = 0.4 * GIB  # Python, JAX and its compiler
SHARE = 0.9  # of what is free may be used


def forecast(entries: dict[str, int], plan: Plan, layer: str, tokens: tuple[int, int] = (0, 0)) -> float:
    """Bytes of a checkpoint in float64 and of one run forward and back.

    Parameters
    ----------
    entries : dict
        Number of entries by tensor.
    layer : str
        What the names of the blocks' tensors begin with; theirs are held one and a half times while they are stacked. Of the
        others, tables as they are stored and, for the loss, in float64.
    tokens : (int, int)
        Texts, and tokens of the longest; what a backward pass keeps of each block is about 12 states, 3 hidden layers and 3
        maps of attention; and of one text's logits 3. (Measured peaks: 0.79 to 0.91 of this.)
    """
    blocks = sum(size for name, size in entries.items() if name.startswith(layer))
    tables = sum(entries.values()) - blocks
    texts, length = tokens
    each = length * (12 * plan.d + 3 * plan.inner + 3 * plan.heads * length)
    depth = plan.depth + (plan.encoder.depth if plan.encoder else 0)
    return BASE + 8 * (1.5 * (blocks + tables) + texts * depth * each + 3 * length * plan.vocab)


def free(meminfo: Path = Path("/proc/meminfo")) -> float | None:
    """Bytes that a program may still take; ``None`` where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError, IndexError):
        return None


def refuse(needed: float, limit: float | None) -> None:
    """Refuse what needs more than ``limit`` GiB, by default nine tenths of what is free.

    Raises
    ------
    ValueError
        With both figures, and the way out.
    """
    there = free() if limit is None else limit * GIB / SHARE
    if there is not None and needed > SHARE * there:
        raise ValueError(
            f"memory: this needs about {needed / GIB:.3g} GiB in float64, and may take {SHARE * there / GIB:.3g} GiB; "
            "take shorter or fewer texts, a smaller model or a larger machine, or state another limit (memory=, in GiB)"
        )
