"""lower_operators: where a strategy needs other code than the operator's own, that code.

Before::

    embedding = aten.embedding(w, tokens)        # w [vocab{model}, hidden]: each device holds some rows

After::

    index = axis_index("model"); start = index * 64; local = tokens - start; ...
    rows = aten.embedding(w, where(outside, 0, local)); embedding = where(outside, 0, rows)     # +sum{model}
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar.ir.graph import inherit_origin, insert_call, is_operator, producer
from autopar.ir.node_info import info, set_info, torch_meta
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.sharding.assignment import machine_of
from autopar.sharding.lowered.emit import emit_lowering, lowered_letters
from autopar.sharding.redistribute.moves import Machine

aten = torch.ops.aten


def lower_operators(program: Program, plan: Plan) -> Program:
    """Replace every operator that is split along a letter with a lowering."""
    machine = machine_of(plan)
    for node in list(program.graph.graph.nodes):
        if is_operator(node) and info(node).operator is not None:
            letters = lowered_letters(info(node).operator, info(node).strategy)
            lower = info(node).operator.rule.lower
            # Letters of one lowering may be split together, such as the batch and a spatial dim of a batch norm.
            if any(lower[c] is not lower[letters[0]] for c in letters):
                raise ValueError(f"node {node.name} is split along {letters}, each with other code; choose one of them")
            if letters:
                _lower(program.graph.graph, node, letters, machine)
    return program


def _lower(graph: fx.Graph, node: fx.Node, letters: list[str], machine: Machine) -> None:
    known = info(node)
    # All nodes between this one and the operator are the lowering's.
    last = node.prev
    with graph.inserting_before(node):
        result = emit_lowering(graph, known.operator, known.strategy, letters, machine, node.args, node.kwargs)
    made = last.next
    while made is not node:
        inherit_origin(made, node)
        made = made.next
    several = len(known.types) > 1
    if several and not isinstance(result, tuple):
        _replace(node, result.node)
        return
    for i, output in enumerate(result if several else (result,)):
        if output is not None:
            _stand_in(node, i, output.node, several=several)
    graph.erase_node(node)


def _replace(node: fx.Node, other: fx.Node) -> None:
    """Let an operator with the same outputs as ``node`` stand in for it."""
    _describe(other, node)
    set_info(other, replace(info(other), consumer_layouts={}, internal=False))
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def _describe(other: fx.Node, node: fx.Node) -> None:
    """Copy what is known of an operator to the node that stands in for it, but for what that itself computes."""
    own = info(other)
    other.meta.update(torch_meta(node, but=("val",)))
    set_info(other, replace(
        info(node), operator=own.operator, strategy=own.strategy, input_layouts=own.input_layouts,
        collective=own.collective, offloaded=own.offloaded,
    ))  # fmt: skip


def _stand_in(node: fx.Node, index: int, value: fx.Node, *, several: bool) -> None:
    """Let ``value`` be output ``index`` of ``node`` for all its users."""
    if producer(value)[0] is not value:
        # The notes of a node are of all its outputs: one of several, as of a ring of one device, has none of its own.
        with node.graph.inserting_before(node):
            value = insert_call(node.graph, value, aten.alias.default, value)
    _describe(value, node)
    set_info(value, info(value).only(index))
    if not several:
        set_info(value, replace(info(value), offloaded=info(node).offloaded))
        node.replace_all_uses_with(value)
        return
    for user in [u for u in node.users if u.args[1] == index]:
        set_info(value, replace(info(value), offloaded=info(user).offloaded))
        user.replace_all_uses_with(value)
        user.graph.erase_node(user)
