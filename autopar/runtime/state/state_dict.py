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
from autopar.runtime.state.parameters import ParameterLayouts, lay_out


def plain_shards(placements: Placements) -> Placements:
    """Placements that `torch.distributed.checkpoint` saves and loads: no `_StridedShard`."""
    return tuple(Shard(p.dim) if isinstance(p, StridedShard) else p for p in placements)


def savable(tensor: DTensor, known: tuple[TensorType, Layout] | None, context: MeshContext) -> torch.Tensor:
    """The tensor itself, or the same in plain shards and on every stage; a collective call in the latter case."""
    # A checkpoint must not depend on the stages: another mesh may load it.
    if known is not None and not is_everywhere(known[1]):
        tensor = on_all_stages(tensor, *known, context)  # type: ignore[assignment]
    return redistribute(tensor, context, plain_shards(tuple(tensor.placements)))


def load_full(
    module: nn.Module,
    own: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    context: MeshContext,
    types: ParameterLayouts,
) -> None:
    """Fill a module's tensors from full ones, tied names included.

    Raises:
        AutoparError: names are missing or unexpected, or a shape differs.
    """
    # A file may have a tied parameter under one of its names alone.
    present = {id(own[n]) for n in state if n in own}
    missing = [n for n in own if n not in state and id(own[n]) not in present]
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
                _fill(module, name, tensor, value, context, types)
            elif tensor.is_meta:
                materialize_plain(module, name, value.to(context.device))
            else:
                tensor.copy_(value)


def _fill(
    module: nn.Module, name: str, tensor: DTensor, value: torch.Tensor, context: MeshContext, types: ParameterLayouts
) -> None:
    """This rank's block of a full tensor into a DTensor; one on the meta device gets memory."""
    type_, layout = types.get(name) or _type_of_tied(module, tensor, types) or _replicated(tensor, context)
    block = stored_block(value, type_, layout, context.sizes, context.coordinates)
    if tensor._local_tensor.is_meta:
        # Neither slicing nor .to() copies a whole tensor: the parameter must not share memory with the user's.
        fresh = block.to(context.device, tensor.dtype)
        lay_out(tensor, fresh.clone() if fresh is value else fresh, type_, layout, context)
    else:
        tensor._local_tensor.copy_(block)


def _type_of_tied(module: nn.Module, tensor: torch.Tensor, types: ParameterLayouts) -> tuple[TensorType, Layout] | None:
    """The type of a tied parameter, which is known under its first name."""
    name = next((n for n, p in module.named_parameters() if p is tensor), "")
    return types.get(name)


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter that has several, by its others."""
    first = {id(p): n for n, p in module.named_parameters()}
    return {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False) if first[id(p)] != n}


def _replicated(tensor: torch.Tensor, context: MeshContext) -> tuple[TensorType, Layout]:
    return plain_type(tensor.shape, tensor.dtype), replicated(len(context.axes))


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
    module: nn.Module, state: dict[str, Any], prefix: str, context: MeshContext, types: ParameterLayouts
) -> None:
    """Before `load_state_dict`: bring each value into its parameter's layout.

    Full plain tensors are sliced, DTensors redistributed, parameters on the meta device get memory.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    # Under a pipeline placements do not say where a tied parameter is, and its type is known by its first name.
    types = {**types} | {n: types[first] for n, first in _first_names(module).items() if first in types}
    with torch.no_grad():
        for name, parameter in named.items():
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(parameter.shape):
                continue  # torch reports what is missing or of another shape
            if not isinstance(parameter, DTensor):
                if parameter.is_meta:
                    materialize_plain(module, name, full_tensor(value).to(context.device))
                continue
            if isinstance(value, DTensor) and not parameter._local_tensor.is_meta:
                known = types.get(name)
                placements = tuple(parameter.placements)
                moved = in_layout(value, *known, context) if known else redistribute(value, context, placements)
                parameter._local_tensor.copy_(to_local(moved))
            else:
                _fill(module, name, parameter, full_tensor(value), context, types)
            # Loading goes on in torch, which reports missing and unexpected names: it copies this onto itself.
            state[prefix + name] = parameter.detach()


def _some(names: list[str]) -> str:
    return (", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")) or "nothing"
