"""Where layouts meet torch's placements: this rank's block of a tensor, and tensors from blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar._torch_compat import DTensorSpec, StridedShard, TensorMeta, redistributed, spec_in
from autopar.ir import layout as lay
from autopar.ir.layout import Layout, TensorType
from autopar.ir.shards import with_padding, without_padding
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.stage_tensor import StageTensor, on_every_stage, owner_of, with_owner

Placements = tuple[TorchPlacement, ...]


def to_placements(type_: TensorType, layout: Layout) -> Placements:
    """Torch's placements of a boundary layout (`autopar.ir.layout.is_boundary_layout`)."""
    found: list[TorchPlacement] = []
    for placement in layout:
        if isinstance(placement, lay.Replicate):
            found.append(Replicate())
        elif isinstance(placement, lay.Partial):
            found.append(TorchPartial(placement.op))
        elif isinstance(placement, lay.At):
            # To torch the other stages have empty shards: clip_grad_norm_ then adds each gradient's norm once.
            found.append(Shard(0))
        else:
            # torch's name for a split within a fused dim, such as q, k and v in one weight: split_factor blocks, each
            # of which is split.
            before = math.prod(f.size for f in type_.dims[placement.dim][: placement.factor])
            found.append(StridedShard(placement.dim, split_factor=before) if before > 1 else Shard(placement.dim))
    return tuple(found)


def from_placements(
    type_: TensorType, placements: Sequence[TorchPlacement], sizes: Sequence[int], *, uneven: bool = False
) -> Layout | None:
    """The layout that equals torch's placements; None if the tensor's factors cannot express it.

    ``uneven`` allows splits that would divide if the tensor were padded.
    """
    found: list[lay.Placement] = []
    for placement in placements:
        if isinstance(placement, StridedShard | Shard):
            factor = _factor(type_, placement)
            if factor is None:
                return None
            found.append(lay.Split(placement.dim % len(type_.dims), factor))
        elif isinstance(placement, TorchPartial):
            found.append(lay.Partial(placement.reduce_op))
        else:
            found.append(lay.Replicate())
    layout = tuple(found)
    fits = lay.divides(type_, layout, sizes) or (uneven and lay.is_uneven(type_, layout, sizes))
    return layout if fits else None


def _factor(type_: TensorType, placement: Shard | StridedShard) -> int | None:
    """Number of the factor that a placement splits; None if the split is across factors."""
    if not -len(type_.dims) <= placement.dim < len(type_.dims):
        return None
    before = 1
    for j, factor in enumerate(type_.dims[placement.dim]):
        if before == (placement.split_factor if isinstance(placement, StridedShard) else 1):
            return j
        before *= factor.size
    return None


def cuts_of(shape: Sequence[int], placements: Sequence[TorchPlacement]) -> tuple[tuple[int, ...], ...]:
    """Sizes of the factors of each dim that placements need; one factor each, where blocks follow one another."""
    found = []
    for dim, size in enumerate(shape):
        strided = {int(p.split_factor) for p in placements if isinstance(p, StridedShard) and int(p.dim) == dim}
        # A dim of no elements has no factors but itself.
        ends = sorted({1, size, *strided}) if size else [1]
        sizes = tuple(b // a for a, b in itertools.pairwise(ends) if b % a == 0)
        found.append(sizes if math.prod(sizes) == size else (size,))
    return tuple(found)


def plain_type(shape: Sequence[int], dtype: torch.dtype) -> TensorType:
    """A type for a tensor whose factors are unknown: one factor a dim."""
    dims = tuple((lay.Factor(f"d{i}", n),) if n != 1 else () for i, n in enumerate(shape))
    return TensorType(str(dtype).removeprefix("torch."), dims)


def local_block(
    full: torch.Tensor, type_: TensorType, layout: Layout, sizes: Sequence[int], coordinates: Sequence[int]
) -> torch.Tensor:
    """The block of ``full`` that the device at ``coordinates`` computes on: contiguous, a copy unless it is all.

    ``full`` may lack the padding that its type has.
    """
    if not lay.is_held(layout, coordinates):
        # As torch's Shard(0) has it on ranks beyond the last row: empty along dim 0, the other dims as they are.
        return full.new_empty((0, *lay.local_shape(type_, layout, sizes)[1:]))
    full = with_padding(full, type_.shape)
    if not any(isinstance(p, lay.Split) for p in layout):
        return full.contiguous()
    starts: dict[tuple[int, int], int] = {}
    for placement, n, index in zip(layout, sizes, coordinates, strict=True):
        if isinstance(placement, lay.Split):
            key = (placement.dim, placement.factor)
            starts[key] = starts.get(key, 0) * n + index  # earlier axes are further out
    # With one dim for each factor, every split is a plain slice of one dim.
    block = full.reshape([f.size for dim in type_.dims for f in dim])
    position = 0
    parts = lay.factor_parts(layout, sizes)
    for d, j in type_.positions:
        if (d, j) in parts:
            size = type_.dims[d][j].size // parts[d, j]
            block = block.narrow(position, starts[d, j] * size, size)
        position += 1
    return block.clone(memory_format=torch.contiguous_format).view(lay.local_shape(type_, layout, sizes))


def stored(local: torch.Tensor, type_: TensorType, layout: Layout, coordinates: Sequence[int]) -> torch.Tensor:
    """A local tensor without its part of the padding: what torch's ``Shard`` leaves this device; contiguous."""
    if not type_.used or not lay.is_held(layout, coordinates):
        return local
    shape = list(local.shape)
    # Padding is at the end of a dim, so it falls on the last devices; some may be left with nothing.
    for d, used in enumerate(type_.used):
        start = sum(c * shape[d] for p, c in zip(layout, coordinates, strict=True) if p == lay.Split(d, 0))
        shape[d] = max(0, min(shape[d], used - start)) if used != type_.shape[d] else shape[d]
    return without_padding(local, shape).contiguous()


def stored_block(
    full: torch.Tensor, type_: TensorType, layout: Layout, sizes: Sequence[int], coordinates: Sequence[int]
) -> torch.Tensor:
    """The block of ``full`` that the device at ``coordinates`` keeps: `local_block` without padding."""
    return stored(local_block(full, type_, layout, sizes, coordinates), type_, layout, coordinates)


def computed(local: torch.Tensor, type_: TensorType, layout: Layout, sizes: Sequence[int]) -> torch.Tensor:
    """Inverse of `stored`: the local tensor with zeros for padding."""
    return with_padding(local, lay.local_shape(type_, layout, sizes)) if type_.used else local


def block_ranges(
    type_: TensorType, layout: Layout, sizes: Sequence[int], coordinates: Sequence[int]
) -> tuple[tuple[slice, ...], Layout]:
    """For reading a part of a file: the hull of this device's block, and the layout of the block within it.

    A dim split along its leading factor is one range; any other is read whole and cut afterwards.
    """
    ranges = [slice(0, n) for n in type_.shape]
    rest: list[lay.Placement] = []
    for placement, n, index in zip(layout, sizes, coordinates, strict=True):
        if not isinstance(placement, lay.Split) or placement.factor > 0:
            rest.append(placement)
            continue
        rest.append(lay.Replicate())
        current = ranges[placement.dim]
        size = (current.stop - current.start) // n
        ranges[placement.dim] = slice(current.start + index * size, current.start + (index + 1) * size)
    return tuple(ranges), tuple(rest)


def spec_of(
    context: MeshContext,
    shape: Sequence[int],
    dtype: torch.dtype,
    placements: Placements,
    order: Sequence[int] | None = None,
) -> DTensorSpec:
    """The metadata of a DTensor of this global shape, without gaps, and with its dims in an order; default: theirs."""
    assert context.mesh is not None
    order = range(len(shape)) if order is None else order
    strides = dict(zip(order, _row_major([shape[d] for d in order]), strict=True))
    # Not DTensor.from_local, which takes all shards to be equally long if it is given no shape.
    meta = TensorMeta(torch.Size(shape), tuple(strides[d] for d in range(len(shape))), dtype)
    return spec_in(context.mesh, placements, meta)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    stride: list[int] = []
    step = 1
    for n in reversed(shape):
        stride.insert(0, step)
        step *= max(n, 1)
    return tuple(stride)


def from_local(
    local: torch.Tensor,
    context: MeshContext,
    shape: Sequence[int],
    placements: Placements,
    order: Sequence[int] | None = None,
) -> torch.Tensor:
    """A DTensor around a block, see `spec_of`; the block itself where there is no mesh."""
    if context.mesh is None:
        return local
    spec = spec_of(context, shape, local.dtype, placements, order)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor around a block, of the shape and in the placements of another."""
    spec = like._spec
    # A spec says what its tensor's strides are; the other's serves where they are the ones that this one would have.
    if spec.tensor_meta is None or spec.tensor_meta.dtype != local.dtype or not like.is_contiguous():
        strides = TensorMeta(like.shape, _row_major(like.shape), local.dtype)
        spec = spec_in(spec.mesh, spec.placements, strides)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def of_layout(local: torch.Tensor, context: MeshContext, type_: TensorType, layout: Layout) -> torch.Tensor:
    """A DTensor of a layout around this rank's block; the block itself where there is no mesh."""
    tensor = from_local(local, context, type_.stored_shape, to_placements(type_, layout))
    return with_owner(tensor, owner_of(layout)) if isinstance(tensor, DTensor) else tensor


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's block of a DTensor, without autograd; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank; a collective call if it is a DTensor."""
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        mesh = tensor.device_mesh
        if isinstance(tensor, StageTensor):
            tensor = on_every_stage(tensor)  # its placements say that the stages split it
        whole: DTensor = redistributed(tensor, mesh, (Replicate(),) * mesh.ndim)
        return whole._local_tensor


def on_all_stages(tensor: torch.Tensor, type_: TensorType, layout: Layout, context: MeshContext) -> torch.Tensor:
    """A parameter, or its gradient, on the devices of every stage; a collective call if one stage holds it."""
    axis = next((i for i, p in enumerate(layout) if isinstance(p, lay.At)), None)
    if axis is None or context.mesh is None:
        return tensor
    everywhere = (*layout[:axis], lay.Replicate(), *layout[axis + 1 :])
    local, source = to_local(tensor).detach(), layout[axis]
    assert isinstance(source, lay.At)
    if context.coordinates[axis] != source.index:
        # Receivers have an empty local tensor. Their block has the sender's shape, padding left out, since devices
        # along the axis of the stages have all other coordinates in common.
        padded = torch.empty(lay.local_shape(type_, everywhere, context.sizes), device="meta")
        local = local.new_empty(stored(padded, type_, everywhere, context.coordinates).shape)
    local = local.contiguous()
    with context.during("a parameter that one stage holds"):
        dist.broadcast(local, group=context.mesh.get_group(axis), group_src=source.index)
    return of_layout(local, context, type_, everywhere)


def redistribute(tensor: torch.Tensor, context: MeshContext, placements: Placements) -> torch.Tensor:
    """A DTensor in other placements; a collective call unless it has them already."""
    assert isinstance(tensor, DTensor)
    if tuple(tensor.placements) == placements:
        return tensor
    with torch.no_grad():
        moved: DTensor = redistributed(tensor, context.mesh, placements)
        return moved


def in_layout(value: DTensor, type_: TensorType, layout: Layout, context: MeshContext) -> torch.Tensor:
    """A DTensor in the layout of a parameter; a collective call unless it has it already."""
    if lay.is_everywhere(layout):
        return redistribute(value, context, to_placements(type_, layout))
    # torch has no placement for a tensor of one stage: redistribute would take its Shard(0) by its word.
    block = stored_block(full_tensor(value), type_, layout, context.sizes, context.coordinates)
    return of_layout(block, context, type_, layout)


def part_of(tensor: torch.Tensor, type_: TensorType, layout: Layout, context: MeshContext) -> torch.Tensor:
    """This rank's block in ``layout``, as it computes on it, of a DTensor of any placements or a whole plain tensor."""
    if not isinstance(tensor, DTensor):
        return local_block(tensor.detach(), type_, layout, context.sizes, context.coordinates)
    if from_placements(type_, tensor.placements, context.sizes) == layout:
        return computed(tensor._local_tensor.detach(), type_, layout, context.sizes).contiguous()
    return local_block(full_tensor(tensor), type_, layout, context.sizes, context.coordinates)


def counting_writes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose ``_version`` is that of the other from now on, and which holds none of its memory."""
    found = tensor.detach()
    if isinstance(found, DTensor):
        found._local_tensor = found._local_tensor.new_empty(0)
    else:
        found.data = found.new_empty(0)
    return found
