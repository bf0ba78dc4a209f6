"""Rows of tokens that go to the devices that have their experts, and back: how many these are, only the data say.

Each of ``parts`` devices along a mesh axis has a block of the experts, and rows in the order of all of them, so that
what goes to one device is a block of rows. What comes is in blocks of senders, each in the order of the receiver's own
experts: `arrivals` says how to bring the rows of an expert together. Where all devices along an axis have the same
tokens each takes the block of its own experts, and nothing is sent. Sizes that a graph was planned with are as if every
device got as many rows; operators take them as an argument for that alone.

Sizes of messages and of blocks are numbers of the host, which waits for the device to know them: once for all rows
that are sorted together. They are tensors of the host, so that the backward pass has them, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.collectives import GROUP_ARGUMENT, c10d
from autopar.ir.ops.routing import group_ends

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("count_experts(Tensor experts, int count) -> Tensor")
_library.define("owned_counts(Tensor received, int parts) -> Tensor")
_library.define("arrivals(Tensor received, int parts, int rows) -> Tensor")
_library.define("message_sizes(Tensor sent, Tensor received, int parts) -> Tensor")
_library.define("exchange_rows(Tensor rows, Tensor sizes, bool back, int size, str group) -> Tensor")
_library.define("own_block(Tensor counts, int parts, int index) -> Tensor")
_library.define("own_rows(Tensor rows, Tensor block, int size) -> Tensor")
_library.define("place_rows(Tensor rows, Tensor block, int size) -> Tensor")


def _count_experts(experts: Tensor, count: int) -> Tensor:
    ends = group_ends(experts, count).to(torch.int64)
    return torch.diff(ends, prepend=ends.new_zeros(1))


def _owned_counts(received: Tensor, parts: int) -> Tensor:
    return received.view(parts, -1).sum(0)


def _arrivals(received: Tensor, parts: int, rows: int) -> Tensor:
    own = torch.arange(received.numel() // parts, device=received.device).repeat(parts)
    return torch.repeat_interleave(own, received).argsort(stable=True)


def _message_sizes(sent: Tensor, received: Tensor, parts: int) -> Tensor:
    # A wait for the device.
    return torch.stack([c.view(parts, -1).sum(1) for c in (sent, received)]).cpu()


def _own_block(counts: Tensor, parts: int, index: int) -> Tensor:
    rows = counts.view(parts, -1).sum(1)
    return torch.stack([rows[:index].sum(), rows[index], rows.sum()]).cpu()  # likewise


def block_sizes(rows: Tensor, sizes: Tensor, back: bool) -> tuple[list[int], list[int]]:
    """How many rows go to each device, and how many come from each.

    Raises:
        RuntimeError: some rows are of no expert.
    """
    there, here = (sizes.flip(0) if back else sizes).tolist()
    _require_experts(rows, sum(there))
    return there, here


def _require_experts(rows: Tensor, counted: int) -> None:
    if counted != len(rows):
        raise RuntimeError(
            f"{len(rows) - counted} of {len(rows)} pairs of a token and an expert are of no expert of the layer; "
            "devices that exchange tokens by experts have no place for them: pin the experts' weights to ('R', ...)"
        )


def _exchange_rows(rows: Tensor, sizes: Tensor, back: bool, size: int, group: str) -> Tensor:
    there, here = block_sizes(rows, sizes, back)
    exchanged: Tensor = c10d.all_to_all_single(rows.contiguous(), here, there, group)
    return exchanged


def _own_rows(rows: Tensor, block: Tensor, size: int) -> Tensor:
    start, count, whole = block.tolist()
    _require_experts(rows, whole)
    # A copy: a view would keep the rows of all experts for as long as these.
    return rows.narrow(0, start, count).clone(memory_format=torch.contiguous_format)


def _place_rows(rows: Tensor, block: Tensor, size: int) -> Tensor:
    start, count, whole = block.tolist()
    placed = rows.new_zeros((whole, *rows.shape[1:]))
    placed.narrow(0, start, count).copy_(rows)
    return placed


for _name, _function in (
    ("count_experts", _count_experts), ("owned_counts", _owned_counts), ("arrivals", _arrivals),
    ("message_sizes", _message_sizes), ("exchange_rows", _exchange_rows), ("own_block", _own_block),
    ("own_rows", _own_rows), ("place_rows", _place_rows),
):  # fmt: skip
    _library.impl(_name, _function, "CompositeExplicitAutograd")
_library.impl("arrivals", lambda received, parts, rows: received.new_empty(rows), "Meta")
_library.impl("message_sizes", lambda sent, received, parts: sent.new_empty((2, parts)), "Meta")
_library.impl("own_block", lambda counts, parts, index: counts.new_empty(3), "Meta")
_library.impl("exchange_rows", lambda rows, sizes, back, size, group: rows.new_empty((size, *rows.shape[1:])), "Meta")
for _name in ("own_rows", "place_rows"):
    _library.impl(_name, lambda rows, block, size: rows.new_empty((size, *rows.shape[1:])), "Meta")

count_experts = torch.ops.autopar.count_experts.default
"""How many of the sorted experts ``[pairs]`` each of ``count`` is, int64 ``[count]``."""

owned_counts = torch.ops.autopar.owned_counts.default
"""Of counts ``[parts * own]`` as they came from each device, those of a device's own experts, ``[own]``."""

arrivals = torch.ops.autopar.arrivals.default
"""Where among the rows that came each is that belongs at a place in the order of experts, ``[rows]``."""

message_sizes = torch.ops.autopar.message_sizes.default
"""How many rows go to each of so many devices, and how many come from each, ``[2, parts]``: a tensor of the host.

``sent`` and ``received`` are how many of each expert, ``[experts]``.
"""

exchange_rows = torch.ops.autopar.exchange_rows.default
"""Rows from all devices along an axis, given the sizes of messages there, or of those ``back``.

``size`` is about how many. Its result must be waited for, as that of the collective which it is.
"""

own_block = torch.ops.autopar.own_block.default
"""Where the rows of a device's experts begin, how many these are, and all rows: ``[3]``, a tensor of the host."""

own_rows = torch.ops.autopar.own_rows.default
"""The rows of a device's own experts, of rows in the order of all experts; ``size`` is about how many."""

place_rows = torch.ops.autopar.place_rows.default
"""Rows of a device's own experts among zeros for those of all others: what `own_rows` is the transpose of."""

HOST_WAITS = frozenset({message_sizes, own_block})
"""Operators for whose result the host waits."""

GROUP_ARGUMENT[exchange_rows] = 4
