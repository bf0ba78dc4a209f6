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
leaves the graph: gradients that wait to be scattered would be live as a whole. ``"model"`` is the mesh axis; each rank
puts in its own group.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from autopar.ir.graph import is_operator, producer, replace_tensor_arguments, tensor_arguments
from autopar.ir.layout import Layout, TensorType
from autopar.ir.node_info import graph_info, info, set_graph_info, set_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_hoisted
from autopar.sharding.assignment import machine_of
from autopar.sharding.emit import Exchanges, MoveEmitter
from autopar.sharding.redistribute import Tables
from autopar.sharding.redistribute.moves import Machine, Move


def insert_collectives(program: Program, plan: Plan) -> Program:
    """Redistribute every argument into the layout that its user takes."""
    graph = program.graph.graph
    tables = Tables(machine_of(plan))
    available: dict[tuple[fx.Node, Layout], fx.Node] = {}
    exchanges = Exchanges(graph)
    in_prologue = True
    for node in list(graph.nodes):
        if in_prologue and node.op != "placeholder" and not is_hoisted(node):
            # The first node of a microbatch: what all microbatches share has been computed by now.
            in_prologue = False
            for value, layout in _hoisted_layouts(graph):
                _redistribute(graph, node, value, layout, tables, available, exchanges, False, hoisted=True)
        if is_operator(node):
            wanted = info(node).input_layouts
            values = [
                _redistribute(graph, node, a, layout, tables, available, exchanges, False)
                for a, layout in zip(tensor_arguments(node), wanted, strict=True)
            ]
            node.args, node.kwargs = replace_tensor_arguments(node, values)
    output = program.output_node
    finals = [
        None
        if value is None
        else _redistribute(graph, output, value, layout, tables, available, exchanges, spec.kind == "gradient")
        for spec, value, layout in zip(program.outputs, program.output_values, info(output).input_layouts, strict=True)
    ]
    output.args = (finals,)
    set_graph_info(program.graph, replace(graph_info(program.graph), invariants=("layouts", "placed")))
    return program


def _hoisted_layouts(graph: fx.Graph) -> list[tuple[fx.Node, Layout]]:
    """Values that are redistributed once for all microbatches, and their consumer layouts."""
    found = []
    for value in graph.nodes:
        source, index = producer(value)
        if index in info(source).hoisted_outputs and "val" in value.meta:
            several = isinstance(value.meta["val"], tuple | list)  # its getitems have the values
            found += [] if several else [(value, info(source).consumer_layouts[index])]
    return found


def _redistribute(
    graph: fx.Graph,
    user: fx.Node,
    value: fx.Node,
    target: Layout,
    tables: Tables,
    available: dict[tuple[fx.Node, Layout], fx.Node],
    exchanges: Exchanges,
    gradient: bool,
    hoisted: bool = False,
) -> fx.Node:
    """The value in layout ``target``, by those moves that have not been emitted yet."""
    source, index = producer(value)
    known = info(source)
    type_, made = known.type(index), known.layout(index)
    start = known.consumer_layouts.get(index, made)
    # Two legs, each by its own cheapest path: the forced layout must be there for all, even if a direct path is
    # shorter.
    if index in known.forced and start not in (made, target) and not info(user).takes_as_made:
        value = _redistribute(graph, user, value, start, tables, available, exchanges, gradient, hoisted)
        return _redistribute(graph, user, value, target, tables, available, exchanges, gradient, hoisted)
    available.setdefault((value, made), value)
    table = tables.of(type_)
    for begin, end in ((made, start), (start, target)) if target != made else ():
        for move in table.path(begin, end) if (value, end) not in available else ():
            # Paths share their beginnings, such as two users that want different slices of one gathered value.
            if (value, move.target) not in available:
                local = available[value, move.source]
                once = hoisted or is_hoisted(user)
                moved = available[value, move.target] = _move(
                    graph, user, value, local, type_, move, tables.machine, exchanges, gradient, once
                )
                offloaded = info(value).consumer_layout_offloaded and move.target == start
                set_info(moved, replace(info(moved), offloaded=offloaded))
    return available[value, target]


def _move(
    graph: fx.Graph,
    user: fx.Node,
    value: fx.Node,
    local: fx.Node,
    type_: TensorType,
    move: Move,
    machine: Machine,
    exchanges: Exchanges,
    gradient: bool,
    hoisted: bool,
) -> fx.Node:
    """Emit one move of a value, from ``local``, which is it in the move's source layout."""
    # An output is moved at once: gradients that wait to be reduced would take memory.
    before = user if user.op != "output" else _next_operator(local)
    # Owned by its user: a forward value that only the backward pass wants in another layout is moved there.
    owner = value if user.op == "output" else user
    name = info(value).recompute_of or value.name
    with graph.inserting_before(before):
        made = info(producer(value)[0]).layout(producer(value)[1])
        emitter = MoveEmitter(
            graph, owner, type_, move, machine, gradient, hoisted, name, value, made, exchanges
        )  # fmt: skip
        return emitter.emit(local)


def _next_operator(node: fx.Node) -> fx.Node:
    """The first node after this one that is no placeholder, nor one of several outputs of a node."""
    node = node.next
    while node.op == "placeholder" or node.target is operator.getitem:
        node = node.next
    return node
