"""`predict`: seconds, bytes and collectives of a plan, counted operator by operator and move by move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import fx

from autopar.costs.collectives import wire_bytes
from autopar.costs.host_copies import copy_seconds
from autopar.costs.memory import optimizer_state_bytes
from autopar.ir.graph import module_path, without_indices
from autopar.ir.layout import Layout, TensorType, describe, item_bytes
from autopar.ir.plan import ModuleRow, Plan, Predicted
from autopar.ir.program import Program
from autopar.memory.recompute import uniform, weighted
from autopar.sharding.assignment import Assignment, all_moves, assign, machine_of
from autopar.sharding.candidates import candidates, split_parts
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.layer_classes import LayerClasses, layer_classes
from autopar.sharding.lowered.cost import lowered_cost
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute import Machine, Move, Redistributions, Tables, moved_bytes

Prediction = tuple[Predicted, tuple[ModuleRow, ...]]
"""Totals, and a row for each module."""

_COUNTED = ("instances", "seconds", "communication_bytes", "memory_bytes")
"""Numbers in a `ModuleRow`."""


def predict(program: Program, dims: Dims, plan: Plan, classes: LayerClasses | None = None) -> Plan:
    """The plan with its prediction and its table of modules, of the whole model even if layers are left out."""
    predicted, modules = _prediction(program, dims, plan, classes)
    return replace(plan, predicted=predicted, modules=modules)


def _prediction(program: Program, dims: Dims, plan: Plan, classes: LayerClasses | None) -> Prediction:
    if program.repeat is None:
        return _predict(program, dims, plan, classes)
    classes = classes or layer_classes(program, dims)
    # Layers may be treated in several ways; each part is the whole model treated in one of them.
    parts = [(share, _extrapolated(program, dims, part, classes)) for share, part in uniform(plan, classes.count)]
    if len(parts) == 1:
        return parts[0][1]
    predicted = Predicted(**weighted([(share, vars(totals)) for share, (totals, _) in parts]))
    rows = []
    for alike in zip(*(modules for _, (_, modules) in parts), strict=True):
        counted = [{name: getattr(row, name) for name in _COUNTED} for row in alike]
        numbers = [(share, own) for (share, _), own in zip(parts, counted, strict=True)]
        rows.append(replace(alike[0], **weighted(numbers)))
    return predicted, tuple(rows)


def _extrapolated(program: Program, dims: Dims, plan: Plan, classes: LayerClasses) -> Prediction:
    """The prediction of the whole model from a program with repeated layers left out.

    What one captured layer adds to a program of a layer less is what every further layer adds.
    """
    assert program.repeat is not None
    totals, modules = _predict(program, dims, plan, classes)
    shorter = program.repeat.shorter
    totals_of_shorter, modules_of_shorter = _predict(shorter, analyze(shorter), plan, None)
    whole = program.repeat.extrapolate
    rows = tuple(
        replace(row, **{name: whole(getattr(row, name), getattr(less, name)) for name in _COUNTED})
        for row, less in zip(modules, modules_of_shorter, strict=True)
    )
    return Predicted(**whole(vars(totals), vars(totals_of_shorter))), rows


def _predict(program: Program, dims: Dims, plan: Plan, classes: LayerClasses | None) -> Prediction:
    """The prediction of the program as it is."""
    classes = classes or layer_classes(program, dims)
    assignment = assign(program, dims, plan, classes)
    account = _Account(machine_of(plan))
    _count_operators(program, dims, assignment, classes, account)
    _count_moves(program, dims, assignment, account)
    _count_copies(program, dims, assignment, account, plan.optimizer)
    predicted = Predicted(
        step_seconds=sum(account.seconds.values()),
        compute_seconds=account.compute,
        memory_bytes=_memory(program, plan, assignment),
        communication_bytes={a: account.sent[a] for a in plan.axis_names},
        collectives={a: dict(sorted(account.collectives[a].items())) for a in plan.axis_names},
        peak_bytes=plan.predicted.peak_bytes,  # measured on the graph: a prediction has none of its own
        host_seconds=account.host_seconds,
        host_bytes=account.host_bytes,
    )
    return predicted, _rows(program, dims, plan, assignment, account)


def node_seconds(program: Program, dims: Dims, plan: Plan) -> dict[fx.Node, float]:
    """Seconds of each operator in a step, with moves and host copies of its results; all microbatches together."""
    assignment = assign(program, dims, plan, layer_classes(program, dims))
    account = _Account(machine_of(plan))
    _count_operators(program, dims, assignment, layer_classes(program, dims), account)
    _count_moves(program, dims, assignment, account)
    _count_copies(program, dims, assignment, account, plan.optimizer)
    return account.seconds


@dataclass
class _Account:
    """Totals, by node, module and axis."""

    machine: Machine
    compute: float = 0.0
    host_seconds: float = 0.0
    host_bytes: float = 0.0
    seconds: dict[fx.Node, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    module_sent: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    collectives: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))

    def copy(self, node: fx.Node, size: float, seconds: float) -> None:
        """Add what a device has in host memory, and the seconds to copy it there and back in a step."""
        self.seconds[node] += seconds
        self.host_seconds += seconds
        self.host_bytes += size

    def move(self, node: fx.Node, kind: str, axis: int, size: float, seconds: float, times: int) -> None:
        """Add one redistribution step, or one all-reduce of a lowering, that runs so many times."""
        self.seconds[node] += seconds * times
        name, n = self.machine.names[axis], self.machine.sizes[axis]
        # Nothing is sent: a slice is local.
        if kind == "slice" or n == 1:
            return
        sent = float(wire_bytes(kind, size, n)) * times
        self.sent[name] += sent
        self.module_sent[module_path(node)][name] += sent
        self.collectives[name][kind] += times


def _count_operators(
    program: Program, dims: Dims, assignment: Assignment, classes: LayerClasses, account: _Account
) -> None:
    known: dict[tuple[str, tuple[str, ...]], float] = {}
    machine = account.machine
    for node, names in assignment.strategies.items():
        operator = dims.operators[node]
        # Repeated layers are alike: each kind of operator is costed once.
        key = (classes.key[node], names)
        if key not in known:
            one = candidates(operator, machine.sizes, allowed=[[n] for n in names])
            known[key] = float(operator_seconds(operator, one, machine)[0])
        recompute, runs = assignment.recompute, program.runs(node)
        # An invariant that is saved runs once per step; a recomputed operator runs in the backward pass, too, and one
        # that only recomputed operators read runs there alone.
        first = 1 if node in assignment.hoisted else runs * (node not in recompute.backward_only)
        times = first + runs * recompute.times(node)
        account.compute += (known[key] - _count_lowering(node, dims, names, account, times)) * times
        account.seconds[node] += known[key] * times


def _count_moves(program: Program, dims: Dims, assignment: Assignment, account: _Account) -> None:
    tables = Tables(account.machine)
    known: dict[tuple[Redistributions, tuple[Move, ...]], list[tuple[Move, float, float, float]]] = {}
    for (node, out), counted in all_moves(program, dims, assignment, tables).items():
        table, moves = tables.of(dims.types[node, out]), [move for move, _ in counted]
        key = (table, tuple(moves))
        if key not in known:
            sizes = [moved_bytes(table.type, move, account.machine.sizes) for move in moves]
            seconds_of_moves, local = table.move_seconds(moves).tolist(), table.local_seconds(moves).tolist()
            known[key] = list(zip(moves, sizes, seconds_of_moves, local, strict=True))
        for (move, size, seconds, kernels), (_, times) in zip(known[key], counted, strict=True):
            account.compute += kernels * times
            account.move(node, move.kind, move.axis, size, seconds, times)


def _count_copies(program: Program, dims: Dims, assignment: Assignment, account: _Account, optimizer: str) -> None:
    """Copies to the host and back. All that a microbatch offloads, and optimizer state, is there at the same time."""
    machine = account.machine
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "parameter" and spec.name in assignment.offload.states:
            value = node.meta["val"]
            local = value.numel() // split_parts(assignment.outputs[node, 0], machine.sizes)
            size = float(optimizer_state_bytes(optimizer, local, value.element_size()))
            account.copy(next(iter(node.users)), size, 2 * float(copy_seconds(size, machine.device)))
    offloaded = [(value, layout) for value, layout in assignment.outputs.items() if value in assignment.offload.made]
    offloaded += [
        (value, layout) for value, layout in assignment.consumer_layouts.items() if value in assignment.offload.moved
    ]
    for (node, out), layout in offloaded:
        type_ = dims.types[node, out]
        size = type_.bytes / split_parts(layout, machine.sizes)
        account.copy(node, size, 2 * float(copy_seconds(size, machine.device)) * program.runs(node))


def _count_lowering(node: fx.Node, dims: Dims, names: tuple[str, ...], account: _Account, times: int) -> float:
    """Count the collectives of a lowering; their seconds, which are the operator's, in one run."""
    operator, machine = dims.operators[node], account.machine
    found = lowered_cost(operator, names, machine) if operator.rule.lower else None
    for made in found.collectives if found is not None else ():
        account.move(node, made.kind, machine.names.index(made.axis), made.bytes, 0.0, times)
    return sum(machine.seconds(made) for made in found.collectives) if found is not None else 0.0


def _memory(program: Program, plan: Plan, assignment: Assignment) -> dict[str, float]:
    """Bytes per device, by category; optimizer state as between steps."""
    trained = {
        o.name for o, v in zip(program.outputs, program.output_values, strict=True) if o.kind == "gradient" and v
    }
    memory = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0, "buffers": 0.0}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        value = node.meta["val"]
        item = item_bytes(str(value.dtype).removeprefix("torch."))
        if spec.kind == "buffer":
            memory["buffers"] += value.numel() * item
        if spec.kind != "parameter":
            continue
        local = value.numel() // split_parts(plan.parameters[spec.name], plan.axis_sizes)
        memory["parameters"] += local * item
        if spec.name in trained:
            memory["gradients"] += local * item
            on_device = spec.name not in assignment.offload.states
            memory["optimizer"] += optimizer_state_bytes(plan.optimizer, local, item) * on_device
    return memory


def _rows(program: Program, dims: Dims, plan: Plan, assignment: Assignment, account: _Account) -> tuple[ModuleRow, ...]:
    """One row for each module that has parameters or takes time, repeated layers joined."""
    joined = partial(without_indices, blocks=program.blocks)
    layouts: dict[str, dict[str, str]] = defaultdict(dict)
    memory: dict[str, float] = defaultdict(float)
    instances: dict[str, set[str]] = defaultdict(set)
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind != "parameter":
            continue
        owner, _, name = spec.name.rpartition(".")
        type_, layout = dims.type_of(node), plan.parameters[spec.name]
        row = joined(owner)
        instances[row].add(owner)
        layouts[row].setdefault(name, describe(type_, layout, plan.axis_names))
        memory[row] += type_.bytes / split_parts(layout, plan.axis_sizes)
    final: dict[str, tuple[TensorType, Layout]] = {}
    for node in assignment.strategies:
        path, type_or_none = joined(module_path(node)), dims.types.get((node, 0))
        instances[path].add(module_path(node))
        if type_or_none is not None and node.meta.get("partitioner_tag") != "is_backward":
            shown = assignment.consumer_layouts if (node, 0) in assignment.forced else assignment.outputs
            final[path] = type_or_none, shown[node, 0]
    last = {path: describe(type_, layout, plan.axis_names) for path, (type_, layout) in final.items()}
    seconds: dict[str, float] = defaultdict(float)
    sent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node, value in account.seconds.items():
        seconds[joined(module_path(node))] += value
    for path, by_axis in account.module_sent.items():
        for axis, value in by_axis.items():
            sent[joined(path)][axis] += value
    rows = []
    for path in dict.fromkeys((*layouts, *seconds)):
        # The layout of a module's output is that of the last operator in it.
        described: Mapping[str, str] = {**layouts[path], **({"output": last[path]} if path in last else {})}
        rows.append(ModuleRow(path, len(instances[path]), described, seconds[path], dict(sent[path]), memory[path]))
    return tuple(rows)
