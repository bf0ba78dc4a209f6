"""One file an operator family; importing this package registers every rule, in this order."""

from autopar.strategies import (
    attention,
    convolution,
    creation,
    embedding,
    indexing,
    linalg,
    loss,
    matmul,
    normalization,
    pointwise,
    reduction,
    scans,
    view,
)

__all__ = [
    "attention",
    "convolution",
    "creation",
    "embedding",
    "indexing",
    "linalg",
    "loss",
    "matmul",
    "normalization",
    "pointwise",
    "reduction",
    "scans",
    "view",
]
