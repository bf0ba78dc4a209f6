"""Matrix products on float8 values: how a tensor is scaled and rounded, and the product of two that are."""

from autopar.ir.ops.float8.blocks import BLOCK, block_product, block_quantize, block_scale
from autopar.ir.ops.float8.formats import FORMATS, Format, quantize, scale
from autopar.ir.ops.float8.products import product

__all__ = [
    "BLOCK", "FORMATS", "Format", "block_product", "block_quantize", "block_scale", "product", "quantize", "scale",
]  # fmt: skip
