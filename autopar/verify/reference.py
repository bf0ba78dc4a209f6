"""The right values for a distributed program: the model in eager mode, or its captured graph where that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.ir.ops.float8.histories import latest_of, rolled
from autopar.ir.ops.random import generator_states, same_numbers
from autopar.ir.ops.sequence.flex_attention import by_parts
from autopar.ir.precision import Precision
from autopar.ir.program import RECORDED, Program
from autopar.ir.shards import largest_difference
from autopar.ir.signature.outputs import Loss
from autopar.ir.signature.pytree import Leaf
from autopar.verify.eager import CALLS, EagerCall, Key, eager_calls
from autopar.verify.emulate import run_whole
from autopar.verify.first_difference import tolerance_of
from autopar.verify.float64 import as_dtype, default_dtype, in_dtype

EAGER, CAPTURED = "eager", "captured graph"

SMALLEST = 1e-5
"""A tensor's error is relative to its own largest entry, or to this share of the model's largest gradient entry.

Gradients that cancel out, as of biases in front of batch norm, are rounding: up to 1e-15 of the largest in float64 in
networks of timm.
"""

VANISHED = 1e-12
"""If all gradients are below this share of the model's results, all of them are rounding errors."""

Values = Mapping[Key, torch.Tensor]
"""Tensors by kind and name."""


@dataclass(frozen=True)
class Reference:
    """The right values of several calls in a row.

    Attributes:
        calls: what each call made.
        kind: `EAGER`, or `CAPTURED` where eager mode cannot serve.
        note: why it cannot.
        capture_error: largest difference between the captured graph and eager mode; NaN where they were not compared.
        capture_errors: the outputs of the captured graph that differ, with their errors.
    """

    calls: tuple[EagerCall, ...]
    kind: str = EAGER
    note: str = ""
    capture_error: float = math.nan
    capture_errors: Mapping[Key, float] = field(default_factory=dict)


def reference_of(
    model: nn.Module,
    batch: Batch,
    program: Program,
    given: Values,
    dtype: torch.dtype,
    loss_fn: LossFunction | None = None,
    policy: Precision | None = None,
    loss: Loss = None,
    calls: int = CALLS,
) -> Reference:
    """Call the model in eager mode, and see whether its captured graph is the same.

    Args:
        model: stays as it is.
        batch: real tensors.
        program: as captured, before the canonical form.
        given: global tensors by kind and name of the input.
        dtype: in which everything is computed.
        loss_fn: for a model that does not return its loss.
        policy: under which the program was captured.
        loss: which scalar of the output is the loss.
        calls: how many; a second one may have another graph.
    """
    tangents = {name: v for (kind, name), v in given.items() if kind == "tangent"}
    graph, first_state = captured_calls(program, given, dtype, calls)
    # Any error: eager code of users fails in float64 in as many ways as there are models.
    try:
        # Torch's own flex_attention has no gradients on a CPU.
        with by_parts():
            eager = eager_calls(model, batch, program, tangents, loss_fn=loss_fn, loss=loss, dtype=dtype, calls=calls)
    except Exception as e:
        note = f"the model does not run in {dtype} in eager mode ({type(e).__name__}: {str(e).splitlines()[0:1]})"
        own = _own_error(model, batch, program, given, tangents, loss_fn, policy, loss, calls)
        return Reference(tuple(graph), CAPTURED, note, own)
    errors = _errors_of_calls(program, graph, eager, given)
    error = max(errors.values(), default=0.0)
    wrong = {k: e for k, e in errors.items() if not e <= tolerance_of(dtype)}
    note = _why_not(program, eager[0].drawn, first_state) if wrong else ""
    # A model may compute something else in float64, by a branch on the dtype: then both agree in its own precision.
    if wrong and not note:
        own = _own_error(model, batch, program, given, tangents, loss_fn, policy, loss, calls)
        if own <= _rounding(program, policy):
            note, error = f"the model computes something else in {dtype} than in its own precision", own
    if note:
        # Attributes and generators are those of the eager calls: the graph alone writes none.
        mixed = [EagerCall(c.values, e.written, e.drawn) for c, e in zip(graph, eager, strict=True)]
        return Reference(tuple(mixed), CAPTURED, note, error)
    return Reference(tuple(eager), EAGER, "", error, wrong)


def _errors_of_calls(
    program: Program, graph: Sequence[EagerCall], eager: Sequence[EagerCall], given: Values
) -> dict[Key, float]:
    """The largest error of each output in any of the calls."""
    errors: dict[Key, float] = {}
    before = given
    for own, expected in zip(graph, eager, strict=True):
        values = with_assigned(program, own.values, expected.values)
        for key, error in errors_of(values, expected.values, before).items():
            errors[key] = max(errors.get(key, 0.0), error)
        before = carried(before, expected.values)
    return errors


def captured_calls(
    program: Program, given: Values, dtype: torch.dtype | None, calls: int = CALLS
) -> tuple[list[EagerCall], Mapping[str, torch.Tensor]]:
    """Run a program on one device several times in a row; also the generators' states after the first run."""
    graph = program if dtype is None else as_dtype(program, dtype)
    results: list[EagerCall] = []
    for _ in range(calls):
        # Each call starts from the same random state: without other state it is the first one again.
        if results and not carries(program):
            results.append(results[0])
            continue
        with same_numbers(0), default_dtype(dtype):
            outputs = run_whole(graph, [given[i.kind, i.name] for i in program.inputs])
            drawn = generator_states()
        values = {(o.kind, o.name): v for o, v in zip(program.outputs, outputs, strict=True) if v is not None}
        results.append(EagerCall(values, {}, drawn))
        given = carried(given, values, program)
    return results, results[0].drawn


def carries(program: Program) -> bool:
    """Whether a call writes something that the next one reads, such as a buffer."""
    written = {("buffer", w.name) for w in program.state.writes}
    if any(o.kind == RECORDED for o in program.outputs):
        return True
    return bool(({(o.kind, o.name) for o in program.outputs} | written) & {(i.kind, i.name) for i in program.inputs})


def carried(given: Values, outputs: Values, program: Program | None = None) -> Values:
    """The inputs of the next call: those of the last, with what it has written."""
    assigned = {} if program is None else _results_assigned(program)
    recorded = {name: value for (kind, name), value in outputs.items() if kind == RECORDED}
    return {key: outputs.get(key, outputs.get(assigned.get(key, key), value)) for key, value in given.items()} | {
        ("buffer", name): rolled(given["buffer", name], latest) for name, latest in latest_of(recorded).items()
    }


def with_assigned(program: Program, outputs: Values, expected: Values) -> dict[Key, torch.Tensor]:
    """The outputs of a call, buffers included that it assigns and does not read, for which the graph has no input."""
    result_of = _results_assigned(program)
    assigned = {key: outputs[result_of[key]] for key in expected if key in result_of and result_of[key] in outputs}
    return {**assigned, **outputs}


def _results_assigned(program: Program) -> dict[Key, Key]:
    """The result that each written attribute gets, by its name; buffers among them."""
    writes = program.state.writes
    return {("buffer", w.name): ("result", str(w.value.index)) for w in writes if isinstance(w.value, Leaf)}


def _why_not(program: Program, eager: Mapping[str, torch.Tensor], graph: Mapping[str, torch.Tensor]) -> str:
    """Why the errors come from other random numbers in eager mode than in the graph, if they do; else empty."""
    # Both started from the same state: if they end in different ones, they have drawn different amounts.
    random = any(
        torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in program.graph.graph.nodes
    )  # fmt: skip
    if not random or all(torch.equal(eager[k], graph[k]) for k in eager):
        return ""
    return "the model draws other random numbers in eager mode than its graph does"


def _own_error(
    model: nn.Module,
    batch: Batch,
    program: Program,
    given: Values,
    tangents: Mapping[str, torch.Tensor],
    loss_fn: LossFunction | None,
    policy: Precision | None,
    loss: Loss,
    calls: int,
) -> float:
    """Largest difference between the captured graph and eager mode, both in the model's own precision."""
    compute = None if policy is None else policy.compute
    own: dict[Key, torch.Tensor] = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        own[spec.kind, spec.name] = given[spec.kind, spec.name].to(node.meta["val"].dtype)
    try:
        eager = eager_calls(
            model, batch, program, tangents, loss_fn=loss_fn, loss=loss, dtype=None, compute=compute, calls=calls
        )
        graph, _ = captured_calls(program, own, None, calls)
    except Exception:
        return math.nan
    return max(_errors_of_calls(program, graph, eager, own).values(), default=0.0)


def _rounding(program: Program, policy: Precision | None) -> float:
    """Largest error that rounding explains in the model's own precision."""
    dtypes = {n.meta["val"].dtype for n in program.placeholders if n.meta["val"].is_floating_point()}
    dtypes |= set() if policy is None else {policy.compute}
    coarse = max((torch.finfo(d).eps for d in dtypes), default=0.0)
    # Of bfloat16 a thousand roundings would be larger than the values.
    return min(1e3 * coarse, 0.1)


def errors_of(found: Values, expected: Values, before: Values, replicas: Mapping[Key, float] | None = None) -> dict[
    Key, float
]:  # fmt: skip
    """The error of every tensor that one call returned or wrote, or should have.

    Args:
        found: outputs of a program.
        expected: those of the reference; of its buffers and parameters, what it wrote.
        before: what went in: what neither wrote has not changed.
        replicas: how far copies on different devices differ.
    """
    scale = scale_of(expected)
    errors = {}
    for key in dict.fromkeys([*expected, *found]):
        unchanged = before.get(key) if key[0] in ("buffer", "parameter") else None
        own, right = found.get(key, unchanged), expected.get(key, unchanged)
        if right is None and key[0] == "result":
            continue  # more than the model returns: tensors that the graph returns for attributes
        if own is None or right is None:
            errors[key] = math.inf
            continue
        errors[key] = tensor_error(own, right, scale, (replicas or {}).get(key, 0.0))
    return errors


def scale_of(expected: Values) -> float:
    """The largest gradient entry of a model; where all gradients vanish, what makes errors relative to its results."""
    gradients = max((_largest(v) for (kind, _), v in expected.items() if kind == "gradient"), default=0.0)
    results = max((_largest(v) for (kind, _), v in expected.items() if kind == "result"), default=0.0) or 1.0
    return gradients if gradients > VANISHED * results else results / SMALLEST


def _largest(tensor: torch.Tensor) -> float:
    """Largest finite entry; 0 of whole numbers."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def tensor_error(found: torch.Tensor, expected: torch.Tensor, scale: float, replicas: float = 0.0) -> float:
    """Largest difference over the tensor's largest entry, or over a share of the largest gradient entry.

    What is no number, or infinite, in both at the same places is equal.
    """
    if found.shape != expected.shape:
        return math.inf
    # Integers and booleans are equal or not. The last term below only keeps a quotient of zeros from being NaN.
    difference = max(largest_difference(found, expected), replicas)
    if difference == 0.0 or not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if difference == 0.0 else math.inf
    return difference / max(_largest(expected), SMALLEST * scale, 1e-300)


def in_one_dtype(program: Program, values: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Values:
    """Global tensors by kind and name of the input."""
    return {(i.kind, i.name): in_dtype(v, dtype) for i, v in zip(program.inputs, values, strict=True)}
