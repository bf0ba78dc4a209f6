"""A random feasible plan: one strategy per node and axis, drawn without enumerating their product.

The space holds far more than a solver would choose; that every plan in it computes the same is what tests check.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx

from autopar.costs.cluster import Cluster
from autopar.ir.checkpoint_regions import SAVED
from autopar.ir.graph import is_backward
from autopar.ir.layout import Layout, Partial, Replicate, divides, is_boundary_layout, replicated
from autopar.ir.plan import EVERY, Certificate, Plan
from autopar.ir.program import Program, Value, is_operator, values_of
from autopar.sharding.candidates import REPLICATE, Strategy, layouts, strategies
from autopar.sharding.dims import Dims, Operator
from autopar.sharding.layer_classes import layer_classes

Choose = Callable[[int], int]
"""``choose(n)``: a number below ``n``."""

RELAYED = 4
"""One value in so many is relayed."""

OFFLOADED = 2
"""One operator in so many that do not run again has its results on the host."""

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
    again: bool = False,
    regions: bool = False,
    away: bool = False,
) -> Plan:
    """Draw a plan.

    Args:
        program: canonical program.
        dims: its dimension analysis.
        axes: name and size of each mesh axis.
        cluster: for redistribution paths.
        choose: source of choices, or a seed.
        fixed: layouts of parameters, batch tensors, results and relays that are decided already, by kind and name.
        optimizer: recorded in the plan.
        again: draw also which operators run again in the backward pass, which values all users take in one layout that
            is not their own, and which of these are moved again.
        regions: what the model's own checkpointing makes again or saves is not drawn.
        away: draw also what lies on the host, last, so that all else is drawn as without it.
    """
    choose = random.Random(choose).randrange if isinstance(choose, int) else choose
    classes = layer_classes(program, dims)
    pins = program.pins if regions else {}
    sizes = tuple(axes.values())
    whole = replicated(len(sizes))
    made: dict[tuple[fx.Node, int], Layout] = {}
    parameters: dict[str, Layout] = {}
    batch: dict[str, Layout] = {}
    results: dict[str, Layout] = {}
    consumer_layouts: dict[str, Layout] = {}
    moved: dict[Value, Layout] = {}
    held: list[str] = []
    recompute: dict[str, tuple[tuple[int, int], ...]] = {}
    choices: dict[str, tuple[str, ...]] = {}
    for output, value in zip(program.outputs, program.output_values, strict=True):
        if output.kind == "result" and value is not None:
            loss = program.loss is not None and int(output.name) == program.loss
            drawn = whole if loss else _boundary(dims, value, sizes, choose)
            results[output.name] = fixed.get(("result", output.name), drawn)
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    for node in program.graph.graph.nodes:
        if node in inputs:
            spec = inputs[node]
            made[node, 0] = whole
            if spec.kind == "parameter":
                drawn = _boundary(dims, node, sizes, choose)
                made[node, 0] = parameters[spec.name] = fixed.get(("parameter", spec.name), drawn)
            elif spec.kind == "batch":
                options = layouts(dims.type_of(node), sizes, False)
                shown = spec.name in program.input_gradients  # the user sees the gradient
                drawn = _boundary(dims, node, sizes, choose) if shown else options[choose(len(options))]
                made[node, 0] = batch[spec.name] = fixed.get(("batch", spec.name), drawn)
            elif spec.kind == "tangent":
                made[node, 0] = results.get(spec.name, whole)
        elif node.op == "get_attr":
            made[node, 0] = whole
        elif is_operator(node):
            have = [moved.get(source, made[source]) for source in program.sources[node]]
            chosen = _draw(dims.operators[node], have, sizes, choose)
            choices[f"{classes.key[node]} @{node.name}"] = tuple(s.name for s in chosen)
            for i in range(len(dims.operators[node].outputs)):
                made[node, i] = tuple(s.outputs[i] for s in chosen)
            if not is_backward(node) and _again(pins.get(node), again, choose):
                recompute[f"{classes.key[node]} @{node.name}"] = EVERY
        drawn_relays = _relays(node, dims, made, sizes, choose) if again else {}
        named = {
            i: ("consumer", f"{classes.key[node]} {i}") for i in range(len(values_of(node))) if node in classes.key
        }
        pinned = {i: fixed[key] for i, key in named.items() if key in fixed}
        for i, layout in {**drawn_relays, **pinned}.items():
            name = f"{classes.key[node]} @{node.name} {i}"
            held += [name] if i in pinned else []
            consumer_layouts[name] = moved[node, i] = layout
            if not is_backward(node) and _again(pins.get(node), again, choose):
                recompute[f"consumer {name}"] = EVERY
    names = _movable(program, classes.key, moved) if away else []
    offload = {name: EVERY for name in names if name not in recompute and not choose(OFFLOADED)}
    certificate = Certificate(0.0, 0.0, "one random plan, nothing was searched", "random")
    return Plan(
        axes=tuple(axes.items()), cluster=cluster, parameters=parameters, batch=batch, results=results, choices=choices,
        consumer_layouts=consumer_layouts, optimizer=optimizer, fingerprint=program.fingerprint,
        torch=str(torch.__version__),
        certificate=certificate, recompute=recompute, offload=offload, forced_consumer_layouts=tuple(held),
    )  # fmt: skip


def _movable(program: Program, key: Mapping[fx.Node, str], relayed: Iterable[Value]) -> list[str]:
    """What may lie on the host: results of the forward pass, parameters that are trained, and relays of operators."""
    outputs = zip(program.outputs, program.output_values, strict=True)
    trained = {output.name for output, value in outputs if output.kind == "gradient" and value}
    inputs = zip(program.placeholders, program.inputs, strict=True)
    return [
        *(f"{key[n]} @{n.name}" for n in program.sources if not is_backward(n)),
        *(f"{key[n]} @{n.name}" for n, spec in inputs if spec.kind == "parameter" and spec.name in trained),
        *(f"consumer {key[n]} @{n.name} {i}" for n, i in relayed if n in program.sources),
    ]


def _again(pin: str | None, drawn: bool, choose: Choose) -> bool:
    """Whether a value is made or moved again: as its region says, or as it comes."""
    return bool(drawn and choose(2)) if pin is None else pin != SAVED


def _boundary(dims: Dims, node: fx.Node, sizes: tuple[int, ...], choose: Choose) -> Layout:
    type_ = dims.type_of(node)
    options = [x for x in layouts(type_, sizes, False) if is_boundary_layout(type_, x, sizes)]
    return options[choose(len(options))]


def _relays(
    node: fx.Node, dims: Dims, made: Mapping[Value, Layout], sizes: tuple[int, ...], choose: Choose
) -> dict[int, Layout]:
    """Other layouts that some of a node's outputs are brought to for all their users; sums must be complete."""
    found = {}
    for i in range(len(values_of(node))):
        layout = made.get((node, i), ())
        if (node, i) not in dims.types or any(isinstance(p, Partial) for p in layout):
            continue
        options = [x for x in layouts(dims.types[node, i], sizes, False) if x != layout]
        if options and not choose(RELAYED):
            found[i] = options[choose(len(options))]
    return found


def _draw(operator: Operator, have: Sequence[Layout], sizes: Sequence[int], choose: Choose) -> list[Strategy]:
    """One strategy an axis; Partial only where the value is partial already, and only splits that divide."""
    every = strategies(operator)
    chosen: list[Strategy] = []
    for axis in range(len(sizes)):
        options = [s for s in every if _reachable(s, have, axis) and _fits(operator, [*chosen, s], sizes)]
        options += [s for s in options if s.name != REPLICATE] * (SPLIT_BIAS - 1)
        chosen.append(options[choose(len(options))])
    return chosen


def _reachable(strategy: Strategy, have: Sequence[Layout], axis: int) -> bool:
    return all(
        not isinstance(wanted, Partial) or layout[axis] == wanted
        for wanted, layout in zip(strategy.inputs, have, strict=True)
    )


def _fits(operator: Operator, chosen: Sequence[Strategy], sizes: Sequence[int]) -> bool:
    rest = [Replicate()] * (len(sizes) - len(chosen))
    letters = {s.factor[0] for s in chosen if s.factor is not None and s.factor[0] in operator.rule.lower}
    if any(operator.rule.lower[a] is not operator.rule.lower[b] for a in letters for b in letters):
        return False
    for i, type_ in enumerate(operator.inputs):
        if not divides(type_, (*(s.inputs[i] for s in chosen), *rest), sizes):
            return False
    return all(
        type_ is None or divides(type_, (*(s.outputs[i] for s in chosen), *rest), sizes)
        for i, type_ in enumerate(operator.outputs)
    )
