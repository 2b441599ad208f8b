"""What a PyTorch model is: its blocks, its norm modules, and what keeps it from being recorded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradflow import checks
from gradflow.torch.library import torch

EPS_NAMES = ("eps", "variance_epsilon", "epsilon")


class Block(NamedTuple):
    """A block's dotted name, and its module."""

    name: str
    module: Any


def is_norm(module: Any) -> bool:
    """Whether a module normalises: PyTorch's own, or one named so with a vector of gains and an ε, as Hugging Face's are."""
    if _native(module):
        return True
    named = "norm" in type(module).__name__.lower() and not list(module.children())
    weight = getattr(module, "weight", None)
    return named and weight is not None and weight.ndim == 1 and any(hasattr(module, name) for name in EPS_NAMES)


def _native(module: Any) -> bool:
    return isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm)


def unit(norm: Any) -> float:
    """What a norm rounds to inside: Hugging Face's compute in float32 whatever the model's dtype is."""
    return 0.0 if _native(norm) else torch.finfo(torch.float32).eps


def epsilon(norm: Any, dtype: Any) -> float:
    """ε of a norm module; PyTorch's RMSNorm takes that of the dtype where none is given."""
    value = next((getattr(norm, name) for name in EPS_NAMES if hasattr(norm, name)), None)
    return float(torch.finfo(dtype).eps if value is None else value)


def refuse(model: Any) -> None:
    """Refuse what cannot be recorded, or would differ from call to call."""
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model: needs a torch.nn.Module, got {type(model).__name__}")
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise ValueError("model: gradients are disabled here; call outside torch.no_grad() and inference_mode()")
    compiled = torch._dynamo.eval_frame.OptimizedModule
    for name, module in model.named_modules():
        at = f"{name or type(model).__name__!r}"
        if isinstance(module, compiled) or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"model: {at} is compiled, and hooks do not see inside; pass the model before torch.compile"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"model: {at} is scripted, and hooks do not see inside; pass the model before torch.jit")
        dropping = isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0
        dropping |= isinstance(module, torch.nn.MultiheadAttention) and module.dropout > 0
        if module.training and dropping:
            raise ValueError(f"model: dropout is active at {at}, so each call differs; call model.eval() first")


def blocks(model: Any, layers: str | Sequence[str] | None) -> list[Block]:
    """The blocks of the residual stack, found or named.

    Raises
    ------
    ValueError
        For an unknown name, or where there are several stacks, or none.
    """
    modules = dict(model.named_modules())
    if layers is not None:
        names = [layers] if isinstance(layers, str) else list(layers)
        for name in names:
            checks.one_of("layers", name, modules)
        if not names:
            raise ValueError("layers: names no block; leave it out, or name the list of blocks")
        if len(names) == 1 and isinstance(modules[names[0]], torch.nn.ModuleList | torch.nn.Sequential):
            return _children(names[0], modules[names[0]])
        return [Block(name, modules[name]) for name in names]
    found: dict[str, Any] = {}
    for name, module in modules.items():
        inside = any(name.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) and not inside and _uniform(module):
            found[name] = module
    if not found:
        raise ValueError("layers: no list of like blocks with norms inside was found; give the blocks' dotted names")
    if len(found) > 1:
        raise ValueError(f"layers: the model has {len(found)} stacks, {', '.join(map(repr, found))}; name one of them")
    [(name, module)] = found.items()
    return _children(name, module)


def _uniform(module: Any) -> bool:
    """Whether it is a list of blocks of one class, each with a norm inside."""
    children = list(module)
    inside = all(not is_norm(child) and any(map(is_norm, child.modules())) for child in children)
    return bool(children) and inside and len({type(child) for child in children}) == 1


def _children(name: str, module: Any) -> list[Block]:
    return [Block(f"{name}.{number}" if name else number, child) for number, child in module.named_children()]


def tokens_first(model: Any, batch_first: bool | None) -> bool:
    """Whether the stream is (tokens, batch, d)."""
    if batch_first is not None:
        return not batch_first
    return any(isinstance(m, torch.nn.MultiheadAttention) and not m.batch_first for m in model.modules())
