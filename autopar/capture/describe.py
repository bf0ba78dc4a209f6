"""`describe`: the `Program` of a traced graph, read off the descriptors that torch's tracer left at its ends."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.capture.harness import Harness, Seen
from autopar.errors import CaptureError
from autopar.ir.program import GRADIENTS, Input, Output, Program, State

logger = logging.getLogger("autopar")

_ORDER = ("result", "input_gradient", "gradient")
"""Of outputs, after buffers and parameters: `no_sync` splits off the gradients of parameters alone."""


def describe(joint: fx.GraphModule, harness: Harness, training: bool) -> Program:
    """The program of a joint graph; outputs that the model writes to its own state come first.

    Raises:
        CaptureError: an input or output is none that a program can have.
    """
    seen = harness.seen
    inputs = _inputs(joint, harness)
    written, others = _outputs(joint, harness)
    others = dict(sorted(others.items(), key=lambda item: _ORDER.index(item[0].kind)))
    joint.graph.output_node().args = ([*written.values(), *others.values()],)
    outputs = (*written, *others)
    found = seen.results
    assert found is not None
    state = State(
        tuple(seen.writes), frozenset(seen.assigned.values()), observed=tuple(seen.observed),
        computing=tuple(seen.computing.items()), checks=seen.checks, reads=seen.reads, stride_read=seen.stride_read,
    )  # fmt: skip
    program = Program(
        joint,
        tuple(inputs.values()),
        outputs,
        sum(o.kind not in GRADIENTS for o in outputs),
        found.skeleton,
        None if found.loss is None else _number(found.loss, seen),
        training,
        aliases=harness.aliases,
        withheld=frozenset(_number(i, seen) for i in found.withheld),
        total=found.total,
        state=state,
    )
    orders = {str(_number(i, seen)): order for i, order in enumerate(seen.orders) if order and i not in seen.assigned}
    return replace(program, reached=_reached(program), storages=_storages(seen), orders=orders)


def _storages(seen: Seen) -> dict[tuple[str, str], int]:
    """What shares a storage; canonical graphs do not tell: they have no copies, and equal tensors once."""
    own = {("result", str(_number(i, seen))): m for i, m in enumerate(seen.memory) if i not in seen.assigned}
    stored = {**seen.state_memory, **own, **{("buffer", name): seen.memory[i] for i, name in seen.assigned.items()}}
    numbers = {storage: number for number, storage in enumerate(dict.fromkeys(stored.values()))}
    return {key: numbers[storage] for key, storage in stored.items()}


def _reached(program: Program) -> dict[tuple[str, str], frozenset[int]]:
    """Of each gradient, the results that it comes from, as autograd sees it.

    Of the graph as it was traced: in canonical form, gradients that are always zero come from nothing.
    """
    tangents: dict[fx.Node, frozenset[int]] = {}
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    for node in program.graph.graph.nodes:
        spec = inputs.get(node)
        own = frozenset({int(spec.name)}) if spec is not None and spec.kind == "tangent" else frozenset()
        tangents[node] = own.union(*(tangents[a] for a in node.all_input_nodes))
    described = zip(program.outputs, program.output_values, strict=True)
    return {(o.kind, o.name): tangents[v] for o, v in described if o.kind in GRADIENTS and v is not None}


def _number(result: int, seen: Seen) -> int:
    """The number of a result among those that are not buffers: the harness returns assigned buffers as results, too."""
    return result - sum(i < result for i in seen.assigned)


def _inputs(joint: fx.GraphModule, harness: Harness) -> dict[fx.Node, Input]:
    """What each placeholder is; those that no program has are taken out of the graph."""
    found: dict[fx.Node, Input] = {}
    for node in [n for n in joint.graph.nodes if n.op == "placeholder"]:
        if _is_tangent_of_write(node.meta["desc"]):
            _replace_by_zeros(node)
            continue
        spec = _input(node.meta["desc"])
        if spec.name in harness.promoted and not node.users:
            joint.graph.erase_node(node)  # a plain tensor among the attributes that the call does not read
            continue
        if spec.kind == "tangent":
            spec = replace(spec, name=str(_number(int(spec.name), harness.seen)))
        if spec.kind == "parameter" and node.meta["val"].layout != torch.strided:
            raise CaptureError(f"parameter {spec.name!r} has layout {node.meta['val'].layout}: make it a dense tensor")
        found[node] = spec
    return found


def _outputs(
    joint: fx.GraphModule, harness: Harness
) -> tuple[dict[Output, fx.Node | None], dict[Output, fx.Node | None]]:
    """New values of buffers and parameters, and all other outputs."""
    seen = harness.seen
    node = joint.graph.output_node()
    values: Any = node.args[0]
    written: dict[Output, fx.Node | None] = {}
    others: dict[Output, fx.Node | None] = {}
    for desc, value in zip(node.meta["desc"], values, strict=True):
        if desc is None:  # an input that needs no gradient
            continue
        output = _output(desc)
        if output.kind == "gradient" and _input(desc.grad_of).kind == "buffer":
            # Of a zero that a module calls requires_grad_() on, as a loss to begin with: no optimizer has it.
            if value is not None and output.name not in harness.differentiable_buffers:
                told = "%r is no parameter and gets no gradient: forward calls requires_grad_() on it"
                logger.warning(told, output.name)
            elif value is not None:
                raise CaptureError(
                    f"{output.name!r} is no parameter, and requires a gradient, which would be lost: make it an "
                    "nn.Parameter, detach() it where it is kept from an earlier call, pass it as an argument, or "
                    "compute it in forward"
                )
            continue
        _require_dense(output, value)
        if output.kind == "result" and int(output.name) in seen.assigned:
            output = Output("buffer", seen.assigned[int(output.name)])
            written.pop(output, None)  # it was written in place before it got a new tensor; the last value counts
        elif output.kind == "result":
            output = Output("result", str(_number(int(output.name), seen)))
        (written if output.kind in ("buffer", "parameter") else others)[output] = value
    return written, others


def _require_dense(output: Output, value: fx.Node | None) -> None:
    if value is None:
        return
    made = value.meta["val"]
    if not isinstance(made, torch.Tensor):
        raise CaptureError(f"the {output.kind} {output.name!r} of the model is a {type(made).__name__}")
    if made.layout != torch.strided:
        raise CaptureError(
            f"the {output.kind} {output.name!r} has layout {made.layout}: sparse gradients cannot be "
            "reduced; leave sparse=True out (nn.Embedding, F.embedding), which gives the same values"
        )


def _is_tangent_of_write(desc: Any) -> bool:
    """Whether it is the gradient of what the model writes to a parameter in place, which nobody asks for."""
    return type(desc).__name__ == "TangentAOTInput" and not hasattr(desc.output, "idx")


def _replace_by_zeros(node: fx.Node) -> None:
    value = node.meta["val"]
    # After all placeholders, which must come first.
    with node.graph.inserting_before(next(n for n in node.graph.nodes if n.op != "placeholder")):
        options = {"dtype": value.dtype, "device": value.device}
        zeros = node.graph.call_function(torch.ops.aten.full.default, (list(value.shape), 0), options)
    # The tangent was of the backward pass, and so is what stands for it.
    zeros.meta = {"val": value, "partitioner_tag": "is_backward"}
    node.replace_all_uses_with(zeros)
    node.graph.erase_node(node)


def _input(desc: Any) -> Input:
    # By the names of the classes, which torch keeps in a private module.
    kind = type(desc).__name__
    if kind == "ParamAOTInput":
        return Input("parameter", desc.target.removeprefix("model."))
    if kind == "BufferAOTInput":
        return Input("buffer", desc.target.removeprefix("model."))
    if kind == "PlainAOTInput":
        return Input("batch", str(desc.idx))
    if kind == "TangentAOTInput":
        return Input("tangent", str(desc.output.idx))
    raise CaptureError(f"the graph has an input of an unknown kind: {desc}")


def _output(desc: Any) -> Output:
    kind = type(desc).__name__
    if kind == "PlainAOTOutput":
        return Output("result", str(desc.idx))
    if kind == "GradAOTOutput":
        source = _input(desc.grad_of)
        return Output("input_gradient" if source.kind == "batch" else "gradient", source.name)
    if kind == "InputMutationAOTOutput":
        source = _input(desc.mutated_input)
        if source.kind in ("buffer", "parameter"):
            return Output(source.kind, source.name)
        raise CaptureError(f"the model writes to its {source.kind} {source.name!r} in place; write to a copy instead")
    raise CaptureError(f"the graph has an output of an unknown kind: {desc}")
