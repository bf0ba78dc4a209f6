"""Before the first step: rank 0 compares the plan with the eager model, in its own process, where that fits."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autopar.costs.memory import format_bytes
from autopar.ir.graph import values_of
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.runtime.dtensor import Placements
from autopar.runtime.mesh import MeshContext
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

logger = logging.getLogger("autopar")

SHARE = 0.5
"""Of the memory that is free on rank 0's device: what a check may take."""

COPIES = 5
"""Of the parameters, besides those of the emulated devices: values, the eager model, gradients of both in two calls."""


@dataclass(frozen=True)
class Room:
    """What a check may be made on.

    Attributes:
        rows: of the batch; 0: it does not fit at all.
        needed: bytes, on these rows or, where it does not fit, on the fewest.
        free: bytes that it may take.
    """

    rows: int
    needed: float
    free: float


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

    Where memory does not suffice for the whole batch, fewer rows are taken, planned under the same parameter layouts;
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
    room = context.decide(lambda: room_for(found, context.device), "whether the plan can be checked")
    if not room.rows:
        text = "the plan is not checked: with all devices in one process that takes %s, and %s may be used on rank 0"
        _say(context, logging.WARNING, text, format_bytes(room.needed), format_bytes(room.free))
        return
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {} if context.mesh is None else gathered(named, types, context)
    _, rows = data_layout(found.program, found.plan)

    def check() -> str:
        with _plain(model, state):
            if room.rows == rows:
                return _compared(model, request.skeleton.fill(list(batch)), found.plan, options)
            return _on_fewer(model, found, request, batch, rows, room.rows, options, placements)

    if room.rows < rows:
        _say(context, logging.WARNING, "the plan is checked on %s rows of %s, for want of memory", room.rows, rows)
    _say(context, logging.INFO, "%s", context.decide(check, "the check of the plan, which rank 0 makes"))


def _say(context: MeshContext, level: int, text: str, *arguments: Any) -> None:
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
    context = replace(found.context, mesh=None, control=None)  # it is for rank 0 alone
    plan = plan_again(program, Request(request.skeleton, shapes, {}), replace(options, plan=None), context, placements)
    return _compared(model, smaller, plan, options)


def _compared(model: nn.Module, batch: Any, plan: Plan, options: CompileOptions) -> str:
    """What was compared, in words."""
    return require_equal(model, batch, plan, loss_fn=options.loss_fn, loss=options.loss, precision=options.precision)


@contextmanager
def _plain(model: nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Whole plain tensors in place of a model's parameters and buffers."""
    made: dict[int, Any] = {}
    restore: list[tuple[dict[str, Any], str, Any]] = []
    full = {id(t): state[n] for n, t in [*model.named_parameters(), *model.named_buffers()] if n in state}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None or id(old) not in full:
                    continue
                if id(old) not in made:
                    value, own = full[id(old)], isinstance(old, nn.Parameter)
                    made[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad) if own else value
                restore.append((table, name, old))
                table[name] = made[id(old)]
    try:
        yield
    finally:
        for table, name, old in restore:
            table[name] = old


def room_for(found: Specialization, device: torch.device) -> Room:
    """On how many rows of the batch a check fits into memory."""
    free = SHARE * free_bytes(device)
    _, rows = data_layout(found.program, found.plan)
    sizes = found.context.sizes
    steps = data_parts(data_layout(found.program, found.plan)[0], sizes) * found.plan.microbatches
    devices = 1
    for n in sizes:
        devices *= n
    own, local = held_bytes(found.program), held_bytes(found.step.program)
    parameters = sum(_bytes(n) for n, i in _inputs(found.program) if i in ("parameter", "buffer"))
    fixed = COPIES * parameters + devices * sum(_bytes(n) for n, i in _inputs(found.step.program) if i != "batch")
    moving = 2 * max(own - parameters, 0) + devices * local
    fitting = [r for r in _fewer(rows, steps) if fixed + moving * r / rows <= free]
    least = _fewer(rows, steps)[-1]
    return Room(fitting[0] if fitting else 0, fixed + moving * (fitting[0] if fitting else least) / rows, free)


def _fewer(rows: int, steps: int) -> list[int]:
    """Halves of a number of rows that all devices and microbatches still have a part of; the number itself first."""
    found = [rows]
    while found[-1] % 2 == 0 and (found[-1] // 2) % steps == 0:
        found.append(found[-1] // 2)
    return found


def _inputs(program: Program) -> list[tuple[fx.Node, str]]:
    return [(n, i.kind) for n, i in zip(program.placeholders, program.inputs, strict=True)]


def held_bytes(program: Program) -> float:
    """The most bytes that a graph holds at a time, run node by node in float64."""
    last = {a: n for n in program.graph.graph.nodes for a in n.all_input_nodes}
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        dead.setdefault(user, []).append(node)
    held = most = 0.0
    for node in program.graph.graph.nodes:
        held += _bytes(node)
        most = max(most, held)
        held -= sum(_bytes(n) for n in dead.get(node, ()))
    return most


def _bytes(node: fx.Node) -> float:
    if node.op not in ("placeholder", "call_function"):
        return 0.0
    return float(sum(v.numel() * (v.element_size() if _whole(v) else 8) for v in values_of(node) if v is not None))


def _whole(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def free_bytes(device: torch.device) -> float:
    """Memory that nobody uses, of a GPU or of this machine."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 2.0**32
