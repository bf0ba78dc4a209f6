"""insert_collectives: between the layout that a value has and the one that a user needs, the moves of the plan.

Before::

    mm = aten.mm(x, w)                 # [batch, hidden{model}], [hidden{model}, ffn] -> [batch, ffn] +sum{model}
    relu = aten.relu(mm)               # needs [batch, ffn]

After::

    mm = aten.mm(x, w)
    all_reduce = _c10d_functional.all_reduce(mm, "sum", "model")
    wait = _c10d_functional.wait_tensor(all_reduce)
    relu = aten.relu(wait)

Each move of a value is emitted once, before the first user that needs it, or as soon as the value is there if it
leaves the graph: gradients that wait to be scattered would be held whole. ``"model"`` is the mesh axis; a rank puts in
its own group.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from autopar.ir.graph import is_operator, producer, replace_tensor_arguments, tensor_arguments
from autopar.ir.layout import Layout
from autopar.ir.node_info import graph_info, info, set_graph_info, set_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_hoisted
from autopar.sharding.assignment import machine_of
from autopar.sharding.emit import MoveEmitter
from autopar.sharding.redistribute import Tables


def insert_collectives(program: Program, plan: Plan) -> Program:
    """Redistribute every argument into the layout that its user takes."""
    graph = program.graph.graph
    tables = Tables(machine_of(plan))
    placed: dict[tuple[fx.Node, Layout], fx.Node] = {}
    shared = True
    for node in list(graph.nodes):
        if shared and node.op != "placeholder" and not is_hoisted(node):  # what all microbatches take has been made
            shared = False
            for value, layout in _hoisted_layouts(graph):
                _bring(graph, node, value, layout, tables, placed, False, hoisted=True)
        if is_operator(node):
            wanted = info(node).input_layouts
            values = [
                _bring(graph, node, a, layout, tables, placed, False)
                for a, layout in zip(tensor_arguments(node), wanted, strict=True)
            ]
            node.args, node.kwargs = replace_tensor_arguments(node, values)
    output = program.output_node
    finals = [
        None if value is None else _bring(graph, output, value, layout, tables, placed, spec.kind == "gradient")
        for spec, value, layout in zip(program.outputs, program.output_values, info(output).input_layouts, strict=True)
    ]
    output.args = (finals,)
    set_graph_info(program.graph, replace(graph_info(program.graph), invariants=("layouts", "placed")))
    return program


def _hoisted_layouts(graph: fx.Graph) -> list[tuple[fx.Node, Layout]]:
    """Values that are moved once for all microbatches, and where to."""
    found = []
    for value in graph.nodes:
        source, index = producer(value)
        if index in info(source).hoisted_outputs and "val" in value.meta:
            several = isinstance(value.meta["val"], tuple | list)  # whose outputs speak for themselves
            found += [] if several else [(value, info(source).consumer_layouts[index])]
    return found


def _bring(
    graph: fx.Graph,
    user: fx.Node,
    value: fx.Node,
    target: Layout,
    tables: Tables,
    placed: dict[tuple[fx.Node, Layout], fx.Node],
    gradient: bool,
    hoisted: bool = False,
) -> fx.Node:
    """The value in layout ``target``, by the moves that are not there yet."""
    source, index = producer(value)
    known = info(source)
    type_, made = known.type(index), known.layout(index)
    start = known.consumer_layouts.get(index, made)
    if index in known.forced and start not in (made, target) and not info(user).takes_as_made:
        value = _bring(graph, user, value, start, tables, placed, gradient, hoisted)
        return _bring(graph, user, value, target, tables, placed, gradient, hoisted)
    placed.setdefault((value, made), value)
    table = tables.of(type_)
    for begin, end in ((made, start), (start, target)) if target != made else ():
        if (value, end) in placed:
            continue
        for move in table.path(begin, end):
            if (value, move.target) in placed:
                continue
            # What leaves the graph is moved at once: gradients that wait to be reduced would take memory.
            place = user if user.op != "output" else _next_operator(placed[value, move.source])
            with graph.inserting_before(place):
                # A forward value that only the backward pass wants elsewhere is moved in the backward pass.
                owner = value if user.op == "output" else user
                once = hoisted or is_hoisted(user)
                name = info(value).recompute_of or value.name
                emitter = MoveEmitter(graph, owner, type_, move, tables.machine, gradient, once, name)
                moved = placed[value, move.target] = emitter.emit(placed[value, move.source])
                offloaded = info(value).consumer_layout_offloaded and move.target == start
                set_info(moved, replace(info(moved), offloaded=offloaded))
    return placed[value, target]


def _next_operator(node: fx.Node) -> fx.Node:
    """The first node behind this one that is no placeholder, nor one of several outputs of a node."""
    node = node.next
    while node.op == "placeholder" or node.target is operator.getitem:
        node = node.next
    return node
