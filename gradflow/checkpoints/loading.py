"""From a folder to a `Checkpoint`: every tensor by its family's name for it, its shape held against the config."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow import precision
from gradflow.branches.attention import Attention
from gradflow.branches.experts import Experts
from gradflow.branches.mlp import MLP
from gradflow.branches.parallel import renamed
from gradflow.branches.rwkv import ChannelMix, TimeMix
from gradflow.checkpoints import lazy
from gradflow.checkpoints import memory as needs
from gradflow.checkpoints.families import plan_of
from gradflow.checkpoints.folder import Folder, read
from gradflow.checkpoints.ggufs import Gguf
from gradflow.checkpoints.lazy import Table
from gradflow.checkpoints.model import Checkpoint, Embedding, Head, Transform
from gradflow.checkpoints.plan import Family, Plan
from gradflow.norms import Norm
from gradflow.stack import Given, Slots, Stack

Affine = tuple[np.ndarray, np.ndarray | None]


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads a family's modules; every shape is held against the config before the tensor is read.

    ``used`` are the tensors asked for, with their shapes. Where it ``streams``, tables stay in the file.
    """

    folder: Folder | Gguf
    family: Family
    plan: Plan
    streams: bool = False
    used: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What stands before the body's names in this file: the family's prefix, or nothing."""
        prefix = self.family.prefix
        return prefix if any(name.startswith(prefix) for name in self.folder.files) else ""

    def tensor(self, name: str, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
        """One tensor."""
        self.used[name] = shape
        return self.folder.tensor(name, shape, dtype)

    def table(self, name: str, rows: int, width: int) -> np.ndarray | Table:
        """A matrix as it is stored, or where it lies."""
        if not self.streams:
            return self.tensor(name, (rows, width), None)
        self.used[name] = rows, width
        with self.folder.entry(name, (rows, width)):
            return Table(self.folder, name, (rows, width))

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

    @property
    def beside(self) -> "Reader | None":
        """The encoder's, of the same file."""
        family, plan = self.family.encoder, self.plan.encoder
        return None if family is None or plan is None else replace(self, family=family, plan=plan)

    def attention(self, own: Attention, block: str, modules: tuple[str, ...]) -> dict[str, np.ndarray]:
        """A block's W_Q, W_K, W_V, W_O, biases, and gains behind the norms of queries and keys."""
        plan, family = self.plan, self.family
        size, heads, few = own.size_of(plan.d), plan.heads, own.kv_heads_of(plan.d)
        rows = {"q": heads * size, "k": few * size, "v": few * size}
        *first, out = (block + module for module in modules)
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
        modules = family.gated if family.gated and isinstance(plan.mlp, MLP) and plan.mlp.gated else family.mlp
        parts = ("in", "gate", "out") if len(modules) == 3 else ("in", "out")

        def one(**expert: int) -> dict[str, Affine]:
            found = {}
            for n, module in zip(parts, modules, strict=True):
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
        """Parameters of each branch of a block."""
        plan, family = self.plan, self.family
        if isinstance(plan.attention, Attention):
            modules = (each for each in (family.attention, family.cross) if each)
            return [*(self.attention(plan.attention, block, each) for each in modules), self.mlp(block)]
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
        if self.plan.relative is not None:
            name = f"{self.prefix}{self.family.relative.format(l=l)}.weight"
            table = self.tensor(name, (self.plan.relative.number, self.plan.heads))
            params[0]["relative"] = self.plan.relative.by_offset(table)
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
        return Given(tuple(params), self.slots(norms), self.last())

    def slots(self, norms: list[list[tuple[Any, Any]]]) -> tuple[Slots, ...]:
        """The norms of each sub-layer, in the scheme's slots."""
        slots: list[Any] = []
        for each in norms:
            filled = iter([self.made(jnp.asarray(gain), jnp.asarray(bias)) for gain, bias in each])
            slots.append(tuple(next(filled) if slot else None for slot in self.plan.scheme.slots))
        return tuple(slots)

    def last(self) -> Norm | None:
        """The final norm, where the family has one."""
        final = self.prefix + str(self.family.final)
        return self.layer_norm(final, self.plan.final_eps) if self.plan.final_norm else None

    def embedding(self) -> Embedding:
        """Its tables, matrix and norm."""
        plan, family = self.plan, self.family

        def module(name: str | None, read: Callable[..., Any], *shape: Any) -> Any:
            return None if name is None else read(self.prefix + name, *shape)

        def matrix(name: str, rows: int, width: int) -> np.ndarray:
            return self.tensor(f"{name}.weight", (rows, width))

        width = plan.projected or plan.d
        kinds = module(family.kind, matrix, plan.types, plan.d)
        return Embedding(
            word=self.table(f"{self.prefix}{family.word}.weight", plan.vocab, width),
            scale=plan.scale,
            matrix=module(family.projection[0], matrix, plan.d, width) if plan.projected else None,
            position=module(family.position, matrix, plan.positions + plan.skipped, plan.d),
            kind=None if kinds is None else kinds[0],
            norm=module(family.first, self.layer_norm),
        )

    def head(self, word: np.ndarray | Table) -> Head | None:
        """The head, if the file has one; its decoder is the word table unless untied."""
        names, plan, files = self.family.head, self.plan, self.folder.files
        if not has_head(self.family, plan, files):
            return None
        shape = (plan.vocab, plan.projected or plan.d)
        self.used[names.decoder] = shape
        decoder = word if plan.tied else self.table(names.decoder, *shape)
        if names.dense is None:
            matrix = None
            if plan.projected:
                matrix = jnp.asarray(self.affine(self.prefix + self.family.projection[1], *shape[1:], plan.d, False)[0])
            return Head(decoder, matrix=matrix, softcap=plan.softcap, scale=plan.head_scale)
        w, b = map(jnp.asarray, self.affine(names.dense, plan.d, plan.d))
        # untied, the two may differ, and the decoder's own is used
        bias = next((n for n in (names.bias if plan.tied else names.bias[::-1]) if n in files), names.bias[0])
        transform = Transform(w, b, names.activation or plan.activation, self.layer_norm(names.norm))
        return Head(decoder, jnp.asarray(self.tensor(bias, (plan.vocab,))), transform)

    def checkpoint(self, embedding: Embedding, head: Head | None = None) -> Checkpoint:
        """Its stack and weights between the two; an encoder before them has the same embedding."""
        family, plan, beside = self.family, self.plan, self.beside
        stack = Stack.make(
            plan.scheme,
            plan.block,
            plan.depth,
            plan.d,
            norm=family.norm,
            eps=plan.eps,
            final_norm=plan.final_norm,
        )
        encoder = None if beside is None else beside.checkpoint(embedding)
        folder, weights = self.folder, lazy.blocks(self) if self.streams else self.weights()
        return Checkpoint(family.name, folder.path, folder.config, plan, stack, weights, embedding, head, encoder)

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


def checked(
    path: str | Path, memory: float | None = None, run: needs.Run = needs.NOTHING, stream: bool | None = None
) -> Reader:
    """What is to be read, and whether all at once, when all has been refused that config and headers can tell.

    ``run`` is what is to be run; with ``stream=None`` the blocks stay in the file where all at once need more memory than there
    is. Raises as `load`.
    """
    folder = read(path)
    family, plan = plan_of(folder.config)
    reader = Reader(folder, family, replace(plan, fixture=folder.fixture or plan.fixture))
    for each in (reader, reader.beside):
        if each is not None:
            each.refuse_other_depth()
    sizes, layer = folder.sizes(), reader.prefix + family.layer.partition("{")[0]
    ways = {False: needs.forecast(sizes, plan, layer, run)}
    if reader.beside is None:
        ways[True] = needs.streamed(sizes, plan, layer, run)
    elif stream:
        raise ValueError("stream: an encoder–decoder is read all at once; leave it out")
    return replace(reader, streams=needs.choose(ways, stream, memory))


def load(path: str | Path, memory: float | None = None, stream: bool | None = False) -> Checkpoint:
    """Read a model's folder (or the safetensors file in it), or a GGUF file.

    Parameters
    ----------
    memory : float, optional
        The most that it may take, in GiB; by default nine tenths of what is free.
    stream : bool, optional
        Whether weights stay in the file, to be read block by block by `gradflow.profile`; ``None``: where all at once need
        more than ``memory``.

    Raises
    ------
    ValueError
        One line that names the file, key or tensor which is missing, damaged or not read, and how to mend it.
    """
    reader = checked(path, memory, stream=stream)
    with precision.scope("float64"):
        embedding = reader.embedding()
        found = reader.checkpoint(embedding, reader.head(embedding.word))
    reader.refuse_left()
    return found
