"""`ActivationStates`: what a plan saves for the backward pass or recomputes there, and what either costs.

A *form* is ``(node, OPERATOR)``, all outputs that an operator computes, or ``(node, i)``, its output ``i`` in the
consumer layout, or an output saved although the rest of its operator is recomputed. The search decides form by form,
see `autopar.search.formulation.build`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import numpy as np
from torch import fx

from autopar.costs.host_copies import copy_seconds
from autopar.costs.memory import optimizer_state_bytes
from autopar.ir.graph import Value, is_backward, producer
from autopar.ir.layout import Layout, item_bytes
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.sharding.assignment import assign, machine_of
from autopar.sharding.candidates import candidates, split_parts
from autopar.sharding.dims import Dims
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.operator_cost import operator_seconds
from autopar.sharding.redistribute import Tables

Form = tuple[fx.Node, int]

OPERATOR = -1
"""In place of an output's number: all outputs of the operator."""

GATHERED, REDISTRIBUTED = "gathered", "redistributed"


class ActivationStates:
    """The forms of the forward pass: their states, their bytes, and the seconds that computing them takes.

    Attributes:
        saved: forms that stay in memory until the backward pass.
        recomputed: forms that the backward pass recomputes or redistributes once more.
        offloaded: those of ``saved`` that wait in host memory.
        state_offloaded: by parameter, whether its optimizer state is offloaded; empty if the plan offloads none.
        memory_price: shadow price of memory, seconds per byte.
    """

    def __init__(self, program: Program, dims: Dims, plan: Plan, classes: LayerClasses) -> None:
        """Read a plan.

        Args:
            program: canonical program, padded as the plan says.
            dims: its dimension analysis.
            plan: of the program.
            classes: which nodes share a decision.
        """
        self.program, self.dims, self.classes = program, dims, classes
        self.memory_price = plan.certificate.memory_price
        self._assignment = assign(program, dims, plan, classes)
        self._tables = Tables(machine_of(plan))
        self._kernels: dict[tuple[str, tuple[str, ...]], float] = {}
        outputs = [None if v is None else producer(v) for v in program.output_values]
        self._forward_uses, self._backward_uses = self._uses(outputs)
        recompute = self._assignment.recompute
        in_backward = self._backward_uses | {s for node in recompute.nodes for s in program.sources[node]}
        # Saving one output of a recomputed operator takes memory of its own: the output is a form by itself.
        self._separate = {v for v in in_backward if v[0] in recompute.nodes and v not in recompute.values}
        self.saved, self.recomputed = self._states(in_backward)
        self.saved |= self._hoisted()
        offload = self._assignment.offload
        self.offloaded = {self.consumer_form(v) for v in (*offload.made, *offload.moved)}
        self._optimizer = plan.optimizer
        self.state_offloaded = self._state_offloaded(outputs) if offload.states else {}

    def _uses(self, outputs: list[Value | None]) -> tuple[set[Value], set[Value]]:
        """Values that forward nodes use, and values that backward nodes use; outputs of a pass count as used there."""
        program, count = self.program, self.program.forward_outputs
        forward = {v for v in outputs[:count] if v is not None}
        backward = {v for v in outputs[count:] if v is not None}
        for node, sources in program.sources.items():
            (backward if is_backward(node) else forward).update(sources)
        return forward, backward

    def _states(self, in_backward: Collection[Value]) -> tuple[set[Form], set[Form]]:
        """Which forms are saved and which are recomputed, so that these values are there in the backward pass."""
        recompute = self._assignment.recompute
        saved: set[Form] = set()
        recomputed: set[Form] = set()
        for value in in_backward:
            node, form = value[0], self.consumer_form(value)
            if is_backward(node):
                continue
            if value not in recompute.values:
                saved.add(form)
                continue
            if form[1] != OPERATOR:
                recomputed.add(form)
            # What is only redistributed once more starts from the operator's own output, which must be saved.
            (recomputed if node in recompute.nodes else saved).add(self.storage((node, OPERATOR)))
        return saved, recomputed

    def _hoisted(self) -> set[Form]:
        """Forms that all microbatches share: computed before the first, in memory until the last has used them."""
        hoisted, found = self._assignment.hoisted, set[Form]()
        per_microbatch = {node: sources for node, sources in self.program.sources.items() if node not in hoisted}
        for value in (value for sources in per_microbatch.values() for value in sources):
            form, hoisted_layout = self.consumer_form(value), value in self._assignment.hoisted_consumer_layouts
            if hoisted_layout or (form[1] == OPERATOR and value[0] in hoisted):
                found.add(form)
            elif value[0] in hoisted:  # the operator is hoisted, the redistribution runs per microbatch
                found.add(self.storage((value[0], OPERATOR)))
        return found - self.recomputed

    def _state_offloaded(self, outputs: list[Value | None]) -> dict[fx.Node, bool]:
        program, offloaded = self.program, self._assignment.offload.states
        named = zip(program.outputs, outputs, strict=True)
        trained = {output.name for output, value in named if output.kind == "gradient" and value}
        inputs = zip(program.placeholders, program.inputs, strict=True)
        parameters = {node: spec.name for node, spec in inputs if spec.kind == "parameter" and spec.name in trained}
        return {node: name in offloaded for node, name in parameters.items()}

    @cached_property
    def forms(self) -> list[Form]:
        """Forms with memory of their own, in the order of execution; an input in its own layout is none."""
        found: list[Form] = []
        for node in self.classes.key:
            if is_backward(node):
                continue
            if node in self.program.sources and self.storage((node, OPERATOR)) == (node, OPERATOR):
                found.append((node, OPERATOR))
            values = [(node, k) for k in range(self._outputs(node))]
            found += [value for value in values if self._redistributed(value) or value in self._separate]
        return found

    def available(self, form: Form) -> bool:
        """Whether the backward pass has it: an input, saved, or recomputed."""
        is_input = form[1] == OPERATOR and form[0] not in self.program.sources
        return is_input or form in self.saved or form in self.recomputed

    def consumer_form(self, value: Value) -> Form:
        """The form of a value that its users read."""
        if value in self._separate:
            return value
        return self.storage(value if self._redistributed(value) else (value[0], OPERATOR))

    def storage(self, form: Form) -> Form:
        """The form that owns the memory: views are followed to what they show, other forms are their own."""
        node = form[0]
        while form[1] == OPERATOR and node in self.program.sources and self.dims.operators[node].rule.view:
            source = self.program.sources[node][0]
            # A view that wants its source in another layout shows the redistributed copy, not the source.
            if self._assignment.inputs[node][0] != self._layout(source):
                break
            form = source if self._redistributed(source) else (source[0], OPERATOR)
            node = form[0]
        return form

    def inputs(self, form: Form) -> list[Form]:
        """The forms that it is computed from."""
        node = form[0]
        if form[1] != OPERATOR:
            return [self.storage((node, OPERATOR))]
        return list(dict.fromkeys(self.consumer_form(source) for source in self.program.sources[node]))

    def bytes(self, form: Form) -> float:
        """Bytes on a device of what the backward pass may use of a form."""
        node, i = form
        if i != OPERATOR:
            return self._bytes(form, self._layout(form))
        recompute = self._assignment.recompute
        outputs = [(node, k) for k in range(self._outputs(node))]
        if node in recompute.nodes:
            used = [v for v in outputs if v in recompute.values]
        else:
            used = [v for v in outputs if v in self._backward_uses] or [v for v in outputs if v in self._forward_uses]
        return sum(self._bytes(v, self._assignment.outputs[v]) for v in used)

    def seconds(self, form: Form) -> float:
        """Seconds per step to compute a form from the operator's arguments: its kernel and their redistributions.

        Of a microbatch-invariant form, the seconds by which computing it in each microbatch exceeds computing it once.
        """
        runs = self.program.runs(form[0])
        if form[0] in self.program.microbatch_invariant:
            # Forward and, if the backward pass uses it, backward of every microbatch, less the one hoisted run.
            runs = runs * (2 if any(value[0] == form[0] for value in self._backward_uses) else 1) - 1
        return self._seconds_per_run(form) * runs

    def offload_seconds(self, form: Form) -> float:
        """Seconds per step to copy a form to the host and back; infinite without a link to the host."""
        return self.copy_seconds(self.bytes(form)) * self.program.runs(form[0])

    def copy_seconds(self, size: float) -> float:
        """Seconds to copy this many bytes to the host and back."""
        return 2 * float(copy_seconds(size, self._tables.machine.device))

    def state_bytes(self, node: fx.Node) -> float:
        """Bytes on a device of a parameter's optimizer state."""
        item = item_bytes(self.dims.types[node, 0].dtype)
        elements = round(self._bytes((node, 0), self._assignment.outputs[node, 0])) // item
        return float(optimizer_state_bytes(self._optimizer, elements, item))

    def _seconds_per_run(self, form: Form) -> float:
        node, i = form
        outputs, inputs = self._assignment.outputs, self._assignment.inputs
        if i != OPERATOR:
            return self._move_seconds(form, outputs[form], self._layout(form))
        key = (self.classes.key[node], self._assignment.strategies[node])
        if key not in self._kernels:  # layers repeat the same operator under the same strategy
            operator, machine = self.dims.operators[node], self._tables.machine
            one = candidates(operator, machine.sizes, allowed=[[name] for name in key[1]])
            self._kernels[key] = float(operator_seconds(operator, one, machine)[0])
        moves = zip(self.program.sources[node], inputs[node], strict=True)
        return self._kernels[key] + sum(self._move_seconds(s, self._layout(s), wanted) for s, wanted in moves)

    def origin(self, form: Form) -> str:
        """Where a form of one output comes from, for people: ``gathered``, ``redistributed`` or ``output N``."""
        path = self._tables.of(self.dims.types[form]).path(self._assignment.outputs[form], self._layout(form))
        if not path:
            return f"output {form[1]}"
        return GATHERED if {move.kind for move in path} == {"all_gather"} else REDISTRIBUTED

    def _outputs(self, node: fx.Node) -> int:
        return len(self.dims.operators[node].outputs) if node in self.dims.operators else 1

    def _redistributed(self, value: Value) -> bool:
        """Whether a value has a consumer layout of its own; one that only the backward pass uses is moved there."""
        layout = self._assignment.consumer_layouts.get(value)
        return layout is not None and layout != self._assignment.outputs[value] and value in self._forward_uses

    def _layout(self, value: Value) -> Layout:
        """The layout in which the users of a value get it."""
        return (self._assignment.consumer_layouts if self._redistributed(value) else self._assignment.outputs)[value]

    def _bytes(self, value: Value, layout: Layout) -> float:
        type_ = self.dims.types[value]
        return type_.bytes / split_parts(layout, self._tables.machine.sizes)

    def _move_seconds(self, value: Value, source: Layout, target: Layout) -> float:
        table = self._tables.of(self.dims.types[value])
        ends = (np.array([table.index[layout]]) for layout in (source, target))
        return float(table.seconds(*ends)[0, 0])
