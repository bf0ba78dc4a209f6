"""Cross-entropy of rows of logits on a GPU: kernels that read the logits once, and write their gradient once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096
"""Of a block of a row, at most."""


def logsumexp(x: Tensor, wide: torch.dtype, is_whole: bool) -> Tensor:
    """``[rows, 1]`` of ``x [rows, classes]``, computed in ``wide``.

    Args:
        x: of any strides between rows; each row is contiguous.
        wide: float32 or float64.
        is_whole: whether these are all classes: minus infinity in all of them is nan then, as torch has it.
    """
    found = x.new_empty((len(x), 1), dtype=wide)
    if len(x):
        columns, warps = _block(x)
        _logsumexp[(len(x),)](x, found, x.shape[1], x.stride(0), is_whole, columns, num_warps=warps)
    return found


def gradient(x: Tensor, total: Tensor, given: Tensor, local: Tensor, at_target: Tensor, dtype: torch.dtype) -> Tensor:
    """``given * -exp(x - total)``, and ``at_target`` more at each row's target; row-major, in ``dtype``.

    Args:
        x: ``[rows, classes]``; each row is contiguous.
        total: logarithms of sums of exponentials, ``[rows, 1]``.
        given: gradients, ``[rows, 1]``.
        local: numbers of the targets, ``[rows, 1]``.
        at_target: ``given``, or zero where the target is a class of others.
        dtype: of the result.
    """
    found = x.new_empty(x.shape, dtype=dtype)
    if x.numel():
        columns, warps = _block(x)
        grid = (len(x), triton.cdiv(x.shape[1], columns))
        rows = (t.contiguous() for t in (total, given, local, at_target))
        _gradient[grid](x, found, *rows, x.shape[1], x.stride(0), columns, num_warps=warps)
    return found


def _block(x: Tensor) -> tuple[int, int]:
    """Columns of a block, and warps for it."""
    columns = min(COLUMNS, triton.next_power_of_2(x.shape[1]))
    return columns, min(8, max(1, columns // 256))


@triton.jit  # type: ignore[untyped-decorator]
def _logsumexp(x, found, classes, stride, whole: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    wide = found.dtype.element_ty
    lanes = tl.arange(0, columns)
    largest = tl.full((columns,), float("-inf"), wide)
    total = tl.zeros((columns,), wide)
    for start in range(0, classes, columns):
        at = start + lanes
        value = tl.load(x + row * stride + at, mask=at < classes, other=float("-inf")).to(wide)
        new = tl.maximum(largest, value)
        # Nothing has been added to the sum of a lane whose classes all are minus infinity: any finite shift serves.
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.exp(value - shift)
        largest = new
    top = tl.max(largest, 0)
    shift = top if whole else tl.where(top == float("-inf"), 0.0, top)
    tl.store(found + row, tl.log(tl.sum(total * tl.exp(largest - shift), 0)) + shift)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(x, found, total, given, local, at_target, classes, stride, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * columns + tl.arange(0, columns)
    value = tl.load(x + row * stride + at, mask=at < classes, other=0.0).to(total.dtype.element_ty)
    result = -tl.load(given + row) * tl.exp(value - tl.load(total + row))
    result += tl.where(at == tl.load(local + row), tl.load(at_target + row), 0.0)
    tl.store(found + row * classes + at, result.to(found.dtype.element_ty), mask=at < classes)
