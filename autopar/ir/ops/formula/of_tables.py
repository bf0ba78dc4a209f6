"""Gradients of a table that a mask's formula looks up, from those of what is added to scores.

The formula is walked back, call by call, by the rules of what it does with numbers of the table: it adds them up, takes
multiples, casts them, and puts others in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.formula.look_up import look_up

aten = torch.ops.aten

Call = tuple[Any, tuple[Any, ...]]
"""A call's operator, and its arguments: numbers, or `Of`."""


class Of:
    """A leaf, or a call's value."""

    def __init__(self, number: int) -> None:
        """``number``: leaves are counted first, then the table, then calls."""
        self.number = number


def _look_up(grad: Tensor, at: int, table: Tensor, rows: Tensor) -> Tensor:
    # [batch, heads, queries, keys]: as many rows as the table is looked up for.
    grad = grad.movedim(1, -1).contiguous()
    made: Tensor = aten.embedding_dense_backward.default(
        grad, rows.squeeze(1).expand(grad.shape[:-1]), len(table), -1, False
    )
    return made


def _where(grad: Tensor, at: int, shown: Tensor, *_: Any) -> Tensor:
    return torch.where(shown if at == 1 else ~shown, grad, torch.zeros_like(grad))


def _same(grad: Tensor, at: int, *_: Any) -> Tensor:
    return grad


def _product(grad: Tensor, at: int, *factors: Any) -> Tensor:
    found: Tensor = grad * factors[1 - at]
    return found


_BACK: dict[Any, Callable[..., Tensor]] = {
    look_up: _look_up, aten.where.self: _where, aten.mul.Tensor: _product, aten.mul.Scalar: _product,
    aten.masked_fill.Scalar: lambda grad, at, _, hides, number: grad.masked_fill(hides, 0.0),
    aten.sub.Tensor: lambda grad, at, *_: -grad if at else grad,
    aten.neg.default: lambda grad, at, *_: -grad,
    aten.div.Tensor: lambda grad, at, _, divisor: grad / divisor,
    aten.div.Scalar: lambda grad, at, _, divisor: grad / divisor,
    **dict.fromkeys((aten.add.Tensor, aten.alias.default, aten._to_copy.default), _same),
}  # fmt: skip
"""The gradient of an argument of a call, which is the one of this number, from that of the value and all arguments."""

_FIRST = (aten.div.Tensor, aten.masked_fill.Scalar)
"""Operators that have a rule for their first argument alone."""


def made_of(calls: Sequence[Call], table: int) -> set[int]:
    """The numbers of a table, and of what is made of it."""
    found = {table}
    for i, (_, args) in enumerate(calls, table + 1):
        if any(isinstance(a, Of) and a.number in found for a in args):
            found.add(i)
    return found


def has_gradient(calls: Sequence[Call], table: int) -> bool:
    """Whether there are rules for all that is made of a table, the number of which is given."""
    found = made_of(calls, table)
    for target, args in calls:
        places = [at for at, a in enumerate(args) if isinstance(a, Of) and a.number in found]
        if places and (target not in _BACK or (target in _FIRST and places != [0])):
            return False
    return True


def gradient(calls: Sequence[Call], values: Sequence[Any], table: int, grad: Tensor) -> Tensor:
    """The gradient of a table.

    Args:
        calls: of the formula.
        values: of leaves, table and calls.
        table: its number.
        grad: of the last value.
    """
    found = made_of(calls, table)
    grads: dict[int, Tensor] = {len(values) - 1: grad}
    for i in range(len(values) - 1, table, -1):
        target, args = calls[i - table - 1]
        if i not in grads:
            continue
        given = [values[a.number] if isinstance(a, Of) else a for a in args]
        for at, a in enumerate(args):
            if not isinstance(a, Of) or a.number not in found:
                continue
            term = _BACK[target](grads[i], at, *given).to(given[at].dtype).sum_to_size(given[at].shape)
            grads[a.number] = term if a.number not in grads else grads[a.number] + term
        del grads[i]
    return grads.get(table, torch.zeros_like(values[table]))
