"""Everything in float64: models contain casts and constants of lower precision, whose rounding hides wrong layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autopar.ir.graph import copy_graph
from autopar.ir.program import Program

aten = torch.ops.aten

HALF_TO_FLOAT = {aten._softmax.default: 2, aten._log_softmax.default: 2}
"""Operators that take float16 to float32, and the number of the argument that says so."""


def grouped_mm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What `torch._grouped_mm` computes: groups are parts of rows, of columns or of what is summed over, or batched."""
    if offs is None:
        return rows @ weight
    cuts = list(itertools.pairwise([0, *offs.tolist()]))
    if rows.ndim == weight.ndim:
        return torch.stack([rows[:, a:b] @ weight[a:b] for a, b in cuts])
    made = rows.new_zeros(rows.shape[-2], weight.shape[-1])
    for i, (a, b) in enumerate(cuts):
        if rows.ndim == 2:
            made[a:b] = rows[a:b] @ weight[i]
        else:
            made[:, a:b] = rows[i] @ weight[:, a:b]
    return made


WITHOUT_KERNEL: dict[Any, Any] = {aten._grouped_mm.default: grouped_mm}
"""Operators that have no kernel for float64, and what computes the same."""


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Within, tensors that are created without a dtype have this one; None: torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in ``dtype``, in its complex form if it is complex; as it is if it is neither, or for None."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def as_dtype(program: Program, dtype: torch.dtype = torch.float64) -> Program:
    """A copy of the program whose every floating cast, constant and creation is in ``dtype``."""
    module = copy_graph(program.graph)
    for node in list(module.graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:  # of the dtype that was
            module.graph.erase_node(node)
        elif node.op == "call_function":
            node.args = cast_dtypes(node.args, dtype)
            node.kwargs = cast_dtypes(node.kwargs, dtype)
            if dtype is torch.float64 and node.target in WITHOUT_KERNEL:
                node.target = WITHOUT_KERNEL[node.target]
            if node.target in HALF_TO_FLOAT:
                # The flag demands float16 inputs, which are none now.
                node.update_arg(HALF_TO_FLOAT[node.target], False)
        if node.op == "get_attr":
            constant = getattr(module, str(node.target))
            if isinstance(constant, torch.Tensor):
                setattr(module, str(node.target), in_dtype(constant, dtype))
    module.recompile()
    return replace(program, graph=module)


def cast_dtypes(value: Any, dtype: torch.dtype) -> Any:
    """Arguments of an operator with ``dtype`` for every floating dtype among them."""
    if isinstance(value, torch.dtype):
        return dtype if value.is_floating_point else dtype.to_complex() if value.is_complex else value
    if isinstance(value, tuple):
        return tuple(cast_dtypes(v, dtype) for v in value)
    if isinstance(value, list):
        return [cast_dtypes(v, dtype) for v in value]
    if isinstance(value, dict):
        return {k: cast_dtypes(v, dtype) for k, v in value.items()}
    return value
