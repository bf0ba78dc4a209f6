"""Parts of a model that are exchanged in turn: neighboring blocks, about equally large."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BLOCK = re.compile(r"^(.*?\.\d+|\d+)\.")


def block_of(name: str) -> str:
    """The block that a parameter belongs to: up to the first number of its name, else its module.

    >>> block_of("model.layers.3.mlp.up.weight"), block_of("embed.weight")
    ('model.layers.3', 'embed')
    """
    found = _BLOCK.match(name)
    return found[1] if found else name.rpartition(".")[0]


def blocks_of(sizes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of parameters by block, in the model's order."""
    found: dict[str, list[str]] = {}
    for name in sizes:
        found.setdefault(block_of(name), []).append(name)
    return found


def require_blocks(names: Mapping[str, Any], fragments: int | str) -> None:
    """Refuse more fragments than blocks, before anything is trained.

    Args:
        names: of the parameters.
        fragments: how many, or ``"auto"``, which takes no more.

    Raises:
        ValueError: there are fewer blocks.
    """
    count = len(blocks_of(names))
    if not isinstance(fragments, str) and fragments > count:
        raise ValueError(
            f"fragments={fragments}: the model has {count} blocks to be exchanged in turn; take as many at most"
        )


def split_in_fragments(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Names of the parameters of each fragment.

    Args:
        sizes: elements of each parameter, of the whole model on every rank, so that all cut alike.
        count: of the fragments.

    Raises:
        ValueError: there are fewer blocks.

    >>> split_in_fragments({"a.weight": 1, "b.0.weight": 1, "b.1.weight": 1, "c.weight": 1}, 2)
    [['a.weight', 'b.0.weight'], ['b.1.weight', 'c.weight']]
    """
    require_blocks(sizes, count)
    blocks = list(blocks_of(sizes).values())
    total, done = sum(sizes.values()), 0
    found: list[list[str]] = [[]]
    for i, names in enumerate(blocks):
        size = sum(sizes[name] for name in names)
        left = count - len(found)
        # The middle of a block decides; every fragment has a block, and none is left over.
        due = done + size / 2 >= total * len(found) / count
        if found[-1] and left and (due or len(blocks) - i == left):
            found.append([])
        found[-1] += names
        done += size
    return found
