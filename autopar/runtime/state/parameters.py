"""Parameters as DTensors: put in place of the plain ones, laid out anew in place, and gathered again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch_compat import (
    FakeTensorMode,
    put_around_collectives,
    reduce_found_inf_over_every_gradient,
    refuse_items_of_unreduced,
)
from autopar.capture.state.slots import tensor_attributes
from autopar.capture.swap import put_reference, references_of
from autopar.ir.layout import Layout, TensorType, replicated
from autopar.runtime.agreement.control import during_any
from autopar.runtime.dtensor import (
    Placements,
    from_local,
    full_tensor,
    of_layout,
    on_all_stages,
    plain_type,
    spec_of,
    stored_block,
    to_local,
    to_placements,
)
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.optimizer_layouts import install_hook
from autopar.runtime.state.stage_tensor import home_of, staged
from autopar.runtime.state.storage import install_assignments, mark

BoundaryLayouts = Mapping[str, tuple[TensorType, Layout]]

SAMPLES = 1024
"""Elements of each tensor that go into a checksum."""


def distribute_parameters(model: nn.Module, place: MeshContext) -> None:
    """Put a replicated DTensor around every parameter; no communication, and no change where there is no mesh."""
    if place.mesh is None:
        return
    reduce_found_inf_over_every_gradient()
    refuse_items_of_unreduced()
    put_around_collectives(during_any)
    install_assignments()
    install_hook()
    placements = (Replicate(),) * len(place.axes)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is None:
                continue
            if id(old) not in made:
                made[id(old)] = _distributed(old, place, placements)
            module._parameters[name] = made[id(old)]


def _distributed(old: nn.Parameter, place: MeshContext, placements: Placements) -> nn.Parameter:
    local = old.detach().contiguous()
    if old.is_meta:  # what a DTensor says of its device it takes from its first local tensor, and keeps
        local = torch.empty((), dtype=old.dtype, device=place.device).expand(old.shape)
    new = nn.Parameter(from_local(local, place, old.shape, placements), requires_grad=old.requires_grad)
    if old.is_meta:
        new._local_tensor = old.detach()  # type: ignore[attr-defined]
    vars(new).update(tensor_attributes(old))  # an optimizer's groups may ask for them
    mark(new, plain_type(old.shape, old.dtype), replicated(len(place.axes)), place)
    if old.grad is not None:
        new.grad = from_local(old.grad.contiguous(), place, old.shape, placements)
    return new


def lay_out(
    parameter: torch.Tensor, local: torch.Tensor, type_: TensorType, layout: Layout, place: MeshContext
) -> None:
    """Give a DTensor parameter another local tensor and layout, in place: identity, hooks and references stay.

    The local tensor is without padding.

    A plain parameter (no mesh) gets ``local`` as its data.
    """
    if not isinstance(parameter, DTensor):
        parameter.data = local
        return
    placements = to_placements(type_, layout)
    parameter._local_tensor = local.requires_grad_(parameter.requires_grad).detach()
    parameter._spec = spec_of(place, type_.stored_shape, local.dtype, placements)
    staged(parameter, home_of(layout))
    mark(parameter, type_, layout, place)


def slice_replicated(parameter: torch.Tensor, type_: TensorType, layout: Layout, place: MeshContext) -> None:
    """Keep this rank's block of a parameter that is replicated, and of its gradient."""
    if not isinstance(parameter, DTensor):
        return
    gradient = parameter.grad
    parameter.grad = None
    block = stored_block(to_local(parameter).detach(), type_, layout, place.sizes, place.coordinates)
    lay_out(parameter, block, type_, layout, place)
    if gradient is not None:
        part = stored_block(to_local(gradient), type_, layout, place.sizes, place.coordinates)
        parameter.grad = of_layout(part, place, type_, layout)


@contextmanager
def plain_parameters(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Fake plain tensors of global shape in place of DTensor or meta parameters and buffers, for tracing."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Any] = {}
    restore: list[tuple[dict[str, Any], str, Any]] = []
    references = references_of(model)
    with mode:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, old in table.items():
                    if old is None or not (isinstance(old, DTensor) or old.is_meta):
                        continue
                    if id(old) not in made:
                        fake = torch.empty(old.shape, dtype=old.dtype, device=device)
                        is_parameter = isinstance(old, nn.Parameter)
                        made[id(old)] = nn.Parameter(fake, requires_grad=old.requires_grad) if is_parameter else fake
                        vars(made[id(old)]).update(tensor_attributes(old))
                    restore.append((table, name, old))
                    table[name] = made[id(old)]
    held = [r for r in references if id(r[2]) in made]
    try:
        for container, step, original, _ in held:
            put_reference(container, step, made[id(original)])
        yield
    finally:
        for container, step, original, _ in held:
            put_reference(container, step, original)
        for table, name, old in restore:
            table[name] = old


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of up to `SAMPLES` elements of each tensor, the same for equal tensors in every process."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        flat = to_local(tensor).detach().reshape(-1)
        if not flat.is_meta:
            digest.update(name.encode() + _bytes(flat[:: max(1, flat.numel() // SAMPLES)]))
    return digest.hexdigest()[:16]


def contents(tensors: list[torch.Tensor]) -> str:
    """A hash of all elements."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_bytes(tensor.detach().reshape(-1)))
    return digest.hexdigest()[:16]


def _bytes(flat: torch.Tensor) -> bytes:
    data: bytes = flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return data


def gathered(
    tensors: Mapping[str, torch.Tensor], types: BoundaryLayouts, place: MeshContext
) -> dict[str, torch.Tensor]:
    """The whole of each tensor, shared ones once; a collective call."""
    seen: dict[int, torch.Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            full = full_tensor(on_all_stages(tensor, *types[name], place) if name in types else tensor)
            seen[id(tensor)] = full.clone() if full.data_ptr() == to_local(tensor).data_ptr() else full
        found[name] = seen[id(tensor)]
    return found
