"""insert_offload: a copy of what the plan offloads goes to host memory, and back in the backward pass.

Before::

    relu = aten.relu(x); mm = aten.mm(relu, w); ...                                 # forward
    grad_w = aten.mm(relu_t, grad)                                                  # backward, from relu

After::

    relu = aten.relu(x); host = autopar.to_host(relu); mm = aten.mm(relu, w); ...
    back = autopar.to_device(host); grad_w = aten.mm(back_t, grad)                  # host is saved, not relu

It comes back before the first operator that reads it. In a pipeline each stage sends what its own backward pass
reads.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from torch import fx

from autopar.ir.graph import inherit_origin, is_backward, producer
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.host import to_device, to_host
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.local_shapes import propagate


def insert_offload(program: Program, plan: Plan) -> Program:
    """Send the values that `annotate_layouts` has marked as offloaded to host memory between the passes."""
    offloaded = [n for n in program.graph.graph.nodes if info(n).offloaded]
    if not offloaded:
        return program
    order = {n: i for i, n in enumerate(program.graph.graph.nodes)}
    for value in offloaded:
        by_stage: dict[int, list[fx.Node]] = defaultdict(list)
        for user in sorted((u for u in value.users if is_backward(u)), key=order.__getitem__):
            # It comes back in the user's stage, or in the value's if that is later, and from there to the user.
            stages = (info(node).stage or 0 for node in (value, user))
            by_stage[max(stages)].append(user)
        for stage, users in by_stage.items():
            _send(program.graph.graph, value, users, stage)
    propagate(program, plan)
    return program


def _send(graph: fx.Graph, value: fx.Node, users: list[fx.Node], stage: int) -> None:
    """Let users, in the order of the graph, read the copy that comes back from host memory."""
    # At once: the sooner it is copied, the sooner its memory is free.
    with graph.inserting_after(value):
        sent = _like(graph.call_function(to_host, (value,)), value, stage)
    with graph.inserting_before(users[0]):
        back = _like(graph.call_function(to_device, (sent,)), value, stage)
    # Else the copy would come back in the forward pass, and be saved.
    back.meta["partitioner_tag"] = "is_backward"
    for user in users:
        user.replace_input_with(value, back)


def _like(node: fx.Node, value: fx.Node, stage: int) -> fx.Node:
    """The node with what is known of the value that it copies."""
    source, index = producer(value)
    inherit_origin(node, source)
    known = info(source)
    known = replace(info(node), types=known.types, layouts=known.layouts).only(index)
    set_info(node, known if known.stage is None else replace(known, stage=stage))
    return node
