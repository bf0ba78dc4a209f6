"""Speed and memory of a training, for TensorBoard and the like."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autopar.module.metrics import Callback, Metrics, watch

__all__ = ["Metrics", "to_tensorboard", "watch"]


def to_tensorboard(writer: Any, prefix: str = "autopar/") -> Callback:
    """A callback for `watch` that writes each figure as a scalar.

    Args:
        writer: a ``SummaryWriter``, or what has the same ``add_scalar(name, value, step)``.
        prefix: of the names.
    """

    def write(found: Metrics) -> None:
        for name, value in asdict(found).items():
            if name != "step" and value is not None:
                writer.add_scalar(prefix + name, value, found.step)

    return write
