"""Blocks of tensors: which part of a full tensor a device holds under a layout, and the full tensor from all parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from autopar.ir.layout import Layout, Partial, Replicate, Split, TensorType, factor_parts, local_shape


def coordinates(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Mesh coordinates of every rank, in order of rank: the last axis runs fastest."""
    return itertools.product(*(range(n) for n in sizes))


def block_ranges(
    type_: TensorType, layout: Layout, sizes: Sequence[int], where: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """For every factor of every dim, the ``(start, length)`` that the device at coordinates ``where`` holds."""
    ranges = [[(0, f.size) for f in dim] for dim in type_.dims]
    for placement, n, i in zip(layout, sizes, where, strict=True):  # later axes split what earlier ones left
        if isinstance(placement, Split):
            start, length = ranges[placement.dim][placement.factor]
            ranges[placement.dim][placement.factor] = (start + i * (length // n), length // n)
    return ranges


def with_padding(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor followed by zeros up to ``shape``; the tensor itself if it has that shape."""
    missing = [n - m for n, m in zip(shape, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    return torch.nn.functional.pad(tensor, [end for n in reversed(missing) for end in (0, n)])


def without_padding(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor's first elements, ``shape`` of them; the tensor itself if it has that shape."""
    for d, n in enumerate(shape):
        # A view: padding is at the end of each dim.
        tensor = tensor.narrow(d, 0, n)
    return tensor


def is_zero_outside(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether everything after the first elements is zero."""
    if tuple(tensor.shape) == tuple(shape):
        return True
    rest = tensor.clone()
    without_padding(rest, shape).zero_()
    return not bool(rest.any())


def block(
    full: torch.Tensor, type_: TensorType, layout: Layout, sizes: Sequence[int], where: Sequence[int]
) -> torch.Tensor:
    """The contiguous local tensor of the device at ``where``; a Partial term is whole on coordinate 0, else zero.

    ``full`` may lack the padding that its type has.
    """
    ranges = block_ranges(type_, layout, sizes, where)
    part = with_padding(full, type_.shape).reshape([f.size for dim in type_.dims for f in dim])
    for d, (start, length) in enumerate(itertools.chain.from_iterable(ranges)):
        part = part.narrow(d, start, length)
    local = part.reshape(local_shape(type_, layout, sizes)).contiguous()
    # Terms add up to the tensor: one device has all of it, the others have zero.
    absent = any(isinstance(p, Partial) and i for p, i in zip(layout, where, strict=True))
    # A copy: devices of an emulated mesh must not share memory.
    return torch.zeros_like(local) if absent else local.clone()


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference of two tensors of one shape; of what is no number or infinite, 0 if both are alike.

    Infinity where one only is, and for different integers.
    """
    if not found.numel():
        return 0.0
    if found.is_complex() or expected.is_complex():
        # `max` has no order of complex numbers.
        pair = [torch.view_as_real(t.resolve_conj() if t.is_complex() else t + 0j) for t in (found, expected)]
        return largest_difference(*pair)
    if not (found.is_floating_point() and expected.is_floating_point()):
        return 0.0 if torch.equal(found, expected) else math.inf
    # The quick way first: NaN and infinities, compared element by element, are rare.
    difference = float((found - expected).abs().max())
    if math.isfinite(difference):
        return difference
    same = (found == expected) | (found.isnan() & expected.isnan())
    rest = torch.where(same, torch.zeros_like(expected), found - expected)
    return float(rest.abs().nan_to_num(math.inf, math.inf).max())


def assemble(
    parts: Sequence[torch.Tensor], type_: TensorType, layout: Layout, sizes: Sequence[int]
) -> tuple[torch.Tensor, float]:
    """The full tensor from every rank's block, and the largest difference between copies that should be equal."""
    shape = [f.size for dim in type_.dims for f in dim]
    # Torch adds no unsigned integers but bytes up; signed ones have the same sums, bit by bit.
    dtype = parts[0].dtype
    signed = _SIGNED.get(dtype, dtype)
    # A dim for each factor, so that every block is a box in it.
    full = torch.zeros(shape, dtype=signed, device=parts[0].device)
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    difference = 0.0
    for where, part in zip(coordinates(sizes), parts, strict=True):
        # Devices that differ along replicated axes alone hold the same block.
        replica = tuple(i for p, i in zip(layout, where, strict=True) if isinstance(p, Replicate))
        copy = sums.setdefault(replica, torch.zeros_like(full))
        view = copy
        ranges = list(itertools.chain.from_iterable(block_ranges(type_, layout, sizes, where)))
        for d, (start, length) in enumerate(ranges):
            view = view.narrow(d, start, length)
        view += part.reshape([length for _, length in ranges]).view(signed)
    first = next(iter(sums.values()))
    for other in sums.values():
        difference = max(difference, largest_difference(other, first))
    return first.view(dtype).reshape(type_.shape), difference


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def parts_along(dim: int, layout: Layout, sizes: Sequence[int]) -> int:
    """Into how many blocks devices cut the samples, which are the first factor of a dim."""
    return factor_parts(layout, sizes).get((dim, 0), 1)


def common_blocks(found: Iterable[tuple[int, Layout]], sizes: Sequence[int]) -> int:
    """As many blocks as every tensor's can be made of; each is given as its dim of samples and its layout."""
    return math.lcm(*(parts_along(dim, layout, sizes) for dim, layout in found))


def take(tensor: torch.Tensor, dim: int, blocks: int, count: int, index: int) -> torch.Tensor:
    """The slice of microbatch ``index`` of ``count``, contiguous; ``tensor`` has ``blocks`` blocks."""
    shape = tensor.shape
    # A slice of every device's block: each device has its part of a microbatch already, and nothing is sent.
    cut = tensor.reshape(*shape[:dim], blocks, count, -1, *shape[dim + 1 :]).select(dim + 1, index)
    return cut.flatten(dim, dim + 1).contiguous()


def join(parts: Sequence[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    """Inverse of `take`: the slices of all microbatches."""
    cut = [p.reshape(*p.shape[:dim], blocks, -1, *p.shape[dim + 1 :]) for p in parts]
    return torch.stack(cut, dim + 1).flatten(dim, dim + 2)
