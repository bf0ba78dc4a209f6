"""DTensors: their metadata, and what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def local_shape_of(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> tuple[int, ...]:
    """Shape of this rank's part of a DTensor, as torch cuts it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tuple(shape), mesh, tuple(placements))[0])


def dtensor_overloads() -> frozenset[str]:
    """Names of the operator overloads for which `torch.distributed.tensor` has a sharding rule."""
    from torch.distributed.tensor import DTensor

    rules = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    return frozenset(str(op) for table in tables for op in getattr(rules, table, ()))


def reduce_found_inf_over_every_gradient() -> None:
    """Make `torch.amp.GradScaler` skip a step on every rank if a gradient overflows on one.

    Torch reduces what it found over the axes on which the first of several DTensor gradients is split, and over no
    others: where layouts differ, or replicas do, some ranks would skip the step and others take it.
    """
    from torch.distributed.tensor import DTensor, Partial

    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def every_gradient(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients, found, scale = args
        call([g._local_tensor if isinstance(g, DTensor) else g for g in gradients], found, scale, **kwargs)
        for mesh in dict.fromkeys(g.device_mesh for g in gradients if isinstance(g, DTensor)):
            own = DTensor.from_local(found, mesh, [Partial("max")] * mesh.ndim, run_check=False)
            found.copy_(own.full_tensor())

    handlers[unscale] = every_gradient


def take_in_foreach(kind: type[torch.Tensor]) -> None:
    """Let ``torch.optim`` and `torch.nn.utils.clip_grad_norm_` take a class of tensors in lists, as they do DTensors.

    They go by the exact class: one that is in none of torch's lists gets a loop over single tensors, and no fused step.
    Once: a later call changes nothing.
    """
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_norms

    lists: tuple[list[Any], ...] = (of_optimizers, of_norms)
    for known in lists:
        if kind not in known:
            known.append(kind)


def spec_in(mesh: Any, placements: Sequence[Any], meta: TensorMeta | None) -> DTensorSpec:
    """The metadata of a DTensor whose `StridedShard` say which factor of a dim is split.

    Torch would take them for the order of two splits of one dim; 2.11 fails where they are not.
    """
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, use_strided_shard_as_shard_order=False)


def redistributed(tensor: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """A DTensor in other placements, without autograd; a collective call. As ``DTensor.redistribute``, by `spec_in`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    meta = tensor._spec.tensor_meta
    own, target = spec_in(mesh, tensor.placements, meta), spec_in(mesh, placements, meta)
    local = redistribute_local_tensor(tensor._local_tensor, own, target)
    return DTensor(local, target, requires_grad=False)  # type: ignore[no-untyped-call]


def convert_assigned(convert: Callable[[Any, torch.Tensor, str], torch.Tensor | None]) -> None:
    """Let ``convert(tensor, value, name)`` say what is assigned to ``.data`` and ``.grad`` of a DTensor.

    Torch takes any tensor of the global shape for ``.data`` and leaves the local tensor, and so the values, as they
    were; a plain tensor as ``.grad`` fails in the next operator on it, or is taken for this rank's part.

    Args:
        convert: None for a tensor that is to be assigned as torch does.
    """
    from torch.distributed.tensor import DTensor

    data: Any = torch.Tensor.data
    grad: Any = torch.Tensor.grad

    def set_data(tensor: Any, value: torch.Tensor) -> None:
        converted = convert(tensor, value, "data")
        if converted is None or converted.dtype != tensor.dtype:
            data.__set__(tensor, value if converted is None else converted)
        if converted is not None:
            tensor._local_tensor, tensor._spec = converted._local_tensor, converted._spec  # type: ignore[attr-defined]

    def set_grad(tensor: Any, value: torch.Tensor | None) -> None:
        converted = None if value is None else convert(tensor, value, "grad")
        grad.__set__(tensor, value if converted is None else converted)

    DTensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    DTensor.grad = property(grad.__get__, set_grad, grad.__delete__)  # type: ignore[assignment]


def refuse_items_of_unreduced() -> None:
    """Make ``item()`` of a DTensor that is still to be reduced an error.

    Torch gives each rank its own term: ``gradient.norm().item()`` of a gradient that is split is silently wrong.
    """
    from torch.distributed.tensor import DTensor

    def item(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (tensor,) = args
        sizes = tensor.device_mesh.shape
        if any(p.is_partial() and n > 1 for p, n in zip(tensor.placements, sizes, strict=True)):
            raise RuntimeError(
                f"item() of a tensor that lies as {tensor.placements} would be this rank's term of it: call "
                "full_tensor() first, on all ranks"
            )
        return call(tensor._local_tensor, **kwargs)

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = item


def context_parallel_internals() -> Any:
    """The module of torch's ``context_parallel``: its rings, the table of its kernels, and how keys go round."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention
