"""Layer classes: nodes of repeated modules share one variable, so the search does not grow with depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import producer
from autopar.ir.layout import TensorType
from autopar.ir.program import RECORDED, Call, Program
from autopar.ir.structure import short_hash, tied_keys
from autopar.rules.remembered import remembered
from autopar.sharding.dims import Dims, Operator, analyze

Uses = Mapping[tuple[str, int], Mapping[tuple[str, int], int]]
"""For every value class: ``(class, argument)`` of its users, with how many edges."""


@dataclass(frozen=True)
class LayerClasses:
    """A partition of a program's nodes.

    Attributes:
        key: the class of every placeholder and operator node; readable and the same in every process.
        members: nodes of each class, in program order; classes in order of their first node.
        count: how many nodes each class has in the model: more than members if the program leaves blocks out.
        uses: edges between classes, counted in the same way.
    """

    key: dict[fx.Node, str]
    members: dict[str, tuple[fx.Node, ...]]
    count: Mapping[str, int]
    uses: Uses


def layer_classes(program: Program, dims: Dims, *, tie: bool = True) -> LayerClasses:
    """Tie the nodes of repeated modules; with ``tie=False`` every node is a class of its own."""

    def describe(program: Program, node: fx.Node) -> tuple[str, str]:
        return _detail(dims.operators[node], program.calls[node])

    def describe_tensor(node: fx.Node) -> str:
        return _signature(dims.types[node, 0]) if (node, 0) in dims.types else ""

    key = tied_keys(program, describe, describe_tensor)
    if not tie:
        # The names that a plan uses for single nodes, see `autopar.sharding.assignment.assign`.
        key = {n: f"{k} @{n.name}" for n, k in key.items()}
    members: dict[str, list[fx.Node]] = defaultdict(list)
    for node, k in key.items():
        members[k].append(node)
    count, uses = {k: len(nodes) for k, nodes in members.items()}, _uses(program, key)
    if program.repeat is not None:
        # Every further layer adds what three layers have more than two.
        other = layer_classes(program.repeat.shorter, analyze(program.repeat.shorter), tie=tie)
        count = program.repeat.extrapolate(count, other.count)
        uses = program.repeat.extrapolate(uses, other.uses)
    return LayerClasses(key, {k: tuple(v) for k, v in members.items()}, count, uses)


def _uses(program: Program, key: Mapping[fx.Node, str]) -> Uses:
    uses: dict[tuple[str, int], dict[tuple[str, int], int]] = defaultdict(lambda: defaultdict(int))
    for node, sources in program.sources.items():
        for i, (source, out) in enumerate(sources):
            uses[key[source], out][key[node], i] += 1
    named = {(i.kind, i.name): key[n] for n, i in zip(program.placeholders, program.inputs, strict=True)}
    for output, value in zip(program.outputs, program.output_values, strict=True):
        # What is recorded is on every device as it is made, and joins classes to nothing.
        if value is None or output.kind == RECORDED:
            continue
        source, out = producer(value)
        # A gradient must have its parameter's layout: an edge to the parameter's class, as if it read the gradient.
        kinds = {"gradient": "parameter", "parameter": "parameter", "input_gradient": "batch", "buffer": "buffer"}
        kind = kinds.get(output.kind)
        target = named.get((kind, output.name)) if kind else f"result {output.name}"
        if target is not None:
            uses[key[source], out][target, 0] += 1
    return uses


@remembered(4096)
def _detail(operator: Operator, call: Call) -> tuple[str, str]:
    """An operator's name, and a hash of all that it is called with."""
    types = [_signature(t) for t in (*operator.inputs, *operator.outputs) if t is not None]
    # A letter whose factors contradict cannot be split: such a call has other candidates than one where they agree.
    bound = "".join(c if c in operator.letters else "" for c in operator.rule.letters)
    detail = short_hash("|".join([operator.rule.equation, bound, call.arguments, *types]))
    return str(call.target).removeprefix("aten.").removesuffix(".default"), detail


def _signature(type_: TensorType) -> str:
    """A type without names: they may differ between layers."""
    routed = "" if type_.routed is None else f"@{type_.routed}{type_.experts}{'=' * type_.order}"
    return f"{type_.dtype}{type_.reduce}{[[f.size for f in dim] for dim in type_.dims]}{routed}".replace(" ", "")
