"""What a rewritten graph communicates with: torch's functional collectives, named by mesh axis, and the axis's index.

A rewritten graph is the same on every rank. Where it would name a process group it names a mesh axis, and where it
needs the rank it has an `axis_index` node; `autopar.runtime.step.bind` puts in the rank's own, the emulator runs all
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

c10d = torch.ops._c10d_functional


def axis_index(axis: str) -> int:
    """This device's coordinate along a mesh axis; 0 where there is no mesh, as in shape propagation."""
    # A stand-in: `autopar.runtime.step.bind` replaces the node by a number.
    del axis
    return 0


@dataclass(frozen=True)
class Collective:
    """What a communication node is, for the census.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
        axis: name of the mesh axis.
        bytes: size by which it is charged, see `autopar.costs.collectives`.
        members: how many redistributions it carries (more than one in a bucket).
        gradient: whether its only purpose is to bring a gradient into its parameter's layout.
        joined: `autopar.passes.collectives.join_maxima` puts one in the place of all such, so that it costs nothing.
    """

    kind: str
    axis: str
    bytes: float
    members: int = 1
    gradient: bool = False
    joined: bool = False


# Functional collectives name their group last, but each has other arguments before it.
GROUP_ARGUMENT = {
    c10d.all_reduce.default: 2,
    c10d.all_gather_into_tensor.default: 2,
    c10d.all_gather_into_tensor_coalesced.default: 2,
    c10d.all_reduce_coalesced.default: 2,
    c10d.all_reduce_.default: 2,
    c10d.all_reduce_coalesced_.default: 2,
    c10d.reduce_scatter_tensor.default: 3,
    c10d.reduce_scatter_tensor_coalesced.default: 3,
    c10d.all_to_all_single.default: 3,
}
"""Position of the group's name (here: the axis's) among the arguments of each collective."""


COALESCED: dict[Any, Any] = {
    c10d.all_reduce.default: c10d.all_reduce_coalesced.default,
    c10d.all_gather_into_tensor.default: c10d.all_gather_into_tensor_coalesced.default,
    c10d.reduce_scatter_tensor.default: c10d.reduce_scatter_tensor_coalesced.default,
}
"""Of collectives, those that take a list of tensors, and make one."""


IN_PLACE: dict[Any, Any] = {
    c10d.all_reduce.default: c10d.all_reduce_.default,
    c10d.all_reduce_coalesced.default: c10d.all_reduce_coalesced_.default,
}
"""Of collectives that copy their argument first, those that write into it."""

ALL_REDUCES = frozenset({*IN_PLACE, *IN_PLACE.values()})
"""All-reduces of either kind."""


def waits_for(node: fx.Node) -> list[fx.Node]:
    """The waits for a collective, one for each tensor that it makes."""
    found: list[fx.Node] = []
    for user in node.users:
        # A getitem, of a coalesced collective.
        found += [user] if user.target is c10d.wait_tensor.default else waits_for(user)
    return found
