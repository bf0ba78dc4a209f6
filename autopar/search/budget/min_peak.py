"""`min_peak_recomputation`: what to save so that the peak is least, under the layouts of a plan.

What the plan saves and recomputes is decided anew, all of it at once, by the program of
`autopar.search.budget.live_ranges`. It counts each tensor in the layout in which it is held, and the arguments and
results of an operator in the layouts of its strategy. It leaves out the forward pass, and what is held while values are
moved or recomputed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property

from torch import fx

from autopar._torch_compat import storage_id
from autopar.ir.graph import Value, is_backward, producer, tensor_arguments, values_of
from autopar.ir.layout import Layout, replicated
from autopar.ir.plan import Plan
from autopar.ir.program import OF_BACKWARD, Program
from autopar.memory.liveness import copied_by_convolution
from autopar.memory.recompute import class_of, ranges
from autopar.search.budget.live_ranges import LiveRanges, minimize_peak
from autopar.search.predict import node_seconds
from autopar.sharding.assignment import assign
from autopar.sharding.candidates import split_parts
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses

LARGEST = 2000
"""The most tensors to decide on."""

SECONDS = 10.0
"""Time limit of each program."""


def min_peak_recomputation(
    program: Program,
    dims: Dims,
    classes: LayerClasses,
    plan: Plan,
    free: Collection[str],
    moved: Collection[str],
    enough: float = 0.0,
) -> Plan | None:
    """The plan with another choice of what is saved; None if there is too much to decide, or nothing.

    Args:
        program: the plan's, with all layers.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        plan: whose layouts stay.
        free: classes of operators that may be recomputed.
        moved: classes of values that may be re-gathered.
        enough: bytes of activations and of what the backward pass computes; a lower peak is not looked for.
    """
    added = _single_reader_layouts(program, dims, classes, plan, moved)
    plan = replace(plan, consumer_layouts={**plan.consumer_layouts, **added})
    all_saved = replace(plan, recompute={}, offload={})
    tensors = _Storages(program, dims, classes, all_saved)
    live = tensors.live_ranges(plan.cluster.device.copies)
    live.fixed.update(s for s in live.size if classes.key[tensors.producer[s]] not in free)
    if not 0 < len(live.size) - len(live.fixed) <= LARGEST:
        return None
    seconds = node_seconds(program, dims, all_saved)
    cost = {s: seconds.get(tensors.producer[s], 0.0) for s in live.size}
    _, recomputed = minimize_peak(live, enough=enough, cost=cost, seconds=SECONDS)
    members = _recomputed_members(tensors, classes, plan, free, moved, recomputed)
    other = {name: r for name, r in plan.recompute.items() if class_of(name) not in {*free, *moved}}
    found = {name: ranges(numbers, classes.count[class_of(name)]) for name, numbers in members.items()}
    return replace(plan, recompute={**other, **{name: r for name, r in found.items() if r}})


def _recomputed_members(
    tensors: _Storages,
    classes: LayerClasses,
    plan: Plan,
    free: Collection[str],
    moved: Collection[str],
    recomputed: Collection[int],
) -> dict[str, set[int]]:
    """Members of each class that a plan's ``recompute`` names where these storages are recomputed."""
    members: dict[str, set[int]] = defaultdict(set)
    for key in (k for k in classes.members if k in free or k in moved):
        for i, node in enumerate(classes.members[key]):
            own = {*tensors.computed(node)} & {*recomputed}
            if key in free and (own or not tensors.computed(node)):  # a view costs nothing
                members[key].add(i)
            for out in (o for k, o in classes.uses if k == key and f"{key} {o}" in plan.consumer_layouts):
                if own or not tensors.smaller_moved((node, out)):
                    members[f"consumer {key} {out}"].add(i)
    return members


def _single_reader_layouts(
    program: Program, dims: Dims, classes: LayerClasses, plan: Plan, moved: Collection[str]
) -> dict[str, Layout]:
    """Consumer layouts for values that one class reads, in a single other layout, so that they can be re-gathered."""
    assignment, found = assign(program, dims, plan, classes), {}
    for (key, out), users in classes.uses.items():
        members = classes.members[key]
        if len(users) > 1 or key not in moved or f"{key} {out}" in plan.consumer_layouts:
            continue
        taking = [n for user, _ in users for n in classes.members.get(user, ()) if n in program.sources]
        pairs = [pair for n in taking for pair in zip(program.sources[n], assignment.inputs[n], strict=True)]
        wanted = {layout for (source, o), layout in pairs if o == out and classes.key[source] == key}
        if len(wanted) == 1 and not wanted & {assignment.outputs[n, out] for n in members} and taking:
            found[f"{key} {out}"] = wanted.pop()
    return found


class _Storages:
    """Storages of a program's tensors, and into how many parts each is split while it is held.

    Attributes:
        program: whose tensors these are.
        assignment: their layouts.
        sizes: of the mesh axes.
        bytes: of all devices together.
        parts: in the smallest of the layouts that the value is needed in.
        producer: the operator that computes it.
        inputs: those that the model takes.
    """

    def __init__(self, program: Program, dims: Dims, classes: LayerClasses, plan: Plan) -> None:
        self.program, self.sizes = program, plan.axis_sizes
        self.assignment = assign(program, dims, plan, classes)
        self.bytes: dict[int, float] = {}
        self.parts: dict[int, int] = {}
        self.producer: dict[int, fx.Node] = {}
        self.inputs: set[int] = set()
        for node in (*program.placeholders, *program.sources):
            for i, value in enumerate(values_of(node)):
                # The first node with a storage allocates it; later ones are views.
                if value is not None and storage_id(value) not in self.bytes:
                    storage = storage_id(value)
                    self.bytes[storage] = float(value.untyped_storage().nbytes())
                    self.parts[storage] = max(self._parts(layout) for layout in self._layouts((node, i)))
                    if node in program.sources:
                        self.producer[storage] = node
                    else:
                        self.inputs.add(storage)
        for output, layout in zip(program.output_values, self.assignment.finals, strict=True):
            for storage in _storages(output) if output is not None else ():
                self.parts[storage] = max(self.parts[storage], self._parts(layout))

    def _parts(self, layout: Layout) -> int:
        return split_parts(layout, self.sizes)

    def _layouts(self, value: Value) -> list[Layout]:
        """The layout that a value is produced in, and its consumer layout."""
        produced = self.assignment.outputs.get(value, replicated(len(self.sizes)))
        return [produced, self.assignment.consumer_layouts.get(value, produced)]

    def computed(self, node: fx.Node) -> list[int]:
        """The storages that an operator allocates; a view allocates none."""
        return [storage for storage in _storages(node) if self.producer.get(storage) is node]

    def smaller_moved(self, value: Value) -> bool:
        """Whether a value is smaller in its consumer layout, so that it is saved in that."""
        produced, moved = self._layouts(value)
        return self._parts(moved) > self._parts(produced)

    def live_ranges(self, copies: float) -> LiveRanges:
        """What a device holds while each operator of the backward pass runs.

        Args:
            copies: see `Device.copies`.
        """
        found = LiveRanges()
        kinds = zip(self.program.outputs, self.program.output_values, strict=True)
        results = {s for o, v in kinds if v is not None and o.kind in ("result", *OF_BACKWARD) for s in _storages(v)}
        # Results and gradients of parameters stay; what else the backward pass computes lives from its producer to its
        # last reader.
        live: dict[int, list[float]] = {s: [0, math.inf] for s in results if self.producer.get(s) in self._forward}
        t = 0
        for node in self.program.sources:
            own = {s for n in node.all_input_nodes for s in _storages(n)} - self.inputs
            if not is_backward(node):
                for s in set(self.computed(node)) - results:
                    found.size[s], found.sources[s] = self._local_bytes(s), own
                continue
            for s in own & found.size.keys():
                found.first.setdefault(s, t)
                found.last[s] = t
            for s in (own | set(self.computed(node))) - found.size.keys():
                live[s] = [live.get(s, [t])[0], math.inf if s in results else t]
            found.base.append(self._working_bytes(node, copies))
            t += 1
        for s, (start, end) in live.items():
            for at in range(int(start), int(min(end, t - 1)) + 1):
                found.base[at] += self._local_bytes(s)
        return found

    @cached_property
    def _forward(self) -> set[fx.Node]:
        return {n for n in self.program.sources if not is_backward(n)}

    def _local_bytes(self, storage: int) -> float:
        return self.bytes[storage] / self.parts[storage]

    def _working_bytes(self, node: fx.Node, copies: float) -> float:
        """Bytes of arguments and results beyond what is held of them anyway, and of what the library copies."""
        beyond: dict[int, float] = {}
        layouts = self.assignment.inputs[node]
        for argument, layout in zip(tensor_arguments(node), layouts, strict=True):
            for s in _storages(argument):
                moved = layout not in self._layouts(producer(argument))
                if self._parts(layout) < self.parts[s] or moved:  # held beside the part that it is moved from
                    beyond[s] = max(beyond.get(s, 0.0), self.bytes[s] / self._parts(layout))
        for i, value in enumerate(values_of(node)):
            if value is not None and self.producer.get(storage_id(value)) is node:
                s = storage_id(value)
                beyond[s] = self.bytes[s] / self._parts(self.assignment.outputs[node, i]) - self._local_bytes(s)
        copied = copied_by_convolution(node)
        if copied and copies:
            gradient, data, weight = (self._parts(layout) for layout in layouts[:3])  # of the backward pass
            copied = copied_by_convolution(node, (data, weight, gradient))
        return sum(beyond.values()) + copies * copied


def _storages(node: fx.Node) -> list[int]:
    """The storages of a node's results, which those of a view share with its argument."""
    source, index = producer(node)
    # A getitem may have a fake tensor of its own, with another storage than its producer's output.
    values = values_of(node) if source is node else (values_of(source)[index],)
    return list(dict.fromkeys(storage_id(value) for value in values if value is not None))
