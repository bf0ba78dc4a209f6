"""The first node at which a rewritten program differs from the plain model: with module, line and layouts."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import is_backward, module_path, tensor_arguments, user_line
from autopar.ir.layout import Layout, Partial, Placement, Replicate, Split, TensorType, describe, local_shape
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import GradientAccumulator
from autopar.ir.ops.random import generator_states, restore_generators, same_numbers
from autopar.ir.program import Program
from autopar.ir.shards import assemble, coordinates, largest_difference, without_padding
from autopar.search.microbatch.split import microbatch_program
from autopar.verify.emulate import Observer, run_whole
from autopar.verify.emulate_step import EmulatedStep
from autopar.verify.float64 import as_dtype, default_dtype

CAPTURE, CANONICAL, MICROBATCHES, REWRITING, PIPELINE = (
    "capture", "canonical form", "microbatches", "rewriting", "pipeline",
)  # fmt: skip
"""The part of the compiler that causes a difference."""

SHARE = 1e-4
"""A node's error is relative to its own largest entry, or to this share of the largest entry of its arguments."""


@dataclass(frozen=True)
class FirstDifference:
    """The first value that is not what the plain model computes.

    Attributes:
        stage: the part of the compiler that causes it: ``capture`` (the graph of one device is not what the model
            does), ``canonical form``, ``microbatches``, ``rewriting`` (the plan's layouts and redistributions) or
            ``pipeline``.
        node: name of the node in the graph on global tensors, `ParallelModule.logical_graph`; where the capture is
            wrong, that of a result, or the last that takes the parameter whose gradient is wrong.
        operator: what it calls, or the redistribution of its value.
        module: qualified name of the module; empty for the model itself.
        line: ``file.py:12`` of the user's code, as far as it is known.
        backward: whether it belongs to the backward pass.
        error: largest difference over the value's largest entry.
        tensor: the result, gradient, buffer or attribute that is wrong, where the node was found by it.
        expected: the layout that the value should have, as in a plan's summary.
        found: a layout in which the parts of all devices would give the right value; empty: there is none.
        inputs: layouts of the arguments.
    """

    stage: str
    node: str
    operator: str
    module: str
    line: str
    backward: bool
    error: float
    tensor: str = ""
    expected: str = ""
    found: str = ""
    inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One sentence."""
        where = f"{self.operator or 'no operator'} (node {self.node or '?'}, module {self.module or 'the root'!r}"
        where += f", {'backward' if self.backward else 'forward'} pass, {self.line or 'no source line'})"
        if self.stage == CAPTURE and not self.node:
            return f"{self.tensor} is not what the eager model leaves there; the captured graph does not keep it"
        if self.stage == CAPTURE:
            return f"{self.tensor} of the captured graph differs from the eager model by {self.error:.2g}, at {where}"
        text = f"{where} differs by {self.error:.2g} from one device, since {self.stage}"
        if self.tensor:
            text += f"; seen in {self.tensor}"
        if self.expected:
            text += f"; its layout is {self.expected}, and its parts "
            text += f"would be right in {self.found}" if self.found else "give the right value in no layout"
        if self.inputs:
            text += f"; the layouts of its arguments are {', '.join(self.inputs)}"
        return text


class _FoundError(Exception):
    """Ends a run at the first difference."""

    def __init__(self, difference: FirstDifference) -> None:
        super().__init__(str(difference))
        self.difference = difference


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest relative error that rounding explains in a dtype: 1e-9 in float64.

    Rounding is largest in gradients that cancel out, such as those of biases in front of batch norm, which count
    relative to a small share of the largest gradient.
    """
    return float(torch.finfo(dtype).eps ** 0.575)


def first_in_rewriting(step: EmulatedStep) -> FirstDifference | None:
    """The first node of the rewritten graph whose parts are not those of its value on one device."""
    count = step.plan.microbatches
    part = microbatch_program(step.program, count, deterministic=True) if count > 1 else step.program
    whole = as_dtype(part, step.dtype)
    totals = GradientAccumulator()

    def observers(turn: int) -> Observer:
        values: dict[str, Any] = {}
        # The emulated ranks, which run after this, must draw the same random numbers.
        states = generator_states()
        with totals.microbatch():
            inputs = step.inputs(part, turn)
            run_whole(whole, inputs, lambda node, results: values.__setitem__(node.name, results[0]))
        values.update({n.name: v for n, v in zip(whole.placeholders, inputs, strict=True)})
        restore_generators(states)
        return _observer(step, part, values)

    try:
        with same_numbers(0):
            step.even.run_flat(observers)
    except _FoundError as e:
        return e.difference
    return None


def _observer(step: EmulatedStep, part: Program, values: Mapping[str, Any]) -> Observer:
    """Compares every node that has layouts with the node of the global graph that it comes from."""
    originals = {n.name: n for n in part.graph.graph.nodes}
    local = {n.name: n for n in step.local.graph.graph.nodes}
    plan, limit = step.plan.inner, tolerance_of(step.dtype)

    def observe(node: fx.Node, results: list[Any]) -> None:
        source = local.get(info(node).moved_value or "") if _is_redistribution(node) else node
        name = (None if source is None else info(source).program_node) or ""
        # Nodes within a redistribution have no value of the global graph; the last of it has.
        if name not in values or not info(node).layouts or info(node).internal:
            return
        whole = values[name]
        for i in _used_outputs(node):
            type_, layout = info(node).types[i], info(node).layouts[i]
            several = isinstance(results[0], tuple | list)
            expected = whole[i] if isinstance(whole, tuple | list) else whole
            parts = [r[i] if several else r for r in results]
            if type_ is None or layout is None or expected is None or any(p is None for p in parts):
                continue
            if type_.routed is not None:  # in an order of each device's own; tokens that come of it are compared
                continue
            # A difference of large arguments is as wrong as these are: 1e8 - 1e8 is rounding, whatever it is.
            scale = SHARE * _largest(values.get(a.name) for a in originals[name].all_input_nodes)
            error = _error(parts, expected, type_, layout, plan.axis_sizes, scale)
            if error > limit:
                right = _layout_that_fits(parts, expected, type_, plan.axis_sizes, scale, limit)
                raise _FoundError(_difference(node, originals[name], error, i, right, plan.axis_names))

    return observe


def _is_redistribution(node: fx.Node) -> bool:
    """Whether a pass inserted the node to bring a value into another layout; it is no node of the global graph."""
    return info(node).moved_value is not None and info(node).program_node is None


def _used_outputs(node: fx.Node) -> list[int]:
    """Numbers of the outputs that something takes; others may hold anything."""
    if len(info(node).types) == 1:
        return [0]
    return sorted({u.args[1] for u in node.users if u.target is operator.getitem})  # type: ignore[misc]


def _difference(
    node: fx.Node, original: fx.Node, error: float, index: int, right: Layout | None, names: Sequence[str]
) -> FirstDifference:
    """A difference at one output of a node; ``right``: a layout in which its parts would be right."""

    def text(source: fx.Node, i: int, layout: Layout | None) -> str:
        return "" if layout is None else describe(info(source).type(i), layout, names)

    inputs = []
    for argument in tensor_arguments(node) if not _is_redistribution(node) else ():
        source, i = argument.args if argument.target is operator.getitem else (argument, 0)
        if info(source).layouts:  # type: ignore[arg-type]
            inputs.append(text(source, i, info(source).layouts[i]))  # type: ignore[arg-type,index]
    called = f"{_collective(node)}of {original.target}" if _is_redistribution(node) else str(original.target)
    return FirstDifference(
        REWRITING, original.name, called, module_path(original), _line(original), is_backward(node), error,
        expected=text(node, index, info(node).layouts[index]), found=text(node, index, right), inputs=tuple(inputs),
    )  # fmt: skip


def _collective(node: fx.Node) -> str:
    """``all_reduce over data `` for the last node of a redistribution."""
    # Backwards over waits and slices to the collective; a redistribution without one is a slice of what is there.
    while node.all_input_nodes and _is_redistribution(node):
        collective = info(node).collective
        if collective is not None:
            return f"{collective.kind} over {collective.axis} "
        node = node.all_input_nodes[0]
    return "slice "


def _largest(values: Any) -> float:
    """Largest finite entry of floating tensors."""
    found = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point() and v.numel()]
    return max((float(v.abs().nan_to_num(0.0, 0.0, 0.0).max()) for v in found), default=0.0)


def _error(
    parts: Sequence[torch.Tensor],
    expected: torch.Tensor,
    type_: TensorType,
    layout: Layout,
    sizes: Sequence[int],
    scale: float,
) -> float:
    """How far the value that parts make up in a layout is from the expected one; infinite if they do not fit it."""
    if any(tuple(p.shape) != local_shape(type_, layout, sizes) for p in parts):
        return math.inf
    whole, replicas = _whole(parts, type_, layout, sizes)
    # Padding is left out: there may be anything in it, except in gradients, which `compare` looks at.
    if whole.ndim != expected.ndim or any(n < m for n, m in zip(whole.shape, expected.shape, strict=True)):
        return math.inf
    error = max(largest_difference(without_padding(whole, expected.shape), expected), replicas)
    if error == 0.0 or not (expected.is_floating_point() or expected.is_complex()):
        return error
    return error / max(_largest([torch.view_as_real(expected) if expected.is_complex() else expected]), scale, 1e-300)


def _whole(
    parts: Sequence[torch.Tensor], type_: TensorType, layout: Layout, sizes: Sequence[int]
) -> tuple[torch.Tensor, float]:
    """As `assemble`, for terms of any kind: a largest entry, for example, is no sum."""
    by_rank = dict(zip(coordinates(sizes), parts, strict=True))
    # Axes of such terms are reduced here, to size 1, and `assemble` does the rest.
    remaining_layout, remaining_sizes = list(layout), list(sizes)
    for axis, placement in enumerate(layout):
        if not isinstance(placement, Partial) or placement.op == "sum":
            continue
        combine: Callable[..., torch.Tensor] = torch.maximum if placement.op == "max" else torch.minimum
        merged: dict[tuple[int, ...], torch.Tensor] = {}
        for rank, part in by_rank.items():
            key = (*rank[:axis], 0, *rank[axis + 1 :])
            merged[key] = combine(merged[key], part) if key in merged else part
        by_rank, remaining_layout[axis], remaining_sizes[axis] = merged, Replicate(), 1
    ordered = [by_rank[rank] for rank in coordinates(remaining_sizes)]
    return assemble(ordered, type_, tuple(remaining_layout), remaining_sizes)


def _layout_that_fits(
    parts: Sequence[torch.Tensor],
    expected: torch.Tensor,
    type_: TensorType,
    sizes: Sequence[int],
    scale: float,
    limit: float,
) -> Layout | None:
    """A layout in which the parts would give the expected value."""
    # A help for whoever reads the report, which is not worth trying all combinations on four axes.
    if len(sizes) > 3 or not (expected.is_floating_point() or expected.is_complex()):
        return None
    splits = [Split(d, j) for d, j in type_.positions]
    placements: list[Placement] = [Replicate(), *splits, Partial("sum"), Partial("max")]
    for layout in itertools.product(placements, repeat=len(sizes)):
        if tuple(parts[0].shape) != local_shape(type_, layout, sizes):
            continue
        if _error(parts, expected, type_, layout, sizes, scale) <= limit:
            return layout
    return None


def first_in_canonical_form(
    captured: Program, program: Program, values: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
) -> FirstDifference | None:
    """The first operator that both graphs have and that makes another value in the canonical one."""
    by_name: dict[str, tuple[Any, Any]] = {}
    with same_numbers(0), default_dtype(dtype):
        inputs = [values[i.kind, i.name] for i in captured.inputs]
        run_whole(as_dtype(captured, dtype), inputs, lambda n, v: by_name.__setitem__(n.name, (n.target, v[0])))

    def observe(node: fx.Node, results: list[Any]) -> None:
        target, expected = by_name.get(node.name, (None, None))
        value = results[0]
        # Canonicalization reuses names: a node counts as the same if the operator is.
        if target is not node.target or not isinstance(value, torch.Tensor) or value.shape != expected.shape:
            return
        error = largest_difference(value, expected) / max(_largest([expected]), 1e-300)
        if error > tolerance_of(dtype):
            raise _FoundError(at_node(CANONICAL, node, error))

    try:
        with same_numbers(0), default_dtype(dtype):
            run_whole(as_dtype(program, dtype), [values[i.kind, i.name] for i in program.inputs], observe)
    except _FoundError as e:
        return e.difference
    return None


def at_node(stage: str, node: fx.Node | None, error: float, tensor: str = "") -> FirstDifference:
    """A difference at a node of a graph on global tensors, as far as there is one."""
    if node is None:
        return FirstDifference(stage, "", "", "", "", False, error, tensor)
    named = str(node.target) if node.op == "call_function" else node.op
    return FirstDifference(stage, node.name, named, module_path(node), _line(node), is_backward(node), error, tensor)


def _line(node: fx.Node) -> str:
    """The innermost line of the user's code, which is not torch's; what `user_line` finds if there is none."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [f"{file}:{number}" for file, number in lines if not re.search(r"[/\\]torch[/\\]", file)]
    return own[-1] if own else user_line(node)


def at_attribute(name: str, error: float) -> FirstDifference:
    """An attribute that the model writes and the captured graph does not."""
    return FirstDifference(CAPTURE, "", "", name.rpartition(".")[0], "", False, error, f"attribute {name}")


def at_output(stage: str, program: Program, wrong: Mapping[tuple[str, str], float]) -> FirstDifference:
    """The output that goes wrong first, of several: a result, else the gradient of what is nearest to the loss."""
    position = {n: i for i, n in enumerate(program.graph.graph.nodes)}
    outputs = dict(zip(((o.kind, o.name) for o in program.outputs), program.output_values, strict=True))
    inputs = {(i.kind, i.name): n for n, i in zip(program.placeholders, program.inputs, strict=True)}

    def last_user(key: tuple[str, str]) -> fx.Node | None:
        kind, name = key
        source = inputs.get(("parameter" if kind == "gradient" else kind, name))
        users = [u for u in (source.users if source is not None else ()) if u.op != "output" and not is_backward(u)]
        return max(users, key=position.__getitem__, default=source)

    def order(key: tuple[str, str]) -> tuple[int, int]:
        # The backward pass starts at the loss: of wrong gradients, the one whose operator comes last is the cause.
        user = last_user(key)
        return (key[0] != "result", -position[user] if user is not None else 0)

    key = min(wrong, key=order)
    node = outputs.get(key) if key[0] == "result" else last_user(key)
    label = f"the gradient of {key[1]!r}" if key[0] == "gradient" else f"{key[0]} {key[1]}"
    return at_node(stage, node, wrong[key], label)
