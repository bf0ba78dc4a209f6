"""`ProgramPoint`: an operator, and what a device certainly holds while it runs.

Memory is short at one point of a step, and a constraint at that point says more than one for everything that is saved
when the backward pass begins: a language model's logits take several times that at the end of the forward pass, and no
layout avoids them. At a point there are, besides parameters and their states: saved activations that are read later;
results and gradients that are complete; the arguments and results of the operator itself. A value that the operator
reads is counted there, whether it was saved or recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import fx

from autopar.ir.graph import Value, is_backward, producer, values_of
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.program import Program
from autopar.search.formulation.variables.variable import Floats, Ints, Port, Variable
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Tables


@dataclass(frozen=True)
class LiveRange:
    """Between which positions a value is held if it is saved for backward.

    Attributes:
        start: it is held after this position.
        end: it is held before this position.
        substitute: what its only reader computes from it. Recomputing that reader frees the value, but then this is
            held in its place.
        substitute_end: the substitute is held before this position.
    """

    start: float
    end: float
    substitute: Value | None = None
    substitute_end: float = -math.inf


WHOLE_STEP = LiveRange(-math.inf, math.inf)

RangeKey = tuple[str, int, bool]
"""A class, one of its outputs, and whether its consumer layout is meant and not the layout it was produced in."""


@dataclass(frozen=True)
class ProgramPoint:
    """An operator of the program, while it runs.

    Attributes:
        node: the operator.
        position: its place in program order.
        inputs: numbers of its arguments that count: each value once, and only values of operators.
        outputs: numbers of its results that count.
        results: names of the model's results that are complete, and no views of what is counted already.
        gradients: bytes, on one device, of the gradients that are complete and not counted already, by parameter.
        present: values that the above count, so that they do not count where they are saved.
        live_ranges: of each member of a class.
    """

    node: fx.Node
    position: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    results: frozenset[str]
    gradients: Mapping[str, float]
    present: Collection[Value]
    live_ranges: Mapping[RangeKey, tuple[LiveRange, ...]]

    def substitutes(self, key: str, out: int, members: Sequence[fx.Node], *, consumer: bool) -> list[Value] | None:
        """What is held here in place of the saved values of a class that are no longer live.

        Args:
            key: of the class.
            out: the output that is saved.
            members: of the class.
            consumer: whether the consumer layout is saved.

        Returns:
            A value for each member that is not live itself; None if some member holds nothing here, so that the class,
            whose members share one decision, certainly holds nothing.
        """
        found = []
        for live, member in zip(self.live_ranges[key, out, consumer], members, strict=True):
            if (member, out) in self.present:
                return None
            if live.start < self.position < live.end:
                continue
            substitute = live.substitute
            if substitute is None or substitute in self.present:
                return None
            if not live.start < self.position < live.substitute_end:
                return None
            found.append(substitute)
        return found


@dataclass(frozen=True, eq=False)
class LiveRangeTable:
    """When the values of a program are live, in the order of its operators.

    Attributes:
        program: whose operators these are.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        tables: the layouts of each type of tensor.
        may_recompute: whether an operator of the forward pass may be recomputed.
    """

    program: Program
    dims: Dims
    classes: LayerClasses
    tables: Tables
    may_recompute: Callable[[fx.Node], bool]

    def at(self, node: fx.Node) -> ProgramPoint:
        """The program point at which an operator runs."""
        now = self._position[node]
        inputs, outputs, results, present = self._while_running(node)
        gradients = {name: size for name, (start, size, values) in self._gradients.items()
                     if start < now and present.isdisjoint(values)}  # fmt: skip
        return ProgramPoint(node, now, inputs, outputs, results, gradients, frozenset(present), self._live_ranges)

    def _while_running(
        self, node: fx.Node
    ) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[str], AbstractSet[Value]]:
        """Arguments and results of an operator that count, results of the model that do, and the values of all these.

        See `ProgramPoint`.
        """
        sources, operator = self.program.sources[node], self.dims.operators[node]
        numbers = range(len(sources))
        first = {source: i for i, source in reversed([*zip(numbers, sources, strict=True)])}
        # Parameters and the batch are there anyway; a value that is read twice is there once.
        inputs = tuple(i for i in numbers if first[sources[i]] == i and self._counts(sources[i]))
        # A view allocates nothing.
        outputs = () if operator.rule.view else tuple(i for i, o in enumerate(operator.outputs) if o is not None)
        present = {value for source in sources for value in self._with_bases(source)}
        present.update((node, i) for i in outputs)
        results = self._complete_results(self._position[node], present)
        present.update(value for values in results.values() for value in values)
        return inputs, outputs, frozenset(results), present

    def _complete_results(self, now: float, present: Collection[Value]) -> dict[str, list[Value]]:
        """The model's results that are computed before a position, with what they are views of, by name."""
        found: dict[str, list[Value]] = {}
        for output, value in zip(self.program.outputs, self.program.output_values, strict=True):
            if output.kind != "result" or value is None:
                continue
            values = self._with_bases(producer(value))
            before = values[-1][0] in self.program.sources and self._position[values[-1][0]] < now
            if before and self._counts(values[0]) and not any(v in present for v in values):
                found[output.name] = values
        return found

    def peak(self, variables: Sequence[Variable], labelings: Sequence[Ints]) -> ProgramPoint:
        """The program point at which several labelings together hold the most.

        Args:
            variables: of a problem that counts what is saved when the backward pass begins.
            labelings: labels of each.
        """
        # What runs once per step runs before or after the microbatches: nothing of a microbatch is live then.
        per_step = self.program.microbatch_invariant | self.program.per_step
        nodes = [n for n in self.program.sources if n.target is not accumulate and n not in per_step]
        # Together: a point that is high for several labelings bounds what lies between them, too.
        held = sum(self._held(nodes, variables, labels) for labels in labelings)
        return self.at(nodes[int(np.argmax(held))])

    def _held(self, nodes: Sequence[fx.Node], variables: Sequence[Variable], labels: Ints) -> Floats:
        """Bytes that count while each operator runs, as in `at`, without parameters."""
        chosen = {v.key: (v, int(x)) for v, x in zip(variables, labels, strict=True)}
        saved = [(v.key, float(v.memory[x])) for v, x in chosen.values() if v.state is not None and v.memory[x] > 0]
        # As in the memory constraint, a class counts only where the values of all its members are held.
        intervals = [
            (size, max(r.start for r in ranges), min(max(r.end, r.substitute_end) for r in ranges))
            for size, ranges in ((size, self._ranges_of(key)) for key, size in saved)
        ]
        sizes, start, end = np.array(intervals).reshape(-1, 3).T
        numbers: dict[str, list[int]] = {}
        for i, (key, _) in enumerate(saved):
            numbers.setdefault(_class_of(key), []).append(i)
        found = self._complete_gradients(nodes, [*chosen.values()])
        for i, node in enumerate(nodes):
            now = self._position[node]
            inputs, outputs, results, present = self._while_running(node)
            live = (start < now) & (now < end)
            for key in {self.classes.key[n] for n, _ in present}:
                live[numbers.get(key, [])] = False
            variable, x = chosen[self.classes.key[node]]
            found[i] += sizes[live].sum()
            found[i] += sum(self._bytes(variable, x, ("in", j)) for j in inputs)
            found[i] += sum(self._bytes(variable, x, ("out", j)) for j in outputs)
            found[i] += sum(self._bytes(*chosen[f"result {name}"], ("out", 0)) for name in results)
        return found

    def _bytes(self, variable: Variable, label: int, port: Port) -> float:
        """Bytes of one member's tensor under a label."""
        type_ = variable.types[port]
        return float(type_.bytes / self.tables.of(type_).parts[variable.ports[port][label]])

    def _complete_gradients(self, nodes: Sequence[fx.Node], chosen: Sequence[tuple[Variable, int]]) -> Floats:
        """Bytes of the gradients that are complete when each operator runs."""
        variables = {v.key: (v, x) for v, x in chosen}
        rows = []
        for node, spec in zip(self.program.placeholders, self.program.inputs, strict=True):
            if spec.kind == "parameter" and spec.name in self._gradients:
                start, size, _ = self._gradients[spec.name]
                variable, label = variables[self.classes.key[node]]
                parts = self.tables.of(variable.types["out", 0]).parts
                rows.append((start, size / parts[variable.ports["out", 0][label]]))
        when, sizes = np.array(rows).reshape(-1, 2).T
        now = np.array([self._position[n] for n in nodes])
        found: Floats = np.where(when < now[:, None], sizes, 0.0).sum(axis=1)
        return found

    def _ranges_of(self, key: str) -> Sequence[LiveRange]:
        """The live range of what a variable saves of each member; of several outputs, of the first that is read."""
        consumer = key.startswith("consumer ")
        name, out = _class_of(key), key.rpartition(" ")[2]
        return next(
            ranges
            for (k, o, c), ranges in self._live_ranges.items()
            if k == name and c == consumer and (not consumer or o == int(out))
        )

    @cached_property
    def _position(self) -> dict[fx.Node, float]:
        return {n: float(i) for i, n in enumerate(self.program.graph.graph.nodes)}

    @cached_property
    def _readers(self) -> dict[Value, list[fx.Node]]:
        found: dict[Value, list[fx.Node]] = {}
        for node, sources in self.program.sources.items():
            for source in sources:
                found.setdefault(source, []).append(node)
        return found

    @cached_property
    def _gradients(self) -> dict[str, tuple[float, float, list[Value]]]:
        """When each parameter's gradient is computed, its bytes for all repeated layers, and what it is a view of.

        A sum over microbatches is held throughout the step and counts at its accumulation. What is computed from it
        once per step is not there while a microbatch runs.
        """
        per_step = self.program.microbatch_invariant | self.program.per_step
        found: dict[str, tuple[float, float, list[Value]]] = {}
        for output, node in zip(self.program.outputs, self.program.output_values, strict=True):
            if output.kind != "gradient" or node is None:
                continue
            value = producer(node)
            values = self._with_bases(value)
            if self._counts(value) and not any(v[0].target is accumulate or v[0] in per_step for v in values):
                # A captured layer's gradient stands for those of all layers like it.
                type_, repeat = self.dims.types[value], self.program.repeat
                times = len(repeat.names(output.name)) if repeat else 1
                found[output.name] = self._position[value[0]], times * type_.bytes, values
        return found

    def _with_bases(self, value: Value) -> list[Value]:
        """The value, and each value that it is a view of."""
        found = [value]
        while found[-1][0] in self.dims.operators and self.dims.operators[found[-1][0]].rule.view:
            found.append(self.program.sources[found[-1][0]][0])
        return found

    def _counts(self, value: Value) -> bool:
        """Whether the value's memory comes from an operator, and is no expanded tensor's."""
        tensor = values_of(value[0])[value[1]]
        computed = self._with_bases(value)[-1][0] in self.program.sources
        return computed and tensor is not None and tensor.untyped_storage().nbytes() >= tensor.nbytes

    @cached_property
    def _first_backward_read(self) -> dict[Value, float]:
        """When the backward pass first reads each forward value, or something that it may recompute from it."""
        found: dict[Value, float] = {}
        for node in reversed(self.program.sources):
            first = self._position[node]
            if not is_backward(node):
                outputs = range(len(self.dims.operators[node].outputs)) if self.may_recompute(node) else ()
                first = min((found.get((node, i), math.inf) for i in outputs), default=math.inf)
            for source in self.program.sources[node]:
                found[source] = min(found.get(source, math.inf), first)
        return found

    @cached_property
    def _live_ranges(self) -> dict[RangeKey, tuple[LiveRange, ...]]:
        """The live range of each member of each class, as produced and in its consumer layout, if it is saved."""
        found: dict[RangeKey, tuple[LiveRange, ...]] = {}
        for key, out in self.classes.uses:
            values = [(m, out) for m in self.classes.members[key]]
            if values[0][0] in self.program.microbatch_invariant:  # saved for all microbatches
                found[key, out, False] = found[key, out, True] = (WHOLE_STEP,) * len(values)
                continue
            found[key, out, False] = tuple(self._as_produced(v) for v in values)
            found[key, out, True] = tuple(self._in_consumer_layout(v) for v in values)
        return found

    def _first(self, value: Value) -> float:
        return self._first_backward_read.get(value, -math.inf)

    def _as_produced(self, value: Value) -> LiveRange:
        """Certain only until the backward pass first reads the value, which may move it then."""
        return LiveRange(self._position[value[0]], self._first(value), *self._substitute(value))

    def _in_consumer_layout(self, value: Value) -> LiveRange:
        """Certain from the last forward reader, before which the move need not have happened, to the last reader."""
        readers = self._readers.get(value, [])
        start = max((self._position[u] for u in readers if not is_backward(u)), default=math.inf)
        return LiveRange(start, max(self._first(value), self._last(value)), *self._substitute(value))

    def _last(self, value: Value) -> float:
        """When the backward pass reads a value itself for the last time."""
        readers = self._readers.get(value, [])
        return max((self._position[u] for u in readers if is_backward(u)), default=-math.inf)

    def _substitute(self, value: Value) -> tuple[Value | None, float]:
        """What a value's only reader computes from it, and until when that is held if it is recomputed."""
        readers = self._readers.get(value, [])
        alone = len(readers) == 1 and not is_backward(readers[0]) and self.may_recompute(readers[0])
        if not alone or self.dims.operators[readers[0]].rule.view or not self._counts((readers[0], 0)):
            return None, -math.inf
        return (readers[0], 0), self._last((readers[0], 0))


def _class_of(key: str) -> str:
    """The class whose value a variable saves, as produced or in its consumer layout."""
    return key.removeprefix("consumer ").rpartition(" ")[0] if key.startswith("consumer ") else key
