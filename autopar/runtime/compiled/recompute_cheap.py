"""`recompute_cheap`: what follows from other saved values is computed again, within what is compiled around it.

Run one by one, elementwise operators take about as long as reading and writing their result: saving it costs as much
as computing it again. Compiled, they are computed where they are used, on the way, and a value that is not saved is
not written to memory. No more is saved than before: only what saved values and parameters give.

Before::

    forward:  s = silu(g); y = mul(s, u); return y, g, u, s
    backward: du = mul(dy, s)

After::

    forward:  s = silu(g); y = mul(s, u); return y, g, u
    backward: s = silu(g); du = mul(dy, s)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autopar._torch_compat import BoxedCodeGen, LazyGraphModule, OpOverload
from autopar.ir.ops.attention import KERNELS
from autopar.runtime.compiled.regions import VIEWS, is_function
from autopar.runtime.step.partition import ForwardBackward, read_again


def recompute_cheap(graphs: ForwardBackward) -> ForwardBackward:
    """The two graphs of a step, of which the second recomputes cheap values; those given are not changed."""
    if graphs.backward is None:
        return graphs
    nodes = {n.name: n for n in graphs.forward.graph.nodes}
    parameters = _parameters(graphs)
    saved = {nodes[name] for name in graphs.saved}
    # In the order of the graph: what a value is computed from has been decided before it.
    again: dict[fx.Node, None] = {}
    for node in graphs.forward.graph.nodes:
        given = [a in again or a in saved or a in parameters for a in node.all_input_nodes]
        if given and all(given) and _is_cheap(node) and not (node in saved and _is_read_whole(node)):
            again[node] = None
    if saved.isdisjoint(again):
        return graphs
    needed = _needed(saved, again)
    taken = [p for p in parameters if p in needed and p not in saved]
    kept = [n for n in (nodes[name] for name in graphs.saved) if n not in again]
    forward = _returning(graphs.forward, len(graphs.outputs), [*kept, *taken])
    backward = _recomputing(graphs.backward, [*kept, *taken], [n for n in again if n in needed])
    overwritten = {graphs.saved[i] for i in graphs.overwritten}
    names = tuple(n.name for n in (*kept, *taken))
    positions = frozenset(i for i, name in enumerate(names) if name in overwritten)
    # Eager mode would not notice that a script writes to one of these before the backward pass: here that is an error.
    reread = read_again(forward, graphs.inputs, graphs.outputs, positions)
    return replace(graphs, forward=forward, backward=backward, saved=names, overwritten=positions, reread=reread)


def _parameters(graphs: ForwardBackward) -> list[fx.Node]:
    """Placeholders of parameters, whose memory is in use anyhow; not of those that the step writes."""
    placeholders = [n for n in graphs.forward.graph.nodes if n.op == "placeholder"]
    written = {(o.kind, o.name) for o in graphs.outputs}
    described = zip(placeholders, graphs.inputs, strict=True)
    return [n for n, i in described if i.kind == "parameter" and (i.kind, i.name) not in written]


def _is_cheap(node: fx.Node) -> bool:
    """Whether the operator is elementwise or a view, so that it takes no pass over memory of its own."""
    target: Any = node.target
    elementwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return is_function(node) and (elementwise or target in VIEWS) and isinstance(node.meta.get("val"), torch.Tensor)


def _is_read_whole(node: fx.Node) -> bool:
    """Whether a kernel that nothing is compiled into, such as a matrix product, reads the value from memory."""
    return any(
        _is_read_whole(user) if user.target in VIEWS else getattr(user.target, "overloadpacket", None) in flop_registry
        or user.target in KERNELS
        for user in node.users
    )  # fmt: skip


def _needed(saved: Collection[fx.Node], again: Collection[fx.Node]) -> set[fx.Node]:
    """What has to be recomputed or taken to get all saved values."""
    found: set[fx.Node] = set()
    pending = [n for n in saved if n in again]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes if node in again else []
    return found


def _returning(forward: fx.GraphModule, outputs: int, saved: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    values: Any = graph.graph_copy(forward.graph, known)
    graph.output([*values[:outputs], *(known[n] for n in saved)])
    for old, new in known.items():
        new.meta = dict(old.meta)
    return LazyGraphModule(forward, graph)


def _recomputing(backward: fx.GraphModule, saved: list[fx.Node], again: list[fx.Node]) -> fx.GraphModule:
    """The backward graph, in which each value is recomputed before its first use, or that of what comes of it."""
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    source = {n.name: n for n in again}

    def copy(node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            if argument.name not in known:
                copy(source[argument.name])
        known[node.name] = graph.node_copy(node, lambda n: known[n.name])
        known[node.name].meta = dict(node.meta)

    for node in saved:
        known[node.name] = graph.placeholder(node.name)
        known[node.name].meta = dict(node.meta)
    for node in backward.graph.nodes:
        if node.op != "placeholder" or not (node.name in known or node.name in source):
            copy(node)
    graph.set_codegen(BoxedCodeGen())
    return LazyGraphModule(backward, graph)
