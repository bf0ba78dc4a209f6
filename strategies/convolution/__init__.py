"""Convolution, pooling and resampling: importing this package registers their rules."""

from autopar.strategies.convolution import operators, pooling

__all__ = ["operators", "pooling"]
