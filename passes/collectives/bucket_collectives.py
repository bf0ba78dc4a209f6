"""bucket_collectives: gradients are reduced many at a time, as DDP does, and a block's parameters gathered together.

Before::

    r1 = all_reduce(g1, "sum", "data"); w1 = wait(r1); ...; r2 = all_reduce(g2, "sum", "data"); w2 = wait(r2)
    a = all_gather(p, 8, "data"); p1 = wait(a); h = mm(x, p1); b = all_gather(q, 8, "data"); q1 = wait(b); ...

After::

    flat = cat([reshape(g1, [-1]), reshape(g2, [-1])]); r = all_reduce(flat, "sum", "data"); w = wait(r)
    w1 = reshape(narrow(w, 0, 0, n1), shape1); w2 = reshape(narrow(w, 0, n1, n2), shape2)
    a, b = all_gather_coalesced([p, q], 8, "data"); p1 = wait(a); h = mm(x, p1); q1 = wait(b); ...

Without `Plan.overlap` only all-reduces of gradients are joined: they are waited for at the end of the graph, so that
they run beside the rest of the backward pass. With it every collective that does nothing but bring a gradient into its
parameter's layout, or a parameter into another one, travels with those of its block; `overlap_collectives` puts them
where they are hidden. They take the library's coalesced form, which copies nothing, but for exchanges, which have none,
and reductions on CPUs: Gloo sends the members of a coalesced one on their own. These are packed, as above. An exchange
that is copied for longer than it takes to send one more message, such as that of a mixture's experts, stays alone.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.costs.device import Link
from autopar.ir.graph import block_of, inherit_origin, is_backward, module_path
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.collectives import COALESCED, Collective, c10d
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_hoisted
from autopar.pipeline.stage_graphs import StageGraphs
from autopar.rules.shapes.local_shapes import propagate
from autopar.sharding.assignment import machine_of
from autopar.sharding.graph_order import gradient_moves, parameter_only, reorder
from autopar.sharding.redistribute.moves import Machine

aten = torch.ops.aten

LARGEST, SMALLEST = 25 * 2**20, 2**20
"""Bounds on a bucket's bytes; the larger is DDP's default (Li et al., "PyTorch Distributed", VLDB 2020)."""

LATENCY_SHARE = 0.1
"""A bucket is large enough for its latency to be at most this share of its transfer."""


def bucket_collectives(program: Program, plan: Plan) -> Program:
    """Join collectives of one kind, axis, dtype and stage into buckets, level by level where axes follow.

    Those of a pipeline are joined within one graph of a stage: two stages that gather together would each need the
    parameters of both, and a gather for both parts of a split backward would be held from one to the other.
    """
    gradients = _gradient_moves(program) if plan.overlap else _gradient_sums(program)
    # The gradient of a loss that is linear in a parameter may be of parameters alone: it is one of `gradients` then.
    own = set(gradients)
    gathers = [n for n in _parameter_moves(program) if n not in own] if plan.overlap else []
    members = [*gathers, *gradients]
    if not members:
        return program
    graph, machine, joined, early_ones = program.graph.graph, machine_of(plan), False, set(gathers)
    levels = _levels(graph, members)
    places = StageGraphs(program, len(plan.stages)).places() if len(plan.stages) > 1 else {}
    once = program.per_step  # of the graph as it is now: nodes are replaced below
    positions = {n: float(i) for i, n in enumerate(graph.nodes) if n.op not in ("placeholder", "output")}
    # Level by level: a gradient that is reduced over two axes is in a bucket of the first, then in one of the second.
    for level in sorted({levels[m] for m in members}):
        here = [m for m in members if levels[m] == level and not _is_sent_alone(m, machine)]
        for bucket in _buckets(program, here, early_ones, once, machine, places, plan.overlap):
            if len(bucket) == 1 and plan.overlap:
                continue
            early, kind = bucket[0] in early_ones, bucket[0].target
            # Gloo sends the members of a coalesced reduction on their own.
            packs = machine.device.kind == "cpu" and kind is not c10d.all_gather_into_tensor.default
            if kind in COALESCED and not packs and plan.overlap:
                _join_coalesced(graph, bucket, positions, early=early)
            else:
                _join_packed(graph, bucket, positions, early=early, late=not plan.overlap)
            joined = True
    if joined:
        reorder(graph, positions)
        propagate(program, plan)
    return program


def bucket_bytes(devices: int, link: Link) -> float:
    """Bytes at which a ring's latency, ``2 (n - 1) alpha``, is a small share of its ``2 (n - 1) / n bytes / beta``."""
    return min(LARGEST, max(SMALLEST, devices * link.latency * link.bandwidth / LATENCY_SHARE))


def _gradient_sums(program: Program) -> list[fx.Node]:
    """All-reduces whose value goes into a gradient only, through reshapes and reductions on other axes.

    One that is cut down afterwards does not wait: until it is, the device would hold the whole of it.
    """
    ends = {v for o, v in zip(program.outputs, program.output_values, strict=True) if o.kind == "gradient"}
    return [n for n in program.graph.graph.nodes if _is_gradient_sum(n, ends)]


def _is_gradient_sum(node: fx.Node, ends: set[fx.Node | None]) -> bool:
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


def _gradient_moves(program: Program) -> list[fx.Node]:
    """Collectives that do nothing but bring gradients into their parameters' layouts; maxima among them stay alone."""
    return [n for n in gradient_moves(program) if n.target is not c10d.all_reduce.default or n.args[1] == "sum"]


def _parameter_moves(program: Program) -> list[fx.Node]:
    """All-gathers and exchanges of what is computed from parameters alone; what runs once a step stays alone."""
    kinds = (c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default)
    return [n for n in parameter_only(program) if n.target in kinds and not is_hoisted(n)]


def _is_sent_alone(node: fx.Node, machine: Machine) -> bool:
    """Whether to pack an exchange, and unpack it, takes kernels longer than a message of its own takes besides."""
    if node.target is not c10d.all_to_all_single.default:
        return False
    axis = machine.names.index(_collective([node]).axis)
    return packs_in_vain(node.meta["val"].nbytes, machine, axis)


def packs_in_vain(size: float, machine: Machine, axis: int) -> bool:
    """Whether an exchange of so many bytes of a device is sent alone.

    Packed, it is read and written before the message and behind it; alone it costs the latency of a message, and a
    launch, for which the kernel behind the message makes up.
    """
    copied = 4 * size / (machine.device.bandwidth * machine.device.streaming)
    return copied > (machine.sizes[axis] - 1) * machine.links[axis].latency


def _levels(graph: fx.Graph, members: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """By node: how many members it is behind, one after the other, itself included."""
    counted, levels = set(members), dict[fx.Node, int]()
    for node in graph.nodes:
        levels[node] = max((levels[a] for a in node.all_input_nodes), default=0) + (node in counted)
    return levels


def _buckets(
    program: Program,
    members: list[fx.Node],
    gathers: set[fx.Node],
    once: frozenset[fx.Node],
    machine: Machine,
    places: Mapping[fx.Node, object],
    by_block: bool,
) -> Iterator[list[fx.Node]]:
    """Members that travel together, in the order of the graph; a bucket of gradients starts with its last member.

    Buckets are filled in order, not packed: a bucket of gradients from far apart would start late. A block's members
    are in one bucket, whatever their size. Blocks whose parameters come from messages of their own go on by themselves:
    the first one's would wait for those of all.
    """
    position = {n: i for i, n in enumerate(program.graph.graph.nodes)}
    groups: dict[tuple[Any, ...], dict[object, list[fx.Node]]] = {}
    # The order of availability, or of the first use.
    for node in sorted(members, key=lambda n: position[n if n in gathers else n.all_input_nodes[0]]):
        block = block_of(module_path(node), program.blocks) if by_block else None
        dtype, place = node.meta["val"].dtype, places.get(node)
        # What is reduced after the last microbatch must not take with it what each microbatch adds to a sum.
        key = (node.target, _collective([node]).axis, dtype, place, is_backward(node), node in gathers, node in once)
        groups.setdefault(key, {}).setdefault(block or node, []).append(node)
    for (_, axis, *_), alike in groups.items():
        i, units = machine.names.index(axis), alike.values()
        limit = bucket_bytes(machine.sizes[i], machine.links[i])
        for _, same in itertools.groupby(units, lambda unit: _sent_before(unit) if unit[0] in gathers else None):
            following = list(same)
            rest = iter(following)
            for count in filled([_collective(unit).bytes for unit in following], limit):
                yield [node for unit in itertools.islice(rest, count) for node in unit]


def _sent_before(members: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The last collectives that what is sent has come through."""
    found, pending = set[fx.Node](), [a for m in members for a in m.all_input_nodes]
    while pending:
        node = pending.pop()
        if info(node).collective is not None:
            found.add(node)
        else:
            pending += node.all_input_nodes
    return frozenset(found)


def filled(sizes: Sequence[float], limit: float) -> list[int]:
    """How many of some units each bucket takes, in order: as many as there is room for, and at least one.

    >>> filled([3, 4, 9, 1, 1], 8)
    [2, 1, 2]
    """
    found, size = list[int](), 0.0
    for more in sizes:
        if not found or size + more > limit:
            found.append(0)
            size = 0.0
        found[-1] += 1
        size += more
    return found


def _collective(members: list[fx.Node]) -> Collective:
    joined = [c for m in members if (c := info(m).collective) is not None]
    # Gradients that a reshape follows are not marked as such; sums of them wait as well as the others in `no_sync`.
    return replace(
        joined[0], bytes=sum(c.bytes for c in joined), members=sum(c.members for c in joined),
        gradient=any(c.gradient for c in joined),
    )  # fmt: skip


def _join_coalesced(graph: fx.Graph, members: list[fx.Node], positions: dict[fx.Node, float], *, early: bool) -> None:
    """One collective of a list: of parameters where the first is used (``early``), of gradients when all are known."""
    at = min(positions[m] for m in members) if early else max(positions[m] for m in members)
    with graph.inserting_before(members[0] if early else members[-1]):
        tensors = [m.args[0] for m in members]
        together = _call(graph, members[0], COALESCED[members[0].target], tensors, *members[0].args[1:])
        set_info(together, replace(info(together), collective=_collective(members)))
        parts = [_call(graph, m, operator.getitem, together, i) for i, m in enumerate(members)]
    positions.update(dict.fromkeys((together, *parts), at))
    for member, part in zip(members, parts, strict=True):
        member.replace_all_uses_with(part)
        graph.erase_node(member)
        del positions[member]
    if early:
        bring_forward(together, at, positions)


def bring_forward(node: fx.Node, at: float, positions: dict[fx.Node, float]) -> None:
    """Let everything that a node is computed from stand before a position, too."""
    pending = [node]
    while pending:
        for argument in pending.pop().all_input_nodes:
            if positions.get(argument, at) > at:
                positions[argument] = at
                pending.append(argument)


def _join_packed(
    graph: fx.Graph, members: list[fx.Node], positions: dict[fx.Node, float], *, early: bool, late: bool
) -> None:
    """One collective where the first is used (``early``) or the last is known; ``late``: waited for at the end.

    It takes one row of all members for each device that rows are sent to, and makes one for each that they are from.
    """
    first, kind = members[0], members[0].target
    sent = 1 if kind is c10d.all_reduce.default else _devices(first)
    received = sent if kind is c10d.all_to_all_single.default else 1
    start, last = (min if early else max)(positions[m] for m in members), max(positions.values()) + 1
    waits = [next(iter(m.users)) for m in members]
    made: list[fx.Node] = []

    def call(like: fx.Node, target: Any, *args: Any) -> fx.Node:
        made.append(_call(graph, like, target, *args))
        return made[-1]

    with graph.inserting_before(members[-1]):
        flat, rest = first.args[0], first.args[1:]
        if len(members) > 1:
            pieces = [call(m, aten.reshape.default, m.args[0], [sent, -1]) for m in members]
            flat = call(first, aten.cat.default, pieces, 1)
            rest = ([1] * sent, [1] * sent, *rest[2:]) if received > 1 else rest
        together = call(first, kind, flat, *rest)
        set_info(together, replace(info(together), collective=_collective(members)))
    positions.update(dict.fromkeys(made, start))
    if early:
        bring_forward(together, start, positions)
    made.clear()
    with graph.inserting_before(graph.output_node()):
        whole, at = call(first, c10d.wait_tensor.default, together), 0
        for member, wait in zip(members, waits, strict=True):
            value, result = member.meta["val"], whole
            if len(members) > 1:
                part = call(member, aten.narrow.default, whole, 1, at, value.numel() // received)
                result = call(member, aten.reshape.default, part, list(value.shape))
            at += value.numel() // received
            was = info(wait)
            known = replace(info(result), types=was.types, layouts=was.layouts, internal=was.internal)
            set_info(result, replace(known, consumer_layouts=was.consumer_layouts))
            wait.replace_all_uses_with(result)
    positions.update(dict.fromkeys(made, last if late else start))
    for node in (*waits, *members):
        graph.erase_node(node)
        del positions[node]


def _devices(node: fx.Node) -> int:
    """How many devices a scatter or an exchange is among."""
    told: Any = node.args[1] if node.target is c10d.all_to_all_single.default else node.args[2]
    return len(told) if isinstance(told, list) else int(told)


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    inherit_origin(node, like)
    return node
