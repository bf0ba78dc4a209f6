"""What a newcomer's rank takes of the rank at its place in a worker that trains: tensors and objects, as bytes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.module.low_communication.outer import OuterState
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.dtensor import to_local

Given = tuple[dict[str, Any], list[torch.Tensor]]
"""What a newcomer has received: states of objects, and tensors."""


def others_of(model: ParallelModule, trained: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's shards of what is not trained: frozen parameters and buffers, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: to_local(t).detach() for name, t in tensors.items() if name not in trained}


def give(
    model: ParallelModule, optimizer: torch.optim.Optimizer, stateful: Mapping[str, Any], outer: OuterState
) -> torch.Tensor:
    """What a newcomer takes of this rank, as bytes: outer state, what is not trained, states of objects, options."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    objects = {"groups": groups, "stateful": {name: given.state_dict() for name, given in stateful.items()}}
    return packed(objects, _tensors(model, outer))


def received(model: ParallelModule, outer: OuterState, payload: torch.Tensor) -> Given:
    """Of what `give` gave; nothing is changed yet."""
    return unpacked(payload, _tensors(model, outer))


@torch.no_grad()
def take(
    model: ParallelModule,
    optimizer: torch.optim.Optimizer,
    stateful: Mapping[str, Any],
    outer: OuterState,
    given: Given,
) -> None:
    """Take over what was `received`."""
    objects, tensors = given
    for own, other in zip(_tensors(model, outer), tensors, strict=True):
        own.copy_(other)
    for group, options in zip(optimizer.param_groups, objects["groups"], strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)  # a learning rate that a captured step reads
            else:
                group[key] = copy.deepcopy(value)
    for name, own_object in stateful.items():
        own_object.load_state_dict(objects["stateful"][name])


def _tensors(model: ParallelModule, outer: OuterState) -> list[torch.Tensor]:
    return [*outer.anchor.values(), *outer.momentum.values(), *others_of(model, outer.anchor).values()]


def packed(objects: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As one tensor of bytes, in host memory.

    Args:
        objects: plain data and tensors, as states of objects have them.
        tensors: whose shapes and dtypes the receiver knows.

    >>> sent = packed({"at": 3}, [torch.tensor([1.5, 2.0]), torch.tensor(True)])
    >>> unpacked(sent, [torch.zeros(2), torch.tensor(False)])
    ({'at': 3}, [tensor([1.5000, 2.0000]), tensor(True)])
    """
    buffer = io.BytesIO()
    torch.save(dict(objects), buffer)
    head = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    return torch.cat([torch.tensor([head.numel()]).view(torch.uint8), head, *map(_bytes, tensors)])


def unpacked(payload: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """What `packed` was given; tensors in host memory.

    Args:
        payload: as received.
        like: tensors of the same shapes and dtypes.

    Raises:
        AutoparError: an object's state is not plain data.
    """
    at = 8 + int(payload[:8].clone().view(torch.int64))
    try:
        objects = torch.load(io.BytesIO(payload[8:at].numpy().tobytes()), weights_only=True)
    except pickle.UnpicklingError as e:
        raise AutoparError(
            f"states of objects by name are sent to newcomers as plain data and tensors, and one is not: {e}"
        ) from e
    found = []
    for tensor in like:
        size = tensor.numel() * tensor.itemsize
        part = payload[at : at + size].clone()  # aligned, as a view of another dtype must be
        found.append(part.view(tensor.dtype).view(tensor.shape) if size else torch.empty_like(tensor, device="cpu"))
        at += size
    return objects, found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
