"""A user's own functions in a list: gains by hand, what is refused, and functions that know reverse mode only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import Residual

X = np.random.default_rng(0).standard_normal((3, 4))


@jax.custom_vjp
def doubled(x):
    """Value x, gradient 2: only its own rule can give that."""
    return x


doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def loops(x):
    """Has no reverse mode."""
    return jax.lax.while_loop(lambda c: jnp.sum(c) < 0, lambda c: 2 * c, x)


def test_a_chain_of_scalars_by_hand():
    p = gradflow.profile([lambda x: 2 * x, lambda x: 3 * x, lambda x: 5 * x], 1.0)
    np.testing.assert_allclose(p.exact, [[30, 15, 5, 1]], rtol=1e-15)
    np.testing.assert_allclose(p.branch, [[2, 3, 5]], rtol=1e-15)
    assert p.labels == ("1", "2", "3")


def test_kinds_of_items_stand_in_any_order(x64):
    norm = gradflow.norms.LayerNorm.init(4)
    items = [Residual(jnp.sin, beta=0.5), jnp.tanh, norm, Residual(jnp.cos, norm_out="rms", name="last"), jnp.sin]
    for chain in (items, items[::-1]):
        p = gradflow.profile(chain, X, X)

        def whole(x, chain=chain):
            for item in chain:
                if isinstance(item, Residual):
                    u = x + item.beta * item.f(x)
                    x = item.norms(x)[2](u) if item.norm_out else u
                else:
                    x = item(x)
            return x

        (back,) = jax.vjp(whole, jnp.asarray(X))[1](jnp.asarray(X))
        np.testing.assert_allclose(p.exact[0, 0], np.linalg.norm(back) / np.linalg.norm(X), rtol=1e-12)
        np.testing.assert_allclose(p.affine * p.projection * p.norm * p.skip * p.branch, p.net, rtol=1e-12)


def test_custom_vjp_works_and_is_said_to_be_reverse_only():
    p = gradflow.profile([Residual(doubled), jnp.tanh, doubled], np.zeros(3))
    np.testing.assert_allclose(p.exact, [[6, 2, 2, 1]], rtol=1e-15)
    assert p.settings["reverse_only"] == ("1 doubled", "3 doubled")
    assert "reverse mode only: 1 doubled, 3 doubled" in str(p)


@pytest.mark.parametrize("wrap", [lambda f: f, Residual], ids=["plain", "residual"])
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda x: None, "returned NoneType; needs one floating array"),
        (lambda x: 3, "returned int; needs one floating array"),
        (lambda x: x > 0, "returned dtype bool; needs one floating array"),
        (lambda x: (x, x), "returned tuple; needs one floating array"),
        (lambda x: x.astype("float32"), r"returned float32 for float64; give x in float32, or return out\.astype"),
        (lambda x: x @ jnp.ones((5, 5)), r"dot_general requires contracting dimensions to have the same shape"),
        (lambda x: x if x.sum() > 0 else -x, "Attempted boolean conversion of traced array"),
        (loops, "Reverse-mode differentiation does not work for lax.while_loop"),
    ],
)
def test_what_a_function_returns_is_refused_by_its_layers_name(wrap, bad, said):
    with pytest.raises(ValueError, match=rf"^model: layer 2( loops)?: {said}") as caught:
        gradflow.profile([jnp.sin, wrap(bad)], X)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("f", [jnp.transpose, lambda x: x[:2], jnp.sum, lambda x: x[..., None]])
def test_a_branch_keeps_the_streams_shape(f):
    with pytest.raises(ValueError, match=r"^model: layer 1.*: f returned shape \(.*\) for a stream of shape \(3, 4\)"):
        gradflow.profile([Residual(f)], X)


def test_a_plain_function_may_change_the_shape():
    p = gradflow.profile([jnp.transpose, lambda x: x @ jnp.eye(3, 5), jnp.sum], X)
    np.testing.assert_allclose(p.exact[0, 0], 12**0.5, rtol=1e-15)  # 12 of the 20 summands depend on x


def test_an_error_of_the_users_own_is_left_alone():
    with pytest.raises(KeyError, match="weights"):
        gradflow.profile([lambda x: {}["weights"] * x], X)
