"""`compare`: outputs of a rewritten program on an emulated mesh against the right values, as an `EquivalenceReport`."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autopar.compiler import rewrite
from autopar.ir.ops.random import same_numbers
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.ir.shards import is_zero_outside, without_padding
from autopar.passes import Pass, with_rounded_numbers
from autopar.verify.eager import Key
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
    with_assigned,
)


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
        errors: of every tensor by name; replicas that differ count. Also of what differs in the second call, and of
            attributes that the model writes.
        capture_error: largest difference between the captured graph and the eager model; NaN where they were not
            compared.
        plan: the plan that was run. What it sends in few bits (`Plan.quantized`) was sent whole, and a second time in
            few bits: errors of that, against the recurrence of training so, are named so.
        lost: of a plan with messages in few bits: how far each gradient of a step is from that of whole numbers.
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
    lost: Mapping[str, float] = field(default_factory=dict)
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
        graph: as captured, if that is known, to locate errors of the capture.
        live: a copy of the model whose attributes the program writes; needed where the reference has attributes.
        draw: gives tensors random strides, see `autopar.verify.emulate.emulate`.
    """
    given = in_one_dtype(program, values, dtype)
    if reference is None:
        reference = Reference(tuple(captured_calls(program, given, dtype, 1)[0]), "canonical graph")
    step = EmulatedStep(program, local, plan, list(given.values()), dtype, draw)
    errors: dict[str, float] = {}
    wrong: dict[Key, float] = {}
    first: dict[Key, torch.Tensor] = {}
    for number, expected in enumerate(reference.calls):
        # Without state that a call leaves for the next, the second would be the first again.
        if number == 0 or carries(program):
            found, replicas = _outputs(step)
            first = first or found
        suffix = " of the second call" if number else ""
        outputs = with_assigned(program, found, expected.values)
        for key, error in errors_of(outputs, expected.values, given, replicas).items():
            # Of the second call what is wrong alone: the report has one row a tensor.
            if not number or error > tolerance_of(dtype):
                errors[_label(key) + suffix] = error
                wrong.update({key: error} if error > tolerance_of(dtype) else {})
        written = live.call(found)[0] if live is not None else {}
        for name, value in expected.written.items():
            errors[f"attribute {name}{suffix}"] = distance(written.get(name), value)
        given = carried(given, found, program)
        step = replace(step, values=list(given.values()))
    report = _report(program, local, plan, first, reference, errors)
    # Located when it is asked for: that runs both graphs once more, node by node, from the values of the first call.
    start = replace(step, values=list(in_one_dtype(program, values, dtype).values()))
    return replace(report, locate=functools.partial(_locate, start, graph, reference, wrong, errors))


def with_few_bits(
    report: EquivalenceReport,
    program: Program,
    plan: Plan,
    values: Sequence[torch.Tensor],
    passes: tuple[Pass, ...],
    dtype: torch.dtype,
) -> EquivalenceReport:
    """A report with the errors of a step in few bits against its recurrence, and how far that is from an exact step.

    With whole numbers as messages the program has been compared with the plain model. With messages of numbers that are
    rounded from the definition (`autopar.ir.quantized.rounded`) it is the recurrence; the graph that trains sends bits.

    Args:
        report: of the same with whole numbers.
        program: canonical.
        plan: which sends some messages in few bits.
        values: global tensors for every placeholder.
        passes: of the rewriting, as training has them.
        dtype: in which everything else is computed.
    """
    given = in_one_dtype(program, values, dtype)

    def run(passes: tuple[Pass, ...]) -> tuple[dict[Key, torch.Tensor], dict[Key, float]]:
        local = rewrite(program, plan, passes=passes)
        return _outputs(EmulatedStep(program, local, plan, list(given.values()), dtype))

    (sent, replicas), (recurrence, _) = run(passes), run(with_rounded_numbers(passes))
    found = errors_of(sent, recurrence, given, replicas)
    wrong = {key: error for key, error in found.items() if not error <= tolerance_of(dtype)}
    exact: dict[Key, torch.Tensor] = {("gradient", name): g for name, g in report.gradients.items()}
    lost = errors_of({key: value for key, value in sent.items() if key in exact}, exact, given)

    def locate() -> FirstDifference | None:
        first = report.first_difference
        return first if first is not None or not wrong else at_output(REWRITING, program, wrong)

    errors = {**report.errors, **{f"{_label(key)} in few bits": error for key, error in found.items()}}
    return replace(report, errors=errors, lost={name: error for (_, name), error in lost.items()}, locate=locate)


def _label(key: Key) -> str:
    kind, name = key
    return name if kind == "gradient" else f"{kind} {name}"


def _outputs(step: EmulatedStep) -> tuple[dict[Key, torch.Tensor], dict[Key, float]]:
    """The outputs of a step on the mesh: whole tensors without padding, and how far their replicas differ."""
    shapes = {
        (o.kind, o.name): v.meta["val"].shape
        for o, v in zip(step.program.outputs, step.program.output_values, strict=True)
        if v is not None
    }
    with same_numbers(0):
        outputs = step.run()
    found, replicas = {}, {}
    for spec, output in zip(step.local.outputs, outputs, strict=True):
        key = (spec.kind, spec.name)
        if output is None or key not in shapes:
            continue
        whole, replicas[key] = output
        found[key] = without_padding(whole, shapes[key])
        # Padding that has a gradient counts in its norm: clipping would scale all gradients otherwise.
        if spec.kind == "gradient" and not is_zero_outside(whole, shapes[key]):
            replicas[key] = math.inf
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
    """The first difference, in the order in which the compiler transforms the program."""
    # A wrong capture makes all that follows wrong, against eager mode: it is the cause.
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
    # All nodes are right where all devices run the whole graph: the cut into stages or microbatches is wrong.
    stage = PIPELINE if step.plan.pipeline is not None else MICROBATCHES if step.plan.microbatches > 1 else REWRITING
    return at_output(stage, step.program, wrong)
