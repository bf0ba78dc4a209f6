"""`predict`: seconds, bytes and collectives of a plan, counted operator by operator and move by move."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import fx

from autopar.costs.collectives import wire_bytes
from autopar.costs.host_copies import copy_seconds
from autopar.costs.kernels import kernel_seconds
from autopar.costs.memory import optimizer_state_bytes
from autopar.ir.graph import Value, is_backward, module_path, producer, without_indices
from autopar.ir.layout import Layout, TensorType, describe, item_bytes
from autopar.ir.node_info import ChunkedMove
from autopar.ir.plan import ModuleRow, Plan, Predicted
from autopar.ir.program import Program
from autopar.memory.recompute import uniform, weighted
from autopar.passes.kernels.add_bias_in_product import adds_bias
from autopar.rules.remembered import remembered
from autopar.search.emitted.rewritten import rewritten
from autopar.search.overlap.launches import Bucketed, Launches, begun_with, further_messages, messages
from autopar.search.overlap.regions import BACKWARD, BEFORE, BLOCKING_KINDS, CHUNKED, WITHIN, Regions, regions_of
from autopar.search.overlap.step_time import FILLING, KERNELS, Floats, StepTime, feature, no_features, step_time_of
from autopar.sharding.assignment import HOISTED, IN_BACKWARD, Assignment, CountedMove, all_moves, assign, machine_of
from autopar.sharding.candidates import candidates, split_parts
from autopar.sharding.dims import Dims, Operator, analyze
from autopar.sharding.layer_classes import LayerClasses, layer_classes
from autopar.sharding.lowered.cost import lowered_cost
from autopar.sharding.operator_cost import arithmetic_dtype, emitted_kernels, operator_seconds
from autopar.sharding.redistribute import Redistributions, Tables
from autopar.sharding.redistribute.moves import LOCAL_MOVES, Machine, Move, moved_bytes

Prediction = tuple[Predicted, tuple[ModuleRow, ...]]
"""Totals, and a row for each module."""

_COUNTED = ("instances", "seconds", "communication_bytes", "memory_bytes")
"""Numbers in a `ModuleRow`."""


NEGLIGIBLE = 1e-3
"""Share of a step: no graph is emitted for plans of which chunks could not save more."""


def predict(program: Program, dims: Dims, plan: Plan, classes: LayerClasses | None = None, *, graphs: int = 1) -> Plan:
    """The plan with its prediction and its table of modules, of the whole model even if layers are left out.

    Args:
        program: canonical program of one microbatch.
        dims: its dimension analysis.
        plan: for this program.
        classes: its layer classes, where they are known.
        graphs: see `autopar.search.overlap.step_time.StepTime`.
    """
    classes = classes or layer_classes(program, dims)
    # Layers may be treated in several ways; each part is the whole model treated in one of them.
    parts = [(share, _predicted(program, dims, part, classes, graphs)) for share, part in _ways(program, plan, classes)]
    if len(parts) == 1:
        ((_, (predicted, modules)),) = parts
        return replace(plan, predicted=predicted, modules=modules)
    predicted = Predicted(**weighted([(share, vars(totals)) for share, (totals, _) in parts]))
    rows = []
    for alike in zip(*(modules for _, (_, modules) in parts), strict=True):
        counted = [{name: getattr(row, name) for name in _COUNTED} for row in alike]
        numbers = [(share, own) for (share, _), own in zip(parts, counted, strict=True)]
        rows.append(replace(alike[0], **weighted(numbers)))
    return replace(plan, predicted=predicted, modules=tuple(rows))


def _ways(program: Program, plan: Plan, classes: LayerClasses) -> list[tuple[float, Plan]]:
    """The plans of which a plan is made up where layers are left out, each with the share of the layers treated so."""
    return [(1.0, plan)] if program.repeat is None else uniform(plan, classes.count)


def _predicted(program: Program, dims: Dims, plan: Plan, classes: LayerClasses, graphs: int) -> Prediction:
    """The prediction of the whole model, whose layers are all treated alike where some are left out."""
    machine = machine_of(plan)
    step = step_time_of(program, machine.sizes, machine.links, graphs)
    accounts, repeat = _accounts(program, dims, plan, classes, step), program.repeat
    bucketed = _extrapolated(program, [a.launches.numbers() for a in accounts])
    sent = messages(machine, bucketed)
    step = replace(step, begun=begun_with(bucketed, step.regions))
    more = further_messages(bucketed, sent, step.begun, len(machine.names))
    in_one_piece = step.seconds(_with(more, _extrapolated(program, [a.features for a in accounts])))
    hidden = in_one_piece - step.seconds(_with(more, _optimistic(program, accounts)))
    if plan.overlap and hidden > NEGLIGIBLE * in_one_piece:
        for account in accounts:
            account.cut(rewritten(account.program, plan).chunked)
    seconds = step.seconds(_with(more, _extrapolated(program, [a.features for a in accounts])))
    totals = _extrapolated(program, [vars(_totals(plan, account)) for account in accounts])
    predicted = Predicted(**totals)
    if plan.overlap:
        predicted = replace(predicted, step_seconds=seconds, chunked_seconds=max(in_one_piece - seconds, 0.0))
    launches = _extrapolated(program, [a.launches.alone for a in accounts]) + sum(sent.values())
    launching = launches * machine.device.host
    waiting = max(launching - predicted.step_seconds, 0.0)
    predicted = replace(predicted, step_seconds=predicted.step_seconds + waiting, waiting_seconds=waiting)
    modules = [_rows(a.program, a.dims, plan, a.assignment, a) for a in accounts]
    if repeat is None:
        return predicted, modules[0]
    whole = repeat.extrapolate
    rows = tuple(
        replace(row, **{name: whole(getattr(row, name), getattr(less, name)) for name in _COUNTED})
        for row, less in zip(*modules, strict=True)
    )
    return predicted, rows


def _totals(plan: Plan, account: _Account) -> Predicted:
    """Totals of the program as it is, as if nothing overlapped."""
    return Predicted(
        step_seconds=sum(account.seconds.values()),
        compute_seconds=account.compute,
        memory_bytes=_memory(account.program, plan, account.assignment),
        communication_bytes={a: account.sent[a] for a in plan.axis_names},
        collectives={a: dict(sorted(account.collectives[a].items())) for a in plan.axis_names},
        peak_bytes=plan.predicted.peak_bytes,  # measured on the graph: a prediction has none of its own
        host_seconds=account.host_seconds,
        host_bytes=account.host_bytes,
        communication_seconds=account.communication,
    )


def step_features(
    program: Program, dims: Dims, plan: Plan, classes: LayerClasses, *, chunks: bool = True
) -> dict[str, Floats]:
    """Seconds in each region of a step of the whole model, see `autopar.search.overlap.step_time`.

    They are as the search counts them: chunks hide as much as chunks can, or nothing.
    """
    machine = machine_of(plan)
    step = step_time_of(program, machine.sizes, machine.links)
    parts = [
        (share, _optimistic(program, known) if chunks else _extrapolated(program, [a.features for a in known]))
        for share, part in _ways(program, plan, classes)
        for known in [_accounts(program, dims, part, classes, step)]
    ]
    none = no_features(len(plan.axes))
    regions = dict.fromkeys(region for _, own in parts for region in own)
    found = {r: np.asarray(sum(share * own.get(r, none) for share, own in parts)) for r in regions}
    axes = len(plan.axes)
    for own in found.values():
        own[feature(WITHIN, 0, axes) : feature(WITHIN, axes, axes)] = 0  # operators have one price for all they do
    return found


def _optimistic(program: Program, accounts: Sequence[_Account]) -> dict[str, Floats]:
    """Features of the whole model as if chunks hid as much as they can."""
    none = no_features(len(accounts[0].machine.names))
    found: dict[str, Floats] = _extrapolated(
        program, [{r: own + a.hideable.get(r, none) for r, own in a.features.items()} for a in accounts]
    )
    return found


def _with(more: Mapping[str, Floats], features: Mapping[str, Floats]) -> dict[str, Floats]:
    """Features of regions, and what is added to them."""
    return {region: own + more.get(region, 0.0) for region, own in features.items()}


def _accounts(program: Program, dims: Dims, plan: Plan, classes: LayerClasses, step: StepTime) -> list[_Account]:
    """All that a plan costs, and of a deep model all that it costs with a layer less."""
    found = [_account(program, dims, plan, classes, step)]
    if program.repeat is not None:
        shorter = program.repeat.shorter
        dims = analyze(shorter)
        found.append(_account(shorter, dims, plan, layer_classes(shorter, dims), step, found[0].shared))
    return found


def _extrapolated(program: Program, found: Sequence[Any]) -> Any:
    """Numbers of the whole model.

    What one captured layer adds to a program of a layer less is what every further layer adds.
    """
    return found[0] if program.repeat is None else program.repeat.extrapolate(*found)


def node_seconds(program: Program, dims: Dims, plan: Plan) -> dict[fx.Node, float]:
    """Seconds of each operator in a step, with moves and host copies of its results; all microbatches together."""
    machine = machine_of(plan)
    step = step_time_of(program, machine.sizes, machine.links)
    return _account(program, dims, plan, layer_classes(program, dims), step).seconds


def _account(
    program: Program,
    dims: Dims,
    plan: Plan,
    classes: LayerClasses,
    step: StepTime,
    shared: Mapping[SharedMove, tuple[str, int]] = MappingProxyType({}),
) -> _Account:
    """All that a plan costs, of the program as it is; ``shared``: of one with a layer more, see `_Account`."""
    assignment = assign(program, dims, plan, classes)
    machine = machine_of(plan)
    account = _Account(
        program, dims, classes, machine, regions_of(program), step, assignment, Launches(machine, plan.overlap),
        shared=dict(shared),
    )  # fmt: skip
    moved = all_moves(program, dims, assignment, Tables(account.machine))
    _count_operators(program, dims, assignment, account, moved)
    _count_moves(program, dims, assignment, classes, account, moved)
    _count_copies(program, dims, assignment, account, plan.optimizer)
    return account


SharedMove = tuple[str, int, bool, bool]
"""A class, which of its outputs goes to its consumer layout, whether in the backward pass, and whether once a step."""


@dataclass
class _Account:
    """Totals, by node, module and axis.

    ``places`` says in which regions a value is moved in the forward or backward pass, and what kind of moves these are;
    ``step`` how the time of the whole model's step follows from its regions; ``shared`` where the values of a class are
    moved to their consumer layout, and what kind of move that is. With a layer less the first of a class may be one
    that others read: what is extrapolated must be of the same regions.
    """

    program: Program
    dims: Dims
    classes: LayerClasses
    machine: Machine
    regions: Regions
    step: StepTime
    assignment: Assignment
    launches: Launches
    compute: float = 0.0
    communication: float = 0.0
    host_seconds: float = 0.0
    host_bytes: float = 0.0
    seconds: dict[fx.Node, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    module_sent: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    collectives: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    shared: dict[SharedMove, tuple[str, int]] = field(default_factory=dict)
    places: dict[tuple[Value, bool], dict[tuple[str, int], None]] = field(default_factory=dict)
    features: dict[str, Floats] = field(default_factory=dict)
    hideable: dict[str, Floats] = field(default_factory=dict)  # at the most, by chunks: to be added to the features

    def kernels(self, node: fx.Node, seconds: float, recomputed: float, *, hoisted: bool) -> None:
        """Add the seconds of an operator's kernels, and those of them in which it is recomputed."""
        region = BEFORE if hoisted else self.regions.names[node]
        self.add(region, FILLING if node in self.regions.filling else KERNELS, seconds)
        if recomputed:
            self.add(self.regions.of_recomputed(node), KERNELS, recomputed)
        self.compute += seconds + recomputed
        self.seconds[node] += seconds + recomputed

    def add(self, region: str, which: int, seconds: float) -> None:
        """Add to a feature of a region, see `autopar.search.overlap.step_time`."""
        if seconds:
            self.features.setdefault(region, no_features(len(self.machine.names)))[which] += seconds

    def cut(self, moves: Iterable[ChunkedMove]) -> None:
        """Count what chunks of products hide, and leave out what they need no more."""
        nodes, axes = {n.name: n for n in self.program.graph.graph.nodes}, len(self.machine.names)
        for move in moves:
            value, axis = producer(nodes[move.value]), self.machine.names.index(move.axis)
            gone = sum(map(self.machine.seconds, move.dropped)) * move.times
            left = move.seconds
            for region, kind in self.places.get((value, move.backward), ()):
                own = self.features.get(region)
                if own is None or kind not in BLOCKING_KINDS:
                    continue
                hidden = min(left, own[feature(kind, axis, axes)])
                own[feature(kind, axis, axes)] -= hidden
                own[feature(CHUNKED, axis, axes)] += max(hidden - gone, 0.0)
                left -= hidden
                gone = 0.0
            for made in move.dropped:
                name = made.axis
                sent = float(wire_bytes(made.kind, made.bytes, self.machine.sizes[self.machine.names.index(name)]))
                self.sent[name] -= sent * move.times
                self.module_sent[module_path(value[0])][name] -= sent * move.times
                self.collectives[name][made.kind] -= move.times
                self.communication -= self.machine.seconds(made) * move.times

    def copy(self, node: fx.Node, size: float, seconds: float, region: str) -> None:
        """Add what a device has in host memory, and the seconds to copy it there and back in a step."""
        self.add(region, KERNELS, seconds)
        self.seconds[node] += seconds
        self.host_seconds += seconds
        self.host_bytes += size

    def move(
        self, node: fx.Node, kind: str, axis: int, size: float, times: int, kernels: float = 0.0, sent: float = 0.0
    ) -> None:
        """Add one redistribution step, or one all-reduce of a lowering, that runs so many times.

        Args:
            node: whose value it is of.
            kind: of the collective.
            axis: that it is along.
            size: bytes.
            times: that it runs.
            kernels: seconds of the copies for it.
            sent: seconds of the collective.
        """
        self.seconds[node] += (kernels + sent) * times
        self.compute += kernels * times
        self.communication += sent * times
        name, n = self.machine.names[axis], self.machine.sizes[axis]
        if kind in LOCAL_MOVES or n == 1:
            return
        sent = float(wire_bytes(kind, size, n)) * times
        self.sent[name] += sent
        self.module_sent[module_path(node)][name] += sent
        self.collectives[name][kind] += times


@remembered(2**14)
def _operator_cost(operator: Operator, names: tuple[str, ...], machine: Machine) -> tuple[float, float]:
    """Seconds and launches of an operator under one strategy name an axis: the same in all plans that are compared."""
    one = candidates(operator, machine.sizes, allowed=[[n] for n in names])
    launches = float(emitted_kernels(operator, names, machine).launches.sum()) if machine.device.host else 0.0
    return float(operator_seconds(operator, one, machine)[0]), launches


def _count_operators(
    program: Program, dims: Dims, assignment: Assignment, account: _Account, moved: Container[Value]
) -> None:
    for node, names in assignment.strategies.items():
        seconds, launches = _operator_cost(dims.operators[node], names, account.machine)
        recompute, runs = assignment.recompute, program.runs(node)
        # An invariant that is saved runs once per step; a recomputed operator runs in the backward pass, too, and one
        # that only recomputed operators read runs there alone.
        first = 1 if node in assignment.hoisted else runs * (node not in recompute.backward_only)
        recomputed = runs * recompute.times(node)
        account.kernels(node, seconds * first, seconds * recomputed, hoisted=node in assignment.hoisted)
        if not adds_bias(node) or producer(node.all_input_nodes[0]) in moved:  # else it is part of the product
            account.launches.alone += launches * (first + recomputed)
        _count_lowering(node, dims, names, account, (first, recomputed))


def _count_moves(
    program: Program,
    dims: Dims,
    assignment: Assignment,
    classes: LayerClasses,
    account: _Account,
    moved: Mapping[Value, list[CountedMove]],
) -> None:
    tables = Tables(account.machine)
    sizes: dict[tuple[Redistributions, tuple[Move, ...]], list[float]] = {}
    copies: dict[tuple[Redistributions, tuple[Move, ...]], Floats] = {}
    known: dict[tuple[Any, frozenset[str]], Floats] = {}
    regions, axes = account.regions, len(account.machine.names)
    readers = _readers(program, assignment, moved)
    for value, counted in moved.items():
        table, moves, node = tables.of(dims.types[value]), [move for move, _, _ in counted], value[0]
        key = (table, tuple(moves))
        chunks = regions.chunkable.get(value, frozenset())
        if key not in sizes:
            sizes[key] = [moved_bytes(table.type, move, account.machine.sizes, account.machine.load) for move in moves]
            copies[key] = table.launches(moves)
        for kinds in {frozenset(), chunks}:
            if (key, kinds) not in known:
                known[key, kinds] = table.chunked_seconds(moves, kinds)
        whole, least = known[key, frozenset()], known[key, chunks]
        # As the search counts them: to its consumer layout each member of a class is moved where the first is.
        first = (classes.members[classes.key[node]][0], value[1])
        consumer = assignment.consumer_layouts.get(value)
        through = () if consumer is None else table.path(assignment.outputs[value], consumer)
        start = consumer or assignment.outputs[value]
        levels = Counter[int]()
        for i, (size, (move, times, at)) in enumerate(zip(sizes[key], counted, strict=True)):
            account.move(node, move.collective, move.axis, size, times, float(whole[0, i]), float(whole[1:, i].sum()))
            backward, hoisted = at == IN_BACKWARD, at == HOISTED
            if move in through:
                name = (classes.key[node], value[1], backward, hoisted)
                if name not in account.shared:
                    account.shared[name] = regions.of_move(first, backward=backward, hoisted=hoisted)
                region, kind = account.shared[name]
            else:
                wanted = readers.get((value, backward), ())
                reader = next((n for n, w in wanted if w != start and move in table.path(start, w)), None)
                region, kind = regions.of_move(value, backward=backward, hoisted=hoisted, reader=reader)
            account.places.setdefault((value, backward), {})[region, kind] = None
            share, sent = float(account.step.messages(region, kind)[move.axis]), feature(kind, move.axis, axes)
            kernels, told = _features_of(whole[:, i], move.axis, axes, kind, share)
            account.add(region, KERNELS, kernels * times)
            account.add(region, sent, told * times)
            account.launches.alone += float(copies[key][i]) * times
            late = region.endswith(BACKWARD)
            bucket = Bucketed(move.collective, move.axis, kind, late, levels[at], times)
            as_counted = share * times, share * float(whole[1 + 2 * axes + move.axis, i]) * times
            account.launches.move(region, bucket, move, regions.together(value, late), size * times, as_counted)
            levels[at] += move.kind not in LOCAL_MOVES
            if chunks:
                more = account.hideable.setdefault(region, no_features(axes))
                least_kernels, least_told = _features_of(least[:, i], move.axis, axes, kind, share)
                more[KERNELS] += (least_kernels - kernels) * times
                more[sent] += (least_told - told) * times
                more[feature(CHUNKED, move.axis, axes)] += least[1 + axes + move.axis, i] * times


def _readers(
    program: Program, assignment: Assignment, values: Container[Value]
) -> Mapping[tuple[Value, bool], list[tuple[fx.Node, Layout]]]:
    """Operators by which either pass itself reads some values, in order, each with the layout that it wants."""
    found: dict[tuple[Value, bool], list[tuple[fx.Node, Layout]]] = defaultdict(list)
    for node, sources in program.sources.items():
        for source, layout in zip(sources, assignment.inputs[node], strict=True):
            if source in values:
                found[source, is_backward(node)].append((node, layout))
    return found


def _features_of(parts: Floats, axis: int, axes: int, kind: int, share: float) -> tuple[float, float]:
    """Seconds of kernels and waits, and of what is sent, of a move whose parts are told apart."""
    waits = parts[-1] if kind in BLOCKING_KINDS else 0.0
    return float(parts[0] + waits), float(parts[1 + axis] + share * parts[1 + 2 * axes + axis])


def _count_copies(program: Program, dims: Dims, assignment: Assignment, account: _Account, optimizer: str) -> None:
    """Copies to the host and back. All that a microbatch offloads, and optimizer state, is there at the same time."""
    machine = account.machine
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind == "parameter" and spec.name in assignment.offload.states:
            value = node.meta["val"]
            local = value.numel() // split_parts(assignment.outputs[node, 0], machine.sizes)
            size = float(optimizer_state_bytes(optimizer, local, value.element_size()))
            account.copy(next(iter(node.users), node), size, 2 * float(copy_seconds(size, machine.device)), BEFORE)
    offloaded = [(value, layout) for value, layout in assignment.outputs.items() if value in assignment.offload.made]
    offloaded += [
        (value, layout) for value, layout in assignment.consumer_layouts.items() if value in assignment.offload.moved
    ]
    for (node, out), layout in offloaded:
        type_ = dims.types[node, out]
        size = type_.bytes / split_parts(layout, machine.sizes)
        seconds = 2 * float(copy_seconds(size, machine.device)) * program.runs(node)
        account.copy(node, size, seconds, account.regions.names[node])
        account.launches.alone += 2 * program.runs(node)


def _count_lowering(
    node: fx.Node, dims: Dims, names: tuple[str, ...], account: _Account, runs: tuple[int, int]
) -> None:
    """Count the collectives of a lowering, whose seconds are the operator's; ``runs``: first, and recomputed."""
    operator, machine, regions, times = dims.operators[node], account.machine, account.regions, sum(runs)
    found = lowered_cost(operator, names, machine) if operator.rule.lower else None
    if found is None:
        return
    dtype = arithmetic_dtype(operator, machine.device)
    kernels = found.kernel_seconds(lambda work: kernel_seconds(work, dtype, machine.device))
    # What kernels do not hide of the collectives is no computation.
    account.compute -= (found.seconds(dtype, machine) - kernels) * times
    first = BEFORE if node in account.assignment.hoisted else regions.names[node]
    for made, each in found.collectives.items():
        axis, seconds = machine.names.index(made.axis), machine.seconds(made) * each
        account.move(node, made.kind, axis, made.bytes, times * each)
        account.communication += seconds * times
        account.launches.alone += each * times
        within = feature(WITHIN, axis, len(machine.names))
        account.add(first, within, seconds * runs[0])
        if runs[1]:
            account.add(regions.of_recomputed(node), within, seconds * runs[1])


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
