"""One file an operator family; importing this package registers every rule, in this order."""

from autopar.strategies import (
    attention,
    batch_norm,
    convolution,
    creation,
    embedding,
    experts,
    fourier,
    indexing,
    loss,
    matmul,
    normalization,
    pointwise,
    pooling,
    random,
    reduction,
    view,
)

__all__ = [
    "attention",
    "batch_norm",
    "convolution",
    "creation",
    "embedding",
    "experts",
    "fourier",
    "indexing",
    "loss",
    "matmul",
    "normalization",
    "pointwise",
    "pooling",
    "random",
    "reduction",
    "view",
]
