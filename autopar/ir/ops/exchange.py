"""Rows of tokens that go to the devices that have their experts, and back: how many these are, only the data say.

Each of ``parts`` devices along a mesh axis has a block of the experts, and rows in the order of all of them, so that
what goes to one device is a block of rows. What comes is in blocks of senders, each in the order of the receiver's own
experts: `arrivals` says how to bring the rows of an expert together. Sizes that a graph was planned with are as if
every device got as many rows; operators take them as an argument for that alone.
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
_library.define("exchange_rows(Tensor rows, Tensor sent, Tensor received, int parts, int size, str group) -> Tensor")


def _count_experts(experts: Tensor, count: int) -> Tensor:
    ends = group_ends(experts, count).to(torch.int64)
    return torch.diff(ends, prepend=ends.new_zeros(1))


def _owned_counts(received: Tensor, parts: int) -> Tensor:
    return received.view(parts, -1).sum(0)


def _arrivals(received: Tensor, parts: int, rows: int) -> Tensor:
    own = torch.arange(received.numel() // parts, device=received.device).repeat(parts)
    return torch.repeat_interleave(own, received).argsort(stable=True)


def block_sizes(rows: Tensor, sent: Tensor, received: Tensor, parts: int) -> tuple[list[int], list[int]]:
    """How many rows go to each of so many devices, and how many come from each.

    Raises:
        RuntimeError: some rows are of no expert.
    """
    # The only wait for the device: sizes of messages are numbers of the host.
    there, here = (counts.tolist() for counts in torch.stack([c.view(parts, -1).sum(1) for c in (sent, received)]))
    if sum(there) != len(rows):
        raise RuntimeError(
            f"{len(rows) - sum(there)} of {len(rows)} pairs of a token and an expert are of no expert of the layer; "
            "devices that exchange tokens by experts have no place for them: pin the experts' weights to ('R', ...)"
        )
    return there, here


def _exchange_rows(rows: Tensor, sent: Tensor, received: Tensor, parts: int, size: int, group: str) -> Tensor:
    there, here = block_sizes(rows, sent, received, parts)
    exchanged: Tensor = c10d.all_to_all_single(rows.contiguous(), here, there, group)
    return exchanged


for _name, _function in (
    ("count_experts", _count_experts), ("owned_counts", _owned_counts), ("arrivals", _arrivals),
    ("exchange_rows", _exchange_rows),
):  # fmt: skip
    _library.impl(_name, _function, "CompositeExplicitAutograd")
_library.impl("arrivals", lambda received, parts, rows: received.new_empty(rows), "Meta")
_library.impl(
    "exchange_rows",
    lambda rows, sent, received, parts, size, group: rows.new_empty((size, *rows.shape[1:])),
    "Meta",
)

count_experts = torch.ops.autopar.count_experts.default
"""How many of the sorted experts ``[pairs]`` each of ``count`` is, int64 ``[count]``."""

owned_counts = torch.ops.autopar.owned_counts.default
"""Of counts ``[parts * own]`` as they came from each device, those of a device's own experts, ``[own]``."""

arrivals = torch.ops.autopar.arrivals.default
"""Where among the rows that came each is that belongs at a place in the order of experts, ``[rows]``."""

exchange_rows = torch.ops.autopar.exchange_rows.default
"""Rows from all devices along an axis, given how many of each expert go there and come, ``[experts]`` each.

``size`` is about how many. Its result must be waited for, as that of the collective which it is.
"""

GROUP_ARGUMENT[exchange_rows] = 5
