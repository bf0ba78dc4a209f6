"""Operators of users' code that write to a tensor of the mesh and torch runs wrongly, or not at all.

In-place operators that change a shape: torch leaves the old shape to ``vector @ matrix``, which ends in a ``squeeze_``.
``out=`` beside a tensor of the mesh, or of one; factories among them (``nn.init.eye_``) would give each rank's
part the size of the whole. ``as_strided``, by which ``fill_diagonal_`` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._torch_compat import (
    handle_operators,
    operators_where,
    overloads_of,
    storage_id,
    take_shape_in_place,
    written_tensors,
)
from autopar.errors import AutoparError
from autopar.runtime.dtensor import full_tensor

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_CHANGE_SHAPE = ("squeeze_", "t_", "transpose_", "unsqueeze_")


def install_written_operators(run: Run) -> None:
    """Let tensors of the mesh be written to by the operators of this module, for this process.

    Args:
        run: an operator on whole tensors.
    """
    writing = [op for op in operators_where(lambda s: any(a.is_out for a in s.arguments)) if written_tensors(op)]
    handle_operators(writing, lambda op, own: run if _makes(op) else _into)
    handle_operators(overloads_of(_CHANGE_SHAPE), lambda op, own: _change_shape)
    handle_operators([torch.ops.aten.as_strided.default], lambda op, own: _strided_by(own, run))


def _makes(op: Any) -> bool:
    """Whether an operator makes a tensor of sizes, or draws it: torch would resize a rank's part to them."""
    read = [a for a in op._schema.arguments if not a.is_out and "Tensor" in str(a.type)]
    return not read or torch.Tag.nondeterministic_seeded in op.tags


def shape_of_a_copy(op: Any, view: torch.Tensor) -> AutoparError:
    """The error where a view would take another shape in place that is a copy, or would become one."""
    name = op.overloadpacket.__name__.removesuffix("_")
    return AutoparError(
        f"{op} would change the shape of a view of a tensor on the mesh, {list(view.shape)}, which is or would be a "
        f"copy here: call {name}(), without the underscore"
    )


def _change_shape(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: Any = args[0]
    name = op.overloadpacket.__name__.removesuffix("_")
    made = getattr(torch.ops.aten, name)(tensor.detach(), *args[1:], **kwargs)
    if tensor._is_view() and storage_id(made._local_tensor) != storage_id(tensor._local_tensor):
        raise shape_of_a_copy(op, tensor)
    take_shape_in_place(op, args, kwargs, made)
    return args[0]


def _into(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.sort(p, out=(a, b))``: the results, which are copied; a plain tensor gets the whole of one."""
    names = written_tensors(op)
    given = [kwargs[name] for name in names]
    made = op.overloadpacket(*args, **{k: v for k, v in kwargs.items() if k not in names})
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    for out, result in zip(given, results, strict=True):
        _require_out(op, out, result)
    for out, result in zip(given, results, strict=True):
        if not isinstance(out, DTensor) and out.shape != result.shape:
            out.resize_(result.shape)
        # Each rank's term of a minimum, say, is none of a sum.
        apart = isinstance(result, DTensor) and any(p.is_partial() for p in result.placements)
        out.copy_(result if isinstance(out, DTensor) and not apart else full_tensor(result))
    return given[0] if len(given) == 1 else tuple(given)


def _require_out(op: Any, out: torch.Tensor, result: torch.Tensor) -> None:
    if isinstance(out, DTensor) and result.shape != out.shape:
        raise AutoparError(
            f"{op} is given a tensor of shape {list(out.shape)} for a result of shape {list(result.shape)}: leave out= "
            "away, or give a tensor of that shape"
        )
    if not torch.can_cast(result.dtype, out.dtype):
        raise AutoparError(
            f"{op} is given a tensor of {out.dtype} for a result of {result.dtype}: leave out= away, or give a tensor "
            "of that dtype"
        )


def _strided_by(own: Run | None, run: Run) -> Run:
    """Torch's handler of ``as_strided``, and whole tensors where it gives up."""

    def strided(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        try:
            if own is not None:
                return own(op, args, kwargs)
        except RuntimeError:
            # Strides are those of a whole tensor as torch gathers it.
            if not tensor.is_contiguous():
                raise
        return run(op, args, kwargs)

    return strided
