"""Outputs as whole plain tensors, where a loss is computed from them outside of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.ir.signature.outputs import OUTSIDE
from autopar.runtime.agreement.given_gradients import GivenGradients


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
    """Let outputs be whole plain tensors, with their gradients, where there is no loss among them, or it is `OUTSIDE`.

    So a loss that is computed outside of the model, from logits and labels, is what it is on one device. Where the
    model returns its loss, other outputs stay on the ranks: logits may be larger than the model.
    """
    if _gather not in model._forward_hooks.values():
        model.register_forward_hook(_gather)


def _gather(module: Any, args: Any, output: Any) -> Any:
    session = vars(module).get("_autopar")
    # The original has the same hooks, and is called itself to generate: its outputs are plain.
    if session is None or (session.options.loss != OUTSIDE and _has_loss(output)):
        return output
    found, latest = whole(output), session.latest
    given = None if latest is None or latest.step.given.compared else latest.step.given
    for n, tensor in enumerate(t for t in tensors_in(found) if t.requires_grad):
        tensor.register_hook(partial(_plain_gradient, given, f"whole output {n}"))  # type: ignore[no-untyped-call]
    return found


def _plain_gradient(given: GivenGradients | None, output: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient that a whole tensor is given, as a plain tensor: of that each rank takes its shards."""
    if isinstance(gradient, DTensor):  # beside a tensor on the mesh it has become one
        gradient = gradient.full_tensor()
    if given is not None and gradient is not None:
        given.note(output, gradient)
    return gradient


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """In nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


def _has_loss(output: Any) -> bool:
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    )
    return any(isinstance(v, torch.Tensor) and v.ndim == 0 for v in values)
