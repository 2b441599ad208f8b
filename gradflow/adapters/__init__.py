"""Adapters: Equinox and Flax modules as what `gradflow.profile` takes; each framework loads when it is first asked for.

A norm layer becomes a `gradflow.norms.Norm` with its learned γ, b and ε; a ``Sequential`` becomes `Layers`, a list that is also a
function; any other module a function state → state. Each goes into the list for `profile`, or into a `gradflow.Residual`.

Precision: weights are cast to the dtype of the state at every call, so that a float32 model profiled at a float64 ``x`` gives
float64 numbers of the very same weights. A module with a compute dtype of its own (Flax's ``dtype=``) keeps it inside.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradflow.adapters.parts import Layers
    from gradflow.norms import Norm

    Adapted = Norm | Layers | Callable[[Any], Any]

__all__ = ["equinox", "linen", "nnx"]


def equinox(module: Any, *, tokenwise: bool = False, **kwargs: Any) -> "Adapted":
    """Adapt an Equinox module.

    Parameters
    ----------
    module : equinox.Module or callable
        ``eqx.nn.LayerNorm`` and ``RMSNorm`` over one axis become a `Norm`, applied to every token; ``Sequential`` becomes
        `Layers`; ``MultiheadAttention`` self-attention. ``Linear`` and ``MLP``, which take a vector, act on every token.
    tokenwise : bool
        The module takes one token, (d,), and is to act on each of a state (..., d). Holds for the layers of a ``Sequential``.
    **kwargs
        Passed on at every call, such as the ``mask`` of an attention. The module then stays one function.

    Raises
    ------
    ValueError
        For a module in training mode, one that keeps state (``BatchNorm``), or something that cannot be called.
    ImportError
        Without Equinox.
    """
    from gradflow.adapters.from_equinox import adapt

    return adapt(module, tokenwise, kwargs)


def linen(module: Any, variables: Any = None, *, d: int | None = None, **kwargs: Any) -> "Adapted":
    """Adapt a Flax linen module and its variables.

    Parameters
    ----------
    module : flax.linen.Module
        ``LayerNorm`` and ``RMSNorm`` over the last axis become a `Norm`, ``Sequential`` becomes `Layers`. The `Norm` takes the
        mean square of x less its mean; linen's default, ``use_fast_variance``, takes E[x²] − E[x]², the same number but for
        rounding, which that way grows with (mean/spread)².
    variables : mapping, optional
        What ``init`` returned, ``{"params": ...}``. May be left out for a bound module, such as ``model.bind(variables).norm``.
    d : int, optional
        Width of the state, which a norm without scale and bias does not know.
    **kwargs
        Passed on at every call, such as ``deterministic=True`` or ``mask``. The module then stays one function.

    Raises
    ------
    ValueError
        Here for bad arguments; when the function is called for a module in training mode (it asks for a random key, or changes
        a variable), or for variables that do not fit.
    ImportError
        Without Flax.
    """
    from gradflow.adapters.from_linen import adapt

    return adapt(module, variables, d, kwargs)


def nnx(module: Any, **kwargs: Any) -> "Adapted":
    """Adapt a Flax nnx module as it is now; what happens to the module later has no effect.

    Parameters
    ----------
    module : flax.nnx.Module or callable
        ``LayerNorm`` and ``RMSNorm`` over the last axis become a `Norm` (see `linen` for their rounding), ``Sequential``
        becomes `Layers`. ``MultiHeadAttention`` runs without its cache; one without dropout calls
        ``jax.nn.dot_product_attention``, whose softmax is float32 whatever the state is: its gains are good to 1e-7.
    **kwargs
        Passed on at every call, such as ``mask``. The module then stays one function.

    Raises
    ------
    ValueError
        For a module in training mode, or something that cannot be called; when the function is called, for a module that
        changes its own variables.
    ImportError
        Without Flax.
    """
    from gradflow.adapters.from_nnx import adapt

    return adapt(module, kwargs)
