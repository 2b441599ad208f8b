"""The axes of a sweep that are objects: rows and blocks by name, and what each name stands for."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradflow.branches import Branch, branches_of
from gradflow.comparing.ensembles import FINAL
from gradflow.schemes import Scheme
from gradflow.streams import StreamScheme, any_scheme


def schemes_of(schemes: Any) -> dict[str, str | Scheme | StreamScheme]:
    """Rows by name.

    Raises
    ------
    ValueError
        For none, an unknown one, or two of one name that are not the same.
    """
    given = [schemes] if isinstance(schemes, str | Scheme | StreamScheme) else list(schemes)
    if not given:
        raise ValueError("schemes: needs at least one")
    for spec in given:  # a misspelt name is refused here, with near ones
        any_scheme(spec.removesuffix(FINAL) if isinstance(spec, str) else spec)
    return _by_name("schemes", [(spec if isinstance(spec, str) else spec.name, spec) for spec in given])


def blocks_of(blocks: Any) -> dict[str, tuple[Branch, ...]]:
    """Blocks by name; each is a name as ``"attention,mlp:gelu"``, a branch, or a sequence of both.

    Raises
    ------
    ValueError
        As `schemes_of`.
    """
    given = list(blocks) if isinstance(blocks, Sequence) and not isinstance(blocks, str) else [blocks]
    if not given:
        raise ValueError("blocks: needs at least one")
    found = [branches_of(block.split(",") if isinstance(block, str) else block) for block in given]
    return _by_name("blocks", [(",".join(branch.name for branch in block), block) for block in found])


def _by_name(argument: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise ValueError(f"{argument}: two of them have the name {name!r}; give each its own")
    return found


def definition(spec: Any) -> str:
    """What a name stands for, without prose or the addresses of objects."""
    row = any_scheme(spec.removesuffix(FINAL)) if isinstance(spec, str) else spec
    return re.sub(r" at 0x[0-9a-f]+", "", repr(_bare(row)))


def _bare(row: Any) -> Any:
    if not isinstance(row, Scheme | StreamScheme):
        return row
    then = {"then": _bare(row.then)} if isinstance(row, Scheme) and row.then is not None else {}
    return replace(row, source="", purpose="", **then)
