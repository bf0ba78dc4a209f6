"""Which rows of the batch a rank passes, and what a call asks of the compiler for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import CaptureError
from autopar.ir.layout import Layout, Replicate, Split, replicated
from autopar.ir.signature import binding
from autopar.module.call.worker_batch import own_part, split_among
from autopar.runtime.dtensor import from_local, plain_type, to_local, to_placements
from autopar.runtime.step.input_gradients import requiring_gradients
from autopar.runtime.step.microbatch_step import MicrobatchStep
from autopar.specialize import Request, data_layout, data_parts

if TYPE_CHECKING:
    from autopar.module.session import Session
    from autopar.specialize import Specialization


def request_of_call(
    session: Session, tensors: list[torch.Tensor], skeleton: Any, among_workers: tuple[int, ...]
) -> Request:
    """The call with these tensors, some of which may be this rank's rows.

    Args:
        session: the model's.
        tensors: of the call.
        skeleton: what else the call has.
        among_workers: numbers of the tensors that are split among workers that train apart.
    """
    shapes, rows = [], {}
    for i, t in enumerate(tensors):
        shape = tuple(t.shape)
        if not is_whole(session, t):
            # Each rank passes its rows: the graph is captured on the global shape.
            split = bool(shape) and _is_split(session, i, len(tensors))
            shape = (shape[0] * data_world_size(session), *shape[1:]) if split else shape
            rows[i] = rows_layout(session) if split else replicated(len(session.context.axes))
        shapes.append((shape, t.dtype))
    layouts = {i: tuple(t.placements) for i, t in enumerate(tensors) if isinstance(t, DTensor)}
    return Request(skeleton, tuple(shapes), layouts, rows, requiring_gradients(tensors), among_workers)


def request_of_example(session: Session, batch: Any) -> Request:
    """The call with a global batch; of workers that train apart, with this one's part of it."""
    whole, skeleton = binding.flatten(session.original, batch)
    tensors = own_part(whole, session.context, "global")  # an example is always of the global batch
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
    split = split_among(whole, session.context, session.options.inputs)
    return Request(skeleton, shapes, {}, differentiable=requiring_gradients(tensors), split=split)


def as_it_will_be_passed(session: Session, request: Request) -> Request:
    """The request of whole tensors, with the rows that each rank will pass once layouts of the batch are decided."""
    if session.options.inputs != "local" or session.first is None:
        return request
    whole, count = replicated(len(session.context.axes)), len(request.shapes)
    split = [bool(shape) and _is_split(session, i, count) for i, (shape, _) in enumerate(request.shapes)]
    rows = {i: rows_layout(session) if is_split else whole for i, is_split in enumerate(split)}
    return replace(request, rows=rows)


def is_whole(session: Session, tensor: torch.Tensor) -> bool:
    """Whether a batch tensor stands for all rows, and not for this rank's."""
    return session.options.inputs == "global" or isinstance(tensor, DTensor)


def gatherable(session: Session, tensor: torch.Tensor, request: Request, index: int) -> torch.Tensor:
    """A batch tensor as a whole one, or as a DTensor around this rank's rows."""
    if is_whole(session, tensor):
        return tensor
    shape, dtype = request.shapes[index]
    placements = to_placements(plain_type(shape, dtype), request.rows[index])
    return from_local(tensor.to(session.context.device), session.context, shape, placements)


def part_of_rank(
    session: Session, found: Specialization, request: Request, tensors: list[torch.Tensor], buffers: dict[str, Any]
) -> list[torch.Tensor]:
    """The batch as this rank's graphs take it.

    Args:
        session: the model's.
        found: the graphs of the call.
        request: the call.
        tensors: of the call.
        buffers: by name; what runs once for all microbatches may write to them.

    Raises:
        CaptureError: a tensor has strides that the model reads, and the graph does not have.
    """
    _require_contiguous(found, tensors)
    step, device = found.step, session.context.device
    batch = [
        step.part_of_batch(str(i), t) if is_whole(session, t) else to_local(t).contiguous().to(device)
        for i, t in enumerate(tensors)
        if str(i) in step.types.batch
    ]
    if isinstance(step, MicrobatchStep):
        whole = [gatherable(session, t, request, i) for i, t in enumerate(tensors)]
        batch += step.run_on_whole_batch(whole, buffers)
    return batch


def data_world_size(session: Session) -> int:
    """Into how many parts the rows of a batch are split: ``num_replicas`` of a sampler."""
    return data_parts(rows_layout(session), session.context.sizes)


def data_rank(session: Session) -> int:
    """Which part this rank takes: ``rank`` of a sampler."""
    context, index = session.context, 0
    # Coordinates on the axes that split rows, as digits: the outer axis first. On others ranks take the same rows.
    for placement, n, coordinate in zip(rows_layout(session), context.sizes, context.coordinates, strict=True):
        index = index * n + coordinate if placement == Split(0, 0) else index
    return index


def rows_layout(session: Session) -> Layout:
    """How the rows of the batch are split over the mesh."""
    if session.first is not None:
        return data_layout(session.first.program, session.first.plan)[0]
    plan = session.options.plan or session.known(None).plan
    # Before there is a program: some tensors, such as masks of one row, are whole on every rank.
    layouts = [tuple(p if p == Split(0, 0) else Replicate() for p in v) for v in plan.batch.values()]
    sizes = session.context.sizes
    return max(layouts, key=lambda v: data_parts(v, sizes), default=replicated(len(sizes)))


def _is_split(session: Session, index: int, count: int) -> bool:
    """Whether ranks pass different rows of this batch tensor; position ids of one row, for example, are alike."""
    layouts = session.plan.batch
    if len(layouts) != count or str(index) not in layouts:
        return True
    return any(p == Split(0, 0) for p in layouts[str(index)])


def _require_contiguous(found: Specialization, tensors: list[torch.Tensor]) -> None:
    """Refuse other batches where the model reads strides: graphs are traced with contiguous ones.

    Raises:
        CaptureError: a tensor is not contiguous.
    """
    line = found.program.state.stride_read
    for i, tensor in enumerate(tensors) if line else ():
        if not tensor.is_contiguous():
            raise CaptureError(
                f"the model reads strides at {line}, and batch tensor {i} (shape {list(tensor.shape)}, strides "
                f"{list(tensor.stride())}) is not contiguous, as the graph takes it to be: pass it contiguous()"
            )
