"""`verify`: the rewritten graphs of every rank, in one process and in float64, against the plain model."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from autopar.capture import Batch, LossFunction
from autopar.capture.state.record import Record
from autopar.capture.state.slots import state_tensors
from autopar.compiler import captured, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.errors import VerifyError
from autopar.ir.ops.random import same_numbers
from autopar.ir.plan import Plan
from autopar.ir.precision import Precision
from autopar.ir.program import STATELESS, Input, Program, State
from autopar.ir.shards import is_zero_outside, without_padding
from autopar.ir.signature import binding
from autopar.ir.signature.outputs import Loss
from autopar.ir.structure import same_graph
from autopar.passes import DETERMINISTIC_PASSES
from autopar.passes.canonicalize import canonical
from autopar.passes.insert_contiguous import insert_contiguous, insert_contiguous_everywhere
from autopar.search.options import MICROBATCHES as COUNT
from autopar.search.options import OFFLOAD, Search
from autopar.verify.eager import CALLS, Key, copied
from autopar.verify.emulate_step import EmulatedStep
from autopar.verify.first_difference import (
    CAPTURE,
    MICROBATCHES,
    PIPELINE,
    REWRITING,
    FirstDifference,
    at_attribute,
    at_output,
    first_in_canonical_form,
    first_in_rewriting,
    tolerance_of,
)
from autopar.verify.live_copy import LiveCopy
from autopar.verify.python_state import distance
from autopar.verify.reference import (
    EAGER,
    Reference,
    Values,
    captured_calls,
    carried,
    carries,
    errors_of,
    in_one_dtype,
    reference_of,
    tensor_error,
    with_assigned,
)

__all__ = ["EquivalenceReport", "capture_error", "compare", "global_values", "tensor_error", "verify"]


@dataclass(frozen=True)
class EquivalenceReport:
    """How far the distributed program is from the plain model.

    Attributes:
        loss: of the distributed program; None without one.
        reference_loss: of the plain model.
        gradients: full gradients by parameter name.
        reference_gradients: the same from the plain model.
        results: full outputs by position.
        reference_results: the same from the plain model.
        errors: of every tensor by name; replicas that differ count. What differs in the second call is there, too, and
            attributes that the model writes.
        capture_error: largest difference between the captured graph and the eager model; NaN where they were not
            compared.
        plan: the plan that was run.
        program: the rewritten program.
        reference: ``eager``, or ``captured graph`` where the plain model cannot be called in the dtype, or draws other
            random numbers.
        note: why the reference is not eager.
    """

    loss: torch.Tensor | None
    reference_loss: torch.Tensor | None
    gradients: Mapping[str, torch.Tensor]
    reference_gradients: Mapping[str, torch.Tensor]
    results: Mapping[str, torch.Tensor]
    reference_results: Mapping[str, torch.Tensor]
    errors: Mapping[str, float]
    capture_error: float
    plan: Plan
    program: Program = field(repr=False)
    reference: str = EAGER
    note: str = ""
    locate: Callable[[], FirstDifference | None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def max_error(self) -> float:
        """The largest error of any tensor."""
        return max(self.errors.values(), default=0.0)

    @property
    def worst(self) -> str:
        """The tensor with the largest error."""
        return max(self.errors, key=lambda n: self.errors[n], default="")

    @functools.cached_property
    def first_difference(self) -> FirstDifference | None:
        """The first node whose value differs, with module, line and layouts; None if all is equal up to rounding.

        Both graphs are run once more for it.
        """
        return self.locate()


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

    Args:
        model: with real parameters; it is not changed.
        batch: tuple or dict of real tensors, the global batch.
        axes: name and size of each mesh axis.
        loss_fn: for a model that does not return its loss.
        loss: which scalar of the output is the loss, as for `autopar.parallelize`.
        plan: what to run; None searches for one, ``"random"`` draws a feasible one.
        microbatches: of the plan that is searched or drawn.
        pins: of the same, see `Search`; they come before ``microbatches``.
        seed: of the random plan and of the tangents of outputs that are no loss.
        dtype: in which everything is computed.
        precision: policy whose casts the program has; they too become ``dtype``.
        random_strides: give every tensor random strides: what is computed may not depend on how tensors lie in memory.

    Raises:
        VerifyError: a parameter or batch tensor holds no data.
    """
    policy = Precision.resolve(precision)
    graph = captured(model, batch, loss_fn=loss_fn, loss=loss, precision=policy)
    program = canonical(graph)
    values = global_values(program, model, batch, seed)
    plan = _plan(program, axes, plan, seed, pins or {COUNT: microbatches})
    passes = DETERMINISTIC_PASSES
    if random_strides:
        passes = tuple(insert_contiguous_everywhere if p is insert_contiguous else p for p in passes)
    local = rewrite(program, plan, passes=passes)
    given = in_one_dtype(program, values, dtype)
    capture = functools.partial(captured, batch=batch, loss_fn=loss_fn, loss=loss, precision=policy)
    before = Record(model)
    calls, later = _second_call(graph, model, given, dtype, capture)
    before.restore()  # calls change globals, of which there are no copies
    # A graph as captured draws in the order of strides that tensors happen to have; in canonical form as eager does.
    raw = program if any(_is_random(n) for n in graph.graph.graph.nodes) else graph
    reference = reference_of(model, batch, raw, given, dtype, loss_fn, policy, loss, calls)
    live = LiveCopy(model, dtype, program, later)
    draw = random.Random(seed) if random_strides else None
    try:
        return compare(program, local, plan, values, dtype, reference=reference, graph=graph, live=live, draw=draw)
    finally:
        before.restore()


def _second_call(
    graph: Program,
    model: nn.Module,
    given: Mapping[Key, torch.Tensor],
    dtype: torch.dtype,
    capture: Callable[..., Program],
) -> tuple[int, State | None]:
    """How many calls the first graph serves, and the state of the second call, where that is captured anew.

    What a call writes to the model's attributes may give the next one a graph of its own; comparing the second call of
    the eager model with the first graph would then report a difference that `autopar.parallelize` does not have.
    """
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
            raise ValueError(f"the plan is for axes {dict(plan.axes)}, not {dict(axes)}")
        return plan
    if plan not in (None, "random"):
        raise ValueError(f'plan must be a Plan, None or "random", got {plan!r}')
    search = Search(recipe=plan, seed=seed, pins={OFFLOAD: "search", **pins})
    return solve(program, axes, _machine(), search=search, deterministic=True)


@functools.cache
def _machine() -> Cluster:
    """Processes that have a way to a host, so that random plans have tensors there."""
    cpu = Cluster.preset("cpu")
    return replace(cpu, device=replace(cpu.device, host_bandwidth=1e9))


def compare(
    program: Program,
    local: Program,
    plan: Plan,
    values: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    reference: Reference | None = None,
    graph: Program | None = None,
    live: LiveCopy | None = None,
    draw: random.Random | None = None,
) -> EquivalenceReport:
    """Run a rewritten program on an emulated mesh, and compare every output.

    Args:
        program: canonical.
        local: rewritten.
        plan: for which it was.
        values: global tensors for every placeholder.
        dtype: in which everything is computed.
        reference: the right values; default: those of one call of ``program`` on one device.
        graph: as captured, if that is known, for what differs from the reference already.
        draw: gives tensors random strides, see `autopar.verify.emulate.emulate`.
        live: what the program does to the model's attributes is done to; needed where the reference has some.
    """
    given = in_one_dtype(program, values, dtype)
    if reference is None:
        reference = Reference(tuple(captured_calls(program, given, dtype, 1)[0]), "canonical graph")
    step = EmulatedStep(program, local, plan, list(given.values()), dtype, draw)
    errors: dict[str, float] = {}
    wrong: dict[Key, float] = {}
    first: dict[Key, torch.Tensor] = {}
    for number, expected in enumerate(reference.calls):
        if number == 0 or carries(program):
            found, replicas = _found(step)
            first = first or found
        suffix = " of the second call" if number else ""
        made = with_assigned(program, found, expected.values)
        for key, error in errors_of(made, expected.values, given, replicas).items():
            if not number or error > tolerance_of(dtype):
                errors[_label(key) + suffix] = error
                wrong.update({key: error} if error > tolerance_of(dtype) else {})
        written = live.call(found)[0] if live is not None else {}
        for name, value in expected.written.items():
            errors[f"attribute {name}{suffix}"] = distance(written.get(name), value)
        given = carried(given, found, program)
        step = replace(step, values=list(given.values()))
    report = _report(program, local, plan, first, reference, errors)
    start = replace(step, values=list(in_one_dtype(program, values, dtype).values()))
    return replace(report, locate=functools.partial(_locate, start, graph, reference, wrong, errors))


def _label(key: Key) -> str:
    kind, name = key
    return name if kind == "gradient" else f"{kind} {name}"


def _found(step: EmulatedStep) -> tuple[dict[Key, torch.Tensor], dict[Key, float]]:
    """What a step on the mesh makes: whole tensors without padding, and how far their replicas differ."""
    shapes = {
        (o.kind, o.name): v.meta["val"].shape
        for o, v in zip(step.program.outputs, step.program.output_values, strict=True)
        if v is not None
    }
    with same_numbers(0):
        outputs = step.run()
    found, replicas = {}, {}
    for spec, made in zip(step.local.outputs, outputs, strict=True):
        key = (spec.kind, spec.name)
        if made is None or key not in shapes:
            continue
        whole, replicas[key] = made
        found[key] = without_padding(whole, shapes[key])
        if spec.kind == "gradient" and not is_zero_outside(whole, shapes[key]):
            replicas[key] = math.inf  # the optimizer would change what is not there
    return found, replicas


def _report(
    program: Program, local: Program, plan: Plan, found: Values, reference: Reference, errors: Mapping[str, float]
) -> EquivalenceReport:
    wanted = reference.calls[0].values

    def pick(source: Values, kind: str) -> dict[str, torch.Tensor]:
        return {name: value for (k, name), value in source.items() if k == kind}

    loss = None if program.loss is None else ("result", str(program.loss))
    return EquivalenceReport(
        loss=found.get(loss) if loss else None,
        reference_loss=wanted.get(loss) if loss else None,
        gradients=pick(found, "gradient"),
        reference_gradients=pick(wanted, "gradient"),
        results=pick(found, "result"),
        reference_results=pick(wanted, "result"),
        errors=errors,
        capture_error=reference.capture_error,
        plan=plan,
        program=local,
        reference=reference.kind,
        note=reference.note,
    )


def _locate(
    step: EmulatedStep,
    graph: Program | None,
    reference: Reference,
    wrong: Mapping[Key, float],
    errors: Mapping[str, float],
) -> FirstDifference | None:
    """The first difference, in the order of the compiler's stages."""
    if reference.capture_errors and graph is not None:
        return at_output(CAPTURE, graph, reference.capture_errors)
    if not wrong:
        lost = [(n, e) for n, e in errors.items() if n.startswith("attribute ") and e > tolerance_of(step.dtype)]
        return at_attribute(lost[0][0].removeprefix("attribute "), lost[0][1]) if lost else None
    given = in_one_dtype(step.program, step.values, step.dtype)
    found = first_in_canonical_form(graph, step.program, given, step.dtype) if graph is not None else None
    found = found or first_in_rewriting(step)
    if found is not None:
        return found
    stage = PIPELINE if step.plan.pipeline is not None else MICROBATCHES if step.plan.microbatches > 1 else REWRITING
    return at_output(stage, step.program, wrong)


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
        if program.loss is not None:
            return torch.ones(fake.shape, dtype=fake.dtype, device=fake.device)
        return torch.randn(fake.shape, dtype=torch.float64, generator=generator).to(fake.device, fake.dtype)
    value = tensors[int(spec.name)] if spec.kind == "batch" else named[spec.name]
    if value.device.type == "meta":
        raise VerifyError(
            f"{spec.kind} {spec.name!r} is on the meta device: verification needs values; initialize it first"
        )
    return value.detach()
