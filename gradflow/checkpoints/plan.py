"""From a config to a plan: the forward pass in gradflow's own parts. A family is one row of names and of what its code fixes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradflow.branches import joined
from gradflow.branches.attention import Attention
from gradflow.branches.cross_attention import CrossAttention
from gradflow.branches.experts import Experts
from gradflow.branches.mlp import MLP
from gradflow.branches.relative import Buckets
from gradflow.branches.rwkv import ChannelMix, TimeMix
from gradflow.checkpoints.config import ACTIVATIONS, Config
from gradflow.schemes import Scheme, scheme_of

QKV, GATED = frozenset("qkv"), frozenset(("in", "gate", "out"))
ALL = QKV | {"o"} | GATED  # the matrices of a block
ALONE = {"add_cross_attention": (False,), "is_encoder_decoder": (False,), "pruned_heads": ({},)}  # no encoder beside it


@dataclass(frozen=True)
class HeadNames:
    """Where the head lies: of a masked language model φ(dense), its norm, then the decoder and a bias; else the decoder alone.

    A tied decoder is the word table.
    """

    decoder: str
    dense: str | None = None
    norm: str = ""
    bias: tuple[str, ...] = ()
    activation: str | None = None
    """``None``: the model's own."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """What every config says: sizes, of which ``positions`` is the most tokens of a text, ε of every norm, and φ's name.

    ``heads`` is 0, and ``activation`` empty until the details say it, where the config has no such key.
    """

    d: int
    depth: int
    heads: int
    inner: int
    vocab: int
    positions: int
    eps: float
    activation: str


@dataclass(frozen=True, eq=False)
class Plan(Sizes):
    """What a config says of the forward pass.

    Attributes
    ----------
    scheme : Scheme
        Where the norms stand.
    attention, mlp
        The branches; the first may be a recurrence.
    parallel : bool
        Whether both read the same stream and add up, each behind a norm of its own.
    final_norm, final_eps
        Whether a norm follows the last block; its ε, where the model's code fixes another.
    unit : float
        What a norm's gain has over the weight that is stored.
    biases : set of str
        The matrices with a bias, of ``q k v o in gate out``.
    norm_bias : bool
        Whether norms have one.
    scale : float
        Factor of the word embedding.
    skipped, pad : int
        Rows of the position table before the first; the padding's id, from which positions are counted where ``counted``.
    types : int
        Rows of the table of token types, of which type 0 is used.
    projected : int
        Width of the word embedding, where a matrix leads from it to d.
    turns : (depth, pairs), optional
        Frequencies of the rotary pairs.
    reach : (depth,), optional
        How many tokens back a query sees.
    tied : bool
        Whether the decoder is the word table.
    softcap : float or None
        Logits become softcap·tanh(logits/softcap).
    head_scale : float
        Factor of the last hidden state before the decoder.
    relative : Buckets or None
        Which offsets share a number that attention adds to its logits.
    encoder, cross : Plan, CrossAttention or None
        Of a decoder with an encoder: that one's plan, and the branch between attention and MLP that asks it.
    start : int
        What the decoder reads before a target's first token.
    fixture : str
        The tiny model that vouches for this plan.
    """

    scheme: Scheme
    attention: Attention | TimeMix
    mlp: MLP | Experts | ChannelMix
    fixture: str
    parallel: bool = False
    final_norm: bool = True
    final_eps: float | None = None
    unit: float = 0.0
    biases: frozenset[str] = frozenset()
    norm_bias: bool = True
    scale: float = 1.0
    skipped: int = 0
    pad: int = 0
    counted: bool = False
    types: int = 0
    projected: int = 0
    turns: np.ndarray | None = None
    reach: np.ndarray | None = None
    tied: bool = True
    softcap: float | None = None
    head_scale: float = 1.0
    relative: Buckets | None = None
    encoder: "Plan | None" = None
    cross: CrossAttention | None = None
    start: int = 0

    @property
    def block(self) -> tuple[Any, ...]:
        """The branches of a block's sub-layers, in order."""
        each: Any = tuple(branch for branch in (self.attention, self.cross, self.mlp) if branch is not None)
        return (joined(each),) if self.parallel else each

    def sizes(self) -> dict[str, Any]:
        """Its numbers, JSON-ready."""
        names = ("depth", "heads", "inner", "vocab", "positions", "activation", "eps", "tied")
        found = {"hidden": self.d} | {name: getattr(self, name) for name in names}
        if isinstance(self.attention, TimeMix):
            del found["heads"]
            return found | {"channels": self.attention.size}
        found |= {} if self.encoder is None else {"encoder_depth": self.encoder.depth}
        return found | {"kv_heads": self.attention.kv_heads_of(self.d), "head_size": self.attention.size_of(self.d)}


@dataclass(frozen=True)
class Family:
    """One row: names in config.json and names of tensors, without the prefix that a model with a head puts before them.

    Attributes
    ----------
    model_types : tuple of str
        The values of ``model_type`` that share this layout.
    details : callable
        (config, its sizes) → what else of a `Plan` the config says, ``attention`` at least.
    scheme, norm : str
        Where norms stand, unless ``details`` say otherwise, and their kind.
    prefix, layer : str
        What comes before the body's tensors in a model with a head, and then before those of block ``l``.
    word, position, kind, first, final : str or None
        The tables of words, positions and token types, the norms behind the embedding and behind the last block.
    attention : tuple of str
        Modules W_Q, W_K, W_V, W_O of a block; or one that holds the first three, and W_O.
    by_head : bool
        Whether that one holds the three head by head, not one after another.
    mlp : tuple of str
        The first matrix, of a gated one the other that the first is multiplied with, and the last; of expert ``e``, beside a
        ``router``, where there are several.
    gated : tuple of str
        The same where the activation's name says that it is gated, if it is that which says so.
    cross : tuple of str
        Modules W_Q, W_K, W_V, W_O of the attention between the two that asks the encoder, where there is one.
    encoder : Family or None
        The row of that encoder, whose tensors lie in the same file.
    relative : str
        The table of `Plan.relative`, of block ``l`` where each has its own.
    norms : tuple of tuple of str
        Of each sub-layer, what fills the scheme's slots in turn.
    qk_norms : tuple of str
        Norms of queries and keys, where there are any.
    vectors : tuple of tuple of str
        Of a recurrence and of the branch after it, what they have beside the matrices that ``attention`` and ``mlp`` then
        name in the branches' own order.
    projection : tuple of str
        Matrices from a narrower word embedding to d, and back before the decoder, where there are any.
    in_out : bool
        Whether a block's matrices are stored (in, out).
    hidden, depth, heads, inner, activation, eps, table, size : str
        Keys of config.json; ``eps`` and ``table`` may be the number that the model's code fixes, and a head's ``size`` d/heads.
        ``None`` where there are no heads, or no choice of an activation.
    activations : mapping
        What may stand there, and gradflow's name for it.
    defaults : mapping
        transformers' own, where config.json leaves a key out.
    only : mapping
        Key → its values that are read.
    inert, unused : tuple of str
        Keys, and ends of tensors' names, that change nothing.
    mask : str or None
        The tokenizer's word for a masked token; ``None`` for a causal model.
    """

    name: str
    source: str
    model_types: tuple[str, ...]
    details: Callable[[Config, Sizes], dict[str, Any]]
    scheme: str
    norm: str
    prefix: str
    layer: str
    word: str
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    norms: tuple[tuple[str, ...], ...]
    head: HeadNames
    position: str | None = None
    kind: str | None = None
    first: str | None = None
    final: str | None = None
    by_head: bool = False
    qk_norms: tuple[str, ...] = ()
    router: str | None = None
    vectors: tuple[tuple[str, ...], ...] = ()
    gated: tuple[str, ...] = ()
    cross: tuple[str, ...] = ()
    encoder: "Family | None" = None
    relative: str = ""
    projection: tuple[str, ...] = ()
    in_out: bool = False
    hidden: str = "hidden_size"
    depth: str = "num_hidden_layers"
    heads: str | None = "num_attention_heads"
    inner: str = "intermediate_size"
    activation: str | None = "hidden_act"
    eps: str | float = "layer_norm_eps"
    table: str | int = "max_position_embeddings"
    size: str | None = None
    activations: Mapping[str, str] = field(default_factory=lambda: ACTIVATIONS)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple] = field(default_factory=dict)
    inert: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    mask: str | None = None


def plan(family: Family, stated: Mapping[str, Any]) -> Plan:
    """Check everything in a config that the forward pass depends on, and refuse what it might depend on unseen.

    Raises
    ------
    ValueError
        Naming the key, and what it may be.
    """
    config = Config(stated, family.defaults)
    for key, allowed in family.only.items():
        config.only(key, *allowed)
    activation = config.activation(family.activation, family.activations) if family.activation else ""
    d, heads = config.whole(family.hidden, 3), config.whole(family.heads) if family.heads else 0
    if heads and d % heads and not (family.size and config.get(family.size)):
        raise ValueError(
            f"checkpoint: config.json's {family.heads!r} is {heads}, which does not divide {family.hidden!r}, {d}"
        )
    sizes = Sizes(
        d=d,
        depth=config.whole(family.depth),
        heads=heads,
        inner=config.whole(family.inner) if config.get(family.inner) or family.inner not in family.defaults else 4 * d,
        vocab=config.whole("vocab_size"),
        positions=config.whole(family.table) if isinstance(family.table, str) else family.table,
        eps=config.number(family.eps, 0, 1) if isinstance(family.eps, str) else family.eps,
        activation=activation,
    )
    found: dict[str, Any] = {"scheme": scheme_of(family.scheme), "tied": config.flag("tie_word_embeddings")}
    found |= {"fixture": family.name}
    if activation:
        found |= {"mlp": MLP(activation, sizes.inner / d, gated=len(family.mlp) == 3)}
    found |= vars(sizes) | family.details(config, sizes)
    config.refuse_others(family.inert)
    if family.encoder is not None:
        found["encoder"] = plan(family.encoder, stated)
    return Plan(**found)
