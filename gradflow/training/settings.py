"""A run's settings: checked once, hashed into nothing, written beside the run; and the lists of them that a sweep stands for."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradflow import checks, precision, profiles
from gradflow.inits import INITS
from gradflow.schemes import Scheme, scheme_of
from gradflow.stack import Stack
from gradflow.training.model import LEARNED, initial, stack_for
from gradflow.training.optimizers import Optimizer
from gradflow.training.schedules import SCHEDULES
from gradflow.training.steps import Program
from gradflow.training.store import SUFFIX

VARIED = (
    "scheme",
    "depth",
    "optimizer",
    "norm",
    "lr",
    "warmup",
    "key",
)  # each may be a list; a run is one of the product


@dataclass(frozen=True)
class Settings:
    """Of one run; `gradflow.warmup` says what each is."""

    scheme: str | Scheme
    depth: int
    warmup: int
    lr: float
    key: int
    optimizer: str
    norm: str
    d: int
    heads: int
    tokens: int
    batch: int
    block: Any
    init: str
    eps: float
    schedule: str
    steps: int
    every: int
    b1: float
    b2: float
    weight_decay: float
    dtype: str

    def __post_init__(self) -> None:
        for name, least in {"warmup": 0, "batch": 1, "tokens": 2, "heads": 1, "steps": 1, "every": 1}.items():
            checks.integer(name, getattr(self, name), least)
        checks.key(self.key)
        checks.one_of("init", self.init, INITS)
        checks.one_of("schedule", self.schedule, SCHEDULES)
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name}: needs a finite number of at least 0, got {value!r}")
        _ = self.program  # builds stack and optimizer, which check the rest

    @classmethod
    def stored(cls, facts: Mapping[str, Any], path: str) -> "Settings":
        """Those of a run's file.

        Raises
        ------
        ValueError
            If they cannot be built from names alone: a scheme or branch of one's own.
        """
        named = {f.name: facts[f.name] for f in dataclasses.fields(cls) if f.name != "block"}
        try:
            found = cls(**named, block=tuple(facts["branch"].split(" + ")))
            same = json.loads(json.dumps(found.to_dict()))
        except ValueError:
            same = {}
        if not same or any(facts[name] != value for name, value in same.items() if name != "device"):
            raise ValueError(f"path: the scheme or the branches of {path!r} are not gradflow's own; give another run")
        return found

    @property
    def row(self) -> Scheme:
        """The scheme's."""
        return scheme_of(self.scheme)

    @property
    def stack(self) -> Stack:
        """With the scheme's numbers."""
        checks.integer("d", self.d, 2)
        options = {"norm": self.norm, "eps": self.eps, "dtype": precision.resolve(self.dtype)}
        block = initial(self.block, self.init, self.d)
        return stack_for(self.scheme, block, self.depth, self.d, self.heads, self.batch, **options)

    @property
    def program(self) -> Program:
        """By the stack's shape: what is compiled."""
        stack = self.stack
        return Program(
            dataclasses.replace(stack, scheme=stack.scheme.shape),
            Optimizer(self.optimizer, self.b1, self.b2, weight_decay=self.weight_decay),
            self.batch,
            self.tokens,
            self.every,
            learned=self.row.name in LEARNED,
        )

    def name(self, varied: Sequence[str] = VARIED) -> str:
        """Of those settings, as in ``post-ln, 6 blocks, lr 0.003, warm-up 200``."""
        words = {
            "scheme": self.row.name,
            "depth": f"{self.depth} block{'s' * (self.depth > 1)}",
            "optimizer": self.optimizer,
            "norm": self.norm,
            "lr": f"lr {self.lr:g}",
            "warmup": f"warm-up {self.warmup}",
            "key": f"key {self.key}",
        }
        return ", ".join(words[name] for name in VARIED if name in varied)

    @property
    def file(self) -> str:
        """The name of its run's file, by all that a folder may vary."""
        return self.name().replace(", ", "_").replace(" ", "-") + SUFFIX

    def to_dict(self) -> dict[str, Any]:
        """What it is, for a result's settings and a store."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("scheme", "block")}
        stack = self.stack
        normed = [
            row.norm_out
            for blocks, row in self.row.parts(self.depth)
            for _ in range(*blocks.indices(self.depth))
            for _ in stack.block
        ]
        own |= {"labels": list(profiles.labels(stack)), "branches": len(stack.block)}
        own["normed"] = [i for i, there in enumerate([*normed, *[True] * stack.final_norm]) if there]
        return {"what": "measured"} | stack.settings() | own


def product(options: dict[str, Any], seeds: int) -> tuple[list[Settings], list[str]]:
    """All settings that options with lists stand for, and the names of those that vary."""
    keys = [options["key"] + i for i in range(checks.integer("seeds", seeds, 1))]
    lists = {name: keys if name == "key" else _listed(name, options[name]) for name in VARIED}
    rows = [Settings(**options | dict(zip(VARIED, each, strict=True))) for each in itertools.product(*lists.values())]
    return rows, [name for name, values in lists.items() if len(values) > 1]


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | Scheme) or not isinstance(value, Sequence):
        return [value]
    if not value:
        raise ValueError(f"{name}: needs at least one value")
    return list(dict.fromkeys(value))
