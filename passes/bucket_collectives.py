"""bucket_collectives: gradients are reduced many at a time, as DDP does.

Before::

    r1 = all_reduce(g1, "sum", "data"); w1 = wait(r1); ...; r2 = all_reduce(g2, "sum", "data"); w2 = wait(r2)

After::

    flat = cat([reshape(g1, [-1]), reshape(g2, [-1])]); r = all_reduce(flat, "sum", "data"); w = wait(r)
    w1 = reshape(narrow(w, 0, 0, n1), shape1); w2 = reshape(narrow(w, 0, n1, n2), shape2)

A bucket starts when its last gradient is known and is waited for at the end of the graph, so that it runs beside the
rest of the backward pass. Only reductions whose result is nothing but a gradient, reshaped perhaps, are joined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import inherit_origin
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.collectives import Collective, c10d
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.local_shapes import propagate
from autopar.sharding.assignment import machine_of
from autopar.sharding.redistribute import Machine

aten = torch.ops.aten

LARGEST, SMALLEST = 25 * 2**20, 2**20
"""Bounds on a bucket's bytes; the larger is DDP's default (Li et al., "PyTorch Distributed", VLDB 2020)."""

LATENCY_SHARE = 0.1
"""A bucket is large enough for its latency to be at most this share of its transfer."""


def bucket_collectives(program: Program, plan: Plan) -> Program:
    """Join gradient all-reduces of one axis, dtype and stage into buckets, level by level where axes follow."""
    graph = program.graph.graph
    machine = machine_of(plan)
    ends = {v for o, v in zip(program.outputs, program.output_values, strict=True) if o.kind == "gradient"}
    pending = [n for n in graph.nodes if _is_gradient_reduction(n, ends)]
    joined = False
    # Level by level: a gradient that is reduced over two axes is in a bucket of the first, then in one of the second.
    while pending:
        ready = [n for n in pending if not _depends(n, pending)]
        position = {n: i for i, n in enumerate(graph.nodes)}
        groups: dict[tuple[str, torch.dtype, int], list[fx.Node]] = {}
        # The order of availability: a bucket starts when its last member is known.
        for node in sorted(ready, key=lambda n: position[n.all_input_nodes[0]]):  # as they become available
            key = (str(node.args[2]), node.meta["val"].dtype, info(node).stage or 0)
            groups.setdefault(key, []).append(node)
        for (axis, *_), members in groups.items():
            for bucket in _buckets(members, bucket_bytes(machine, axis)):
                _join(graph, bucket)
                joined = True
        pending = [n for n in pending if n not in ready]
    if joined:
        propagate(program, plan)
    return program


def bucket_bytes(machine: Machine, axis: str) -> float:
    """Bytes at which a ring's latency, ``2 (n - 1) alpha``, is a small share of its ``2 (n - 1) / n bytes / beta``."""
    i = machine.names.index(axis)
    link = machine.links[i]
    return min(LARGEST, max(SMALLEST, machine.sizes[i] * link.latency * link.bandwidth / LATENCY_SHARE))


def _is_gradient_reduction(node: fx.Node, ends: set[fx.Node | None]) -> bool:
    """Whether the reduced value goes into a gradient only, through reshapes and reductions on other axes.

    One that is cut down afterwards does not wait: until it is, the device would hold the whole of it.
    """
    if info(node).collective is None:
        return False
    if node.target is not c10d.all_reduce.default or node.args[1] != "sum":
        return False
    # Its wait, the only user of a collective.
    value = next(iter(node.users))
    while len(value.users) == 1 and value not in ends:
        value = next(iter(value.users))
        if value.target not in (aten.reshape.default, c10d.all_reduce.default, c10d.wait_tensor.default):
            return False
    return value in ends and len(value.users) == 1


def _depends(node: fx.Node, others: list[fx.Node]) -> bool:
    """Whether a reduction over another axis comes first: its result is this one's argument."""
    source: Any = node.args[0]
    while isinstance(source, fx.Node) and source.target is aten.reshape.default:
        source = source.args[0]
    return isinstance(source, fx.Node) and source.target is c10d.wait_tensor.default and source.args[0] in others


def _buckets(members: list[fx.Node], limit: float) -> list[list[fx.Node]]:
    # Filled in order, not packed: a bucket of gradients from far apart would start late.
    buckets: list[list[fx.Node]] = [[]]
    size = 0
    for node in members:
        value = node.meta["val"]
        if buckets[-1] and size + value.nbytes > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(node)
        size += value.nbytes
    return buckets


def _join(graph: fx.Graph, members: list[fx.Node]) -> None:
    """Start one reduction when the last member is known; wait for it at the end, where only outputs follow."""
    output = graph.output_node()
    waits = [next(iter(m.users)) for m in members]
    joined = [c for m in members if (c := info(m).collective) is not None]
    # The latest member: all others are known where it is.
    with graph.inserting_before(members[-1].all_input_nodes[0].next):
        flat = members[0].args[0]
        if len(members) > 1:
            pieces = [_call(graph, members[0], aten.reshape.default, m.args[0], [-1]) for m in members]
            flat = _call(graph, members[0], aten.cat.default, pieces)
        reduced = _call(graph, members[0], c10d.all_reduce.default, flat, *members[0].args[1:])
        collective = Collective(
            "all_reduce", joined[0].axis, sum(c.bytes for c in joined), sum(c.members for c in joined), True
        )
        set_info(reduced, replace(info(reduced), collective=collective))
    with graph.inserting_before(output):
        whole = _call(graph, members[0], c10d.wait_tensor.default, reduced)
        start = 0
        for member, wait in zip(members, waits, strict=True):
            value = member.meta["val"]
            result = whole
            if len(members) > 1:
                part = _call(graph, member, aten.narrow.default, whole, 0, start, value.numel())
                result = _call(graph, member, aten.reshape.default, part, list(value.shape))
            start += value.numel()
            known = replace(info(result), types=info(wait).types, layouts=info(wait).layouts, internal=False)
            set_info(result, replace(known, consumer_layouts=info(wait).consumer_layouts))
            wait.replace_all_uses_with(result)
    for member, wait in zip(members, waits, strict=True):
        graph.erase_node(wait)
        graph.erase_node(member)
    _move_users_behind(graph, output)


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    inherit_origin(node, like)
    return node


def _move_users_behind(graph: fx.Graph, output: fx.Node) -> None:
    """Reductions over further axes, and what reshapes around them, follow the bucket that they use."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        # A user of the bucket's result must follow it; what it feeds follows in turn, as the loop goes on.
        if node is not output and any(position[a] > position[node] for a in node.all_input_nodes):
            output.prepend(node)
            position[node] = len(position) + position[node]
