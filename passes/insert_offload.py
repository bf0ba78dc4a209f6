"""insert_offload: a copy of what the plan offloads goes to host memory, and back in the backward pass.

Before::

    relu = aten.relu(x); mm = aten.mm(relu, w); ...                                 # forward
    grad_w = aten.mm(relu_t, grad)                                                  # backward, from relu

After::

    relu = aten.relu(x); away = autopar.to_host(relu); mm = aten.mm(relu, w); ...
    back = autopar.to_device(away); grad_w = aten.mm(back_t, grad)                  # away is saved, not relu

It comes back before the first operator that takes it. In a pipeline each stage sends what its own backward pass
takes.
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
        late: dict[int, list[fx.Node]] = defaultdict(list)
        for user in sorted((u for u in value.users if is_backward(u)), key=order.__getitem__):
            stages = (info(node).stage or 0 for node in (value, user))
            late[max(stages)].append(user)  # to earlier ones it goes with the gradients
        for stage, users in late.items():
            _send(program.graph.graph, value, users, stage)
    propagate(program, plan)
    return program


def _send(graph: fx.Graph, value: fx.Node, users: list[fx.Node], stage: int) -> None:
    """Let the users, the first of which comes first, take what has been on the host."""
    with graph.inserting_after(value):
        sent = _like(graph.call_function(to_host, (value,)), value, stage)
    with graph.inserting_before(users[0]):
        back = _like(graph.call_function(to_device, (sent,)), value, stage)
    back.meta["partitioner_tag"] = "is_backward"
    for user in users:
        user.replace_input_with(value, back)


def _like(node: fx.Node, value: fx.Node, stage: int) -> fx.Node:
    """The node with the notes of a value that it copies."""
    source, index = producer(value)
    inherit_origin(node, source)
    known = info(source)
    known = replace(info(node), types=known.types, layouts=known.layouts).only(index)
    set_info(node, known if known.stage is None else replace(known, stage=stage))
    return node
