"""Values of nodes that no input has a part in."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, OpOverload
from autopar.ir.graph import map_nodes

aten = torch.ops.aten

FILLED = {aten.zeros.default: 0, aten.ones.default: 1, aten.full.default: None}

_LARGEST = 2**22
"""Elements of a leaf that is computed to be looked at."""


class Constants:
    """Values of nodes that no input has a part in, where they are small."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph, self._known = graph, set[fx.Node]()
        self._values: dict[fx.Node, torch.Tensor | None] = {}
        for node in graph.graph.nodes:
            if node.op == "get_attr" or (_is_function(node) and self._known.issuperset(node.all_input_nodes)):
                self._known.add(node)

    def number(self, node: Any) -> Any:
        """The number that all elements are; None: there is none, or nobody knows."""
        if not isinstance(node, fx.Node):
            return node
        if node.target in FILLED:
            filled = node.args[1] if node.target is aten.full.default else FILLED[node.target]
            return None if isinstance(filled, fx.Node) else filled
        if node.target is aten.expand.default:
            return self.number(node.args[0])
        value = self.value(node)
        if value is None or not value.numel() or bool((value != value.reshape(-1)[0]).any()):
            return None
        return value.reshape(-1)[0].item()

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """A node's value; None if it depends on an input, on chance or on memory, or if it is too large."""
        if node not in self._known or value_of(node).numel() > _LARGEST:
            return None
        if node not in self._values:
            self._values[node] = self._computed(node)
        return self._values[node]

    def _computed(self, node: fx.Node) -> torch.Tensor | None:
        if node.op == "get_attr":
            found = getattr(self._graph, str(node.target))
            return found.cpu() if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor) else None
        if any(self.value(a) is None for a in node.all_input_nodes):
            return None
        args, kwargs = map_nodes((node.args, node.kwargs), self.value)
        kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        target: Any = node.target
        try:
            with torch.no_grad():
                result: torch.Tensor = target(*args, **kwargs)
        except RuntimeError:  # not on a CPU, or not in this dtype
            return None
        return result


def _is_function(node: fx.Node) -> bool:
    """Whether equal arguments give equal results, which nothing changes later."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    chance = torch.Tag.nondeterministic_seeded in target.tags or "empty" in str(target)
    return not chance and not target._schema.is_mutable and not str(target).startswith("autopar.draw")


def value_of(node: Any) -> torch.Tensor:
    """The tensor that a node is said to have, of a shape and a dtype."""
    value: torch.Tensor = node.meta["val"]
    return value
