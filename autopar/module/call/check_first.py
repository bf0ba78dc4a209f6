"""Before the first step: rank 0 compares the plan with the eager model, in its own process, if memory allows."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from autopar._torch_compat import FakeTensor
from autopar.costs.memory import format_bytes
from autopar.ir.graph import values_of
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.module.call.batch_rows import gatherable
from autopar.runtime.dtensor import Placements, full_tensor
from autopar.runtime.mesh import MeshContext
from autopar.runtime.observer import VERIFY
from autopar.runtime.state.materialize import uninitialized
from autopar.runtime.state.parameters import ParameterLayouts, gathered
from autopar.specialize import (
    CompileOptions,
    Request,
    Specialization,
    captured_under,
    data_layout,
    data_parts,
    plan_again,
)
from autopar.verify.require_equal import require_equal

if TYPE_CHECKING:
    from autopar.module.session import Session

logger = logging.getLogger("autopar")

SHARE = 0.5
"""The share of the memory free on rank 0's device that a check may take."""

COPIES = 5
"""Copies of the parameters beside those of the emulated devices: values, the eager model, gradients of both, twice."""


def check_once(session: Session, found: Specialization, request: Request, tensors: Sequence[torch.Tensor]) -> None:
    """With ``check=True``, before the first step of a mode: the plan must compute what the model does."""
    model, options = session.original, session.options
    if not options.check:
        return
    grads = torch.is_grad_enabled(), request.differentiable
    mode = (tuple(m.training for m in model.modules()), grads, repr(request.skeleton))
    if mode in session.checked:
        return
    if uninitialized(model) or any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        return  # an example without values: the first call checks
    session.checked.add(mode)
    shapes = [shape for shape, _ in request.shapes]
    passed = [t if t.shape == shapes[i] else gatherable(session, t, request, i) for i, t in enumerate(tensors)]
    whole = [full_tensor(t).requires_grad_(i in request.differentiable) for i, t in enumerate(passed)]
    with options.observer.specializing(), options.observer.phase(VERIFY):
        check_first(model, found, request, whole, options, session.types(), session.placements())


def check_first(
    model: nn.Module,
    found: Specialization,
    request: Request,
    batch: Sequence[torch.Tensor],
    options: CompileOptions,
    types: ParameterLayouts,
    placements: Mapping[str, Placements],
) -> None:
    """Compare a specialization with the eager model; every rank calls it.

    Where memory does not suffice for the whole batch, fewer rows are checked, planned under the same parameter layouts;
    where the model itself does not fit, nothing is compared. The log says so.

    Args:
        model: with DTensor parameters, or plain ones where there is no mesh; they have values.
        found: its plan.
        request: the call.
        batch: whole tensors with values.
        options: what the user asked for.
        types: type and layout of each parameter.
        placements: of the parameters.

    Raises:
        VerifyError: they differ; on every rank.
    """
    context = found.context
    # Rank 0's memory decides, and all ranks must know before they gather the parameters.
    fitting, needed, free = context.decide(
        lambda: rows_that_fit(found, context.device), "whether the plan can be checked"
    )
    if not fitting:
        text = "the plan is not checked: with all devices in one process that takes %s, and %s may be used on rank 0"
        _log(context, logging.WARNING, text, format_bytes(needed), format_bytes(free))
        return
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {} if context.mesh is None else gathered(named, types, context)
    _, rows = data_layout(found.program, found.plan)

    def check() -> str:
        with _plain(model, state):
            if fitting == rows:
                return _compared(model, request.skeleton.fill(list(batch)), found.plan, options)
            return _on_fewer(model, found, request, batch, rows, fitting, options, placements)

    if fitting < rows:
        _log(context, logging.WARNING, "the plan is checked on %s rows of %s, for want of memory", fitting, rows)
    _log(context, logging.INFO, "%s", context.decide(check, "the check of the plan, which rank 0 makes"))


def _log(context: MeshContext, level: int, text: str, *arguments: Any) -> None:
    if context.rank == 0:
        logger.log(level, text, *arguments)


def _on_fewer(
    model: nn.Module,
    found: Specialization,
    request: Request,
    batch: Sequence[torch.Tensor],
    rows: int,
    fewer: int,
    options: CompileOptions,
    placements: Mapping[str, Placements],
) -> str:
    """The check on the first rows of a batch, of a plan for such a batch with the same parameter layouts."""
    cut = [t[:fewer] if t.ndim and t.shape[0] == rows else t for t in batch]
    shapes = tuple((tuple(t.shape), t.dtype) for t in cut)
    smaller = request.skeleton.fill(cut)
    program = captured_under(model, smaller, options)
    # Rank 0 plans alone, so without the mesh; and without the given plan, which is for the whole batch.
    context = replace(found.context, mesh=None, control=None)
    plan = plan_again(program, Request(request.skeleton, shapes, {}), replace(options, plan=None), context, placements)
    return _compared(model, smaller, plan, options)


def _compared(model: nn.Module, batch: Any, plan: Plan, options: CompileOptions) -> str:
    """What was compared, in words."""
    return require_equal(model, batch, plan, loss_fn=options.loss_fn, loss=options.loss, precision=options.precision)


@contextmanager
def _plain(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Whole plain tensors in place of a model's parameters and buffers."""
    replacement: dict[int, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in state:
            is_parameter = isinstance(tensor, nn.Parameter)
            value = state[name]
            replacement[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    restore: list[tuple[dict[str, Any], str, Any]] = []
    # By identity: named_parameters() has a tied parameter once, and every module that shares it must get the same.
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is not None and id(old) in replacement:
                    restore.append((table, name, old))
                    table[name] = replacement[id(old)]
    try:
        yield
    finally:
        for table, name, old in restore:
            table[name] = old


def rows_that_fit(found: Specialization, device: torch.device) -> tuple[int, float, float]:
    """On how many rows of the batch a check fits into memory.

    Returns:
        The rows, 0 if it does not fit at all; the bytes that it takes on these rows, or on the fewest; the bytes that
        it may take.
    """
    free = SHARE * free_bytes(device)
    layout, rows = data_layout(found.program, found.plan)
    sizes = found.context.sizes
    parts = data_parts(layout, sizes) * found.plan.microbatches
    devices = math.prod(sizes)
    # A rough model: parameters and the like take the same memory on any rows, activations take it in proportion.
    whole, local = peak_bytes(found.program), peak_bytes(found.step.program)
    parameters = sum(_bytes(n) for n, i in _inputs(found.program) if i in ("parameter", "buffer"))
    fixed = COPIES * parameters + devices * sum(_bytes(n) for n, i in _inputs(found.step.program) if i != "batch")
    per_batch = 2 * max(whole - parameters, 0) + devices * local
    sizes_to_try = _halves(rows, parts)
    fitting = [r for r in sizes_to_try if fixed + per_batch * r / rows <= free]
    used = fitting[0] if fitting else sizes_to_try[-1]
    return fitting[0] if fitting else 0, fixed + per_batch * used / rows, free


def _halves(rows: int, parts: int) -> list[int]:
    """A number of rows, its half, and so on, while all devices and microbatches have an equal part."""
    found = [rows]
    while found[-1] % 2 == 0 and (found[-1] // 2) % parts == 0:
        found.append(found[-1] // 2)
    return found


def _inputs(program: Program) -> list[tuple[fx.Node, str]]:
    return [(n, i.kind) for n, i in zip(program.placeholders, program.inputs, strict=True)]


def peak_bytes(program: Program) -> float:
    """The most bytes that are live at a time when a graph runs node by node in float64."""
    # Not autopar.memory's liveness, which counts in the dtypes of the graph and what an optimizer holds.
    last_use = {a: n for n in program.graph.graph.nodes for a in n.all_input_nodes}
    dead_after: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last_use.items():
        dead_after.setdefault(user, []).append(node)
    live = peak = 0.0
    for node in program.graph.graph.nodes:
        live += _bytes(node)
        peak = max(peak, live)
        live -= sum(_bytes(n) for n in dead_after.get(node, ()))
    return peak


def _bytes(node: fx.Node) -> float:
    """Bytes of a node's values, floating ones in float64."""
    if node.op not in ("placeholder", "call_function"):
        return 0.0
    return float(
        sum(v.numel() * (8 if _is_floating(v) else v.element_size()) for v in values_of(node) if v is not None)
    )


def _is_floating(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def free_bytes(device: torch.device) -> float:
    """Unused memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        # MemAvailable and not MemFree: what the page cache holds can be had.
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 2.0**32  # no Linux: as if 4 GiB were free
