"""From a folder to a `Checkpoint`: every tensor by its family's name for it, its shape held against the config."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import precision
from gradflow.attention import Attention
from gradflow.branches import joined
from gradflow.checkpoints import memory as needs
from gradflow.checkpoints.families import plan_of
from gradflow.checkpoints.folder import Folder, read
from gradflow.checkpoints.ggufs import Gguf
from gradflow.checkpoints.model import Checkpoint, Embedding, Head, Transform
from gradflow.checkpoints.plan import Family, Plan
from gradflow.experts import Experts
from gradflow.norms import Norm
from gradflow.parallel import renamed
from gradflow.rwkv import ChannelMix, TimeMix
from gradflow.stack import Given, Stack

Affine = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True)
class Reader:
    """Reads a family's modules; every shape is held against the config before the tensor is read."""

    folder: Folder | Gguf
    family: Family
    plan: Plan
    used: set[str] = field(default_factory=set)

    @property
    def prefix(self) -> str:
        """What stands before the body's names in this file: the family's prefix, or nothing."""
        prefix = self.family.prefix
        return prefix if any(name.startswith(prefix) for name in self.folder.files) else ""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
        """One tensor."""
        self.used.add(name)
        return self.folder.tensor(name, shape, dtype)

    def affine(self, module: str, n_out: int, n_in: int, bias: bool = True, in_out: bool = False) -> Affine:
        """A module's matrix, (out, in), and its bias."""
        shape = (n_in, n_out) if in_out else (n_out, n_in)
        w = self.tensor(f"{module}.weight", shape)
        return w.T if in_out else w, self.tensor(f"{module}.bias", (n_out,)) if bias else None

    def norm(self, module: str, width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A norm's gain and bias; files from TensorFlow call them gamma and beta."""
        old = f"{module}.weight" not in self.folder.files and f"{module}.gamma" in self.folder.files
        gain, bias = (f"{module}.{name}" for name in (("gamma", "beta") if old else ("weight", "bias")))
        d = width or self.plan.d
        stored = self.tensor(gain, (d,)) + self.plan.unit
        return stored, self.tensor(bias, (d,)) if self.plan.norm_bias and not width else np.zeros(d)

    def layer_norm(self, module: str, eps: float | None = None) -> Norm:
        """One norm outside of the blocks."""
        gain, bias = map(jnp.asarray, self.norm(module))
        return self.made(gain, bias, eps)

    def made(self, gain: Any, bias: Any, eps: float | None = None) -> Norm:
        """A norm of the family's kind; ε is the plan's unless given."""
        return Norm(gain, bias, row=self.family.norm, eps=self.plan.eps if eps is None else eps)

    def attention(self, own: Attention, block: str) -> dict[str, np.ndarray]:
        """A block's W_Q, W_K, W_V, W_O, biases, and gains behind the norms of queries and keys."""
        plan, family = self.plan, self.family
        size, heads, few = own.size_of(plan.d), plan.heads, own.kv_heads_of(plan.d)
        rows = {"q": heads * size, "k": few * size, "v": few * size}
        *first, out = (block + module for module in family.attention)
        if len(first) == 1:
            w, b = self.affine(first[0], sum(rows.values()), plan.d, "q" in plan.biases, family.in_out)
            found = {n: (part, None if b is None else bias) for n, part, bias in _thirds(w, b, family.by_head, heads)}
        else:
            found = {
                n: self.affine(module, rows[n], plan.d, n in plan.biases, family.in_out)
                for n, module in zip("qkv", first, strict=True)
            }
        found["o"] = self.affine(out, plan.d, heads * size, "o" in plan.biases, family.in_out)
        gains: dict[str, np.ndarray] = {}
        for n, module in zip("qk", family.qk_norms, strict=bool(family.qk_norms)):
            gains[f"gain_{n}"] = self.norm(block + module, rows[n] if own.qk_whole else size)[0]
        return _named(found) | gains

    def mlp(self, block: str) -> dict[str, np.ndarray]:
        """A block's MLP; of a mixture all experts as one wide MLP, and the router."""
        plan, family = self.plan, self.family
        parts = ("in", "gate", "out") if len(family.mlp) == 3 else ("in", "out")

        def one(**expert: int) -> dict[str, Affine]:
            found = {}
            for n, module in zip(parts, family.mlp, strict=True):
                shape = (plan.d, plan.inner) if n == "out" else (plan.inner, plan.d)
                found[n] = self.affine(block + module.format(**expert), *shape, n in plan.biases, family.in_out)
            return found

        if not isinstance(plan.mlp, Experts):
            return _named(one())
        each = [one(e=e) for e in range(plan.mlp.number)]
        wide = {n: (np.concatenate([expert[n][0] for expert in each], int(n == "out")), None) for n in parts}
        return _named(wide | {"router": self.affine(block + str(family.router), plan.mlp.number, plan.d, False)})

    def mixer(self, branch: TimeMix | ChannelMix, block: str, modules: Sequence[str], vectors: Sequence[str]) -> Any:
        """A block's parameters of a branch that says their shapes; mixes are stored for a batch of texts."""
        shapes = branch.shapes(self.plan.d)
        stored = [*(f"{module}.weight" for module in modules), *vectors]
        found = {}
        for (n, shape), name in zip(shapes.items(), stored, strict=True):
            found[n] = self.tensor(block + name, (1, 1, *shape) if n.startswith("mix") else shape).reshape(shape)
        return found

    def branches(self, block: str) -> list[dict[str, np.ndarray]]:
        """Parameters of both branches of a block."""
        plan, family = self.plan, self.family
        if isinstance(plan.attention, Attention):
            return [self.attention(plan.attention, block), self.mlp(block)]
        assert isinstance(plan.mlp, ChannelMix)
        first, second = family.vectors
        return [
            self.mixer(plan.attention, block, family.attention, first),
            self.mixer(plan.mlp, block, family.mlp, second),
        ]

    def block(self, l: int) -> tuple[list[dict[str, np.ndarray]], list[list[tuple[np.ndarray, np.ndarray]]]]:
        """Parameters of each sub-layer of block ``l``, and the norms in its slots."""
        prefix = self.prefix + self.family.layer.format(l=l)
        params = self.branches(prefix)
        norms = [[self.norm(prefix + module) for module in each] for each in self.family.norms]
        if self.plan.turns is not None:
            params[0]["rope"] = self.plan.turns[l]
        if self.plan.reach is not None:
            params[0]["reach"] = self.plan.reach[l]
        if not self.plan.parallel:
            return params, norms
        for own, ((gain, bias), *_) in zip(params, norms, strict=True):  # one norm feeds both, at unit gain
            for name in [n for n in own if n in ("w_q", "w_k", "w_v", "w_in", "w_gate")]:
                shift = own[name] @ bias
                own[f"b{name[1:]}"] = own.get(f"b{name[1:]}", 0.0) + shift
                own[name] = own[name] * gain
        both = {renamed(name, i): value for i, own in enumerate(params) for name, value in own.items()}
        return [both], [[(np.ones(self.plan.d), np.zeros(self.plan.d))]]

    def weights(self) -> Given:
        """The body's, stacked along depth."""
        first, shape = jax.tree.flatten(self.block(0))
        leaves = [np.empty((self.plan.depth, *leaf.shape), leaf.dtype) for leaf in first]
        for l in range(self.plan.depth):
            for leaf, value in zip(leaves, jax.tree.leaves(self.block(l)) if l else first, strict=True):
                leaf[l] = value
        params, norms = shape.unflatten([jnp.asarray(leaves.pop(0)) for _ in first])  # NumPy's copy goes at once
        slots = []
        for each in norms:
            filled = iter(each)
            slots.append(tuple(self.made(*next(filled)) if slot else None for slot in self.plan.scheme.slots))
        final = self.prefix + str(self.family.final)
        last = self.layer_norm(final, self.plan.final_eps) if self.plan.final_norm else None
        return Given(tuple(params), tuple(slots), last)

    def embedding(self) -> Embedding:
        """Its tables, matrix and norm."""
        plan, family = self.plan, self.family

        def module(name: str | None, read: Callable[..., Any], *shape: Any) -> Any:
            return None if name is None else read(self.prefix + name, *shape)

        def table(name: str, rows: int, width: int, dtype: Any = np.float64) -> np.ndarray:
            return self.tensor(f"{name}.weight", (rows, width), dtype)

        width = plan.projected or plan.d
        kinds = module(family.kind, table, plan.types, plan.d)
        return Embedding(
            word=module(family.word, table, plan.vocab, width, None),
            scale=plan.scale,
            matrix=module(family.projection[0], table, plan.d, width) if plan.projected else None,
            position=module(family.position, table, plan.positions + plan.skipped, plan.d),
            kind=None if kinds is None else kinds[0],
            norm=module(family.first, self.layer_norm),
        )

    def head(self, word: np.ndarray) -> Head | None:
        """The head, if the file has one; its decoder is the word table unless untied."""
        names, plan, files = self.family.head, self.plan, self.folder.files
        if not has_head(self.family, plan, files):
            return None
        self.used.add(names.decoder)
        shape = (plan.vocab, plan.projected or plan.d)
        decoder = word if plan.tied else self.tensor(names.decoder, shape, None)
        if names.dense is None:
            matrix = None
            if plan.projected:
                matrix = jnp.asarray(self.affine(self.prefix + self.family.projection[1], *shape[1:], plan.d, False)[0])
            return Head(decoder, matrix=matrix, softcap=plan.softcap)
        w, b = map(jnp.asarray, self.affine(names.dense, plan.d, plan.d))
        # untied, the two may differ, and the decoder's own is used
        bias = next((n for n in (names.bias if plan.tied else names.bias[::-1]) if n in files), names.bias[0])
        transform = Transform(w, b, names.activation or plan.activation, self.layer_norm(names.norm))
        return Head(decoder, jnp.asarray(self.tensor(bias, (plan.vocab,))), transform)

    def refuse_other_depth(self) -> None:
        """Refuse a file with fewer or more blocks than the config says, before any is allocated."""
        layer, depth = self.prefix + self.family.layer, self.plan.depth

        def held(l: int) -> bool:
            return any(name.startswith(layer.format(l=l)) for name in self.folder.files)

        if held(depth):
            key, more = self.family.depth, layer.format(l=depth)
            raise ValueError(f"checkpoint: config.json's {key!r} is {depth}, but the file holds {more!r} too")
        lacking = next((l for l in range(min(depth, len(self.folder.files) + 1)) if not held(l)), None)
        if lacking is not None:
            self.tensor(f"{layer.format(l=lacking)}{self.family.attention[0]}.weight", ())

    def refuse_left(self) -> None:
        """Refuse a tensor of the body that the plan did not ask for: the model would compute something else."""
        body = (name for name in sorted(self.folder.files) if name.startswith(self.prefix))
        for name in body:
            if name not in self.used and not name.endswith(self.family.unused):
                raise ValueError(
                    f"checkpoint: the file holds {name!r}, which {self.family.name} by this config.json does not use; "
                    "is config.json of this model?"
                )


def has_head(family: Family, plan: Plan, files: Container[str]) -> bool:
    """Whether a model with these tensors has the head that its loss is of."""
    names = family.head
    return f"{names.dense}.weight" in files if names.dense else plan.tied or names.decoder in files


def _thirds(w: np.ndarray, b: np.ndarray | None, by_head: bool, heads: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Q, K and V of a matrix that holds them one after another, or for each head in turn."""
    bias = np.zeros(len(w)) if b is None else b
    if by_head:
        parts = [m.reshape(heads, 3, -1, *m.shape[1:]).swapaxes(0, 1).reshape(3, -1, *m.shape[1:]) for m in (w, bias)]
    else:
        parts = [np.stack(np.split(m, 3)) for m in (w, bias)]
    return list(zip("qkv", *parts, strict=True))


def _named(affines: dict[str, Affine]) -> dict[str, np.ndarray]:
    """As a branch wants its parameters."""
    weights = {f"w_{n}": w for n, (w, _) in affines.items()}
    return weights | {f"b_{n}": b for n, (_, b) in affines.items() if b is not None}


def checked(path: str | Path, memory: float | None = None, tokens: tuple[int, int] = (0, 0)) -> Reader:
    """What is to be read, once all has been refused that config and headers can tell.

    ``tokens`` are the number of texts that are to be run, and the length of the longest. Raises as `load`.
    """
    folder = read(path)
    family, plan = plan_of(folder.config)
    reader = Reader(folder, family, replace(plan, fixture=folder.fixture or plan.fixture))
    reader.refuse_other_depth()
    layer = reader.prefix + family.layer.partition("{")[0]
    needs.refuse(needs.forecast(folder.sizes(), plan, layer, tokens), memory)
    return reader


def load(path: str | Path, memory: float | None = None) -> Checkpoint:
    """Read a model's folder (or the safetensors file in it), or a GGUF file.

    Parameters
    ----------
    memory : float, optional
        The most that it may take, in GiB; by default nine tenths of what is free.

    Raises
    ------
    ValueError
        One line that names the file, key or tensor which is missing, damaged or not read, and how to mend it.
    """
    reader = checked(path, memory)
    folder, family, plan = reader.folder, reader.family, reader.plan
    with precision.scope("float64"):
        embedding, weights = reader.embedding(), reader.weights()
        head = reader.head(embedding.word)
    reader.refuse_left()
    block: Any = (plan.attention, plan.mlp)
    stack = Stack.make(
        plan.scheme,
        (joined(block),) if plan.parallel else block,
        plan.depth,
        plan.d,
        norm=family.norm,
        eps=plan.eps,
        final_norm=plan.final_norm,
    )
    return Checkpoint(family.name, folder.path, folder.config, plan, stack, weights, embedding, head)
