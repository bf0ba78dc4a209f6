"""`RowQuestions`: what code is told that asks how many rows a mask selects, while it is traced.

Torch's own code asks whether there is one row, or none, to do the same quicker: it is told that there are many. A model
that asks (``if rows.shape[0] == 0``) is told so, too; after a step it is checked that there were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import sympy
import torch

from autopar._torch_compat import is_transformed
from autopar.capture.checks.after_step import refusal
from autopar.capture.origins import user_frame

_SYMBOLIC = ("torch", "torch.fx.experimental.", "torch.utils._sympy.", "sympy.")
"""Modules of numbers that stand for a size; of the first itself, not of those within it."""

_MANY = (2, 3, 4, 7, 64, 1009, 10**6 + 3)
"""Numbers of rows; what is true of all of these is true of many."""

_EXTREMA = frozenset(("amax", "amin", "max", "min", "argmax", "argmin", "aminmax"))
"""Names of functions that have no result of no elements."""

SELECTS = frozenset({torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default, torch.ops.aten.nonzero.default})
"""Operators whose results are as many as a mask selects."""


class RowQuestions:
    """Of one trace.

    Attributes:
        required: by torch's symbols, the least number of rows that was told, and where.
        counts: by symbols, how many rows there are, in a tensor.
    """

    def __init__(self) -> None:
        """Nothing has been asked."""
        self.required: dict[Any, tuple[int, str]] = {}
        self.counts: dict[Any, torch.Tensor] = {}

    def forget(self) -> None:
        """A trace begins anew."""
        self.required.clear()
        self.counts.clear()

    def answer(self, asked: Any) -> bool | None:
        """What code is told; None: that depends on how many rows there are.

        Args:
            asked: a condition, a `sympy` expression.
        """
        least, found = _of_many(asked)
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

    def checks(self) -> list[tuple[torch.Tensor, Callable[[], None], int]]:
        """What has to be checked after a step: a count, what fails, and how many there must be."""
        return [
            (
                self.counts[symbol],
                refusal(
                    f"the model asks how many rows a mask selects, at {line}, and its graph is that of {least} or "
                    "more; of this batch there are fewer: leave such batches out, or keep all rows and compute with "
                    "torch.where(mask, a, b)"
                ),
                least,
            )
            for symbol, (least, line) in self.required.items()
            if symbol in self.counts
        ]

    def note(self, func: Any, args: Sequence[Any], made: Any) -> None:
        """An operator has selected rows: ``made`` of ``args``."""
        if func not in SELECTS or not isinstance(made, torch.Tensor) or is_transformed(made):
            return
        for symbol in [s for size in made.shape for s in _symbols(size) if s not in self.counts]:
            mask = _mask(func, args)
            if mask is not None:
                self.counts[symbol] = mask.sum()


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


def _of_many(asked: Any) -> tuple[int, bool | None]:
    """From how many rows on a condition has one answer, and that; None where it has several."""

    def of(n: int) -> bool | None:
        # Other numbers for each symbol: masks need not select as many.
        found = asked.xreplace({s: sympy.Integer(n + i) for i, s in enumerate(symbols)})
        return bool(found) if found in (True, False) else None

    symbols = sorted(asked.free_symbols, key=str)
    answers = {of(n) for n in _MANY}
    if len(answers) > 1 or None in answers or (len(symbols) > 1 and "Eq" in str(asked)):
        return 0, None
    answer = answers.pop()
    least = next(n for n in (0, 1, 2) if all(of(m) == answer for m in range(n, 3)))
    return least, answer


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
