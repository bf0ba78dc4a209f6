"""Scaled dot-product attention: importing this package registers the rules of our operators and of torch's kernels."""

from autopar.strategies.attention import operators, kernels  # noqa: I001 - in this order

__all__ = ["kernels", "operators"]
