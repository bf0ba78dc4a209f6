"""copy_for_backward: the backward pass reads copies of parameters, which are split as the plan says.

Before::

    mm = aten.mm(x, w); ...                       # forward
    grad_x = aten.mm(grad, w)                     # backward

After::

    mm = aten.mm(x, w); copy = aten.clone(w); ... # forward
    grad_x = aten.mm(grad, copy)                  # backward

The forward pass gathers ``w`` over all devices, and leaves each with a part of it: of a node, say. From these parts the
backward pass gathers within the node. That is the secondary partition of ZeRO++ (G. Wang et al., 2023).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar.ir.graph import Value, copy_graph, insert_call, is_backward, producer
from autopar.ir.node_info import info, set_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.quantized.axes import WEIGHTS
from autopar.sharding.dims import analyze

aten = torch.ops.aten


def copy_for_backward(program: Program, plan: Plan) -> Program:
    """Give the backward pass copies of parameters, if the plan says so; computes the same."""
    return with_copies(program) if plan.secondary else program


def with_copies(program: Program) -> Program:
    """A program whose backward pass reads copies of parameters, and of casts and views of these."""
    # Remembered: a search and its prediction ask for it many times.
    if "copies" not in program.memo:
        program.memo["copies"] = _with_copies(program)
    found: Program = program.memo["copies"]
    return found


def _with_copies(program: Program) -> Program:
    types = analyze(program).types
    weights = {value for value, type_ in types.items() if type_.message == WEIGHTS and not is_backward(value[0])}
    first: dict[Value, list[fx.Node]] = {value: [] for value in weights}
    second: dict[Value, list[fx.Node]] = {value: [] for value in weights}
    for node, sources in program.sources.items():
        for value in dict.fromkeys(s for s in sources if s in weights):
            (second if is_backward(node) else first)[value].append(node)
    chosen = [v for v in weights if first[v] and second[v]]
    if not chosen:  # or they are there already
        return program
    order = {node: i for i, node in enumerate(program.graph.graph.nodes)}
    graph = copy_graph(program.graph)
    own = dict(zip(program.graph.graph.nodes, graph.graph.nodes, strict=True))
    # In the graph's order: sets would make other names in other processes.
    for value in sorted(chosen, key=lambda v: (order[v[0]], v[1])):
        last = _last_reader(value, first, order)
        argument = next(a for a in second[value][0].all_input_nodes if producer(a) == value)
        with graph.graph.inserting_after(own[last]):
            copy = insert_call(graph.graph, own[last], aten.clone.default, own[argument])
        # A checkpointed region would compute it anew, from the parameter.
        set_info(copy, replace(info(copy), region=None, saved=None, module_outputs=(), secondary=True))
        for reader in second[value]:
            for given in reader.all_input_nodes:
                if producer(given) == value:
                    own[reader].replace_input_with(own[given], copy)
    graph.recompile()
    found = replace(program, graph=graph)
    if program.repeat is None:
        return found
    return replace(found, repeat=replace(program.repeat, shorter=with_copies(program.repeat.shorter)))


def _last_reader(value: Value, readers: dict[Value, list[fx.Node]], order: dict[fx.Node, int]) -> fx.Node:
    """The last operator of the forward pass that reads a parameter, or a view of it: until then it is there whole."""
    found, pending = readers[value][0], [value]
    while pending:
        for node in readers.get(pending.pop(), ()):
            found = max(found, node, key=order.__getitem__)
            pending += [v for v in readers if v[0] is node]
    return found
