"""Gradients of a rank as one flat tensor for each dtype, for one exchange of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autopar.runtime.dtensor import to_local


@dataclass(frozen=True)
class Flat:
    """Gradients of one dtype, one after another, and behind them a number for each: 1 where there is one, else 0.

    Attributes:
        names: of the parameters.
        values: the flat tensor, real.
    """

    names: tuple[str, ...]
    values: torch.Tensor


def flatten(parameters: Mapping[str, torch.Tensor]) -> list[Flat]:
    """This rank's shards of gradients; zeros where a parameter has none, which another group may have.

    Args:
        parameters: those that are trained, by name; in every group in the same order.
    """
    by_dtype: dict[tuple[str, str], list[str]] = {}
    for name, parameter in parameters.items():
        by_dtype.setdefault((str(parameter.dtype), str(parameter.device)), []).append(name)
    return [_flat(tuple(names), parameters) for names in by_dtype.values()]


def _flat(names: tuple[str, ...], parameters: Mapping[str, torch.Tensor]) -> Flat:
    parts = []
    for name in names:
        gradient = parameters[name].grad
        local = to_local(parameters[name]).detach()
        parts.append(_real(torch.zeros_like(local) if gradient is None else to_local(gradient).detach()).reshape(-1))
    present = [float(parameters[name].grad is not None) for name in names]
    return Flat(names, torch.cat([*parts, parts[0].new_tensor(present)]))


def unflatten(flat: Flat, parameters: Mapping[str, torch.Tensor]) -> None:
    """Put values back; a parameter gets a gradient if any group has had one, and none if none has."""
    present = flat.values[len(flat.values) - len(flat.names) :].tolist()
    at = 0
    for name, has in zip(flat.names, present, strict=True):
        parameter = parameters[name]
        shape = _real(to_local(parameter).detach()).shape
        values = flat.values[at : at + shape.numel()].view(shape)
        at += shape.numel()
        if not has:
            parameter.grad = None
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            _real(to_local(parameter.grad)).copy_(values)


def average(parameters: Mapping[str, torch.Tensor], mean: Callable[[torch.Tensor], Callable[[], object]]) -> int:
    """Replace gradients by their mean over groups.

    Args:
        parameters: those that are trained, by name.
        mean: begins an exchange that replaces a tensor by its mean, and returns what waits for it.

    Returns:
        The bytes of the flat tensors.
    """
    flats = flatten(parameters)
    # All are under way before the first is waited for.
    waits = [mean(flat.values) for flat in flats]
    for wait in waits:
        wait()
    for flat in flats:
        unflatten(flat, parameters)
    return sum(flat.values.nbytes for flat in flats)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
