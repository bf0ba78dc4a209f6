"""Random functions of torch whose results a trace would order otherwise than eager: numbers go by strides.

Kernels fill a tensor in the order of its storage, so that strides decide which element gets which number, here or in a
later draw of this result's strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from autopar.capture.origins import user_frame
from autopar.errors import CaptureError

_BERNOULLI = frozenset({torch.bernoulli, torch.Tensor.bernoulli})

_ROW_MAJOR = frozenset({torch.poisson, torch.rrelu, functional.rrelu, torch.normal})
"""Functions whose CPU kernels give a row-major result whatever their argument; fake tensors say otherwise.

Not so ``torch.normal`` of a tensor of means, and ``rrelu`` in place.
"""

DRAWING = _BERNOULLI | _ROW_MAJOR
"""What `drawn` calls."""


def drawn(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of `DRAWING`, so that it draws in eager's order and its result has eager's strides.

    Raises:
        CaptureError: ``torch.normal(out=)`` resizes a tensor.
    """
    if func in _BERNOULLI:
        return _bernoulli(func, *args, **kwargs)
    if func is torch.normal and "out" in kwargs:
        return _normal_into(*args, **kwargs)
    result = func(*args, **kwargs)
    if func is torch.normal and isinstance(args[0] if args else kwargs.get("mean"), torch.Tensor):
        return result
    if func is functional.rrelu and (kwargs.get("inplace") or args[4:5] == (True,)):
        return result
    return result.contiguous()


def _bernoulli(func: Any, x: torch.Tensor, p: Any = None, *, out: torch.Tensor | None = None, **rest: Any) -> Any:
    """``torch.bernoulli`` in place of a tensor with the strides of its result, in whose order it draws.

    Functionalization cannot tell it from ``bernoulli_``, which draws in the order of the tensor that it fills.
    """
    if p is not None and out is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(p, **rest)
    if out is not None and out.shape == x.shape:
        return out.bernoulli_(x if p is None else p, **rest)
    return func(x, **({} if p is None else {"p": p}), **({} if out is None else {"out": out}), **rest)


def _normal_into(mean: Any, std: Any = 1.0, size: Any = None, *, out: torch.Tensor, generator: Any = None) -> Any:
    """``torch.normal(..., out=)``, which draws in the order of that tensor."""
    shapes = [t.shape for t in (mean, std) if isinstance(t, torch.Tensor)]
    shape = size or torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    if out.shape != shape:
        file, line = user_frame()
        raise CaptureError(
            f"torch.normal(out=) resizes a tensor of shape {list(out.shape)} to {list(shape)}, at {file}:{line}: leave "
            "out= out, or give it a tensor of that shape"
        )
    return out.normal_(0, 1, generator=generator).mul_(std).add_(mean)
