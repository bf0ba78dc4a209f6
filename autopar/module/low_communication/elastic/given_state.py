"""What a newcomer's rank takes of the rank at its place in a worker that trains: tensors and objects, as bytes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
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


def offer(
    model: ParallelModule,
    optimizer: torch.optim.Optimizer,
    stateful: Mapping[str, Any],
    outer: OuterState,
    *,
    beside: bool,
) -> Callable[[], torch.Tensor]:
    """What gives, as bytes, what a newcomer takes of this rank as it is now.

    That is outer state, what is not trained, states of objects, and options.

    Args:
        model: of this worker.
        optimizer: of it.
        stateful: objects by name.
        outer: stays as it is until the bytes are there.
        beside: training goes on until they are: what it changes is copied.
    """

    def objects() -> dict[str, Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return {"groups": groups, "stateful": {name: given.state_dict() for name, given in stateful.items()}}

    if not beside:
        return lambda: packed(objects(), _tensors(model, outer))
    head = saved(objects())
    # A list by name of shards: `_tensors` has the same order.
    moving = {name: to_local(b).detach().clone() for name, b in model.named_buffers()}
    others = {name: moving.get(name, t) for name, t in others_of(model, outer.anchor).items()}
    return lambda: joined(head, [*outer.anchor.values(), *outer.momentum.values(), *others.values()])


def require_plain(stateful: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuse what could not be sent when a newcomer comes.

    Raises:
        AutoparError: names the object.
    """
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    states = {f"{name}=: its state_dict()": given.state_dict() for name, given in stateful.items()}
    for what, state in {"optimizer=: an option of a group": groups, **states}.items():
        try:
            torch.load(io.BytesIO(saved({"state": state}).numpy().tobytes()), weights_only=True)
        except Exception as e:
            first = (str(e).splitlines() or [""])[0][:200]
            raise AutoparError(
                f"{what} is not plain data and tensors ({type(e).__name__}: {first}), and is sent to newcomers, where "
                "nothing is run that is received: leave out what has code or classes of its own"
            ) from e


def received(model: ParallelModule, outer: OuterState, payload: torch.Tensor) -> Given:
    """Of what `offer` gave; nothing is changed yet."""
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
    return joined(saved(objects), tensors)


def saved(objects: Mapping[str, Any]) -> torch.Tensor:
    """Objects as bytes."""
    buffer = io.BytesIO()
    torch.save(dict(objects), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def joined(head: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """What `saved` gave, its length before it, and tensors."""
    length = torch.tensor([head.numel()], device="cpu").view(torch.uint8)
    return torch.cat([length, head, *map(_bytes, tensors)])


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
