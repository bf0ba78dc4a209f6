"""Float8 formats: the scale of a tensor, and its values over it, rounded to the nearest of the format.

A tensor ``x`` is held as ``scale * values``: ``scale = max(amax(|x|), LEAST) / largest`` of the format, so that the
largest entry becomes the largest value of the format (P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022,
https://arxiv.org/abs/2209.05433). One scale is of the whole tensor, or of each row of what a product sums over.

The scale is the maximum over all devices that have a part of the tensor. Since division and rounding keep the order of
numbers, the maximum of the devices' scales is the scale of the whole tensor, bit by bit.

In graphs the values are bytes (``uint8``): collectives and copies take these everywhere, and float8 only in places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("float8_scale(Tensor x, int[] dims, str format) -> Tensor")
_library.define("float8_quantize(Tensor x, Tensor scale, str format, bool delayed=False) -> Tensor")


@dataclass(frozen=True)
class Format:
    """A float8 format.

    Attributes:
        name: of it.
        dtype: torch's dtype of it.
        largest: its largest finite value.
    """

    name: str
    dtype: torch.dtype
    largest: float


FORMATS = {f.name: f for f in (Format("e4m3", torch.float8_e4m3fn, 448.0), Format("e5m2", torch.float8_e5m2, 57344.0))}
"""By name: ``e4m3`` has three bits of mantissa, ``e5m2`` two and a wider range, for gradients."""

LEAST = 1e-12
"""The least that counts as the largest entry, as in torchao: a tensor of zeros has a scale, too."""


def wide_dtype(x: Tensor) -> torch.dtype:
    """In which scales are computed and products accumulate: float32, of float64 tensors float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def largest_of(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The largest absolute entries along dims, which stay; of no entries zero."""
    if not x.numel():
        return x.new_zeros([1 if dim in dims else size for dim, size in enumerate(x.shape)], dtype=wide_dtype(x))
    found: Tensor = torch.linalg.vector_norm(x, torch.inf, list(dims), True)
    return found.to(wide_dtype(x))


def _scale(x: Tensor, dims: Sequence[int], format: str) -> Tensor:
    largest = largest_of(x, dims)
    # What is no number counts as infinite: a maximum over devices may drop it, and the product is no number either way.
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    return largest.clamp_min(LEAST) / FORMATS[format].largest


def _quantize(x: Tensor, scale: Tensor, format: str, delayed: bool = False) -> Tensor:
    kind = FORMATS[format]
    values = (x.to(scale.dtype) / scale).clamp(-kind.largest, kind.largest)
    if delayed:
        values = values.masked_fill(x.isinf(), torch.nan)
    return values.to(kind.dtype).contiguous().view(torch.uint8)


for _name, _function in (("float8_scale", _scale), ("float8_quantize", _quantize)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")

scale = torch.ops.autopar.float8_scale.default
"""The scale of a matrix along ``dims``, which stay as dims of size 1: float32, of a float64 matrix float64.

Args:
    x: ``[rows, columns]``.
    dims: ``[0, 1]`` for one scale of all; ``[1]`` for one of each row, ``[0]`` of each column.
    format: of `FORMATS`.
"""

quantize = torch.ops.autopar.float8_quantize.default
"""The bytes of a matrix over its scale, rounded to the nearest even; what is too large becomes the largest value.

Args:
    x: ``[rows, columns]``.
    scale: of it, see `scale`.
    format: of `FORMATS`.
    delayed: the scale is not of these very values: infinite ones, of which it does not know, become no numbers (NaN)
        and not the largest value.
"""
