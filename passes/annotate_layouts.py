"""annotate_layouts: every node learns the layouts of its tensors.

Before::

    mm = aten.mm(view, t)

After (the graph computes the same; `NodeInfo` holds)::

    mm = aten.mm(view, t)   # [(batch{data} seq), hidden], [hidden, ffn{model}] -> [(batch{data} seq), ffn{model}]
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.ir.graph import is_operator, producer
from autopar.ir.node_info import graph_info, info, set_graph_info, set_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.sharding.assignment import Assignment, assign
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.layer_classes import layer_classes


def annotate_layouts(program: Program, plan: Plan) -> Program:
    """Write what the plan says of each node, and of the graph, into its `NodeInfo` and `GraphInfo`."""
    dims = analyze(program)
    assignment = assign(program, dims, plan, layer_classes(program, dims))
    for node in program.graph.graph.nodes:
        if node.op == "output":
            types = tuple(None if v is None else dims.type_of(v) for v in program.output_values)
            set_info(node, replace(info(node), input_layouts=assignment.finals, input_types=types))
        elif is_operator(node) or (node, 0) in dims.types:  # not getitem: its producer speaks for it
            _annotate(node, dims, assignment)
    set_graph_info(program.graph, replace(
        graph_info(program.graph), invariants=("layouts",), axes=dict(plan.axes), recompute=assignment.recompute,
        offloaded_states=assignment.offload.states,
    ))  # fmt: skip
    _mark_hoisted(program, assignment)
    for node in program.graph.graph.nodes:
        if not isinstance(node.meta.get("val"), tuple | list):  # its getitems have the values
            offloaded, moved = (
                producer(node) in values for values in (assignment.offload.made, assignment.offload.moved)
            )
            set_info(node, replace(info(node), offloaded=offloaded, consumer_layout_offloaded=moved))
    return program


def _annotate(node: fx.Node, dims: Dims, assignment: Assignment) -> None:
    # Nodes share operators, whose types are those of the first: names and sizes without padding are each node's own.
    shared = dims.operators[node].outputs if is_operator(node) else (dims.types.get((node, 0)),)
    types = tuple(None if type_ is None else dims.types[node, i] for i, type_ in enumerate(shared))
    numbers = range(len(types))
    known = replace(
        info(node),
        types=types,
        layouts=tuple(assignment.outputs.get((node, i)) for i in numbers),
        consumer_layouts={i: lay for i in numbers if (lay := assignment.consumer_layouts.get((node, i))) is not None},
        forced=frozenset(i for i in numbers if (node, i) in assignment.forced),
    )
    if is_operator(node):
        strategy, into = assignment.strategies[node], assignment.inputs[node]
        known = replace(known, operator=dims.operators[node], strategy=strategy, input_layouts=into)
    set_info(node, known)


def _mark_hoisted(program: Program, assignment: Assignment) -> None:
    for node in program.graph.graph.nodes:
        source, _ = producer(node)
        # Inputs and constants are there before the first microbatch; operators only where the plan saves their results.
        if source in assignment.hoisted or (source in program.microbatch_invariant and not is_operator(source)):
            set_info(node, replace(info(node), hoisted=True))
    for node, index in assignment.hoisted_consumer_layouts:
        set_info(node, replace(info(node), hoisted_outputs=(*info(node).hoisted_outputs, index)))
