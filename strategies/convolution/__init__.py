"""Convolution, patches, pooling and resampling: importing this package registers their rules."""

from autopar.strategies.convolution import convolutions, patches, pooling, resampling

__all__ = ["convolutions", "patches", "pooling", "resampling"]
