"""Branches that read the same input and add up: f(x) = Σ_i f_i(x), as one branch; ``"attention|mlp:gelu"`` by name.

So are the blocks of GPT-J, GPT-NeoX and PaLM, x' = x + attn(N(x)) + mlp(N(x)). The f_i are independent, hence powers add.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
from jaxtyping import Array

from gradflow import precision
from gradflow.branches.matrices import Basis, Params, State
from gradflow.symbolic.moments import BranchMoments

BETWEEN = "|"
KINDS = ("w", "b", "note", "gain", "rope", "reach", "mix", "decay", "first")


@dataclass(frozen=True)
class Parallel:
    """The sum of several branches, times ``gain``.

    Parameters of the i-th branch keep their kind and get its number: ``w_in`` of the second one is ``w1:_in``.
    """

    branches: tuple[Any, ...]
    gain: float = 1.0

    @property
    def name(self) -> str:
        """Its parts' names, with ``|`` between."""
        return BETWEEN.join(branch.name for branch in self.branches)

    @property
    def tokenwise(self) -> bool:
        """Whether all parts are."""
        return all(branch.tokenwise for branch in self.branches)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Those of all parts; no such attribute where a part does not list its own."""
        return tuple(f"{i}:{name}" for i, branch in enumerate(self.branches) for name in branch.matrices)

    @property
    def inner(self) -> tuple[str, ...]:
        """The parts' inner matrices; a scheme's gain on them is refused where only some parts have any."""
        each = [branch.inner for branch in self.branches]
        if any(each) and not all(each):
            raise AttributeError("inner")
        return self._numbered(each)

    @property
    def outer(self) -> tuple[str, ...]:
        """The parts' last matrices."""
        return self._numbered([branch.outer for branch in self.branches])

    @property
    def refined(self) -> bool:
        """Whether the moments of all parts reach the 1/d term."""
        return all(getattr(branch, "refined", True) for branch in self.branches)

    def _numbered(self, names: Sequence[Sequence[str]]) -> tuple[str, ...]:
        return tuple(renamed(name, i) for i, each in enumerate(names) for name in each)

    def init(self, key: Array, d: int, dtype: Any) -> Params:
        """Draw every part from a key of its own."""
        found: Params = {}
        for i, (k, branch) in enumerate(zip(jax.random.split(key, len(self.branches)), self.branches, strict=True)):
            found |= {renamed(name, i): value for name, value in branch.init(k, d, dtype).items()}
        return found

    def _parts(self, params: Params) -> list[tuple[Any, Params]]:
        """Every part with its parameters; a mask is for all."""
        found = []
        for i, branch in enumerate(self.branches):
            own = {f"{kind}{i}:": kind for kind in KINDS}
            mine = {
                kind + name[len(mark) :]: value
                for name, value in params.items()
                for mark, kind in own.items()
                if name.startswith(mark)
            }
            found.append((branch, mine | ({"mask": params["mask"]} if "mask" in params else {})))
        return found

    def apply(self, params: Params, x: State) -> State:
        """``Σ f_i(x)``."""
        return self.gain * functools.reduce(operator.add, (b.apply(mine, x) for b, mine in self._parts(params)))

    def push(self, params: Params, x: State, basis: Basis) -> Basis:
        """``Σ F_i @ basis``; a token-wise part beside one that mixes takes the wider basis as it is."""
        return self.gain * functools.reduce(operator.add, (b.push(mine, x, basis) for b, mine in self._parts(params)))

    def moments(self) -> BranchMoments:
        """The sums of the parts' (``cross`` is per q_f, and adds as such)."""
        return self._summed([branch.moments() for branch in self.branches])

    def moments_at(self, power: Any, inner: Any = 1.0, outer: Any = 1.0) -> BranchMoments:
        """At a power of the input, with a scheme's gains on the matrices."""
        with precision.scope("float64"):
            return self._summed([branch.moments_at(power, inner, outer) for branch in self.branches])

    def _summed(self, each: list[BranchMoments]) -> BranchMoments:
        total: dict[str, Any] = {f.name: sum(getattr(m, f.name) for m in each) for f in fields(BranchMoments)}
        total["cross"] = sum(m.q * m.cross for m in each) / (total["q"] + 1e-300)
        return BranchMoments(**total).scaled(self.gain**2)

    def weight_power(self, power: Any, inner: Any, outer: Any) -> Any:
        """Every part is handed the same gradient."""
        return self.gain**2 * sum(branch.weight_power(power, inner, outer) for branch in self.branches)

    def pairs(self, power: Any, inner: Any, outer: Any) -> Array:
        """Of two tokens, where no part mixes them: the sums of the parts'."""
        return self.gain**2 * functools.reduce(operator.add, (b.pairs(power, inner, outer) for b in self.branches))

    def behind_norm(self) -> "Parallel":
        """Of the parts as the law has them where a norm follows."""
        return Parallel(tuple(getattr(b, "behind_norm", lambda b=b: b)() for b in self.branches), self.gain)

    def of_one_token(self) -> "Parallel":
        """Of the parts as one token has them."""
        each = (getattr(b, "of_one_token", lambda b=b: b)() for b in self.branches)
        return Parallel(tuple(each), self.gain)


def renamed(name: str, i: int) -> str:
    """``w_in`` of part 1 as ``w1:_in``."""
    kind = next(kind for kind in KINDS if name.startswith(kind))
    return f"{kind}{i}:{name.removeprefix(kind)}"
