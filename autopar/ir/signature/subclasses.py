"""Tensors of classes that change what torch's functions do with them: a graph would be of plain tensors instead."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autopar._torch_compat import is_traced
from autopar.errors import CaptureError

_KNOWN = (torch.Tensor, nn.Parameter, nn.Buffer)

_METHOD, _DISPATCH = "__torch_function__", "__torch_dispatch__"

_AS_THEY_ARE = tuple(vars(kind)[_METHOD] for kind in (torch.Tensor, nn.Parameter))
"""Such a method calls torch's functions as they are."""


def refuse_own_functions(named: Iterable[tuple[str, torch.Tensor]], libraries: bool = True) -> None:
    """Refuse tensors of which a graph would compute something else.

    Args:
        named: tensors, with what they are.
        libraries: also of classes of installed libraries; those of images and scans have notes beside their values.

    Raises:
        CaptureError: there is one; names it.
    """
    for name, tensor in named:
        method = _changed_by(tensor)
        if method == _DISPATCH or (method and (libraries or not _is_installed(type(tensor)))):
            kind = type(tensor)
            raise CaptureError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, whose {method} changes what torch's functions do "
                "with it: a graph is of plain tensors; take a plain one (x.as_subclass(torch.Tensor), nn.Parameter), "
                "and call in forward what it does"
            )


def _changed_by(tensor: torch.Tensor) -> str:
    """By which method a tensor's class changes torch's functions; empty: by none."""
    kind = type(tensor)
    # Those of torch.distributed are laid out or awaited, lazy ones have an error of their own.
    if kind in _KNOWN or kind.__module__.startswith("torch.distributed.") or is_lazy(tensor) or is_traced(tensor):
        return ""
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return _DISPATCH
    own = next(vars(c)[_METHOD] for c in kind.__mro__ if _METHOD in vars(c))
    return "" if own in _AS_THEY_ARE else _METHOD


def _is_installed(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return any(part in ("site-packages", "dist-packages") for part in Path(file).parts)
