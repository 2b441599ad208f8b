"""The depth law of several tokens: their Gram forward, the gradient's Gram back, at leading order in 1/d.

Each sub-layer is what `gradflow.laws.leading` has for one token, said of every pair: norms scale tokens, branches map their
angles (`moments.kernels`), attention mixes them (`moments.grams`). Long stacks go in pieces, so that only one piece's Grams are
kept.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gradflow.branches import Branch
from gradflow.branches.attention import Attention
from gradflow.branches.dropout import Dropout
from gradflow.branches.parallel import Parallel
from gradflow.laws.leading import LENGTHS, Rows, branch_powers, distinct
from gradflow.moments import kernels, softmax
from gradflow.moments.grams import Exchangeable, Gram, Positions
from gradflow.schemes import Multipliers, Scheme

ASSUMPTIONS = (
    "iid zero-mean Gaussian weights, unit-rms tokens of one common cosine, ε = 0; leading order in 1/d and heads/d: Gaussian "
    "logits; two queries' softmax rows overlap as Price's theorem and its ends say; causal: the mean cosine of the keys seen"
)
Layout = Exchangeable | Positions
KEPT = 2**25  # entries of the Grams that one piece keeps


@dataclass(frozen=True)
class TokenPart:
    """Blocks of one placement, and how their tokens are laid out; hashable."""

    scheme: Scheme
    branches: tuple[Branch, ...]
    norm: str
    layout: Layout


def _undropped(branch: Branch) -> Branch:
    return branch.branch if isinstance(branch, Dropout) else branch


def _parts(branches: Sequence[Branch]) -> list[Branch]:
    """Every branch, and of a sum its parts."""
    return [part for b in map(_undropped, branches) for part in getattr(b, "branches", (b,))]


def layout_of(branches: Sequence[Branch], tokens: int) -> Layout:
    """Two numbers, unless a branch knows the tokens' order."""
    ordered = any(getattr(b, "causal", False) or getattr(b, "rope", False) for b in _parts(branches))
    return Positions(tokens) if ordered else Exchangeable(tokens)


def known(scheme: Scheme, norm: str) -> bool:
    """Whether a length norm stands before every branch, so that its power does not depend on the stream."""
    return norm in LENGTHS and (scheme.norm_in or scheme.norm_out)


def normed(part: TokenPart, present: bool, gram: Gram) -> tuple[Gram, jax.Array]:
    """Gram behind a norm, and the factor of each token's gradient; an empty slot passes everything on."""
    powers = part.layout.powers(gram)
    if not present or part.norm == "none":
        return gram, jnp.ones_like(powers)
    factors = 1 / jnp.sqrt(powers)
    return part.layout.scaled(gram, factors), factors


def through(
    part: TokenPart, branch: Branch, fed: Gram, inner: Any, outer: Any, looked_up: Any
) -> tuple[Gram, Callable[[Gram], tuple[Gram, jax.Array]]]:
    """A branch forward, and its way back: of dL/df, that of dL/dx and the weights' gradient power per token."""
    layout = part.layout
    if isinstance(branch, Dropout):  # two tokens' masks are independent: only what a token has with itself grows
        value, back = through(part, branch.branch, fed, inner, outer, looked_up)
        grown = 1 / (1 - branch.rate)
        return _own_times(layout, value, grown), lambda gradient: back(_own_times(layout, gradient, grown))
    if isinstance(branch, Parallel):
        each = [through(part, b, fed, inner, outer, found) for b, found in zip(branch.branches, looked_up, strict=True)]
        gain = branch.gain**2

        def summed(gradient: Gram) -> tuple[Gram, jax.Array]:
            onto, weights = zip(*(back(gain * gradient) for _, back in each), strict=True)
            return functools.reduce(jnp.add, onto), functools.reduce(jnp.add, weights)

        return gain * functools.reduce(jnp.add, [value for value, _ in each]), summed
    if isinstance(branch, Attention):
        return layout.attend(branch, fed, inner, outer, looked_up)
    power = layout.own(fed)
    kernel = branch.pairs(power, inner, outer) if looked_up is None else looked_up
    own, other = branch_powers(branch, power, inner, outer), kernels.at(kernel, layout.cosines(fed))
    value, slope, weights = (layout.join(a, b) for a, b in zip(own, other, strict=True))
    return value, lambda gradient: (gradient * slope / power, layout.inner(gradient, weights))


def _own_times(layout: Layout, gram: Gram, factor: float) -> Gram:
    return layout.join(factor * layout.powers(gram), gram)


def sublayer(
    part: TokenPart, k: int, numbers: Sequence[Any], looked_up: Any, X: Gram
) -> tuple[Gram, Callable[[Gram, jax.Array], tuple[Gram, jax.Array, Rows]]]:
    """A block's k-th sub-layer, and its way back: of the gradient's Gram and the trunk's powers, both, and the figures."""
    layout, row, (alpha, beta, sigma, inner, outer) = part.layout, part.scheme, numbers
    into, a_in = normed(part, row.norm_in, X)
    fed = sigma**2 * into
    f, back_branch = through(part, part.branches[k], fed, inner, outer, looked_up)
    added, a_branch = normed(part, row.norm_branch, f)
    u = alpha**2 * X + beta**2 * added
    out, a_out = normed(part, row.norm_out, u)

    def back(gradient: Gram, trunk: jax.Array) -> tuple[Gram, jax.Array, Rows]:
        on_u, trunk_u = layout.scaled(gradient, a_out), trunk * a_out**2
        returned, weights = back_branch(beta**2 * layout.scaled(on_u, a_branch))
        before = alpha**2 * on_u + sigma**2 * layout.scaled(returned, a_in)
        arrived, left, handed = (layout.own(g) for g in (gradient, on_u, before))
        share = jnp.mean(jnp.abs(alpha) * jnp.sqrt(layout.powers(X) / layout.powers(u)))
        figures = {
            "Q": layout.own(X),
            "added": beta**2 * layout.own(added),
            "stream_cosine": jnp.sign(alpha) * share,
            "norm": left / arrived,
            "trunk_norm": jnp.mean(trunk_u) / jnp.mean(trunk),
            "back": handed / left,
            "weights": weights / arrived,
            "token_cosine": _cosine(layout, X),
            "gradient_cosine": _cosine(layout, gradient),
            "alpha": alpha,
        }
        return before / handed, alpha**2 * trunk_u / jnp.mean(alpha**2 * trunk_u), figures

    return out, back


def _cosine(layout: Layout, gram: Gram) -> jax.Array:
    """Mean product of two different tokens over the mean square."""
    if isinstance(layout, Exchangeable):
        return gram[1] / gram[0]
    pairs = layout.tokens * max(layout.tokens - 1, 1)
    return (jnp.sum(gram) - jnp.trace(gram)) / pairs / layout.own(gram)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _forward(part: TokenPart, start: Gram, numbers: Multipliers, kernels: Any, tables: Any, keep: bool) -> tuple:
    """The Gram behind some blocks, and those before each sub-layer, (blocks, len(block), …), where they are kept."""

    def block(X: Gram, inputs: tuple) -> tuple[Gram, Any]:
        columns, each = inputs
        grams = []
        for k in range(len(part.branches)):
            grams.append(X)
            X, _ = sublayer(part, k, [c[k] for c in columns], _looked_up(part.branches[k], each[k], tables[k]), X)
        return X, jnp.stack(grams) if keep else None

    return jax.lax.scan(block, start, (tuple(numbers), kernels))


def _looked_up(branch: Branch, kernel: Any, table: Any) -> Any:
    """What `through` wants of a branch: attention's table, which all blocks share, or a block's kernel; a sum's parts' each."""
    branch = _undropped(branch)
    if isinstance(branch, Parallel):
        return tuple(map(_looked_up, branch.branches, kernel, table))
    return table if isinstance(branch, Attention) else kernel


@functools.partial(jax.jit, static_argnums=0)
def _back(part: TokenPart, carry: Sequence[Any], grams: Any, numbers: Multipliers, kernels: Any, tables: Any) -> tuple:
    def block(carry: Any, inputs: tuple) -> tuple[tuple, Rows]:
        X, columns, each = inputs
        rows: list[Rows] = []
        for k in reversed(range(len(part.branches))):
            _, back = sublayer(part, k, [c[k] for c in columns], _looked_up(part.branches[k], each[k], tables[k]), X[k])
            *carry, figures = back(*carry)
            rows.insert(0, figures)
        return tuple(carry), jax.tree.map(lambda *leaves: jnp.stack(jnp.broadcast_arrays(*leaves)), *rows)

    return jax.lax.scan(block, carry, (grams, tuple(numbers), kernels), reverse=True)


@functools.partial(jax.jit, static_argnums=0)
def _kernels(branch: Branch, rows: jax.Array) -> jax.Array:
    return jax.lax.map(lambda row: branch.pairs(*row), rows)


def _lookup(part: TokenPart, branch: Branch, columns: np.ndarray, cosine: float) -> tuple[Any, Any]:
    """A branch's kernel at every block, (blocks, …), where its power is known, and attention's table; ``None`` else.

    ``columns`` are the scheme's scale, inner and outer at every block.
    """
    branch = _undropped(branch)
    if isinstance(branch, Parallel):
        return tuple(zip(*(_lookup(part, each, columns, cosine) for each in branch.branches), strict=True))  # type: ignore[return-value]
    fixed, n = known(part.scheme, part.norm), part.layout.tokens
    if isinstance(branch, Attention):
        power = 1.0 if branch.scores_normed else np.max(columns[:, 0], initial=0.0) ** 2
        spread = 1.0 if cosine >= 0 else n / (n - 1)  # 1 − cosine, at most
        bounded = (fixed or branch.scores_normed) and (branch.score_gain(power) * power) ** 2 * spread <= softmax.TURN
        return None, softmax.table(tuple(range(1, n + 1)) if branch.causal else (n,), bool(bounded))
    if not fixed:
        return None, None
    rows, where = distinct(columns[:, 0] ** 2, columns[:, 1], columns[:, 2])
    return _kernels(branch, jnp.asarray(rows))[where], None


def _lookups(part: TokenPart, numbers: Multipliers, cosine: float) -> tuple[tuple, tuple]:
    """`_lookup` of the block's branches: kernels, and tables."""
    columns = np.stack([np.asarray(c) for c in numbers[2:]], -1)
    each = [_lookup(part, branch, columns[:, k], cosine) for k, branch in enumerate(part.branches)]
    return tuple(kernel for kernel, _ in each), tuple(table for _, table in each)


def follow(
    scheme: Scheme,
    numbers: Multipliers,
    branches: tuple[Branch, ...],
    depth: int,
    norm: str,
    final: bool,
    tokens: int,
    cosine: float,
    cotangent_cosine: float,
) -> dict[str, np.ndarray]:
    """Figures of every sub-layer by the scheme's ``numbers``, (S,), or (S + 1,) with a final norm, as NumPy arrays.

    Powers as from `gradflow.laws.leading.leading`, means over tokens; with the tokens' and their gradients' mean cosines.
    """
    for branch in map(_undropped, _parts(branches)):
        if hasattr(branch, "of_law"):
            branch.of_law()  # type: ignore[attr-defined]
    if not all(isinstance(_undropped(b), Attention) or hasattr(b, "pairs") for b in _parts(branches)):
        raise ValueError("block: a branch of yours needs `pairs` for a law of several tokens")
    if norm not in (*LENGTHS, "none"):
        raise ValueError(f"norm: the law of several tokens knows {', '.join(LENGTHS)} and none, not {norm!r}")
    layout, width = layout_of(branches, tokens), len(branches)
    numbers = Multipliers(*(jnp.asarray(a).reshape(depth, width) for a in numbers))
    step = max(1, KEPT // (width * layout.start(0.0).size))
    X, pieces = layout.start(cosine), []
    for blocks, row in scheme.parts(depth):
        part = TokenPart(row.shape, branches, norm, layout)
        if isinstance(layout, Positions) and not known(row, norm):
            raise ValueError(
                f"scheme: the law by position needs a norm before every branch, which {scheme.name!r} lacks"
            )
        mine = jax.tree.map(lambda leaf, blocks=blocks: leaf[blocks], numbers)
        found, tables = _lookups(part, mine, cosine)
        for first in range(0, blocks.stop - blocks.start, step):
            inputs = jax.tree.map(lambda leaf, first=first: leaf[first : first + step], (mine, found))
            pieces.append((part, X, *inputs, tables))
            X, grams = _forward(part, X, *inputs, tables, step >= depth)
            pieces[-1] += (grams,)
    carry = (layout.start(cotangent_cosine), layout.powers(layout.start(0.0)))
    last = None
    if final:
        part = TokenPart(replace(scheme.shape, norm_out=True), branches, norm, layout)
        carry, last = _final(part, X, *carry)
    rows = []
    for part, start, *inputs, tables, grams in reversed(pieces):
        if grams is None:
            _, grams = _forward(part, start, *inputs, tables, True)
        carry, figures = _back(part, carry, grams, *inputs, tables)
        rows.insert(0, {name: np.asarray(leaf).reshape(-1) for name, leaf in figures.items()})
    out = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    out = out if last is None else {name: np.append(values, float(last[name])) for name, values in out.items()}
    return out | {"input_gradient_cosine": np.asarray(_cosine(layout, carry[0]))}


def _final(part: TokenPart, X: Gram, gradient: Gram, trunk: jax.Array) -> tuple[tuple, Rows]:
    """The norm behind the last sub-layer: a row of its own, without a branch."""
    layout = part.layout
    _, factors = normed(part, True, X)
    on_x, trunk_x = layout.scaled(gradient, factors), trunk * factors**2
    figures = {name: jnp.zeros(()) for name in ("added", "weights")}
    figures |= dict.fromkeys(("alpha", "back", "stream_cosine"), jnp.ones(())) | {"Q": layout.own(X)}
    figures |= {
        "norm": layout.own(on_x) / layout.own(gradient),
        "trunk_norm": jnp.mean(trunk_x) / jnp.mean(trunk),
        "token_cosine": _cosine(layout, X),
        "gradient_cosine": _cosine(layout, gradient),
    }
    return (on_x / layout.own(on_x), trunk_x / jnp.mean(trunk_x)), figures
