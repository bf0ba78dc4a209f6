"""`step_of`: what one step of a plan does on one device, part by part, kernel by kernel.

The model falls into *parts*: each numbered block (``layers.3``), and what comes before and after them. A part's forward
and backward are kernels and collectives whose sizes are known; what they cost is asked of a machine later, so that the
same step can be costed on many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.costs.cluster import Device
from autopar.costs.collectives import collective_seconds
from autopar.costs.kernels import Work, busy_seconds
from autopar.ir.graph import Value, block_of, is_backward, module_path
from autopar.ir.layout import Replicate, item_bytes
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.sharding.assignment import Assignment, all_moves, assign, machine_of
from autopar.sharding.candidates import split_parts
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.layer_classes import LayerClasses, layer_classes
from autopar.sharding.lowered.cost import lowered_cost
from autopar.sharding.operator_cost import arithmetic_dtype, emitted_kernels
from autopar.sharding.redistribute import Tables
from autopar.sharding.redistribute.moves import Machine, moved_bytes

Floats = NDArray[np.float64]

BEFORE, AFTER = "before the blocks", "after the blocks"


@dataclass(frozen=True)
class ChargedCollective:
    """A collective of one device: its kind, its axis, and the bytes by which it is charged."""

    kind: str
    axis: int
    size: float


@dataclass(frozen=True)
class Activity:
    """What one device does in one pass over a part.

    Attributes:
        kernels: by the dtype that they compute in.
        collectives: in order.
    """

    kernels: Mapping[str, Work] = field(default_factory=dict)
    collectives: tuple[ChargedCollective, ...] = ()


@dataclass(frozen=True)
class Part:
    """Some of the model's modules.

    Attributes:
        name: a block's path, or `BEFORE` or `AFTER`.
        forward: of one microbatch.
        backward: of one microbatch.
        parameters: elements of the parameters on one device, by bytes of an element.
        saved: bytes saved for the backward pass.
        output_bytes: of the values that the next part uses from this one.
        recompute: what selective recomputation runs before the backward: the values that have a factor twice, such as
            attention's scores, which are large and cheap to recompute (V. Korthikanti et al., "Reducing Activation
            Recomputation in Large Transformer Models", 2022, section 5).
        recomputed_bytes: how many of the saved bytes selective recomputation does not save.
        replicated_bytes: how many of the output bytes are replicated over an axis, by axis.
    """

    name: str
    forward: Activity
    backward: Activity
    parameters: Mapping[int, float]
    saved: float
    output_bytes: float
    recompute: Activity = field(default_factory=Activity)
    recomputed_bytes: float = 0.0
    replicated_bytes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Spent:
    """Seconds of an activity: of the device, of the host that launches its kernels, and of communication by axis."""

    device: float
    host: float
    communication: tuple[float, ...]

    @property
    def elapsed(self) -> float:
        """Seconds that pass: device and communication in turns, or the host's where it is slower."""
        return max(self.device + sum(self.communication), self.host)

    def scaled(self, times: float) -> Spent:
        """The same activity this many times."""
        return Spent(self.device * times, self.host * times, tuple(c * times for c in self.communication))

    def __add__(self, other: Spent) -> Spent:
        """Both in sequence."""
        both = zip(self.communication, other.communication, strict=True)
        return Spent(self.device + other.device, self.host + other.host, tuple(a + b for a, b in both))


def spend(activity: Activity, machine: Machine) -> Spent:
    """What an activity costs on a machine."""
    return spend_each([activity], [machine])[0]


def spend_each(activities: Sequence[Activity], machines: Sequence[Machine]) -> list[Spent]:
    """What each activity costs on its machine; all machines have the same device."""
    device = machines[0].device
    # All kernels in one array: a kernel at a time, numpy's calls would take most of the time.
    busy, launches = _sums(activities, device)
    found = []
    for activity, machine, seconds, count in zip(activities, machines, busy, launches, strict=True):
        communication = [0.0] * len(machine.sizes)
        for c in activity.collectives:
            ranks, link = machine.sizes[c.axis], machine.links[c.axis]
            communication[c.axis] += float(collective_seconds(c.kind, c.size, ranks, link)) + device.launch
            count += ranks > 1  # one device communicates nothing, and launches nothing
        found.append(Spent(float(seconds), float(count) * device.host, tuple(communication)))
    return found


def _sums(activities: Sequence[Activity], device: Device) -> tuple[Floats, Floats]:
    """Busy seconds with launches, and launches, of each activity: the kernels of all of them at once."""
    busy, launches = np.zeros(len(activities)), np.zeros(len(activities))
    parts: dict[str, list[tuple[int, Work]]] = defaultdict(list)
    for number, activity in enumerate(activities):
        for dtype, work in activity.kernels.items():
            parts[dtype].append((number, work))
    for dtype, found in parts.items():
        work = Work.join([w for _, w in found])
        # Each kernel adds to the activity that it came from.
        owner = np.repeat([n for n, _ in found], [len(w.flops) for _, w in found])
        seconds = busy_seconds(work, dtype, device) + work.launches * device.launch
        busy += np.bincount(owner, weights=seconds, minlength=len(activities))
        launches += np.bincount(owner, weights=work.launches, minlength=len(activities))
    return busy, launches


def step_of(program: Program, dims: Dims, plan: Plan) -> tuple[Part, ...]:
    """The parts of a program under a plan, in the order of the forward pass.

    Args:
        program: one microbatch's forward and backward.
        dims: its dimension analysis.
        plan: layouts.
    """
    classes = layer_classes(program, dims)
    return _ProfileBuilder(program, dims, plan, classes).parts()


class _ProfileBuilder:
    """Sorts a program's nodes into parts."""

    def __init__(self, program: Program, dims: Dims, plan: Plan, classes: LayerClasses) -> None:
        self.program, self.dims = program, dims
        self.machine = machine_of(plan)
        self.assignment: Assignment = assign(program, dims, plan, classes)
        self.names = _part_names(program)
        self.constants = _constants(program, dims)

    def parts(self) -> tuple[Part, ...]:
        order = [BEFORE, *dict.fromkeys(n for n in self.names.values() if n not in (BEFORE, AFTER)), AFTER]
        work = self._kernels()
        moves = self._moves()
        nodes: dict[tuple[str, bool], list[fx.Node]] = defaultdict(list)
        for node in dict.fromkeys((*work, *moves)):
            # Program order within a part and a pass: collectives are charged in the order in which they run.
            nodes[self._part_and_pass(node)].append(node)
        saved_values = self._saved()
        # Selective recomputation is about these: attention's scores grow with the square of the sequence.
        large = {value for value in saved_values if self._squared(value)}
        recomputed = self._recomputed(large)
        parameters, saved, recomputed_bytes = self._parameters(), self._sizes(saved_values), self._sizes(large)
        outputs = self._outputs(order)

        def activity(chosen: Iterable[fx.Node]) -> Activity:
            by_dtype: dict[str, list[Work]] = defaultdict(list)
            collectives: list[ChargedCollective] = []
            for node in chosen:
                if node in work:
                    by_dtype[arithmetic_dtype(self.dims.operators[node], self.machine.device)].append(work[node])
                collectives += moves.get(node, ())
            return Activity({dtype: Work.join(parts) for dtype, parts in by_dtype.items()}, tuple(collectives))

        return tuple(
            Part(
                name,
                activity(nodes[name, False]),
                activity(nodes[name, True]),
                parameters[name],
                saved[name],
                sum(map(self._bytes, outputs[name])),
                activity(n for n in nodes[name, False] if n in recomputed),
                recomputed_bytes[name],
                self._replicated_bytes(outputs[name]),
            )
            for name in order
        )

    def _kernels(self) -> dict[fx.Node, Work]:
        known: dict[tuple[Operator, tuple[str, ...]], Work] = {}
        found = {}
        for node, names in self.assignment.strategies.items():
            operator = self.dims.operators[node]
            key = (operator, names)
            if key not in known:
                # Repeated layers have the same operators: each is costed once.
                known[key] = emitted_kernels(operator, names, self.machine)
            found[node] = known[key]
        return found

    def _moves(self) -> dict[fx.Node, list[ChargedCollective]]:
        """Collectives of each node: of its results, and of its lowering."""
        found: dict[fx.Node, list[ChargedCollective]] = defaultdict(list)
        tables = Tables(self.machine)
        moves = all_moves(self.program, self.dims, self.assignment, tables)
        for (node, out), steps in moves.items():
            for move, _, _ in steps:
                size = moved_bytes(self.dims.types[node, out], move, self.machine.sizes, self.machine.load)
                if move.kind != "slice":  # a slice is local: a view of what is there
                    found[node].append(ChargedCollective(move.collective, move.axis, size))
        for node, names in self.assignment.strategies.items():
            # Lowered code, such as a vocabulary's cross-entropy, all-reduces on its own.
            lowered = lowered_cost(self.dims.operators[node], names, self.machine)
            for made, times in lowered.collectives.items() if lowered is not None else ():
                axis = self.machine.names.index(made.axis)
                found[node] += [ChargedCollective(made.kind, axis, made.bytes)] * times
        return found

    def _part_and_pass(self, node: fx.Node) -> tuple[str, bool]:
        return self.names.get(node, BEFORE), is_backward(node)

    def _bytes(self, value: Value) -> float:
        type_ = self.dims.types[value]
        return type_.bytes / split_parts(self.assignment.outputs[value], self.machine.sizes)

    def _parameters(self) -> dict[str, dict[int, float]]:
        found: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        # A parameter belongs to the part that first uses it: reversed, so that the first use wins.
        users = {
            source: node for node in reversed(list(self.program.sources)) for source, _ in self.program.sources[node]
        }
        for node, spec in zip(self.program.placeholders, self.program.inputs, strict=True):
            if spec.kind == "parameter":
                item = item_bytes(self.dims.types[node, 0].dtype)
                part = self.names[users[node]] if node in users else BEFORE
                found[part][item] += self._bytes((node, 0)) / item
        return defaultdict(dict, {name: dict(sizes) for name, sizes in found.items()})

    def _saved(self) -> dict[Value, None]:
        """The forward values that the backward uses, each storage once, in order."""
        saved: dict[Value, None] = {}
        for node, sources in self.program.sources.items():
            for source in sources if is_backward(node) else ():
                storage = self._storage(source)
                # Parameters and the batch have no part: they are there anyway.
                if storage[0] in self.names and not is_backward(storage[0]):
                    saved[storage] = None
        return saved

    def _sizes(self, values: Iterable[Value]) -> dict[str, float]:
        """Bytes of values, by the part that makes them."""
        found: dict[str, float] = defaultdict(float)
        for value in values:
            found[self.names[value[0]]] += self._bytes(value)
        return found

    def _squared(self, value: Value) -> bool:
        """Whether a value has a factor twice; a constant that all blocks share, such as a mask, does not count."""
        factors = [id(f) for dim in self.dims.types[value].dims for f in dim]
        return len(set(factors)) < len(factors) and value[0] not in self.constants

    def _recomputed(self, values: set[Value]) -> set[fx.Node]:
        """The nodes that recompute values, starting from values without a factor twice."""
        found: set[fx.Node] = set()
        waiting = list(values)
        while waiting:
            node = waiting.pop()[0]
            if node in found:
                continue
            found.add(node)
            waiting += [s for s in self.program.sources[node] if s[0] in self.names and self._squared(s)]
        return found

    def _storage(self, value: Value) -> Value:
        """The value whose memory a view shows."""
        while value[0] in self.dims.operators and self.dims.operators[value[0]].rule.view:
            value = self.program.sources[value[0]][0]
        return value

    def _outputs(self, order: list[str]) -> dict[str, dict[Value, None]]:
        """Each part's forward values that the next part's forward uses."""
        # Values that skip a part, such as a mask, are not sent from stage to stage here.
        following = dict(pairwise(order))
        outputs: dict[str, dict[Value, None]] = defaultdict(dict)
        for node, sources in self.program.sources.items():
            for source in () if is_backward(node) else sources:
                storage = self._storage(source)
                part = self.names.get(storage[0])
                constant = storage[0] in self.constants  # each stage computes its own
                if part is not None and self.names[node] == following.get(part) and not constant:
                    outputs[part][storage] = None
        return outputs

    def _replicated_bytes(self, values: Iterable[Value]) -> tuple[float, ...]:
        """Bytes of the values that are replicated over an axis, by axis."""
        layouts = [(self._bytes(value), self.assignment.outputs[value]) for value in values]
        axes = range(len(self.machine.sizes))
        return tuple(sum(size for size, layout in layouts if layout[axis] == Replicate()) for axis in axes)


def _part_names(program: Program) -> dict[fx.Node, str]:
    """The part of every operator node: by its module; without one, that of the node before it."""
    blocks = program.blocks
    found: dict[fx.Node, str] = {}
    seen, current = False, BEFORE
    backward = False
    for node in program.sources:
        # The backward pass begins with what comes last: until a module says otherwise, its nodes are of the end.
        if is_backward(node) and not backward:
            backward, current = True, AFTER
        block = block_of(module_path(node), blocks)
        if block is not None:
            current, seen = block, True
        elif not backward:
            current = AFTER if seen else BEFORE
        elif module_path(node):
            current = next(
                (found[n] for n in found if not is_backward(n) and module_path(n) == module_path(node)), current
            )
        found[node] = current
    return found


def _constants(program: Program, dims: Dims) -> set[fx.Node]:
    """Nodes whose values are the same in every step: they come from no input and no generator."""
    found: set[fx.Node] = set()
    for node, sources in program.sources.items():
        # No sources at all: then `all` is true, as for an arange.
        if not dims.operators[node].rule.random and all(source in found for source, _ in sources):
            found.add(node)
    return found
