"""`StageTensor`: a parameter that one pipeline stage owns, its gradient, and its optimizer state.

To torch such a tensor is a DTensor on the whole mesh with ``Shard(0)`` along the axis of the stages. In fact the
devices of the owner stage hold all of it, and the local tensors of the others are empty. Elementwise operators, which
optimizers consist of, and norms are right on such shards. Every other operator would trust the ``Shard(0)``, and be
wrong, sometimes silently. So any other operator gets a copy on the devices of every stage: a collective call, as with
any DTensor. One that writes to a parameter, or makes a view of it, runs on whole tensors, and what is written goes to
the owner: `whole_operators` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar._torch_compat import DTensorSpec, local_shape_of, normal_views, redistributed, spec_in
from autopar.ir.layout import At, Layout
from autopar.runtime.agreement.control import during_any

aten = torch.ops.aten

_ELEMENTWISE = frozenset(
    (
        "alias", "clone", "copy_", "detach", "detach_", "fill_", "lift_fresh", "zero_", "_to_copy", "empty_like",
        "full_like", "ones_like", "rand_like", "randn_like", "zeros_like", "bernoulli_", "normal_", "uniform_",
        "is_pinned", "is_same_size", "_amp_foreach_non_finite_check_and_unscale_",
    )
)  # fmt: skip
"""Elementwise operators that lack torch's tag ``pointwise``."""

_FUSED = frozenset(("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"))
"""Steps of optimizers in one kernel: elementwise in each parameter, its gradient and its state."""

_FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


_on_whole_tensors: list[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = []
"""How to run an operator on whole tensors: one function, once it is there."""


def run_whole_by(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Let ``run(op, args, kwargs)`` run operators that write to a `StageTensor`, or show its memory."""
    _on_whole_tensors[:] = [run]


class OwnerStage(NamedTuple):
    """The stage that holds a tensor: index of the mesh axis of the stages, and the owner's coordinate on it."""

    axis: int
    coordinate: int


class StageTensor(DTensor):
    """See the module.

    Attributes:
        owner_stage: the stage that holds it.
        plain: the same tensor as a plain DTensor, cached.
    """

    owner_stage: OwnerStage
    plain: DTensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator that takes such a tensor."""
        with normal_views(func, args):
            return cls._run(func, args, kwargs or {})

    @classmethod
    def _run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        # Norms and sums over all elements: empty shards add nothing, so DTensor's reduction over the mesh is right.
        if func in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar) and _is_full_norm(args, kwargs):
            return func(*_map(args, _padded_to_one), **kwargs)
        if func is aten.sum.default:
            return func(*_map(args, _plain), **kwargs)
        if _schema(func).elementwise and torch.Tag.nondeterministic_seeded in func.tags:
            return _drawn(func, args, kwargs)
        owners = _owners(func, args, kwargs) if _schema(func).elementwise else None
        # In place, as optimizers write: DTensor's dispatch costs far more than a small kernel, so it is left out where
        # local tensors suffice.
        if owners is not None and _schema(func).in_place and _ran_locally(func, args, kwargs):
            return _written_argument(func, args, kwargs)
        if owners is not None:
            return _elementwise(func, args, kwargs, owners)
        if _shows_memory(func, args, kwargs):
            return _on_whole_tensors[0](func, args, kwargs)
        return func(*_map(args, on_every_stage), **_map(kwargs, on_every_stage))

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As a DTensor's; the tensor itself if it has these placements, the ``Shard(0)`` of the stages included."""
        placements = kwargs.get("placements", args[1] if len(args) > 1 else None)
        if placements is not None and tuple(placements) == tuple(self.placements):
            return self
        # A method of DTensor, not an operator: it does not come through __torch_dispatch__.
        whole: DTensor = _GatherStages.apply(self)  # type: ignore[no-untyped-call]
        return whole.redistribute(*args, **kwargs)


def owner_of(layout: Layout) -> OwnerStage | None:
    """The stage that holds a tensor of this layout; None: every stage does."""
    return next((OwnerStage(axis, p.index) for axis, p in enumerate(layout) if isinstance(p, At)), None)


def with_owner(tensor: DTensor, owner: OwnerStage | None) -> DTensor:
    """The same object as a `StageTensor`, or as a plain DTensor if ``owner`` is None."""
    # The class of the object changes, and not the object: optimizers and users hold references to it.
    tensor.__class__ = DTensor if owner is None else StageTensor
    tensor.__dict__.pop("plain", None)
    if owner is not None:
        tensor.owner_stage = owner  # type: ignore[attr-defined]
    return tensor


class _GatherStages(torch.autograd.Function):
    """Forward: from the owner stage to all stages. Backward: the owner stage keeps the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: StageTensor) -> torch.Tensor:
        ctx.owner, ctx.spec = tensor.owner_stage, tensor._spec
        return on_every_stage(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return with_owner(_on_owner_stage(gradient, ctx.owner, ctx.spec), ctx.owner)


def _map(value: Any, function: Any) -> Any:
    """``value`` with ``function`` applied to every `StageTensor` in it."""
    if isinstance(value, StageTensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(v, function) for v in value)
    if isinstance(value, dict):
        return {k: _map(v, function) for k, v in value.items()}
    return value


def _plain(tensor: StageTensor) -> DTensor:
    """The same tensor as a plain DTensor: cached until its local tensor or its spec is replaced."""
    cached: DTensor | None = getattr(tensor, "plain", None)
    if cached is None or cached._local_tensor is not tensor._local_tensor or cached._spec is not tensor._spec:
        cached = tensor.plain = _like(tensor._local_tensor, tensor._spec)
    return cached


def _like(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _padded_to_one(tensor: StageTensor) -> DTensor:
    """For norms: an empty local tensor becomes a single zero, since the largest of no elements is an error."""
    local = tensor._local_tensor
    return _plain(tensor) if local.numel() else _like(local.new_zeros((1,) * local.ndim), tensor._spec)


def on_every_stage(tensor: StageTensor) -> DTensor:
    """The tensor on the devices of every stage; a collective call."""
    mesh, owner = tensor.device_mesh, tensor.owner_stage
    placements = tuple(Replicate() if i == owner.axis else p for i, p in enumerate(tensor.placements))
    local = tensor._local_tensor
    if not _is_on_owner(mesh, owner):
        local = local.new_empty(local_shape_of(tensor.shape, mesh, placements))
    local = local.contiguous()
    with during_any("an operator of a parameter that one stage holds"):
        dist.broadcast(local, group=mesh.get_group(owner.axis), group_src=owner.coordinate)
    return _like(local, spec_in(mesh, placements, tensor._spec.tensor_meta))


def written_whole(tensor: StageTensor, whole: DTensor) -> None:
    """Write a whole tensor that every rank has into one that a stage holds: its devices take their parts."""
    tensor._local_tensor.copy_(_on_owner_stage(whole, tensor.owner_stage, tensor._spec)._local_tensor)


def _on_owner_stage(tensor: DTensor, owner: OwnerStage, spec: DTensorSpec) -> DTensor:
    """A DTensor of any placements, as the devices of one stage hold it: in ``spec``, empty on the others."""
    mesh = spec.mesh
    everywhere = tuple(Replicate() if i == owner.axis else p for i, p in enumerate(spec.placements))
    # Every rank redistributes, for it may be a collective; those of other stages then drop the result.
    local = redistributed(tensor, mesh, everywhere)._local_tensor
    return _like(local if _is_on_owner(mesh, owner) else local[:0], spec)


def _is_on_owner(mesh: DeviceMesh, owner: OwnerStage) -> bool:
    """Whether this device is one of the owner stage."""
    return mesh.get_local_rank(owner.axis) == owner.coordinate


def _is_full_norm(args: Any, kwargs: Any) -> bool:
    """Whether a norm is over all elements and of positive order: one of negative order is a minimum, of zeros too."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return order > 0 and (args[2] if len(args) > 2 else kwargs.get("dim")) is None


class _Schema(NamedTuple):
    """What decides how an operator runs.

    Attributes:
        elementwise: whether it computes each element of its result from the elements at the same position.
        in_place: whether it writes to its first argument, and may run on local tensors as they are.
        returns: whether it returns something.
        arguments: their names.
        written: of the arguments that it writes to.
        aliased: of these, and of those that its result is a view of.
    """

    elementwise: bool
    in_place: bool
    returns: bool
    arguments: tuple[str, ...]
    written: frozenset[str]
    aliased: frozenset[str]


@cache  # torch makes a schema's arguments anew each time
def _schema(func: Any) -> _Schema:
    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    foreach = name.startswith("_foreach_") and name not in _FOREACH_REDUCTIONS
    pointwise = foreach or name in _FUSED or torch.Tag.pointwise in func.tags
    return _Schema(
        pointwise or name in _ELEMENTWISE,
        # DTensor coordinates random numbers among ranks: on local tensors they would be drawn otherwise.
        pointwise and name.endswith("_") and torch.Tag.nondeterministic_seeded not in func.tags,
        bool(func._schema.returns),
        tuple(a.name for a in arguments),
        frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        frozenset(a.name for a in arguments if a.alias_info is not None),
    )


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    return [*zip(_schema(func).arguments, args, strict=False), *kwargs.items()]


def _owners(func: Any, args: Any, kwargs: Any) -> list[StageTensor | None] | None:
    """For each position of the call's lists (one if it has none), a tensor whose owner and spec the result has.

    None: some operand does not fit, and the operator cannot run where the tensors are.
    """
    named = _named(func, args, kwargs)
    lists = [len(v) for _, v in named if isinstance(v, list | tuple) and v and isinstance(v[0], torch.Tensor)]
    owners: list[StageTensor | None] = []
    for i in range(max(lists, default=1)):
        # A _foreach_ operator of lists is one operator of the tensors at each position.
        operands = (
            [(n, v[i]) if isinstance(v, list | tuple) and i < len(v) else (n, v) for n, v in named] if lists else named
        )
        owner, fits = _owner(func, operands)
        if not fits:
            return None
        owners.append(owner)
    return owners


def _owner(func: Any, named: Sequence[tuple[str, Any]]) -> tuple[StageTensor | None, bool]:
    """The first `StageTensor` among the operands, and whether all operands can be used on its owner's devices."""
    first: StageTensor | None = None
    for _, value in named:
        if isinstance(value, StageTensor):
            if first is None:
                first = value
            elif not _is_together(value, first):
                return None, False
    if first is None:
        return None, True
    for name, value in named:
        if isinstance(value, torch.Tensor) and not isinstance(value, StageTensor) and value.numel() > 1:
            # Of any other DTensor of this shape the owner takes a copy, which nobody would see a write to.
            copyable = isinstance(value, DTensor) and value.shape == first.shape
            if not copyable or name in _schema(func).written:
                return None, False
    return first, True


def _is_together(one: StageTensor, other: StageTensor) -> bool:
    """Whether two tensors are on the same devices, in shards of the same form."""
    # By identity first: comparing specs is slow, and this runs for every operator of an optimizer's step.
    return one.owner_stage == other.owner_stage and (one._spec is other._spec or one._spec == other._spec)


def _elementwise(func: Any, args: Any, kwargs: Any, owners: list[StageTensor | None]) -> Any:
    """Run an elementwise operator on the tensors where they are; its result has the same owners."""

    def on_owner(value: Any, i: int) -> Any:
        if isinstance(value, StageTensor):
            return _plain(value)
        owner = owners[min(i, len(owners) - 1)]
        if owner is None or not isinstance(value, DTensor) or value.numel() == 1:
            return value
        return _on_owner_stage(value, owner.owner_stage, owner._spec)

    def each(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(on_owner(v, i) for i, v in enumerate(value))
        return on_owner(value, 0)

    result = func(*map(each, args), **{k: each(v) for k, v in kwargs.items()})
    if _schema(func).written:
        return _written_argument(func, args, kwargs)
    if isinstance(result, list | tuple):
        return type(result)(_owned_like(r, owners[min(i, len(owners) - 1)]) for i, r in enumerate(result))
    return _owned_like(result, owners[0])


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a random operator on the whole tensor, as one device draws; its owner's devices keep the numbers."""
    tensor: StageTensor = args[0]
    copy = on_every_stage(tensor)
    result = func(copy, *args[1:], **kwargs)
    kept = _on_owner_stage(copy if _schema(func).written else result, tensor.owner_stage, tensor._spec)
    if _schema(func).written:
        tensor._local_tensor.copy_(kept._local_tensor)
        return tensor
    return with_owner(kept, tensor.owner_stage)


def _ran_locally(func: Any, args: Any, kwargs: Any) -> bool:
    """Run an in-place operator on local tensors, if each operand has one that suffices; whether it has run."""
    written = args[0] if isinstance(args[0], list | tuple) else (args[0],)

    def local(value: Any) -> Any:
        if isinstance(value, list | tuple):
            rows = [_local_beside(v, w) for v, w in zip(value, written, strict=False)]
            return NotImplemented if any(r is NotImplemented for r in rows) else rows
        return _local_beside(value, written[0])

    positional, named = [local(v) for v in args], {k: local(v) for k, v in kwargs.items()}
    if any(v is NotImplemented for v in (*positional, *named.values())):
        return False
    func(*positional, **named)
    return True


def _local_beside(value: Any, written: torch.Tensor) -> Any:
    """The local tensor of an operand, if it meets that of ``written`` element by element; else NotImplemented."""
    if isinstance(value, StageTensor):
        return value._local_tensor
    if not isinstance(value, DTensor):
        return value
    if value.numel() == 1:
        return value._local_tensor if all(p.is_replicate() for p in value.placements) else NotImplemented
    # A parameter that every stage holds, in a list with those of one stage.
    like = isinstance(written, DTensor) and (value._spec is written._spec or value._spec == written._spec)
    apart = isinstance(written, StageTensor) or any(p.is_partial() for p in value.placements)
    return value._local_tensor if like and not apart else NotImplemented


def _written_argument(func: Any, args: Any, kwargs: Any) -> Any:
    """The argument that has been written to, if the operator returns it."""
    # The user's object and not the plain DTensor that was computed on: `p.add_(x) is p`.
    schema = _schema(func)
    return next(v for n, v in _named(func, args, kwargs) if n in schema.written) if schema.returns else None


def _owned_like(result: Any, owner: StageTensor | None) -> Any:
    """A result of the owner's shape as a `StageTensor`; any other, such as a sum, as it is."""
    is_own = owner is not None and type(result) is DTensor and result.shape == owner._spec.shape
    return with_owner(result, owner.owner_stage) if is_own and owner is not None else result


def _shows_memory(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator writes to a `StageTensor`, or returns a view of it, through which it may be written to."""
    aliased = _schema(func).aliased
    values = [value for name, value in _named(func, args, kwargs) if name in aliased]
    return any(isinstance(t, StageTensor) for v in values for t in (v if isinstance(v, list | tuple) else (v,)))
