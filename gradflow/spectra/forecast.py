"""What each way will cost, in seconds and bytes, before it is run: counted operations over rates measured on this machine."""

import functools
import os
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradflow.spectra import compact
from gradflow.spectra.network import Chain, Network
from gradflow.stack import Drawn

GUESSED = 2.0  # seconds below which rates are taken from a table rather than measured


class Rates(NamedTuple):
    """Operations a second of a large matmul, bytes a second of memory, seconds of an n × n SVD and QR over n³, draws a second."""

    matmul: float
    memory: float
    svd: float
    qr: float
    draws: float


TYPICAL = Rates(4e10, 1e10, 1.5e-8, 2e-9, 5e7)  # one desktop core or two


@dataclass(frozen=True)
class Forecast:
    """Seconds after compilation and peak bytes of one way, for one network; ``measured``: by rates of this machine."""

    method: str
    seconds: float
    bytes: float
    measured: bool

    def times(self, networks: int) -> "Forecast":
        """For that many networks, one after another."""
        return Forecast(self.method, self.seconds * networks, self.bytes, self.measured)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"seconds": self.seconds, "bytes": self.bytes}

    def __str__(self) -> str:
        return f"about {duration(self.seconds)} and {size(self.bytes)}"


def duration(seconds: float) -> str:
    """As a person would say it."""
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def size(count: float) -> str:
    """Bytes with a prefix."""
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}B"
        count /= 1000
    return f"{count:.3g} TB"


def memory_limit() -> float:
    """Half of the machine's memory, or of its accelerator's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    whole = stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole / 2


@functools.lru_cache
def rates(dtype: str) -> Rates:
    """Measured here, in about a second."""
    a = jnp.asarray(np.random.default_rng(0).standard_normal((512, 512)), dtype)
    long = jnp.ones(8_000_000, dtype)

    def seconds(job: Any, *arguments: Any) -> float:
        job = jax.jit(job)
        jax.block_until_ready(job(*arguments))
        times = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(job(*arguments))
            times.append(time.perf_counter() - start)
        return min(times)

    return Rates(
        2 * 512**3 / seconds(jnp.matmul, a, a),
        2 * long.nbytes / seconds(lambda v: v + 1, long),
        seconds(lambda m: jnp.linalg.svd(m, compute_uv=False), a) / 512**3,
        seconds(lambda m: jnp.linalg.qr(m)[0], a) / 512**3,
        512**2 / seconds(lambda key: jax.random.normal(key, (512, 512), "float32"), jax.random.key(0)),
    )


def weights_per_block(network: Network) -> int:
    """Entries of one block's matrices (a list of functions: d² an item, as nothing more is known)."""
    if isinstance(network.model, Chain):
        return network.x.shape[1] ** 2
    leaves = jax.tree.leaves(network.first().params)
    return sum(leaf.size for leaf in leaves if leaf.ndim > 1) or network.x.shape[1]


def forecast(network: Network, method: str, top: int, pairs: int, probes: int, every: int = 4) -> Forecast:
    """One way's cost.

    Counted: two operations a weight, a token and a direction for every push (six T² d a block for the mixing of T tokens),
    weights drawn anew in every pass of a random stack, 2 n² m for a QR of n × m, the SVD's n³ by its measured time.
    """
    found = _cost(network, method, top, pairs, probes, every, TYPICAL)
    if found.seconds < GUESSED:
        return found
    return _cost(network, method, top, pairs, probes, every, rates(str(network.x.dtype)))


def _cost(network: Network, method: str, top: int, pairs: int, probes: int, every: int, r: Rates) -> Forecast:
    tokens, d = network.x.shape
    item, n = network.x.dtype.itemsize, network.x.size
    depth = getattr(network.model, "depth", network.layers)
    held = depth * weights_per_block(network)
    mixing = 6 * tokens**2 * d * depth if not network.blocks else 0
    # a passage of k directions: arithmetic, but never faster than the weights can be read
    blocks = network.blocks

    def passage(k: float) -> float:
        return max(k * (2 * held * tokens + mixing) / r.matmul, held * item / r.memory)

    drawn = held / r.draws if isinstance(network.weights, Drawn) else 0.0
    base = passage(1) + drawn  # the run itself
    working = 3 * (held / depth) * item
    if method == "dense":
        seconds = base + passage(network.columns) + (tokens * d**3 if blocks else n**3) * r.svd
        space = (4 if blocks else 3) * n * network.columns * item
    elif method == "compact":
        columns = compact.columns(network) or 0
        wide = min(2 * columns, d)
        seconds = tokens * (base + 4 * d * columns**2 / r.matmul + d * wide**2 * r.qr + wide**3 * r.svd)
        space = 6 * d * max(columns, 1) * item
    elif method == "matrix-free":
        reorthogonal = 8 * n * pairs**2 / r.matmul
        seconds = 2 * base + passage(2 * pairs) * 1.5 + passage(probes) + reorthogonal
        kept = held if isinstance(network.weights, Drawn) else 0  # the linearisation keeps the weights it drew
        space = (kept + depth * 12 * n + (2 * pairs + probes) * n) * item
    else:
        columns = min(top, network.columns)
        triangles = network.layers / every * (tokens if blocks else 1)
        seconds = base + passage(columns) + triangles * (d if blocks else n) * columns**2 * r.qr * 1.3
        space = 4 * n * columns * item
    return Forecast(method, seconds, space + working, r is not TYPICAL)
