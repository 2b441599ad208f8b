"""All devices of all processes: independent work is spread over them, and every process gets the whole answer.

On one device this is ``lax.map`` and nothing else. Several processes first call ``jax.distributed.initialize``; each then calls
gradflow with the same arguments, as all of JAX's programs run.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "devices"


def mesh() -> Mesh:
    """All devices in a row."""
    return jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))


def over(one: Callable[..., Any], *stacked: Any, together: bool = False) -> Any:
    """``one`` for every slice along the first axis of ``stacked``, results stacked; to be called within a jit.

    Every device takes an equal share, one slice after another (for whole networks that is faster than ``vmap`` on a CPU), or
    ``together``; the last slice fills up what is missing to equal shares, and is dropped again.
    """

    def share(*pieces: Any) -> Any:
        return jax.vmap(one)(*pieces) if together else jax.lax.map(lambda piece: one(*piece), pieces)

    def gathered(*pieces: Any) -> Any:
        return jax.tree.map(joined, share(*pieces))

    devices, count = jax.device_count(), len(jax.tree.leaves(stacked)[0])
    if devices == 1 or count == 1:
        return share(*stacked)
    missing = -count % devices
    filled = jax.tree.map(lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, 0)]), stacked)
    found = split(gathered, filled, PartitionSpec(AXIS))
    return jax.tree.map(lambda leaf: leaf[:count], found)


def joined(piece: Any, axis: int = 0) -> Any:
    """The pieces of all devices side by side, on every device; within `split`."""
    return jax.lax.all_gather(piece, AXIS, axis=axis, tiled=True)


def placed(tree: Any) -> Any:
    """A copy on every device of one process, so that several calls send it once; several processes send it with each."""
    if jax.device_count() == 1 or jax.process_count() > 1:
        return tree
    return jax.device_put(tree, NamedSharding(mesh(), PartitionSpec()))


def here(everywhere: Any) -> Any:
    """What every device holds, as one of this process holds it: what follows is then computed once, not once a device."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), everywhere)


def split(share: Callable[..., Any], arguments: Any, ins: Any) -> Any:
    """``shard_map`` of what ends with the same answer on every device."""
    return jax.shard_map(share, mesh=mesh(), in_specs=ins, out_specs=PartitionSpec(), check_vma=False)(*arguments)
