"""`recosted`: what a finished plan costs, counted anew. Nothing is taken of what the plan says that it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.quantized.axes import GRADIENTS, WEIGHTS
from autopar.passes import as_planned
from autopar.search.emitted.peak import peak_of
from autopar.search.microbatch.shares import with_shares
from autopar.search.microbatch.split import microbatch_program
from autopar.search.pipeline.stage_devices import devices_along, predicted_alone
from autopar.search.pipeline.stage_peak import cut_again
from autopar.search.predict import predict
from autopar.sharding.assignment import all_moves, assign, machine_of
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes
from autopar.sharding.redistribute import Tables
from autopar.sharding.redistribute.moves import Move

SAME = 1e-6
"""Figures that are this close, relatively, are the same: sums are in other orders."""

_FIGURES = ("step_seconds", "compute_seconds", "communication_seconds", "memory_bytes", "peak_bytes",
            "communication_bytes", "collectives", "host_seconds", "host_bytes", "room",
            "waiting_seconds")  # fmt: skip


def recosted(program: Program, plan: Plan, *, deterministic: bool = False) -> Plan:
    """The plan with its prediction, table and objective counted from the program, its layouts and its cluster.

    Args:
        program: of the whole batch, as `autopar.compiler.solve` plans it.
        plan: for this program.
        deterministic: whether random numbers are those of one device.

    Raises:
        PlanError: the plan does not fit the program.
    """
    part, plan = _part_of(program, plan, deterministic)
    if plan.pipeline is not None:
        return _in_stages(part, plan)
    padded = as_planned(part, plan)
    dims = analyze(padded)
    classes = layer_classes(padded, dims)
    held = peak_of(padded, plan, classes) if plan.predicted.peak_bytes else {}
    plan = replace(plan, predicted=replace(plan.predicted, peak_bytes=held))
    if plan.shares is not None:
        return with_shares(part, plan)
    found = predict(padded, dims, plan, classes)
    return _with_objective(found, found.predicted.step_seconds)


def _part_of(program: Program, plan: Plan, deterministic: bool) -> tuple[Program, Plan]:
    """The program of one microbatch, and the plan with the padding of its parameters alone."""
    part = microbatch_program(program, plan.microbatches, deterministic=deterministic)
    if program.repeat is None:
        return part, plan
    # A plan has all layers of a deep model, and the program three of them.
    left_out = set(plan.parameters) - {spec.name for spec in part.inputs if spec.kind == "parameter"}
    return part, replace(plan, padding={name: shape for name, shape in plan.padding.items() if name not in left_out})


def sent_in_few_bits(program: Program, plan: Plan, *, deterministic: bool = False) -> set[tuple[str, str]]:
    """Axes along which a plan sends messages in few bits, each with what these are of.

    Args:
        program: of the whole batch, as `autopar.compiler.solve` plans it.
        plan: for this program.
        deterministic: whether random numbers are those of one device.
    """
    if not plan.quantized:
        return set()
    return {(axis, message) for axis, message, move, _ in _messages(program, plan, deterministic) if move.bits}


IN_FLOAT8, LARGER = "in float8", "larger"
"""Why a plan sends nothing of a kind in few bits: weights are in float8 when they are sent; none would be smaller."""


def why_not_in_few_bits(program: Program, plan: Plan, *, deterministic: bool = False) -> dict[tuple[str, str], str]:
    """Axes along which a plan sends messages whole, each with what these are of, and why; as `sent_in_few_bits`."""
    found: dict[tuple[str, str], str] = {}
    for axis, message, move, of_weights_in_float8 in _messages(program, plan, deterministic):
        if of_weights_in_float8 and move.kind == "all_gather":
            found[axis, WEIGHTS] = IN_FLOAT8
        elif message and move.collective == {WEIGHTS: "all_gather", GRADIENTS: "reduce_scatter"}[message]:
            found.setdefault((axis, message), LARGER)
    return found


def gathers_of_weights(program: Program, plan: Plan, *, deterministic: bool = False) -> set[str]:
    """Axes of several devices along which a plan gathers parameters; arguments as of `sent_in_few_bits`."""
    moved, sizes = _messages(program, plan, deterministic), dict(plan.axes)
    return {a for a, message, m, _ in moved if message == WEIGHTS and m.kind == "all_gather" and sizes[a] > 1}


def _messages(program: Program, plan: Plan, deterministic: bool) -> Iterator[tuple[str, str, Move, bool]]:
    """The moves of a plan, each with its axis, what it is of, and whether that is a weight in float8."""
    part, plan = _part_of(program, plan.inner, deterministic)
    padded = as_planned(part, plan)
    dims = analyze(padded)
    assignment = assign(padded, dims, plan, layer_classes(padded, dims))
    moves = all_moves(padded, dims, assignment, Tables(machine_of(plan)))
    inputs = zip(padded.placeholders, padded.inputs, strict=True)
    of_batch = {node for node, spec in inputs if spec.kind in ("batch", "tangent")}
    for node, sources in padded.sources.items():
        if any(n in of_batch for n, _ in sources):
            of_batch.add(node)
    for value, counted in moves.items():
        kind = dims.types[value]
        in_float8 = kind.dtype == "uint8" and value[0] not in of_batch  # as bytes
        yield from ((plan.axis_names[m.axis], kind.message, m, in_float8) for m, _, _ in counted)


def _in_stages(part: Program, plan: Plan) -> Plan:
    """The same with stages."""
    assert plan.pipeline is not None
    devices = devices_along(plan.cluster, dict(plan.axes), plan.pipeline.axis)
    alone = predicted_alone(part, plan.inner, devices)
    cut, shape, actions = cut_again(plan, part, devices)
    seconds = cut.seconds(actions)
    cut = replace(cut, plan=replace(cut.plan, predicted=alone.predicted))
    return _with_objective(
        replace(plan, predicted=cut.predicted(shape, actions, seconds), modules=alone.modules), seconds
    )


def _with_objective(plan: Plan, seconds: float) -> Plan:
    return replace(plan, certificate=replace(plan.certificate, objective=seconds))


def differences(said: Plan, found: Plan) -> Iterator[str]:
    """Figures of a plan that are not those that were counted, each with both, the objective first."""
    figures: list[tuple[str, Any, Any]] = []
    if said.certificate.method != "random":  # nothing was minimized
        figures.append(("certificate.objective", said.certificate.objective, found.certificate.objective))
    figures += [(f"predicted.{n}", getattr(said.predicted, n), getattr(found.predicted, n)) for n in _FIGURES]
    for name, own, other in figures:
        for path, a, b in _pairs(name, own, other):
            if abs(a - b) > SAME * max(abs(a), abs(b)):
                yield f"{path} is {a:.9g} and should be {b:.9g}"


def _pairs(path: str, a: Any, b: Any) -> Iterator[tuple[str, float, float]]:
    """Numbers of two nested mappings at the same place; what is absent is 0."""
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        a, b = a or {}, b or {}
        for key in dict.fromkeys((*a, *b)):
            yield from _pairs(f"{path}.{key}", a.get(key, 0), b.get(key, 0))
    else:
        yield path, float(a), float(b)
