"""`PeakPoint`: an operator, and what a device certainly holds while that runs.

Memory is short at one moment of a step. A row for that moment says more than one for all that is kept when the
backward pass begins: a model over many words holds several times its logits there, which no layout avoids. What is
there, besides parameters and their state: what is kept and still taken later; results and gradients that were made
before; what the operator takes and makes. Values that it takes are counted there, whether they are kept or made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.ir.graph import is_backward
from autopar.ir.layout import item_bytes
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.program import Program, Value, producer, values_of
from autopar.search.formulation.variable import Floats, Ints, Variable
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Tables


@dataclass(frozen=True)
class LiveRange:
    """From which position to which a value is held, if it is kept.

    Attributes:
        made: behind this position.
        until: before this one.
        instead: what is there afterwards.
        later: before this position.
    """

    made: float
    until: float
    instead: Value | None = None
    later: float = -math.inf


ALWAYS = LiveRange(-math.inf, math.inf)


@dataclass(frozen=True)
class PeakPoint:
    """An operator of the program, while it runs.

    Attributes:
        node: the operator.
        position: where it is.
        inputs: numbers of its arguments that count: each value once, none that is held anyway.
        outputs: numbers of its results that count.
        results: the model's results that are there and not among these, by name.
        gradients: bytes of the gradients that are there and not among these, on one device, by parameter.
        present: what counts with these, and so not where it is kept.
        spans: of the value of each member, by class and output; with True of the relay.
    """

    node: fx.Node
    position: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    results: frozenset[str]
    gradients: Mapping[str, float]
    present: Collection[Value]
    spans: Mapping[tuple[str, int, bool], tuple[LiveRange, ...]]

    def counted(self, key: str, out: int, members: Sequence[fx.Node], *, relay: bool) -> list[Value] | None:
        """What is there for members of a class that keep something, but not that; None if there is nothing for one.

        What is kept for its only user to be made again is gone once that is done, but then this user's output is there.
        """
        found = []
        for span, member in zip(self.spans[key, out, relay], members, strict=True):
            if (member, out) in self.present:
                return None
            if not span.made < self.position < span.until:
                instead = span.instead
                if instead is None or instead in self.present or not span.made < self.position < span.later:
                    return None
                found.append(instead)
        return found


class Timeline:
    """When the values of a program are held, in the order of its operators.

    Args:
        program: whose operators these are.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        tables: the layouts of each type of tensor.
        repeated: whether an operator of the forward pass may be made again.
    """

    def __init__(
        self, program: Program, dims: Dims, classes: LayerClasses, tables: Tables, repeated: Callable[[fx.Node], bool]
    ) -> None:
        self.program, self.dims, self.classes, self.tables, self.repeated = program, dims, classes, tables, repeated
        self.position = {n: float(i) for i, n in enumerate(program.graph.graph.nodes)}
        self.users: dict[Value, list[fx.Node]] = {}
        for node, sources in program.sources.items():
            for source in sources:
                self.users.setdefault(source, []).append(node)
        self.taken_late = self._taken_late()
        self.spans = self._spans()
        self.gradients = self._gradients()

    def at(self, node: fx.Node) -> PeakPoint:
        """The moment when an operator runs."""
        sources, operator = self.program.sources[node], self.dims.operators[node]
        places = range(len(sources))
        first = {source: i for i, source in reversed([*zip(places, sources, strict=True)])}
        inputs = tuple(i for i in places if first[sources[i]] == i and self._counts(sources[i]))
        outputs = () if operator.rule.view else tuple(i for i, o in enumerate(operator.outputs) if o is not None)
        present = {value for source in sources for value in self._shown(source)}
        present.update((node, i) for i in outputs)
        now = self.position[node]
        results: dict[str, list[Value]] = {}
        for output, value in zip(self.program.outputs, self.program.output_values, strict=True):
            if output.kind != "result" or value is None:
                continue
            shown = self._shown(producer(value))
            before = shown[-1][0] in self.program.sources and self.position[shown[-1][0]] < now
            if before and self._counts(shown[0]) and present.isdisjoint(shown):
                results[output.name] = shown
        present.update(value for shown in results.values() for value in shown)
        gradients = {name: size for name, (made, size, shown) in self.gradients.items()
                     if made < now and present.isdisjoint(shown)}  # fmt: skip
        return PeakPoint(node, now, inputs, outputs, frozenset(results), gradients, frozenset(present), self.spans)

    def heaviest(self, variables: Sequence[Variable], labelings: Sequence[Ints]) -> PeakPoint:
        """The moment when most is held, under several labelings together.

        Args:
            variables: of a problem that counts what is kept when the backward pass begins.
            labelings: labels of each.
        """
        # What runs once a step does so before the microbatches, or behind them: nothing of one is there.
        once = self.program.microbatch_invariant | self.program.per_step
        nodes = [n for n in self.program.sources if n.target is not accumulate and n not in once]
        held = sum(self._held(nodes, variables, labels) for labels in labelings)
        return self.at(nodes[int(np.argmax(held))])

    def _held(self, nodes: Sequence[fx.Node], variables: Sequence[Variable], labels: Ints) -> Floats:
        """Bytes that are held while each operator runs, parameters and results apart."""
        chosen = [*zip(variables, labels, strict=True)]
        working = {v.key: float(v.working[x]) for v, x in chosen if v.working is not None}
        kept = {v.key: float(v.memory[x]) for v, x in chosen if v.state is not None and v.memory[x] > 0}
        # What is there for all members of a class alone counts in the row.
        rows = [
            (size, max(s.made for s in spans), min(max(s.until, s.later) for s in spans))
            for size, spans in ((size, self._of(key)) for key, size in kept.items())
        ]
        sizes, made, until = np.array(rows).reshape(-1, 3).T
        found = self._reduced(nodes, chosen)
        for i, node in enumerate(nodes):
            now = self.position[node]
            own = {self.classes.key[source] for source, _ in self.program.sources[node]}
            twice = sum(kept.get(k, 0.0) / self.classes.count[k] for k in own)
            found[i] += working.get(self.classes.key[node], 0.0) + sizes[(made < now) & (now < until)].sum() - twice
        return found

    def _reduced(self, nodes: Sequence[fx.Node], chosen: Sequence[tuple[Variable, int]]) -> Floats:
        """Bytes of gradients that were made before each operator."""
        variables = {v.key: (v, x) for v, x in chosen}
        rows = []
        for node, spec in zip(self.program.placeholders, self.program.inputs, strict=True):
            if spec.kind == "parameter" and spec.name in self.gradients:
                made, size, _ = self.gradients[spec.name]
                variable, label = variables[self.classes.key[node]]
                parts = self.tables.of(variable.types["out", 0]).parts
                rows.append((made, size / parts[variable.ports["out", 0][label]]))
        when, sizes = np.array(rows).reshape(-1, 2).T
        now = np.array([self.position[n] for n in nodes])
        found: Floats = np.where(when < now[:, None], sizes, 0.0).sum(axis=1)
        return found

    def _of(self, key: str) -> Sequence[LiveRange]:
        """When what a variable keeps of each member is held; of several outputs the first that is taken."""
        relay = key.startswith("consumer ")
        name, _, out = key.removeprefix("consumer ").rpartition(" ") if relay else (key, "", "")
        return next(
            s for (k, o, r), s in self.spans.items() if k == name and r == relay and (not relay or o == int(out))
        )

    def _gradients(self) -> dict[str, tuple[float, float, list[Value]]]:
        """Of each parameter when its gradient is made, its bytes with those it stands for, and what it shows.

        A sum over microbatches is there all the time, and counts where it is made. What is made of it once a step is
        not there while a microbatch runs.
        """
        once = self.program.microbatch_invariant | self.program.per_step
        found: dict[str, tuple[float, float, list[Value]]] = {}
        for output, node in zip(self.program.outputs, self.program.output_values, strict=True):
            if output.kind != "gradient" or node is None:
                continue
            value = producer(node)
            shown = self._shown(value)
            if self._counts(value) and not any(v[0].target is accumulate or v[0] in once for v in shown):
                type_, repeat = self.dims.types[value], self.program.repeat
                times = len(repeat.names(output.name)) if repeat else 1
                found[output.name] = self.position[value[0]], times * type_.numel * item_bytes(type_.dtype), shown
        return found

    def _shown(self, value: Value) -> list[Value]:
        """The value, and what it is a view of."""
        found = [value]
        while found[-1][0] in self.dims.operators and self.dims.operators[found[-1][0]].rule.view:
            found.append(self.program.sources[found[-1][0]][0])
        return found

    def _counts(self, value: Value) -> bool:
        """Whether an operator made what the value shows, and all of it has memory of its own."""
        tensor = values_of(value[0])[value[1]]
        made = self._shown(value)[-1][0] in self.program.sources
        return made and tensor is not None and tensor.untyped_storage().nbytes() >= tensor.nbytes

    def _taken_late(self) -> dict[Value, float]:
        """When the backward pass takes each forward value first, or something that it makes again of it."""
        found: dict[Value, float] = {}
        for node in reversed(self.program.sources):
            first = self.position[node]
            if not is_backward(node):
                made = range(len(self.dims.operators[node].outputs)) if self.repeated(node) else ()
                first = min((found.get((node, i), math.inf) for i in made), default=math.inf)
            for source in self.program.sources[node]:
                found[source] = min(found.get(source, math.inf), first)
        return found

    def _spans(self) -> dict[tuple[str, int, bool], tuple[LiveRange, ...]]:
        """When what each member of each class makes is held if it is kept, as it was made and as it is moved."""
        found: dict[tuple[str, int, bool], tuple[LiveRange, ...]] = {}
        for key, out in self.classes.uses:
            values = [(m, out) for m in self.classes.members[key]]
            if values[0][0] in self.program.microbatch_invariant:  # kept for all microbatches
                found[key, out, False] = found[key, out, True] = (ALWAYS,) * len(values)
                continue
            found[key, out, False] = tuple(self._made(v) for v in values)
            found[key, out, True] = tuple(self._moved(v) for v in values)
        return found

    def _first(self, value: Value) -> float:
        return self.taken_late.get(value, -math.inf)

    def _made(self, value: Value) -> LiveRange:
        """When a value is held as it was made: until the backward pass takes it first, and may move it."""
        return LiveRange(self.position[value[0]], self._first(value), *self._instead(value))

    def _moved(self, value: Value) -> LiveRange:
        """When the moved form of a value is held: all users have it, and the last direct one has it longest."""
        users = self.users.get(value, [])
        made = max((self.position[u] for u in users if not is_backward(u)), default=math.inf)
        return LiveRange(made, max(self._first(value), self._last(value)), *self._instead(value))

    def _last(self, value: Value) -> float:
        """When the backward pass takes a value itself for the last time."""
        return max((self.position[u] for u in self.users.get(value, []) if is_backward(u)), default=-math.inf)

    def _instead(self, value: Value) -> tuple[Value | None, float]:
        """What its only user makes of a value, and until when that is held if it is made again."""
        users = self.users.get(value, [])
        made = (users[0], 0) if len(users) == 1 and not is_backward(users[0]) and self.repeated(users[0]) else None
        if made is None or self.dims.operators[made[0]].rule.view or not self._counts(made):
            return None, -math.inf
        return made, self._last(made)
