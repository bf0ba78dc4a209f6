"""`Conditions`: the values that a call looks at to raise or to warn, each as a number that is zero if all is well.

A sum over samples can be made of microbatches, and of each device's part; whether any value of all is too large cannot.
So ``(labels >= n).any()`` becomes the number of such labels, and ``labels.max() >= n`` of integers, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from autopar._torch_compat import is_traced, is_transformed
from autopar.capture.checks.statements import find_check, is_number_of_check

_COMPARED = {
    "__ge__": "ge", "__gt__": "gt", "__le__": "le", "__lt__": "lt", "greater_equal": "ge", "greater": "gt",
    "less_equal": "le", "less": "lt", **{n: n for n in ("ge", "gt", "le", "lt")},
}  # fmt: skip
_ORDERS = frozenset(("ge", "gt", "le", "lt"))
_GREATEST, _LEAST = frozenset(("max", "amax")), frozenset(("min", "amin"))
_NOT = frozenset(("logical_not", "__invert__", "bitwise_not"))
_JOINED = {
    **dict.fromkeys(("__or__", "__ror__", "logical_or", "bitwise_or"), True),
    **dict.fromkeys(("__and__", "__rand__", "logical_and", "bitwise_and"), False),
}
_KEPT = frozenset(("any", "all", *_GREATEST, *_LEAST, *_NOT, *_JOINED, *_COMPARED))
"""Names of functions whose calls are remembered."""


_BETWEEN = ("autopar.capture.", "torch._subclasses.")


def calling_frame() -> FrameType:
    """Whose code calls torch: also through torch's own way from a traced tensor's `bool()` to its `item()`."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__", "")).startswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    return frame


class Conditions:
    """Of one call."""

    def __init__(self) -> None:
        """Nothing has been looked at."""
        self.found: list[tuple[torch.Tensor, Callable[[], None]]] = []
        self._made: dict[int, tuple[torch.Tensor, str, tuple[Any, ...]]] = {}
        self._closed = False

    def remember(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """What made a value that code may look at."""
        if func.__name__ in _KEPT and isinstance(result, torch.Tensor) and is_traced(result) and not kwargs:
            self._made[id(result)] = result, func.__name__, args  # with the tensor, or another could have its id

    def forget(self) -> None:
        """A tensor is written to: what was computed of it before has other values than it now has."""
        self._made.clear()

    def close(self) -> None:
        """The call has ended: what is looked at from now on, in the backward pass, is no result of it."""
        self._closed = True
        self._made.clear()

    def require(self, condition: torch.Tensor, message: str) -> None:
        """``torch._assert``: raise after the step if a scalar is not true."""

        def fail() -> None:
            raise AssertionError(message)

        with torch.no_grad():
            counts = self._counts(condition.detach(), False, condition)
            self.found.append((torch.stack([c.sum() for c in counts]).sum(), fail))

    def answer(self, tensor: torch.Tensor) -> Any:
        """What code is told that looks at a value of the batch or a parameter; `NotImplemented`: more depends on it."""
        frame = calling_frame()
        if self._closed or is_transformed(tensor) or tensor.numel() != 1:
            return NotImplemented
        if is_number_of_check(frame):
            return self._number(tensor)
        check = find_check(frame)
        if check is None:
            return NotImplemented
        with torch.no_grad():
            if check.compared is None:
                counts = self._counts(tensor.detach().reshape(()), check.failing, tensor)
            elif tensor.is_floating_point() and isinstance(check.answer, int):
                return NotImplemented  # rounded
            else:
                counts = self._comparison(self._number(tensor), *check.compared, check.failing)
            for other, failing in check.beside:
                value = other()
                if not isinstance(value, torch.Tensor):
                    if bool(value) != failing:
                        return check.answer
                    continue
                # Both have to fail: no number of values, but one that says whether they do.
                own = value.bool().reshape(())
                joined = own if failing else own.logical_not()
                counts = [torch.stack([c.any() for c in counts]).any().logical_and(joined)]
            self.found.append((torch.stack([c.sum() for c in counts]).sum(), check.fail))
        return check.answer

    def _number(self, tensor: torch.Tensor) -> torch.Tensor:
        """A number that Python would have, as exact as it would be."""
        found = tensor.detach().reshape(())
        found = found.double() if found.is_floating_point() else found
        if id(tensor) in self._made:
            self._made[id(found)] = found, *self._made[id(tensor)][1:]
        return found

    def _comparison(self, value: torch.Tensor, name: str, other: Any, failing: bool) -> list[torch.Tensor]:
        """Tensors of which nothing is true if a scalar that is compared with a number is not ``failing``."""
        _, inner, whole = self._made.get(id(value), (None, "", ()))
        # Where the largest one is too large, some are, and where it is not large enough, none is.
        names = _GREATEST if (name in ("ge", "gt")) == failing else _LEAST
        if name in _ORDERS and inner in names and len(whole) == 1 and not whole[0].is_floating_point():
            value = whole[0]
        found: torch.Tensor = getattr(torch, name)(value, other)
        return [found if failing else found.logical_not()]

    def _counts(self, value: torch.Tensor, failing: bool, of: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of which nothing is true if ``value`` is not ``failing``.

        Args:
            value: a scalar.
            failing: what it may not be.
            of: the tensor that it is, as the code has it.
        """
        _, name, args = self._made.get(id(of), (None, "", ()))
        first = args[0] if args else None
        if isinstance(first, torch.Tensor):
            if ((name in ("any", "max") and failing) or (name in ("all", "min") and not failing)) and _is_true(first):
                return self._counts(first, failing, first)
            if name in _NOT and first.dtype == torch.bool:
                return self._counts(first, not failing, first)
            if name in _JOINED and _JOINED[name] == failing and all(_is_true(a) for a in args):
                return [c for a in args for c in self._counts(a, failing, a)]
            if name in _COMPARED and not isinstance(args[1], torch.Tensor):
                return self._comparison(first, _COMPARED[name], args[1], failing)
        true = value if value.dtype == torch.bool else value.ne(0)
        return [true if failing else true.logical_not()]


def _is_true(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bool
