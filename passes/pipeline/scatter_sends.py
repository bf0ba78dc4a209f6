"""scatter_sends: of a value that is replicated in a stage, each device sends a shard; the next stage gathers them.

Before (``h`` is replicated on axis ``gpu``, of four devices, and stages are on axis ``node``)::

    h = aten.add(x, y)                                                # stage 0, which sends 4 times the same
    y = aten.mm(h, w)                                                 # stage 1

After::

    h = aten.add(x, y); part = slice(h, axis_index("gpu"))            # stage 0, which sends a quarter on each device
    g = _c10d_functional.all_gather_into_tensor(part, 4, "gpu")       # stage 1
    whole = _c10d_functional.wait_tensor(g); y = aten.mm(whole, w)

This is done for forward values and for gradients, where it takes fewer seconds than sending the whole: where the link
between stages is slow, and the one between the devices of a stage is fast. A stage in between passes the shard on. A
partial sum is sent as it is.

Source: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021
(arXiv 2104.04473), section 4.1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
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

Users = Mapping[int, Sequence[fx.Node]]
"""Users of a value on other devices, by stage, in the order of the graph."""


def scatter_sends(program: Program, plan: Plan) -> Program:
    """Send shards, as the plan says."""
    if plan.scatter is None:
        return program
    tables, link = Tables(machine_of(plan)), plan.cluster.axis_links[plan.scatter.axis]
    forward = forward_nodes(program)
    changed = False
    for value, users, hops in _sent_values(program, plan.scatter.behind):
        known = _type_and_layout(value)
        if known is None:
            continue
        type_, layout = known
        table = tables.of(type_)
        shard = _fastest(table, layout, value.meta["val"].nbytes, hops, len(users), link)
        if shard != layout:
            _send_shard(program.graph.graph, value, users, type_, layout, shard, table, forward)
            changed = True
    if changed:
        propagate(program, plan)
    return program


def _sent_values(program: Program, last_stages: Sequence[int]) -> list[tuple[fx.Node, Users, int]]:
    """What goes to other devices for every microbatch: the value, its users there, and how often it is sent.

    Args:
        program: with stages.
        last_stages: the stages whose next stage is on other devices.
    """
    free, once = free_nodes(program), program.per_step
    found: list[tuple[fx.Node, Users, int]] = []
    for node in program.graph.graph.nodes:
        # Parameters and what each stage computes by itself are not sent; sums over microbatches are sent once a step.
        if node.op != "call_function" or node in free or node in once:
            continue
        here, users = info(node).stage or 0, dict[int, list[fx.Node]]()
        for user in node.users:
            stage = info(user).stage or 0
            if user.op == "call_function" and user not in once and _hops(here, stage, last_stages):
                users.setdefault(stage, []).append(user)
        if users:
            ends = {max(here, *users), min(here, *users)}
            found.append((node, users, sum(_hops(here, end, last_stages) for end in ends)))
    return found


def _hops(a: int, b: int, last_stages: Sequence[int]) -> int:
    """How often something is sent from device to device on its way between two stages."""
    return sum(min(a, b) <= stage < max(a, b) for stage in last_stages)


def _type_and_layout(value: fx.Node) -> tuple[TensorType, Layout] | None:
    """Of a value, if it has them: the inside of a move or of a lowered operator has not."""
    source, index = producer(value)
    if not info(source).layouts or not isinstance(value.meta.get("val"), torch.Tensor):
        return None
    type_, layout = info(source).types[index], info(source).layouts[index]
    return None if type_ is None or layout is None else (type_, layout)


def _fastest(table: Redistributions, layout: Layout, local: int, hops: int, stages: int, link: Link) -> Layout:
    """The layout in which a value is sent in the least time, with its redistributions before and after.

    Args:
        table: of the value's type.
        layout: in which it is made.
        local: bytes of it on a device in that layout.
        hops: how often it is sent.
        stages: that get it, each of which brings it back into its layout.
        link: between stages.
    """
    own = table.index[layout]
    size = local * table.parts[own] / table.parts
    hop = link.latency + size / link.bandwidth
    every, one = np.arange(len(table.layouts)), np.array([own])
    seconds = table.seconds(one, every)[0] + hops * hop + stages * table.seconds(every, one)[:, 0]
    best = int(seconds.argmin())
    # Strictly: where both take as long, the graph stays as it is.
    return table.layouts[best] if seconds[best] < seconds[own] else layout


def _send_shard(
    graph: fx.Graph,
    value: fx.Node,
    users_by_stage: Users,
    type_: TensorType,
    layout: Layout,
    shard: Layout,
    table: Redistributions,
    forward: Collection[fx.Node],
) -> None:
    """Slice the value where it is made, and gather it where it is read, once for each stage."""
    machine = table.machine

    def move(local: fx.Node, begin: Layout, end: Layout, owner: fx.Node, before: fx.Node) -> fx.Node:
        last = before.prev
        with graph.inserting_before(before):
            for step in table.path(begin, end):
                local = MoveEmitter(graph, owner, type_, step, machine).emit(local)
        tag = "is_forward" if owner in forward else "is_backward"
        while (last := last.next) is not before:
            last.meta["partitioner_tag"] = tag  # or a slice that only the backward pass reads would be made there
        return local

    sent = move(value, layout, shard, value, value.next)
    # After the slices are there, which are before all users.
    order = {n: i for i, n in enumerate(graph.nodes)}
    for users in users_by_stage.values():
        ordered = sorted(users, key=order.__getitem__)
        # Gathered for the first user; a forward one if there is any, as the gathered value is then saved from there.
        owner = next((u for u in ordered if u in forward), ordered[0])
        whole = move(sent, shard, layout, owner, ordered[0])
        for user in users:
            user.replace_input_with(value, whole)
