"""Operators of users' code that torch cannot run on tensors of a mesh: computed on whole tensors, on every rank.

A script does more to parameters and gradients than torch has rules for: ``p.grad[mask] = 0``, ``p.grad * mask`` with a
plain mask, ``nn.init.normal_(p)``. A DTensor stands for the whole tensor, and so does a plain tensor beside it. So what
has no rule is computed on whole tensors, and each rank keeps its part of what is written: right, and slower by a
gather. Random numbers are drawn for the whole tensor, as one device draws them; they are rank 0's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar._torch_compat import (
    TensorMeta,
    asks_subclasses,
    leave_trace,
    map_tensors,
    normal_views,
    read_of,
    read_only,
    redistributed,
    run_beyond_dtensor,
    spec_in,
    tensors_in,
    view_under_inference,
    written_by,
)
from autopar.errors import AutoparError, RankError
from autopar.runtime.agreement.control import during_any
from autopar.runtime.dtensor import full_tensor
from autopar.runtime.state.stage_tensor import StageTensor, run_whole_by, written_whole
from autopar.runtime.state.written_operators import install_written_operators, shape_of_a_copy

_FILLS = frozenset(
    ("normal_", "uniform_", "bernoulli_.float", "rand_like", "randn_like", "randint_like", "exponential_", "random_")
)
"""Random operators that look at no value of their argument."""

SAMPLES = 1024
"""Elements of a plain tensor that ranks compare."""

_compared: set[Any] = set()


@cache  # handlers are put around those that are there
def install_whole_operators() -> None:
    """Let operators without a rule compute on whole tensors, for this process; once, however often it is called."""
    run_beyond_dtensor(_on_whole_tensors, _compare)
    run_whole_by(_of_one_stage)
    install_written_operators(_on_whole_tensors)
    view_under_inference()


def _of_one_stage(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on whole tensors of which one is of a stage: torch's dispatch does not see it."""
    plain = read_of(op, [t for t in tensors_in((args, kwargs)) if not isinstance(t, DTensor)], kwargs)
    if any(t.numel() > 1 for t in plain):
        _compare(op, plain, _mesh_of(args, kwargs))
    return _on_whole_tensors(op, args, kwargs)


def _mesh_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeviceMesh:
    return next(v for v in tensors_in((args, kwargs)) if isinstance(v, DTensor)).device_mesh


def _on_whole_tensors(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on whole tensors; a collective call."""
    leave_trace(op, (args, kwargs))
    mesh = _mesh_of(args, kwargs)
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    name = str(op).removeprefix("aten.").removesuffix(".default")
    fills = is_random and (name in _FILLS or name.partition(".")[0] in _FILLS)
    whole = {id(v): _whole(v, fills) for v in tensors_in((args, kwargs)) if isinstance(v, DTensor)}
    result = op(*_replaced(args, whole), **_replaced(kwargs, whole))
    written = [v for v in written_by(op, args, kwargs) if isinstance(v, DTensor)]
    if is_random:
        for tensor in [whole[id(v)] for v in written] or tensors_in(result):
            _take_of_first(tensor, mesh)
    for tensor in written:
        _write(op, tensor, whole[id(tensor)])
    own = {id(whole[id(v)]): v for v in written}  # `p.add_(x) is p`
    return as_views(op, args, kwargs, _wrapped(result, mesh, own))


class WholeView(DTensor):
    """A view, for torch, of a tensor of which each rank has a part: in fact it is a whole copy of that view.

    Torch makes such a copy where a view is not of each rank's own part, as ``p.grad[:3]`` of rows that are split, and
    what is written to it is lost. Here it is written to the tensor, too, and what the tensor is written to is read.

    Attributes:
        version: of the tensor, when the copy was made of it.
        source: the tensor, and the operator that made the view of it: its arguments after the first, its keyword
            arguments, and the number of this view among the results; None for a single result.
    """

    version: int
    source: tuple[DTensor, Any, tuple[Any, ...], dict[str, Any], int | None]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the copy; what it writes goes to the tensor."""
        kwargs = kwargs or {}
        with normal_views(func, args):
            return cls._run(func, args, kwargs)

    @classmethod
    def _run(cls, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], WholeView):
            raise shape_of_a_copy(func, args[0])
        views = {id(v): v for v in tensors_in((args, kwargs)) if isinstance(v, WholeView)}
        for view in views.values():
            view.read_again()
        plain = {k: DTensor(v._local_tensor, v._spec, requires_grad=False) for k, v in views.items()}  # type: ignore[no-untyped-call]
        result = func(*_replaced(args, plain), **_replaced(kwargs, plain))
        written = [v for v in written_by(func, args, kwargs) if isinstance(v, WholeView)]
        for view in written:
            copy = plain[id(view)]
            view._local_tensor, view._spec = copy._local_tensor, copy._spec
            view.write_back()
        if written:
            own = {id(plain[id(v)]): v for v in written}
            return _replaced(result, own)
        return as_views(func, args, kwargs, result)

    def full_tensor(self, **more: Any) -> torch.Tensor:
        """As of any DTensor, of what is in the tensor now."""
        self.read_again()
        return super().full_tensor(**more)

    def read_again(self) -> None:
        """Copy what is in the tensor, if it was written to since; a collective call then."""
        if self.version == (version := _version_of(self.source[0])):
            return
        self.version = version
        view = _replicated(self._of(_whole(self.source[0], fills=False)), self.device_mesh)
        self._local_tensor, self._spec = view._local_tensor, view._spec

    def write_back(self) -> None:
        """Write the copy into the tensor that it is a view of; a collective call."""
        tensor = self.source[0]
        whole = _whole(tensor, fills=False)
        self._of(whole).copy_(full_tensor(self))
        tensor.copy_(_replicated(whole, tensor.device_mesh))
        self.version = _version_of(tensor)

    def _of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same view of the whole tensor."""
        _, op, args, kwargs, number = self.source
        found = op(whole, *args, **kwargs)
        view: torch.Tensor = found if number is None else found[number]
        return view


def _version_of(tensor: torch.Tensor) -> int:
    """Which each write to the tensor, or to a view of it, changes; not of tensors of inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def as_views(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """The result with a `WholeView` for each tensor that the operator makes as a view of its first argument."""
    first = op._schema.arguments[0].alias_info if op._schema.arguments else None
    if first is None or first.is_write or not isinstance(args[0], DTensor):
        return result
    if not asks_subclasses(args[0].device_mesh):
        for view in tensors_in(result):
            view._local_tensor = read_only(view._local_tensor, _lost)  # type: ignore[attr-defined]
        return result
    for i, view in enumerate(tensors_in(result)):
        view.__class__ = WholeView
        number = None if isinstance(result, torch.Tensor) else i
        view.source = (args[0], op, args[1:], kwargs, number)  # type: ignore[attr-defined]
        view.version = _version_of(args[0])  # type: ignore[attr-defined]
    return result


def _lost(op: Any) -> AutoparError:
    return AutoparError(
        f"{op} would write to a view of a tensor on the mesh that is a copy here, and be lost, with torch "
        f"{torch.__version__}: install torch 2.12 or newer, or write to the tensor itself (torch.where, or a mask)"
    )


def _whole(tensor: DTensor, fills: bool) -> torch.Tensor:
    """Memory of its own with the whole tensor, or with nothing in it yet."""
    if fills:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
    if isinstance(tensor, WholeView):
        tensor.read_again()
    whole = full_tensor(tensor)
    return whole.clone() if whole.data_ptr() == tensor._local_tensor.data_ptr() else whole


def _take_of_first(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Rank 0's numbers, in place: ranks whose generators differ would hold copies that differ."""
    sent = tensor.contiguous()  # attention's result, say, has its heads after its rows in memory
    with during_any("random numbers for a tensor on the mesh"):
        for axis in range(mesh.ndim):
            dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
    if sent is not tensor:
        tensor.copy_(sent)


def _write(op: Any, tensor: DTensor, whole: torch.Tensor) -> None:
    """This rank's part of ``whole`` into a tensor that the operator has written to."""
    if tensor.shape != whole.shape or tensor.dtype != whole.dtype:
        raise AutoparError(f"{op} would change the shape of a tensor on the mesh, {list(tensor.shape)}: make a new one")
    mesh = tensor.device_mesh
    if isinstance(tensor, StageTensor):
        written_whole(tensor, _replicated(whole, mesh))
        return
    placements = tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
    part = redistributed(_replicated(whole, mesh), mesh, placements)
    if any(p.is_partial() and type(p) is not Partial for p in tensor.placements):  # of a norm, which has no sign
        tensor._local_tensor, tensor._spec = part._local_tensor, part._spec
        return
    # Its memory stays: views of it see what is written, and it what is written to a view. Of a sum or a product one
    # rank has it all.
    for placement, at in zip(tensor.placements, mesh.get_coordinate() or (), strict=True):
        if at > 0 and (placement.is_partial("sum") or placement.is_partial("product")):
            tensor._local_tensor.fill_(placement.is_partial("product"))
            return
    tensor._local_tensor.copy_(part._local_tensor)


def _replicated(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = spec_in(mesh, (Replicate(),) * mesh.ndim, meta)
    return DTensor(whole, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _wrapped(result: Any, mesh: DeviceMesh, own: dict[int, DTensor]) -> Any:
    """A result with DTensors for its tensors: an argument that was written to, or a whole one on every rank."""
    if isinstance(result, torch.Tensor):
        if id(result) in own:
            return own[id(result)]
        return result if isinstance(result, DTensor) else _replicated(result, mesh)
    return type(result)(_wrapped(r, mesh, own) for r in result) if isinstance(result, list | tuple) else result


def _replaced(value: Any, by: Mapping[int, torch.Tensor]) -> Any:
    """The value with other tensors in the place of some, by their ids."""
    return map_tensors(lambda t: by.get(id(t), t), value)


def _compare(op: Any, plain: list[torch.Tensor], mesh: DeviceMesh) -> None:
    """Plain tensors beside tensors of the mesh must be the same on every rank: compared at the first call of a kind.

    Raises:
        RankError: they are not.
    """
    leave_trace(op, plain)
    key = (op, mesh, tuple((tuple(t.shape), t.dtype) for t in plain))
    if key in _compared or any(t.is_meta for t in plain):
        return
    _compared.add(key)
    digest = hashlib.blake2b(digest_size=7)
    for t in plain:
        flat = t.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes() if sample.numel() else b"")
    own = int.from_bytes(digest.digest(), "big")
    found = torch.tensor([own, -own], device=mesh.device_type)
    with during_any(f"a plain tensor that {op} takes"):
        for axis in range(mesh.ndim):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if int(found[0]) != -int(found[1]):
        shapes = ", ".join(str(list(t.shape)) for t in plain)
        raise RankError(
            f"{op} takes a plain tensor of shape {shapes} beside one that lies on the mesh, and its contents differ "
            "between the ranks: it stands for the whole tensor, so make the same on every rank (torch.manual_seed), "
            "or distribute it with torch.distributed.tensor"
        )
