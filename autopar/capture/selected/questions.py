"""`RowQuestions`: what code is told that asks how many rows a mask selects, while it is traced.

Torch's own code asks whether there is one row, or none, to do the same quicker: it is told that there are many. A model
that asks (``if rows.shape[0] == 0``) is told so, too; after a step it is checked that there were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import sympy
import torch

from autopar._torch_compat import OpOverload, is_transformed, storage_id, tensors_in, written_by
from autopar.capture.checks.after_step import refusal
from autopar.capture.origins import user_frame

_SYMBOLIC = ("torch", "torch.fx.experimental.", "torch.utils._sympy.", "sympy.")
"""Modules of numbers that stand for a size; of the first itself, not of those within it."""

_MOST = 2
"""The largest number of rows from which on all may be told the same."""

_LENGTH = len

_EXTREMA = frozenset(("amax", "amin", "max", "min", "argmax", "argmin", "aminmax"))
"""Names of functions that have no result of no elements."""

_INDEX = torch.ops.aten.index.Tensor
SELECTS = frozenset({_INDEX, torch.ops.aten.masked_select.default, torch.ops.aten.nonzero.default})
"""Operators whose results are as many as a mask selects."""


@dataclass(frozen=True)
class _Selection:
    """What a mask selects.

    Attributes:
        size: how many elements: torch's number, that has a symbol until it is known.
        count: the same, in a tensor.
        line: of the user's.
    """

    size: Any
    count: torch.Tensor
    line: str


class RowQuestions:
    """Of one trace.

    Attributes:
        required: by torch's symbols, the least number of rows that was told, and where.
    """

    def __init__(self) -> None:
        """Nothing has been asked."""
        self.required: dict[Any, tuple[int, str]] = {}
        self._selections: dict[Any, _Selection] = {}
        self._made: dict[Any, tuple[torch.Tensor, Any]] = {}
        self._alike: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self) -> None:
        """A trace begins anew."""
        for table in (self.required, self._selections, self._made, self._alike):
            table.clear()

    def answer(self, asked: Any) -> bool | None:
        """What code is told; None: that depends on how many rows there are.

        Args:
            asked: a condition, a `sympy` expression.
        """
        least, found = of_many(asked)
        if found is None:
            return None
        frame = _asking()
        module = str(frame.f_globals.get("__name__", ""))
        # A model's own question, or one to raise where there is a single row (`torch.nn.functional.batch_norm`).
        if not module.startswith(("torch.", "autopar.")) or frame.f_code.co_name == "_verify_batch_size":
            for symbol in asked.free_symbols:
                self.require(symbol, least, f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return found

    def require(self, symbol: Any, least: int, line: str) -> None:
        """Check after a step that there are so many rows."""
        if least > self.required.get(symbol, (0, ""))[0]:
            self.required[symbol] = least, line

    def length(self, value: Any) -> Any:
        """``len(x)``; Python takes whole numbers alone, and of selected rows there is a symbol."""
        size: Any = value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else None
        return size if isinstance(size, torch.SymInt) else _LENGTH(value)

    def require_some(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Torch's maxima of no rows are errors."""
        if function.__name__ not in _EXTREMA or not args or not isinstance(args[0], torch.Tensor):
            return
        given = kwargs.get("dim", args[1] if len(args) > 1 else None)
        along = range(args[0].ndim) if given is None else [given] if isinstance(given, int) else given
        if isinstance(along, Sequence):
            for d in along:
                for symbol in _symbols(args[0].shape[d]):
                    self.require(symbol, 1, "{}:{}".format(*user_frame()))

    def checks(self) -> list[tuple[torch.Tensor, Callable[[], None], int, int]]:
        """What has to be checked after a step: a count, what fails, and the least and the most that there may be."""
        asked = [
            (
                self._selections[symbol].count,
                refusal(
                    f"the model asks how many rows a mask selects, at {line}, and its graph is that of {least} or "
                    "more; of this batch there are fewer: leave such batches out, or keep all rows and compute with "
                    "torch.where(mask, a, b)"
                ),
                least,
                sys.maxsize,
            )
            for symbol, (least, line) in self.required.items()
            if symbol in self._selections
        ]
        # What rows meet may say how many there are: a dim of so many elements.
        known = [s for s in self._selections.values() if s.size.node.expr.is_number]
        return asked + [
            (
                s.count,
                refusal(f"a mask has to select {int(s.size)} elements, as the model uses them, at {s.line}"),
                int(s.size),
                int(s.size),
            )
            for s in known
        ]

    def same(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an operator that selects, with a mask in place of another one that is computed alike.

        So what it selects twice has one number of rows.
        """
        if func not in SELECTS:
            return args
        if func is _INDEX:
            return (args[0], [self._first(i) for i in args[1]], *args[2:])
        return tuple(self._first(a) for a in args)

    def _first(self, value: Any) -> Any:
        """The first of masks that are computed alike, or the value itself."""
        return self._alike[id(value)][1] if id(value) in self._alike else value

    def _remember(self, func: Any, args: Any, kwargs: Any, made: torch.Tensor) -> None:
        """What made a mask; nothing has been written since to what it was made of."""

        def token(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return tuple(map(token, value))
            return ("tensor", id(self._first(value))) if isinstance(value, torch.Tensor) else repr(value)

        key = func, token(args), token([*kwargs.items()])
        first = self._made.setdefault(key, (made, (args, kwargs)))[0]  # with its arguments, whose ids others could have
        if first is not made:
            self._alike[id(made)] = made, first

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        if not self._made:
            return
        written = {storage_id(t) for t in written_by(func, args, kwargs)}

        def is_as_it_was(made: torch.Tensor, given: Any) -> bool:
            return written.isdisjoint(storage_id(t) for t in (made, *tensors_in(given)))

        self._made = {key: entry for key, entry in self._made.items() if is_as_it_was(*entry)}
        self._alike = {key: both for key, both in self._alike.items() if is_as_it_was(*both)}

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """An operator has made a tensor of others: a mask, or what one selects."""
        if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
            return
        if func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        if not isinstance(made, torch.Tensor) or is_transformed(made):
            return
        if made.dtype == torch.bool and not {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view} & {*func.tags}:
            self._remember(func, args, kwargs, made)
        if func not in SELECTS:
            return
        for size in made.shape:
            for symbol in _symbols(size):
                mask = None if symbol in self._selections else _mask(func, args)
                if mask is not None:
                    self._selections[symbol] = _Selection(size, mask.sum(), "{}:{}".format(*user_frame()))


def _symbols(size: Any) -> Sequence[Any]:
    """What a size is computed of."""
    return tuple(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else ()


def _mask(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    if func is torch.ops.aten.nonzero.default:
        return args[0] if args[0].dtype == torch.bool else args[0].ne(0)  # type: ignore[no-any-return]
    if func is torch.ops.aten.masked_select.default:
        return torch.broadcast_to(args[1], torch.broadcast_shapes(args[0].shape, args[1].shape))  # type: ignore[no-untyped-call]
    masks = [i for i in args[1] if i is not None]
    return masks[0].bool() if len(masks) == 1 else None


def of_many(asked: Any) -> tuple[int, bool | None]:
    """From how many rows on a condition has one answer, and that; None: it depends on larger numbers.

    Args:
        asked: comparisons of numbers of rows, or what joins some, as `sympy` has them.
    """
    plain = asked.replace(lambda e: type(e).__name__ == "ToFloat", lambda e: e.args[0])
    least = 0
    for compared in plain.atoms(sympy.core.relational.Relational):
        own = _constant_from(compared)
        if own is None:
            return 0, None
        least = max(least, own)
    found = plain.xreplace({s: sympy.Integer(10**9) for s in plain.free_symbols})
    return (least, bool(found)) if found in (True, False) else (0, None)


def _constant_from(compared: Any) -> int | None:
    """From how many rows on a comparison stays as it is: of a product of numbers of rows with another number."""
    constant, product = sympy.expand(compared.lhs - compared.rhs).as_coeff_Add()
    factor, product = product.as_coeff_Mul()
    powers = product.as_powers_dict()
    if not all(base.is_Symbol and exponent.is_Integer and exponent > 0 for base, exponent in powers.items()):
        return None
    degree, limit = sum(powers.values()), -constant / factor
    beyond = compared.func(factor * 10**9 + constant, 0)
    for n in range(_MOST + 1):
        fewest = n**degree
        if fewest > limit or (fewest == limit and compared.func(factor * fewest + constant, 0) == beyond):
            return n
    return None


def _asking() -> FrameType:
    """Whose code asks: behind torch's own that knows what a number stands for."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        own = name == __name__ or name == "autopar._torch_compat.traced"
        if not own and name != _SYMBOLIC[0] and not name.startswith(_SYMBOLIC[1:]):
            break
        frame = frame.f_back
    return frame
