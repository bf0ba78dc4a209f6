"""`no_sync`: leave out the reduction of gradients, add up what would have been reduced, and reduce it once.

The collectives whose only purpose is to bring a gradient into its parameter's layout end the backward graph, and are
linear. Cut before them, it is a graph of local sums and a graph that reduces those; sums of the former go into the
latter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._torch_compat import BoxedCodeGen


class Postponed:
    """Gradients that wait for their reduction.

    Attributes:
        active: whether `no_sync` is in force.
    """

    def __init__(self) -> None:
        """Nothing waits."""
        self.active = False
        self._waiting: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def add(self, step: Any, values: list[torch.Tensor]) -> None:
        """Add what the first of `split_reductions`'s graphs returned."""
        if id(step) not in self._waiting:
            self._waiting[id(step)] = (step, [v.clone() for v in values])
            return
        for total, value in zip(self._waiting[id(step)][1], values, strict=True):
            total.add_(value)

    def take(self) -> list[tuple[Any, list[torch.Tensor]]]:
        """Everything that waits, in the order of its first addition; nothing waits afterwards."""
        found = list(self._waiting.values())
        self._waiting.clear()
        return found


def split_reductions(backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """``(compute, reduce)``: the first takes what ``backward`` takes, the second what the first returns."""
    late: set[fx.Node] = set()
    for node in backward.graph.nodes:
        collective = node.meta.get("collective")
        starts = collective is not None and collective.gradient
        if node.op != "output" and (starts or any(a in late for a in node.all_input_nodes)):
            late.add(node)
    order = {n: i for i, n in enumerate(backward.graph.nodes)}
    late |= _preparations(backward.graph, late)
    outputs = backward.graph.output_node()
    used = {a for n in (*late, outputs) for a in n.all_input_nodes if a not in late}
    between = sorted(used, key=order.__getitem__)
    return _part(backward, between, late, compute=True), _part(backward, between, late, compute=False)


def _preparations(graph: fx.Graph, late: set[fx.Node]) -> set[fx.Node]:
    """Nodes that feed only late ones and whose value is no tensor to add up, such as a tuple before its getitem."""
    found: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node in late or isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if node.users and all(u in late or u in found for u in node.users):
            found.add(node)
    return found


def _part(backward: fx.GraphModule, between: list[fx.Node], late: set[fx.Node], *, compute: bool) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    if not compute:
        for node in between:
            known[node] = graph.placeholder(node.name)
    for node in backward.graph.nodes:
        if node.op == "output" or (node in late) == compute or node in known:
            continue
        if node.op == "placeholder" and not compute:
            continue
        known[node] = graph.node_copy(node, known.__getitem__)
        known[node].meta = dict(node.meta)
    finals: Any = backward.graph.output_node().args[0]
    values = between if compute else finals
    graph.output([known[v] if isinstance(v, fx.Node) else None for v in values])
    graph.set_codegen(BoxedCodeGen())
    return fx.GraphModule(backward, graph)
