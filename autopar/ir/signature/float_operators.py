"""Operators of torch beside floats that are inputs of a graph, see `autopar.ir.signature.floats`.

Each takes the user's arguments, of which some are a `Float`, puts a tensor in its place, and returns NotImplemented
where the result could differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.ir.signature.pytree import FloatProxy


def is_traced(value: Any) -> bool:
    """Whether it stands for a float; to ``isinstance`` it is one."""
    return issubclass(type(value), FloatProxy)


_LOW = (torch.bfloat16, torch.float16)
_SUMS = ("add", "__add__", "__radd__", "sub", "__sub__", "subtract")


def _dtype(*values: Any) -> torch.dtype | None:
    """What torch promotes tensors to beside a Python float; None: not a floating dtype of the usual ones."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    found = (
        # A Python float never raises a floating tensor's precision, and makes an integer tensor floating.
        torch.result_type(tensors[0], 1.0) if len(tensors) == 1 else torch.get_default_dtype() if not tensors else None
    )
    return found if found in (torch.float32, torch.float64, *_LOW) else None


def _as(value: Any, dtype: torch.dtype) -> Any:
    """A float as a tensor of a dtype; other arguments as they are."""
    if not is_traced(value):
        return value
    assert value.tensor is not None  # those without one were replaced by their values
    return value.tensor.to(dtype)


def _arithmetic(function: Any, a: Any, b: Any, **options: Any) -> Any:
    """``add``, ``sub``, ``mul``, ``div``.

    In 16 bits torch computes with the whole float in 32 bits and rounds the result, but sums on a CPU round it before.
    """
    dtype = _dtype(a, b)
    if options or dtype is None or not (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)):
        return NotImplemented
    # In 32 bits and more torch rounds the float to the tensor's dtype first, as the cast does.
    if dtype not in _LOW:
        return function(_as(a, dtype), _as(b, dtype))
    tensor = a if isinstance(a, torch.Tensor) else b
    if tensor.device.type == "cpu" and function.__name__ in _SUMS:
        return function(_as(a, dtype), _as(b, dtype))
    wide = [v.float() if isinstance(v, torch.Tensor) else _as(v, torch.float32) for v in (a, b)]
    return function(*wide).to(dtype)


def _reversed(function: Any, a: Any, b: Any, **options: Any) -> Any:
    return _arithmetic(torch.sub, b, a, **options)


def _in_place(function: Any, a: Any, b: Any, **options: Any) -> Any:
    # In place the result keeps its dtype; how kernels round in 16 bits on the way is not reproduced here.
    plain = isinstance(a, torch.Tensor) and a.dtype in (torch.float32, torch.float64) and is_traced(b)
    return function(a, _as(b, a.dtype)) if plain and not options else NotImplemented


def _of_tensors(function: Any, a: Any, b: Any, **options: Any) -> Any:
    """Powers and comparisons."""
    dtype = _dtype(a, b)
    if options or dtype in (None, *_LOW) or not (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)):
        return NotImplemented
    assert dtype is not None
    # An integer tensor to a float power: torch's promotion of powers is not reproduced here.
    if function.__name__ == "pow" and not all(v.is_floating_point() for v in (a, b) if isinstance(v, torch.Tensor)):
        return NotImplemented
    return function(_as(a, dtype), _as(b, dtype))


def _where(function: Any, condition: Any, a: Any = None, b: Any = None, **options: Any) -> Any:
    dtype = _dtype(a, b)
    if options or dtype is None or a is None or b is None or function is torch.Tensor.where:
        return NotImplemented
    return function(condition, _as(a, dtype), _as(b, dtype))


def _masked_fill(function: Any, x: Any, mask: Any, value: Any) -> Any:
    return function(x, mask, _as(value, x.dtype)) if x.is_floating_point() else NotImplemented


def _clamp(function: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    if is_traced(x) or x.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    plain = (int, float)
    bounds = [torch.full((), v, dtype=x.dtype, device=x.device) if type(v) in plain else v for v in (min, max)]
    # Bounds of another dtype would promote the result.
    if any(not is_traced(v) and v is not None and v.dtype != x.dtype for v in bounds):
        return NotImplemented
    low, high = (_as(v, x.dtype) for v in bounds)
    return torch.clamp(x, low, high)


def _clamp_min(function: Any, x: Any, min: Any) -> Any:
    return _clamp(function, x, min=min)


def _clamp_max(function: Any, x: Any, max: Any) -> Any:
    return _clamp(function, x, max=max)


def _lerp(function: Any, start: Any, end: Any, weight: Any) -> Any:
    same = isinstance(end, torch.Tensor) and start.dtype == end.dtype in (torch.float32, torch.float64)
    return function(start, end, _as(weight, start.dtype)) if same else NotImplemented


def _full_like(function: Any, x: Any, value: Any, **options: Any) -> Any:
    if options or not x.is_floating_point():
        return NotImplemented
    return torch.ones_like(x) * _as(value, x.dtype)


def _full(function: Any, size: Any, value: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Any:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if options or not dtype.is_floating_point or not is_traced(value) or any(is_traced(n) for n in size):
        return NotImplemented
    return torch.ones(size, dtype=dtype, device=device) * _as(value, dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"), _arithmetic),
    **dict.fromkeys(("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__", "__div__"), _arithmetic),
    **dict.fromkeys(("rsub", "__rsub__"), _reversed),
    **dict.fromkeys(("add_", "sub_", "mul_", "div_", "multiply_", "divide_", "subtract_"), _in_place),
    **dict.fromkeys(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "fill_"), _in_place),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "less", "greater", "pow", "__pow__"), _of_tensors),
    **dict.fromkeys(("where",), _where),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _masked_fill),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": _clamp_min, "clamp_max": _clamp_max, "lerp": _lerp, "lerp_": _lerp, "full_like": _full_like,
    "full": _full,
}  # fmt: skip
"""By the names of torch's functions and methods."""
