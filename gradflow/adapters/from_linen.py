"""Flax linen modules: a module and its variables make one function."""

from collections.abc import Mapping
from typing import Any

from gradflow.adapters.parts import Function, Layers, cast, load, named, norm, over_last_axis, uncallable
from gradflow.chains import brief
from gradflow.norms import LayerNorm, Norm, RMSNorm

load("flax", "flax")
from flax import errors  # noqa: E402
from flax import linen as nn  # noqa: E402

_EVALUATE = "switch dropout off (deterministic=True) and BatchNorm to its averages (use_running_average=True)"


def adapt(
    module: Any, variables: Mapping[str, Any] | None, d: int | None, kwargs: dict[str, Any]
) -> Norm | Layers | Function:
    """See `gradflow.adapters.linen`."""
    if not isinstance(module, nn.Module):
        raise uncallable(module, "adapters.linen", "a flax.linen.Module")
    if module.scope is not None:
        module, own = module.unbind()
        variables = own if variables is None else variables
    if not isinstance(variables, Mapping):
        raise ValueError('variables: needs what init returned, {"params": ...}; or give a bound module')
    params = variables.get("params", {})
    if not kwargs:
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) and over_last_axis(module):
            return _norm(module, params, d)
        if isinstance(module, nn.Sequential) and all(name.startswith("layers_") for name in params):
            bound = module.bind(variables)
            return Layers.flat(
                adapt(layer, None, d, {}) if isinstance(layer, nn.Module) else layer for layer in bound.layers
            )
    return named(_function(module, variables, kwargs), module)


def _norm(module: Any, params: Mapping[str, Any], d: int | None) -> Norm:
    gain, bias = params.get("scale"), params.get("bias")
    if (module.use_scale and gain is None) or (getattr(module, "use_bias", False) and bias is None):
        raise ValueError(f"variables: hold no scale or bias for this {type(module).__name__}")
    known = gain if gain is not None else bias
    width = d if known is None else len(known)
    if width is None:
        raise ValueError(f"d: a {type(module).__name__} without scale and bias does not know its width; pass d=")
    return norm(LayerNorm if isinstance(module, nn.LayerNorm) else RMSNorm, width, module.epsilon, gain, bias)


def _function(module: Any, variables: Mapping[str, Any], kwargs: dict[str, Any]) -> Function:
    def run(x: Any) -> Any:
        try:
            return module.apply(cast(variables, x.dtype), x, **cast(kwargs, x.dtype))
        except errors.InvalidRngError as error:
            raise ValueError(f"asks for a random key, so it is in training mode; {_EVALUATE}") from error
        except errors.ModifyScopeVariableError as error:
            raise ValueError(f"changes its variables, so it is in training mode; {_EVALUATE}") from error
        except errors.FlaxError as error:
            said = brief(error).split(" (https://")[0]
            raise ValueError(f"{said}: do the variables fit the module?") from error

    return run
