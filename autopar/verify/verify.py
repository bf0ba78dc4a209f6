"""`verify`: the rewritten graphs of every rank, in one process and in float64, against the plain model."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import Batch, LossFunction
from autopar.capture.state.record import Record
from autopar.capture.state.slots import state_tensors
from autopar.compiler import captured, in_canonical_form, part_of_worker, rewrite, solve
from autopar.costs.arguments import AXES, FLAG, a, require, whole
from autopar.costs.cluster import Cluster
from autopar.errors import VerifyError
from autopar.ir.ops.float8.histories import is_history
from autopar.ir.ops.random import generator_states, same_numbers
from autopar.ir.plan import Plan
from autopar.ir.precision import Precision
from autopar.ir.program import STATELESS, Input, Program, State
from autopar.ir.signature import binding
from autopar.ir.signature.outputs import Loss
from autopar.ir.structure import same_graph
from autopar.passes import DETERMINISTIC_PASSES, with_any_strides, with_whole_numbers
from autopar.passes.canonicalize import canonical
from autopar.search.arguments import BATCH, check_planning
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import MICROBATCHES as COUNT
from autopar.search.options import OFFLOAD, Search
from autopar.verify.compare import EquivalenceReport, compare, with_few_bits
from autopar.verify.eager import CALLS, EagerCall, Key, copied
from autopar.verify.emulate_step import EmulatedStep
from autopar.verify.first_difference import CAPTURE, at_output
from autopar.verify.live_copy import LiveCopy
from autopar.verify.reference import (
    CAPTURED,
    Reference,
    captured_calls,
    carried,
    carries,
    in_one_dtype,
    reference_of,
    tensor_error,
)

__all__ = ["EquivalenceReport", "capture_error", "compare", "global_values", "tensor_error", "verify"]


def verify(
    model: nn.Module,
    batch: Batch,
    axes: Mapping[str, int],
    *,
    loss_fn: LossFunction | None = None,
    loss: Loss = None,
    plan: Plan | str | None = None,
    seed: int = 0,
    microbatches: int = 1,
    pins: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    precision: Precision | str | torch.dtype | None = None,
    random_strides: bool = False,
) -> EquivalenceReport:
    """Compare a plan's program, on an emulated mesh, with the plain model in eager mode, over two calls in a row.

    Messages that the plan sends in few bits (`Plan.quantized`) are sent whole for that: what they lose is no error of
    the graph. The graph that does send few bits is then compared with the recurrence, in which the numbers of these
    messages are rounded from the definition; ``lost`` of the report says how far that is from exact.

    Args:
        model: with real parameters; it is not changed.
        batch: tuple or dict of real tensors, the global batch.
        axes: name and size of each mesh axis. Of a plan with workers (role ``local``), theirs is the first: one worker
            is then compared with the plain model on its part of the batch.
        loss_fn: for a model that does not return its loss.
        loss: which scalar of the output is the loss, as for `autopar.parallelize`.
        plan: what to run; None searches for one, ``"random"`` draws a feasible one.
        microbatches: of the plan that is searched or drawn.
        pins: of the same, see `Search`; they come before ``microbatches``.
        seed: of the random plan and of the tangents of outputs that are no loss.
        dtype: in which everything is computed.
        precision: policy whose casts the program has; they too become ``dtype``. With float8 linear layers a plan is
            compared with these on one device, and the capture, without them, with the eager model.
        random_strides: give every tensor random strides: results must not depend on the memory layout of tensors.

    Raises:
        ValueError: an argument is wrong.
        VerifyError: a parameter or batch tensor holds no data.
    """
    check_planning(model, batch, loss_fn, loss, None, "adamw", None)
    plans = a((Plan, type(None)), 'a Plan, None or "random"')
    require(
        batch=(batch, BATCH),
        axes=(axes, AXES), plan=(None if plan == "random" else plan, plans), seed=(seed, whole(0)),
        microbatches=(microbatches, whole(1)), random_strides=(random_strides, FLAG),
        dtype=(dtype, a(torch.dtype, "a floating dtype, such as torch.float64")),
    )  # fmt: skip
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: expected a floating dtype, such as torch.float64")
    Search(pins={} if pins is None else pins)
    if isinstance(plan, Plan) and plan.workers and dict(axes) in _with_workers(plan):
        # Workers train apart: each is to compute what the plain model does on its part of the batch.
        axes, batch = dict(plan.axes), part_of_worker(model, batch, plan.workers)
    policy = Precision.resolve(precision)
    # In two steps, so that a difference can be told to come from the capture or from the canonical form.
    graph = captured(model, batch, loss_fn=loss_fn, loss=loss, precision=policy)
    program = in_canonical_form(graph, policy)
    values = global_values(program, model, batch, seed)
    plan = _plan(program, axes, plan, seed, pins or {COUNT: microbatches})
    # All ranks draw what one device would: with other random numbers nothing could be compared.
    passes = DETERMINISTIC_PASSES
    if random_strides:
        passes = with_any_strides(passes)
    local = rewrite(program, plan, passes=with_whole_numbers(passes))
    given = in_one_dtype(program, values, dtype)
    capture = functools.partial(captured, batch=batch, loss_fn=loss_fn, loss=loss, precision=policy)
    before = Record(model)
    calls, later = _second_call(graph, model, given, dtype, capture)
    before.restore()  # calls change globals, of which there are no copies
    # A graph as captured draws in the order of strides that tensors happen to have; in canonical form as eager does.
    raw = canonical(graph) if any(_is_random(n) for n in graph.graph.graph.nodes) else graph
    reference = reference_of(model, batch, raw, given, dtype, loss_fn, policy, loss, calls)
    located: Program | None = graph
    if program.float8:
        # Eager mode has no float8 layers: it has shown that the capture is right, and one device rounds as all do.
        step = EmulatedStep(program, local, plan, list(given.values()), dtype)
        reference, located = _in_float8(reference, graph, step, calls), None
    live = LiveCopy(model, dtype, program, later)
    draw = random.Random(seed) if random_strides else None
    try:
        report = compare(program, local, plan, values, dtype, reference=reference, graph=located, live=live, draw=draw)
    finally:
        before.restore()
    return with_few_bits(report, program, plan, values, passes, dtype) if plan.quantized else report


def _with_workers(plan: Plan) -> list[dict[str, int]]:
    """The axes of a plan of workers; of workers of one device theirs is the only one, and the plan's has no name."""
    workers, own = dict(plan.workers), dict(plan.axes)
    return [workers | own, *([workers] if list(own.values()) == [1] else [])]


def _second_call(
    graph: Program,
    model: nn.Module,
    given: Mapping[Key, torch.Tensor],
    dtype: torch.dtype,
    capture: Callable[..., Program],
) -> tuple[int, State | None]:
    """How many calls the first graph serves, and the state of the second call, if the model must be recaptured for it.

    What a call writes to the model's attributes may give the next one a graph of its own; comparing the second call of
    the eager model with the first graph would then report a difference that `autopar.parallelize` does not have.
    """
    # Most models write no attributes: they need no second capture to know that.
    if graph.state == STATELESS:
        return CALLS, None
    values = captured_calls(graph, given, dtype, 1)[0][0].values
    changed = LiveCopy(model, dtype, graph).call(values)[1]
    if changed is None:
        return CALLS, None
    # Back in the model's own dtype: a graph that is captured in another one has other casts.
    second = capture(copied(changed, _own_dtype(model)), training=graph.training)
    return (CALLS, second.state) if same_graph(graph, second) else (1, None)


def _is_random(node: fx.Node) -> bool:
    """Whether a node of a graph as captured draws numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _own_dtype(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _in_float8(reference: Reference, graph: Program, step: EmulatedStep, calls: int) -> Reference:
    """The right values of a program with float8 linear layers: its own on one device, if the capture is right.

    Args:
        reference: of the program without them.
        graph: as captured.
        step: with them; one device computes the same microbatches, since each has scales of its own.
        calls: how many.

    Raises:
        VerifyError: the capture is wrong.
    """
    if reference.capture_errors:
        raise VerifyError(f"the capture is wrong; report it: {at_output(CAPTURE, graph, reference.capture_errors)}")
    program = step.program
    part = microbatch_program(program, step.plan.microbatches, deterministic=True)
    found: list[EagerCall] = []
    for _ in range(calls):
        if found and not carries(program):
            found.append(found[0])
            continue
        with same_numbers(0):
            outputs = step.run_on_one_device(part)
            drawn = generator_states()
        values = {(o.kind, o.name): v[0] for o, v in zip(part.outputs, outputs, strict=True) if v is not None}
        found.append(EagerCall(values, {}, drawn))
        given = {(i.kind, i.name): v for i, v in zip(program.inputs, step.values, strict=True)}
        step = replace(step, values=list(carried(given, values, program).values()))
    note = (
        f"linear layers in {program.float8}, as one device computes them; without them the capture is the eager model"
    )
    return Reference(tuple(found), CAPTURED, note, reference.capture_error)


def capture_error(
    program: Program,
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction | None,
    values: Sequence[torch.Tensor],
    policy: Precision | None = None,
    loss: Loss = None,
) -> float:
    """Largest difference between a program on one device and the eager model, over two calls in float64.

    Raises:
        VerifyError: it is more than rounding.
    """
    given = in_one_dtype(program, values, torch.float64)
    reference = reference_of(model, batch, program, given, torch.float64, loss_fn, policy, loss)
    if reference.capture_errors:
        difference = at_output(CAPTURE, program, reference.capture_errors)
        raise VerifyError(f"the capture is wrong; report it: {difference}")
    return reference.capture_error


def _plan(
    program: Program, axes: Mapping[str, int], plan: Plan | str | None, seed: int, pins: Mapping[str, Any]
) -> Plan:
    if isinstance(plan, Plan):
        if dict(plan.axes) != dict(axes):
            raise ValueError(f"the plan is for axes {dict(plan.workers) | dict(plan.axes)}, not {dict(axes)}")
        return plan
    search = Search(recipe=plan, seed=seed, pins={OFFLOAD: "search", **pins})
    return solve(program, axes, _machine(), search=search, deterministic=True)


@functools.cache
def _machine() -> Cluster:
    """A cluster of processes with a link to host memory, so that random plans offload tensors."""
    cpu = Cluster.preset("cpu")
    return replace(cpu, device=replace(cpu.device, host_bandwidth=1e9))


def global_values(program: Program, model: nn.Module, batch: Batch, seed: int = 0) -> list[torch.Tensor]:
    """Global tensors for every placeholder."""
    tensors, _ = binding.flatten(model, batch)
    named: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **state_tensors(model)}
    generator = torch.Generator().manual_seed(seed)
    values = []
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        values.append(_value(spec, named, tensors, node.meta["val"], program, generator))
    return values


def _value(
    spec: Input,
    named: Mapping[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
    fake: Any,
    program: Program,
    generator: torch.Generator,
) -> torch.Tensor:
    if spec.kind == "tangent":
        # The gradient of a loss is 1, as backward() gives it. Of other results: random, so that no error cancels out.
        if program.loss is not None:
            return torch.ones(fake.shape, dtype=fake.dtype, device=fake.device)
        return torch.randn(fake.shape, dtype=torch.float64, generator=generator).to(fake.device, fake.dtype)
    if spec.kind == "buffer" and is_history(spec.name) and spec.name not in named:
        # Of a model that has not trained so yet. Not zeros: all scales would be one.
        return torch.ones(fake.shape, dtype=fake.dtype, device=fake.device)
    value = tensors[int(spec.name)] if spec.kind == "batch" else named[spec.name]
    if value.device.type == "meta":
        raise VerifyError(
            f"{spec.kind} {spec.name!r} is on the meta device: verification needs values; initialize it first"
        )
    return value.detach()
