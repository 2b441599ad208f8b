"""The way forward of an audit's texts, and what its figures are once the tokens that stand out are set apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradflow import profiles
from gradflow.auditing.growth import Growth, Path, growth
from gradflow.auditing.sinks import Sink, find, others
from gradflow.checkpoints import Checkpoint, tokens
from gradflow.factors import Profile
from gradflow.stack import Trajectory
from gradflow.symbolic.norms import norm_formula


@dataclass(frozen=True)
class Apart:
    """The same network, gradient and texts; figures over the other tokens only.

    A length, of a state or of its gradient, is that of the other tokens' rows. The Jacobian is the whole network's, in which
    the two sets exchange gradient through attention: that exchange is in the factor ``branch``.

    Attributes
    ----------
    counted : (texts, tokens) of bool
        The other tokens.
    profile : Profile
    growth : Growth
    """

    counted: np.ndarray
    profile: Profile
    growth: Growth

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; tokens set apart by their positions."""
        return {
            "counted": [np.flatnonzero(row).tolist() for row in self.counted],
            "profile": self.profile.to_dict(),
            "growth": self.growth.to_dict(),
        }


@dataclass(frozen=True)
class Streams:
    """What the way forward says of each text: growth and parts over all its tokens, and the tokens that stand out.

    ``others`` are those that are not to be set apart, with their growth, where there are both.
    """

    growth: Growth
    sinks: tuple[Sink, ...]
    others: np.ndarray | None
    growth_of_others: Growth | None

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, way: Trajectory, real: np.ndarray, ids: Sequence[Any], apart: str | None
    ) -> "Streams":
        """Read a batched trajectory of padded texts, (texts, S, tokens, d)."""
        paths = [_path(checkpoint, way, i, seen) for i, seen in enumerate(real)]
        sinks = [
            sink
            for i, (path, row) in enumerate(zip(paths, ids, strict=True))
            for sink in find(path.token_rms, i, tokens.pieces(checkpoint.path, row), len(checkpoint.stack.block))
        ]
        left = others(sinks, real, apart)
        rows: list[list[Any]] = [[], []]
        for i, path in enumerate(paths):
            parts = path.parts()
            rows[0].append(growth(path, parts, np.ones(parts.shape[1], bool)))
            if left is not None:
                rows[1].append(growth(path, parts, left[i][real[i]]))
        return cls(Growth.of(rows[0]), tuple(sinks), left, Growth.of(rows[1]) if rows[1] else None)

    def apart(self, checkpoint: Checkpoint, states: Any, sent: Any, **options: Any) -> Apart | None:
        """Profile the other tokens; ``None`` where none is set apart, or no gradient arrives at the others of a text."""
        left = self.others
        if left is None or self.growth_of_others is None:
            return None
        if sent is not None and not np.any(np.where(left[..., None], sent, 0), (1, 2)).all():
            return None
        found = profiles.profile(checkpoint, states, sent, counted=left, **options)
        return Apart(left, found, self.growth_of_others)


def _path(checkpoint: Checkpoint, way: Trajectory, i: int, real: np.ndarray) -> Path:
    """One text's real tokens, on the host."""
    stack, weights = checkpoint.stack, checkpoint.whole
    x, u, added, out = (np.asarray(leaf)[i][..., real, :] for leaf in (way.x, way.u, way.added, way.out))
    assert weights.norms is not None  # a checkpoint's are read
    slots = [each[2] for each in weights.norms]
    held = [s and (np.asarray(s.gain), np.asarray(s.bias), norm_formula(s.row).centred) for s in slots]
    norms = [h and (h[0][l], h[1][l], h[2]) for l in range(stack.depth) for h in held]
    alpha = np.asarray(weights.multipliers(stack)[0]).reshape(-1)
    return Path(np.concatenate([x, out[None]]), u, added, alpha, tuple(norms))
