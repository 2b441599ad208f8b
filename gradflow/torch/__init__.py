"""PyTorch: the `Profile` of the user's own model, recorded by hooks during one forward and one backward pass.

Which modules are residual sub-layers is read off the tensors that pass: a sub-layer is a place where u = αx + βf holds, x the
stream and f the output of a module, so that neither a model's names nor its way of writing a block matter. The recorded
tensors then go through gradflow's own norm Jacobians. PyTorch loads when one of the two functions is called.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradflow.auditing.result import Audit
    from gradflow.factors import Profile

__all__ = ["audit", "profile"]


def profile(
    model: Any,
    batch: Any,
    loss: Any = None,
    *,
    layers: Any = None,
    mask: Any = None,
    batch_first: bool | None = None,
    key: int = 0,
) -> "Profile":
    """Follow the gradient back through a PyTorch model: every factor of every sub-layer, from one backward pass.

    The model is left as it was: no parameter's ``grad`` is touched, and all hooks are gone afterwards.

    Parameters
    ----------
    model : torch.nn.Module
        Its residual stack is the ``ModuleList`` (or ``Sequential``) of blocks of one class, with norms inside. Per sub-layer
        x' = N_out(αx + βN_branch(f(N_in(x)))), every norm optional (a block has N_out in all its sub-layers or in none):
        pre-LN, post-LN, both, sandwich, norm on the branch; α and β are measured. A block may instead be one sub-layer of
        two branches in parallel.
    batch : tensor, mapping or sequence
        What the model is called with: ``model(batch)``, ``model(**batch)`` or ``model(*batch)``.
    loss : callable, optional
        The model's output → scalar tensor. By default the output's own ``loss``, as Hugging Face models have it when the
        batch holds labels; else a standard Gaussian of ``key`` is sent back from the stack's output.
    layers : str or sequence of str, optional
        The dotted name of the list of blocks, or the names of the blocks, where a model has several stacks or none.
    mask : (batch, tokens) of bool, optional
        False at padding, which no forward figure counts. The loss must not see it either.
    batch_first : bool, optional
        Whether the stream is (batch, tokens, d) rather than (tokens, batch, d); by default what the model's
        ``torch.nn.MultiheadAttention`` says, else True. A stream (tokens, d) is one state.
    key : int
        Of the Gaussian cotangent.

    Returns
    -------
    Profile
        One row ("seed") per state of the batch, computed in float64 from what was recorded. ``settings["parity"]`` is how
        far the analytic Jacobians' answer is from PyTorch's own value or gradient at the same place, over its norm, at most.

    Raises
    ------
    ValueError
        In one line: for a compiled or scripted model, activation checkpointing that re-enters autograd, active dropout,
        disabled gradients, tensors changed in place, or a stack that does not follow the equation above (several streams,
        a gain per channel outside a module, a norm that is neither LayerNorm nor RMSNorm).
    ImportError
        Without PyTorch.
    """
    from gradflow.torch import run

    return run.measure(model, batch, loss, layers, mask, batch_first, key)


def audit(
    model: Any,
    batch: Any,
    loss: Any = None,
    *,
    layers: Any = None,
    mask: Any = None,
    batch_first: bool | None = None,
    key: int = 0,
) -> "Audit":
    """Name the sub-layer and the factor that lose the gradient; takes what `profile` takes, and raises what it raises.

    Returns
    -------
    Audit
        As `gradflow.audit` gives of a folder, from the first block's input to the stack's output;
        ``parity`` compares the analytic Jacobians with PyTorch's own gradients.
    """
    from gradflow.torch import run

    return run.audited(model, run.measure(model, batch, loss, layers, mask, batch_first, key))
