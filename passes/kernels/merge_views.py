"""merge_views: a view of a view becomes one view, and what gives a tensor back as it is goes.

Before::

    parted = reshape(gathered, [4, 1, 1024]); swapped = permute(parted, [1, 0, 2])     # only a dim of size 1 moves
    joined = reshape(swapped, [64, 64]); weight = contiguous(joined); t = permute(weight, [1, 0])

After::

    joined = reshape(gathered, [64, 64]); t = permute(joined, [1, 0])

A view costs a call, as a matrix product does, and moves of whole blocks along the first dim need none. Values do not
change, and neither do copies: what lays memory out anew stays, and so does a view that is an output of the graph where
the output would be an input, or another output. It comes late, for it forgets which layout a value has: one tensor may
stand for the same value in several.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import storage_id
from autopar.ir.graph import is_backward
from autopar.ir.node_info import graph_info, info, set_graph_info
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_hoisted
from autopar.rules.rule import ROW_MAJOR
from autopar.rules.shapes.known_strides import has_strides, known_strides

aten = torch.ops.aten

_RESHAPES = frozenset({aten.reshape.default, aten.view.default, aten._unsafe_view.default})
_ALIASES = frozenset({aten.alias.default, aten.detach.default})
_SHAPED = _RESHAPES | {
    aten.expand.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.narrow.default,
}  # fmt: skip
"""Views that, where they leave the shape as it is, leave the tensor as it is."""


def merge_views(program: Program, plan: Plan) -> Program:
    """Remove views and conditional copies that do nothing, and merge chains of views that keep the elements' order."""
    del plan
    graph, merger = program.graph.graph, _Merger(program)
    for node in list(graph.nodes):
        merger.visit(node)
    for node in reversed(list(graph.nodes)):
        if node in merger.passed and not node.users:
            graph.erase_node(node)
    known = graph_info(program.graph)
    invariants = tuple(name for name in known.invariants if name != "placed")
    set_graph_info(program.graph, replace(known, invariants=invariants))
    program.graph.recompile()
    return program


class _Merger:
    """Visits nodes in order.

    Attributes:
        passed: nodes that some others do not take any more.
    """

    def __init__(self, program: Program) -> None:
        self.known = known_strides(program.graph)
        self.per_step = program.per_step
        # With what must not become an output a second time: inputs and constants.
        self.fixed = {n for n in program.graph.graph.nodes if n.op in ("placeholder", "get_attr")}
        self.outputs = {v for v in program.output_values if v is not None}
        self.passed: set[fx.Node] = set()

    def visit(self, node: fx.Node) -> None:
        """Take a node's value from further up, and let its users do so if it does nothing."""
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            return
        if node.target in _RESHAPES and (root := self._root(node)) is not node.args[0]:
            own: Any = node.args[1]
            # A size that is open stays so: the value's own is a guess.
            shape = own if -1 in own else list(node.meta["val"].shape)
            node.target, node.args = aten.reshape.default, (root, shape)
        source: Any = node.args[0]
        if not self._does_nothing(node, source) or not self._together(node, source):
            return
        if node in self.outputs:
            if source in self.fixed or source in self.outputs:
                return
            self.outputs.add(source)
        node.replace_all_uses_with(source)
        self.passed.add(node)

    def _root(self, node: fx.Node) -> fx.Node:
        """What a reshape can take instead of its argument: that has the same elements in the same order."""
        root: Any = node.args[0]
        while self._keeps_order(root) and self._together(node, root) and self._place(node) == self._place(root):
            # A reshape that copies stays where others take its result, too: they would all copy.
            if len(root.users) > 1 and root not in self.known:
                break
            self.passed.add(root)
            root = root.args[0]
        assert isinstance(root, fx.Node)
        return root

    def _keeps_order(self, node: fx.Node) -> bool:
        """Whether a node shows its argument's memory, element by element."""
        if node.target not in _RESHAPES and node.target is not aten.permute.default:
            return False
        source: Any = node.args[0]
        value: torch.Tensor = source.meta["val"]
        if storage_id(node.meta["val"]) != storage_id(value):
            return False
        if node.target in _RESHAPES:
            return True
        order: Any = node.args[1]
        moved = [d % value.ndim for d in order if value.shape[d] != 1]
        return moved == sorted(moved)

    def _does_nothing(self, node: fx.Node, source: fx.Node) -> bool:
        if node.target is aten.contiguous.default:
            return has_strides(source, ROW_MAJOR, self.known)
        if node.target in _ALIASES:
            return True
        if node.target is aten.permute.default:
            order: Any = node.args[1]
            return [d % len(order) for d in order] == list(range(len(order)))
        return node.target in _SHAPED and node.meta["val"].shape == source.meta["val"].shape

    def _together(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether two nodes run on the same devices and as often."""
        return info(node).stage == info(source).stage and is_hoisted(node) == is_hoisted(source)

    def _place(self, node: fx.Node) -> tuple[bool, bool]:
        """Which graph of a step runs a node: what is taken from further up must not be saved in its place."""
        return is_backward(node), node in self.per_step
