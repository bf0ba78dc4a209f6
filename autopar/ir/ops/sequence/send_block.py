"""A block that every device along a mesh axis sends to one other, and gets from one: its neighbor, or its mirror.

Sent as an all-to-all whose messages are empty but for one: libraries make no message of an empty one, so that this
takes the time of a message between neighbors, whatever the number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.collectives import GROUP_ARGUMENT, c10d

NEXT, PREVIOUS, MIRROR = "next", "previous", "mirror"
"""Whom a device sends its block to: the next one (the last: the first one), the one before, the one opposite."""

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("send_block(Tensor block, int index, int parts, str to, str group) -> Tensor")


def target_of(index: int, parts: int, to: str) -> int:
    """The device that one of ``parts`` sends its block to."""
    return {NEXT: (index + 1) % parts, PREVIOUS: (index - 1) % parts, MIRROR: parts - 1 - index}[to]


def source_of(index: int, parts: int, to: str) -> int:
    """The device whose block comes."""
    return target_of(index, parts, {NEXT: PREVIOUS, PREVIOUS: NEXT, MIRROR: MIRROR}[to])


def sent(blocks: Sequence[Tensor], to: str) -> list[Tensor]:
    """What each device has after `send_block`, from what each had before."""
    return [blocks[source_of(i, len(blocks), to)] for i in range(len(blocks))]


def _send_block(block: Tensor, index: int, parts: int, to: str, group: str) -> Tensor:
    # Flat: a block may have any dims, and messages are counted in rows of the first.
    flat = block.contiguous().view(-1)
    there, here = ([flat.numel() * (i == other(index, parts, to)) for i in range(parts)]
                   for other in (target_of, source_of))  # fmt: skip
    found: Tensor = c10d.all_to_all_single(flat, here, there, group)
    return found.view(block.shape)


_library.impl("send_block", _send_block, "CompositeExplicitAutograd")
_library.impl("send_block", lambda block, *_: torch.empty_like(block, memory_format=torch.contiguous_format), "Meta")

send_block = torch.ops.autopar.send_block.default
"""Of ``parts`` devices each sends a block to one other, given its ``index``; what comes must be waited for."""

GROUP_ARGUMENT[send_block] = 4
