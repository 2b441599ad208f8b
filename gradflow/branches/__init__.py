"""Branches f of a residual sub-layer, a file each: value, exact Jacobian, and the moments (q_f, χ_f) that the law needs.

`matrices` draws and applies their weights; `catalogue` says what a branch is, knows them by name and makes blocks of them;
`parallel`, `dropout` and `rounded` wrap a branch. Moments that no formula gives are quadratures of `gradflow.moments`.
"""

from gradflow.branches.attention import Attention
from gradflow.branches.catalogue import (
    BRANCHES,
    Bias,
    Branch,
    Linear,
    behind_norm,
    branch_of,
    branches_of,
    joined,
    memory_of,
    named,
    of_one_token,
    powers_of,
    with_fields,
    with_gains,
    with_power,
)
from gradflow.branches.cross_attention import CrossAttention
from gradflow.branches.dropout import Dropout
from gradflow.branches.experts import Experts
from gradflow.branches.matrices import Params
from gradflow.branches.mlp import MLP
from gradflow.branches.parallel import Parallel
from gradflow.branches.rounded import Rounded
from gradflow.branches.rwkv import ChannelMix, TimeMix

__all__ = [
    "BRANCHES",
    "MLP",
    "Attention",
    "Bias",
    "Branch",
    "ChannelMix",
    "CrossAttention",
    "Dropout",
    "Experts",
    "Linear",
    "Parallel",
    "Params",
    "Rounded",
    "TimeMix",
    "behind_norm",
    "branch_of",
    "branches_of",
    "joined",
    "memory_of",
    "named",
    "of_one_token",
    "powers_of",
    "with_fields",
    "with_gains",
    "with_power",
]
