"""The trunk of a recorded network: cotangents sent down it, its spectrum, and the contraction that they give."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from gradflow import checks, precision, recorded
from gradflow.contractions import Contraction
from gradflow.cotangents import refuse_null, resolve
from gradflow.factors import Profile, safe_log
from gradflow.flow import Rows, forward_figures, norm_row, normalised
from gradflow.laws.depth import labels
from gradflow.norms import Norm
from gradflow.scaling import rescale
from gradflow.schemes import Scheme, scheme_of


@functools.partial(jax.jit, static_argnums=(0, 1))
def flow(
    row: str,
    eps: float,
    u: Float[Array, "S tokens d"],
    x: Float[Array, "S tokens d"] | None,
    gain: Float[Array, "S d"],
    cotangents: Float[Array, "probes tokens d"],
) -> Rows:
    """Send cotangents down the trunk; rows of factors as in `gradflow.flow.flow`. What needs f is NaN."""

    def sublayer(w: Array, inputs: tuple) -> tuple[Array, Rows]:
        u, gain = inputs
        jacobian = Norm(gain, jnp.zeros_like(gain), row, eps).jacobian(u)
        _, trunk, rows = norm_row(jacobian, w, w)
        unneeded = ("arrived", "left", "trunk_norm_gain")
        kept = {name: leaf for name, leaf in rows.items() if name not in unneeded}
        return normalised(trunk), kept | {"trunk_net": rows["trunk_norm_gain"]}

    _, rows = jax.lax.scan(sublayer, normalised(cotangents), (u, gain), reverse=True)
    unknown = jnp.full(u.shape[0], jnp.nan, u.dtype)
    rows |= {"skip": jnp.ones_like(unknown), "branch": unknown, "net": unknown}
    if x is not None:
        rows |= jax.vmap(forward_figures)(x, u, u - x)
    return rows


@functools.partial(jax.jit, static_argnums=(0, 1))
def singular_values(
    row: str, eps: float, u: Float[Array, "S tokens d"], gain: Float[Array, "S d"]
) -> tuple[Float[Array, "tokens d"], Array]:
    """Singular values of each token's trunk product over 2^exponent, and the exponents (tokens,); memory is O(d²)."""

    def token(us: Float[Array, "S d"]) -> tuple[Array, Array]:
        def sublayer(carry: tuple[Array, Array], inputs: tuple) -> tuple[tuple[Array, Array], None]:
            jacobian = Norm(inputs[1], jnp.zeros_like(inputs[1]), row, eps).jacobian(inputs[0])
            return rescale(jacobian.push(carry[0]), carry[1]), None

        start = (jnp.eye(u.shape[2], dtype=u.dtype), jnp.zeros((), jnp.int32))
        (basis, exponent), _ = jax.lax.scan(sublayer, start, (us, gain))
        return jnp.linalg.svd(basis, compute_uv=False), exponent

    return jax.lax.map(token, jnp.swapaxes(u, 0, 1))


def contraction(
    source: Any,
    depth: Any,
    d: int,
    c: float,
    norm: str | None,
    scheme: str | Scheme,
    tokens: int,
    cotangent: Any,
    probes: int | None,
    key: int,
    dtype: str,
) -> Contraction:
    """The trunk of a recorded network."""
    checks.fraction("c", c)
    record = recorded.recording(source)
    S, held_tokens, width = record.u.shape
    row = checks.one_of("norm", norm or "layernorm", ("rms", "layernorm", "rms-outside"))
    if scheme_of(scheme).name != "post-ln":
        raise ValueError("scheme: recorded activations are those of a post-ln network; only there u fixes the trunk")
    for name, value, default, held in (
        ("depth", depth, 24, S),
        ("d", d, 512, width),
        ("tokens", tokens, 1, held_tokens),
    ):
        if value not in (default, held):
            raise ValueError(f"{name}: the activations have {held}, not {value}; leave it out")
    tokens = held_tokens
    checks.key(key)
    if probes is not None:
        checks.integer("probes", probes, 1)
        if cotangent is not None and not isinstance(cotangent, str):
            raise ValueError("probes: are Gaussian cotangents; leave out the cotangent, or probes")
    if row == "layernorm":
        checks.integer("d", width, 3, "LayerNorm's Jacobian has rank d − 2 as ε → 0: none is left at d = 2")
    kind, given = resolve(cotangent, "norm", (tokens, width))
    if given is None and probes is None and record.cotangent is not None and cotangent is None:
        kind, given = resolve(record.cotangent, "norm", (tokens, width))
    settings = {
        "scheme": "post-ln",
        "norm": row,
        "eps": record.eps,
        "reading": "recorded activations",
        "depth": S,
        "d": width,
        "c": c,
        "tokens": tokens,
        "seeds": 1,
        "key": key,
        "cotangent": "recorded" if given is not None and cotangent is None else kind,
        "probes": probes,
        "dtype": precision.resolve(dtype),
        "matmul_precision": "highest",
        "device": jax.default_backend(),
        "path": "trunk alone: the branches are not in the file",
    }
    with precision.scope(settings["dtype"]):
        cast = functools.partial(np.asarray, dtype=settings["dtype"])
        u, gain = cast(record.u), cast(record.gain)
        x = None if record.x is None else cast(record.x)
        if given is None:
            given = np.asarray(precision.normal(jax.random.key(key), (probes or 1, tokens, width), settings["dtype"]))
        cotangents = cast(given).reshape(-1, tokens, width)
        rows = jax.tree.map(np.asarray, flow(row, record.eps, u, x, gain, cotangents))
        profile = Profile.from_rows(
            {name: v[None] for name, v in rows.items()}, labels(S, False), settings | {"what": "recorded"}
        )
        refuse_null(profile, settings["dtype"])
        log_values = None
        if probes is None:
            values, exponents = map(np.asarray, singular_values(row, record.eps, u, gain))
            logs = safe_log(values) + exponents[:, None] * math.log(2)
            top = logs.max()
            log_rms = np.array([top + 0.5 * math.log(np.mean(np.exp(2 * (logs - top))))])
            log_values = -np.sort(-logs.reshape(1, -1), axis=1)
        else:
            log_rms = profile.log_trunk[:, 0]
    return Contraction(
        c=float(c),
        depth=S,
        d=width,
        cotangent=settings["cotangent"],
        profile=profile,
        law_profile=None,
        trunk_law=None,
        law=None,
        rms_law=None,
        log_rms_gain=log_rms,
        log_singular_values=log_values,
        settings=settings,
    )
