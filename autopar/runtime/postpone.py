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

    @property
    def any(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def holds(self, step: Any) -> bool:
        """Whether something of a step waits."""
        return id(step) in self._waiting

    def take(self) -> list[tuple[Any, list[torch.Tensor]]]:
        """Everything that waits, in the order of its first addition; nothing waits afterwards."""
        found = list(self._waiting.values())
        self._waiting.clear()
        return found


def split_reductions(backward: fx.GraphModule, results: int = 0) -> tuple[fx.GraphModule, fx.GraphModule]:
    """``(compute, reduce)``: the first takes what ``backward`` takes, the second what the first returns.

    Args:
        backward: a graph that returns gradients.
        results: how many other results it returns first: ``compute`` returns them first, ``reduce`` does not take
            them.
    """
    late: set[fx.Node] = set()
    for node in backward.graph.nodes:
        collective = node.meta.get("collective")
        starts = collective is not None and collective.gradient
        if node.op != "output" and (starts or any(a in late for a in node.all_input_nodes)):
            late.add(node)
    order = {n: i for i, n in enumerate(backward.graph.nodes)}
    late |= _preparations(backward.graph, late)
    outputs: Any = backward.graph.output_node().args[0]
    first, gradients = outputs[:results], outputs[results:]
    used = {a for n in late for a in n.all_input_nodes} | {v for v in gradients if v is not None}
    between = sorted(used - late, key=order.__getitem__)
    compute = _part(backward, [n for n in backward.graph.nodes if n not in late], [*first, *between])
    return compute, _part(backward, [n for n in backward.graph.nodes if n in late], gradients, between)


def _preparations(graph: fx.Graph, late: set[fx.Node]) -> set[fx.Node]:
    """Nodes that feed only late ones and whose value is no tensor to add up, such as a tuple before its getitem."""
    found: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node in late or isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if node.users and all(u in late or u in found for u in node.users):
            found.add(node)
    return found


def _part(
    backward: fx.GraphModule, nodes: list[fx.Node], outputs: list[Any], between: list[fx.Node] | None = None
) -> fx.GraphModule:
    """The graph of some of the nodes, which takes ``between``, or what the whole takes."""
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in between or ()}
    for node in nodes:
        if node.op != "output":
            known[node] = graph.node_copy(node, known.__getitem__)
    for node, copied in known.items():
        copied.meta = dict(node.meta)
    graph.output([known[v] if isinstance(v, fx.Node) else None for v in outputs])
    graph.set_codegen(BoxedCodeGen())
    return fx.GraphModule(backward, graph)
