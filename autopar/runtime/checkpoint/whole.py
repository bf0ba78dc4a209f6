"""`gathered_values`: a checkpoint of a script's own, in any containers, with whole tensors for those on a mesh."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.runtime.dtensor import full_tensor
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.optimizer_layouts import optimizers_of
from autopar.runtime.state.state_dict import savable
from autopar.runtime.state.storage import ParameterStorage, storage_of


def gathered_values(checkpoint: Any, parameters: Iterable[torch.Tensor], context: MeshContext) -> Any:
    """The same with a whole tensor on the host in place of each DTensor, on rank 0; a collective call.

    Args:
        checkpoint: dicts, lists and tuples, of the same structure on every rank.
        parameters: of the model; state that optimizers have of them is in their layouts.
        context: this rank's.

    Returns:
        On the other ranks, the same with None in place of each DTensor: they need no room for whole tensors.
    """
    with torch.no_grad():
        return _gathered(checkpoint, _storages(parameters), context)


def _storages(parameters: Iterable[torch.Tensor]) -> dict[int, ParameterStorage]:
    """How tensors are stored, by their ids: parameters, and state of optimizers of a parameter's shape."""
    found: dict[int, ParameterStorage] = {}
    own = list(parameters)
    for parameter in own:
        if (storage := storage_of(parameter)) is not None:
            found[id(parameter)] = storage
    for optimizer in optimizers_of(own):
        for parameter, state in optimizer.state.items():
            storage = storage_of(parameter)
            for value in state.values() if storage is not None and isinstance(state, dict) else ():
                if isinstance(value, DTensor) and value.shape == parameter.shape:
                    found[id(value)] = storage  # type: ignore[assignment]
    return found


def _gathered(value: Any, storages: Mapping[int, ParameterStorage], context: MeshContext) -> Any:
    if isinstance(value, DTensor):
        storage = storages.get(id(value))
        if storage is None:  # a copy of a parameter, such as an average: of one stage, if the parameter is
            whole = value.full_tensor()
        else:
            whole = full_tensor(savable(value, (storage.type, storage.layout), context))
        return whole.cpu().clone() if context.rank == 0 else None
    if isinstance(value, Mapping):
        items = {k: _gathered(v, storages, context) for k, v in value.items()}
        # A state dict is an OrderedDict with its modules' versions as an attribute.
        return _with_attributes(type(value)(items), value) if isinstance(value, dict) else items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_gathered(v, storages, context) for v in value))
    if type(value) in (list, tuple):
        return type(value)(_gathered(v, storages, context) for v in value)
    return value


def _with_attributes(new: Any, old: Any) -> Any:
    if hasattr(old, "__dict__"):
        vars(new).update(vars(old))
    return new


def write_file(value: Any, path: Path) -> Path:
    """`torch.save` to a file that is whole or not there."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path
