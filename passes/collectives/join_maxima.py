"""join_maxima: maxima over devices that nothing but the end of the step needs are one collective of all, at the end.

Before::

    a1 = float8_amax(x1); r1 = all_reduce(a1, "max", "data"); w1 = wait(r1); ...; t1 = accumulate(w1, "max"); ...
    return loss, t1, t2, ..., gradients

After::

    a1 = float8_amax(x1); ...; t1 = accumulate(a1, "max"); ...
    flat = cat([reshape(t1, [-1]), reshape(t2, [-1]), ...]); r = all_reduce(flat, "max", "data"); w = wait(r)
    return loss, reshape(narrow(w, 0, 0, 1), [1, 1]), ..., gradients

These are what delayed scaling records (`autopar.ir.ops.float8.delayed`). A maximum may be taken at any time before its
value is read, and over more devices than hold parts: of what each device has the whole, all maxima are the same. So
there is one for each axis along which any of them is. Stages of a pipeline have one each.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.ir.graph import insert_call
from autopar.ir.layout import Partial, Replicate, replicated
from autopar.ir.node_info import NodeInfo, info, set_info
from autopar.ir.ops import float8
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import Collective, c10d
from autopar.ir.plan import Plan
from autopar.ir.program import RECORDED, Program
from autopar.pipeline.stage_graphs import free_nodes

aten = torch.ops.aten


def join_maxima(program: Program, plan: Plan) -> Program:
    """Take the maxima of what is recorded together, last."""
    graph, outputs = program.graph.graph, program.output_values
    described = zip(program.outputs, outputs, strict=True)
    recorded = dict.fromkeys(v for o, v in described if o.kind == RECORDED and v is not None)
    free = free_nodes(program) if len(plan.stages) > 1 and recorded else set[fx.Node]()
    stages: dict[int | None, dict[fx.Node, _Maximum]] = {}
    for value in recorded:
        known = _taken_apart(value)
        _settle(known.own, free)
        _describe(known, info(value), plan.inner.axis_names)
        if known.axes:
            stages.setdefault(info(known.own).stage, {})[value] = known
    if not stages:
        return program
    instead: dict[fx.Node, fx.Node] = {}
    for values in stages.values():
        # In the order of the mesh, which is that of all ranks.
        axes = [name for name in plan.axis_names if any(name in m.axes for m in values.values())]
        instead |= _joined(graph, values, axes)
    program.output_node.args = ([None if v is None else instead.get(v, v) for v in outputs],)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return program


def _settle(own: fx.Node, free: Container[fx.Node]) -> None:
    """Put the largest entry of a weight into a stage that has the weight, and a sum into the stage of its term."""
    if own.target is accumulate:
        (term,) = own.all_input_nodes
        _settle(term, free)
        set_info(own, replace(info(own), stage=info(term).stage))
    elif own.target is float8.amax and free and all(a in free for a in own.all_input_nodes):
        # What is computed of parameters alone has no stage of its own: those that read it have.
        pending, stages = list(own.all_input_nodes), set[int]()
        for node in pending:
            stages |= {info(node).stage or 0} if node not in free else set()
            pending += [
                u for u in node.users if u is not own and u.op != "output" and u not in pending and node in free
            ]
        set_info(own, replace(info(own), stage=min(stages, default=0)))


def _describe(known: _Maximum, was: NodeInfo, names: Sequence[str]) -> None:
    """Say of what a device has that the maximum over some axes is the value."""
    if not known.axes:
        return
    layout = tuple(Partial("max") if name in known.axes else Replicate() for name in names)
    nodes = [known.own]
    if known.own.target is accumulate:
        set_info(known.own, replace(info(known.own), input_layouts=(layout,)))
        nodes += known.own.all_input_nodes
    for node in nodes:
        set_info(node, replace(info(node), types=was.types, layouts=(layout,), internal=False))


class _Maximum(NamedTuple):
    """What a device has of a maximum, and the axes over which it is taken."""

    own: fx.Node
    axes: frozenset[str]


def _taken_apart(value: fx.Node) -> _Maximum:
    """A maximum of microbatches and devices, without the collectives: of microbatches alone."""
    if value.target is accumulate:
        term: Any = value.args[0]
        own = _taken_apart(term)
        value.args = (own.own, *value.args[1:])
        return _Maximum(value, own.axes)
    if value.target is c10d.wait_tensor.default:
        (made,) = value.all_input_nodes
        if made.target is c10d.all_reduce.default and made.args[1] == "max":
            before, _, axis = made.args
            own = _taken_apart(before)  # type: ignore[arg-type]
            return _Maximum(own.own, own.axes | {str(axis)})
    return _Maximum(value, frozenset())


def _joined(graph: fx.Graph, values: Mapping[fx.Node, _Maximum], axes: Sequence[str]) -> dict[fx.Node, fx.Node]:
    """What stands for each value: its part of one maximum of all."""
    last, made = list(values)[-1], list[fx.Node]()

    def call(target: Any, *args: Any) -> fx.Node:
        made.append(insert_call(graph, last, target, *args))
        return made[-1]

    found: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(graph.output_node()):
        whole = call(aten.cat.default, [call(aten.reshape.default, m.own, [-1]) for m in values.values()])
        for axis in axes:
            reduced = call(c10d.all_reduce.default, whole, "max", axis)
            size = float(whole.meta["val"].nbytes)
            set_info(reduced, replace(info(reduced), collective=Collective("all_reduce", axis, size, len(values))))
            whole = call(c10d.wait_tensor.default, reduced)
        for i, value in enumerate(values):
            part = call(aten.narrow.default, whole, 0, i, 1)
            found[value] = call(aten.reshape.default, part, list(value.meta["val"].shape))
    for node in made:
        node.meta["partitioner_tag"] = "is_backward"
        set_info(node, replace(info(node), stage=info(values[last].own).stage, internal=True))
    for value, node in found.items():
        (layout,) = info(value).layouts
        whole_layout = replicated(len(layout or ()))
        set_info(node, replace(info(node), types=info(value).types, layouts=(whole_layout,), internal=False))
    return found
