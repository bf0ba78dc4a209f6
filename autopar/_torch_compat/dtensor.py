"""DTensors: their metadata, and what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autopar._torch_compat.dtensor_handlers import (
    count_dims_from_front,
    counted_from_front,
    in_32_bits,
    is_loss,
    is_of_a_model,
    is_product,
    keep_scalars,
    moves_a_view,
    rounds_terms,
    without_empty,
)
from autopar._torch_compat.operators import map_tensors, tensors_in, written_by


def local_shape_of(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> tuple[int, ...]:
    """Shape of this rank's part of a DTensor, as torch cuts it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tuple(shape), mesh, tuple(placements))[0])


def dtensor_overloads() -> frozenset[str]:
    """Names of the operator overloads for which `torch.distributed.tensor` has a sharding rule."""
    return frozenset(str(op) for table in _tables_of_rules() for op in table)


def _tables_of_rules() -> list[Any]:
    from torch.distributed.tensor import DTensor

    rules = DTensor._op_dispatcher.sharding_propagator
    names = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    return [getattr(rules, name, ()) for name in names]


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
    were; a plain tensor as ``.grad`` fails in the next operator on it, or is taken for this rank's part. A DTensor as
    ``.data`` of a plain parameter leaves that without memory.

    Args:
        convert: None for a tensor that is to be assigned as torch does.
    """
    from torch.distributed.tensor import DTensor

    data: Any = torch.Tensor.data
    grad: Any = torch.Tensor.grad

    def set_data(tensor: Any, value: torch.Tensor) -> None:
        converted = convert(tensor, value, "data")
        if converted is None and isinstance(value, DTensor) and value.shape == tensor.shape:
            converted = value.detach()
        if converted is None or converted.dtype != tensor.dtype:
            data.__set__(tensor, value if converted is None else converted)
        if converted is not None:
            tensor._local_tensor, tensor._spec = converted._local_tensor, converted._spec  # type: ignore[attr-defined]

    def set_grad(tensor: Any, value: torch.Tensor | None) -> None:
        converted = None if value is None else convert(tensor, value, "grad")
        grad.__set__(tensor, value if converted is None else converted)

    def set_plain_data(tensor: Any, value: torch.Tensor) -> None:
        converted = convert(tensor, value, "data") if isinstance(value, DTensor) else None
        data.__set__(tensor, value if converted is None else converted)

    torch.nn.Parameter.data = property(data.__get__, set_plain_data)  # type: ignore[assignment]
    DTensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    DTensor.grad = property(grad.__get__, set_grad, grad.__delete__)  # type: ignore[assignment]


_SWAP: Any = torch.utils.swap_tensors


def convert_in_place(is_own: Callable[[torch.Tensor], bool]) -> None:
    """Let ``module.to(dtype)`` convert the DTensors that ``is_own`` is true of in place, as it does plain parameters.

    Torch swaps them with others, which have none of their attributes. Where it refuses, since a graph holds one (the
    weight that an old ``weight_norm`` has computed, a penalty that is still to be differentiated), any is converted so.
    Assigns to ``.data``, of which `convert_assigned` is to have made what it says.
    """
    from torch.distributed.tensor import DTensor

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        both = isinstance(t1, DTensor) and isinstance(t2, DTensor)
        possible = both and t1.device.type == t2.device.type and t1.shape == t2.shape
        try:
            if not (possible and is_own(t1)):
                _SWAP(t1, t2)
                return
        except RuntimeError:
            if not possible:
                raise
        t1.data = t2

    torch.utils.swap_tensors = swap_tensors


def refuse_items_of_unreduced() -> None:
    """Make ``item()`` of a DTensor that is still to be reduced an error.

    Torch gives each rank its own term: ``gradient.norm().item()`` of a gradient that is split is silently wrong.
    """
    from torch.distributed.tensor import DTensor

    def item(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (tensor,) = args
        if is_unreduced(tensor):
            raise RuntimeError(
                f"item() of a tensor that lies as {tensor.placements} would be this rank's term of it: call "
                "full_tensor() first, on all ranks"
            )
        return call(tensor._local_tensor, **kwargs)

    def text(tensor: Any, spec: str) -> str:
        return format(tensor.item(), spec) if tensor.ndim == 0 and spec else object.__format__(tensor, spec)

    def own(name: str) -> Callable[..., Any]:
        method = getattr(torch.Tensor, name)

        def values(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not all(p.is_replicate() for p in tensor.placements):
                raise RuntimeError(
                    f"{name}() of a tensor that lies as {tensor.placements} would be this rank's part of it: call "
                    f'full_tensor().{name}(), on all ranks, or parallelize(..., outputs="whole") for plain outputs'
                )
            return method(
                tensor._local_tensor.detach() if not tensor.requires_grad else tensor._local_tensor, *args, **kwargs
            )

        return values

    def share_memory(tensor: Any) -> Any:
        tensor._local_tensor.share_memory_()  # the DTensor itself has no memory, which torch would take
        return tensor

    def storage(tensor: Any) -> Any:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} that lies on the mesh as {tensor.placements} has no memory of its "
            "own to write, as safetensors' save_file does, or save_pretrained of a module that parallelize() has not "
            "returned: save model.full_state_dict() or full_tensor(), which all ranks call, or call save_pretrained of "
            "the parallel module"
        )

    def number(name: str) -> Callable[[Any], Any]:
        """Torch reads numbers of a list (`torch.tensor([gradient.norm()])`) where no wrapper is asked for its own."""
        method = getattr(torch.Tensor, name)

        def value(tensor: Any) -> Any:
            below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
            if not below or tensor.numel() != 1:
                return method(tensor)
            return item(lambda local: getattr(local, name)(), (tensor,), {})

        return value

    for name in ("__float__", "__int__", "__index__", "__bool__"):
        setattr(DTensor, name, number(name))
    DTensor.share_memory_ = share_memory  # type: ignore[method-assign]
    DTensor.storage = storage  # type: ignore[method-assign]
    DTensor.__format__ = text  # type: ignore[method-assign]
    DTensor.tolist, DTensor.numpy = own("tolist"), own("numpy")  # type: ignore[method-assign]
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = item


_WRONG = frozenset(
    (
        "index_put", "index_put_", "_unsafe_index_put", "index_add", "index_add_", "index_copy", "index_copy_",
        "index_fill", "index_fill_", "masked_scatter", "masked_scatter_", "scatter_reduce", "scatter_reduce_", "put_",
        "take",
        # Running statistics of a part, in which torch does not see that they are written.
        "native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
        "miopen_batch_norm", "miopen_batch_norm_backward", "_batch_norm_with_update", "batch_norm_backward",
        "_native_batch_norm_legit",
    )
)  # fmt: skip
"""Operators whose rules, in some version of torch, take a mask for indices, or indices of the whole for a part's."""

_HANDLED_WRONG = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
"""Operators that torch handles as if no channels of the weight were split."""

_PARTS = (
    "_allow_implicit_replication", "_custom_op_handlers", "_dispatch_fast_path_python_tail",
    "_dispatch_get_local_results_slow_path", "_propagate_op_sharding_dispatch_slow_path", "_random_ops",
    "redistribute_local_args", "wrap",
)  # fmt: skip
"""What `run_beyond_dtensor` takes of torch's dispatcher."""


def run_beyond_dtensor(
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any], compare: Callable[[Any, list[Any], Any], None]
) -> None:
    """Let ``run(op, args, kwargs)`` compute what torch has no rule for, and random numbers; let plain tensors mix.

    Torch refuses plain tensors beside DTensors: here they stand for whole ones, after ``compare(op, tensors, mesh)``.
    A view of a tensor that is moved for it is made by ``run``, too: it is a copy, to which what is written is lost.
    It leaves a sum over all elements as each rank's term, which ``item()`` then cannot give: here it is reduced at
    once. A random operator draws the same numbers on each rank's part where it has no generator of its own for that,
    as on CPUs. Once: a later call changes nothing; nor does the first where torch's dispatcher has other parts, and
    torch's own errors remain.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    if "_propagate_op_sharding_dispatch_slow_path" in vars(dispatcher):
        return
    if not all(hasattr(dispatcher, name) for name in _PARTS):
        return
    propagate = dispatcher._propagate_op_sharding_dispatch_slow_path

    def propagated(op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        # Torch would find a rule by what it consists of, and run it on parts with the sizes of the whole.
        if torch.is_inference_mode_enabled() and op._can_decompose() and not any(op in t for t in _tables_of_rules()):
            return op.decompose(*args, **kwargs)
        plain = _plain_tensors((args, kwargs))
        read = read_of(op, plain, kwargs)
        if any(t.numel() > 1 for t in read):
            compare(op, read, info.compute_mesh)
        # Random ones that torch takes for pointwise, such as exponential_: each rank would draw its own part.
        draws = torch.Tag.nondeterministic_seeded in op.tags
        if draws or op.overloadpacket.__name__ in _WRONG or is_loss(op):
            return run(op, args, kwargs)
        # Torch's own dispatch writes to a DTensor only.
        if plain and any(t is v for t in plain for v in written_by(op, args, kwargs)):
            return run(op, args, kwargs)
        if (counted := counted_from_front(op, args)) is not args:
            return op(*counted, **kwargs)
        if op is torch.ops.aten.cat.default and len(joined := without_empty(args[0])) < len(args[0]):
            return op(joined, *args[1:], **kwargs)
        try:
            found = propagate(op, args, kwargs, info, try_cache)
        # Nothing has been sent yet: every rank comes here alike.
        except (NotImplementedError, RuntimeError):
            return run(op, args, kwargs)
        # What is written to a view that is moved first is lost to the tensor.
        if moves_a_view(op, info, found) or _writes_no_term(op, args, kwargs, found):
            return run(op, args, kwargs)
        if rounds_terms(op, args, kwargs, found):
            if is_of_a_model():
                # Not by its decision, which torch would keep for calls outside of models, too.
                return _as_decided(op, args, info, found)
            if is_product(op):
                return run(op, args, kwargs)
            return _reduced(in_32_bits(op, args, kwargs)).to(found.output_spec.tensor_meta.dtype)
        if _moves_beside_scalars(op, args, kwargs, found):
            return op(*map_tensors(_reduced, args), **map_tensors(_reduced, kwargs))
        return _reduced_at_once(op, args, info, found)

    tail = dispatcher._dispatch_fast_path_python_tail

    def finished(op: Any, args: Any, kwargs: Any, mesh: Any, found: Any, result: Any, *rest: Any) -> Any:
        in_place = rest[1]
        if in_place and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor):
            return args[0]  # a plain tensor, whose memory the operator has written
        return tail(op, args, kwargs, mesh, found, result, *rest)

    dispatcher.redistribute_local_args = keep_scalars(dispatcher.redistribute_local_args)
    dispatcher._dispatch_fast_path_python_tail = finished
    dispatcher._allow_implicit_replication = True  # of this thread, and of backward passes that it starts
    dispatcher._propagate_op_sharding_dispatch_slow_path = propagated
    for op in dispatcher._random_ops:
        dispatcher._custom_op_handlers[op] = lambda op, args, kwargs: run(op, args, kwargs)

    def on_whole(op: Any, args: Any, kwargs: Any) -> Any:
        plain = read_of(op, _plain_tensors((args, kwargs)), kwargs)
        if any(t.numel() > 1 for t in plain):
            compare(op, plain, next(t for t in tensors_in((args, kwargs)) if isinstance(t, DTensor)).device_mesh)
        return run(op, args, kwargs)

    for op in _HANDLED_WRONG:
        dispatcher._custom_op_handlers[op] = on_whole
    count_dims_from_front()


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def _plain_tensors(value: Any) -> list[torch.Tensor]:
    from torch.distributed.tensor import DTensor

    return [t for t in tensors_in(value) if not isinstance(t, DTensor)]


def read_of(op: Any, tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Without those that are ``out=`` of an operator: nothing is known of what is in them."""
    outs = tensors_in([kwargs.get(a.name) for a in op._schema.arguments if a.is_out])
    return [t for t in tensors if not any(t is out for out in outs)]


def _writes_no_term(op: Any, args: Any, kwargs: Any, found: Any) -> bool:
    """Whether an operator writes to a tensor that is still to be reduced, and torch's rule makes no term of that.

    Torch gives every rank the number that fills the tensor, and moves what is split to terms, which it cannot.
    """
    if op.overloadpacket.__name__ != "fill_" and not getattr(found, "needs_redistribute", False):
        return False
    return any(is_unreduced(t) for t in written_by(op, args, kwargs))


def _moves_beside_scalars(op: Any, args: Any, kwargs: Any, found: Any) -> bool:
    """Whether torch would move a scalar tensor, or what is beside it, to terms or from them.

    To torch's cache of decisions it is a number: what is decided for it (``update + update.norm()``, where one rank
    adds it) would be found for a number (``update + 1.0``), which each rank would add.
    """
    if not getattr(found, "needs_redistribute", False) or op._schema.is_mutable or op._schema._is_view_op():
        return False
    tensors = tensors_in((args, kwargs))
    return any(t.ndim == 0 for t in tensors) and any(map(is_unreduced, tensors))


def _reduced(tensor: Any) -> Any:
    """The tensor, reduced if it is a DTensor of which each rank has a term."""
    if not is_unreduced(tensor):
        return tensor
    return redistributed(tensor, tensor.device_mesh, [_replicate() if p.is_partial() else p for p in tensor.placements])


def is_unreduced(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor of which each rank has a term."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return False
    return any(p.is_partial() and n > 1 for p, n in zip(tensor.placements, tensor.device_mesh.shape, strict=True))


def _as_decided(op: Any, args: Any, info: Any, found: Any) -> Any:
    """The result of an operator by a decision of torch, which is not kept for other calls."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    info.output_sharding = found
    return dispatcher.wrap(dispatcher._dispatch_get_local_results_slow_path(op, args, info), found.output_spec)


def _reduced_at_once(op: Any, args: Any, info: Any, found: Any) -> Any:
    """The result of an operator some of whose results are scalars of which each rank would have its term: reduced.

    So is what a table of which each rank has some rows gives, which torch can reduce once, and fails the second time.
    So are terms of anything but a sum of numbers: torch adds up norms of rows as if they were terms of a sum, counts
    how many ranks have something true, and stacks no products.

    Anything else: ``found``, torch's decision, as it is.
    """
    from torch.distributed.tensor import Partial

    def is_term(spec: Any) -> bool:
        if not isinstance(spec, DTensorSpec) or spec.tensor_meta is None:
            return False
        if (
            spec.tensor_meta.shape == ()
            or op is torch.ops.aten.embedding.default
            or spec.tensor_meta.dtype is torch.bool
        ):
            return any(p.is_partial() for p in spec.placements)
        return any(
            p.is_partial() and (type(p) is not Partial or p.reduce_op not in ("sum", "avg")) for p in spec.placements
        )

    specs = getattr(found, "output_spec", None)
    each = specs if isinstance(specs, list | tuple) else (specs,)
    # Norms of a list of gradients are terms of one norm, which is reduced then.
    kept = op._schema.is_mutable or op._schema._is_view_op() or op.overloadpacket.__name__.startswith("_foreach")
    if kept or not any(map(is_term, each)):
        return found
    wrapped = _as_decided(op, args, info, found)

    def reduced(value: Any, spec: Any) -> Any:
        whole = (_replicate(),) * spec.mesh.ndim if is_term(spec) else ()
        return redistributed(value, spec.mesh, whole) if whole else value

    if not isinstance(specs, list | tuple):
        return reduced(wrapped, specs)
    return type(wrapped)(reduced(v, s) for v, s in zip(wrapped, specs, strict=True))


def refuse_to_pickle_parts(refuse: Callable[[Any], Exception]) -> None:
    """Pickle a DTensor that each rank has whole as a plain tensor, and raise ``refuse(tensor)`` for any other.

    Torch writes this rank's part, and whoever reads the file takes it for their own: silently wrong on other ranks.
    """
    from torch.distributed.tensor import DTensor

    def reduce(tensor: Any, protocol: Any) -> Any:
        sizes = tensor.device_mesh.shape
        if any(not p.is_replicate() and n > 1 for p, n in zip(tensor.placements, sizes, strict=True)):
            raise refuse(tensor)
        local = tensor._local_tensor.detach().requires_grad_(tensor.requires_grad)
        return local.__reduce_ex__(protocol)

    DTensor.__reduce_ex__ = reduce  # type: ignore[method-assign]


@cache
def asks_subclasses(mesh: Any) -> bool:
    """Whether a subclass of `DTensor` runs its operators by its own ``__torch_dispatch__``: not with torch 2.11."""
    from torch.distributed.tensor import DTensor

    class Probe(DTensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return None

    with torch.no_grad():
        local = torch.ones(1)
        spec = spec_in(mesh, (_replicate(),) * mesh.ndim, TensorMeta(local.shape, local.stride(), local.dtype))
        probe: Any = Probe(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return torch.ops.aten.neg.default(probe) is None


class _ReadOnly(torch.Tensor):
    refusal: Callable[[Any], Exception]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        refusals = [t.refusal for t in _plain_tensors((args, kwargs or {})) if isinstance(t, _ReadOnly)]
        if any(isinstance(t, _ReadOnly) for t in written_by(func, args, kwargs or {})):
            raise refusals[0](func)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        if not func._schema._is_view_op():
            return result
        views = [read_only(t, refusals[0]) for t in _plain_tensors([result])]
        return views[0] if isinstance(result, torch.Tensor) else views


def read_only(tensor: torch.Tensor, refusal: Callable[[Any], Exception]) -> torch.Tensor:
    """The same memory as a tensor of which ``refusal(op)`` is raised by each operator that would write to it."""
    found: Any = torch.Tensor._make_subclass(_ReadOnly, tensor)
    found.refusal = refusal
    return found  # type: ignore[no-any-return]


def context_parallel_internals() -> Any:
    """The module of torch's ``context_parallel``: its rings, the table of its kernels, and how keys go round."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention
