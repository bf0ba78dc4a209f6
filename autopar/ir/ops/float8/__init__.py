"""Matrix products on float8 values: how a tensor is scaled and rounded, and the product of two that are."""

from autopar.ir.ops.float8.formats import FORMATS, Format, quantize, scale
from autopar.ir.ops.float8.products import product

__all__ = ["FORMATS", "Format", "product", "quantize", "scale"]
