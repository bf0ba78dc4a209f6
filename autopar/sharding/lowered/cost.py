"""What emitted code costs that is no operator of the plan: of passes, and of lowerings, which are emitted to be priced.

A lowering is emitted into a graph of its own on meta tensors, and its nodes are priced as those of the rewritten graph
are. Strategies of operators are many, but only few have lowerings, and each of these is emitted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from autopar._torch_compat import storage_id
from autopar.costs.kernels import Work, kernel_seconds, product, stream
from autopar.costs.outer_exchange import dequantizing, quantizing
from autopar.ir.graph import tensor_arguments, values_of
from autopar.ir.layout import Layout, local_shape
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.collectives import Collective, c10d
from autopar.ir.ops.rows import add_rows_, multiply_rows_, new_rows
from autopar.ir.quantized.operators import QUANTIZERS, sum_from_blocks, to_blocks
from autopar.rules.remembered import remembered
from autopar.rules.shapes.kernel_shapes import called
from autopar.rules.shapes.known_strides import local_rule
from autopar.sharding.candidates import combine
from autopar.sharding.dims import Operator
from autopar.sharding.lowered.arguments import localized
from autopar.sharding.lowered.emit import emit_lowering, lowered_letters
from autopar.sharding.redistribute import Machine

KERNEL, ISSUE, WAIT = "kernel", "issue", "wait"
"""What a lowering's nodes do: compute, begin a collective, or wait for one."""


@dataclass(frozen=True)
class LoweredCost:
    """What a lowering emits.

    Attributes:
        kernels: all of them.
        collectives: in order.
        order: what happens one after the other: a kind, and the number of the kernel or collective.
    """

    kernels: Work
    collectives: tuple[Collective, ...]
    order: tuple[tuple[str, int], ...]

    def seconds(self, dtype: str, machine: Machine) -> float:
        """Seconds of all of it: a collective runs beside what is emitted before its wait, one at a time on an axis."""
        kernels = kernel_seconds(self.kernels, dtype, machine.device)
        clock, over = 0.0, dict[int, float]()
        free: dict[str, float] = {}
        for kind, i in self.order:
            if kind == KERNEL:
                clock += float(kernels[i])
            elif kind == ISSUE:
                made = self.collectives[i]
                over[i] = free[made.axis] = max(clock, free.get(made.axis, 0.0)) + machine.seconds(made)
            else:
                clock = max(clock, over[i])
        return clock


def emitted_work(node: fx.Node) -> Work | None:
    """The kernel of a node that is no operator of the plan, or a view that may have to copy; None if it has none.

    It streams its memory, unless its results are views, and computes what the rule of its operator says.
    """
    if node.target in (c10d.wait_tensor.default, new_rows) or info(node).collective is not None:
        return None
    if node.target is multiply_rows_:
        _, rows, matrix = (a.meta["val"] for a in node.all_input_nodes)
        return product(rows.shape[0], matrix.shape[1], rows.shape[1], item=rows.element_size())
    if node.target is add_rows_:
        return stream(3 * node.all_input_nodes[1].meta["val"].nbytes)
    if node.target in QUANTIZERS:
        return _quantizing(node)
    results = [v for v in values_of(node) if v is not None]
    sources = [a for a in tensor_arguments(node) if not _drawn(a)]
    inputs = [v for a in sources for v in values_of(a) if v is not None]
    storages = {storage_id(v) for v in inputs}
    if not results or all(storage_id(v) in storages for v in results):
        return None
    rule = local_rule(node, called(node))
    between = rule.between if rule is not None and len(sources) == len(tensor_arguments(node)) else 0.0
    work = stream(sum(v.nbytes for v in (*inputs, *results)) + between)
    return work if rule is None or not rule.flops else work.computing(rule.flops)


def _quantizing(node: fx.Node) -> Work:
    """The kernels between numbers and the bytes that stand for them, as one that moves as much."""
    (source,) = node.all_input_nodes
    bits: Any = node.args[2]
    given, made = source.meta["val"], node.meta["val"]
    if node.target is to_blocks:
        moved, kernels = quantizing(given.numel(), given.element_size(), bits)
    else:
        rows = len(given) if node.target is sum_from_blocks else 0
        moved, kernels = dequantizing(made.numel() * max(rows, 1), made.element_size(), bits, rows)
    return replace(stream(moved), launches=np.array([float(kernels)]))


def _drawn(node: fx.Node) -> bool:
    """Whether a tensor is not in memory: the kernel that reads it draws it by itself."""
    return any(t is not None and t.drawn for t in info(node).types)


@remembered(4096)
def lowered_cost(operator: Operator, strategy: tuple[str, ...], machine: Machine) -> LoweredCost | None:
    """What an operator's lowering costs under one strategy name an axis; None if there is none to emit."""
    letters = lowered_letters(operator, strategy)
    if not letters or any(operator.rule.lower[c] is not operator.rule.lower[letters[0]] for c in letters):
        return None
    graph = fx.Graph()
    args, kwargs = _local_arguments(graph, operator, strategy, machine.sizes)
    emit_lowering(graph, operator, strategy, letters, machine, args, kwargs)
    kernels, collectives, order = list[Work](), dict[fx.Node, Collective](), list[tuple[str, int]]()
    for node in (n for n in graph.nodes if n.op == "call_function"):
        made, work = info(node).collective, emitted_work(node)
        if made is not None:
            order.append((ISSUE, len(collectives)))
            collectives[node] = made
        elif node.target is c10d.wait_tensor.default:
            order.append((WAIT, list(collectives).index(node.all_input_nodes[0])))
        elif work is not None:
            order.append((KERNEL, len(kernels)))
            kernels.append(work)
    all_kernels = Work.join(kernels) if kernels else stream(np.zeros(0))
    return LoweredCost(all_kernels, tuple(collectives.values()), tuple(order))


def _local_arguments(
    graph: fx.Graph, operator: Operator, strategy: tuple[str, ...], sizes: Sequence[int]
) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments on one device: row-major tensors as placeholders, sizes local."""
    layouts, made = combine(operator, strategy)
    tensors = [_placeholder(graph, operator, i, layout, sizes) for i, layout in enumerate(layouts)]
    return localized(operator, strategy, made[0], sizes, operator.call(tensors))


def _placeholder(graph: fx.Graph, operator: Operator, i: int, layout: Layout, sizes: Sequence[int]) -> fx.Node:
    node = graph.placeholder(f"t{i}")
    type_ = operator.inputs[i]
    set_info(node, replace(info(node), types=(type_,)))
    node.meta["val"] = torch.empty(local_shape(type_, layout, sizes), dtype=getattr(torch, type_.dtype), device="meta")
    return node
