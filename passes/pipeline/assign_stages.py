"""assign_stages: every operator learns its stage, `NodeInfo.stage`.

Before (a stage begins at ``layers.1``)::

    h = aten.mm(x, w0); y = aten.mm(h, w1); ...; dh = aten.mm(dy, w1t); dw0 = aten.mm(xt, dh)

After (the graph computes the same)::

    h = aten.mm(x, w0)      # stage 0
    y = aten.mm(h, w1)      # stage 1
    dh = aten.mm(dy, w1t)   # stage 1
    dw0 = aten.mm(xt, dh)   # stage 0

Gradients go from later stages to earlier ones only. Each stage recomputes for its own backward pass. A value that a
redistribution makes smaller is redistributed before it is sent.
What stages add to the gradient of a parameter that they share is added up over the microbatches first, and then over
the stages: ``accumulate(a + b)`` becomes ``accumulate(a) + accumulate(b)``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from autopar.ir.graph import inherit_origin, map_nodes
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import axis_index
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.pipeline.forward_order import cuts_at, forward_nodes, positions
from autopar.pipeline.stage_graphs import free_nodes

aten = torch.ops.aten


def assign_stages(program: Program, plan: Plan) -> Program:
    """Assign every operator to a stage."""
    if len(plan.stages) == 1:
        return program
    forward = forward_nodes(program)
    cuts = cuts_at(program, forward, [s.modules[0] for s in plan.stages[1:]])
    for node, position in positions(program, forward).items():
        _set_stage(node, bisect_right(cuts, position))
    _follow_gradients(program, forward)
    _shrink_first(program, forward)
    for node in list(program.graph.graph.nodes):
        if node.target is accumulate:
            _accumulate_apart(program.graph.graph, node)
    return program


def _set_stage(node: fx.Node, stage: int) -> None:
    set_info(node, replace(info(node), stage=stage))


def _stage(node: fx.Node) -> int:
    """The stage of an operator, which has one from here on."""
    found = info(node).stage
    assert found is not None
    return found


def _follow_gradients(program: Program, forward: set[fx.Node]) -> None:
    """Put what reads a gradient into no later stage than the one that makes it.

    What the backward pass recomputes needs no gradient, and a later stage that reads it recomputes it for itself.
    """
    free, once, graph = free_nodes(program), program.per_step, program.graph.graph
    of_tangents = program.inputs_of("tangent")
    copies: dict[tuple[fx.Node, int], fx.Node] = {}

    def own(node: fx.Node, stage: int, user: fx.Node) -> fx.Node:
        """The node that a stage recomputes for itself."""
        if node.op != "call_function" or node in forward or node in free or node in of_tangents:
            return node
        # A later stage's value comes with the gradients; only an earlier stage's would be sent the wrong way.
        if _stage(node) >= stage:
            return node
        if (node, stage) not in copies:
            arguments = {a: own(a, stage, user) for a in node.all_input_nodes}
            with graph.inserting_before(user):
                copy = graph.node_copy(node, arguments.__getitem__)
            copy.meta = dict(node.meta)
            _set_stage(copy, stage)
            copies[node, stage] = copy
        return copies[node, stage]

    for node in list(graph.nodes):
        # Computed from a tangent: a gradient, or a sum of some.
        if node.op == "call_function" and any(a in of_tangents for a in node.all_input_nodes):
            of_tangents.add(node)
        if node.op != "call_function" or node in forward or node in once:
            continue
        gradients = [s for a in node.all_input_nodes if a in of_tangents and (s := info(a).stage) is not None]
        # In graph order, so that arguments have their final stage.
        stage = min([_stage(node), *gradients])
        _set_stage(node, stage)
        node.args, node.kwargs = map_nodes((node.args, node.kwargs), partial(own, stage=stage, user=node))


def _shrink_first(program: Program, forward: set[fx.Node]) -> None:
    """Put moves that make a forward value smaller into the stage that computes it."""
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or node not in forward or not _is_tensor(node):
            continue
        for user in node.users:
            chain = _move(user) if user in forward else []  # what the backward pass moves, no later stage gets
            if not chain or _stage(chain[-1]) <= _stage(node) or _bytes(chain[-1]) >= _bytes(node):
                continue
            for part in chain:
                _set_stage(part, _stage(node))


def _move(node: fx.Node) -> list[fx.Node]:
    """The nodes of a move, from its first; empty if the node does not begin one of a single path."""
    chain = [node]
    while info(chain[-1]).internal:
        if len(chain[-1].users) != 1:
            return []
        chain.append(next(iter(chain[-1].users)))
        if any(a is not chain[-2] and a.target is not axis_index for a in chain[-1].all_input_nodes):
            return []
    return chain if len(chain) > 1 and _is_tensor(chain[-1]) else []


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _bytes(node: fx.Node) -> int:
    size: int = node.meta["val"].nbytes
    return size


def _accumulate_apart(graph: fx.Graph, node: fx.Node) -> None:
    """Add up over the microbatches what each stage contributes, before the stages' sums are added."""
    (term,) = node.all_input_nodes
    # Only a plain sum can be taken apart, and only one that nobody else reads.
    if term.target is not aten.add.Tensor or len(term.all_input_nodes) != 2 or term.kwargs or len(term.users) > 1:
        return
    parts = term.all_input_nodes
    if len({info(p).stage for p in parts}) == 1:
        return
    sums = []
    for part in parts:
        with graph.inserting_after(part):
            total = graph.call_function(accumulate, (part,))
        inherit_origin(total, part)
        known = replace(info(node).inherit(info(total)), stage=_stage(part), internal=False)
        total.meta = {**node.meta, **total.meta}
        set_info(total, known)
        sums.append(total)
    with graph.inserting_after(node):
        whole = graph.call_function(aten.add.Tensor, tuple(sums))
    whole.meta = dict(node.meta)
    set_info(whole, replace(info(node), input_layouts=(info(node).layout(),) * 2))
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
    graph.erase_node(term)
    # A parameter of three stages or more has a sum of sums.
    for total in sums:
        _accumulate_apart(graph, total)
