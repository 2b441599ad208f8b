"""Sub-layers read off the tensors: wherever u = αx + βf holds for the stream x and a module's output f, one has ended.

A block that is one such sum of two outputs, x' = αx + β(f + h), has its two branches in parallel, and is one sub-layer.
"""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradflow.branches.parallel import BETWEEN
from gradflow.torch.library import torch
from gradflow.torch.recording import Event, Record
from gradflow.torch.structure import Block, is_norm

SAMPLED = 4096  # entries that decide whether a sum holds; the gradients are then compared in full
IN_PLACE = (
    "model: a tensor of the stream was changed in place after a module saw it, so what was recorded is gone (block "
    "{!r}); write x = x + f(x), not x += f(x)"
)


class NormCall(NamedTuple):
    """A norm module, what entered it and what left it."""

    module: Any
    entered: Any
    left: Any


@dataclass(frozen=True)
class Sublayer:
    """One residual sub-layer, x' = N_out(αx + βN_branch(f(N_in(x)))), as tensors of the graph.

    Attributes
    ----------
    label : str
        Block number and kind of branch.
    x, u, out : tensor
        The stream as it enters, the sum, and what the next sub-layer gets.
    alpha, beta : float
        As measured.
    norms : (NormCall or None, NormCall or None, NormCall or None)
        At the branch's input, its output, and the output.
    readers : int
        How many norms read the stream: with two, each is one of two parallel branches' and ``norms`` holds neither.
    """

    label: str
    x: Any
    u: Any
    out: Any
    alpha: float
    beta: float
    norms: tuple[NormCall | None, NormCall | None, NormCall | None]
    readers: int


def alike(a: Any, b: Any) -> bool:
    """Whether two tensors hold as many vectors of one width: a stream may be flattened to (batch · tokens, d) on its way."""
    return a.shape[-1] == b.shape[-1] and a.numel() == b.numel()


def sample(tensor: Any) -> np.ndarray:
    """Some entries of a tensor, in float64."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].cpu().double().numpy()


def rounding(*tensors: Any) -> float:
    """The unit of the coarsest dtype among them."""
    return max(torch.finfo(tensor.dtype).eps for tensor in tensors)


def fit(x: Any, branches: tuple[Any, ...], u: Any) -> tuple[float, float] | None:
    """α and β with u = αx + β Σf to rounding, or ``None``; 1 where they are 1 to rounding."""
    if any(u is other or not alike(u, other) for other in (x, *branches)):
        return None
    *terms, us = map(sample, (x, *branches, u))
    basis = np.stack(terms, 1)
    scale = np.linalg.norm(basis, axis=0)
    if not scale[0]:
        return None
    tolerance = 4 * rounding(x, *branches, u)
    solved, *_ = np.linalg.lstsq(basis / np.where(scale > 0, scale, 1), us, rcond=None)
    numbers = np.where(scale > 0, solved / np.where(scale > 0, scale, 1), 1.0)  # a branch of zeros: any β will do
    sizes = np.abs(numbers) * scale
    if np.linalg.norm(us - basis @ numbers) > tolerance * sizes.sum() or sizes[0] < tolerance * sizes.sum():
        return None
    alpha, beta, *others = (1.0 if abs(value - 1) < 4 * tolerance else float(value) for value in numbers)
    return (alpha, beta) if all(abs(other - beta) <= 4 * tolerance * abs(beta) for other in others) else None


def sublayers(record: Record, blocks: list[Block]) -> tuple[list[Sublayer], NormCall | None]:
    """All sub-layers from input to output, and the final norm where there is one.

    Raises
    ------
    ValueError
        Where a block's output is no such sum, the stream is changed between blocks, or a tensor was changed in place.
    """
    if not record.blocks:
        raise ValueError("layers: none of the blocks was called")
    names = {id(block.module): block.name for block in blocks}
    found: list[Sublayer] = []
    for number, (start, events, end) in enumerate(record.blocks):
        name = names[id(end.module)]
        if found and start.tensor is not found[-1].out:
            raise ValueError(
                f"model: something stands between block {name!r} and the one before it: its input is not their output; "
                "name the blocks of one plain stack in layers"
            )
        found += _Block(name, number + 1).read(start, events, end)
    stream = found[-1].out
    last = next((call for call in _norm_calls(record.after) if call.entered is stream), None)
    return found, last


def _norm_calls(events: list[Event]) -> list[NormCall]:
    """Norms that were entered and left."""
    calls, open_ = [], {}
    for event in events:
        if not is_norm(event.module):
            continue
        if event.entered:
            open_[id(event.module)] = event.tensor
        elif id(event.module) in open_:
            calls.append(NormCall(event.module, open_.pop(id(event.module)), event.tensor))
    return calls


@dataclass(frozen=True)
class _Block:
    """A block being read."""

    name: str
    number: int

    def read(self, start: Event, events: list[Event], end: Event) -> list[Sublayer]:
        """Walk the events: what modules gave gathers until a sum closes the sub-layer."""
        calls = _norm_calls(events)
        post = any(call.left is end.tensor for call in calls)
        stream, seen, kinds, found = start.tensor, [], [], []
        for event in [*events, end]:
            tensor, closing = event.tensor, event is end
            if not event.entered and not closing:
                seen.append(event)
                continue
            kinds.append("" if closing else type(event.module).__name__.lower())
            if tensor is stream or any(tensor is other.tensor for other in seen if not list(other.module.children())):
                continue  # no sum: the stream itself, or what a single layer gave
            if post and (closing or not is_norm(event.module)):
                continue
            hit = self._sum(stream, [e.tensor for e in seen], tensor, calls, closing and not found)
            if hit is None:
                continue
            alpha, beta, norm_branch, several = hit
            readers = [call for call in calls if call.entered is stream]
            norm_in = readers[0] if len(readers) == 1 else None  # of several in parallel none has the whole gradient
            norm_out = next(call for call in calls if call.entered is tensor) if post else None
            out = tensor if norm_out is None else norm_out.left
            kind = self._kind(kinds, found)
            label = f"{self.number} {kind}{BETWEEN + 'mlp' if several else ''}"
            norms = (norm_in, norm_branch, norm_out)
            found.append(Sublayer(label, stream, tensor, out, alpha, beta, norms, len(readers)))
            stream, seen, kinds = out, [], []
        if not found or found[-1].out is not end.tensor:
            self._refuse(start, events, end)
        return found

    def _sum(self, x: Any, seen: list[Any], u: Any, calls: list[NormCall], parallel: bool) -> Any:
        """α, β, the norm on the branch, and whether it is two branches; what a norm gave goes before other candidates."""
        single = [(*numbers, f) for f in reversed(seen) if (numbers := fit(x, (f,), u))]
        for alpha, beta, f in single:
            norm = next((call for call in calls if call.left is f), None)
            if norm is not None:
                return alpha, beta, norm, False
        if single:
            return *single[0][:2], None, False
        pairs = itertools.combinations(reversed(seen), 2) if parallel else ()
        both = next((numbers for pair in pairs if (numbers := fit(x, pair, u))), None)
        return both and (*both, None, True)

    def _kind(self, kinds: list[str], found: list[Sublayer]) -> str:
        kind = "attention" if any("attention" in kind for kind in kinds) else "mlp"
        before = sum(row.label.split()[1].split("-")[0] == kind for row in found)
        return kind if not before else f"{kind}-{before + 1}"

    def _refuse(self, start: Event, events: list[Event], end: Event) -> None:
        stream = {id(e.tensor) for e in events if e.entered and is_norm(e.module)} | {id(start.tensor), id(end.tensor)}
        if any(event.tensor._version != event.version for event in (start, *events) if id(event.tensor) in stream):
            raise ValueError(IN_PLACE.format(self.name))
        raise ValueError(
            f"model: block {self.name!r} is no chain of sums αx + βf of its stream and a module's output; a second stream, "
            "gains outside a module, and functional dropout (call model.eval()) are not followed"
        )


def unchanged(record: Record, found: list[Sublayer], blocks: list[Block]) -> None:
    """Refuse where a tensor that the figures need was changed in place after it was seen."""
    names = {id(block.module): block.name for block in blocks}
    needed = {id(t) for row in found for t in (row.x, row.u, row.out)}
    needed |= {id(t) for row in found for call in row.norms if call for t in call[1:]}
    for start, events, end in record.blocks:
        for event in (start, *events, end):
            if id(event.tensor) in needed and event.tensor._version != event.version:
                raise ValueError(IN_PLACE.format(names[id(end.module)]))
