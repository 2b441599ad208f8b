"""Detached norms: a network whose derivatives hold the statistics of all its norms constant; its values are the same."""

from dataclasses import replace
from typing import Any

import jax

from gradflow.branches.parallel import Parallel
from gradflow.norms import Norm
from gradflow.stack import Stack, Weights


def detached(stack: Stack, weights: Weights | None) -> tuple[Stack, Weights | None]:
    """The network with every norm detached: in its slots, behind its last sub-layer, and inside its branches (over queries, keys
    and values, and over hidden units). DyT has no statistic and stays as it is.
    """

    def held(leaf: Any) -> Any:
        return replace(leaf, detached=True) if isinstance(leaf, Norm) else leaf

    found = jax.tree.map(held, weights, is_leaf=lambda leaf: isinstance(leaf, Norm))
    return replace(stack, block=tuple(map(branch, stack.block)), detached=True), found


def branch(b: Any) -> Any:
    """A branch whose own norms are detached; one without any stays as it is."""
    if isinstance(b, Parallel):
        return replace(b, branches=tuple(map(branch, b.branches)))
    if hasattr(b, "branch"):  # one that wraps another
        return replace(b, branch=branch(b.branch))
    return replace(b, detached=True) if hasattr(b, "detached") else b
