"""What a first step would do, per unit of learning rate, to a model that has learned nothing yet: no training.

Four slopes B, each of which says that training breaks down at a learning rate C/B: one constant C for all schemes and depths.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gradflow import precision
from gradflow.branches.matrices import linear
from gradflow.flow import ratio, rms
from gradflow.scaling import frobenius
from gradflow.stack import Stack
from gradflow.symbolic.moments import gaussian_mean, z
from gradflow.training.data import Text
from gradflow.training.model import Model, draw
from gradflow.training.settings import Settings
from gradflow.training.steps import Program
from gradflow.training.watch import fed, first_matrices

MEAN = float(gaussian_mean(abs(z)))  # E|z| = √(2/π), from which signs of Gaussian sums follow


@dataclass(frozen=True)
class FirstStep:
    """At initialisation, on the first batch; moves are for a learning rate of 1, to first order.

    Attributes
    ----------
    bound, move, size : (S,)
        ‖h‖₁, mean over tokens, by which one token alone would move a sub-layer's pre-activations; their rms move by the step of
        all tokens, as `moved` predicts it; their rms.
    effective : (S,)
        Independent tokens that would give that move (`many_tokens` solved for its n).
    share : (S,)
        rms of the branch, as it is added, over that of the stream: of u where an output norm follows, else of the last one.
    update : (S,)
        √(v² + w²)/α of DeepNorm's theorem, and its like in other placements (`_update`).
    stream : float
        ‖Δx_L‖/‖x_L‖ of all weights' first steps together: an exact derivative.
    weight_grad : (S,)
        Frobenius norm of the loss's gradient over each sub-layer's matrices.
    """

    bound: Float[np.ndarray, " S"]
    move: Float[np.ndarray, " S"]
    size: Float[np.ndarray, " S"]
    effective: Float[np.ndarray, " S"]
    share: Float[np.ndarray, " S"]
    update: Float[np.ndarray, " S"]
    stream: float
    weight_grad: Float[np.ndarray, " S"]


# name -> the slope B; the boundary is predicted at C/B
PREDICTORS: dict[str, Callable[[FirstStep], float]] = {
    # relative move of every sub-layer's pre-activations, weighed by what its branch adds to the stream
    "eta·|h|_1": lambda f: float(np.sum(f.share * f.move / f.size)),
    # that of the last stream
    "first step": lambda f: f.stream,
    # Σ √(v² + w²)/α, the bound on ‖ΔF‖ per unit of ‖Δθ‖ (Wang et al. 2022, 2203.00555, Theorem 4.2)
    "update bound": lambda f: float(np.sum(f.update)),
    # first sub-layer's weight gradient over the last one's: the less it is, the smaller the rate
    "gradient ratio": lambda f: float(f.weight_grad[-1] / f.weight_grad[0]),
    # what any of them has to beat: one rate for all
    "one rate": lambda f: 1.0,
}


def many_tokens(tokens: float, d: int) -> float:
    """What is left of η‖h‖₁ when the step is one of Adam's and the gradient a sum over tokens: a ratio, (0, about 1].

    A first matrix moves by −η sign(G), G_ab = Σ_t δ_ta h_tb, and so the pre-activation a of token s by −η Σ_b h_sb sign(G_ab).
    Given δ, for iid Gaussian h, h_sb and G_ab are jointly Gaussian; with m = Cov(h_sb, G_ab)/√Var G_ab,

        E h_sb sign(G_ab) = √(2/π) m,     E (Σ_b …)² = d² (2/π) m² + d (1 − (2/π) m²)      (unit variance)

    and m² = δ_sa²/Σ_t δ_ta², whose mean over n iid tokens is 1/n. Over (E‖h‖₁)² = (2/π) d² this is 1/n + (π/2 − 1/n)/d: as good
    as nothing but the noise of d signs is left when n exceeds d. Tokens of Gram matrix C (unit diagonal) have
    m = (Cδ)_s/√(δᵀCδ), and the mean of m² is at most λ_max(C)/n: tokens that are alike count as one.

    Parameters
    ----------
    tokens : float
        n, at least 1.
    d : int
        Width.
    """
    return math.sqrt(1 / tokens + (MEAN**-2 - 1 / tokens) / d)


def moved(gradient: Float[Array, "k d"], h: Float[Array, "tokens d"]) -> Float[Array, ""]:
    """Mean square that −sign(G) adds to the pre-activations of the states h, by the law of `many_tokens`.

    A sign is √(2/π) G/σ, σ² each row's power, and a rest of power 1 − 2/π that knows nothing of h (Bussgang): the first part
    carries what tokens agree on, δ and C included, the second is noise. Tokens need not be independent.
    """
    row = jnp.sqrt(jnp.mean(gradient**2, 1, keepdims=True))
    agreed = MEAN * h @ ratio(gradient, row).T
    return jnp.mean(agreed**2) + (1 - MEAN**2) * jnp.mean(jnp.sum(h**2, 1))


def first_step(settings: Settings, text: Text) -> FirstStep:
    """The figures of a run's first step, from its own initial weights and first batch.

    Parameters
    ----------
    settings : Settings
        Learning rate and warm-up do not matter.
    text : Text
        What it would learn.
    """
    program, train = settings.program, jnp.asarray(text.train)
    with precision.scope(settings.dtype):
        model_key, data_key = jax.random.split(jax.random.key(settings.key))
        batch = program.batch(train, data_key, jnp.int32(0))
        model, _ = draw(settings.stack, model_key, settings.tokens, batch)
        found = {name: np.asarray(value, float) for name, value in _figures(program, model, batch).items()}
    return FirstStep(**found | {"stream": float(found["stream"])})  # type: ignore[arg-type]


@functools.partial(jax.jit, static_argnums=0)
def _figures(program: Program, model: Model, batch: Int[Array, "sequences tokens+1"]) -> dict[str, Array]:
    stack, optimizer, inputs = program.stack, program.optimizer.transformation, batch[:, :-1]
    _, grad = program.gradient(model, batch)
    direction, _ = optimizer.update(grad, optimizer.init(model), model)
    states = model.stream(stack, inputs, True)
    _, move = jax.jvp(lambda each: each.stream(stack, inputs).out, (model,), (direction,))
    rows: dict[str, list[Array]] = {name: [] for name in ("bound", "move", "size", "effective", "weight_grad")}
    for k, branch in enumerate(stack.block):
        for name, value in _of_branch(stack, model, grad, states.x, k, branch).items():
            rows[name].append(value)
    found = {name: jnp.stack(values, 1).reshape(-1) for name, values in rows.items()}
    x, u, added = (jax.vmap(rms)(each) for each in (states.out[None], states.u, states.added))  # type: ignore[arg-type]
    stream = jnp.where(_normed(stack), u, x)
    found |= {"share": added / stream, "update": _update(stack, model, x[0])}
    return found | {"stream": frobenius(move) / frobenius(states.out)}


def _of_branch(stack: Stack, model: Model, grad: Model, x: Any, k: int, branch: Any) -> dict[str, Array]:
    """Of the k-th sub-layer of every block, (depth,) each."""
    h, names = fed(stack, model, x, k), first_matrices(branch)
    params, slopes = model.weights.params[k], grad.weights.params[k]
    z = [jax.vmap(functools.partial(linear, name=name))(params, x=h) for name in names]
    rows = [slopes[f"w{name}"].shape[1] for name in names]
    powers = [jax.vmap(moved)(slopes[f"w{name}"], h) for name in names]
    power = sum(n * each for n, each in zip(rows, powers, strict=True)) / sum(rows)
    bound, d = jnp.mean(jnp.sum(jnp.abs(h), -1), -1), h.shape[-1]
    agreed = power / bound**2 - MEAN**-2 / d  # `many_tokens`, solved for (1 − 1/d)/n
    sizes = jnp.stack([frobenius(leaf, 1) for name, leaf in slopes.items() if name.startswith("w")], 1)
    return {
        "bound": bound,
        "move": jnp.sqrt(power),
        "size": jax.vmap(rms)(jnp.concatenate(z, -1)),
        "effective": (1 - 1 / d) / jnp.maximum(agreed, jnp.finfo(h.dtype).tiny),
        "weight_grad": frobenius(sizes, 1),
    }


def _normed(stack: Stack) -> np.ndarray:
    """Which sub-layers have an output norm, (S,)."""
    parts = [np.repeat(row.norm_out, blocks.stop - blocks.start) for blocks, row in stack.scheme.parts(stack.depth)]
    return np.repeat(np.concatenate(parts), len(stack.block))


def _update(stack: Stack, model: Model, last: Array) -> Float[Array, " S"]:
    """What a unit of a branch's two gains, v of its inner and w of its last matrix, moves of the stream, relative, (S,).

    DeepNorm's theorem takes f as v·w·x: x' = N(αx + βvwx) moves by at most β√(v² + w²)/α. Its argument elsewhere: without an
    output norm by β√(v² + w²) over the rms of the last stream; with a norm on the branch, by that over v·w. v, w are those of
    the drawn weights, rms·√(fan-in): the paper's are gains over Xavier's.
    """
    rows = []
    for k, branch in enumerate(stack.block):
        params = model.weights.params[k]
        v, w = (_gain(params, getattr(branch, side)) for side in ("inner", "outer"))
        rows.append(jnp.sqrt(v**2 + w**2) / jnp.where(_norm_branch(stack), jnp.where(v > 0, v, 1) * w, 1))
    alpha, beta = (getattr(model.weights, name).reshape(stack.sublayers, -1).mean(1) for name in ("alpha", "beta"))
    return beta * jnp.stack(rows, 1).reshape(-1) / jnp.where(_normed(stack), alpha, last)


def _norm_branch(stack: Stack) -> np.ndarray:
    parts = stack.scheme.parts(stack.depth)
    return np.concatenate([np.repeat(row.norm_branch, blocks.stop - blocks.start) for blocks, row in parts])


def _gain(params: Any, names: Any) -> Array:
    """rms·√(fan-in) over matrices (depth, k, n), (depth,)."""
    gains = [frobenius(params[name], 1) / math.sqrt(params[name].shape[1]) for name in names if name in params]
    return jnp.sqrt(sum(each**2 for each in gains) / len(gains)) if gains else jnp.zeros(())
