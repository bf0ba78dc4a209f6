"""annotate_layouts: every node learns the layouts of its tensors.

Before::

    mm = aten.mm(view, t)

After (the graph computes the same; ``meta`` holds)::

    mm = aten.mm(view, t)   # [(batch{data} seq), hidden], [hidden, ffn{model}] -> [(batch{data} seq), ffn{model}]
"""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_operator, producer
from autopar.sharding.assignment import Assignment, assign
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes


def annotate_layouts(program: Program, plan: Plan) -> Program:
    """Write what the plan says of each node into its ``meta``.

    That is ``types``, ``layouts``, ``input_layouts``, ``consumer_layouts``, ``held``, ``strategy`` and ``operator``.
    The output node has ``input_layouts`` and ``input_types``; the graph has ``again``, for `insert_recompute`. What all
    microbatches share is ``hoisted``, and the outputs of a node that are moved for all of them are
    ``hoisted_layouts``. A value is ``away`` that is offloaded until the backward pass takes it, and ``away_moved`` if
    its moved form is; parameters whose optimizer state is offloaded are the graph's ``states_away``.
    """
    dims = analyze(program)
    assignment = assign(program, dims, plan, layer_classes(program, dims))
    for node in program.graph.graph.nodes:
        if node.op == "output":
            node.meta["input_layouts"] = assignment.finals
            node.meta["input_types"] = tuple(v and dims.type_of(v) for v in program.output_values)
            continue
        outputs = dims.operators[node].outputs if is_operator(node) else (dims.types.get((node, 0)),)
        if not is_operator(node) and (node, 0) not in dims.types:
            continue  # getitem: its producer speaks for it
        node.meta["types"] = tuple(outputs)
        node.meta["layouts"] = tuple(assignment.outputs.get((node, i)) for i in range(len(outputs)))
        node.meta["consumer_layouts"] = {
            i: assignment.consumer_layouts[node, i]
            for i in range(len(outputs))
            if (node, i) in assignment.consumer_layouts
        }
        node.meta["held"] = frozenset(i for i in range(len(outputs)) if (node, i) in assignment.held)
        if is_operator(node):
            node.meta["operator"] = dims.operators[node]
            node.meta["strategy"] = assignment.strategies[node]
            node.meta["input_layouts"] = assignment.inputs[node]
    program.graph.meta["invariants"] = ("layouts",)
    program.graph.meta["axes"] = dict(plan.axes)
    program.graph.meta["again"] = assignment.again
    program.graph.meta["states_away"] = assignment.away.states
    _mark_steady(program, assignment)
    for node in program.graph.graph.nodes:
        if not isinstance(node.meta.get("val"), tuple | list):  # whose outputs speak for themselves
            node.meta["away"] = producer(node) in assignment.away.made
            node.meta["away_moved"] = producer(node) in assignment.away.moved
    return program


def _mark_steady(program: Program, assignment: Assignment) -> None:
    for node in program.graph.graph.nodes:
        source, _ = producer(node)
        if source in assignment.steady.nodes or (source in program.microbatch_invariant and not is_operator(source)):
            node.meta["hoisted"] = True
    for node, index in assignment.steady.consumer_layouts:
        node.meta["hoisted_layouts"] = (*node.meta.get("hoisted_layouts", ()), index)
