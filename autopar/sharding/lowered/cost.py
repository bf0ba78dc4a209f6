"""What emitted code costs that is no operator of the plan: of passes, and of lowerings, which are emitted to be priced.

A lowering is emitted into a graph of its own on meta tensors, and its nodes are priced as those of the rewritten graph
are. Strategies of operators are many, but only few have lowerings, and each of these is emitted once. A ring has as
many steps as devices; all but the first and the last are alike, so that a long one is priced by a short one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopar._torch_compat import storage_id
from autopar.costs.kernels import Array, Work, kernel_seconds, stream
from autopar.costs.outer_exchange import dequantizing, quantizing
from autopar.ir.graph import tensor_arguments, values_of
from autopar.ir.layout import Layout, local_shape
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.collectives import Collective, c10d
from autopar.ir.ops.rows import add_rows_, fill_rows_, new_rows
from autopar.ir.quantized.operators import QUANTIZERS, sum_from_blocks, to_blocks
from autopar.rules.remembered import remembered
from autopar.rules.shapes.kernel_shapes import called
from autopar.rules.shapes.known_strides import local_rule
from autopar.sharding.candidates import combine
from autopar.sharding.chunks.products import WRITES_PRODUCTS, rows_work
from autopar.sharding.dims import Operator
from autopar.sharding.lowered.arguments import localized
from autopar.sharding.lowered.emit import emit_lowering, lowered_letters
from autopar.sharding.redistribute.moves import Machine

SHORT_RING = 4
"""Steps of the ring by which longer ones are priced: the first and the last, and two between that are alike, as all
others are."""


@dataclass(frozen=True)
class _Kernel:
    """A kernel; two are equal if they are the same work."""

    work: Work = field(compare=False)
    figures: tuple[Any, ...]


_Event = _Kernel | Collective | int
"""A kernel, a collective that begins, or a wait for that which began as the last but so many, counted from 1."""


@dataclass(frozen=True)
class LoweredCost:
    """What a lowering emits, one after the other: `before`, `step` as often as `times` says, and `after`.

    Attributes:
        before: up to the steps of a ring that are alike.
        step: what one of them does.
        times: how many there are.
        after: the rest.
    """

    before: tuple[_Event, ...]
    step: tuple[_Event, ...] = ()
    times: int = 0
    after: tuple[_Event, ...] = ()

    @property
    def events(self) -> tuple[_Event, ...]:
        """All of it."""
        return (*self.before, *self.step * self.times, *self.after)

    @cached_property
    def kernels(self) -> Work:
        """All kernels."""
        works = [event.work for event in self.events if isinstance(event, _Kernel)]
        return Work.join(works) if works else stream(np.zeros(0))

    @cached_property
    def collectives(self) -> Mapping[Collective, int]:
        """How often each collective begins."""
        found: Counter[Collective] = Counter()
        for made, times in self._counted:
            if isinstance(made, Collective):
                found[made] += times
        return found

    @property
    def _counted(self) -> list[tuple[_Event, int]]:
        """Events, of those of a step one, and how often each happens."""
        parts = (self.before, 1), (self.step, self.times), (self.after, 1)
        return [(event, times) for events, times in parts for event in events]

    @cached_property
    def _kernels(self) -> tuple[Work, NDArray[np.int64]]:
        """Kernels, of those of a step one, and how often each runs."""
        kernels = [(event.work, times) for event, times in self._counted if isinstance(event, _Kernel)]
        works = Work.join([work for work, _ in kernels]) if kernels else stream(np.zeros(0))
        return works, np.array([n for _, n in kernels], dtype=np.int64)

    def kernel_seconds(self, seconds: Callable[[Work], Array]) -> float:
        """Seconds of all kernels, by what gives those of some."""
        kernels, runs = self._kernels
        return float(seconds(kernels) @ runs)

    def seconds(self, dtype: str, machine: Machine) -> float:
        """Seconds of all of it: a collective runs beside what is emitted before its wait, one at a time on an axis."""
        kernels = iter(kernel_seconds(self._kernels[0], dtype, machine.device).tolist())
        sent = {made: machine.seconds(made) for made in self.collectives}
        before, step, after = (
            [next(kernels) if isinstance(e, _Kernel) else e for e in events]
            for events in (self.before, self.step, self.after)
        )
        clock = _Clock(sent, max((e for e in (*step, *after) if isinstance(e, int)), default=1))
        clock.run(before)
        clock.repeat(step, self.times)
        clock.run(after)
        return clock.now


_Timed = float | Collective | int
"""An event, of a kernel its seconds."""


class _Clock:
    """Runs kernels, by their seconds, and collectives beside them."""

    def __init__(self, sent: Mapping[Collective, float], waits: int) -> None:
        """``sent``: seconds of each collective; waits are for one of the last ``waits`` that began."""
        self.sent, self.waits, self.now = sent, waits, 0.0
        self.over: list[float] = []  # when each collective is
        self.free: dict[str, float] = {}  # from when each axis is

    def run(self, events: Sequence[_Timed]) -> None:
        """Run what happens one after the other; whole numbers are waits."""
        for event in events:
            if isinstance(event, Collective):
                begin = max(self.now, self.free.get(event.axis, 0.0))
                self.free[event.axis] = begin + self.sent[event]
                self.over.append(self.free[event.axis])
            elif isinstance(event, int):
                self.now = max(self.now, self.over[-event])
            else:
                self.now += event

    def repeat(self, step: Sequence[_Timed], times: int) -> None:
        """Run a step so often: once two took as long and left as much under way, all others do."""
        known = np.zeros(0)
        for left in reversed(range(times)):
            began = self.now
            self.run(step)
            under_way = (*self.over[-self.waits :], *self.free.values())
            state = np.array([self.now - began, *(max(t - self.now, 0.0) for t in under_way)])
            if len(state) == len(known) and np.abs(state - known).max() <= 1e-9 * state[0]:
                self._skip(left * float(state[0]))
                return
            known = state

    def _skip(self, seconds: float) -> None:
        """Let time pass in which as much is under way as now."""
        self.now += seconds
        self.over = [t + seconds for t in self.over]
        self.free = {axis: t + seconds for axis, t in self.free.items()}


def emitted_work(node: fx.Node) -> Work | None:
    """The kernel of a node that is no operator of the plan, or a view that may have to copy; None if it has none.

    It streams its memory, unless its results are views, and computes what the rule of its operator says.
    """
    if node.target in (c10d.wait_tensor.default, new_rows) or info(node).collective is not None:
        return None
    if node.target in WRITES_PRODUCTS:
        whole, rows = (a.meta["val"] for a in node.all_input_nodes[:2])
        return rows_work(len(rows), rows, whole.shape[1], whole.dtype)
    if node.target is add_rows_:
        return stream(3 * node.all_input_nodes[1].meta["val"].nbytes)
    if node.target is fill_rows_:
        filled: Any = node.args[1:4]
        (dim, blocks, start), whole = filled, node.meta["val"]
        return stream(whole.nbytes * (1 - blocks * start / whole.shape[dim]))
    if node.target in QUANTIZERS:
        return _quantizing(node)
    results = [v for v in values_of(node) if v is not None]
    sources = [a for a in tensor_arguments(node) if not _drawn(a)]
    inputs = [v for a in sources for v in values_of(a) if v is not None]
    storages = {storage_id(v) for v in inputs}
    if not results or all(storage_id(v) in storages for v in results):
        return None
    rule = local_rule(node, called(node))
    between = rule.between if rule is not None and len(sources) == len(tensor_arguments(node)) else 0.0
    work = stream(sum(v.nbytes for v in (*inputs, *results)) + between)
    return work if rule is None or not rule.flops else work.computing(rule.flops)


def _quantizing(node: fx.Node) -> Work:
    """The kernels between numbers and the bytes that stand for them, as one that moves as much."""
    (source,) = node.all_input_nodes
    bits: Any = node.args[2]
    given, made = source.meta["val"], node.meta["val"]
    if node.target is to_blocks:
        moved, kernels = quantizing(given.numel(), given.element_size(), bits)
    else:
        rows = len(given) if node.target is sum_from_blocks else 0
        moved, kernels = dequantizing(made.numel() * max(rows, 1), made.element_size(), bits, rows)
    return replace(stream(moved), launches=np.array([float(kernels)]))


def _drawn(node: fx.Node) -> bool:
    """Whether a tensor is not in memory: the kernel that reads it draws it by itself."""
    return any(t is not None and t.drawn for t in info(node).types)


@remembered(4096)
def lowered_cost(operator: Operator, strategy: tuple[str, ...], machine: Machine) -> LoweredCost | None:
    """What an operator's lowering costs under one strategy name an axis; None if there is none to emit.

    Of a long ring not all steps are emitted.
    """
    letters = lowered_letters(operator, strategy)
    if not letters or any(operator.rule.lower[c] is not operator.rule.lower[letters[0]] for c in letters):
        return None
    sizes = zip(strategy, machine.sizes, strict=True)
    steps = math.prod(n for name, n in sizes if name.partition(".")[0] in letters)

    def emitted(most_steps: int) -> tuple[list[_Event], list[int]]:
        return _emitted(operator, strategy, letters, machine, most_steps)

    found, began = emitted(min(steps, SHORT_RING))
    # There may be steps of which nothing is told.
    if steps <= SHORT_RING or (not began and found == emitted(SHORT_RING - 1)[0]):
        return LoweredCost(tuple(found))
    first, second, last = began[-3:] or (0, 0, 0)
    step = found[second:last]
    if not step or found[first:second] != step:
        return LoweredCost(tuple(emitted(steps)[0]))
    return LoweredCost(tuple(found[:last]), tuple(step), steps - SHORT_RING, tuple(found[last:]))


def _emitted(
    operator: Operator, strategy: tuple[str, ...], letters: Sequence[str], machine: Machine, most_steps: int
) -> tuple[list[_Event], list[int]]:
    """What a lowering does with at most so many steps of a ring, and where each of these begins."""
    graph, steps = fx.Graph(), list[int]()
    args, kwargs = _local_arguments(graph, operator, strategy, machine.sizes)
    emit_lowering(graph, operator, strategy, letters, machine, args, kwargs, most_steps, steps)
    found, began, before = list[_Event](), dict[fx.Node, int](), list[int]()
    for node in graph.nodes:
        before.append(len(found))
        if node.op != "call_function":
            continue
        made, work = info(node).collective, emitted_work(node)
        if made is not None and made.joined:
            continue
        if made is not None:
            began[node] = len(began)
            found.append(made)
        elif node.target is c10d.wait_tensor.default:
            if node.all_input_nodes[0] not in began:
                continue
            found.append(len(began) - began[node.all_input_nodes[0]])
        elif work is not None:
            found.append(_Kernel(work, tuple(np.ravel(getattr(work, f.name)).tolist() for f in fields(work))))
    return found, [before[i] for i in steps]


def _local_arguments(
    graph: fx.Graph, operator: Operator, strategy: tuple[str, ...], sizes: Sequence[int]
) -> tuple[list[Any], dict[str, Any]]:
    """The call's arguments on one device: row-major tensors as placeholders, sizes local."""
    layouts, made = combine(operator, strategy)
    tensors = [_placeholder(graph, operator, i, layout, sizes) for i, layout in enumerate(layouts)]
    return localized(operator, strategy, made[0], sizes, operator.call(tensors))


def _placeholder(graph: fx.Graph, operator: Operator, i: int, layout: Layout, sizes: Sequence[int]) -> fx.Node:
    node = graph.placeholder(f"t{i}")
    type_ = operator.inputs[i]
    set_info(node, replace(info(node), types=(type_,)))
    node.meta["val"] = torch.empty(local_shape(type_, layout, sizes), dtype=getattr(torch, type_.dtype), device="meta")
    return node
