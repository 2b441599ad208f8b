"""`subspaces`: gain split into what tokens have in common and what differs between them.

The mean over tokens ("consensus") and the differences from it are two orthogonal subspaces of the state. A cotangent from either
is followed back, and what arrives at every depth is split again: four gains instead of one.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import checks, cotangents, laws, precision, profiles
from gradflow.branches.matrices import alike
from gradflow.factors import Profile, plain
from gradflow.schemes import scheme_of
from gradflow.stack import Stack

NAMES = ("consensus", "differences")


@dataclass(frozen=True, repr=False)
class Subspaces:
    """Two profiles, one per subspace that the cotangent lies in, with the law's beside them where there is one.

    Attributes
    ----------
    measured, law : dict of Profile
        By the cotangent's subspace; ``law`` is ``None`` without one, and ``why`` says why.
    """

    measured: dict[str, Profile]
    law: dict[str, Profile] | None
    why: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def gain(self, start: str, end: str, law: bool = False) -> np.ndarray:
        """‖part of the gradient in ``end``‖/‖cotangent‖ for a cotangent in ``start``, (seeds, S + 1), from input to output.

        Raises
        ------
        ValueError
            For a subspace that is neither ``"consensus"`` nor ``"differences"``, or a law that there is not.
        """
        start, end = (checks.one_of("subspace", name, NAMES) for name in (start, end))
        if law and self.law is None:
            raise ValueError(f"law: there is none here ({self.why})")
        profile = (self.law if law else self.measured)[start]  # type: ignore[index]
        share = profile.consensus if end == "consensus" else 1 - profile.consensus
        return profile.exact * np.sqrt(np.clip(share, 0, None))

    def to_dict(self) -> dict[str, Any]:
        """Settings, and the four gains at every depth for every seed."""
        sides = {"measured": False} | ({} if self.law is None else {"law": True})
        gains = {
            side: {f"{a} to {b}": plain(self.gain(a, b, law)) for a in NAMES for b in NAMES}
            for side, law in sides.items()
        }
        return {"settings": {k: plain(v) for k, v in self.settings.items()}, "why": self.why} | gains

    def plot(self, path: str | None = None) -> Any:
        """Draw the gains over depth, a panel per start; written where ``path`` is given."""
        from gradflow import plots, split_report

        return plots.save(split_report.figure(self), path)

    def __str__(self) -> str:
        from gradflow import report, split_report

        return report.text(split_report.table(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from gradflow import report, split_report

        return report.html(split_report.table(self), figure=self.plot())


def _cotangents(shape: tuple[int, ...], real: np.ndarray | None, key: int, dtype: str) -> dict[str, np.ndarray]:
    """A standard Gaussian at every token, and its two parts."""
    with precision.scope(dtype):
        drawn = np.asarray(cotangents.gaussian(key, shape, dtype))
    kept = np.ones(shape[:-1], bool) if real is None else np.broadcast_to(np.asarray(real, bool), shape[:-1])
    drawn = np.where(kept[..., None], drawn, 0)
    mean = drawn.sum(-2, keepdims=True) / kept.sum(-1)[..., None, None]
    common = np.where(kept[..., None], mean, 0)
    return {"consensus": common, "differences": drawn - common}


def subspaces(
    model: Any,
    x: Any | None = None,
    *,
    tokens: int = 32,
    token_cosine: float = 0.0,
    seeds: int = 4,
    key: int = 0,
    **options: Any,
) -> Subspaces:
    """Split the gain of a network into token-mean and token-difference directions.

    Parameters
    ----------
    model : Stack, checkpoint, or list
        As `gradflow.profile` takes it.
    x : (tokens, d) or (batch, tokens, d), optional
        The stream as it enters. Without one it is drawn, ``tokens`` of unit rms with the mutual ``token_cosine``, for a random
        `Stack`; then the law stands beside the measurement.
    seeds, key : int
        Random networks, and the integer that all randomness comes from.
    **options
        ``weights``, ``mask``, ``memory`` of `gradflow.profile`.

    Returns
    -------
    Subspaces

    Raises
    ------
    ValueError
        For a single token, which has no differences, or an argument that does not fit the model.
    """
    stack = getattr(model, "stack", model)
    drawn = x is None
    if drawn:
        if not isinstance(model, Stack) or options.get("weights") is not None:
            raise ValueError("x: only a random Stack is given an input; say what enters this network")
        checks.integer("tokens", tokens, 2)
        cosine = checks.cosine("token_cosine", token_cosine, tokens)
        with precision.scope(stack.dtype):
            k_x = jax.random.fold_in(jax.random.key(checks.key(key)), 2)
            start = alike(k_x, tokens, stack.d, cosine, stack.dtype)
            x = np.asarray(start / jnp.sqrt(jnp.mean(start**2, -1, keepdims=True)))
    state = np.asarray(x)
    if state.ndim < 2 or state.shape[-2] < 2:
        raise ValueError(f"x: needs at least two tokens to differ, got shape {state.shape}")
    given = isinstance(model, list | tuple) or options.get("weights") is not None or hasattr(model, "weights")
    number = {} if given or state.ndim == 3 else {"seeds": seeds}
    sent = _cotangents(state.shape, options.get("mask"), key, getattr(stack, "dtype", "float64"))
    measured = {
        name: profiles.profile(model, x, cotangent, key=key, **number, **options) for name, cotangent in sent.items()
    }
    law, why = _law(stack, tokens, token_cosine) if drawn else (None, "the input is given")
    return Subspaces(measured, law, why, dict(measured["consensus"].settings) | {"cotangent": "gaussian"})


def _law(stack: Stack, tokens: int, token_cosine: float) -> tuple[dict[str, Profile] | None, str]:
    """A cotangent in the consensus has the cosine 1, one in the differences −1/(T − 1)."""
    cosines = {"consensus": 1.0, "differences": -1 / (tokens - 1)}
    options = {"norm": stack.norm, "final_norm": stack.final_norm, "tokens": tokens, "token_cosine": token_cosine}
    try:
        return {
            name: laws.law(scheme_of(stack.scheme), stack.block, stack.depth, cotangent_cosine=cosine, **options)
            for name, cosine in cosines.items()
        }, ""
    except ValueError as error:
        return None, str(error)
