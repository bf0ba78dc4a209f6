"""`cut`: a joint graph becomes a forward graph and a backward graph that takes the saved tensors of the first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import (
    BoxedCodeGen,
    FakeTensor,
    FakeTensorMode,
    LazyGraphModule,
    TracingContext,
    default_partition,
    tracing,
)
from autopar.ir.ops.float8.histories import history_names
from autopar.ir.program import GRADIENTS, RECORDED, Input, Output, Program
from autopar.pipeline.forward_order import forward_nodes
from autopar.runtime.compiled.regions import is_view


@dataclass(frozen=True)
class ForwardBackward:
    """The two graphs of a step.

    Attributes:
        forward: parameters, buffers and batch to the forward outputs and the saved values.
        backward: list of saved values and tangents to gradients (it empties the list); None for inference.
        inputs: of the forward graph.
        outputs: of the forward graph, without the saved values.
        saved: names of the saved values, in the order in which the backward graph takes them.
        tangents: indices of the results whose incoming gradients the backward graph takes, in order.
        gradients: what the backward graph returns; None where there is no gradient.
        overwritten: positions in ``saved`` of buffers and parameters, or views of them, that the step gives new values.
        reread: kind and name of what a script has, and the backward pass reads again as it is by then.
        hoisted: of a step in microbatches: parameters and buffers to what each microbatch takes after its inputs.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    saved: tuple[str, ...] = ()
    tangents: tuple[str, ...] = ()
    gradients: tuple[Output, ...] = ()
    overwritten: frozenset[int] = frozenset()
    reread: tuple[tuple[str, str], ...] = ()
    hoisted: fx.GraphModule | None = None


def cut(program: Program) -> ForwardBackward:
    """Cut a bound program (`autopar.runtime.step.bind`) into forward and backward.

    Args:
        program: its graph computes on local tensors and has no axis names left.
    """
    program = _renamed(program)
    inputs = tuple(i for i in program.inputs if i.kind != "tangent")
    outputs = program.outputs[: program.forward_outputs]
    if not any(o.kind in GRADIENTS and v is not None for o, v in _described(program)):
        return ForwardBackward(_forward_only(program), None, inputs, outputs)
    with tracing(TracingContext(_fake_mode(program.graph))):
        forward, backward = default_partition(program.graph, (), num_fwd_outputs=program.forward_outputs)
    # Whatever does not depend on tangents is copied here too, and draws would stay although nothing uses them.
    backward.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    _remove_unused_draws(forward)
    names = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    described = list(zip(program.placeholders, program.inputs, strict=True))
    tangents = {n.name: i.name for n, i in described if i.kind == "tangent"}
    kept = _returned(forward)[program.forward_outputs :]
    saved = tuple(n.name for n in kept)
    assert [n for n in names if n not in tangents] == list(saved), "the partitioner saves one thing and takes another"
    backward.graph.set_codegen(BoxedCodeGen())
    backward.recompile()
    used_tangents = tuple(tangents[n] for n in names if n in tangents)
    written = {(o.kind, o.name) for o in outputs}
    written |= {("buffer", name) for name in history_names(o.name for o in program.outputs if o.kind == RECORDED)}
    overwritten_inputs = {n.name for n, i in described if (i.kind, i.name) in written}
    memory = [memory_of(n).name for n in kept]
    overwritten = frozenset(i for i, name in enumerate(memory) if name in overwritten_inputs)
    gradients = program.outputs[program.forward_outputs :]
    reread = read_again(forward, inputs, outputs, overwritten)
    return ForwardBackward(forward, backward, inputs, outputs, saved, used_tangents, gradients, overwritten, reread)


def read_again(
    forward: fx.GraphModule, inputs: Sequence[Input], outputs: Sequence[Output], overwritten: Collection[int]
) -> tuple[tuple[str, str], ...]:
    """Kind and name of parameters, batch tensors and results in whose memory something is saved.

    Args:
        forward: returns results, and then what is saved.
        inputs: of it.
        outputs: of it, before what is saved.
        overwritten: positions among what is saved of which copies are saved.
    """
    values, given = _returned(forward), [n for n in forward.graph.nodes if n.op == "placeholder"]
    again = {memory_of(v) for i, v in enumerate(values[len(outputs) :]) if i not in overwritten}
    found = [(i.kind, i.name) for n, i in zip(given, inputs, strict=True) if n in again and i.kind in _OF_SCRIPTS]
    # What a result has of an input is copied for it.
    results = [(o, memory_of(v)) for o, v in zip(outputs, values, strict=False) if o.kind == "result"]
    return (*found, *((o.kind, o.name) for o, own in results if own in again and own not in given))


_OF_SCRIPTS = ("parameter", "batch")


def memory_of(node: fx.Node) -> fx.Node:
    """The node in whose memory a value is: views of a parameter change as that is written."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _remove_unused_draws(forward: fx.GraphModule) -> None:
    """What the backward pass draws depends on no tangent, either: drawn here, too, all later numbers were others."""
    for node in reversed(forward.graph.nodes):
        if node.op == "call_function" and not node.users and node.meta.get("partitioner_tag") == "is_backward":
            forward.graph.erase_node(node)
    forward.recompile()


def _described(program: Program) -> list[tuple[Output, fx.Node | None]]:
    return list(zip(program.outputs, program.output_values, strict=True))


def _returned(graph: fx.GraphModule) -> list[Any]:
    """What a graph's output node returns."""
    values: Any = graph.graph.output_node().args[0]
    return list(values)


def _fake_mode(graph: fx.GraphModule) -> FakeTensorMode:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _renamed(program: Program) -> Program:
    """The program as the partitioner wants it: ``primals_1``, ``tangents_1``, forward nodes first and tagged."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    counts = {"primals": 0, "tangents": 0}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        kind = "tangents" if spec.kind == "tangent" else "primals"
        counts[kind] += 1
        known[node] = graph.placeholder(f"{kind}_{counts[kind]}")
        known[node].meta = dict(node.meta)
    early = forward_nodes(program)
    rest = [n for n in program.graph.graph.nodes if n not in known]
    for node in sorted(rest, key=lambda n: n not in early):  # a stable sort: no node comes before its inputs
        known[node] = graph.node_copy(node, known.__getitem__)
        known[node].meta = dict(node.meta)
        known[node].meta["partitioner_tag"] = "is_forward" if node in early else "is_backward"
        if isinstance(node.meta.get("val"), torch.Tensor):
            known[node].meta["tensor_meta"] = node.meta["val"]  # or it takes a meta tensor for no tensor
        # What the tracer says of each of its outputs: the partitioner would drop those that there are more of now.
        known[node].meta.pop("desc", None)
    return replace(program, graph=LazyGraphModule(program.graph, graph))


def _forward_only(program: Program) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    kinds = iter(program.inputs)
    for node in program.graph.graph.nodes:
        if node.op == "output":
            values = program.output_values[: program.forward_outputs]
            graph.output([known[v] if v is not None else None for v in values])
            continue
        if node.op == "placeholder" and next(kinds).kind == "tangent":
            continue
        if any(a not in known for a in node.all_input_nodes):
            continue  # depends on a tangent
        known[node] = graph.node_copy(node, known.__getitem__)
        known[node].meta = dict(node.meta)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.is_impure() or n.op in ("placeholder", "output"))
    return LazyGraphModule(program.graph, graph)


def saved_bytes(step: ForwardBackward) -> int:
    """Bytes of the tensors that are saved for the backward pass, inputs included."""
    values = [n.meta.get("val") for n in _returned(step.forward)[len(step.outputs) :]]
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
