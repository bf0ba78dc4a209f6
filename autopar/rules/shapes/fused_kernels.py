"""`fused_operators`: which operators a compiler puts into one kernel, and what each of them then moves itself.

A compiler such as inductor computes pointwise operators, and reductions over the last dims, of values of one size in
one loop: what one of them makes for another stays in registers. What is counted of a kernel is what crosses its
boundary. Kernels end where a repeated block of the model does, as the regions that are compiled do.
Matrix products, attention, convolutions and collectives are kernels by themselves; so are reductions over other dims,
whose loops run in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar._torch_compat import OpOverload
from autopar.ir.graph import Value, block_of, is_backward, module_path, producer, tensor_arguments, values_of
from autopar.ir.program import Program
from autopar.rules.rule import Rule
from autopar.rules.shapes.kernel_shapes import called

aten = torch.ops.aten

NORMALIZING = frozenset((
    aten._softmax.default, aten._softmax_backward_data.default, aten._log_softmax.default,
    aten._log_softmax_backward_data.default, aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
    aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default,
))  # fmt: skip
"""They reduce over the last dims, and compute every element from that."""

REDUCING = frozenset(
    (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var_mean.correction)
)
"""Fused where they reduce over the last dims."""

ALIKE = frozenset((aten.native_dropout_backward.default, torch.ops.autopar.draw.default))
"""Pointwise, though torch does not tag them."""


@dataclass(frozen=True)
class Fused:
    """An operator in a kernel with others: what it moves between memory and registers.

    Attributes:
        reads: numbers of its tensor arguments that no operator before it in the kernel makes or has read.
        writes: numbers of its results that something outside of the kernel reads.
        launches: whether the kernel begins with it.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    launches: bool


def fused_operators(program: Program, rule: Callable[[fx.Node], Rule]) -> Mapping[fx.Node, Fused]:
    """Of every operator that is in a kernel with others.

    Args:
        program: canonical program. The forward and the backward pass are compiled apart.
        rule: of an operator node.
    """
    kernels = _Kernels(program, rule)
    for node in program.sources:
        kernels.add(node)
    return kernels.fused()


class _Kernels:
    """Kernels as they grow, operator by operator in the graph's order.

    An operator joins the kernel of a value that it reads, unless it also reads something that is computed from the
    kernel outside of it: no order of the two would be left.
    """

    def __init__(self, program: Program, rule: Callable[[fx.Node], Rule]) -> None:
        self.program, self.rule = program, rule
        self.of: dict[fx.Node, int] = {}
        self.members: list[list[fx.Node]] = []
        self.depends_on: dict[fx.Node, int] = {}
        """Kernels, as bits, that what an operator makes depends on, its own included."""

    def add(self, node: fx.Node) -> None:
        makers = [value[0] for value in self._read(node)]
        before = 0
        for maker in makers:
            before |= self.depends_on.get(maker, 0)
        if _loop(node) and not self.rule(node).view:
            self.of[node] = own = self._joined(node, makers)
            self.members[own].append(node)
            before |= 1 << own
        self.depends_on[node] = before

    def _joined(self, node: fx.Node, makers: Sequence[fx.Node]) -> int:
        """The number of the kernel that an operator is in, perhaps a new one."""
        for maker in makers:
            kernel = self.of.get(maker)
            if kernel is None or not self._alike(self.members[kernel][0], node):
                continue
            # What joins a kernel later may depend on more than its first members do: this is a cost, not an order.
            if not any(self.depends_on.get(m, 0) >> kernel & 1 for m in makers if self.of.get(m) != kernel):
                return kernel
        self.members.append([])
        return len(self.members) - 1

    def _alike(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether two operators run over as many elements, in one block and in one pass."""
        blocks = [block_of(module_path(n), self.program.blocks) for n in (node, other)]
        return _loop(node) == _loop(other) and is_backward(node) == is_backward(other) and blocks[0] == blocks[1]

    def fused(self) -> dict[fx.Node, Fused]:
        users: dict[Value, list[fx.Node]] = {}
        for node in self.program.sources:
            if not self.rule(node).view:
                for value in self._read(node):
                    users.setdefault(value, []).append(node)
        given = {self._seen(producer(n)) for n in self.program.output_values if n is not None}
        found = {}
        for kernel, members in enumerate(self.members):
            known: set[Value] = set()
            for node in members if len(members) > 1 else ():
                reads = []
                for i, value in enumerate(self._read(node)):
                    if value not in known and self.of.get(value[0]) != kernel:
                        reads.append(i)
                    known.add(value)
                writes = tuple(
                    i
                    for i in range(len(values_of(node)))
                    if (node, i) in given or any(self.of.get(u) != kernel for u in users.get((node, i), ()))
                )
                found[node] = Fused(tuple(reads), writes, node is members[0])
        return found

    def _read(self, node: fx.Node) -> list[Value]:
        return [self._seen(value) for value in self.program.sources[node]]

    def _seen(self, value: Value) -> Value:
        """What a view shows."""
        while value[0] in self.program.sources and self.rule(value[0]).view and self.program.sources[value[0]]:
            value = self.program.sources[value[0]][0]
        return value


def _loop(node: fx.Node) -> int:
    """Elements that the loop of an operator's kernel runs over; 0 of one that is not fused."""
    target = called(node)
    if not isinstance(target, OpOverload):
        return 0
    if torch.Tag.pointwise in target.tags or target in ALIKE:
        return max(v.numel() for v in values_of(node) if v is not None)
    if target in NORMALIZING or target in REDUCING:
        reduced = tensor_arguments(node)[0].meta["val"]
        return reduced.numel() if target in NORMALIZING or _over_last_dims(node, reduced.dim()) else 0
    return 0


def _over_last_dims(node: fx.Node, dims: int) -> bool:
    """Whether a reduction is over dims behind which no other is left."""
    over = node.args[1] if len(node.args) > 1 else None
    if over is None or over == []:
        return True
    numbers = over if isinstance(over, list | tuple) else [over]
    return sorted(d % dims for d in numbers) == list(range(dims - len(numbers), dims))  # type: ignore[operator]
