"""What a distributed program is held against: the model in eager mode, or its captured graph where that cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.capture import Batch, LossFunction
from autopar.ir.ops.random import generator_states, same_numbers
from autopar.ir.precision import Precision
from autopar.ir.program import Program
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
"""Gradients below this share of the model's results are rounding errors, all of them."""

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
    try:
        eager = eager_calls(model, batch, program, tangents, loss_fn=loss_fn, loss=loss, dtype=dtype, calls=calls)
    except Exception as e:
        note = f"the model does not run in {dtype} in eager mode ({type(e).__name__}: {str(e).splitlines()[0:1]})"
        own = _own_error(model, batch, program, given, tangents, loss_fn, policy, loss, calls)
        return Reference(tuple(graph), CAPTURED, note, own)
    errors = _errors_of_calls(program, graph, eager, given)
    error = max(errors.values(), default=0.0)
    wrong = {k: e for k, e in errors.items() if not e <= tolerance_of(dtype)}
    note = _why_not(program, eager[0].drawn, first_state) if wrong else ""
    if wrong and not note:
        own = _own_error(model, batch, program, given, tangents, loss_fn, policy, loss, calls)
        if own <= _rounding(program, policy):
            note, error = f"the model computes something else in {dtype} than in its own precision", own
    if note:
        made = [EagerCall(c.values, e.written, e.drawn) for c, e in zip(graph, eager, strict=True)]
        return Reference(tuple(made), CAPTURED, note, error)
    return Reference(tuple(eager), EAGER, "", error, wrong)


def _errors_of_calls(
    program: Program, graph: Sequence[EagerCall], eager: Sequence[EagerCall], given: Values
) -> dict[Key, float]:
    """The largest error of each output in any of the calls."""
    found: dict[Key, float] = {}
    before = given
    for made, expected in zip(graph, eager, strict=True):
        values = with_assigned(program, made.values, expected.values)
        for key, error in errors_of(values, expected.values, before).items():
            found[key] = max(found.get(key, 0.0), error)
        before = carried(before, expected.values)
    return found


def captured_calls(
    program: Program, given: Values, dtype: torch.dtype | None, calls: int = CALLS
) -> tuple[list[EagerCall], Mapping[str, torch.Tensor]]:
    """Run a program on one device several times in a row; with the generators' states behind the first run."""
    graph = program if dtype is None else as_dtype(program, dtype)
    made: list[EagerCall] = []
    for _ in range(calls):
        if made and not carries(program):
            made.append(made[0])
            continue
        with same_numbers(0), default_dtype(dtype):
            outputs = run_whole(graph, [given[i.kind, i.name] for i in program.inputs])
            drawn = generator_states()
        values = {(o.kind, o.name): v for o, v in zip(program.outputs, outputs, strict=True) if v is not None}
        made.append(EagerCall(values, {}, drawn))
        given = carried(given, values, program)
    return made, made[0].drawn


def carries(program: Program) -> bool:
    """Whether a call leaves something for the next: a buffer, say."""
    written = {("buffer", w.name) for w in program.state.writes}
    return bool(({(o.kind, o.name) for o in program.outputs} | written) & {(i.kind, i.name) for i in program.inputs})


def carried(given: Values, made: Values, program: Program | None = None) -> Values:
    """What goes into the next call: what is written takes the place of what there was."""
    places = {} if program is None else _results_assigned(program)
    return {key: made.get(key, made.get(places.get(key, key), value)) for key, value in given.items()}


def with_assigned(program: Program, made: Values, expected: Values) -> dict[Key, torch.Tensor]:
    """What a call made, buffers included that it assigns and does not read, for which the graph has no input."""
    places = _results_assigned(program)
    assigned = {key: made[places[key]] for key in expected if key in places and places[key] in made}
    return {**assigned, **made}


def _results_assigned(program: Program) -> dict[Key, Key]:
    """The result that each written attribute gets, by its name; buffers among them."""
    writes = program.state.writes
    return {("buffer", w.name): ("result", str(w.value.index)) for w in writes if isinstance(w.value, Leaf)}


def _why_not(program: Program, eager: Mapping[str, torch.Tensor], graph: Mapping[str, torch.Tensor]) -> str:
    """Why eager mode draws other numbers than the graph, if it does."""
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
    tangents: Values | Mapping[str, torch.Tensor],
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
    named: Any = tangents
    try:
        eager = eager_calls(
            model, batch, program, named, loss_fn=loss_fn, loss=loss, dtype=None, compute=compute, calls=calls
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
    return min(1e3 * coarse, 0.1)


def errors_of(found: Values, expected: Values, before: Values, replicas: Mapping[Key, float] | None = None) -> dict[
    Key, float
]:  # fmt: skip
    """The error of every tensor that one call made, or should have made.

    Args:
        found: outputs of a program.
        expected: those of the reference; of its buffers and parameters, what it wrote.
        before: what went in: what neither wrote has not changed.
        replicas: how far copies on different devices differ.
    """
    scale = scale_of(expected)
    errors = {}
    for key in dict.fromkeys([*expected, *found]):
        kept = before.get(key) if key[0] in ("buffer", "parameter") else None
        one, other = found.get(key, kept), expected.get(key, kept)
        if other is None and key[0] == "result":
            continue  # more than the model returns: what the graph hands on for attributes, see `autopar.verify`
        if one is None or other is None:
            errors[key] = math.inf
            continue
        errors[key] = tensor_error(one, other, scale, (replicas or {}).get(key, 0.0))
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
    difference = max(largest_difference(found, expected), replicas)
    if difference == 0.0 or not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if difference == 0.0 else math.inf
    return difference / max(_largest(expected), SMALLEST * scale, 1e-300)


def in_one_dtype(program: Program, values: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Values:
    """Global tensors by kind and name of the input."""
    return {(i.kind, i.name): in_dtype(v, dtype) for i, v in zip(program.inputs, values, strict=True)}
