"""Plans written by hand, and programs as text: what the tests of passes compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

import autopar.strategies  # noqa: F401  registers every rule
from autopar.compiler import program_of
from autopar.costs.cluster import Cluster
from autopar.ir.graph import is_operator, producer, tensor_arguments
from autopar.ir.layout import Layout, Partial, Replicate, Split, describe, divides, parse_placement, replicated
from autopar.ir.node_info import graph_info, info
from autopar.ir.plan import Certificate, Plan
from autopar.ir.program import Input, Program
from autopar.passes.pad_dims import attention_heads
from autopar.search.padding import padded_shapes
from autopar.sharding.candidates import Strategy, combine, strategies
from autopar.sharding.dims import Dims, Operator, analyze
from autopar.sharding.layer_classes import layer_classes

NOTHING = Certificate(0.0, 0.0, "written by hand", "none")


def layout(text: str) -> Layout:
    """``"R S(0.0)"``: one placement an axis."""
    return tuple(parse_placement(t) for t in text.split())


def hand_plan(
    program: Program,
    axes: Mapping[str, int],
    choices: Mapping[str, str] | None = None,
    consumer_layouts: Mapping[str, str] | None = None,
    **boundary: Mapping[str, str],
) -> Plan:
    """A plan in which everything is replicated but what is named.

    Args:
        program: canonical program.
        axes: name and size of each mesh axis.
        choices: name of a node to its strategies, ``"m.0 R"``.
        relays: name of a node to the layout its users get it in.
        boundary: ``parameters``, ``batch``, ``results``: name to layout.
    """
    whole = replicated(len(axes))
    classes = layer_classes(program, analyze(program))
    names = {n: f"{k} @{n.name}" for n, k in classes.key.items() if is_operator(n)}
    said = dict(choices or {})
    unknown = set(said) - {n.name for n in names}
    assert not unknown, f"no node {unknown}; there are {[n.name for n in names]}"
    kinds = {"parameters": "parameter", "batch": "batch", "results": "result"}
    layouts = {}
    for table, kind in kinds.items():
        every = [i.name for i in program.inputs if i.kind == kind] + [o.name for o in program.outputs if o.kind == kind]
        layouts[table] = {
            name: layout(boundary.get(table, {})[name]) if name in boundary.get(table, {}) else whole for name in every
        }
    return Plan(
        axes=tuple(axes.items()),
        cluster=Cluster.preset("cpu"),
        **layouts,
        choices={k: tuple(said.get(n.name, "R " * len(axes)).split()) for n, k in names.items()},
        consumer_layouts={
            f"{classes.key[n]} 0": layout(consumer_layouts[n.name])
            for n in classes.key
            if consumer_layouts and n.name in consumer_layouts
        },
        optimizer="adamw",
        fingerprint=program.fingerprint,
        torch=str(torch.__version__),
        certificate=NOTHING,
    )


def follow_plan(program: Program, axes: Mapping[str, int], **boundary: Mapping[str, str]) -> Plan:
    """A plan in which every operator takes its arguments as they lie, as far as it can: data parallel, Megatron.

    Args:
        program: canonical program.
        axes: name and size of each mesh axis.
        boundary: ``parameters``, ``batch``, ``results``: name to layout; the rest is replicated.
    """
    dims = analyze(program)
    plain = hand_plan(program, axes, **boundary)
    sizes = tuple(axes.values())
    made: dict[tuple[fx.Node, int], Layout] = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        tables = {"parameter": plain.parameters, "batch": plain.batch, "tangent": plain.results}
        made[node, 0] = tables.get(spec.kind, {}).get(spec.name, replicated(len(axes)))
    chosen = {}
    for node in program.graph.graph.nodes:
        if node.op == "get_attr":
            made[node, 0] = replicated(len(axes))
        if not is_operator(node):
            continue
        have = [made[producer(a)] for a in tensor_arguments(node)]
        names: list[str] = []
        for axis in range(len(axes)):
            fits = [s for s in strategies(dims.operators[node]) if _fits(dims.operators[node], [*names, s.name], sizes)]
            names.append(min(fits, key=lambda s: (_distance(s, have, axis), not s.splits)).name)
        chosen[node.name] = " ".join(names)
        made.update({(node, i): x for i, x in enumerate(combine(dims.operators[node], tuple(names))[1])})
    return hand_plan(program, axes, chosen, **boundary)


def _fits(operator: Operator, names: list[str], sizes: tuple[int, ...]) -> bool:
    inputs, outputs = combine(operator, (*names, *["R"] * (len(sizes) - len(names))))
    types = (*operator.inputs, *operator.outputs)
    return all(t is None or divides(t, x, sizes) for t, x in zip(types, (*inputs, *outputs), strict=True))


def _distance(strategy: Strategy, have: list[Layout], axis: int) -> float:
    """How many arguments have to be communicated; a slice is nearly free, nothing can become Partial."""
    total = 0.0
    for wanted, layout_ in zip(strategy.inputs, have, strict=True):
        if layout_[axis] != wanted:
            free = isinstance(layout_[axis], Replicate) and isinstance(wanted, Split)
            total += 100.0 if isinstance(wanted, Partial) else 0.1 if free else 1.0
    return total


class Tiny(nn.Module):
    """``relu(x @ w)``."""

    def __init__(self, hidden: int = 8, ffn: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(hidden, ffn, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w)


def tiny(training: bool = False) -> tuple[Program, Dims]:
    """Program and dims of `Tiny` on a batch ``[4, 8]``."""
    model = Tiny()
    program = program_of(model, (torch.ones(4, 8),), training=training)
    return program, analyze(program)


def show(program: Program) -> str:
    """The graph in a format of our own: a line a node, layouts behind it where nodes have some.

    ``name = operator(arguments)  # layouts``; placeholders go by what they stand for, operators by their own names.
    """
    axes = tuple(graph_info(program.graph).axes)
    specs = dict(zip(program.placeholders, program.inputs, strict=True))
    names: dict[fx.Node, str] = {}
    count: Counter[str] = Counter()
    for node in program.graph.graph.nodes:
        name = _input_name(specs[node]) if node in specs else _target(node)
        names[node] = f"{name}.{count[name]}" if count[name] else name
        count[name] += 1
    return "\n".join(_line(n, axes, names) for n in program.graph.graph.nodes)


def _input_name(spec: Input) -> str:
    return spec.name if spec.kind == "parameter" else f"{spec.kind}{spec.name}"


def _line(node: fx.Node, axes: tuple[str, ...], names: Mapping[fx.Node, str]) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0], names)}"
    call = names[node]
    if node.op == "call_function":
        named = [
            f"{k}={_text(v, names)}" for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")
        ]
        call += f" = {_target(node)}({', '.join([*(_text(a, names) for a in node.args), *named])})"
    notes = []
    made = info(node).collective
    if made is not None:
        notes.append(
            f"{made.kind} on {made.axis}: {made.bytes:g} bytes"
            + (f", {made.members} together" if made.members > 1 else "")
        )
    if axes and info(node).layouts and not info(node).internal:
        pairs = zip(info(node).types, info(node).layouts, strict=True)
        notes.append(", ".join("-" if t is None or x is None else describe(t, x, axes) for t, x in pairs))
    return "  # ".join([call, *notes])


def _target(node: fx.Node) -> str:
    name = str(node.target) if hasattr(node.target, "_schema") else str(getattr(node.target, "__name__", node.target))
    return name.removeprefix("_c10d_functional.").removeprefix("aten.").removesuffix(".default")


def _text(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(v, names) for v in value) + "]"
    return repr(value) if isinstance(value, str) else str(value)


def random_padding(program: Program, dims: Dims, choose: Callable[[int], int]) -> dict[str, tuple[int, ...]]:
    """Padded shapes of parameters: some factors, a few elements each."""
    types = {
        i.name: dims.type_of(n)
        for n, i in zip(program.placeholders, program.inputs, strict=True)
        if i.kind == "parameter"
    }
    whole = {id(dim[0]): dim[0].size for type_ in types.values() for dim in type_.dims if len(dim) == 1}
    heads = attention_heads(program, dims)
    whole |= {key: factor.size for key, factor in heads.items()}
    sizes = {key: n + (1, 2, 4, n % 4 or 4)[choose(4)] for key, n in whole.items() if choose(5) < 3}
    return padded_shapes(types, sizes, heads)
