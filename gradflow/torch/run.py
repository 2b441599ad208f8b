"""The measurement: run under hooks, go back once, hand the arrays to the rows."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from gradflow import checks, profiles
from gradflow.auditing.result import Audit
from gradflow.checkpoints.parity import Parity, ParityError
from gradflow.factors import Profile
from gradflow.torch import recording, residuals, structure
from gradflow.torch.library import torch
from gradflow.torch.residuals import NormCall, Sublayer
from gradflow.torch.rows import Passed, Values, recognised, rows


def measure(model: Any, batch: Any, loss: Any, layers: Any, mask: Any, batch_first: bool | None, key: int) -> Profile:
    """`gradflow.torch.profile`, its arguments checked."""
    structure.refuse(model)
    checks.key(key)
    if loss is not None and not callable(loss):
        raise ValueError(f"loss: needs a function of the model's output, got {type(loss).__name__}")
    blocks = structure.blocks(model, layers)
    with recording.recorded(model, blocks, batch) as record:
        found, final = residuals.sublayers(record, blocks)
        residuals.unchanged(record, found, blocks)
        kind, value, gradients = _backward(record.output, found, final, loss, key)
    arrays = _Arrays(structure.tokens_first(model, batch_first), found[0].x.shape)
    values = [arrays.sublayer(row, gradients) for row in found]
    last = None if final is None else arrays.passed(final, gradients)
    real = _real(mask, values[0].x.shape)
    figures = rows(values, last, real)
    parity = max(float(figures.pop("parity").max()), arrays.worst)
    tolerance = min(1000 * arrays.unit, 0.05)
    if not parity <= tolerance:
        raise ParityError(
            f"model: gradflow's norms depart from PyTorch's values or gradients by {parity:.1e} of their size (allowed "
            f"{tolerance:.0e}): the stream is read elsewhere too, or the sub-layers are not what they seem; name the blocks"
        )
    states, tokens, d = values[0].x.shape
    known = sorted(
        {norm.norm.row for row in values for norm in row.norms if norm} | ({last.norm.row} if last else set())
    )
    settings = {
        "what": "recorded in PyTorch",
        "model": type(model).__name__,
        "scheme": _scheme(found),
        "norm": " + ".join(known) or "none",
        "eps": arrays.eps,
        "depth": len(record.blocks),
        "d": d,
        "tokens": tokens if real is None else [int(n) for n in real.sum(1)],
        "batch": states,
        "seeds": 1,
        "key": key,
        "cotangent": kind,
        "loss": value,
        "probes": 1,
        "dtype": str(found[0].x.dtype).removeprefix("torch."),
        "autocast": _autocast(found[0].x.device.type),
        "device": str(found[0].x.device),
        "final_norm": last is not None,
        "alpha": [row.alpha for row in found],
        "parity": parity,
        "tolerance": tolerance,
    }
    labels = [row.label for row in found] + (["final norm"] if last else [])
    return profiles.finish(figures, labels, settings, "float64" if arrays.unit < 1e-10 else "float32")


def audited(model: Any, profile: Profile) -> Audit:
    """A profile as an audit."""
    s, name = dict(profile.settings), type(model).__name__
    states = s["batch"]
    s |= {
        "family": "PyTorch",
        "sizes": {name: s[name] for name in ("depth", "d")},
        "text": None,
        "tokens": s["tokens"] if isinstance(s["tokens"], list) else [s["tokens"]] * states,
        "path": "first block's input to the stack's output",
    }
    parity = Parity("PyTorch", "PyTorch's own gradients", s["parity"], s["tolerance"], len(profile.labels) * states)
    profile = dataclasses.replace(profile, settings=s)
    return Audit(Path(name), "PyTorch", parity, profile, ((),) * states, s)


@dataclasses.dataclass
class _Arrays:
    """Tensors as float64 arrays (batch, tokens, d); keeps the coarsest dtype's unit, and the norms' largest error."""

    tokens_first: bool
    shape: tuple[int, ...]
    unit: float = 0.0
    worst: float = 0.0
    eps: float = 0.0

    def __call__(self, tensor: Any) -> np.ndarray:
        self.unit = max(self.unit, residuals.rounding(tensor))
        array = tensor.detach().cpu().double().numpy().reshape(self.shape)
        if array.ndim == 2:
            return array[None]
        if array.ndim > 3:
            return array.reshape(len(array), -1, array.shape[-1])
        return array.swapaxes(0, 1) if self.tokens_first else array

    def sublayer(self, row: Sublayer, gradients: dict[int, Any]) -> Values:
        """A sub-layer's arrays and gradients."""
        at_x, at_out = (self(gradients[id(tensor)]) for tensor in (row.x, row.out))
        passed = tuple(None if call is None else self.passed(call, gradients) for call in row.norms)
        numbers = (np.float64(row.alpha), np.float64(row.beta))
        return Values(self(row.x), self(row.u), *numbers, at_x, at_out, passed)  # type: ignore[arg-type]

    def passed(self, call: NormCall, gradients: dict[int, Any]) -> Passed:
        """A norm module as the row of the catalogue that gives what it gave."""
        module = call.module
        entered, left = self(call.entered), self(call.left)
        gain, bias = (getattr(module, name, None) for name in ("weight", "bias"))
        vectors = [None if p is None else p.detach().cpu().double().numpy() for p in (gain, bias)]
        if any(p is not None and p.shape != entered.shape[-1:] for p in vectors):
            raise ValueError(f"model: the norm {type(module).__name__} is not over the stream's last axis alone")
        eps = structure.epsilon(module, call.entered.dtype)
        unit = max(residuals.rounding(call.entered, call.left), structure.unit(module))
        self.unit, tolerance = max(self.unit, unit), min(100 * unit, 0.05)
        norm, off = recognised(vectors[0], vectors[1], eps, entered, left, tolerance)
        if not off <= tolerance:
            raise ValueError(
                f"model: {type(module).__name__} gives neither LayerNorm nor RMSNorm of what entered it (off by {off:.1e} "
                "of its size), so its Jacobian is not known"
            )
        self.worst, self.eps = max(self.worst, off), max(self.eps, eps)
        return Passed(norm, entered, self(gradients[id(call.entered)]), self(gradients[id(call.left)]))


def _backward(
    output: Any, found: list[Sublayer], final: NormCall | None, loss: Any, key: int
) -> tuple[str, float | None, dict[int, Any]]:
    """One backward pass: the cotangent's kind, the loss, and the gradient at every tensor that the rows need."""
    end = found[-1].out if final is None else final.left
    calls = [call for row in found for call in row.norms if call] + ([final] if final else [])
    wanted = [t for row in found for t in (row.x, row.u, row.out)] + [t for call in calls for t in call[1:]]
    tensors = list({id(t): t for t in wanted}.values())
    if not all(t.requires_grad for t in tensors):
        raise ValueError(
            "model: the stream carries no gradient (activation checkpointing with use_reentrant=True, or a no_grad inside); "
            "use use_reentrant=False, or switch it off"
        )
    own: Any = getattr(output, "loss", None)
    if loss is None and own is None:
        generator = torch.Generator().manual_seed(key)
        sent = torch.randn(end.shape, generator=generator, dtype=torch.float64).to(end.device, end.dtype)
        kind, start, grads = "gaussian", end, sent
    else:
        start: Any = own if loss is None else loss(output)
        kind, grads = "loss", None
        if not (isinstance(start, torch.Tensor) and start.ndim == 0 and start.requires_grad):
            raise ValueError("loss: must return one real number that depends on the model's output, as a scalar tensor")
    pulled = torch.autograd.grad(start, tensors, grads, allow_unused=True)
    gradients = {id(t): g for t, g in zip(tensors, pulled, strict=True)}
    if gradients[id(end)] is None or gradients[id(found[0].x)] is None:
        raise ValueError("loss: does not depend on the stack's output, so there is no gradient to follow")
    return kind, None if kind == "gaussian" else float(start.detach()), gradients


def _real(mask: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """The mask as (batch, tokens) of bool."""
    if mask is None:
        return None
    return profiles.real_tokens(
        mask.detach().cpu().numpy() if isinstance(mask, torch.Tensor) else mask, (shape[0], shape[1])
    )


def _scheme(found: list[Sublayer]) -> str:
    """The residual equation as it was found, by its slots."""
    slots = {(row.readers > 0, row.norms[1] is not None, row.norms[2] is not None) for row in found}
    names = {
        (False, False, True): "post-ln",
        (True, False, False): "pre-ln",
        (True, True, False): "sandwich",
        (False, True, False): "res-post-norm",
        (False, False, False): "no-norm",
    }
    return " + ".join(sorted(names.get(slot, "norms in and out") for slot in slots))


def _autocast(device: str) -> str | None:
    """The dtype of the autocast in force, if one is."""
    if not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
