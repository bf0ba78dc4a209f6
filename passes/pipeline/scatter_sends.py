"""scatter_sends: what all devices of a stage have, each sends a part of; the next stage puts the parts together.

Before (``h`` is replicated on axis ``gpu``, of four devices, and stages are on axis ``node``)::

    h = aten.add(x, y)                                                # stage 0, which sends 4 times the same
    y = aten.mm(h, w)                                                 # stage 1

After::

    h = aten.add(x, y); part = slice(h, axis_index("gpu"))            # stage 0, which sends a quarter on each device
    g = _c10d_functional.all_gather_into_tensor(part, 4, "gpu")       # stage 1
    whole = _c10d_functional.wait_tensor(g); y = aten.mm(whole, w)

This is done for forward values and for gradients, where it takes fewer seconds than sending the whole: where the link
between stages is slow, and the one between the devices of a stage is fast. A stage in between passes the part on. A sum
that is still to be made is sent as it is.

Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021
(arXiv 2104.04473), section 4.1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from autopar.costs.cluster import Link
from autopar.ir.graph import producer
from autopar.ir.layout import Layout, TensorType
from autopar.ir.node_info import info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.forward_order import forward_nodes
from autopar.pipeline.stage_graphs import free_nodes
from autopar.rules.shapes.local_shapes import propagate
from autopar.sharding.assignment import machine_of
from autopar.sharding.emit import MoveEmitter
from autopar.sharding.redistribute import Redistributions, Tables


class _Sent(NamedTuple):
    """A value that goes to devices of other stages.

    Attributes:
        value: its node.
        users: those on other devices, by stage, in the order of the graph.
        hops: how often it is sent.
    """

    value: fx.Node
    users: Mapping[int, Sequence[fx.Node]]
    hops: int


def scatter_sends(program: Program, plan: Plan) -> Program:
    """Send parts, as the plan says."""
    if plan.scatter is None:
        return program
    tables, link = Tables(machine_of(plan)), plan.cluster.axis_links[plan.scatter.axis]
    forward = forward_nodes(program)
    changed = False
    for sent in _all_sent(program, plan.scatter.behind):
        known = _type_and_layout(sent.value)
        if known is None:
            continue
        type_, layout = known
        table = tables.of(type_)
        part = _fastest(table, layout, sent, link)
        if part != layout:
            _send_part(program.graph.graph, sent, type_, layout, part, table, forward)
            changed = True
    if changed:
        propagate(program, plan)
    return program


def _all_sent(program: Program, behind: Sequence[int]) -> list[_Sent]:
    """What goes to other devices for every microbatch."""
    free, once = free_nodes(program), program.per_step
    found = []
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or node in free or node in once:
            continue
        here, users = info(node).stage or 0, dict[int, list[fx.Node]]()
        for user in node.users:
            stage = info(user).stage or 0
            if user.op == "call_function" and user not in once and _hops(here, stage, behind):
                users.setdefault(stage, []).append(user)
        if users:
            ends = {max(here, *users), min(here, *users)}
            found.append(_Sent(node, users, sum(_hops(here, end, behind) for end in ends)))
    return found


def _hops(a: int, b: int, behind: Sequence[int]) -> int:
    """How often something is sent from device to device on its way between two stages."""
    return sum(min(a, b) <= stage < max(a, b) for stage in behind)


def _type_and_layout(value: fx.Node) -> tuple[TensorType, Layout] | None:
    """Of a value, if it has them: the inside of a move or of a lowered operator has not."""
    source, index = producer(value)
    if not info(source).layouts or not isinstance(value.meta.get("val"), torch.Tensor):
        return None
    type_, layout = info(source).types[index], info(source).layouts[index]
    return None if type_ is None or layout is None else (type_, layout)


def _fastest(table: Redistributions, layout: Layout, sent: _Sent, link: Link) -> Layout:
    """The layout in which a value is sent in the least time, with what brings it there and back."""
    own = table.index[layout]
    size = sent.value.meta["val"].nbytes * table.parts[own] / table.parts
    hop = link.latency + size / link.bandwidth
    seconds = table.seconds[own] + sent.hops * hop + len(sent.users) * table.seconds[:, own]
    best = int(seconds.argmin())
    return table.layouts[best] if seconds[best] < seconds[own] else layout


def _send_part(
    graph: fx.Graph,
    sent: _Sent,
    type_: TensorType,
    layout: Layout,
    part: Layout,
    table: Redistributions,
    forward: Collection[fx.Node],
) -> None:
    """Cut the value where it is made, and put it together where it is taken, once for each stage."""
    value, machine = sent.value, table.machine

    def move(local: fx.Node, begin: Layout, end: Layout, owner: fx.Node, place: fx.Node) -> fx.Node:
        last = place.prev
        with graph.inserting_before(place):
            for step in table.path(begin, end):
                local = MoveEmitter(graph, owner, type_, step, machine).emit(local)
        tag = "is_forward" if owner in forward else "is_backward"
        while (last := last.next) is not place:
            last.meta["partitioner_tag"] = tag  # or a part that only the backward pass takes would be cut there
        return local

    cut = move(value, layout, part, value, value.next)
    order = {n: i for i, n in enumerate(graph.nodes)}
    for users in sent.users.values():
        ordered = sorted(users, key=order.__getitem__)
        owner = next((u for u in ordered if u in forward), ordered[0])
        whole = move(cut, part, layout, owner, ordered[0])
        for user in users:
            user.replace_input_with(value, whole)
