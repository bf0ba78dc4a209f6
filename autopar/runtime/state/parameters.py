"""Parameters as DTensors: replaced, given another layout in place, and gathered."""

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
    asks_subclasses,
    put_around_collectives,
    reduce_found_inf_over_every_gradient,
    refuse_items_of_unreduced,
    take_in_foreach,
)
from autopar.capture.state.slots import tensor_attributes
from autopar.capture.swap import put_reference, references_of
from autopar.errors import AutoparError
from autopar.ir.layout import Layout, TensorType, replicated
from autopar.runtime.agreement.control import during_any
from autopar.runtime.dtensor import (
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
from autopar.runtime.state.shared_memory import mark_views
from autopar.runtime.state.stage_tensor import StageTensor, owner_of, with_owner
from autopar.runtime.state.storage import install_assignments, set_storage
from autopar.runtime.state.whole_operators import install_whole_operators

ParameterLayouts = Mapping[str, tuple[TensorType, Layout]]
"""Type and layout of each parameter, by name."""

SAMPLES = 1024
"""Elements of each tensor that go into a checksum."""


def distribute_parameters(model: nn.Module, context: MeshContext) -> None:
    """Replace every parameter by a replicated DTensor; no communication, and no change where there is no mesh."""
    if context.mesh is None:
        return
    # These change torch for the whole process, once, however many models there are.
    reduce_found_inf_over_every_gradient()
    refuse_items_of_unreduced()
    install_whole_operators()
    put_around_collectives(during_any)
    take_in_foreach(StageTensor)
    install_assignments()
    install_hook()
    mark_views(model)
    replaced(model, {id(p): distributed(p, context) for p in model.parameters()})


def replaced(model: nn.Module, replacement: Mapping[int, nn.Parameter]) -> None:
    """Put others in the place of parameters, by their identity, so that tied ones stay tied."""
    references = references_of(model)
    # Tables and not setattr: models may define __setattr__.
    for module in model.modules():
        for name, old in module._parameters.items():
            if id(old) in replacement:
                module._parameters[name] = replacement[id(old)]
    # Lists of weights, say, among the attributes hold the very parameters.
    for container, step, tensor, _ in references:
        if id(tensor) in replacement:
            put_reference(container, step, replacement[id(tensor)])


def distributed(old: nn.Parameter, context: MeshContext) -> nn.Parameter:
    """A replicated DTensor of a plain parameter's values; no communication."""
    placements = (Replicate(),) * len(context.axes)
    local = old.detach().contiguous()
    if old.is_meta:  # what a DTensor says of its device it takes from its first local tensor, and keeps
        local = torch.empty((), dtype=old.dtype, device=context.device).expand(old.shape)
    new = nn.Parameter(from_local(local, context, old.shape, placements), requires_grad=old.requires_grad)
    if old.is_meta:
        new._local_tensor = old.detach()  # type: ignore[attr-defined]
    vars(new).update(tensor_attributes(old))  # an optimizer's groups may ask for them
    set_storage(new, plain_type(old.shape, old.dtype), replicated(len(context.axes)), context)
    if old.grad is not None:
        new.grad = from_local(old.grad.contiguous(), context, old.shape, placements)
    return new


def lay_out(
    parameter: torch.Tensor, local: torch.Tensor, type_: TensorType, layout: Layout, context: MeshContext
) -> None:
    """Give a DTensor parameter another local tensor and layout, in place: identity, hooks and references stay.

    The local tensor is without padding.

    A plain parameter (no mesh) gets ``local`` as its data.
    """
    if not isinstance(parameter, DTensor):
        parameter.data = local
        return
    if owner_of(layout) is not None and not asks_subclasses(parameter.device_mesh):
        raise AutoparError(
            f"pipeline stages with torch {torch.__version__}: its operators take a tensor of one stage for one that is "
            "split over the stages, which is silently wrong; install torch 2.12 or newer, or plan without stages "
            '(Search(pins={"stages": 1}))'
        )
    placements = to_placements(type_, layout)
    # Not `parameter.data = ...`: torch's setter leaves the local tensor of a DTensor as it was.
    parameter._local_tensor = local.requires_grad_(parameter.requires_grad).detach()
    parameter._spec = spec_of(context, type_.stored_shape, local.dtype, placements)
    with_owner(parameter, owner_of(layout))
    set_storage(parameter, type_, layout, context)


def slice_replicated(parameter: torch.Tensor, type_: TensorType, layout: Layout, context: MeshContext) -> None:
    """Keep this rank's block of a parameter that is replicated, and of its gradient."""
    if not isinstance(parameter, DTensor):
        return
    gradient = parameter.grad
    parameter.grad = None  # its placements would no longer be the parameter's
    block = stored_block(to_local(parameter).detach(), type_, layout, context.sizes, context.coordinates)
    lay_out(parameter, block, type_, layout, context)
    if gradient is not None:
        part = stored_block(to_local(gradient), type_, layout, context.sizes, context.coordinates)
        parameter.grad = of_layout(part, context, type_, layout)


@contextmanager
def plain_parameters(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Fake plain tensors of global shape in place of DTensor or meta parameters and buffers, for tracing."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Any] = {}
    restore: list[tuple[dict[str, Any], str, Any]] = []
    references = references_of(model)
    with mode:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, old in table.items():
                    if old is None or not (isinstance(old, DTensor) or old.is_meta):
                        continue
                    if id(old) not in fakes:
                        fakes[id(old)] = _fake_like(old, device)
                    restore.append((table, name, old))
                    table[name] = fakes[id(old)]
    # Models keep parameters in attributes, lists and closures of their own, too: those must see the same fakes.
    replaced = [r for r in references if id(r[2]) in fakes]
    try:
        for container, step, original, _ in replaced:
            put_reference(container, step, fakes[id(original)])
        yield
    finally:
        for container, step, original, _ in replaced:
            put_reference(container, step, original)
        for table, name, old in restore:
            table[name] = old


def _fake_like(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A plain tensor or parameter of the same global shape; a fake one under a `FakeTensorMode`."""
    fake = torch.empty(old.shape, dtype=old.dtype, device=device)
    new = nn.Parameter(fake, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else fake
    vars(new).update(tensor_attributes(old))
    return new


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
    data: bytes = flat.cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()
    return data


def gathered(
    tensors: Mapping[str, torch.Tensor], types: ParameterLayouts, context: MeshContext
) -> dict[str, torch.Tensor]:
    """The whole of each tensor, shared ones once; a collective call."""
    by_identity: dict[int, torch.Tensor] = {}
    whole = {}
    for name, tensor in tensors.items():
        if id(tensor) not in by_identity:
            full = full_tensor(on_all_stages(tensor, *types[name], context) if name in types else tensor)
            # A replicated tensor is whole already: the caller must not get the parameter's own memory.
            by_identity[id(tensor)] = full.clone() if full.data_ptr() == to_local(tensor).data_ptr() else full
        whole[name] = by_identity[id(tensor)]
    return whole
