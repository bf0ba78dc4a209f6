"""`States`: under a plan, what of the forward pass is kept for the backward pass or made again, and what either takes.

A *form* is ``(node, MADE)``, all that an operator makes, or ``(node, i)``, its output ``i`` moved to the layout in
which its users get it, or kept where the rest is made again. On these the search decides, see
`autopar.search.formulation.build`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from torch import fx

from autopar.costs.host_copies import copy_seconds
from autopar.costs.memory import optimizer_state_bytes
from autopar.ir.graph import is_backward
from autopar.ir.layout import Layout, item_bytes
from autopar.ir.plan import Plan
from autopar.ir.program import Program, Value, producer
from autopar.sharding.assignment import assign, machine_of
from autopar.sharding.candidates import candidates, split_parts
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute import Tables

Form = tuple[fx.Node, int]

MADE = -1


class States:
    """Forms of the forward pass: in which state they are, their bytes, and the seconds that making them takes.

    Attributes:
        kept: forms that are held until the backward pass.
        again: forms that are made or moved again there.
        away: of what is kept, what lies on the host until then.
        optimizer: of parameters whose optimizer state may lie on the host, whether it does; empty if none does.
        price: seconds that a byte is worth.
    """

    def __init__(self, program: Program, dims: Dims, plan: Plan, classes: LayerClasses) -> None:
        """Read a plan.

        Args:
            program: canonical program, padded as the plan wants it.
            dims: its dimension analysis.
            plan: of the program.
            classes: which nodes share a decision.
        """
        self.program, self.dims, self.classes = program, dims, classes
        self.price = plan.certificate.memory_price
        self._assignment = assign(program, dims, plan, classes)
        self._tables = Tables(machine_of(plan))
        self._kernels: dict[tuple[str, tuple[str, ...]], float] = {}
        outputs = [None if v is None else producer(v) for v in program.output_values]
        self._early = {s for n, sources in program.sources.items() if not is_backward(n) for s in sources}
        self._early.update(v for v in outputs[: program.forward_outputs] if v is not None)
        self._late = {s for n, sources in program.sources.items() if is_backward(n) for s in sources}
        self._late.update(v for v in outputs[program.forward_outputs :] if v is not None)
        again = self._assignment.recompute
        taken = self._late | {s for node in again.nodes for s in program.sources[node]}
        self._apart = {v for v in taken if v[0] in again.nodes and v not in again.values}
        self.kept, self.again = self._read(taken)
        self.kept |= self._steady()
        self._optimizer, gone = plan.optimizer, self._assignment.offload.states
        inputs = zip(program.placeholders, program.inputs, strict=True)
        trained = {o.name for o, v in zip(program.outputs, outputs, strict=True) if o.kind == "gradient" and v}
        self.optimizer = {n: i.name in gone for n, i in inputs if gone and i.kind == "parameter" and i.name in trained}
        self.away = {self.taken(v) for v in (*self._assignment.offload.made, *self._assignment.offload.moved)}

    def _read(self, taken: Collection[Value]) -> tuple[set[Form], set[Form]]:
        again = self._assignment.recompute
        kept: set[Form] = set()
        repeated: set[Form] = set()
        for value in taken:
            node, form = value[0], self.taken(value)
            if is_backward(node):
                continue
            if value not in again.values:
                kept.add(form)
                continue
            if form[1] != MADE:
                repeated.add(form)
            if node in again.nodes:
                repeated.add(self.shown((node, MADE)))
            else:
                kept.add(self.shown((node, MADE)))
        return kept, repeated

    def _steady(self) -> set[Form]:
        """What all microbatches take, which is held as what the backward pass takes."""
        steady, found = self._assignment.hoisted, set[Form]()
        for node, sources in self.program.sources.items():
            for value in sources if node not in steady.nodes else ():
                if self.taken(value)[1] == MADE or value in steady.consumer_layouts:
                    found.update(
                        [self.taken(value)] if value[0] in steady.nodes or value in steady.consumer_layouts else []
                    )
                elif value[0] in steady.nodes:
                    found.add(self.shown((value[0], MADE)))
        return found - self.again

    @cached_property
    def forms(self) -> list[Form]:
        """Forms of memory of their own, in the order in which they are made; inputs as they lie are none."""
        found: list[Form] = []
        for node in self.classes.key:
            if is_backward(node):
                continue
            if node in self.program.sources and self.shown((node, MADE)) == (node, MADE):
                found.append((node, MADE))
            values = [(node, k) for k in range(self._outputs(node))]
            found += [value for value in values if self._moved(value) or value in self._apart]
        return found

    def available(self, form: Form) -> bool:
        """Whether the backward pass has it: an input, kept, or made again."""
        given = form[1] == MADE and form[0] not in self.program.sources
        return given or form in self.kept or form in self.again

    def taken(self, value: Value) -> Form:
        """The form of a value that its users take."""
        return value if value in self._apart else self.shown(value if self._moved(value) else (value[0], MADE))

    def shown(self, form: Form) -> Form:
        """The form whose memory a view shows; of others the same."""
        node = form[0]
        while form[1] == MADE and node in self.program.sources and self.dims.operators[node].rule.view:
            source = self.program.sources[node][0]
            if self._assignment.inputs[node][0] != self._layout(source):
                break
            form = source if self._moved(source) else (source[0], MADE)
            node = form[0]
        return form

    def inputs(self, form: Form) -> list[Form]:
        """What it is made from."""
        node = form[0]
        if form[1] != MADE:
            return [self.shown((node, MADE))]
        return list(dict.fromkeys(self.taken(source) for source in self.program.sources[node]))

    def bytes(self, form: Form) -> float:
        """On a device, of what the backward pass may take of it."""
        node, i = form
        if i != MADE:
            return self._bytes(form, self._layout(form))
        again = self._assignment.recompute
        outputs = [(node, k) for k in range(self._outputs(node))]
        if node in again.nodes:
            used = [v for v in outputs if v in again.values]
        else:
            used = [v for v in outputs if v in self._late] or [v for v in outputs if v in self._early]
        return sum(self._bytes(v, self._assignment.outputs[v]) for v in used)

    def seconds(self, form: Form) -> float:
        """In a step, to make it from what its operator takes: the kernel, and the moves of the arguments.

        Of what all microbatches may share it is how much longer it takes to make it in each.
        """
        runs = self.program.runs(form[0])
        if form[0] in self.program.microbatch_invariant:
            runs = runs * (2 if any(value[0] == form[0] for value in self._late) else 1) - 1
        return self._once(form) * runs

    def copied(self, form: Form) -> float:
        """Seconds in a step to send it to the host and back; infinite where there is no way."""
        return self.copied_once(self.bytes(form)) * self.program.runs(form[0])

    def copied_once(self, size: float) -> float:
        """Seconds to send so many bytes to the host and back."""
        return 2 * float(copy_seconds(size, self._tables.machine.device))

    def state_bytes(self, node: fx.Node) -> float:
        """On a device, of a parameter's optimizer state."""
        item = item_bytes(self.dims.types[node, 0].dtype)
        elements = round(self._bytes((node, 0), self._assignment.outputs[node, 0])) // item
        return float(optimizer_state_bytes(self._optimizer, elements, item))

    def _once(self, form: Form) -> float:
        node, i = form
        made, into = self._assignment.outputs, self._assignment.inputs
        if i != MADE:
            return self._move(form, made[form], self._layout(form))
        key = (self.classes.key[node], self._assignment.strategies[node])
        if key not in self._kernels:
            operator, machine = self.dims.operators[node], self._tables.machine
            one = candidates(operator, machine.sizes, allowed=[[name] for name in key[1]])
            self._kernels[key] = float(operator_seconds(operator, one, machine)[0])
        moves = zip(self.program.sources[node], into[node], strict=True)
        return self._kernels[key] + sum(self._move(s, self._layout(s), wanted) for s, wanted in moves)

    def word(self, form: Form) -> str:
        """For people, how the form of an output comes about."""
        path = self._tables.of(self.dims.types[form]).path(self._assignment.outputs[form], self._layout(form))
        if not path:
            return f"output {form[1]}"
        return "gathered" if {move.kind for move in path} == {"all_gather"} else "moved"

    def _outputs(self, node: fx.Node) -> int:
        return len(self.dims.operators[node].outputs) if node in self.dims.operators else 1

    def _moved(self, value: Value) -> bool:
        """Whether a value is moved for all its users; what only the backward pass takes is moved there."""
        relay = self._assignment.consumer_layouts.get(value)
        return relay is not None and relay != self._assignment.outputs[value] and value in self._early

    def _layout(self, value: Value) -> Layout:
        """In which the users of a value get it."""
        return (self._assignment.consumer_layouts if self._moved(value) else self._assignment.outputs)[value]

    def _bytes(self, value: Value, layout: Layout) -> float:
        type_ = self.dims.types[value]
        return type_.numel * item_bytes(type_.dtype) / split_parts(layout, self._tables.machine.sizes)

    def _move(self, value: Value, source: Layout, target: Layout) -> float:
        table = self._tables.of(self.dims.types[value])
        return float(table.seconds[table.index[source], table.index[target]])
