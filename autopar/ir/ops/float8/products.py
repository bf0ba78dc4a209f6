"""Products of two float8 matrices: by one kernel on a GPU that has it, elsewhere on the values as wide numbers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar._torch_compat import scaled_mm
from autopar.ir.ops.float8.formats import FORMATS

# Must stay alive: torch removes the operator with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "float8_product(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str format_a, str format_b, ScalarType dtype) "
    "-> Tensor"
)

MULTIPLE = 16
"""Of what number depth and columns of a product must be multiples for the kernel."""

FIRST_WITH_FLOAT8 = (8, 9)
"""Compute capability of the first GPUs (Ada, Hopper) whose tensor cores take float8."""


@cache
def _has_kernel(device: torch.device) -> bool:
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= FIRST_WITH_FLOAT8


def takes_kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> bool:
    """Whether one kernel computes the product; else the values are widened first, which takes longer and is as exact.

    Args:
        a: ``[rows, depth]``.
        b: ``[columns, depth]``.
        scale_a: of ``a``.
        scale_b: of ``b``.
        dtype: of the result.
    """
    if not a.is_cuda or type(a) is not Tensor or scale_a.dtype != torch.float32 or not _has_kernel(a.device):
        return False
    # With scales of rows the kernel writes bfloat16 alone, and both operands must have them.
    rowwise = scale_a.numel() > 1 and scale_b.numel() > 1 and dtype == torch.bfloat16
    tensorwise = scale_a.numel() == scale_b.numel() == 1 and dtype != torch.float64
    return (rowwise or tensorwise) and b.shape[0] % MULTIPLE == 0 and b.shape[1] % MULTIPLE == 0


def product_into(
    out: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, format_a: str, format_b: str
) -> None:
    """Write `product` into memory for it, ``[rows, columns]``, in its dtype; without a copy where a kernel does it."""
    if takes_kernel(a, b, scale_a, scale_b, out.dtype):
        left, right = a.view(FORMATS[format_a].dtype), b.view(FORMATS[format_b].dtype)
        scaled_mm(left, right.t(), scale_a, scale_b.t(), out.dtype, out)
    else:
        out.copy_(_product(a, b, scale_a, scale_b, format_a, format_b, out.dtype))


def _product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, format_a: str, format_b: str, dtype: torch.dtype
) -> Tensor:
    left, right = a.view(FORMATS[format_a].dtype), b.view(FORMATS[format_b].dtype)
    if takes_kernel(a, b, scale_a, scale_b, dtype):
        return scaled_mm(left, right.t(), scale_a, scale_b.t(), dtype)
    # Every float8 number is one of the wide dtype, and so is every product of two.
    total = left.to(scale_a.dtype) @ right.to(scale_b.dtype).t()
    return (total * scale_a * scale_b.t()).to(dtype)


_library.impl("float8_product", _product, "CompositeExplicitAutograd")

product = torch.ops.autopar.float8_product.default
"""``(a * scale_a) @ (b * scale_b).T`` of the values of bytes, accumulated in the dtype of the scales.

Args:
    a: bytes ``[rows, depth]``, row-major.
    b: bytes ``[columns, depth]``, row-major: both operands have what is summed over in their last dim, as kernels ask.
    scale_a: ``[rows, 1]`` or ``[1, 1]``.
    scale_b: ``[columns, 1]`` or ``[1, 1]``.
    format_a: of ``a``, one of `autopar.ir.ops.float8.formats.FORMATS`.
    format_b: of ``b``.
    dtype: of the result ``[rows, columns]``.
"""
