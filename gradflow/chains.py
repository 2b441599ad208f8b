"""A network as the user wrote it: a list of functions, residual sub-layers and norms, profiled by reverse mode alone."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from gradflow import checks, precision
from gradflow.branches.matrices import Basis, pushed
from gradflow.flow import Rows, backward, bare_row, norm_row, normalised, ratio, rms, token_cosine
from gradflow.jacobian import SublayerJacobian
from gradflow.norms import BY_NAME, AnyJacobian, AnyNorm
from gradflow.scaling import frobenius

Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Residual:
    """One residual sub-layer around a function of the user's own: x' = N_out(αx + β·N_branch(f(N_in(x)))).

    Attributes
    ----------
    f : callable
        The branch, state → state of the same shape; anything that JAX can trace and differentiate in reverse.
    norm_in, norm_branch, norm_out : AnyNorm or str, optional
        What fills each slot: a layer (``gradflow.norms.LayerNorm.init(d)``, or one with a learned gain and bias), or a
        norm's name for its unit-gain layer with ε = 1e-5.
    alpha, beta : float
        Multipliers of skip and branch.
    name : str, optional
        Its row's label.
    """

    f: Function
    norm_in: AnyNorm | str | None = None
    norm_branch: AnyNorm | str | None = None
    norm_out: AnyNorm | str | None = None
    alpha: float = 1.0
    beta: float = 1.0
    name: str | None = None

    def norms(self, x: Array) -> tuple[AnyNorm | None, AnyNorm | None, AnyNorm | None]:
        """The layers in the three slots, names resolved for the width of ``x``."""

        def layer(slot: str) -> AnyNorm | None:
            norm = getattr(self, slot)
            if norm is None or isinstance(norm, AnyNorm):
                return norm
            return BY_NAME[checks.one_of(slot, norm, BY_NAME)].init(x.shape[-1], dtype=x.dtype)

        return layer("norm_in"), layer("norm_branch"), layer("norm_out")


Item = Function | Residual | AnyNorm


class _Branch(NamedTuple):
    """A user's function as a branch without parameters: it sees its own ``shape``, the sub-layer (tokens, d)."""

    f: Function
    shape: tuple[int, ...]

    def apply(self, params: dict, x: Array) -> Array:
        out = _real(self.f(x.reshape(self.shape)), x.dtype)
        if out.shape != self.shape:  # or the sum with the skip would broadcast it
            raise ValueError(f"f returned shape {out.shape} for a stream of shape {self.shape}")
        return out.reshape(x.shape)

    def push(self, params: dict, x: Array, basis: Basis) -> Basis:
        return pushed(functools.partial(self.apply, params), x, basis)


class Step(NamedTuple):
    """One item at its point: the stream that entered it, (tokens, d), and how it goes back.

    ``jacobian`` is a residual sub-layer's, ``norm`` a norm's own; ``f`` is a plain function. ``name`` is its label.
    """

    x: Array
    out: Array
    jacobian: SublayerJacobian | None = None
    norm: AnyJacobian | None = None
    f: Function | None = None
    name: str = ""

    def push(self, basis: Basis) -> Basis:
        """The item's Jacobian on every direction (tokens, d, k)."""
        found = self.jacobian or self.norm
        if found is not None:
            return found.push(basis)
        assert self.f is not None
        return pushed(self.f, self.x, basis)


def label(item: Item, index: int) -> str:
    """Its row's name: position from 1, and the function's or norm's own name where it has one."""
    if isinstance(item, AnyNorm):
        return f"{index} {item.row}"
    name = item.name if isinstance(item, Residual) else None
    f = item.f if isinstance(item, Residual) else item
    name = name or getattr(f, "__name__", type(f).__name__)
    return str(index) if name == "<lambda>" else f"{index} {name}"


def checked(items: Sequence[Item]) -> tuple[Item, ...]:
    """The chain, if every item can be one.

    Raises
    ------
    ValueError
        For an empty chain, or an item that is neither a function, a `Residual` nor a norm layer.
    """
    for i, item in enumerate(items):
        if not callable(item.f if isinstance(item, Residual) else item):
            raise ValueError(f"model: layer {i + 1} is {item!r}; needs a function, a gradflow.Residual or a norm layer")
    if not len(items):
        raise ValueError("model: needs at least one layer")
    return tuple(items)


def carries_its_own(**left_out: bool) -> None:
    """Refuse an argument that a list of functions leaves no room for; its message names it."""
    for name, absent in left_out.items():
        if not absent:
            raise ValueError(f"{name}: a list of functions carries its own; leave {name} out")


def state_of(x: Any) -> Any:
    """The state that enters, in its own dtype; whole numbers become float64.

    Raises
    ------
    ValueError
        For anything but finite real numbers in a dtype that a list of functions runs in.
    """
    state = x if isinstance(x, jax.Array) else np.asarray(x)
    if state.dtype.kind in "iub":
        state = np.asarray(state, np.float64)
    checks.real_array("x:", state)
    if str(state.dtype) not in precision.DTYPES:
        raise ValueError(f"x: a list of functions runs in {' or '.join(precision.DTYPES)}, got {state.dtype}")
    return state


def as_tokens(state: Array) -> Array:
    """Any state as (tokens, d): all axes before the last count as tokens."""
    return state.reshape(-1, state.shape[-1] if state.ndim else 1)


def _step(item: Item, state: Array) -> tuple[Step, Array]:
    """Run one item; the function sees states of the user's own shape, everything else sees (tokens, d)."""
    x, shape = as_tokens(state), state.shape
    if isinstance(item, AnyNorm):
        out, jacobian = item.at(x)
        return Step(x, out, norm=jacobian), out.reshape(shape)
    if isinstance(item, Residual):
        branch: Any = _Branch(item.f, shape)
        alpha, beta = (jnp.asarray(m, x.dtype) for m in (item.alpha, item.beta))
        found = SublayerJacobian.at(branch, {}, item.norms(x), alpha, beta, x)
        return Step(x, found.out, jacobian=found), found.out.reshape(shape)
    out = _real(item(state), state.dtype)
    return Step(x, as_tokens(out), f=lambda x: as_tokens(item(x.reshape(shape)))), out


def _real(out: Any, dtype: Any) -> Array:
    if not (hasattr(out, "dtype") and jnp.issubdtype(out.dtype, jnp.floating)):
        kind = f"dtype {out.dtype}" if hasattr(out, "dtype") else type(out).__name__
        raise ValueError(f"returned {kind}; needs one floating array")
    out = jnp.asarray(out)
    if out.dtype != dtype:  # fewer digits than the profile says it has, or more than its gradient can carry
        raise ValueError(f"returned {out.dtype} for {dtype}; give x in {out.dtype}, or return out.astype(x.dtype)")
    return out


def brief(error: BaseException) -> str:
    """An error's first line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _naming(layer: str) -> Iterator[None]:
    """Name the layer in which a function refuses its input or cannot be differentiated; its own error is the cause."""
    try:
        yield
    except (TypeError, ValueError) as error:  # JAX has TypeError for shapes that do not fit
        raise ValueError(f"model: layer {layer}: {brief(error)}") from error


def forward(items: Sequence[Item], state: Array) -> tuple[list[Step], Array]:
    """Run the chain; a refusal names the item."""
    steps = []
    for i, item in enumerate(items):
        name = label(item, i + 1)
        with _naming(name):
            step, state = _step(item, state)
        steps.append(step._replace(name=name))
    return steps, state


def _plain(step: Step, g: Array, w: Array) -> tuple[Array, Array, Rows]:
    """A function with no identity path of its own: its gain stands under ``branch``, and the trunk ends here."""
    assert step.f is not None
    _, pull = jax.vjp(step.f, step.x)
    back = jax.vmap(lambda c: pull(c)[0])(g)
    *_, row = norm_row(None, g, w)
    gain = ratio(frobenius(back), row["arrived"])
    row = bare_row(row, step.x) | {"branch": gain, "branch_return": gain, "net": gain, "trunk_net": 0.0}
    row |= {"branch_rms": rms(step.out), "sum_rms": rms(step.out), "stream_cosine": jnp.nan}
    return normalised(back), jnp.zeros_like(back), row


def _back(step: Step, g: Array, w: Array) -> tuple[Array, Array, Rows]:
    """Carry gradient and trunk vector back through one item."""
    if step.jacobian is not None:
        return backward(step.jacobian, g, w)
    if step.norm is not None:
        exact, trunk, row = norm_row(step.norm, g, w)
        return normalised(exact), normalised(trunk), bare_row(row, step.x)
    return _plain(step, g, w)


def sweep(steps: Sequence[Step], cotangents: Array) -> Rows:
    """Every factor of every item, from input to output, for cotangents (probes, tokens, d) at the output."""
    g = w = normalised(cotangents)
    rows: list[Rows] = []
    for step in reversed(steps):
        with _naming(step.name):
            g, w, row = _back(step, g, w)
        rows.insert(0, row)
    found = {name: jnp.stack([jnp.asarray(row[name]) for row in rows]) for name in rows[0]}
    return found | {"input_gradient_cosine": token_cosine(g)}


def outline(items: Sequence[Item], state: Any) -> tuple[Any, tuple[str, ...]]:
    """Shape of the output, and labels of the items that forward mode cannot differentiate (a ``custom_vjp``): traced, not run."""
    found = []
    for i, item in enumerate(items):
        name = label(item, i + 1)
        with _naming(name):
            jaxpr, state = jax.make_jaxpr(lambda x, item=item: _step(item, x)[1], return_shape=True)(state)
        if "custom_vjp_call" in str(jaxpr):
            found.append(name)
    return state, tuple(found)
