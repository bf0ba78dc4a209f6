"""`ParameterStorage`: how a parameter is stored on the mesh, attached to the parameter; conversion of values to it.

Models are changed by code that knows nothing of meshes: ``parameter.data = value``, ``parameter.grad = value``,
``model.encoder.load_state_dict(state)``, optimizer state from a file. To torch a plain tensor that is assigned like
this is the local part, or an error. Here it is the whole tensor, of which each rank keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch_compat import (
    assign_in_parametrizations,
    convert_assigned,
    convert_in_place,
    copy_parameters_alone,
    refuse_to_pickle_parts,
)
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
from autopar.runtime.state.stage_tensor import OwnerStage, StageTensor, owner_of

_NAME = "autopar_storage"
"""Attribute of a parameter."""


@dataclass(frozen=True, eq=False)
class ParameterStorage:
    """How a parameter is stored.

    Attributes:
        type: of the parameter.
        layout: of the parameter.
        context: this rank's mesh context.
    """

    type: TensorType
    layout: Layout
    context: MeshContext

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterStorage:
        """The same object: copies of the parameter are stored alike, on the same process groups."""
        return self

    def __reduce__(self) -> Any:
        """Pickle as None: process groups belong to this process."""
        return type(None), ()

    @property
    def placements(self) -> Placements:
        """Of the DTensor."""
        return to_placements(self.type, self.layout)

    def matches(self, value: torch.Tensor) -> bool:
        """Whether a tensor is stored like this."""
        if not isinstance(value, DTensor) or tuple(value.placements) != self.placements:
            return False
        # Placements alone do not tell a tensor of one stage from one that is sharded over the stages.
        owner: OwnerStage | None = value.owner_stage if isinstance(value, StageTensor) else None
        return owner == owner_of(self.layout) and value.device_mesh == self.context.mesh

    def converted(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape, stored like this: sliced, or redistributed (a collective call)."""
        if self.matches(value):
            return value
        if isinstance(value, DTensor) and value.device_mesh == self.context.mesh and not isinstance(value, StageTensor):
            return in_layout(value, self.type, self.layout, self.context)
        # A DTensor of another mesh, or of one stage, cannot be redistributed to this one: it goes through the whole.
        whole = full_tensor(value).to(self.context.device)
        block = stored_block(whole, self.type, self.layout, self.context.sizes, self.context.coordinates)
        # Never the caller's memory, which the caller may go on writing to.
        block = block.clone() if block.data_ptr() == whole.data_ptr() else block
        return of_layout(block, self.context, self.type, self.layout)


def set_storage(parameter: torch.Tensor, type_: TensorType, layout: Layout, context: MeshContext) -> None:
    """Attach to a DTensor parameter how it is stored."""
    setattr(parameter, _NAME, ParameterStorage(type_, layout, context))


def storage_of(parameter: torch.Tensor) -> ParameterStorage | None:
    """How a parameter is stored; None for one that is not on a mesh."""
    storage: ParameterStorage | None = getattr(parameter, _NAME, None)
    return storage


def install_assignments() -> None:
    """Let ``.data`` and ``.grad`` of parameters on a mesh take whole tensors, and ``module.to`` keep their storage."""
    convert_assigned(_converted)
    convert_in_place(lambda tensor: storage_of(tensor) is not None)
    assign_in_parametrizations()
    refuse_to_pickle_parts(_unpicklable)
    copy_parameters_alone()


def _unpicklable(tensor: torch.Tensor) -> AutoparError:
    assert isinstance(tensor, DTensor)
    return AutoparError(
        f"a tensor of shape {list(tensor.shape)} that lies on the mesh as {tensor.placements} is pickled, as by "
        "torch.save of a state dict: the file would have this rank's part of it alone. On all ranks call "
        "autopar.checkpoint.torch_save(what, path, model), which writes the file that one device would write; or save "
        "model.full_state_dict(), or tensor.full_tensor()"
    )


def _converted(parameter: torch.Tensor, value: torch.Tensor, what: str) -> torch.Tensor | None:
    """The value to assign instead; None: the parameter is not on a mesh, and torch goes on as usual."""
    storage = storage_of(parameter)
    if storage is None:
        # Of a parameter that is on no mesh, such as an adapter's that is made of others, the whole.
        plain = isinstance(value, DTensor) and not isinstance(parameter, DTensor)
        return full_tensor(value.detach()) if plain else None
    if tuple(value.shape) != tuple(parameter.shape):
        raise AutoparError(
            f"what is assigned to .{what} of a parameter of shape {list(parameter.shape)} has shape "
            f"{list(value.shape)}; assign the whole tensor, and change the shapes of parameters before parallelize()"
        )
    return storage.converted(value.detach())


def load_into(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    """Before ``load_state_dict`` of any module of the model: values of its own parameters, stored as these are."""
    assign = metadata.get("assign_to_params_buffers", False)
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        storage = None if parameter is None else storage_of(parameter)
        if parameter is None or storage is None:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            continue  # torch reports what is missing or of another shape
        with torch.no_grad():
            # The hook of the outer module, or state_dict() itself, may have put the parameter's own memory here.
            if not _is_alias(value, parameter):
                _write(parameter, storage.converted(value.detach()))
            # torch then copies the parameter onto itself, or with assign=True puts this one in its place.
            own = parameter.detach()
            state[prefix + name] = nn.Parameter(own, parameter.requires_grad) if assign else own
        if assign:
            set_storage(state[prefix + name], storage.type, storage.layout, storage.context)


def _is_alias(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    own, other = to_local(parameter), to_local(value)
    return isinstance(value, DTensor) and not own.is_meta and own.data_ptr() == other.data_ptr()


def _write(parameter: torch.Tensor, part: torch.Tensor) -> None:
    """Write a part into a parameter; of a parameter on the meta device it becomes the memory."""
    assert isinstance(parameter, DTensor)
    if parameter._local_tensor.is_meta:
        parameter._local_tensor = to_local(part).to(parameter.dtype)
    else:
        parameter._local_tensor.copy_(to_local(part))


def refuse_foreign_parameters(
    parameters: Mapping[str, torch.Tensor],
    context: MeshContext,
    known: Callable[[str], tuple[TensorType, Layout] | None],
) -> None:
    """Refuse parameters that were put into a model on a mesh after `autopar.parallelize`.

    Args:
        parameters: of a model, by name.
        context: this rank's mesh context.
        known: type and layout of a parameter by name; None for a name that the model did not have.

    Raises:
        AutoparError: there is one that is not stored as the model's are, or has another shape.
    """
    if context.mesh is None:
        return
    for name, parameter in parameters.items():
        storage, own = storage_of(parameter), known(name)
        if storage is not None and (own is None or tuple(parameter.shape) == own[0].stored_shape):
            continue
        whole = (plain_type(parameter.shape, parameter.dtype), replicated(len(context.axes)))
        # `module.half()` makes new parameters of those that were there: DTensors as before, without the attribute.
        if storage is None and ParameterStorage(*(own or whole), context).matches(parameter):
            set_storage(parameter, *(own or whole), context)
            continue
        # These are taken, and get their gradients.
        call = ", or torch.func.functional_call with nn.Parameter(value)"
        other = "" if isinstance(parameter, nn.Parameter) else call
        kind = "as a plain tensor" if not isinstance(parameter, DTensor) else f"of shape {list(parameter.shape)}"
        raise AutoparError(
            f"parameter {name!r} was put into the model after parallelize(), {kind}, and is not stored as a parameter "
            "of the mesh: to change values, use load_state_dict, load_full_state_dict or parameter.data = tensor"
            f"{other}; to replace or resize parameters or modules, do it before parallelize(), or build the changed "
            "model anew, parallelize() that, and load_full_state_dict() what full_state_dict() of this one gave"
        )
