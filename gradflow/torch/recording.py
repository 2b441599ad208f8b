"""One run of a PyTorch model under hooks: which tensor entered and left which module, in order. Nothing is computed here."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradflow.torch.library import torch
from gradflow.torch.structure import Block


class Event(NamedTuple):
    """A tensor passing a module's door; ``version`` tells whether it was changed in place since."""

    module: Any
    entered: bool
    tensor: Any
    version: int


@dataclass
class Record:
    """What was seen, and the model's output.

    Attributes
    ----------
    blocks : list of (Event, list of Event, Event)
        Each call of a block: its input, what passed inside, its output.
    after : list of Event
        What passed behind the last block that has been called so far.
    """

    blocks: list[tuple[Event, list[Event], Event]] = field(default_factory=list)
    after: list[Event] = field(default_factory=list)
    output: Any = None


def first_tensor(*values: Any) -> Any:
    """The first floating tensor among arguments or outputs, or ``None``."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() and value.ndim >= 2:
                return value
        elif isinstance(value, Mapping):
            value = first_tensor(*value.values())
            if value is not None:
                return value
        elif isinstance(value, tuple | list):
            value = first_tensor(*value)
            if value is not None:
                return value
    return None


def call(model: Any, batch: Any) -> Any:
    """The model's output."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return model(*batch)
    return model(batch)


@contextmanager
def recorded(model: Any, blocks: Sequence[Block], batch: Any) -> Iterator[Record]:
    """Run the model; inside the ``with`` the hooks stay, so that a checkpoint's second run sees the same network."""
    record, handles = Record(), []
    own = {id(block.module) for block in blocks}
    stage: dict[str, Any] = {"open": None, "recording": True, "first": None}

    def note(module: Any, entered: bool, tensor: Any) -> None:
        if not stage["recording"] or tensor is None:
            return
        event = Event(module, entered, tensor, tensor._version)
        (record.after if stage["open"] is None else stage["open"][1]).append(event)

    def enter(module: Any, args: tuple, kwargs: dict) -> Any:
        tensor = first_tensor(args, kwargs)
        changed = None
        if id(module) in own and tensor is not None:
            if stage["first"] is None:
                stage["first"] = module
            if module is stage["first"] and not tensor.requires_grad:
                # the stack's input, or the first gain has no end; a copy, as no leaf may be changed in place
                leaf = tensor.detach().requires_grad_().clone()
                swap = lambda value: leaf if value is tensor else value  # noqa: E731
                changed = tuple(map(swap, args)), {name: swap(value) for name, value in kwargs.items()}
                tensor = leaf
            if stage["recording"] and stage["open"] is None:
                stage["open"] = (Event(module, True, tensor, tensor._version), [])
        note(module, True, tensor)
        return changed

    def leave(module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        tensor = first_tensor(output)
        opened = stage["open"]
        if stage["recording"] and opened is not None and opened[0].module is module and tensor is not None:
            record.blocks.append((*opened, Event(module, False, tensor, tensor._version)))
            stage["open"], record.after = None, []
        else:
            note(module, False, tensor)

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        record.output = call(model, batch)
        stage["recording"] = False
        yield record
    finally:
        for handle in handles:
            handle.remove()
