"""canonicalize_strides: what reads a tensor's storage names the elements that it reads.

`as_strided` depends on the strides of its argument, which a rewritten graph does not keep. It runs before every
other pass that changes a graph, since strides are those of the captured one.

Before::

    windows = aten.as_strided(x, [3, 4], [2, 1])      # x is [8]

After::

    start = aten.mul(aten.arange(0, 3), 2); index = aten.add(aten.reshape(start, [3, 1]), aten.arange(0, 4))
    windows = aten.index(aten.reshape(x, [8]), [index])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.ir.graph import copy_graph, inherit_origin, is_operator, user_line
from autopar.ir.module_outputs import pass_on
from autopar.ir.node_info import info, set_info, torch_meta
from autopar.ir.program import Program

aten = torch.ops.aten

_STRIDED = {aten.as_strided.default: 1, aten.as_strided_scatter.default: 2}


def canonicalize_strides(program: Program) -> Program:
    """Rewrite `as_strided` and its inverse into views and gathers of whole tensors; computes the same.

    Raises:
        CaptureError: one reads elements that are not its argument's.
    """
    if not any(is_operator(n) and n.target in _STRIDED for n in program.graph.graph.nodes):
        return program
    graph = copy_graph(program.graph)
    for node in list(graph.graph.nodes):
        if is_operator(node) and node.target in _STRIDED:
            _Rewriting(graph.graph, node).run()
    graph.graph.lint()
    graph.recompile()
    return replace(program, graph=graph)


class _Rewriting:
    """The replacement of one node."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node
        self.base = cast(fx.Node, node.args[0])
        self.source = cast(fx.Node, node.args[1]) if node.target is aten.as_strided_scatter.default else None
        size, stride, *rest = node.args[_STRIDED[cast(Any, node.target)] :]
        self.size, self.stride = cast("list[int]", size), cast("list[int]", stride)
        self.value = cast(torch.Tensor, self.base.meta["val"])
        own = int(self.value.storage_offset())
        # Offsets count from the storage's start; the argument may begin later.
        self.offset = (own if not rest or rest[0] is None else cast(int, rest[0])) - own

    def run(self) -> None:
        with self.graph.inserting_before(self.node):
            found = self.as_view() if self.is_whole() else self.as_gather()
        found.meta.update(torch_meta(self.node, but=("val",)))
        set_info(found, replace(info(self.node), module_outputs=info(found).module_outputs))
        pass_on(self.node, found)
        self.node.replace_all_uses_with(found)
        self.graph.erase_node(self.node)

    def is_whole(self) -> bool:
        """Whether it takes a tensor whole, in its own order."""
        whole = math.prod(self.size) == self.value.numel() and not self.offset
        return whole and in_order(self.value.shape, self.value.stride()) and in_order(self.size, self.stride)

    def as_view(self) -> fx.Node:
        source = self.base if self.source is None else self.source
        return self.call(aten.reshape.default, source, list(self.node.meta["val"].shape))

    def as_gather(self) -> fx.Node:
        strides = tuple(self.value.stride())
        # Dims from the outermost to the innermost in memory: permuted so, the argument is row-major.
        order = sorted(range(self.value.ndim), key=lambda d: (-strides[d], -self.value.shape[d]))
        shape = [self.value.shape[d] for d in order]
        # The last element that is read.
        reach = self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        if not in_order(shape, [strides[d] for d in order]) or self.offset < 0 or reach >= self.value.numel():
            raise CaptureError(
                f"{self.node.target} ({user_line(self.node)}) looks at memory beside its argument, which is a part of "
                f"another tensor (shape {list(self.value.shape)}, strides {list(strides)}); write it with "
                "slices or unfold(), or make the argument contiguous() first"
            )
        flat = self.call(aten.reshape.default, self.call(aten.permute.default, self.base, order), [-1])
        index = self.index()
        if self.source is None:
            return self.call(aten.index.Tensor, flat, [index])
        written = self.call(aten.index_put.default, flat, [index], self.source)
        back = [order.index(d) for d in range(len(order))]
        return self.call(aten.permute.default, self.call(aten.reshape.default, written, shape), back)

    def index(self) -> fx.Node:
        """Number of each element that is read, in the order of storage."""
        kind = {"dtype": torch.int64, "device": self.value.device}
        found: Any = None
        for d, (n, stride) in enumerate(zip(self.size, self.stride, strict=True)):
            # Broadcast over dims: the number of an element is the sum of its steps along each.
            steps = self.call(aten.mul.Tensor, self.call(aten.arange.default, n, **kind), stride)
            steps = self.call(aten.reshape.default, steps, [n, *[1] * (len(self.size) - d - 1)])
            found = steps if found is None else self.call(aten.add.Tensor, found, steps)
        if found is None:
            return self.call(aten.full.default, [], self.offset, **kind)
        return self.call(aten.add.Tensor, found, self.offset) if self.offset else found

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        # Fake tensors know shapes and strides only; nothing is computed.
        mode = self.value.fake_mode  # type: ignore[attr-defined]
        with mode, torch.no_grad():
            made.meta["val"] = target(*values[0], **values[1])
        # Explicit sizes, as canonical reshapes have.
        if target is aten.reshape.default and -1 in args[1]:
            made.args = (args[0], list(made.meta["val"].shape))
        inherit_origin(made, self.node)
        set_info(made, replace(info(made), internal=False))
        return made


def in_order(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements follow one another in memory; the stride of a dim of size 1 means nothing."""
    step = 1
    for n, s in reversed([(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]):
        if s != step:
            return False
        step *= n
    return True
