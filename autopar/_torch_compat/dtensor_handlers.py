"""What is put in the place of DTensor's own operators and methods, one by one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils import _pytree

from autopar._torch_compat.operators import operators_where, tensors_in

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""From an operator, its arguments and its keyword arguments, some of them DTensors, to its result."""


def handle_operators(operators: Iterable[Any], handler: Callable[[Any, Handler | None], Handler]) -> None:
    """Let ``handler(op, torch's own handler or None)`` make the handler of each of these operators of DTensors."""
    from torch.distributed.tensor import DTensor

    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for op in operators:
        table[op] = handler(op, table.get(op))


def view_under_inference() -> None:
    """Let views of DTensors be made under ``torch.inference_mode``: an error of torch's, `Cannot set version_counter`.

    A view of a tensor that was made outside of it is a tensor as outside; torch makes another kind of DTensor for it.
    Handlers take five times as long as torch's dispatch, so that they are there while some thread is in that mode.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    if not hasattr(dispatcher, "unwrap_to_op_info"):
        return
    table: dict[Any, Any] = dispatcher._custom_op_handlers
    # Others are made of these.
    views = [op for op in operators_where(_views_a_tensor) if not op._can_decompose()]
    lock, modes, own = threading.Lock(), set[int](), dict[Any, Any]()
    enter, leave = torch.inference_mode.__enter__, torch.inference_mode.__exit__

    def entered(mode: Any) -> None:
        enter(mode)
        with lock:
            if mode.mode and not modes:
                own.update({op: table[op] for op in views if op in table})
                handle_operators(views, lambda op, known: _outside_inference(known or _by_torch))
            modes.update([id(mode)] if mode.mode else [])

    def left(mode: Any, *error: Any) -> None:
        leave(mode, *error)
        with lock:
            if id(mode) in modes:
                modes.remove(id(mode))
                for op in views if not modes else ():
                    del table[op]
                table.update({} if modes else own)

    kind: Any = torch.inference_mode
    kind.__enter__, kind.__exit__ = entered, left


def _views_a_tensor(schema: Any) -> bool:
    return bool(schema._is_view_op()) and schema.arguments[0].type.kind() == "TensorType"


def _outside_inference(run: Handler) -> Handler:
    def outside(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with normal_views(op, args):
            return run(op, args, kwargs)

    return outside


@contextmanager
def normal_views(op: Any, args: tuple[Any, ...]) -> Iterator[None]:
    """While it lasts, tensors are made as outside of ``torch.inference_mode``, if the operator views such a one."""
    if not torch.is_inference_mode_enabled() or not op._schema._is_view_op() or args[0].is_inference():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _by_torch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch's dispatcher does with an operator that no handler takes."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    found = dispatcher._propagate_op_sharding_dispatch_slow_path(op, args, kwargs, info, True)
    if not hasattr(found, "output_spec"):
        return found  # the result itself
    info.output_sharding = found
    return dispatcher.wrap(dispatcher._dispatch_get_local_results_slow_path(op, args, info), found.output_spec)


def counted_from_front(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator's arguments with a dim that is not negative; if it is none, or there is none, the same object.

    Some of torch's rules (cumsum, cumprod, logcumsumexp, the gradient of select) take no negative dim for the one that
    is split, and have each rank compute along its part.
    """
    place, sizes = _place_of_dim(op)
    if not place or len(args) <= place or type(args[place]) is not int or args[place] >= 0:
        return args
    dims = args[0].ndim if sizes is None else len(args[sizes])
    return (*args[:place], args[place] + max(1, dims), *args[place + 1 :])


@cache
def _place_of_dim(op: Any) -> tuple[int, int | None]:
    """Where an operator takes the dim that it computes along, no list of dims, and the sizes that it is one of.

    Returns:
        place of the dim, 0 if there is none; of the sizes, which gradients are given, None if they are the tensor's.
    """
    names = [a.name for a in op._schema.arguments]
    sizes = names.index("input_sizes") if "input_sizes" in names else None
    if op._schema._is_view_op() or not names or (names[0] != "self" and sizes is None):
        return 0, None
    kinds = ("int", "Optional[int]")
    found = (i for i, a in enumerate(op._schema.arguments) if a.name == "dim" and str(a.type) in kinds)
    return next(found, 0), sizes


def count_dims_from_front() -> None:
    """The same for torch's own handlers of argmax and argmin, which gather along a negative dim wrongly."""
    from torch.distributed.tensor import DTensor

    def from_front(own: Handler) -> Handler:
        return lambda op, args, kwargs: own(op, counted_from_front(op, args), kwargs)

    table: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    table.update({op: from_front(table[op]) for op in overloads_of(("argmax", "argmin")) if op in table})


def keep_scalars(move: Callable[..., None]) -> Callable[..., None]:
    """``DTensor._op_dispatcher.redistribute_local_args`` that leaves plain scalars as they are beside what is moved.

    To torch's cache of decisions a plain scalar tensor is a number: what was decided for a number (``update + 1.0``)
    is found for the tensor (``update + torch.tensor(1.0)``), and has no layout for it.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    def moved(info: Any, schema: Any, *rest: Any) -> None:
        leaves = _pytree.tree_leaves(schema.args_schema) if info.args_tree_spec is not None else schema.args_schema
        for i, (own, other) in enumerate(zip(info.flat_args_schema, leaves, strict=False)):
            if isinstance(own, DTensorSpec) and not isinstance(other, DTensorSpec):
                info.flat_args_schema[i] = info.local_args[i]
        move(info, schema, *rest)

    return moved


_HALVES = (torch.bfloat16, torch.float16)


def rounds_terms(op: Any, args: Any, kwargs: Any, found: Any) -> bool:
    """Whether each rank would round its term of a sum to 16 bits, where eager mode rounds the sum, once.

    Iterations such as Muon's make of that a large part of an update, where a gradient has a low rank: 33% was
    measured.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    spec = getattr(found, "output_spec", None)
    if not isinstance(spec, DTensorSpec) or spec.tensor_meta is None or op._schema.is_mutable:
        return False
    terms = any(p.is_partial() and n > 1 for p, n in zip(spec.placements, spec.mesh.shape, strict=True))
    if not terms or spec.tensor_meta.dtype not in _HALVES or op._schema._is_view_op():
        return False
    # Else 32 bits are not to be had.
    return any(getattr(value, "dtype", value) in _HALVES for value in _pytree.tree_leaves((args, kwargs)))


def is_of_a_model() -> bool:
    """Whether what is computed is differentiated, or part of a backward pass, and no optimizer's or the like."""
    return torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1


def is_product(op: Any) -> bool:
    """Whether an operator is a matrix product, which takes the kernels of its dtype and is computed whole for that."""
    return op.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot")


def in_32_bits(op: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives of tensors in 32 bits in place of those in 16, and in 32 where it was told to give 16."""

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.float() if value.dtype in _HALVES else value
        return torch.float32 if value in _HALVES else value

    args, kwargs = _pytree.tree_map_only((torch.Tensor, torch.dtype), wide, (args, kwargs))
    return op(*args, **kwargs)


def without_empty(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Without those of shape [0], which ``torch.cat`` takes beside tensors of any shape, and torch's rule splits."""
    left = [t for t in tensors if tuple(t.shape) != (0,)]
    return left or list(tensors)


def is_loss(op: Any) -> bool:
    """Whether an operator is a loss, or its gradient, that torch's rule would divide by the rows of one rank."""
    return any(a.name == "reduction" for a in op._schema.arguments)


def moves_a_view(op: Any, info: Any, found: Any) -> bool:
    """Whether torch would redistribute a tensor before it makes a view of it."""
    if not op._schema._is_view_op() or not getattr(found, "needs_redistribute", False):
        return False
    own, moved = info.schema.args_schema[0], found.redistribute_schema.args_schema[0]
    return bool(own.placements != moved.placements)


def overloads_of(names: Iterable[str]) -> list[Any]:
    """The overloads of ATen's operators of these names."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def written_tensors(op: Any) -> list[str]:
    """Names of an operator's arguments that are ``out=``, if each is a tensor; else none."""
    outs = [a for a in op._schema.arguments if a.is_out]
    return [] if any(a.type.kind() != "TensorType" for a in outs) else [a.name for a in outs]


def take_shape_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Give a DTensor what an operator such as ``squeeze_`` makes of it: local tensor, metadata and shape.

    Args:
        op: that changes its first argument's shape in place.
        args: of it.
        kwargs: of it.
        result: a DTensor, of the operator that makes a view instead.
    """
    from torch.utils._python_dispatch import return_and_correct_aliasing

    tensor = args[0]
    tensor._local_tensor, tensor._spec = result._local_tensor, result._spec
    return_and_correct_aliasing(op, args, kwargs, tensor)  # type: ignore[no-untyped-call]


def leave_trace(op: Any, arguments: Any) -> None:
    """Make ``torch.compile`` run an operator as it is, if it is tracing it: nothing can be sent on fake tensors.

    Raises:
        DataDependentOutputException: tensors, or the parts of DTensors, are fake; torch.compile ends a graph there.
    """
    if any(isinstance(getattr(t, "_local_tensor", t), FakeTensor) for t in tensors_in(arguments)):
        raise DataDependentOutputException(op)


def assign_in_parametrizations() -> None:
    """Let a plain tensor that is assigned to a parametrized weight be written to the DTensors that this is made of.

    Torch swaps a DTensor with what it gets, and fails where that is a plain tensor, or other code holds the tensor.
    """
    from torch.distributed.tensor import DTensor
    from torch.nn.utils import parametrize

    own: Any = parametrize._maybe_set
    if own.__module__ != parametrize.__name__:
        return

    def assigned(dest: torch.Tensor, src: torch.Tensor) -> None:
        # One in another layout is taken as it is: what a parametrization leaves that is removed.
        as_it_lies = not isinstance(src, DTensor) or src.placements == getattr(dest, "placements", None)
        if isinstance(dest, DTensor) and dest.shape == src.shape and as_it_lies:
            dest.copy_(src)
        else:
            own(dest, src)

    parametrize._maybe_set = assigned


def copy_parameters_alone() -> None:
    """Let ``copy.deepcopy`` of a DTensor copy no gradient, as that of a parameter on one device.

    Torch copies the gradient of a DTensor, too, through a storage that it does not have.
    """
    from torch.distributed.tensor import DTensor

    own: Any = torch.Tensor.__deepcopy__

    def deep_copied(tensor: Any, memo: dict[int, Any]) -> Any:
        if id(tensor) in memo or not tensor.is_leaf:
            return own(tensor, memo)
        with torch.no_grad():
            new: Any = tensor.clone()
        if type(new) is not type(tensor):
            return own(tensor, memo)
        others = {k: v for k, v in vars(tensor).items() if k not in vars(new)}
        vars(new).update(copy.deepcopy(others, memo))
        memo[id(tensor)] = new.requires_grad_(tensor.requires_grad)
        return new

    DTensor.__deepcopy__ = deep_copied  # type: ignore[method-assign]
