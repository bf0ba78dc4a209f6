"""What one device holds while a rewritten graph runs: tensors, from the operator that makes them to the last user."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar._torch_compat import storage_id
from autopar.costs.memory import convolution_copies, optimizer_state_bytes
from autopar.errors import PlanError
from autopar.ir.graph import block_of, is_backward, module_path, tensor_arguments, values_of
from autopar.ir.node_info import graph_info, info, set_graph_info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import c10d
from autopar.ir.ops.host import to_device, to_host
from autopar.ir.plan import Plan
from autopar.ir.program import GRADIENTS, Program, is_hoisted
from autopar.memory.peak_snapshot import LiveTensor, PeakSnapshot
from autopar.rules.shapes.local_shapes import propagate

aten = torch.ops.aten
KINDS = {"parameter": "parameters", "buffer": "buffers", "batch": "batch", "tangent": "batch"}


@dataclass(frozen=True)
class Change:
    """Memory that is taken or given back.

    Attributes:
        node: by which operator; None before the first.
        starts: whether it happens as the operator starts, or after it.
        category: see `liveness`.
        size: bytes, negative where they are given back.
        made: the operator that makes what the memory is for; None for what is there before the first.
    """

    node: fx.Node | None
    starts: bool
    category: str
    size: float
    made: fx.Node | None = None


def liveness(program: Program, plan: Plan) -> list[Change]:
    """Everything that is taken and given back in a step, in no order.

    Categories: ``parameters``, ``buffers``, ``batch`` and ``optimizer`` are held all the time, ``gradients`` and
    ``results`` from when they are made; ``activations`` are what the forward makes and the backward takes;
    ``communication`` is what collectives receive, and what their library copies; ``transient`` the rest. Of a step in
    microbatches it is the last of these, with sums that are held all the time, and with what all of them share, which
    is held to the end. What lies on the host takes nothing of the device.

    Args:
        program: as `autopar.compiler.rewrite` returns it.
        plan: the plan it was rewritten under.

    Raises:
        PlanError: the program is not rewritten.
    """
    if "local" not in graph_info(program.graph).invariants:
        raise PlanError("the program is not a rewritten one; give what compiler.rewrite(program, plan) returns")
    known = graph_info(program.graph)
    set_graph_info(program.graph, replace(known, storages_known=False))
    if not known.storages_known:
        propagate(program, plan, everything=True)  # passes leave shapes right, but not which tensors share memory
    links = plan.cluster.link_for(dict(plan.axes))
    copies = {axis: link.copies for (axis, _), link in zip(plan.axes, links, strict=True) if link.copies}
    return list(_Liveness(program, plan.optimizer, copies, plan.cluster.device.copies).changes())


class _Liveness:
    """Walks a graph."""

    def __init__(self, program: Program, optimizer: str, copies: Mapping[str, float], convolved: float) -> None:
        self.program, self.optimizer, self.copies, self.convolved = program, optimizer, copies, convolved
        self.part = program.part
        self.received: dict[int, int] = {}  # what a collective's wait returns is what the collective made
        for node in program.graph.graph.nodes:
            if node.target is c10d.wait_tensor.default:
                made = node.all_input_nodes[0].meta["val"]
                self.received[storage_id(node.meta["val"])] = self._storage(made)

    def changes(self) -> Iterator[Change]:
        program = self.program
        trained = {o.name for o, v in zip(program.outputs, program.output_values, strict=True)
                   if o.kind == "gradient" and v is not None}  # fmt: skip
        kept: dict[int, str] = {}
        for node, spec in zip(program.placeholders, program.inputs, strict=True):
            value = node.meta["val"]
            kept[self._storage(value)] = KINDS[spec.kind]
            times = self.part.count if spec.kind == "batch" and spec.name in self.part.rows else 1
            yield Change(None, True, KINDS[spec.kind], float(value.nbytes * times))
            if spec.kind == "parameter" and spec.name in trained - graph_info(program.graph).offloaded_states:
                state = optimizer_state_bytes(self.optimizer, value.numel(), value.element_size())
                yield Change(None, True, "optimizer", float(state))
        for output, value in zip(program.outputs, program.output_values, strict=True):
            if value is not None:
                name = "gradients" if output.kind in GRADIENTS else "results"
                kept.setdefault(self._storage(value.meta["val"]), name)
                if name == "results" and output.name in self.part.results:  # those of the microbatches before
                    yield Change(None, True, name, float(value.meta["val"].nbytes * (self.part.count - 1)))
        first: dict[int, tuple[fx.Node, torch.Tensor]] = {}
        last: dict[int, fx.Node] = {}
        shared: set[int] = set()  # what microbatches take that is not made for them
        for node in program.graph.graph.nodes:
            for value in values_of(node) if node.op == "call_function" else ():
                if value is not None:
                    first.setdefault(self._storage(value), (node, value))
            for argument in tensor_arguments(node) if node.op == "call_function" else ():
                for value in values_of(argument):
                    if value is not None:
                        last[self._storage(value)] = node
                        shared.update({self._storage(value)} if is_hoisted(argument) and not is_hoisted(node) else ())
        for storage, (node, value) in first.items():
            held = kept.get(storage)
            if held in KINDS.values() or node.target is to_host:
                continue  # an input, shown or passed on; or on the host
            size = float(value.untyped_storage().nbytes())
            user = last.get(storage, node)
            total = node.target is accumulate  # it holds what the microbatches before have added up
            category = held or ("gradients" if total else _category(node, user))
            yield Change(None if total else node, True, category, size, node)
            if held is None and storage not in shared:
                yield Change(user, False, category, -size, node)
        yield from self._copied()

    def _copied(self) -> Iterator[Change]:
        """What libraries hold besides: those of collectives until these are waited for, those of convolutions."""
        for node in self.program.graph.graph.nodes:
            if size := self.convolved * copied_by_convolution(node):
                yield Change(node, True, "transient", size)
                yield Change(node, False, "transient", -size)
            made = info(node).collective
            if made is None or made.kind not in _COPIED or made.axis not in self.copies:
                continue
            whole = max(v.nbytes for n in (node, node.all_input_nodes[0]) for v in values_of(n) if v is not None)
            waits = [u for u in node.users if u.target is c10d.wait_tensor.default]
            yield Change(node, True, "communication", self.copies[made.axis] * whole)
            yield Change(waits[0] if waits else node, False, "communication", -self.copies[made.axis] * whole)

    def _storage(self, value: torch.Tensor) -> int:
        found = storage_id(value)
        return self.received.get(found, found)


_COPIED = ("all_gather", "reduce_scatter")
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def copied_by_convolution(node: fx.Node, parts: Sequence[int] = (1, 1, 1)) -> float:
    """Bytes that the CPU's library copies while an operator runs; 0 if it is no convolution.

    Args:
        node: the operator.
        parts: into how many its input, its weight and its output (or that's gradient) are cut.
    """
    if node.target not in _CONVOLUTIONS:
        return 0.0
    backward = node.target is aten.convolution_backward.default
    taken, weight = tensor_arguments(node)[backward : backward + 2]  # behind the gradient, if there is one
    x, kernel, made = (n.meta["val"] for n in (taken, weight, tensor_arguments(node)[0] if backward else node))
    sizes = (v.nbytes / n for v, n in zip((x, kernel, made), parts, strict=True))
    return convolution_copies(
        *sizes, kernel=math.prod(kernel.shape[2:]), item=x.element_size(), backward=backward,
        transposed=bool(node.args[7 if backward else 6]),
    )  # fmt: skip


def _in_front(program: Program) -> set[fx.Node]:
    """What runs before the first of the model's blocks; nothing if it has none."""
    found: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        if block_of(module_path(node), program.blocks):
            return found
        found.add(node)
    return set()


def _category(node: fx.Node, user: fx.Node) -> str:
    if info(node).collective is not None:
        return "communication"
    kept = node.target is to_device or (is_backward(user) and not is_backward(node))
    return "activations" if kept else "transient"


@dataclass(frozen=True)
class Moment:
    """What is held at some moment.

    Attributes:
        held: bytes by category.
        path: the module that runs.
        backward: whether it is the backward pass that runs.
        operator: that starts; empty before the first and behind the last.
        front: bytes of the activations that were made in front of the model's blocks.
    """

    held: Mapping[str, float]
    path: str
    backward: bool
    operator: str = ""
    front: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all categories."""
        return sum(self.held.values())


def moments(program: Program, plan: Plan) -> list[Moment]:
    """What is held as each operator that takes memory starts, in order; behind the last, at the optimizer's step."""
    ahead, found, front = _in_front(program), [], 0.0
    for node, changes, held in _walk(program, plan):
        front += sum(c.size for c in changes if c.category == "activations" and c.made in ahead)
        if node is None:
            found.append(Moment(held, "", False))
        elif changes[0].starts:
            found.append(Moment(dict(held), module_path(node), is_backward(node), str(node.target), front))
    return [*found, Moment(_at_step(held, program, plan), "", True)]


def _walk(program: Program, plan: Plan) -> Iterator[tuple[fx.Node | None, list[Change], dict[str, float]]]:
    """Before the first operator, and as each starts and ends: it, what changes, and bytes by category after that."""
    taken: dict[fx.Node | None, list[Change]] = defaultdict(list)
    given: dict[fx.Node | None, list[Change]] = defaultdict(list)
    for change in liveness(program, plan):
        (taken if change.starts else given)[change.node].append(change)
    held: dict[str, float] = defaultdict(float)
    for change in taken[None]:
        held[change.category] += change.size
    yield None, taken[None], dict(held)
    for node in program.graph.graph.nodes:
        for changes in (taken.get(node), given.get(node)):
            for change in changes or ():
                held[change.category] += change.size
            if changes:
                yield node, changes, held


def _at_step(held: Mapping[str, float], program: Program, plan: Plan) -> dict[str, float]:
    """Of what is held behind the last operator, what is held at the optimizer's step."""
    return {**held, "optimizer": held.get("optimizer", 0.0) + _states_away(program, plan.optimizer)}


def _states_away(program: Program, optimizer: str) -> float:
    """Bytes of the optimizer state that comes from the host for the optimizer's step."""
    away, inputs = graph_info(program.graph).offloaded_states, zip(program.placeholders, program.inputs, strict=True)
    values = [n.meta["val"] for n, i in inputs if i.kind == "parameter" and i.name in away]
    return float(sum(optimizer_state_bytes(optimizer, v.numel(), v.element_size()) for v in values))


def peak_memory(program: Program, plan: Plan) -> dict[str, float]:
    """Bytes by category at the moment when one device holds the most, of a rewritten program."""
    return dict(max(moments(program, plan), key=lambda m: m.total).held)


def peak_snapshot(program: Program, plan: Plan) -> PeakSnapshot:
    """The moment when one device holds the most, of a rewritten program."""
    there: dict[fx.Node, float] = defaultdict(float)
    totals: list[float] = []
    most: tuple[float, dict[str, float], dict[fx.Node, float]] = (-1.0, {}, {})
    for _, changes, held in _walk(program, plan):
        for change in changes:
            if change.made is not None:
                there[change.made] += change.size
        totals.append(sum(held.values()))
        if totals[-1] > most[0]:
            most = totals[-1], dict(held), {node: size for node, size in there.items() if size > 0}
    step = _at_step(held, program, plan)
    if sum(step.values()) > most[0]:
        most = sum(step.values()), step, {}
    tensors = tuple(_tensor(node, size) for node, size in most[2].items())
    return PeakSnapshot(most[1], tensors, tuple(sorted([*totals, sum(step.values())], reverse=True)))


def _tensor(node: fx.Node, size: float) -> LiveTensor:
    known = info(node)
    if known.moved_value:
        return LiveTensor(known.moved_value, size, is_backward(node), moved=True)
    return LiveTensor(known.recompute_of or node.name, size, known.recompute_of is not None)
