"""`verify`: the rewritten graphs of every rank, in one process and in float64, against the plain model."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from autopar import tree
from autopar.accumulate import Totals
from autopar.blocks import assemble, block, coordinates, is_zero_outside, without_padding
from autopar.capture import Batch, Harness, LossFunction
from autopar.cluster import Cluster
from autopar.compiler import DETERMINISTIC_PASSES, program_of, rewrite, solve
from autopar.draw import same_numbers
from autopar.emulate import emulate, run_whole
from autopar.emulate_pipeline import emulate_pipeline
from autopar.errors import VerifyError
from autopar.float64 import as_dtype
from autopar.passes.insert_contiguous import insert_contiguous, insert_contiguous_everywhere
from autopar.plan import Plan
from autopar.precision import Precision
from autopar.program import Input, Program
from autopar.rows import common_blocks, join, take
from autopar.search.options import MICROBATCHES, OFFLOAD, Search

SMALLEST = 1e-6
"""A tensor's error is relative to its own largest entry, or to this share of the model's largest gradient entry."""


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
        errors: of every tensor by name; replicas that differ count.
        capture_error: largest difference between the captured graph and the eager model, both in the model's own
            precision; NaN where they were not compared.
        plan: the plan that was run.
        program: the rewritten program.
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

    @property
    def max_error(self) -> float:
        """The largest error of any tensor."""
        return max(self.errors.values(), default=0.0)

    @property
    def worst(self) -> str:
        """The tensor with the largest error."""
        return max(self.errors, key=lambda n: self.errors[n], default="")


def verify(
    model: nn.Module,
    batch: Batch,
    axes: Mapping[str, int],
    *,
    loss_fn: LossFunction | None = None,
    plan: Plan | str | None = None,
    seed: int = 0,
    microbatches: int = 1,
    pins: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    precision: Precision | str | torch.dtype | None = None,
    random_strides: bool = False,
) -> EquivalenceReport:
    """Compare a plan's program with the plain model, on an emulated mesh.

    Args:
        model: with real parameters; it is not changed.
        batch: tuple or dict of real tensors, the global batch.
        axes: name and size of each mesh axis.
        loss_fn: for a model that does not return its loss.
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
    program = program_of(model, batch, loss_fn=loss_fn, precision=policy)
    plan = _plan(program, axes, plan, seed, pins or {MICROBATCHES: microbatches})
    passes = DETERMINISTIC_PASSES
    if random_strides:
        passes = tuple(insert_contiguous_everywhere if p is insert_contiguous else p for p in passes)
    local = rewrite(program, plan, passes=passes)
    values = global_values(program, model, batch, seed)
    draw = random.Random(seed) if random_strides else None
    report = compare(program, local, plan, values, dtype, draw)
    return replace(report, capture_error=capture_error(program, model, batch, loss_fn, values, policy))


def capture_error(
    program: Program,
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction | None,
    values: Sequence[torch.Tensor],
    policy: Precision | None = None,
) -> float:
    """Largest difference between the captured graph and the eager model, both in the precision of the policy.

    Raises:
        VerifyError: it is more than rounding.
    """
    tensors, skeleton = tree.flatten(batch, "batch")
    harness = Harness(model, skeleton, loss_fn, program.training)
    state = {f"model.{n}": p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    state.update({f"model.{n}": b.detach().clone() for n, b in model.named_buffers()})
    parameters = {f"model.{n}" for n, _ in model.named_parameters()}
    with torch.set_grad_enabled(program.training), same_numbers(0):
        seen = {n: _computed(t, policy) if n in parameters else t for n, t in state.items()}
        results = torch.func.functional_call(harness, seen, tuple(_computed(t, policy) for t in tensors))
    found = {("result", str(i)): r.detach() for i, r in enumerate(results)}
    tangents = [v for v, i in zip(values, program.inputs, strict=True) if i.kind == "tangent"]
    live = [r for r in results if r.requires_grad]
    if program.training:
        torch.autograd.backward(live, tangents)
        found.update({("gradient", n.removeprefix("model.")): t.grad for n, t in state.items() if t.grad is not None})
    with same_numbers(0):
        expected = run_whole(program, values)
    pairs = [(found.get((o.kind, o.name)), e) for o, e in zip(program.outputs, expected, strict=True)]
    scale = max((float(e.abs().max()) for (k, _), e in found.items() if k == "gradient"), default=0.0)
    error = max((tensor_error(f, e, 1e3 * scale) for f, e in pairs if f is not None and e is not None), default=0.0)
    precise = all(t.dtype in (torch.float32, torch.float64) for t in seen.values() if t.is_floating_point())
    if not error <= (1e-2 if precise else 0.3):
        raise VerifyError(
            f"the captured graph differs from the eager model by {error:.2g}: the capture is wrong; report it"
        )
    return error


def _computed(tensor: torch.Tensor, policy: Precision | None) -> torch.Tensor:
    """A parameter or batch tensor as the model sees it under a policy."""
    return tensor if policy is None or not tensor.is_floating_point() else tensor.to(policy.compute)


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
    draw: random.Random | None = None,
) -> EquivalenceReport:
    """Run a program whole and its rewritten form on an emulated mesh, and compare every output; ``draw``: see there."""
    values = [v.to(dtype) if v.is_floating_point() else v for v in values]
    with same_numbers(0):
        expected = run_whole(as_dtype(program, dtype), values)
    with same_numbers(0):
        outputs = _run(program, local, plan, values, dtype, draw)
    found: dict[tuple[str, str], torch.Tensor] = {}
    wanted: dict[tuple[str, str], torch.Tensor] = {}
    replicas: dict[tuple[str, str], float] = {}
    for spec, full, made in zip(local.outputs, expected, outputs, strict=True):
        if made is None or full is None:
            continue
        key = (spec.kind, spec.name)
        whole, replicas[key] = made
        wanted[key], found[key] = full, without_padding(whole, full.shape)
        if spec.kind == "gradient" and not is_zero_outside(whole, full.shape):
            replicas[key] = math.inf  # the optimizer would change what is not there
    return _report(program, local, plan, found, wanted, replicas)


def _run(
    program: Program,
    local: Program,
    plan: Plan,
    values: Sequence[torch.Tensor],
    dtype: torch.dtype,
    draw: random.Random | None,
) -> list[tuple[torch.Tensor, float] | None]:
    """Every output of a rewritten program on an emulated mesh, whole, with how far its replicas differ."""
    inner = plan.inner
    placed, sizes = as_dtype(local, dtype), inner.axis_sizes
    part = local.part
    given = {(i.kind, i.name): v for i, v in zip(program.inputs, values, strict=True)}
    if part.before is not None:
        more = run_whole(as_dtype(part.before, dtype), [given[i.kind, i.name] for i in part.before.inputs])
        first = sum(kind == "batch" for kind, _ in given)
        given.update({("batch", str(first + i)): v for i, v in enumerate(more) if v is not None})
    cut = [(dim, inner.batch[name]) for name, dim in part.rows.items()]
    blocks = common_blocks(cut + [(dim, inner.results[name]) for name, dim in part.results.items()], sizes)
    totals, last = Totals(), local.output_node.meta
    shared: dict[fx.Node, list[Any]] = {}
    types = list(zip(last["input_types"], last["input_layouts"], strict=True))

    @functools.cache
    def inputs_of(turn: int) -> list[list[torch.Tensor]]:
        inputs = []
        for node, spec in zip(local.placeholders, local.inputs, strict=True):
            value, dim = given[spec.kind, spec.name], part.rows.get(spec.name) if spec.kind == "batch" else None
            mine = value if dim is None else take(value, dim, blocks, part.count, turn)
            type_, layout = node.meta["types"][0], node.meta["layouts"][0]
            inputs.append([block(mine, type_, layout, sizes, where) for where in coordinates(sizes)])
        return inputs

    def whole_of(outputs: Sequence[Sequence[torch.Tensor | None]]) -> list[tuple[torch.Tensor, float] | None]:
        return [
            None
            if type_ is None or not (there := [p for p in parts if p is not None])
            else assemble(there, type_, layout, sizes)
            for parts, (type_, layout) in zip(outputs, types, strict=True)
        ]

    made: list[list[tuple[torch.Tensor, float] | None]] = []
    if plan.pipeline is not None:
        made = [whole_of(outputs) for outputs in emulate_pipeline(placed, plan, inputs_of, draw)]
    for turn in range(part.count if plan.pipeline is None else 0):
        with totals.microbatch():
            made.append(whole_of(emulate(placed, inner.axis_names, sizes, inputs_of(turn), shared, draw)))
    for i, output in enumerate(local.outputs):
        found = [m for turns in made if (m := turns[i]) is not None]
        if output.kind == "result" and output.name in part.results:
            joined = join([whole for whole, _ in found], part.results[output.name], blocks)
            made[-1][i] = joined, max(replicas for _, replicas in found)
    return made[-1]


def _report(
    program: Program,
    local: Program,
    plan: Plan,
    found: Mapping[tuple[str, str], torch.Tensor],
    wanted: Mapping[tuple[str, str], torch.Tensor],
    replicas: Mapping[tuple[str, str], float],
) -> EquivalenceReport:
    scale = max(
        (float(g.abs().max()) for (kind, _), g in wanted.items() if kind == "gradient" and g.numel()), default=0.0
    )
    errors = {}
    for (kind, name), expected in wanted.items():
        label = name if kind == "gradient" else f"{kind} {name}"
        errors[label] = tensor_error(found[kind, name], expected, scale, replicas[kind, name])

    def pick(source: Mapping[tuple[str, str], torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
        return {name: value for (k, name), value in source.items() if k == kind}

    loss = None if program.loss is None else ("result", str(program.loss))
    return EquivalenceReport(
        loss=found[loss] if loss else None,
        reference_loss=wanted[loss] if loss else None,
        gradients=pick(found, "gradient"),
        reference_gradients=pick(wanted, "gradient"),
        results=pick(found, "result"),
        reference_results=pick(wanted, "result"),
        errors=errors,
        capture_error=math.nan,
        plan=plan,
        program=local,
    )


def tensor_error(found: torch.Tensor, expected: torch.Tensor, scale: float, replicas: float = 0.0) -> float:
    """Largest difference over the tensor's largest entry, or over a share of the largest gradient entry."""
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) and replicas == 0.0 else float("inf")
    if bool(torch.isfinite(found).all()) != bool(torch.isfinite(expected).all()):
        return float("inf")
    largest = max(float(expected.abs().max()), SMALLEST * scale, 1e-300)
    return max(float((found - expected).abs().max()), replicas) / largest


def global_values(program: Program, model: nn.Module, batch: Batch, seed: int = 0) -> list[torch.Tensor]:
    """Global tensors for every placeholder."""
    tensors, _ = tree.flatten(batch, "batch")
    named: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
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
            return torch.ones(fake.shape, dtype=fake.dtype)
        return torch.randn(fake.shape, dtype=torch.float64, generator=generator).to(fake.dtype)
    value = tensors[int(spec.name)] if spec.kind == "batch" else named[spec.name]
    if value.device.type == "meta":
        raise VerifyError(
            f"{spec.kind} {spec.name!r} is on the meta device: verification needs values; initialise it first"
        )
    return value.detach()
