"""A random feasible plan: one strategy per node and axis, drawn without enumerating their product.

The space contains far more than a solver would choose. Tests check that every plan in it computes the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from autopar.costs.cluster import Cluster
from autopar.ir.checkpoint_regions import SAVED
from autopar.ir.graph import Value, is_backward, is_operator, values_of
from autopar.ir.layout import (
    Layout,
    Partial,
    Placement,
    Replicate,
    TensorType,
    TokensStay,
    divides,
    is_boundary_layout,
    replicated,
)
from autopar.ir.plan import EVERY, Certificate, Plan
from autopar.ir.program import Input, Program
from autopar.sharding.candidates import REPLICATE, Strategy, layouts, lowerable, strategies
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.layer_classes import layer_classes

Choose = Callable[[int], int]
"""``choose(n)``: a number below ``n``."""

MOVED = 4
"""One value in so many gets a consumer layout."""

OFFLOADED = 2
"""One value in so many that are not recomputed is offloaded."""

SPLIT_BIAS = 3
"""A split is this many times as likely as its share: long chains of replicated nodes test little."""


def random_plan(
    program: Program,
    dims: Dims,
    axes: Mapping[str, int],
    cluster: Cluster,
    choose: Choose | int = 0,
    fixed: Mapping[tuple[str, str], Layout] = MappingProxyType({}),
    optimizer: str = "adamw",
    recompute: bool = False,
    regions: bool = False,
    offload: bool = False,
) -> Plan:
    """Draw a plan.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        axes: name and size of each mesh axis.
        cluster: for redistribution paths.
        choose: source of choices, or a seed.
        fixed: layouts of parameters, batch tensors, results and consumer layouts that are decided already, by kind and
            name.
        optimizer: recorded in the plan.
        recompute: draw also which operators are recomputed, which values have a consumer layout, and which of these are
            re-gathered.
        regions: the model's own checkpointing decides what is recomputed or saved in its regions.
        offload: draw also what is offloaded. That comes last, so that all else is drawn as without it.
    """
    # A function may be given, so that property tests draw and shrink the choices themselves.
    choose = random.Random(choose).randrange if isinstance(choose, int) else choose
    sizes = tuple(axes.values())
    drawing = _Drawing(program, dims, layer_classes(program, dims).key, sizes, choose, fixed, recompute)
    # The model's own checkpointing wins over what is drawn: its regions are part of what a plan must respect.
    pins = program.pins if regions else {}
    drawing.draw_results()
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    for node in program.graph.graph.nodes:
        if node in inputs:
            drawing.draw_input(node, inputs[node])
        elif node.op == "get_attr":
            drawing.produced[node, 0] = replicated(len(sizes))
        elif is_operator(node):
            drawing.draw_operator(node, pins.get(node))
        drawing.draw_consumer_layouts(node, pins.get(node))
    # Last, so that a seed draws all else as it did before there was offloading.
    offloaded = drawing.draw_offload() if offload else {}
    overlap = bool(choose(2))
    certificate = Certificate(0.0, 0.0, "one random plan, nothing was searched", "random")
    return Plan(
        axes=tuple(axes.items()), cluster=cluster, parameters=drawing.parameters, batch=drawing.batch,
        results=drawing.results, choices=drawing.choices, consumer_layouts=drawing.consumer_layouts,
        optimizer=optimizer, fingerprint=program.fingerprint, torch=str(torch.__version__), certificate=certificate,
        recompute=drawing.recomputed, offload=offloaded, forced_consumer_layouts=tuple(drawing.forced),
        overlap=overlap,
    )  # fmt: skip


@dataclass
class _Drawing:
    """What is drawn so far. Later choices depend on it: `Partial` is drawn only where a value is partial already.

    The order of the calls of ``choose`` is the meaning of a seed.

    Attributes:
        program: canonical program.
        dims: its dimension analysis.
        key: class of each node.
        sizes: of the mesh axes.
        choose: source of choices.
        fixed: layouts that are decided already.
        recompute: whether recomputation and consumer layouts are drawn.
        produced: layout of each value as it is produced.
        moved: consumer layout of each value that has one.
        forced: consumer layouts that are fixed.
        recomputed: the plan's ``recompute``, and so on for the other fields of a plan.
    """

    program: Program
    dims: Dims
    key: Mapping[fx.Node, str]
    sizes: tuple[int, ...]
    choose: Choose
    fixed: Mapping[tuple[str, str], Layout]
    recompute: bool
    produced: dict[Value, Layout] = field(default_factory=dict)
    moved: dict[Value, Layout] = field(default_factory=dict)
    parameters: dict[str, Layout] = field(default_factory=dict)
    batch: dict[str, Layout] = field(default_factory=dict)
    results: dict[str, Layout] = field(default_factory=dict)
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    consumer_layouts: dict[str, Layout] = field(default_factory=dict)
    forced: list[str] = field(default_factory=list)
    recomputed: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def draw_results(self) -> None:
        """Layouts of the model's results; the loss is replicated."""
        program = self.program
        for output, value in zip(program.outputs, program.output_values, strict=True):
            if output.kind == "result" and value is not None:
                loss = program.loss is not None and int(output.name) == program.loss
                drawn = replicated(len(self.sizes)) if loss else self._boundary_layout(value)
                self.results[output.name] = self.fixed.get(("result", output.name), drawn)

    def draw_input(self, node: fx.Node, spec: Input) -> None:
        """The layout of a parameter or a batch tensor; a tangent has its result's."""
        self.produced[node, 0] = replicated(len(self.sizes))
        if spec.kind == "parameter":
            drawn = self._boundary_layout(node)
            self.produced[node, 0] = self.parameters[spec.name] = self.fixed.get(("parameter", spec.name), drawn)
        elif spec.kind == "batch":
            options = layouts(self.dims.type_of(node), self.sizes, False)
            returned = spec.name in self.program.input_gradients  # the user sees the gradient, in the same layout
            drawn = self._boundary_layout(node) if returned else options[self.choose(len(options))]
            self.produced[node, 0] = self.batch[spec.name] = self.fixed.get(("batch", spec.name), drawn)
        elif spec.kind == "tangent":
            self.produced[node, 0] = self.results.get(spec.name, self.produced[node, 0])

    def draw_operator(self, node: fx.Node, pin: str | None) -> None:
        """An operator's strategies, and whether it is recomputed."""
        have = [self.moved.get(source, self.produced[source]) for source in self.program.sources[node]]
        chosen = _draw(self.dims.operators[node], have, self.sizes, self.choose)
        name = f"{self.key[node]} @{node.name}"
        self.choices[name] = tuple(s.name for s in chosen)
        for i in range(len(self.dims.operators[node].outputs)):
            self.produced[node, i] = tuple(s.outputs[i] for s in chosen)
        if not is_backward(node) and self._recomputes(pin):
            self.recomputed[name] = EVERY

    def draw_consumer_layouts(self, node: fx.Node, pin: str | None) -> None:
        """Layouts that some of a node's outputs are moved to for all readers, and whether they are re-gathered."""
        drawn = self._other_layouts(node) if self.recompute else {}
        outputs = range(len(values_of(node))) if node in self.key else ()
        names = {i: ("consumer", f"{self.key[node]} {i}") for i in outputs}
        fixed = {i: self.fixed[name] for i, name in names.items() if name in self.fixed}
        for i, layout in {**drawn, **fixed}.items():
            name = f"{self.key[node]} @{node.name} {i}"
            self.forced += [name] if i in fixed else []
            self.consumer_layouts[name] = self.moved[node, i] = layout
            if not is_backward(node) and self._recomputes(pin):
                self.recomputed[f"consumer {name}"] = EVERY

    def draw_offload(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """A plan's ``offload``: of forward values, states of trained parameters, and moved values of operators."""
        program, key = self.program, self.key
        outputs = zip(program.outputs, program.output_values, strict=True)
        trained = {output.name for output, value in outputs if output.kind == "gradient" and value}
        inputs = zip(program.placeholders, program.inputs, strict=True)
        names = [
            *(f"{key[n]} @{n.name}" for n in program.sources if not is_backward(n)),
            *(f"{key[n]} @{n.name}" for n, spec in inputs if spec.kind == "parameter" and spec.name in trained),
            *(f"consumer {key[n]} @{n.name} {i}" for n, i in self.moved if n in program.sources),
        ]
        return {name: EVERY for name in names if name not in self.recomputed and not self.choose(OFFLOADED)}

    def _recomputes(self, pin: str | None) -> bool:
        """Whether a value is recomputed or re-gathered: as its checkpoint region says, or by chance."""
        return bool(self.recompute and self.choose(2)) if pin is None else pin != SAVED

    def _boundary_layout(self, node: fx.Node) -> Layout:
        """A layout in which the user may see a tensor."""
        type_ = self.dims.type_of(node)
        options = [x for x in layouts(type_, self.sizes, False) if is_boundary_layout(type_, x, self.sizes)]
        return options[self.choose(len(options))]

    def _other_layouts(self, node: fx.Node) -> dict[int, Layout]:
        """Other layouts for some of a node's outputs, of those that are no partial sums."""
        found = {}
        for i in range(len(values_of(node))):
            layout = self.produced.get((node, i), ())
            if (node, i) not in self.dims.types or any(isinstance(p, Partial) for p in layout):
                continue
            # A consumer layout that equals the produced one would test nothing.
            type_ = self.dims.types[node, i]
            options = [x for x in layouts(type_, self.sizes, False) if x != layout and _movable(type_, layout, x)]
            if options and not self.choose(MOVED):
                found[i] = options[self.choose(len(options))]
        return found


def _draw(operator: Operator, have: Sequence[Layout], sizes: Sequence[int], choose: Choose) -> list[Strategy]:
    """One strategy per axis: `Partial` only where the value is or becomes partial, and only splits that divide."""
    every = strategies(operator)
    chosen: list[Strategy] = []
    for axis in range(len(sizes)):
        options = [s for s in every if _reachable(operator, s, have, axis) and _fits(operator, [*chosen, s], sizes)]
        options += [s for s in options if s.name != REPLICATE] * (SPLIT_BIAS - 1)
        chosen.append(options[choose(len(options))])
    return chosen


def _reachable(operator: Operator, strategy: Strategy, have: Sequence[Layout], axis: int) -> bool:
    """Whether the arguments can be moved to what a strategy reads."""
    return all(
        _may_become(type_, layout[axis], wanted)
        for wanted, layout, type_ in zip(strategy.inputs, have, operator.inputs, strict=True)
    )


def _movable(type_: TensorType, source: Layout, target: Layout) -> bool:
    return all(_may_become(type_, a, b) for a, b in zip(source, target, strict=True))


def _may_become(type_: TensorType, source: Placement, target: Placement) -> bool:
    """Whether moves lead from one placement to another: to rows of own experts from all, and back through terms."""
    if source == target:
        return True
    if isinstance(source, TokensStay):
        return type_.may_move(source, Partial()) and _may_become(type_, Partial(), target)
    if isinstance(target, TokensStay) and type_.routed and not isinstance(source, Replicate):
        return _may_become(type_, source, Replicate()) and type_.may_move(Replicate(), target)
    return not isinstance(target, Partial) and type_.may_move(source, target)


def _fits(operator: Operator, chosen: Sequence[Strategy], sizes: Sequence[int]) -> bool:
    """Whether the strategies of the first axes divide all dims, and have at most one lowering."""
    rest = [Replicate()] * (len(sizes) - len(chosen))
    if not lowerable(operator, chosen, sizes):
        return False
    for i, type_ in enumerate(operator.inputs):
        if not divides(type_, (*(s.inputs[i] for s in chosen), *rest), sizes):
            return False
    return all(
        type_ is None or divides(type_, (*(s.outputs[i] for s in chosen), *rest), sizes)
        for i, type_ in enumerate(operator.outputs)
    )
