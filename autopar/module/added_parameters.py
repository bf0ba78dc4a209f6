"""Parameters that are put into a parallel model: of adapters, of layers that a script adds or makes anew."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.capture.state.slots import tensor_attributes
from autopar.errors import RankError
from autopar.ir.layout import replicated
from autopar.runtime.dtensor import full_tensor, plain_type, to_placements
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.optimizer_layouts import optimizers_of
from autopar.runtime.state.parameters import ParameterLayouts, checksum, distributed, replaced, slice_replicated
from autopar.runtime.state.stage_tensor import StageTensor
from autopar.runtime.state.storage import storage_of


def take_added(
    model: nn.Module, parameters: Mapping[str, torch.Tensor], types: ParameterLayouts, context: MeshContext
) -> bool:
    """Take those that are not on the mesh as the model's are, from optimizers, too; whether there were some.

    One in the place of another of its shape gets that one's layout. Others are replicated: the first graph that reads
    them decides their layouts. A collective call where there are some.

    Args:
        model: whose.
        parameters: of it, by name.
        types: types and layouts of those that have had one; empty before layouts are decided.
        context: this rank's mesh context.

    Raises:
        RankError: their values differ between ranks.
    """
    # Of a pipeline's stages each has its own; workers exchange what they have laid out.
    if (
        context.mesh is None
        or context.workers is not None
        or any(isinstance(p, StageTensor) for p in parameters.values())
    ):
        return False
    new = {n: p for n, p in parameters.items()
           if isinstance(p, nn.Parameter) and _is_new(n, p, types, context)}  # fmt: skip
    if not new:
        return False
    _require_same({n: p for n, p in new.items() if not isinstance(p, DTensor)}, context)
    optimizers, replacement = optimizers_of(new.values()), {}
    for name, parameter in new.items():
        taken = distributed(_whole(parameter) if isinstance(parameter, DTensor) else parameter, context)
        if name in types:
            slice_replicated(taken, *types[name], context)
        replacement[id(parameter)] = taken
    replaced(model, replacement)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replacement.get(id(p), p) for p in group["params"]]
        for old in [p for p in optimizer.state if id(p) in replacement]:
            optimizer.state[replacement[id(old)]] = optimizer.state.pop(old)
    return True


def _whole(parameter: nn.Parameter) -> nn.Parameter:
    """A plain parameter of the values, gradient and attributes of one on the mesh; a collective call."""
    plain = nn.Parameter(full_tensor(parameter.detach()), parameter.requires_grad)
    vars(plain).update(tensor_attributes(parameter))
    if parameter.grad is not None:
        plain.grad = full_tensor(parameter.grad)
    return plain


def _is_new(name: str, parameter: nn.Parameter, types: ParameterLayouts, context: MeshContext) -> bool:
    if storage_of(parameter) is not None or parameter.device.type != context.device.type:
        return False
    known = types.get(name)
    if known is not None and tuple(parameter.shape) != known[0].stored_shape:
        return False
    if not isinstance(parameter, DTensor):
        return True
    # `module.half()` makes others of those that were there, which lie as these do.
    layout = known or (plain_type(parameter.shape, parameter.dtype), replicated(len(context.axes)))
    return parameter.device_mesh == context.mesh and tuple(parameter.placements) != to_placements(*layout)


def _require_same(new: Mapping[str, torch.Tensor], context: MeshContext) -> None:
    """Ranks must have added the same values.

    Raises:
        RankError: they have not.
    """
    every = context.gather(checksum(new), "the values of parameters that were added to the model")
    rank = next((r for r, found in enumerate(every) if found != every[0]), None)
    if rank is not None:
        raise RankError(
            f"parameters were added to the model after parallelize() ({next(iter(new))!r} is the first of {len(new)}), "
            f"and rank {rank} has other values, or other ones, than rank 0: add the same on every rank, after "
            "torch.manual_seed with the same seed"
        )
