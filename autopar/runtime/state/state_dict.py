"""State dicts: what checkpoints can hold, and values from full or distributed tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from autopar._torch_compat import StridedShard
from autopar.errors import AutoparError
from autopar.ir.layout import Layout, TensorType, is_everywhere, replicated
from autopar.runtime.dtensor import (
    Placements,
    full_tensor,
    in_layout,
    on_all_stages,
    plain_type,
    redistribute,
    stored_block,
    to_local,
)
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.parameters import lay_out

BoundaryLayouts = Mapping[str, tuple[TensorType, Layout]]


def plain_shards(placements: Placements) -> Placements:
    """Placements that `torch.distributed.checkpoint` saves and loads: no `_StridedShard`."""
    return tuple(Shard(p.dim) if isinstance(p, StridedShard) else p for p in placements)


def savable(tensor: DTensor, known: tuple[TensorType, Layout] | None, place: MeshContext) -> torch.Tensor:
    """The tensor itself, or the same in plain shards and on every stage; a collective call in the latter case."""
    if known is not None and not is_everywhere(known[1]):
        tensor = on_all_stages(tensor, *known, place)  # type: ignore[assignment]
    return redistribute(tensor, place, plain_shards(tuple(tensor.placements)))


def load_full(
    module: nn.Module,
    own: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    place: MeshContext,
    types: BoundaryLayouts,
) -> None:
    """Fill a module's tensors from full ones, tied names included.

    Raises:
        AutoparError: names are missing or unexpected, or a shape differs.
    """
    given = {id(own[n]) for n in state if n in own}  # a file may have a tied parameter under one of its names
    missing = [n for n in own if n not in state and id(own[n]) not in given]
    unexpected = [n for n in state if n not in own]
    wrong = [n for n in own if n in state and tuple(own[n].shape) != tuple(state[n].shape)]
    if missing or unexpected:
        raise AutoparError(
            f"the state dict does not fit: missing {_some(missing)}, unexpected {_some(unexpected)}; "
            "it must have the names of the original model's state_dict(), of tied parameters at least one"
        )
    if wrong:
        n = wrong[0]
        raise AutoparError(
            f"{n!r} has shape {list(state[n].shape)}, the model's {list(own[n].shape)}: another configuration"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            if name not in state:
                continue
            value = full_tensor(state[name])
            if isinstance(tensor, DTensor):
                _fill(module, name, tensor, value, place, types)
            elif tensor.is_meta:
                materialize_plain(module, name, value.to(place.device))
            else:
                tensor.copy_(value)


def _fill(
    module: nn.Module, name: str, tensor: DTensor, value: torch.Tensor, place: MeshContext, types: BoundaryLayouts
) -> None:
    """This rank's block of a full tensor into a DTensor; one on the meta device gets memory."""
    type_, layout = types.get(name) or _by_tensor(module, tensor, types) or _replicated(tensor, place)
    block = stored_block(value, type_, layout, place.sizes, place.coordinates)
    if tensor._local_tensor.is_meta:
        fresh = block.to(place.device, tensor.dtype)
        lay_out(tensor, fresh.clone() if fresh is value else fresh, type_, layout, place)
    else:
        tensor._local_tensor.copy_(block)


def _by_tensor(module: nn.Module, tensor: torch.Tensor, types: BoundaryLayouts) -> tuple[TensorType, Layout] | None:
    """The type of a tied parameter, which is known under its first name."""
    name = next((n for n, p in module.named_parameters() if p is tensor), "")
    return types.get(name)


def _replicated(tensor: torch.Tensor, place: MeshContext) -> tuple[TensorType, Layout]:
    return plain_type(tensor.shape, tensor.dtype), replicated(len(place.axes))


def materialize_plain(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Replace a plain tensor on the meta device, under this name and every other."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    table = "_parameters" if leaf in owner._parameters else "_buffers"
    old: torch.Tensor | None = getattr(owner, table)[leaf]
    new = nn.Parameter(value.clone(), old.requires_grad) if isinstance(old, nn.Parameter) else value.clone()
    for each in module.modules():
        for key, tensor in getattr(each, table).items():
            if tensor is old:
                getattr(each, table)[key] = new


def prepare_load(
    module: nn.Module, state: dict[str, Any], prefix: str, place: MeshContext, types: BoundaryLayouts
) -> None:
    """Before `load_state_dict`: bring each value into its parameter's layout.

    Full plain tensors are cut, DTensors redistributed, parameters on the meta device get memory.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in named.items():
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(parameter.shape):
                continue  # torch reports what is missing or of another shape
            if not isinstance(parameter, DTensor):
                if parameter.is_meta:
                    materialize_plain(module, name, full_tensor(value).to(place.device))
                continue
            if isinstance(value, DTensor) and not parameter._local_tensor.is_meta:
                known = types.get(name)
                same = tuple(parameter.placements)
                moved = in_layout(value, *known, place) if known else redistribute(value, place, same)
                parameter._local_tensor.copy_(to_local(moved))
            else:
                _fill(module, name, parameter, full_tensor(value), place, types)
            state[prefix + name] = parameter.detach()  # copied onto itself by torch, which then finds every name


def _some(names: list[str]) -> str:
    return (", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")) or "nothing"
