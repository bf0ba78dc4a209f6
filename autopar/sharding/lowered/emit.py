"""`emit_lowering`: the code of a strategy that needs other code than the operator's own, on local tensors.

The pass that rewrites graphs and the cost of the strategy call it alike: what is predicted is what is emitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import map_nodes
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.balanced_attention import swap_blocks
from autopar.ir.ops.collectives import Collective, axis_index, c10d
from autopar.ir.ops.sequence.send_block import MIRROR, NEXT, PREVIOUS, send_block
from autopar.rules.shapes.local_shapes import value_of_call
from autopar.sharding.candidates import letter_parts, strategies
from autopar.sharding.dims import Operator
from autopar.sharding.redistribute.moves import WIRE, Machine

aten = torch.ops.aten


def lowered_letters(operator: Operator, names: Sequence[str]) -> list[str]:
    """Letters with a lowering that are split by one strategy name an axis."""
    if not operator.rule.lower:
        return []
    by_name = {s.name: s for s in strategies(operator)}
    factors = [by_name[n].factor for n in names]
    return list(dict.fromkeys(f[0] for f in factors if f is not None and f[0] in operator.rule.lower))


class LocalTracer(fx.proxy.GraphAppendingTracer):
    """Gives every node that it makes its local tensor at once."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A node with its local tensor."""
        node = super().create_node(*args, **kwargs)
        with torch.no_grad():
            node.meta["val"] = value_of_call(node)
        return node


@dataclass
class Context:
    """A lowering's view of the device that its code runs on, see `autopar.rules.rule.Lowering`."""

    tracer: fx.proxy.GraphAppendingTracer
    operator: Operator
    strategy: tuple[str, ...]
    axes: tuple[int, ...]
    machine: Machine
    most_steps: int = 0
    began: list[int] = field(default_factory=list)

    @property
    def parts(self) -> int:
        """Devices that share the letter."""
        return math.prod(self.machine.sizes[a] for a in self.axes)

    @property
    def steps(self) -> int:
        """Steps of a ring: one for each device, or fewer where code is emitted to be priced."""
        return min(self.parts, self.most_steps or self.parts)

    def each_step(self) -> Iterator[int]:
        """The numbers of a ring's steps; ``began`` gets after how many nodes of the graph each begins."""
        for step in range(self.steps):
            self.began.append(len(self.tracer.graph.nodes))
            yield step

    @property
    def axis_count(self) -> int:
        """Over how many axes the letter is split."""
        return len(self.axes)

    def axis_index(self) -> Any:
        """This device's number among them: the first axis is the outermost."""
        index: Any = 0
        for a in self.axes:
            # A node, not a number: the graph is the same on every rank.
            here = self._call(axis_index, self.machine.names[a])
            index = here if a == self.axes[0] else index * self.machine.sizes[a] + here
        return index

    def global_size(self, letter: str) -> int:
        """Global size of a letter."""
        return math.prod(f.size for f in self.operator.letters[letter].factors)

    def local_size(self, letter: str) -> int:
        """Size of a letter on this device."""
        return self.global_size(letter) // letter_parts(self.strategy, letter, self.machine.sizes)

    def all_reduce(self, x: Any, op: str, joined: bool = False) -> Any:
        """Reduce over the devices that share the letter."""
        for a in self.axes:
            if self.machine.sizes[a] == 1:
                continue
            name = self.machine.names[a]
            made = self._issue("all_reduce", a, _value(x).nbytes, c10d.all_reduce.default, x.node, op, name)
            collective = info(made).collective
            assert collective is not None
            set_info(made, replace(info(made), collective=replace(collective, joined=joined)))
            x = self._call(c10d.wait_tensor.default, made)
        return x

    def swap_blocks(self, blocks: Any, back: bool) -> Any:
        """The two blocks ``[2 size, ...]`` that balance, over the one axis of the split, or back."""
        (axis,) = self._real_axes() or self.axes[:1]
        name, index = self.machine.names[axis], self._call(axis_index, self.machine.names[axis])
        arguments = (swap_blocks, blocks.node, index.node, self.parts, back, name)
        return self._communicate("all_to_all", axis, _value(blocks).nbytes, *arguments)

    def shift(self, x: Any, back: bool = False) -> Any:
        """What the device before this one has (or the one after it); around the ends."""
        inner: Any = None
        size = 1
        for a in reversed(self._real_axes()):
            came = self._send(x, a, PREVIOUS if back else NEXT)
            # At an end of the inner axes a device gets what is beyond it from its neighbor along the next outer one.
            x = came if inner is None else _on_device(inner, size - 1 if back else 0, came, x)
            here: Any = self._call(axis_index, self.machine.names[a])
            inner, size = here if inner is None else here * size + inner, size * self.machine.sizes[a]
        return x

    def start_shift(self, x: Any) -> Callable[[], Any]:
        """Begin a shift over the one axis of the split; what is called for what came waits for it."""
        axes = self._real_axes()
        if not axes:
            return lambda: x
        (axis,) = axes
        parts, name = self.machine.sizes[axis], self.machine.names[axis]
        x, index = aten.contiguous.default(x), self._call(axis_index, name)
        made = self._issue("send", axis, _value(x).nbytes, send_block, x.node, index.node, parts, NEXT, name)
        return lambda: self._call(c10d.wait_tensor.default, made)

    def mirror(self, x: Any) -> Any:
        """What the device opposite has."""
        for a in self._real_axes():
            x = self._send(x, a, MIRROR)
        return x

    def all_gather(self, x: Any) -> Any:
        """What each device has, in the order of the devices, ``[parts, ...]``."""
        shape, own = list(_value(x).shape), _value(x).dtype
        x = aten.contiguous.default(aten.unsqueeze.default(self._wired(x), 0))
        for a in reversed(self._real_axes()):
            parts, name = self.machine.sizes[a], self.machine.names[a]
            size = _value(x).nbytes * parts
            x = self._communicate("all_gather", a, size, c10d.all_gather_into_tensor.default, x.node, parts, name)
        x = aten.reshape.default(x, [self.parts, *shape])
        return x if _value(x).dtype == own else aten._to_copy.default(x, dtype=own)

    def _real_axes(self) -> list[int]:
        """The axes of the split that have several devices."""
        return [a for a in self.axes if self.machine.sizes[a] > 1]

    def _send(self, x: Any, axis: int, to: str) -> Any:
        parts, name, own = self.machine.sizes[axis], self.machine.names[axis], _value(x).dtype
        x, index = self._wired(x), self._call(axis_index, name)
        x = self._communicate("send", axis, _value(x).nbytes, send_block, x.node, index.node, parts, to, name)
        return x if _value(x).dtype == own else aten._to_copy.default(x, dtype=own)

    def _wired(self, x: Any) -> Any:
        """A tensor as numbers that every backend takes."""
        wire = WIRE.get(str(_value(x).dtype).removeprefix("torch."))
        return x if wire is None else aten._to_copy.default(x, dtype=getattr(torch, wire))

    def _communicate(self, kind: str, axis: int, size: float, target: Any, *args: Any) -> Any:
        return self._call(c10d.wait_tensor.default, self._issue(kind, axis, size, target, *args))

    def _issue(self, kind: str, axis: int, size: float, target: Any, *args: Any) -> fx.Node:
        made = self._call(target, *args)
        collective = Collective(kind, self.machine.names[axis], float(size))
        set_info(made.node, replace(info(made.node), collective=collective))
        return made.node

    def _call(self, target: Any, *args: Any) -> fx.Proxy:
        return fx.Proxy(self.tracer.create_node("call_function", target, args, {}), self.tracer)


def _value(x: fx.Proxy) -> torch.Tensor:
    value: torch.Tensor = x.node.meta["val"]
    return value


def _on_device(index: Any, at: int, there: Any, here: Any) -> Any:
    """One tensor where the device's number is ``at``, another one elsewhere."""
    number = aten.new_full.default(here, [1], index, dtype=torch.int64)
    return aten.where.self(aten.eq.Scalar(number, at), there, here)


def emit_lowering(
    graph: fx.Graph,
    operator: Operator,
    strategy: tuple[str, ...],
    letters: Sequence[str],
    machine: Machine,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    most_steps: int = 0,
    began: list[int] | None = None,
) -> Any:
    """Emit the code of a strategy where the graph inserts nodes.

    Args:
        graph: whose nodes know their local tensors (``meta["val"]``).
        operator: in whose place the code is.
        strategy: a name for each axis.
        letters: those with a lowering that the strategy splits, see `lowered_letters`.
        machine: the mesh.
        args: of the call, tensors as nodes, sizes local.
        kwargs: of the call.
        most_steps: of a ring, whose steps are alike; 0: as many as it has.
        began: gets after how many nodes of the graph each step of a ring begins.

    Returns:
        What the lowering returns, see `autopar.rules.rule.Lowering`.
    """
    axes = tuple(a for a, name in enumerate(strategy) if name.partition(".")[0] in letters)
    tracer = LocalTracer(graph)
    context = Context(tracer, operator, strategy, axes, machine, most_steps, [] if began is None else began)
    proxies, named = map_nodes((tuple(args), dict(kwargs)), lambda n: fx.Proxy(n, tracer))
    return operator.rule.lower[letters[0]].build(context, *proxies, **named)
