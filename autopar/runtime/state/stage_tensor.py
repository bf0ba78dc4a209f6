"""`StageTensor`: a parameter of a pipeline, its gradient, and what an optimizer makes of them.

To torch such a tensor is a DTensor on the whole mesh that is split along the axis of the stages; but the devices of one
stage hold all of it, and the local tensors of the others are empty. Torch computes element by element with it as with
any DTensor, which is what optimizers do, and adds norms up. Whatever else it would compute takes the split by its word,
and is wrong, some of it in silence. So here an operator either is one of these, or gets the tensor from the devices
that hold it, on those of every stage: as a collective call, as with any DTensor. What would write into such a copy is
an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch_compat import DTensorSpec, local_shape_of
from autopar.errors import AutoparError
from autopar.ir.layout import At, Layout
from autopar.runtime.agreement.control import during_any

aten = torch.ops.aten

_ELEMENTWISE = frozenset(
    (
        "alias", "clone", "copy_", "detach", "detach_", "fill_", "lift_fresh", "zero_", "_to_copy", "empty_like",
        "full_like", "ones_like", "rand_like", "randn_like", "zeros_like", "bernoulli_", "normal_", "uniform_",
        "is_pinned", "is_same_size", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_",
        "_amp_foreach_non_finite_check_and_unscale_",
    )
)  # fmt: skip
"""Operators that look at each element alone, beside those that torch says so of."""

_FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


class OwnerStage(NamedTuple):
    """Where a tensor is: the index of the mesh axis of the stages, and the coordinate of those that hold it."""

    axis: int
    coordinate: int


class StageTensor(DTensor):
    """See the module.

    Attributes:
        home: where it is.
        plain: the same as a DTensor.
    """

    home: OwnerStage
    plain: DTensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator that takes such a tensor."""
        kwargs = kwargs or {}
        if func in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar) and _is_summed(args, kwargs):
            return func(*_map(args, _counted), **kwargs)
        if func is aten.sum.default:
            return func(*_map(args, _plain), **kwargs)
        groups = _groups(func, args, kwargs) if _kind(func).elementwise else None
        if groups is not None and None not in groups and _kind(func).here and _written_here(func, args, kwargs):
            return _result_of_writing(func, args, kwargs)
        if groups is not None:
            return _elementwise(func, args, kwargs, groups)
        _refuse_writes(func, args, kwargs)
        return func(*_map(args, _whole), **_map(kwargs, _whole))

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As a DTensor's; what is split along the axis of the stages stays where it is."""
        placements = kwargs.get("placements", args[1] if len(args) > 1 else None)
        if placements is not None and tuple(placements) == tuple(self.placements):
            return self
        whole: DTensor = _GatherStages.apply(self)  # type: ignore[no-untyped-call]
        return whole.redistribute(*args, **kwargs)


def home_of(layout: Layout) -> OwnerStage | None:
    """Where a tensor of this layout is; None: on the devices of every stage."""
    return next((OwnerStage(axis, p.index) for axis, p in enumerate(layout) if isinstance(p, At)), None)


def staged(tensor: DTensor, home: OwnerStage | None) -> DTensor:
    """The same object, as a tensor that one stage holds, or as any other."""
    tensor.__class__ = DTensor if home is None else StageTensor
    tensor.__dict__.pop("plain", None)
    if home is not None:
        tensor.home = home  # type: ignore[attr-defined]
    return tensor


class _GatherStages(torch.autograd.Function):
    """From the devices of one stage to those of all, and of the gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: StageTensor) -> torch.Tensor:
        ctx.home, ctx.spec = tensor.home, tensor._spec
        return _whole(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return staged(_part(gradient, ctx.home, ctx.spec), ctx.home)


def _map(value: Any, function: Any) -> Any:
    """``value`` with ``function`` applied to every staged tensor in it."""
    if isinstance(value, StageTensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, function) for k, v in value.items()}
    return value


def _plain(tensor: StageTensor) -> DTensor:
    """What torch takes it for, made once for as long as it stays where it is."""
    known: DTensor | None = getattr(tensor, "plain", None)
    if known is None or known._local_tensor is not tensor._local_tensor or known._spec is not tensor._spec:
        known = tensor.plain = _like(tensor._local_tensor, tensor._spec)
    return known


def _like(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _counted(tensor: StageTensor) -> DTensor:
    """For norms: devices that have nothing have a zero, since the largest of no elements is an error."""
    local = tensor._local_tensor
    return _plain(tensor) if local.numel() else _like(local.new_zeros((1,) * local.ndim), tensor._spec)


def _whole(tensor: StageTensor) -> DTensor:
    """The tensor on the devices of every stage; a collective call."""
    mesh, home = tensor.device_mesh, tensor.home
    placements = tuple(Replicate() if i == home.axis else p for i, p in enumerate(tensor.placements))
    local = tensor._local_tensor
    if not _holds(mesh, home):
        local = local.new_empty(local_shape_of(tensor.shape, mesh, placements))
    local = local.contiguous()
    with during_any("an operator of a parameter that one stage holds"):
        dist.broadcast(local, group=mesh.get_group(home.axis), group_src=home.coordinate)
    return _like(local, DTensorSpec(mesh, placements, tensor_meta=tensor._spec.tensor_meta))


def _part(tensor: DTensor, home: OwnerStage, spec: DTensorSpec) -> DTensor:
    """What a stage's devices hold of a DTensor that lies in any way."""
    mesh = spec.mesh
    inside = [Replicate() if i == home.axis else p for i, p in enumerate(spec.placements)]
    local = tensor.redistribute(mesh, inside)._local_tensor
    return _like(local if _holds(mesh, home) else local[:0], spec)


def _holds(mesh: DeviceMesh, home: OwnerStage) -> bool:
    """Whether this device does."""
    return mesh.get_local_rank(home.axis) == home.coordinate


def _is_summed(args: Any, kwargs: Any) -> bool:
    """Whether a norm is that of all elements, and devices that have none do not change it."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return order > 0 and (args[2] if len(args) > 2 else kwargs.get("dim")) is None


class _Kind(NamedTuple):
    """What is to know of an operator.

    Attributes:
        elementwise: whether it looks at each element alone.
        here: whether it writes, and may run on local tensors as they are.
        returns: whether it returns something.
        arguments: their names.
        written: of the arguments that it writes to.
        aliased: of these, and of those whose memory its result shows.
    """

    elementwise: bool
    here: bool
    returns: bool
    arguments: tuple[str, ...]
    written: frozenset[str]
    aliased: frozenset[str]


@cache  # torch makes a schema's arguments anew each time
def _kind(func: Any) -> _Kind:
    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    foreach = name.startswith("_foreach_") and name not in _FOREACH_REDUCTIONS
    plain = foreach or torch.Tag.pointwise in func.tags
    return _Kind(
        plain or name in _ELEMENTWISE,
        plain and name.endswith("_") and torch.Tag.nondeterministic_seeded not in func.tags,
        bool(func._schema.returns),
        tuple(a.name for a in arguments),
        frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        frozenset(a.name for a in arguments if a.alias_info is not None),
    )


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    return [*zip(_kind(func).arguments, args, strict=False), *kwargs.items()]


class _Group(NamedTuple):
    """What an element of the result comes from: the tensors of a call, or those at one position of its lists."""

    home: OwnerStage
    spec: DTensorSpec


def _groups(func: Any, args: Any, kwargs: Any) -> list[_Group | None] | None:
    """For each position of the call's lists, if any; None: what is computed is not of one stage.

    Tensors of a group have the same shape, or a single element.
    """
    named = _named(func, args, kwargs)
    lists = [len(v) for _, v in named if isinstance(v, list | tuple) and v and isinstance(v[0], torch.Tensor)]
    found: list[_Group | None] = []
    for i in range(max(lists, default=1)):
        own = (
            [(n, v[i]) if isinstance(v, list | tuple) and i < len(v) else (n, v) for n, v in named] if lists else named
        )
        group, suits = _group(func, own)
        if not suits:
            return None
        found.append(group)
    return found


def _group(func: Any, named: Sequence[tuple[str, Any]]) -> tuple[_Group | None, bool]:
    """Where what is computed of these arguments lies, and whether it is of one stage at most."""
    first: StageTensor | None = None
    for _, value in named:
        if isinstance(value, StageTensor):
            if first is None:
                first = value
            elif value.home != first.home or (value._spec is not first._spec and value._spec != first._spec):
                return None, False
    if first is None:
        return None, True
    for name, value in named:
        if isinstance(value, torch.Tensor) and not isinstance(value, StageTensor) and value.numel() > 1:
            alike = isinstance(value, DTensor) and value.shape == first.shape
            if not alike or name in _kind(func).written:
                return None, False
    return _Group(first.home, first._spec), True


def _elementwise(func: Any, args: Any, kwargs: Any, groups: list[_Group | None]) -> Any:
    """Run an operator on what the stages hold; so is its result."""

    def own(value: Any, i: int) -> Any:
        if isinstance(value, StageTensor):
            return _plain(value)
        group = groups[min(i, len(groups) - 1)]
        if group is None or not isinstance(value, DTensor) or value.numel() == 1:
            return value
        return _part(value, group.home, group.spec)

    def each(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(own(v, i) for i, v in enumerate(value))
        return own(value, 0)

    result = func(*map(each, args), **{k: each(v) for k, v in kwargs.items()})
    if _kind(func).written:
        return _result_of_writing(func, args, kwargs)
    if isinstance(result, list | tuple):
        return type(result)(_marked(r, groups[min(i, len(groups) - 1)]) for i, r in enumerate(result))
    return _marked(result, groups[0])


def _written_here(func: Any, args: Any, kwargs: Any) -> bool:
    """Run an operator that writes, as optimizers do, on local tensors, if all that it takes is here: soonest done."""

    def here(value: Any) -> Any:
        if isinstance(value, list | tuple):
            rows = [here(v) for v in value]
            return NotImplemented if any(r is NotImplemented for r in rows) else rows
        if isinstance(value, StageTensor):
            return value._local_tensor
        if isinstance(value, DTensor):
            return value._local_tensor if all(p.is_replicate() for p in value.placements) else NotImplemented
        return value

    taken, named = [here(v) for v in args], {k: here(v) for k, v in kwargs.items()}
    if any(v is NotImplemented for v in (*taken, *named.values())):
        return False
    func(*taken, **named)
    return True


def _result_of_writing(func: Any, args: Any, kwargs: Any) -> Any:
    """What has been written to, if it is returned."""
    kind = _kind(func)
    return next(v for n, v in _named(func, args, kwargs) if n in kind.written) if kind.returns else None


def _marked(result: Any, group: _Group | None) -> Any:
    """A result that lies where a group does."""
    is_own = group is not None and type(result) is DTensor and result.shape == group.spec.shape
    return staged(result, group.home) if is_own and group is not None else result


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    """What writes, or shows memory that may be written to, is not for copies.

    Raises:
        AutoparError: the operator does so.
    """
    aliased = _kind(func).aliased
    for name, value in _named(func, args, kwargs):
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if name in aliased and isinstance(tensor, StageTensor):
                raise AutoparError(
                    f"{func} of a tensor of shape {list(tensor.shape)} that only the devices of one stage of the "
                    "pipeline hold: it writes to it or shows its memory; take tensor.full_tensor(), on all ranks, to "
                    "compute with its values, and operators element by element or load_full_state_dict() to change them"
                )
