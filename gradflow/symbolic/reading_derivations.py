"""The derivation of the estimate (1−c)^L from both readings, and the stacks that try to refute it."""

# SymPy's annotations do not follow its operators: x[i] may be a Tuple there, a - b a Basic.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import sympy as sp
from sympy import Eq, Matrix, Symbol

from gradflow.symbolic.derivation import Derivation, Step, agree, every, near
from gradflow.symbolic.index import d, i, k, matrix, total, vector
from gradflow.symbolic.projections import L, normal
from gradflow.symbolic.readings import (
    c,
    expectation,
    induction,
    plane_product,
    random_power,
    readings,
    sigma,
    summed_power,
)

if TYPE_CHECKING:
    import jax

_LOSS, _DEPTH = sp.Rational(1, 5), 24


def estimate() -> Derivation:
    """Derive (1−c)^L from the norm reading and from the alignment reading."""
    law = readings()
    x, weights = vector("x"), matrix("W")
    branch = total(weights[i, k] * x[k], k)
    gain = Symbol("gain")
    steps = (
        Step(
            r"Norm reading. The branch is $\sigma W x$ with entries of variance $1/d$; pairing them up gives its power",
            Eq(Symbol("E|Wx|^2"), expectation(total(branch**2, i), weights, 1 / d)),
        ),
        Step("and that of the sum of skip and branch.", Eq(Symbol("E|u|^2"), summed_power())),
        Step("Relative variance of that power over draws: it vanishes as $1/d$.", law.spread),
        Step(r"The norm divides by $rms(u)$; that this be $1/(1-c)$ asks for", Eq(sigma, law.strength)),
        Step("The output has unit rms again, so each layer costs the same factor and $L$ of them", (1 - c) ** L),
        Step("Alignment reading. The stream turns in one plane, by", law.turn),
        Step("Constant branches: the product of Jacobians in the plane is", plane_product(linear=False)),
        Step("by induction over $L$; base and step leave", sp.Tuple(*induction(linear=False))),
        Step(r"The gradient arrives with this $|cosine|$ to the stream at every layer,", law.cosine),
        Step(
            "and the gain of the in-plane cotangent, with nothing returned by the branch, is",
            Eq(gain, law.exact_constant),
        ),
        Step("Linear branches along the same trajectory: the exact product is", plane_product(linear=True)),
        Step("by induction; base and step leave", sp.Tuple(*induction(linear=True))),
        Step("The trunk is as before, but the exact gain is the same at every depth:", Eq(gain, law.exact_linear)),
        Step("A random cotangent sees the Frobenius norm, for any Jacobian:", random_power()),
        Step("so its rms gain through the constant-branch stack is", law.random_gain),
        Step("and the smallest singular value that is not zero is", law.smallest),
    )
    tests = (
        ("alignment: rational stacks, c = 1/5, L = 24, d = 3, 4, 5", _rational_stacks),
        ("alignment: real stacks by jax.jacfwd in float64, d = 5, L = 24", _real_stacks),
        ("norm: trunk of 64 random networks, d = 128, L = 24", _random_networks),
    )
    claim = (
        r"$(1-c)^L$ is the trunk gain of a post-norm stack whose branch has strength $\sigma(c)$, to leading order "
        r"in $1/d$ (norm reading), and exactly that of a stream that turns by $\arccos(1-c)$ per layer in the "
        "gradient's plane (alignment reading)."
    )
    assumed = (
        r"norm reading: independent Gaussian weights, large $d$, $L$ much smaller than $d$",
        r"alignment reading: unit norm without centring and without gain, cotangent in the plane",
    )
    return Derivation("estimate", "The estimate $(1-c)^L$", claim, assumed, steps, Eq(gain, law.trunk), tests)


def _claimed(proof: Derivation, loss: object, depth: int) -> sp.Expr:
    return proof.result.rhs.subs({c: loss, L: depth})


def _rational_stacks(proof: Derivation) -> tuple[bool, str]:
    """Multiply the Jacobians out in exact rationals: constant, linear, and what the cotangent keeps of each."""
    law, outcomes = readings(), []
    for size in (3, 4, 5):
        turn = sp.diag(Matrix([[4, -3], [3, 4]]) / 5, sp.eye(size - 2))
        start = sp.eye(size)[:, 0]
        constant = linear = sp.eye(size)
        for layer in range(1, _DEPTH + 1):
            u = turn**layer * start
            keeps = sp.eye(size) - u * u.T
            constant, linear = keeps * constant, keeps * turn * linear
        cotangent = turn ** (_DEPTH + 1) * sp.eye(size)[:, 1]  # the normal after the last
        gains = [(cotangent.T * product).norm() for product in (constant, linear)]
        outcomes.append(agree(gains[0], _claimed(proof, _LOSS, _DEPTH)))
        outcomes.append(agree(gains[1], law.exact_linear.subs(c, _LOSS)))
        at = {c: _LOSS, L: _DEPTH, d: size}
        outcomes.append(agree(sum(e**2 for e in constant) / size, law.random_gain.subs(at) ** 2))
    return every(outcomes)


def _real_stacks(proof: Derivation) -> tuple[bool, str]:
    """Build x' = N(x + f(x)) with constant and with linear branches, and differentiate the whole network."""
    import jax
    import jax.numpy as jnp

    size, law = 5, readings()
    at = {c: _LOSS, L: _DEPTH, d: size}
    angle = float(law.turn.subs(c, _LOSS))
    frame = np.linalg.qr(np.random.default_rng(3).normal(size=(size, size)))[0]
    stream = (frame[:, :2] @ np.stack([np.cos(angle * np.arange(_DEPTH + 1)), np.sin(angle * np.arange(_DEPTH + 1))])).T
    turn = np.eye(size)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    turn = frame @ turn @ frame.T

    def network(branch: "Callable[[jax.Array, jax.Array], jax.Array]") -> "Callable[[jax.Array], jax.Array]":
        def layer(x: "jax.Array", step: "jax.Array") -> "tuple[jax.Array, None]":
            u = x + branch(x, step)
            return u / jnp.linalg.norm(u), None

        return lambda x: jax.lax.scan(layer, x, jnp.diff(jnp.asarray(stream), axis=0))[0]

    with jax.enable_x64(True):
        constant = np.asarray(jax.jacfwd(network(lambda _, step: step))(jnp.asarray(stream[0])))
        linear = np.asarray(jax.jacfwd(network(lambda x, _: (turn - np.eye(size)) @ x))(jnp.asarray(stream[0])))
    last = [float(e) for e in normal(L + 1).subs({Symbol("theta", real=True): angle, L: _DEPTH}).evalf()]
    cotangent = frame[:, :2] @ np.array(last)
    values = np.linalg.svd(constant, compute_uv=False)
    return every(
        [
            near(np.linalg.norm(cotangent @ constant), _claimed(proof, _LOSS, _DEPTH), 1e-11),
            near(np.linalg.norm(cotangent @ linear), law.exact_linear.subs(at), 1e-11),
            near(np.linalg.norm(constant) / np.sqrt(size), law.random_gain.subs(at)),
            near(values[size - 2], law.smallest.subs(at), 1e-11),
        ]
    )


def _random_networks(proof: Derivation) -> tuple[bool, str]:
    """Send a cotangent through the trunk of random post-norm networks; the law holds to O(1/d) and the spread."""
    import jax
    import jax.numpy as jnp

    size, seeds, loss = 128, 64, float(_LOSS)
    strength = float(readings().strength.subs(c, _LOSS))

    def unit(u: "jax.Array") -> "jax.Array":
        return u / jnp.sqrt(jnp.mean(u**2))

    def one(key: "jax.Array") -> "jax.Array":
        first, last, weights = jax.random.split(key, 3)

        def layer(
            carry: "tuple[jax.Array, jax.Array]", key_: "jax.Array"
        ) -> "tuple[tuple[jax.Array, jax.Array], None]":
            x, tangent = carry
            u = x + strength * jax.random.normal(key_, (size, size)) @ x / jnp.sqrt(size)
            # Trunk: the branch's own derivative is left out. Forward, since transposing changes no norm on average.
            return jax.jvp(unit, (u,), (tangent,)), None

        x, tangent = unit(jax.random.normal(first, (size,))), jax.random.normal(last, (size,))
        (_, out), _ = jax.lax.scan(layer, (x, tangent), jax.random.split(weights, _DEPTH))
        return jnp.log(jnp.linalg.norm(out) / jnp.linalg.norm(tangent))

    with jax.enable_x64(True):
        logs = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), seeds)))
    claimed = float(sp.log(_claimed(proof, _LOSS, _DEPTH)))
    band = _DEPTH / size + 4 * logs.std() / np.sqrt(seeds)
    detail = f"mean log gain {logs.mean():.3f} against {claimed:.3f} = {_DEPTH} log {1 - loss:g}, band {band:.3f}"
    return abs(logs.mean() - claimed) <= band, detail
