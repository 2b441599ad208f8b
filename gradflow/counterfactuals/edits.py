"""Single edits of a trained network: a norm's γ made even, a branch or a skip scaled, another ε."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from gradflow import checks
from gradflow.norms import Norm
from gradflow.stack import Given, Stack

EVERYWHERE = "all"
KINDS = {"gain": "γ = {:g}", "branch": "branch × {:g}", "skip": "skip × {:g}", "eps": "ε = {:g}"}
FORM = "write PLACE/gain, PLACE/gain/NUMBER, PLACE/branch/NUMBER, PLACE/skip/NUMBER or all/eps/NUMBER, as in '3 mlp/branch/0.5'"


@dataclass(frozen=True)
class Edit:
    """One change.

    Attributes
    ----------
    place : str
        A sub-layer, by the name of its row up to a colon (``"3 mlp"``), ``"final norm"``, or ``"all"``.
    what : {"gain", "branch", "skip", "eps"}
        γ of every norm of the sub-layer the same at all entries; β or α multiplied; ε of all norms.
    value : float or None
        γ, the factor, or ε; ``None``: the root mean square of γ as it is.
    """

    place: str
    what: str
    value: float | None = None

    def __post_init__(self) -> None:
        checks.one_of("edits", self.what, KINDS)
        value = self.value
        if value is None and self.what != "gain":
            raise ValueError(f"edits: {self.what!r} takes a number; {FORM}")
        least = 0 if self.what == "eps" else -math.inf
        if value is not None and not (isinstance(value, int | float) and least <= value < math.inf):
            raise ValueError(f"edits: {self.what!r} needs a finite number, got {value!r}")
        if (self.what == "eps") != (self.place == EVERYWHERE):
            raise ValueError(f"edits: 'eps' is of all norms, any other edit of one place; {FORM}")

    @classmethod
    def of(cls, spec: "str | Edit") -> "Edit":
        """Read what `FORM` says."""
        if isinstance(spec, Edit):
            return spec
        place, *rest = spec.split("/") if isinstance(spec, str) else ("",)
        try:
            return cls(place.strip(), rest[0].strip(), *map(float, rest[1:]))
        except (IndexError, TypeError, ValueError) as error:
            own = str(error).startswith("edits: ")
            raise ValueError(str(error) if own else f"edits: cannot read {spec!r}; {FORM}") from None

    def __str__(self) -> str:
        what = "γ even" if self.value is None else KINDS[self.what].format(self.value)
        return what if self.place == EVERYWHERE else f"{self.place}: {what}"

    def row(self, labels: Sequence[str], final: bool) -> int:
        """The row that it changes.

        Raises
        ------
        ValueError
            For a place that is none of the network's, or has no such part.
        """
        names = [label.split(":")[0] for label in labels]
        found = names.index(checks.one_of("edits: place", self.place, names))
        if final and found == len(labels) - 1 and self.what != "gain":
            raise ValueError(f"edits: the final norm has no {self.what}; only its gain can be made even")
        return found


def edited(stack: Stack, weights: Given, edit: Edit, labels: Sequence[str]) -> tuple[Stack, Given]:
    """The network with one change; ``weights`` bring norms and numbers of their own. Raises as `Edit.row`."""
    assert weights.norms is not None, "a checkpoint brings its norms"
    if edit.what == "eps":
        eps = float(edit.value or 0)

        def with_eps(leaf: Any) -> Any:
            return replace(leaf, eps=eps) if isinstance(leaf, Norm) else leaf

        norms, last = jax.tree.map(with_eps, (weights.norms, weights.last), is_leaf=lambda leaf: isinstance(leaf, Norm))
        return replace(stack, eps=eps), replace(weights, norms=norms, last=last)
    row = edit.row(labels, stack.final_norm)
    if row == stack.sublayers:
        norm: Any = weights.last
        return stack, replace(weights, last=_even(norm, ..., edit.value))
    l, k = divmod(row, len(stack.block))
    if edit.what == "gain":
        slots = tuple(norm and _even(norm, l, edit.value) for norm in weights.norms[k])
        return stack, replace(weights, norms=(*weights.norms[:k], slots, *weights.norms[k + 1 :]))  # type: ignore[arg-type]
    numbers, name = weights.multipliers(stack), "beta" if edit.what == "branch" else "alpha"
    changed = jnp.asarray(getattr(numbers, name)).at[l, k].multiply(edit.value)
    return stack, replace(weights, numbers=numbers._replace(**{name: changed}))


def _even(norm: Any, l: Any, value: float | None) -> Any:
    """γ of block ``l``, or all of it, as one number."""
    gain = norm.gain[l]
    return replace(norm, gain=norm.gain.at[l].set(jnp.sqrt(jnp.mean(gain**2)) if value is None else value))
