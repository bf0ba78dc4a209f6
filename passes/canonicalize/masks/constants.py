"""Values of nodes that no input has a part in."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, OpOverload
from autopar.ir.graph import map_nodes

aten = torch.ops.aten

SAME = (
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.expand.default,
    aten.lift_fresh_copy.default, aten._to_copy.default, aten.to.dtype,
)  # fmt: skip
"""Operators that give the same elements, broadcast, or in another dtype."""

VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default)

FILLED = {aten.zeros.default: 0, aten.ones.default: 1, aten.full.default: None}
LIKE = {
    aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.full_like.default: None,
    aten.new_zeros.default: 0, aten.new_ones.default: 1, aten.new_full.default: None,
}  # fmt: skip
NUMBERS: dict[Any, Any] = FILLED | LIKE
"""Operators that make one number, and which; None: it is their last argument."""

_LARGEST = 2**22
"""Elements of a leaf that is computed to be looked at."""


class Constants:
    """Values of nodes that no input has a part in, where they are small."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph, self._known = graph, set[fx.Node]()
        self._values: dict[fx.Node, torch.Tensor | None] = {}
        self._alike: dict[fx.Node, bool] = {}
        for node in graph.graph.nodes:
            if node.op == "get_attr" or (_is_function(node) and self._known.issuperset(node.all_input_nodes)):
                self._known.add(node)

    def number(self, node: Any) -> Any:
        """The number that all elements are; None: there is none, or nobody knows."""
        if not isinstance(node, fx.Node):
            return node
        if node.target in FILLED or node.target in LIKE:
            filled: Any = NUMBERS[node.target]
            filled = node.args[-1] if filled is None else filled
            return None if isinstance(filled, fx.Node) else filled
        if node.target is aten.expand.default:
            return self.number(node.args[0])
        value = self.rows(node)
        if value is None or not value.numel() or bool((value != value.reshape(-1)[0]).any()):
            return None
        return value.reshape(-1)[0].item()

    def rows(self, node: fx.Node) -> torch.Tensor | None:
        """A node's value; where all samples of a batch have the same, that of the first."""
        value = self.value(node)
        return value[:1] if value is not None and self._are_alike(node) else value

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """A node's value; None if it depends on an input, on chance or on memory, or if it is too large."""
        if node not in self._known:
            return None
        size = value_of(node).numel()
        if size > _LARGEST and (not self._are_alike(node) or size > _LARGEST * len(value_of(node))):
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
        # Of a batch of equal samples one is computed, however large it is.
        once = self._are_alike(node)
        args, kwargs = map_nodes((node.args, node.kwargs), self.rows if once else self.value)
        kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        target: Any = node.target
        shape = list(value_of(node).shape)
        if once and target in (*FILLED, *VIEWS, aten.expand.default) and target is not aten.unsqueeze.default:
            at = 0 if target in FILLED else 1
            args = (*args[:at], [1, *shape[1:]], *args[at + 1 :])
        elif once and target is aten.index.Tensor:
            args = (args[0], [torch.zeros_like(args[1][0][:1]), *args[1][1:]])
        try:
            with torch.no_grad():
                result: torch.Tensor = target(*args, **kwargs)
        except RuntimeError:  # not on a CPU, or not in this dtype
            return None
        return result.expand(shape) if once else result

    def _are_alike(self, node: fx.Node) -> bool:
        """Whether a tensor with several elements along its first dim has the same in all of them, by how it is made."""
        if node not in self._alike:
            value = node.meta.get("val")
            several = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) > 1
            self._alike[node] = several and node in self._known and self._made_alike(node)
        return self._alike[node]

    def _made_alike(self, node: fx.Node) -> bool:
        args: Any = node.args
        target: Any = node.target
        if target in FILLED:
            return True

        def alike(source: Any, ndim: int = value_of(node).ndim) -> bool:
            """Whether an argument that is broadcast has no more than one row, or equal ones."""
            if not isinstance(source, fx.Node):
                return True
            return value_of(source).ndim < ndim or len(value_of(source)) == 1 or self._are_alike(source)

        if target is aten.expand.default or target in SAME or torch.Tag.pointwise in getattr(target, "tags", ()):
            return all(alike(n) for n in node.all_input_nodes)
        ndim = value_of(node).ndim
        if target in (aten.cat.default, aten.cumsum.default, aten.slice.Tensor, aten.unsqueeze.default):
            dim = args[1] if len(args) > 1 else 0
            return dim % ndim != 0 and all(map(self._are_alike, node.all_input_nodes))
        if target in VIEWS:
            return len(value_of(args[0])) == len(value_of(node)) and self._are_alike(args[0])
        # Rows by their number, and the same elements of each.
        if target is aten.index.Tensor and len(args[1]) > 1 and None not in args[1] and self._are_alike(args[0]):
            return value_of(args[1][0]).ndim == ndim and all(map(alike, args[1][1:]))
        return False


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
