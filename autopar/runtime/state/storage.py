"""`Stored`: how a parameter is stored, which the parameter itself carries, and values that are brought into it.

Models are changed by code that knows nothing of meshes: ``parameter.data = value``, ``parameter.grad = value``,
``model.encoder.load_state_dict(state)``, optimizer state from a file. To torch a plain tensor that is assigned so is
this rank's part, or nothing at all. Here it is the whole, of which this rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch_compat import convert_assigned
from autopar.errors import AutoparError
from autopar.ir.layout import Layout, TensorType, replicated
from autopar.runtime.dtensor import (
    Placements,
    full_tensor,
    in_layout,
    of_layout,
    plain_type,
    stored_block,
    to_local,
    to_placements,
)
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.stage_tensor import OwnerStage, StageTensor, home_of

_NAME = "autopar_stored"
"""Attribute of a parameter."""


@dataclass(frozen=True, eq=False)
class Stored:
    """How a parameter is stored.

    Attributes:
        type: of the parameter.
        layout: of the same.
        place: where this rank is.
    """

    type: TensorType
    layout: Layout
    place: MeshContext

    def __deepcopy__(self, memo: dict[int, Any]) -> Stored:
        """Copies of the parameter are stored alike."""
        return self

    def __reduce__(self) -> Any:
        """Parameters are saved without: process groups belong to this process."""
        return type(None), ()

    @property
    def placements(self) -> Placements:
        """Of the DTensor."""
        return to_placements(self.type, self.layout)

    def holds(self, value: torch.Tensor) -> bool:
        """Whether a tensor is stored so."""
        if not isinstance(value, DTensor) or tuple(value.placements) != self.placements:
            return False
        home: OwnerStage | None = value.home if isinstance(value, StageTensor) else None
        return home == home_of(self.layout) and value.device_mesh == self.place.mesh

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape stored so: a whole one is cut, a DTensor moved (a collective call)."""
        if self.holds(value):
            return value
        if isinstance(value, DTensor) and value.device_mesh == self.place.mesh and not isinstance(value, StageTensor):
            return in_layout(value, self.type, self.layout, self.place)
        whole = full_tensor(value).to(self.place.device)
        block = stored_block(whole, self.type, self.layout, self.place.sizes, self.place.coordinates)
        block = block.clone() if block.data_ptr() == whole.data_ptr() else block
        return of_layout(block, self.place, self.type, self.layout)


def mark(parameter: torch.Tensor, type_: TensorType, layout: Layout, place: MeshContext) -> None:
    """Let a DTensor parameter carry how it is stored."""
    setattr(parameter, _NAME, Stored(type_, layout, place))


def stored_as(parameter: torch.Tensor) -> Stored | None:
    """How a parameter is stored; None for one that is not on a mesh."""
    found: Stored | None = getattr(parameter, _NAME, None)
    return found


def install_assignments() -> None:
    """Let ``.data`` and ``.grad`` of parameters on a mesh take whole tensors."""
    convert_assigned(_converted)


def _converted(parameter: torch.Tensor, value: torch.Tensor, what: str) -> torch.Tensor | None:
    """What is to be assigned instead; None: the parameter is none of ours."""
    stored = stored_as(parameter)
    if stored is None:
        return None
    if tuple(value.shape) != tuple(parameter.shape):
        raise AutoparError(
            f"what is assigned to .{what} of a parameter of shape {list(parameter.shape)} has shape "
            f"{list(value.shape)}; assign the whole tensor, and change the shapes of parameters before parallelize()"
        )
    return stored.part(value.detach())


def load_into(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    """Before ``load_state_dict`` of any module of the model: values of its own parameters, stored as these are."""
    assign = metadata.get("assign_to_params_buffers", False)
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        stored = None if parameter is None else stored_as(parameter)
        if parameter is None or stored is None or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            continue  # torch reports what is missing or of another shape
        with torch.no_grad():
            if not _is_alias(value, parameter):
                _take(parameter, stored.part(value.detach()))
            taken = parameter.detach()
            state[prefix + name] = nn.Parameter(taken, parameter.requires_grad) if assign else taken
        if assign:
            mark(state[prefix + name], stored.type, stored.layout, stored.place)


def _is_alias(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    mine, other = to_local(parameter), to_local(value)
    return isinstance(value, DTensor) and not mine.is_meta and mine.data_ptr() == other.data_ptr()


def _take(parameter: torch.Tensor, part: torch.Tensor) -> None:
    """Write a part into a parameter, or let it be the memory of one that has none."""
    assert isinstance(parameter, DTensor)
    if parameter._local_tensor.is_meta:
        parameter._local_tensor = to_local(part).to(parameter.dtype)
    else:
        parameter._local_tensor.copy_(to_local(part))


def refuse_strangers(
    model: nn.Module, place: MeshContext, known: Callable[[str], tuple[TensorType, Layout] | None]
) -> None:
    """Parameters that were put into a model on a mesh after `autopar.parallelize`.

    Raises:
        AutoparError: there is one that is not stored as the model's are, or has another shape.
    """
    if place.mesh is None:
        return
    for name, parameter in model.named_parameters():
        stored, own = stored_as(parameter), known(name)
        if stored is not None and (own is None or tuple(parameter.shape) == own[0].stored_shape):
            continue
        whole = (plain_type(parameter.shape, parameter.dtype), replicated(len(place.axes)))
        if stored is None and Stored(*(own or whole), place).holds(parameter):
            mark(parameter, *(own or whole), place)  # made of one that was there, as `module.half()` does
            continue
        kind = "as a plain tensor" if not isinstance(parameter, DTensor) else f"of shape {list(parameter.shape)}"
        raise AutoparError(
            f"parameter {name!r} was put into the model after parallelize(), {kind}, and is not stored as a parameter "
            "of the mesh: to change values, use load_state_dict, load_full_state_dict or parameter.data = tensor; to "
            "replace or resize parameters or modules, do it before parallelize(), or build the changed model anew, "
            "parallelize() that, and load_full_state_dict() what full_state_dict() of this one gave"
        )
