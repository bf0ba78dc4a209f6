"""Matrix products on float8 values: how a tensor is scaled and rounded, and the product of two that are."""

from autopar.ir.ops.float8.blocks import BLOCK, block_product, block_quantize, block_scale
from autopar.ir.ops.float8.delayed import amax, delayed_scale
from autopar.ir.ops.float8.formats import FORMATS, Format, quantize, scale
from autopar.ir.ops.float8.histories import GRADIENT, INPUT, WEIGHT
from autopar.ir.ops.float8.products import product, product_into

__all__ = [
    "BLOCK", "FORMATS", "GRADIENT", "INPUT", "WEIGHT", "Format", "amax", "block_product", "block_quantize",
    "block_scale", "delayed_scale", "product", "product_into", "quantize", "scale",
]  # fmt: skip
