"""What is live on one device while a rewritten graph runs: each tensor from its operator to its last user."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar._torch_compat import storage_id
from autopar.costs.memory import convolution_copies, optimizer_state_bytes
from autopar.errors import PlanError
from autopar.ir.graph import block_of, is_backward, module_path, producer, tensor_arguments, values_of
from autopar.ir.node_info import graph_info, info, set_graph_info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import c10d, waits_for
from autopar.ir.ops.host import to_device, to_host
from autopar.ir.ops.rows import WRITES_ROWS, gather_rows_, new_rows, reduce_rows_, scatter_rows_
from autopar.ir.ops.sequence.padded.convolution import padded_convolution, padded_convolution_backward
from autopar.ir.plan import Plan
from autopar.ir.program import OF_BACKWARD, Program, is_hoisted
from autopar.memory.peak_snapshot import LiveTensor, PeakSnapshot
from autopar.rules.shapes.local_shapes import propagate

aten = torch.ops.aten
_WAIT = c10d.wait_tensor.default
_WAITS = (_WAIT, operator.getitem)
KINDS = {"parameter": "parameters", "buffer": "buffers", "batch": "batch", "tangent": "batch"}


@dataclass(frozen=True)
class Change:
    """Memory that is allocated or freed.

    Attributes:
        node: the operator that does it; None before the first.
        starts: whether it happens as the operator starts, or after it.
        category: see `liveness`.
        size: bytes, negative where they are freed.
        made: the operator whose result the memory is for; None for what is there before the first.
    """

    node: fx.Node | None
    starts: bool
    category: str
    size: float
    made: fx.Node | None = None


def liveness(program: Program, plan: Plan) -> list[Change]:
    """Everything that is allocated and freed in a step, in no order.

    Categories: ``parameters``, ``buffers``, ``batch`` and ``optimizer`` are live all the time, ``gradients`` and
    ``results`` from where they are computed; ``activations`` are saved by the forward for the backward pass;
    ``communication`` is what collectives receive, and what their library copies; ``transient`` the rest. Of a step in
    microbatches it is the last of these, with accumulated gradients, which are live all the time, and with what all of
    them share, which is live to the end. What is offloaded takes nothing of the device.

    Args:
        program: as `autopar.compiler.rewrite` returns it.
        plan: the plan it was rewritten under.

    Raises:
        PlanError: the program is not rewritten.
    """
    if "local" not in graph_info(program.graph).invariants:
        raise PlanError("the program is not a rewritten one; give what compiler.rewrite(program, plan) returns")
    known = graph_info(program.graph)
    # Unset: whoever asks next may have changed the graph in the meantime.
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
        self.received: dict[int, int] = {}  # storage of a wait's result -> storage of its collective's result
        for node in program.graph.graph.nodes:
            if node.target is c10d.wait_tensor.default:
                made = node.all_input_nodes[0].meta["val"]
                self.received[storage_id(node.meta["val"])] = self._storage(made)

    def changes(self) -> Iterator[Change]:
        """Every allocation and deallocation of a step."""
        yield from self._inputs()
        yield from self._earlier_results()
        yield from self._intermediates(self._boundary())
        yield from self._library_copies()

    def _inputs(self) -> Iterator[Change]:
        """Inputs of the graph and optimizer state, live from before the first operator."""
        program, states_on_host = self.program, graph_info(self.program.graph).offloaded_states
        ends = zip(program.outputs, program.output_values, strict=True)
        # Only a parameter that gets a gradient has optimizer state.
        trained = {o.name for o, v in ends if o.kind == "gradient" and v is not None}
        for node, spec in zip(program.placeholders, program.inputs, strict=True):
            value = node.meta["val"]
            # The device has the batch slices of all microbatches, though the graph takes one of them.
            times = self.part.count if spec.kind == "batch" and spec.name in self.part.rows else 1
            yield Change(None, True, KINDS[spec.kind], float(value.nbytes * times))
            if spec.kind == "parameter" and spec.name in trained - states_on_host:
                state = optimizer_state_bytes(self.optimizer, value.numel(), value.element_size())
                yield Change(None, True, "optimizer", float(state))

    def _earlier_results(self) -> Iterator[Change]:
        """Results of the microbatches before this one, which is the last."""
        for output, value in zip(self.program.outputs, self.program.output_values, strict=True):
            if value is not None and output.kind not in OF_BACKWARD and output.name in self.part.results:
                yield Change(None, True, "results", float(value.meta["val"].nbytes * (self.part.count - 1)))

    def _boundary(self) -> dict[int, str]:
        """Category of the storage of each input and output."""
        program, found = self.program, dict[int, str]()
        for node, spec in zip(program.placeholders, program.inputs, strict=True):
            found[self._storage(node.meta["val"])] = KINDS[spec.kind]
        for output, value in zip(program.outputs, program.output_values, strict=True):
            if value is not None:
                # An input that is returned (a buffer written in place) stays an input: its memory is counted once.
                category = "gradients" if output.kind in OF_BACKWARD else "results"
                found.setdefault(self._storage(value.meta["val"]), category)
        return found

    def _intermediates(self, boundary: Mapping[int, str]) -> Iterator[Change]:
        """What operators compute: from the operator that allocates a storage to the last that reads it."""
        first, last, shared = self._live_ranges()
        for storage, (node, value) in first.items():
            kind = boundary.get(storage)
            if kind in KINDS.values() or node.target is to_host:
                continue  # a view of an input or the input itself; or in host memory
            size = float(value.untyped_storage().nbytes())
            user = last.get(storage, node)
            accumulated = node.target is accumulate  # live from the start: earlier microbatches have added to it
            category = kind or ("gradients" if accumulated else _category(node, user))
            yield Change(None if accumulated else node, True, category, size, node)
            if kind is None and storage not in shared:
                yield Change(user, False, category, -size, node)

    def _live_ranges(self) -> tuple[dict[int, tuple[fx.Node, torch.Tensor]], dict[int, fx.Node], set[int]]:
        """By storage: its first operator and tensor; its last user; and storages that all microbatches share.

        Ranges are of storages, not of tensors: a view keeps the whole of what it shows.
        """
        first: dict[int, tuple[fx.Node, torch.Tensor]] = {}
        last: dict[int, fx.Node] = {}
        shared: set[int] = set()
        for node in self.program.graph.graph.nodes:
            if node.op != "call_function":
                continue
            for value in values_of(node):
                if value is not None:
                    first.setdefault(self._storage(value), (node, value))
            for argument in read_by(node):
                storages = {self._storage(value) for value in values_of(argument) if value is not None}
                last.update(dict.fromkeys(storages, node))
                # The next microbatch reads it, too: it is not freed after this user.
                if is_hoisted(argument) and not is_hoisted(node):
                    shared |= storages
        return first, last, shared

    def _library_copies(self) -> Iterator[Change]:
        """Buffers inside libraries: those of collectives until these are waited for, those of convolutions."""
        for node in self.program.graph.graph.nodes:
            if size := self.convolved * copied_by_convolution(node):
                yield Change(node, True, "transient", size)
                yield Change(node, False, "transient", -size)
            made = info(node).collective
            # What a library copies is measured for each link; it copies for these two kinds only.
            if made is None or made.kind not in _COPIED or made.axis not in self.copies:
                continue
            sides = ((node,), node.all_input_nodes)
            whole = float(max(sum(v.nbytes for n in side for v in values_of(n) if v is not None) for side in sides))
            whole = made.bytes if node.target in WRITES_ROWS else whole  # of the rows that it writes
            waits = waits_for(node)
            yield Change(node, True, "communication", self.copies[made.axis] * whole)
            yield Change(waits[0] if waits else node, False, "communication", -self.copies[made.axis] * whole)

    def _storage(self, value: torch.Tensor) -> int:
        found = storage_id(value)
        return self.received.get(found, found)


def read_by(node: fx.Node) -> list[fx.Node]:
    """The values that must be there when a node runs."""
    read = list(tensor_arguments(node))
    if node.target is c10d.wait_tensor.default:
        # The library reads what it gathers and scatters until it is waited for; it reduces a copy.
        collective = producer(node.all_input_nodes[0])[0]
        # A wait is for all collectives that are on their way into one tensor.
        while collective.target in WRITES_ROWS:
            read += tensor_arguments(collective) if info(collective).collective is not None else []
            collective = collective.all_input_nodes[0]
        read += [] if collective.target in _SUMS else tensor_arguments(collective)
    return read


_SUMS = (c10d.all_reduce.default, c10d.all_reduce_coalesced.default)
_RECEIVES = (gather_rows_, scatter_rows_, reduce_rows_)
_COPIED = ("all_gather", "reduce_scatter")
_COPIES = (aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.reshape.default, accumulate)
_FORWARD = (aten.convolution.default, padded_convolution)
_BACKWARD = (aten.convolution_backward.default, padded_convolution_backward)


def copied_by_convolution(node: fx.Node, parts: Sequence[int] = (1, 1, 1)) -> float:
    """Bytes that the CPU's library copies while an operator runs; 0 if it is no convolution.

    Args:
        node: the operator.
        parts: into how many its input, its weight and its output (or that's gradient) are cut.
    """
    if node.target not in (*_FORWARD, *_BACKWARD):
        return 0.0
    backward, ours = node.target in _BACKWARD, node.target in (padded_convolution, padded_convolution_backward)
    arguments = tensor_arguments(node)
    source, weight = arguments[backward : backward + 2]  # the gradient comes first, if there is one
    x, kernel, output = (n.meta["val"] for n in (source, weight, arguments[0] if backward else node))
    sizes = (v.nbytes / n for v, n in zip((x, kernel, output), parts, strict=True))
    return convolution_copies(
        *sizes, kernel=math.prod(kernel.shape[2:]), item=x.element_size(), backward=backward,
        transposed=not ours and bool(node.args[7 if backward else 6]),
    )  # fmt: skip


def _before_blocks(program: Program) -> set[fx.Node]:
    """What runs before the first of the model's blocks, such as embeddings; nothing if it has none."""
    found: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        # Up to the first block; a model without blocks has nothing before them.
        if block_of(module_path(node), program.blocks):
            return found
        found.add(node)
    return set()


def _category(node: fx.Node, user: fx.Node) -> str:
    received = node.target is new_rows and any(u.target in _RECEIVES for u in node.users)
    if info(node).collective is not None or received:
        return "communication"
    # An offloaded activation that came back is one again, although the backward pass made this copy.
    saved = node.target is to_device or (is_backward(user) and not is_backward(node))
    return "activations" if saved else "transient"


@dataclass(frozen=True)
class MemoryPoint:
    """What is live at one program point.

    Attributes:
        held: bytes by category.
        path: the module that runs.
        backward: whether it is the backward pass that runs.
        operator: that starts; empty before the first and after the last.
        before_blocks: bytes of the activations that were made before the model's blocks.
        in_flight: of ``held``, what one block's collectives that run beside kernels send and receive until they are
            waited for.
        in_place: whether the operator runs where the model has it; moves of parameters and of gradients may run while
            another block does.
    """

    held: Mapping[str, float]
    path: str
    backward: bool
    operator: str = ""
    before_blocks: float = 0.0
    in_flight: Mapping[str, float] = field(default_factory=dict)
    in_place: bool = True

    @property
    def total(self) -> float:
        """Bytes of all categories."""
        return sum(self.held.values())


def memory_points(program: Program, plan: Plan) -> list[MemoryPoint]:
    """What is live as each operator that allocates starts, in order; after the last, at the optimizer's step."""
    early, found, before_blocks = _before_blocks(program), [], 0.0
    changes = liveness(program, plan)
    in_flight = dict(zip(program.graph.graph.nodes, _in_flight(program, changes), strict=True))
    for node, now, held in _walk(program, changes):
        before_blocks += sum(c.size for c in now if c.category == "activations" and c.made in early)
        if node is None:
            found.append(MemoryPoint(held, "", False))
        elif now[0].starts:
            # A copy: the walk goes on adding to its own.
            point = MemoryPoint(
                dict(held), module_path(node), is_backward(node), str(node.target), before_blocks, in_flight[node],
                _in_place(node),
            )  # fmt: skip
            found.append(point)
    return [*found, MemoryPoint(_at_step(held, program, plan), "", True)]


def _in_place(node: fx.Node) -> bool:
    """Whether a node is an operator of the program, or its recomputation, and more than a copy."""
    known = info(node)
    return (known.program_node or known.recompute_of) is not None and node.target not in _COPIES


def _in_flight(program: Program, changes: Sequence[Change]) -> list[dict[str, float]]:
    """What `MemoryPoint.in_flight` says, as each node of the graph starts."""
    nodes = list(program.graph.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    of_one_block = _of_one_block(program, nodes)
    ends: dict[fx.Node, int] = {}
    for node in of_one_block:
        end = max((position[wait] for wait in waits_for(node)), default=position[node])
        if any(n.target not in _WAITS for n in nodes[position[node] + 1 : end]):  # it runs beside kernels
            ends[node] = end
    steps: list[list[tuple[str, float]]] = [[] for _ in range(len(nodes) + 1)]
    for change in changes:
        made, last = change.made, change.node
        if change.starts or made is None or last is None:
            continue
        # What it receives, or what it sends and is freed once it is waited for.
        source = made if made in ends else producer(last.all_input_nodes[0])[0] if last.target is _WAIT else None
        if source is not None and source in ends:
            steps[position[source]].append((change.category, -change.size))
            steps[min(ends[source], position[last] + 1)].append((change.category, change.size))
    now: dict[str, float] = defaultdict(float)
    found = []
    for here in steps[:-1]:
        for category, size in here:
            now[category] += size
        found.append({category: size for category, size in now.items() if size})
    return found


def _of_one_block(program: Program, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Collectives of one block, where each block has some of the kind.

    Of these few are in flight at a time, however many blocks there are: `overlap_collectives` waits for each before the
    next but one of its kind. What is sent for several blocks at a time, further ones make larger.
    """
    own: dict[object, list[tuple[fx.Node, str | None]]] = defaultdict(list)
    every: dict[object, set[str | None]] = defaultdict(set)
    for node in nodes:
        made = info(node).collective
        if made is not None:
            sent = [producer(argument)[0] for argument in tensor_arguments(node)]
            packed = [a for n in sent if n.target is aten.cat.default for a in tensor_arguments(n)]  # a bucket
            blocks = {block_of(module_path(n), program.blocks) for n in (*sent, *packed)}
            kind = (made.kind, made.axis, is_backward(node))
            every[kind] |= blocks - {None}
            if len(blocks) == 1:
                own[kind].append((node, next(iter(blocks))))
    return [node for kind, found in own.items() if {b for _, b in found} >= every[kind] for node, _ in found]


def _walk(
    program: Program, changes: Sequence[Change]
) -> Iterator[tuple[fx.Node | None, list[Change], dict[str, float]]]:
    """Before the first operator, and as each starts and ends: it, what changes, and bytes by category after that."""
    allocated: dict[fx.Node | None, list[Change]] = defaultdict(list)
    freed: dict[fx.Node | None, list[Change]] = defaultdict(list)
    for change in changes:
        (allocated if change.starts else freed)[change.node].append(change)
    held: dict[str, float] = defaultdict(float)
    for change in allocated[None]:
        held[change.category] += change.size
    yield None, allocated[None], dict(held)
    for node in program.graph.graph.nodes:
        # Allocations first: an operator has its results before its arguments are freed.
        for here in (allocated.get(node), freed.get(node)):
            for change in here or ():
                held[change.category] += change.size
            if here:
                yield node, here, held


def _at_step(held: Mapping[str, float], program: Program, plan: Plan) -> dict[str, float]:
    """What is live at the optimizer's step, from what is live after the last operator."""
    return {**held, "optimizer": held.get("optimizer", 0.0) + _offloaded_states(program, plan.optimizer)}


def _offloaded_states(program: Program, optimizer: str) -> float:
    """Bytes of the optimizer state that comes from host memory for the optimizer's step."""
    offloaded = graph_info(program.graph).offloaded_states
    inputs = zip(program.placeholders, program.inputs, strict=True)
    values = [n.meta["val"] for n, i in inputs if i.kind == "parameter" and i.name in offloaded]
    return float(sum(optimizer_state_bytes(optimizer, v.numel(), v.element_size()) for v in values))


def peak_memory(program: Program, plan: Plan) -> dict[str, float]:
    """Bytes by category at the peak of one device, of a rewritten program."""
    return dict(max(memory_points(program, plan), key=lambda point: point.total).held)


def peak_snapshot(program: Program, plan: Plan) -> PeakSnapshot:
    """The live tensors at the peak of one device, of a rewritten program."""
    live: dict[fx.Node, float] = defaultdict(float)
    totals: list[float] = []
    peak, at_peak, tensors = -1.0, dict[str, float](), dict[fx.Node, float]()
    for _, changes, held in _walk(program, liveness(program, plan)):
        for change in changes:
            if change.made is not None:
                live[change.made] += change.size
        totals.append(sum(held.values()))
        if totals[-1] > peak:
            peak, at_peak, tensors = totals[-1], dict(held), {node: size for node, size in live.items() if size > 0}
    step = _at_step(held, program, plan)
    if sum(step.values()) > peak:
        at_peak, tensors = step, {}  # activations are freed by then: nothing is left to recompute instead
    live_tensors = tuple(_live_tensor(node, size) for node, size in tensors.items())
    return PeakSnapshot(at_peak, live_tensors, tuple(sorted([*totals, sum(step.values())], reverse=True)))


def _live_tensor(node: fx.Node, size: float) -> LiveTensor:
    known = info(node)
    if known.moved_value:
        return LiveTensor(known.moved_value, size, is_backward(node), moved=True)
    return LiveTensor(known.recompute_of or node.name, size, known.recompute_of is not None)
