"""`profile`: every factor at every sub-layer of one network, from a random stack to a user's own functions."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import chains, checks, cotangents, detaching, devices, precision, probes
from gradflow.auditing.streamed import Blocks
from gradflow.factors import Profile
from gradflow.flow import Rows, flow
from gradflow.norms import AnyNorm
from gradflow.stack import Drawn, Stack, Weights
from gradflow.streams import flow as stream_flow
from gradflow.streams.stack import StreamStack

Loss = Callable[[Any], Any]
MEMORY = ("full", "low")


def profile(
    model: Any,
    x: Any,
    cotangent: Any | None = None,
    *,
    weights: Weights | None = None,
    mask: Any | None = None,
    counted: Any | None = None,
    seeds: int = 1,
    key: int = 0,
    probes: int = 1,
    weight_grad: bool = False,
    memory: str = "full",
    detached: bool = False,
) -> Profile:
    """Follow the gradient back through a network and say where it is lost, where gained, and by which factor.

    Parameters
    ----------
    model : Stack, StreamStack, checkpoint, or list
        A `Stack` or `gradflow.streams.stack.StreamStack` (with ``weights``, or random ones of ``key``); anything with a
        ``stack`` and ``weights`` of its own, such as `gradflow.checkpoints.load` returns; or a list of functions,
        `gradflow.Residual` sub-layers and norm layers.
    x : (tokens, d) or (batch, tokens, d)
        The stream as it enters. Each state of a batch is a row ("seed") of the profile. For a list, one state of any shape
        that its functions take; axes before the last count as tokens.
    cotangent : array like the output, or callable, optional
        dLoss/d(output), or a loss output → scalar, whose gradient is taken. One standard Gaussian per state by default.
    weights : Weights, optional
        `gradflow.stack.Given` or `Drawn`.
    mask : (tokens,) or (batch, tokens) of bool, optional
        False at padding: attention does not see it, no figure counts it, and the cotangent is 0 there.
    counted : (tokens,) or (batch, tokens) of bool, optional
        Tokens that figures are over, by default all real ones. The network and its gradient are the same: the others, set
        apart, are still seen, and what attention exchanges with them is in the factor ``branch``. Of a `Stack` only; each
        sub-layer is then computed again on the way back, as with ``memory="low"``.
    seeds : int
        Random networks (of `key`) to measure at the same ``x``; only without ``weights``.
    probes : int
        Gaussian cotangents per state, pooled in every ratio. One of them costs one backward pass in all.
    weight_grad : bool
        Also ‖dLoss/dW‖ of each sub-layer, by Gram products where these are cheaper than the gradient itself.
    memory : {"full", "low"}
        ``"low"`` keeps the stream only and computes each sub-layer again on the way back.
    detached : bool
        Hold the statistics of all norms constant in every Jacobian, as `jax.lax.stop_gradient` on them would: LayerNorm is
        then linear, u ↦ γ ⊙ (u − mean)/σ + b, and its projection takes the mean alone. This is no gradient of the network; it
        is the convention of relevance propagation through norms (2202.07304, 2402.05602).

    Returns
    -------
    Profile

    Raises
    ------
    ValueError
        For an argument that does not fit the model; the message names it.
    """
    checks.one_of("memory", memory, MEMORY)
    number = checks.integer("probes", probes, 1)
    checks.key(key)
    case = {"cotangent": cotangent, "key": key, "probes": number}
    if isinstance(model, Sequence) and not isinstance(model, str):
        chains.carries_its_own(
            weights=weights is None,
            mask=mask is None,
            counted=counted is None,
            seeds=seeds == 1,
            weight_grad=not weight_grad,
            detached=not detached,
        )
        return _chain(chains.checked(model), x, **case)
    stack = getattr(model, "stack", model)
    if not isinstance(stack, Stack | StreamStack):
        raise ValueError(
            f"model: cannot profile a {type(model).__name__}; needs a Stack, a checkpoint, or a list of functions "
            "(gradflow.adapters turns Equinox and Flax modules into one)"
        )
    weights = weights or getattr(model, "weights", None)
    if weights is not None and seeds != 1:
        raise ValueError("seeds: given weights are one network; leave seeds out")
    checks.integer("seeds", seeds, 1)
    if isinstance(weights, Blocks) and (counted is not None or detached):
        raise ValueError("weights: are streamed; counted and detached need them all at once")
    if detached:
        if isinstance(stack, StreamStack):
            raise ValueError("detached: is read for one residual stream; leave it out for a stack of several")
        stack, weights = detaching.detached(stack, weights)
    if mask is not None and isinstance(stack, StreamStack):
        raise ValueError("mask: a stack of several streams takes none; leave padding out of x")
    if counted is not None and (isinstance(stack, StreamStack) or weight_grad):
        raise ValueError("counted: is of the figures of one stream; leave it, or weight_grad, out")
    if weight_grad and (number > 1 or memory == "low" or isinstance(weights, Blocks)):
        raise ValueError("weight_grad: comes with one cotangent, memory='full' and weights that are not streamed")
    unwatched = [b.name for b in stack.block if not hasattr(b, "matrices")]
    if weight_grad and unwatched:
        raise ValueError(f"weight_grad: branch {unwatched[0]!r} does not list its matrices")
    with precision.scope(stack.dtype):
        return _Case(stack, weights, seeds, weight_grad, memory == "low", **case).profile(x, mask, counted)


@dataclasses.dataclass(frozen=True)
class _Case:
    """Checked arguments of a stack's profile."""

    stack: Stack | StreamStack
    weights: Weights | None
    seeds: int
    watched: bool
    low: bool
    cotangent: Any
    key: int
    probes: int

    def profile(self, x: Any, mask: Any, counted: Any) -> Profile:
        stack = self.stack
        states = checks.real_array("x:", x)
        if states.ndim not in (2, 3) or states.shape[-1] != stack.d or not states.size:
            raise ValueError(f"x: needs shape (tokens, {stack.d}) or (batch, tokens, {stack.d}), got {states.shape}")
        batched = states.ndim == 3
        states = states if batched else states[None]
        if batched and self.seeds > 1:
            raise ValueError("seeds: a batch is measured on one network; give one state, or leave seeds out")
        real = real_tokens(mask, states.shape[:2])
        among = real_tokens(counted, states.shape[:2], "counted")
        if among is not None and real is not None and np.any(among & ~real):
            raise ValueError("counted: has a token that the mask calls padding; leave it out")
        shape = (len(states) if batched else self.seeds, self.probes, *states.shape[1:])
        kind, sent = _cotangents(self.cotangent, shape, self.key, stack.dtype)
        if real is not None and sent is not None:
            sent = jnp.where(jnp.asarray(real)[:, None, :, None], sent, 0)
        if among is not None and sent is not None and not np.where(among, np.any(sent, (1, 3)), False).any(1).all():
            raise ValueError("counted: no gradient arrives at these tokens of a state; count others")
        loss = self.cotangent if kind == "loss" else None
        keys = jax.random.split(jax.random.key(self.key), shape[0])
        if batched:  # one network, many states
            keys = jnp.broadcast_to(keys[:1], keys.shape)
        start = jnp.asarray(states, stack.dtype)
        streamed = isinstance(self.weights, Blocks)
        if isinstance(self.weights, Blocks) and isinstance(stack, Stack):
            back: Any = sent if loss is None else functools.partial(gradient_of, loss)
            rows = self.weights.rows(stack, start, back, None if real is None else jnp.asarray(real))
        else:
            rows = measure(
                *(stack, self.weights, keys, start, sent, real, among),
                *(loss, self.watched, self.low or self.probes > 1 or among is not None, batched),
            )
        over = real if among is None else among
        apart = {} if among is None else {"set_apart": (~among if real is None else real & ~among).sum(1).tolist()}
        what = {"init": "iid Gaussian, Var W = 1/fan_in"} if self.weights is None else {"init": "given weights"}
        settings = {
            "what": "measured",
            "detached": False,
            **stack.settings(),
            **what,
            "tokens": states.shape[1] if over is None else [int(n) for n in over.sum(1)],
            **apart,
            "batch": len(states) if batched else None,
            "seeds": self.seeds,
            "key": self.key,
            "cotangent": kind,
            "probes": self.probes,
            "memory": "streamed" if streamed else "low" if self.low else "full",
        }
        return finish(rows, labels(stack), settings, stack.dtype)


def gaussian_state(stack: Stack | StreamStack, tokens: int, key: int) -> np.ndarray:
    """A state of standard Gaussian tokens, (tokens, d)."""
    checks.integer("tokens", tokens, 1)
    with precision.scope(stack.dtype):
        seed = jax.random.fold_in(jax.random.key(checks.key(key)), 2)
        return np.asarray(precision.normal(seed, (tokens, stack.d), stack.dtype))


def labels(stack: Stack | StreamStack) -> tuple[str, ...]:
    """One name a row: the block's number, and the branch where a block has several; the ends of several streams."""
    several = len(stack.block) > 1
    rows = [f"{l + 1} {b.name}" if several else str(l + 1) for l in range(stack.depth) for b in stack.block]
    if isinstance(stack, StreamStack) and stack.scheme.streams > 1:
        rows = ["expand", *rows, "readout"]
    return (*rows, "final norm") if stack.final_norm else tuple(rows)


def real_tokens(mask: Any, shape: tuple[int, int], argument: str = "mask") -> np.ndarray | None:
    """A mask as (batch, tokens) of bool."""
    if mask is None:
        return None
    array = np.asarray(mask)
    if array.dtype != bool or array.shape not in (shape, shape[1:]):
        raise ValueError(
            f"{argument}: needs booleans of shape {shape} or {shape[1:]}, got {array.dtype} of {array.shape}"
        )
    array = np.broadcast_to(array, shape)
    if not array.any(axis=1).all():
        raise ValueError(f"{argument}: leaves a state without any token")
    return array


def _cotangents(spec: Any, shape: tuple[int, ...], key: int, dtype: str) -> tuple[str, Array | None]:
    """The cotangent's kind, and what is sent back from the output, (states, probes, *state)."""
    if spec is None or (isinstance(spec, str) and checks.one_of("cotangent", spec, ("gaussian",))):
        return "gaussian", cotangents.gaussian(key, shape, dtype)
    if shape[1] > 1:
        raise ValueError("probes: are Gaussian cotangents; leave out the cotangent, or probes")
    if callable(spec):
        return "loss", None
    state = shape[2:]
    array = cotangents.given(spec, state, (shape[0], *state))
    array = np.broadcast_to(array.reshape(-1, 1, *state), (shape[0], 1, *state))
    return "given", jnp.asarray(array, dtype)


def gradient_of(loss: Loss, out: Array, real: Array | None = None) -> Array:
    """dLoss/d(output), 0 at padding; raises a ``ValueError`` unless the loss is one real number."""
    value = jax.eval_shape(loss, out)
    if jnp.shape(value) != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError("cotangent: a loss must return one real number")
    gradient = jax.grad(loss)(out)
    return gradient if real is None else jnp.where(real[:, None], gradient, 0)


@functools.partial(jax.jit, static_argnums=(0, 7, 8, 9, 10))
def measure(
    stack: Stack | StreamStack,
    weights: Weights | None,
    keys: Array,
    states: Float[Array, "n tokens d"],
    sent: Float[Array, "n probes tokens d"] | None,
    real: Array | None,
    counted: Array | None,
    loss: Loss | None,
    watched: bool,
    low: bool,
    batched: bool,
) -> Rows:
    """Rows of every state or network, stacked."""

    def one(key: Array, x: Array, sent: Array | None, real: Array | None, counted: Array | None) -> Rows:
        found = Drawn(key) if weights is None else weights
        found = found if real is None else dataclasses.replace(found, mask=real)  # type: ignore[type-var]
        of_loss = None if loss is None else functools.partial(gradient_of, loss, real=found.mask)
        if isinstance(stack, StreamStack):
            return stream_flow.profile(stack, found, x, sent if of_loss is None else of_loss, watched)  # type: ignore[arg-type]
        if not low:
            back = sent[0] if of_loss is None else of_loss  # type: ignore[index]
            return probes.profile(stack, found, x, back, watched)[2]
        trajectory = stack.trace(found, x)
        last = found.final(stack) if stack.final_norm else None
        out = trajectory.out if last is None else last(trajectory.out)
        return flow(stack, found, trajectory, sent if of_loss is None else of_loss(out)[None], counted)

    if batched:
        return jax.vmap(one)(keys, states, sent, real, counted)
    x, real, counted = states[0], None if real is None else real[0], None if counted is None else counted[0]
    return devices.over(lambda key, sent: one(key, x, sent, real, counted), keys, sent)


def _chain(items: tuple[chains.Item, ...], x: Any, cotangent: Any, key: int, probes: int) -> Profile:
    """Profile a list of functions, in the dtype of ``x``."""
    state = chains.state_of(x)
    dtype = str(state.dtype)
    with precision.scope(dtype):
        state = jnp.asarray(state)
        out, reverse_only = chains.outline(items, state)
        kind, sent = _cotangents(cotangent, (1, probes, *out.shape), key, dtype)

        @jax.jit
        def run(state: Array, sent: Array | None) -> Rows:
            steps, out = chains.forward(items, state)
            back = gradient_of(cotangent, out)[None] if sent is None else sent[0]
            return chains.sweep(steps, back.reshape(len(back), *steps[-1].out.shape))

        rows = run(state, sent)
        last = state.shape[-1] if state.ndim else 1
        settings = {
            "what": "measured",
            "scheme": "chain",
            "depth": len(items),
            "d": last,
            "tokens": state.size // last,
            "seeds": 1,
            "key": key,
            "cotangent": kind,
            "probes": probes,
            "dtype": dtype,
            "matmul_precision": "highest",
            "device": jax.default_backend(),
            "final_norm": isinstance(items[-1], AnyNorm),
            "reverse_only": reverse_only,
        }
        names = [chains.label(item, i + 1) for i, item in enumerate(items)]
        return finish({name: leaf[None] for name, leaf in rows.items()}, names, settings, dtype)


def finish(rows: Rows, names: Sequence[str], settings: dict[str, Any], dtype: str) -> Profile:
    """Rows to a profile, unless there was no gradient to follow."""
    found = Profile.from_rows({name: np.asarray(leaf) for name, leaf in rows.items()}, names, settings)
    refuse_lost(found, dtype)
    cotangents.refuse_null(found, dtype)
    return found


def refuse_lost(found: Profile, dtype: str) -> None:
    """A network that no number of this dtype can follow is refused."""
    if not np.isfinite(found.stream_rms).all() or not np.isfinite(found.net).all():  # type: ignore[arg-type]
        raise ValueError(f"model: the stream or its gradient leaves the range of {dtype}, or holds NaN")
