"""Outputs as whole plain tensors, where a loss is computed from them outside of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def whole(value: Any) -> Any:
    """The same nested lists, tuples and mappings with whole plain tensors; a collective call if there are DTensors.

    Gradients flow through those that require one.
    """
    if isinstance(value, DTensor):
        with torch.set_grad_enabled(torch.is_grad_enabled() and value.requires_grad):
            return value.full_tensor()
    if isinstance(value, Mapping):
        if not any(_has_dtensor(v) for v in value.values()):
            return value
        return _like(value, {k: whole(v) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(whole, value))
    if isinstance(value, list | tuple):
        return type(value)(map(whole, value))
    return value


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_dtensor, value.values()))
    return isinstance(value, DTensor) or (isinstance(value, list | tuple) and any(map(_has_dtensor, value)))


def _like(old: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    # Outputs of transformers are dictionaries with attributes, which their constructors take by name.
    return new if type(old) is dict else type(old)(**new)


def gather_outputs_without_loss(model: nn.Module) -> None:
    """Let outputs be whole plain tensors, with their gradients, where there is no loss among them.

    So a loss that is computed outside of the model, from logits and labels, is what it is on one device. Where the
    model returns its loss, other outputs stay on the ranks: logits may be larger than the model.
    """
    if _gather not in model._forward_hooks.values():
        model.register_forward_hook(_gather)


def _gather(module: nn.Module, args: Any, output: Any) -> Any:
    return output if _has_loss(output) else whole(output)


def _has_loss(output: Any) -> bool:
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    )
    return any(isinstance(v, torch.Tensor) and v.ndim == 0 for v in values)
