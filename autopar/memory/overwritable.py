"""What an operator may overwrite: memory that a graph has made itself, and reads for the last time.

An argument may be overwritten if it has memory of its own, all of it, row by row, which no later operator reads and the
graph does not return; and if the graph that runs the operator has made it: inputs, and what the forward pass saves, may
be read again by another backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar._torch_compat import OpOverload
from autopar.ir.node_info import info
from autopar.ir.ops.collectives import c10d
from autopar.ir.program import Program
from autopar.pipeline.forward_order import forward_nodes
from autopar.rules.rule import ROW_MAJOR
from autopar.rules.shapes.known_strides import has_strides, known_strides


class Memory:
    """Which tensors may be in the memory that a node has made, and when they are read.

    Not by the storages of ``meta["val"]``: a conditional copy, such as `contiguous`, may be its argument when it runs.
    """

    def __init__(self, program: Program) -> None:
        nodes = list(program.graph.graph.nodes)
        self.position = {n: i for i, n in enumerate(nodes)}
        self.known = known_strides(program.graph)
        self.forward = forward_nodes(program)
        self.makers: dict[fx.Node, frozenset[fx.Node]] = {}
        self.tensors: dict[fx.Node, list[fx.Node]] = {}
        # `no_sync` runs the reductions of gradients, and all that depends on them, after the rest of the pass.
        self.late: set[fx.Node] = set()
        for node in nodes:
            shown = _shown(node)
            self.makers[node] = frozenset(m for a in shown for m in self.makers[a]) if shown else frozenset({node})
            for maker in self.makers[node]:
                self.tensors.setdefault(maker, []).append(node)
            collective = info(node).collective
            gradient = collective is not None and collective.gradient
            if node.op != "output" and (gradient or any(a in self.late for a in node.all_input_nodes)):
                self.late.add(node)

    def may_overwrite(self, node: fx.Node) -> bool:
        """Whether a node may write into the memory of its first argument, or of all in that list."""
        given: Any = node.args[0]
        arguments: list[fx.Node] = list(given) if isinstance(given, list | tuple) else [given]
        makers = [self.makers[a] for a in arguments]
        if any(len(m) != 1 for m in makers) or len(frozenset().union(*makers)) < len(arguments):
            return False
        pairs = zip(arguments, (maker for (maker,) in makers), strict=True)
        return all(self._is_whole(a, maker) and self._dies(maker, node) for a, maker in pairs)

    def _is_whole(self, argument: fx.Node, maker: fx.Node) -> bool:
        """Whether a tensor is all of what an operator has made, row by row."""
        value, made = argument.meta["val"], maker.meta.get("val")
        if maker.op != "call_function" or not isinstance(made, torch.Tensor):
            return False
        # Half of a larger tensor would keep the whole of it, where the copy is of the half.
        same = value.dtype == made.dtype and value.numel() == made.numel()
        return same and has_strides(argument, ROW_MAJOR, self.known)

    def _dies(self, maker: fx.Node, node: fx.Node) -> bool:
        """Whether the memory is made, and read for the last time, by the graph of the node, and not after it."""
        users = {user for tensor in self.tensors[maker] for user in tensor.users}
        return all(
            (other in self.forward) == (node in self.forward)
            and self.position[other] <= self.position[node]
            and (other not in self.late or node in self.late)
            for other in (maker, *users)
        )


def _shown(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node's result may be in."""
    if node.op != "call_function":
        return []
    target: Any = node.target
    # Of Python functions nothing is known; a wait gives back what it waits for, though it does not say so.
    told = isinstance(target, OpOverload) and target is not c10d.wait_tensor.default
    if told and not any(r.alias_info for r in target._schema.returns):
        return []
    return node.all_input_nodes
