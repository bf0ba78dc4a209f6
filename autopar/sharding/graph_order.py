"""The order of a rewritten graph: what in it is bound to no place, and `reorder`."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping

import torch
from torch import fx

from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import COALESCED, c10d
from autopar.ir.ops.host import to_device, to_host
from autopar.ir.ops.random import generator_state
from autopar.ir.program import GRADIENTS, Program, draws
from autopar.ir.quantized.operators import QUANTIZERS

aten = torch.ops.aten

_KEEPS_VALUES = frozenset({
    aten.reshape.default, aten.permute.default, aten.contiguous.default, aten.clone.default, aten._to_copy.default,
    aten.narrow.default, aten.select.int, aten.cat.default, operator.getitem, accumulate, c10d.wait_tensor.default,
    c10d.all_reduce.default, c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default,
    c10d.all_gather_into_tensor.default, *COALESCED.values(), *QUANTIZERS,
})  # fmt: skip
"""What a gradient passes on its way into its parameter's layout."""


def reorder(graph: fx.Graph, positions: Mapping[fx.Node, float]) -> None:
    """Bring nodes into the order of their positions; a node whose arguments come later follows them.

    Placeholders stay first, and the output last. Nodes with equal positions keep their order.

    Args:
        graph: changed in place.
        positions: of every node but placeholders and the output.

    Raises:
        ValueError: nodes take one another's results in a circle.
    """
    nodes = [n for n in graph.nodes if n in positions]
    number = {n: i for i, n in enumerate(nodes)}
    missing = {n: sum(a in number for a in n.all_input_nodes) for n in nodes}
    ready = [(positions[n], number[n]) for n in nodes if not missing[n]]
    heapq.heapify(ready)
    output, placed = graph.output_node(), 0
    while ready:
        node = nodes[heapq.heappop(ready)[1]]
        placed += 1
        output.prepend(node)
        for user in node.users:
            if user in number:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (positions[user], number[user]))
    if placed < len(nodes):
        stuck = next(n for n in nodes if missing[n] > 0)
        raise ValueError(f"node {stuck.name} takes what is computed from its own result")


def parameter_only(program: Program) -> list[fx.Node]:
    """What a rewritten graph computes from parameters, buffers and constants alone, in the graph's order.

    Random operators and generators' states are not among it, nor is what comes from host memory: these have their place
    in the order.
    """
    inputs = zip(program.placeholders, program.inputs, strict=True)
    found = dict.fromkeys(n for n, i in inputs if i.kind in ("parameter", "buffer"))
    for node in program.graph.graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function"
            and not draws(node)
            and node.target not in (to_host, to_device, generator_state)
            and all(a in found for a in node.all_input_nodes)
        ):
            found[node] = None
    return [n for n in found if n.op == "call_function"]


def gradient_moves(program: Program) -> list[fx.Node]:
    """Collectives that do nothing but bring gradients into their parameters' layouts, in the graph's order."""
    outputs = zip(program.outputs, program.output_values, strict=True)
    results = {v for o, v in outputs if o.kind not in GRADIENTS}
    found: set[fx.Node] = set()
    for node in reversed(program.graph.graph.nodes):
        if node.users and node not in results and all(u.op == "output" or u in found for u in node.users):
            if node.target in _KEEPS_VALUES:
                found.add(node)
    return [n for n in program.graph.graph.nodes if n in found and info(n).collective is not None]
