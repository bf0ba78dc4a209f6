"""The graph checker: what holds after each pass. Its invariants grow as passes add them."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace

from torch import Tensor, fx

from autopar.ir.graph import is_operator, producer, tensor_arguments, values_of
from autopar.ir.layout import local_shape, open_shape
from autopar.ir.node_info import NodeInfo, graph_info, info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.host import to_device, to_host
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_hoisted

Seen = dict[fx.Node, tuple[NodeInfo, Tensor]]
"""Nodes whose local shapes were right, with what was known of them then and their value."""


def check(program: Program, plan: Plan, seen: Seen | None = None) -> None:
    """Check a program between passes.

    The invariants that hold by now are named in `GraphInfo.invariants`: ``layouts`` (every tensor has one),
    ``placed`` (every argument has the layout that its user takes, so no Partial meets a nonlinear operator), ``local``
    (local shapes are what the layouts say).

    Args:
        program: what the last pass left.
        plan: what the passes follow.
        seen: nodes of which the checks after earlier passes have found that local shapes are right; edited in place.

    Raises:
        ValueError: an invariant is broken; names the node.
        RuntimeError: the graph is malformed.
    """
    # The graph itself first: what follows walks over users and arguments.
    graph = program.graph.graph
    graph.lint()
    holds = graph_info(program.graph).invariants
    _check_sums(program)
    _check_host(graph)
    of_one, seen = program.inputs_of("batch", "tangent"), {} if seen is None else seen
    for node in graph.nodes:
        if "layouts" in holds:
            _check_layouts(node)
            _check_hoisted(node, of_one)
        if "placed" in holds:
            _check_placed(node)
        if "local" in holds:
            known, value = info(node), node.meta.get("val")
            before = seen.get(node)
            if before is None or before[0] is not known or before[1] is not value:
                _check_local(node, plan)
                if isinstance(value, Tensor):  # of several outputs it depends on the users, too
                    seen[node] = known, value


def _check_sums(program: Program) -> None:
    """A sum over microbatches is complete after the last one: what depends on it runs once, and is no term of a sum."""
    # Of a program of its own, or the next pass would have what is known of the graph before it.
    node = next((n for n in replace(program).per_step if n.target is accumulate), None)
    if node is not None:
        raise ValueError(
            f"node {node.name} adds up over microbatches what is computed once, after the last of them: {node.args[0]} "
            "depends on another sum"
        )


def _check_host(graph: fx.Graph) -> None:
    for on_host in graph.find_nodes(op="call_function", target=to_host):
        for node in on_host.users:
            if node.target is not to_device:
                raise ValueError(f"node {node.name} takes {on_host}, which is in host memory")


def _check_layouts(node: fx.Node) -> None:
    # Inside a move or a lowered operator tensors are pieces that no layout describes.
    known = info(node)
    if not (known.layouts or known.internal) and (is_operator(node) or node.op == "placeholder"):
        raise ValueError(f"node {node.name} has no layout")


def _check_hoisted(node: fx.Node, of_one: Collection[fx.Node]) -> None:
    # The graph that runs first takes parameters and buffers alone.
    varying = [a for a in node.all_input_nodes if a in of_one or not is_hoisted(a)] if is_hoisted(node) else []
    if varying:
        raise ValueError(f"node {node.name} runs before the first microbatch and takes {varying[0]}, which is of one")


def _check_placed(node: fx.Node) -> None:
    if not info(node).input_layouts:
        return
    values = tensor_arguments(node) if node.op != "output" else [v for v in node.args[0] if v is not None]  # type: ignore[union-attr]
    wanted = list(info(node).input_layouts)
    if node.op == "output":
        # A gradient that does not exist has no layout to check.
        wanted = [w for w, v in zip(wanted, node.args[0], strict=True) if v is not None]  # type: ignore[arg-type]
    for value, layout in zip(values, wanted, strict=True):
        source, index = producer(value)  # type: ignore[arg-type]
        if not info(source).layouts:
            raise ValueError(f"node {node.name} takes {value}, which has no layout: it is inside a move")
        if info(source).layouts[index] != layout:
            raise ValueError(
                f"node {node.name} takes {value} as ({', '.join(map(str, layout))}), "
                f"and it has layout ({', '.join(map(str, info(source).layout(index)))})"
            )


def _check_local(node: fx.Node, plan: Plan) -> None:
    said = info(node)
    if not said.layouts or node.op == "output":
        return
    values = values_of(node)
    # An output that nobody reads may have any shape.
    several = len(values) > 1
    used = {user.args[1] for user in node.users if user.target is operator.getitem} if several else ()
    for i, (value, type_, layout) in enumerate(zip(values, said.types, said.layouts, strict=False)):
        if type_ is None or layout is None or value is None or (several and i not in used):
            continue  # kernels shape outputs that nobody uses as they please
        # How many rows a device's experts have, only the data say.
        known = open_shape(type_, layout, plan.axis_sizes)
        fits = value.ndim == len(known) and all(b in (-1, a) for a, b in zip(value.shape, known, strict=True))
        if not fits:
            expected = local_shape(type_, layout, plan.axis_sizes)
            raise ValueError(f"node {node.name} computes a local tensor of shape {tuple(value.shape)}, not {expected}")
