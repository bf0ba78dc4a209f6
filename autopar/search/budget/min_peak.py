"""`min_peak_recomputation`: what to save so that the peak is least, under the layouts of a plan.

What the plan keeps and makes again is chosen anew, all of it at once, by the program of
`autopar.search.budget.live_ranges`. It counts each tensor in the layout in which it waits, and what an operator takes
and makes in the layouts of its strategy; it leaves out what the forward pass holds, and what is held while values are
moved and made again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from autopar._torch_compat import storage_id
from autopar.ir.graph import is_backward
from autopar.ir.layout import Layout, replicated
from autopar.ir.plan import Plan
from autopar.ir.program import GRADIENTS, Program, Value, producer, tensor_arguments, values_of
from autopar.memory.liveness import copied_by_convolution
from autopar.memory.recompute import class_of, ranges
from autopar.search.budget.live_ranges import LiveRanges, fewest
from autopar.search.predict import node_seconds
from autopar.sharding.assignment import Assignment, assign
from autopar.sharding.candidates import split_parts
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses

LARGEST = 2000
"""So many tensors are decided on at most."""

SECONDS = 10.0
"""For each program."""


@dataclass(frozen=True)
class Choice:
    """What may be decided.

    Attributes:
        free: classes of operators that may run again.
        moved: classes of values that may be moved again.
    """

    free: Collection[str]
    moved: Collection[str]


def min_peak_recomputation(
    program: Program, dims: Dims, classes: LayerClasses, plan: Plan, choice: Choice, enough: float = 0.0
) -> Plan | None:
    """The plan with another choice of what is kept; None if there is too much to decide, or too little.

    Args:
        program: the plan's, without blocks left out.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        plan: whose layouts stay.
        choice: what may be decided.
        enough: bytes of what the backward pass takes and makes; no less is looked for.
    """
    plan = replace(plan, consumer_layouts={**plan.consumer_layouts, **_shared(program, dims, classes, plan, choice)})
    bare = replace(plan, recompute={}, offload={})
    held = _Held.of(program, dims, classes, bare)
    lives = held.lives(plan.cluster.device.copies)
    lives.fixed.update(s for s in lives.size if classes.key[held.maker[s]] not in choice.free)
    if not 0 < len(lives.size) - len(lives.fixed) <= LARGEST:
        return None
    seconds = node_seconds(program, dims, bare)
    cost = {s: seconds.get(held.maker[s], 0.0) for s in lives.size}
    _, again = fewest(lives, enough=enough, cost=cost, seconds=SECONDS)
    members: dict[str, set[int]] = defaultdict(set)
    for key in (k for k in classes.members if k in choice.free or k in choice.moved):
        for i, node in enumerate(classes.members[key]):
            made = held.made(node)
            if key in choice.free and (not made or again.intersection(made)):
                members[key].add(i)
            for out in (o for k, o in classes.uses if k == key and f"{key} {o}" in plan.consumer_layouts):
                if again.intersection(made) or not held.kept_moved((node, out)):
                    members[f"consumer {key} {out}"].add(i)
    other = {name: r for name, r in plan.recompute.items() if class_of(name) not in {*choice.free, *choice.moved}}
    found = {name: ranges(numbers, classes.count[class_of(name)]) for name, numbers in members.items()}
    return replace(plan, recompute={**other, **{name: r for name, r in found.items() if r}})


def _shared(program: Program, dims: Dims, classes: LayerClasses, plan: Plan, choice: Choice) -> dict[str, Layout]:
    """Relays for values that one class of operators takes, all in one other layout, so that it can be moved again."""
    assignment, found = assign(program, dims, plan, classes), {}
    for (key, out), users in classes.uses.items():
        members = classes.members[key]
        if len(users) > 1 or key not in choice.moved or f"{key} {out}" in plan.consumer_layouts:
            continue
        taking = [n for user, _ in users for n in classes.members.get(user, ()) if n in program.sources]
        pairs = [pair for n in taking for pair in zip(program.sources[n], assignment.inputs[n], strict=True)]
        wanted = {layout for (source, o), layout in pairs if o == out and classes.key[source] == key}
        if len(wanted) == 1 and not wanted & {assignment.outputs[n, out] for n in members} and taking:
            found[f"{key} {out}"] = wanted.pop()
    return found


@dataclass(frozen=True)
class _Held:
    """Tensors of a program by their storage, and into how many parts each is cut while it waits.

    Attributes:
        program: whose tensors these are.
        assignment: their layouts.
        sizes: of the mesh axes.
        bytes: of all devices together.
        parts: while it waits.
        maker: the operator that makes it.
        given: those that the model takes.
    """

    program: Program
    assignment: Assignment
    sizes: tuple[int, ...]
    bytes: dict[int, float] = field(default_factory=dict)
    parts: dict[int, int] = field(default_factory=dict)
    maker: dict[int, fx.Node] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)

    @staticmethod
    def of(program: Program, dims: Dims, classes: LayerClasses, plan: Plan) -> _Held:
        found = _Held(program, assign(program, dims, plan, classes), plan.axis_sizes)
        for node in (*program.placeholders, *program.sources):
            for i, value in enumerate(values_of(node)):
                if value is not None and storage_id(value) not in found.bytes:
                    storage = storage_id(value)
                    found.bytes[storage] = float(value.untyped_storage().nbytes())
                    found.parts[storage] = max(found._parts(layout) for layout in found._layouts((node, i)))
                    if node in program.sources:
                        found.maker[storage] = node
                    else:
                        found.given.add(storage)
        for output, layout in zip(program.output_values, found.assignment.finals, strict=True):
            for storage in _storages(output) if output is not None else ():
                found.parts[storage] = max(found.parts[storage], found._parts(layout))
        return found

    def _parts(self, layout: Layout) -> int:
        return split_parts(layout, self.sizes)

    def _layouts(self, value: Value) -> list[Layout]:
        """In which a value is made, and in which it is handed on."""
        made = self.assignment.outputs.get(value, replicated(len(self.sizes)))
        return [made, self.assignment.consumer_layouts.get(value, made)]

    def made(self, node: fx.Node) -> list[int]:
        """What an operator makes."""
        return [storage for storage in _storages(node) if self.maker.get(storage) is node]

    def kept_moved(self, value: Value) -> bool:
        """Whether a value that is kept takes less in its moved form."""
        made, moved = self._layouts(value)
        return self._parts(moved) > self._parts(made)

    def lives(self, copies: float) -> LiveRanges:
        """What a device holds while each operator of the backward pass runs."""
        found = LiveRanges()
        kinds = zip(self.program.outputs, self.program.output_values, strict=True)
        results = {s for o, v in kinds if v is not None and o.kind in ("result", *GRADIENTS) for s in _storages(v)}
        there: dict[int, list[float]] = {s: [0, math.inf] for s in results if self.maker.get(s) in self._forward}
        t = 0
        for node in self.program.sources:
            own = {s for n in node.all_input_nodes for s in _storages(n)} - self.given
            if not is_backward(node):
                for s in set(self.made(node)) - results:
                    found.size[s], found.sources[s] = self._waits(s), own
                continue
            for s in own & found.size.keys():
                found.first.setdefault(s, t)
                found.last[s] = t
            for s in (own | set(self.made(node))) - found.size.keys():
                there[s] = [there.get(s, [t])[0], math.inf if s in results else t]
            found.base.append(self._beyond(node, copies))
            t += 1
        for s, (begin, end) in there.items():
            for at in range(int(begin), int(min(end, t - 1)) + 1):
                found.base[at] += self._waits(s)
        return found

    @cached_property
    def _forward(self) -> set[fx.Node]:
        return {n for n in self.program.sources if not is_backward(n)}

    def _waits(self, storage: int) -> float:
        return self.bytes[storage] / self.parts[storage]

    def _beyond(self, node: fx.Node, copies: float) -> float:
        """What an operator takes and makes besides what waits, and what its library copies."""
        beyond: dict[int, float] = {}
        into = self.assignment.inputs[node]
        for argument, layout in zip(tensor_arguments(node), into, strict=True):
            for s in _storages(argument):
                moved = layout not in self._layouts(producer(argument))
                if self._parts(layout) < self.parts[s] or moved:  # beside the part that waits
                    beyond[s] = max(beyond.get(s, 0.0), self.bytes[s] / self._parts(layout))
        for i, value in enumerate(values_of(node)):
            if value is not None and self.maker.get(storage_id(value)) is node:
                s = storage_id(value)
                beyond[s] = self.bytes[s] / self._parts(self.assignment.outputs[node, i]) - self._waits(s)
        copied = copied_by_convolution(node)
        if copied and copies:
            given, taken, weight = (self._parts(layout) for layout in into[:3])  # of the backward pass
            copied = copied_by_convolution(node, (taken, weight, given))
        return sum(beyond.values()) + copies * copied


def _storages(node: fx.Node) -> list[int]:
    """Of what a node makes, or what its results are views of."""
    return list(dict.fromkeys(storage_id(value) for value in values_of(node) if value is not None))
