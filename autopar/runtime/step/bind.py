"""`bind`: put this rank's process groups and coordinates into a graph that names mesh axes.

Before: ``all_reduce(x, "sum", "gpu")`` and ``mul(axis_index("gpu"), 8)``.
After, at coordinate 2: ``all_reduce(x, "sum", "17")`` and ``16``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autopar._torch_compat import LazyGraphModule
from autopar.ir.ops.collectives import GROUP_ARGUMENT, axis_index


def bind(graph: fx.GraphModule, groups: Mapping[str, str], coordinates: Mapping[str, int]) -> fx.GraphModule:
    """The graph of one rank; the one given is not changed.

    Args:
        graph: names mesh axes where it would name process groups, and has `axis_index` nodes.
        groups: name of the process group along each axis.
        coordinates: this rank's coordinate along each axis.
    """
    bound = fx.Graph()
    known: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        # `known` has numbers, too, where a node's value is one on this rank: they become constant arguments.
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        if node.op == "call_function" and node.target is axis_index:
            known[node] = coordinates[args[0] if args else kwargs["axis"]]
            continue
        if _is_arithmetic(node) and not _nodes(args, kwargs):
            known[node] = node.target(*args, **kwargs)
            continue
        copy = known[node] = bound.node_copy(node, known.__getitem__)
        # A dict of its own: what a rank's graph notes must not reach the graph of all ranks.
        copy.meta = dict(node.meta)
        position = GROUP_ARGUMENT.get(node.target)
        if position is not None:
            copy.update_arg(position, groups[args[position]])
    return LazyGraphModule(graph, bound)


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether the node computes with Python numbers, such as the offset of this rank's block."""
    return node.op == "call_function" and getattr(node.target, "__module__", "") in ("_operator", "builtins")


def _nodes(args: Any, kwargs: Any) -> bool:
    found: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        found.append(node)
        return node

    fx.map_arg((args, kwargs), note)
    return bool(found)
