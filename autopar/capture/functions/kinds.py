"""What Python and torch say that tensors are, which a trace has in place of parameters and of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autopar._torch_compat import is_traced, is_transformed


def mark_parameter(tensor: torch.Tensor) -> None:
    """A tensor in the place of a parameter is one, as far as ``isinstance(tensor, nn.Parameter)`` tells."""
    vars(tensor)["_is_param"] = True


def _is_marked(tensor: torch.Tensor) -> bool:
    return not is_transformed(tensor) and bool(vars(tensor).get("_is_param"))


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor would be a leaf of autograd's graph in eager mode, where the call begins."""
    return _is_marked(tensor) or not tensor.requires_grad or bool(tensor.is_leaf)


class _OfType(type):
    """Makes `_Type` what `type` is to whoever asks for more than the class of an object."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], torch.Tensor) and is_traced(arguments[0]):
            return nn.Parameter if _is_marked(arguments[0]) else torch.Tensor
        return type(*arguments, **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is type

    def __hash__(cls) -> int:
        return hash(type)


class _Type(metaclass=_OfType):
    """``type`` in the user's code while it is traced: a tensor's class is that of eager mode."""


@contextlib.contextmanager
def classes_of_eager(spaces: Sequence[dict[str, Any]]) -> Iterator[None]:
    """While it lasts, ``type(tensor)`` in the user's code is the class that the tensor has in eager mode.

    Args:
        spaces: globals of that code.
    """
    put = [space for space in spaces if "type" not in space]
    for space in put:
        space["type"] = _Type
    try:
        yield
    finally:
        for space in put:
            del space["type"]
