"""MXFP8: float8 values of which every 32 that follow one another in what a product sums over share a power of two.

The scale of a block is ``2 ** (floor(log2(amax)) - e)``, ``e`` being the exponent of the format's largest value (Open
Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023, section 6.3). It is a byte, the
exponent with 127 added (``e8m0``). What is then larger than the format's largest value becomes that.

No device needs to know of others' blocks: a tensor of which each has whole blocks has the same scales as on one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.float8.formats import FORMATS, wide_dtype

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("mxfp8_scale(Tensor x, str format) -> Tensor")
_library.define("mxfp8_quantize(Tensor x, Tensor scale, str format) -> Tensor")
_library.define(
    "mxfp8_product(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str format_a, str format_b, ScalarType dtype) "
    "-> Tensor"
)

BLOCK = 32
"""Numbers that share a scale."""

BIAS, NO_NUMBER = 127, 255
"""What is added to an exponent to make it a byte, and the byte of a scale that is no number."""

EXPONENTS = {"e4m3": 8, "e5m2": 15}
"""Of the largest value of each format."""


def _blocks(x: Tensor) -> Tensor:
    """``[rows, depth]`` as ``[rows, depth / 32, 32]``."""
    return x.reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK)


def _scale(x: Tensor, format: str) -> Tensor:
    largest = _blocks(x).abs().amax(-1)
    # ``largest = mantissa * 2 ** exponent`` with a mantissa from 1/2 on: its logarithm is one less, rounded down.
    _, exponent = torch.frexp(largest.to(wide_dtype(x)))
    exponent = torch.where(largest == 0, -BIAS, exponent - 1 - EXPONENTS[format]).clamp(-BIAS, BIAS) + BIAS
    return torch.where(largest.isfinite(), exponent, NO_NUMBER).to(torch.uint8).contiguous()


def _powers(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales as numbers."""
    return scale.view(torch.float8_e8m0fnu).to(torch.float32).to(dtype)


def _quantize(x: Tensor, scale: Tensor, format: str) -> Tensor:
    kind, wide = FORMATS[format], wide_dtype(x)
    values = _blocks(x).to(wide) / _powers(scale, wide).unsqueeze(-1)
    return values.clamp(-kind.largest, kind.largest).flatten(-2).to(kind.dtype).contiguous().view(torch.uint8)


def _product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, format_a: str, format_b: str, dtype: torch.dtype
) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def numbers(values: Tensor, scale: Tensor, format: str) -> Tensor:
        # Exact: a power of two changes no bit of a mantissa.
        found = _blocks(values.view(FORMATS[format].dtype).to(wide))
        return (found * _powers(scale, wide).unsqueeze(-1)).flatten(-2)

    return (numbers(a, scale_a, format_a) @ numbers(b, scale_b, format_b).t()).to(dtype)


for _name, _function in (("mxfp8_scale", _scale), ("mxfp8_quantize", _quantize), ("mxfp8_product", _product)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")

block_scale = torch.ops.autopar.mxfp8_scale.default
"""The scales, bytes ``[rows, depth / 32]``, of a matrix ``[rows, depth]`` in a format."""

block_quantize = torch.ops.autopar.mxfp8_quantize.default
"""The bytes ``[rows, depth]`` of a matrix over its scales."""

block_product = torch.ops.autopar.mxfp8_product.default
"""As `autopar.ir.ops.float8.products.product`, with the scales of blocks, ``[rows or columns, depth / 32]``; summed in
float32, for a result in float64 in float64."""
