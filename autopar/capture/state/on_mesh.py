"""Tensors of a mesh that a model keeps between calls, made whole: a graph has those of its attributes as whole ones."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.capture.state.code.owner import Scope
from autopar.capture.state.values import DEEPEST, OWN, children, set_attribute

Whole = Callable[[torch.Tensor], torch.Tensor]
"""The whole tensor on every rank, of one that lies on a mesh; a collective call."""

_OTHERS = (nn.Module, Scope, types.FunctionType, types.MethodType, partial, weakref.ref, ContextVar)
"""What is not the module's own, or cannot be changed."""


def is_on_mesh(value: Any) -> bool:
    """Whether it is a `DTensor`, of which each rank has a part."""
    return hasattr(value, "placements")


def make_whole(module: nn.Module, whole: Whole, inputs: frozenset[int]) -> bool:
    """Replace the tensors on a mesh in a module's attributes, and in containers in these; whether there are any.

    Args:
        module: whose submodules are left alone.
        whole: makes one whole.
        inputs: ids of tensors that stay as they are: parameters and buffers.
    """
    found, seen = False, set[int]()
    for name, value in [(n, v) for n, v in vars(module).items() if n not in OWN]:
        new, changed = _whole_in(value, whole, inputs, seen, 0)
        found = found or changed
        if new is not value:
            vars(module)[name] = new
    return found


def _whole_in(value: Any, whole: Whole, inputs: frozenset[int], seen: set[int], depth: int) -> tuple[Any, bool]:
    """What comes in the place of a value, and whether anything in it has changed."""
    if is_on_mesh(value):
        stays = id(value) in inputs or isinstance(value, nn.Parameter)  # of another model, perhaps
        return (value, False) if stays else (whole(value), True)
    inner = None if isinstance(value, _OTHERS) or depth == DEEPEST or id(value) in seen else children(value)
    if inner is None:
        return value, False
    seen.add(id(value))
    new = [_whole_in(v, whole, inputs, seen, depth + 1) for _, v in inner]
    if not any(changed for _, changed in new):
        return value, False
    kind, values = type(value), [v for (v, _), ((how, _), _) in zip(new, inner, strict=True) if how == "item"]
    if isinstance(value, tuple | set | frozenset):  # which have no items to set
        made = kind(*values) if hasattr(value, "_fields") else kind(values)
        for ((how, key), _), (now, _) in zip(inner, new, strict=True):
            if how == "attr":
                set_attribute(made, key, now)
        return made, True
    for ((how, key), old), (now, _) in zip(inner, new, strict=True):
        if now is not old:
            (value.__setitem__(key, now) if how == "item" else set_attribute(value, key, now))
    return value, True
