"""Calls of torch that led to a tensor, noted while a model is traced: for what is known by all its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch_compat import is_transformed, traced_graph, traced_node

_OPERANDS = ("input", "other")
_ARGUMENTS = {
    **dict.fromkeys(("matmul", "mul", "multiply", "div", "true_divide", "divide", "add", "sub", "subtract"), _OPERANDS),
    "bmm": ("input", "mat2"), "baddbmm": ("input", "batch1", "batch2"), "where": ("condition", "input", "other"),
    "masked_fill": ("input", "mask", "value"), "cat": ("tensors", "dim"), "concat": ("tensors", "dim"),
}  # fmt: skip
"""Names of arguments in order, of functions that are often given them by name; of others the first one is ``input``."""


_IN_PLACE = {
    "add_": "add", "__iadd__": "add", "sub_": "sub", "__isub__": "sub", "mul_": "mul", "__imul__": "mul",
    "div_": "div", "__itruediv__": "div", "masked_fill_": "masked_fill",
}  # fmt: skip
"""Functions that write to their first argument, and those that give the same."""


class OtherError(Exception):
    """What is computed is something else than what was looked for."""


@dataclass(frozen=True)
class Written:
    """A tensor as it was before a call that writes to it, and the nodes of the other arguments then."""

    node: fx.Node
    shape: torch.Size
    dtype: torch.dtype
    others: tuple[fx.Node | None, ...]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """As of a tensor."""
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class Call:
    """A call of a function, and the nodes of its tensors at that time: what is written to has another one later."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    nodes: tuple[fx.Node | None, ...]
    has_gradients: bool

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        """An argument by its name or its position."""
        return self.kwargs.get(name, self.args[position] if position < len(self.args) else default)


class Calls:
    """The last call that made each tensor, of functions of some names."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._calls: dict[fx.Node, Call] = {}

    def written(self, func: Any, args: Sequence[Any]) -> Written | None:
        """What a call is about to write to; None: it is no such call, or of no function of these names."""
        name = _IN_PLACE.get(getattr(func, "__name__", ""))
        if name not in self._names or traced_graph() is None or not args or not isinstance(args[0], Tensor):
            return None
        tensors = _tensors(args)
        if any(is_transformed(t) for t in tensors):
            return None
        node, *others = (traced_node(t) for t in tensors)
        return None if node is None else Written(node, args[0].shape, args[0].dtype, tuple(others))

    def note(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, written: Written | None = None
    ) -> None:
        """Note a call of a function of torch; ``written`` is what it has written to."""
        name = name_of(func) if written is None else _IN_PLACE[func.__name__]
        if name not in self._names or traced_graph() is None:
            return
        if written is not None:
            # What is a view of the tensor was written to, too.
            if tuple(traced_node(t) for t in _tensors(args[1:])) != written.others:
                return
            args = (written, *args[1:])
        args, kwargs = _in_order(name, args, kwargs)
        made = result[0] if isinstance(result, tuple) and result else result
        tensors = _tensors(args)
        # What is written to a tensor that is given by name otherwise would not be seen.
        if not isinstance(made, Tensor) or not args or _tensors(tuple(kwargs.values())):
            return
        if any(is_transformed(t) for t in (made, *tensors)):
            return
        node, nodes = traced_node(made), tuple(traced_node(t) for t in tensors)
        # A function that gives its argument is none.
        if node is not None and node not in nodes:
            self._calls[node] = Call(name, args, kwargs, nodes, torch.is_grad_enabled())

    def of(self, tensor: Any, *names: str) -> Call:
        """The call that made a tensor.

        Raises:
            OtherError: its arguments are no more what they were, or it is a call of another function than ``names``.
        """
        node = traced_node(tensor) if isinstance(tensor, Tensor) else getattr(tensor, "node", None)
        call = self._calls.get(node) if node is not None else None
        if call is None or tuple(traced_node(t) for t in _tensors(call.args)) != call.nodes or None in call.nodes:
            raise OtherError
        if call.has_gradients != torch.is_grad_enabled():
            raise OtherError  # what was computed without gradients has none
        if names and call.name not in names:
            raise OtherError
        return call


def name_of(func: Any) -> str:
    """A function's name, without underscores; of ``tensor.mT`` that of the attribute."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name.strip("_")


def is_last(d: Any, tensor: Tensor) -> bool:
    """Whether an argument is the number of a tensor's last dim."""
    return isinstance(d, int) and d in (-1, tensor.ndim - 1)


def _in_order(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with those by position that were given by name."""
    ordered, left = list(args), dict(kwargs)
    for argument in _ARGUMENTS.get(name, ("input",))[len(args) :]:
        if argument not in left:
            break
        ordered.append(left.pop(argument))
    return tuple(ordered), left


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
