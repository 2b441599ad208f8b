"""`plain`'s networks as a user would write them in PyTorch, and the two ways to their Jacobians that PyTorch offers."""

import math
import os
from typing import Any

import numpy as np
import plain
import torch

from gradflow.stack import Stack

torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA takes


def attention(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    q, k, v = ((x @ p[n].T).reshape(len(x), plain.HEADS, -1).transpose(0, 1) for n in ("w_q", "w_k", "w_v"))
    weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), -1)
    return (weights @ v).transpose(0, 1).reshape(x.shape) @ p["w_o"].T


def mlp(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ p["w_in"].T) @ p["w_out"].T


BRANCHES = {"attention": attention, "mlp:gelu": mlp}


class Block(torch.nn.Module):
    """One post-norm block."""

    def __init__(self, names: list[str], params: list[dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.names, self.params = names, params

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, p in zip(self.names, self.params, strict=True):
            x = torch.nn.functional.layer_norm(x + BRANCHES[name](p, x), x.shape[-1:], eps=plain.EPS)
        return x


def network(stack: Stack, params: Any) -> torch.nn.Sequential:
    """The stack with the same weights."""
    names = [branch.name for branch in stack.block]

    def layer(l: int) -> list[dict[str, torch.Tensor]]:
        return [{name: torch.from_numpy(np.array(w[l])) for name, w in p.items()} for p in params]

    return torch.nn.Sequential(*(Block(names, layer(l)) for l in range(stack.depth)))


def jacrev(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """``torch.func.jacrev`` of the whole network."""
    return torch.func.jacrev(model)(x).reshape(x.numel(), x.numel())


def hooked(model: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """One backward pass an output coordinate; hooks keep what arrives at every block's input, at the first the rows of J."""
    seen: list[list[torch.Tensor]] = [[] for _ in model]
    hooks = [
        block.register_full_backward_hook(lambda _, into, out, rows=rows: rows.append(into[0]))
        for block, rows in zip(model, seen, strict=True)
    ]
    x = x.clone().requires_grad_()
    for coordinate in model(x).reshape(-1):
        torch.autograd.grad(coordinate, x, retain_graph=True)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen[0]).reshape(x.numel(), x.numel())
