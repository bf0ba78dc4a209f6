"""Strides that kernels ask for: whether a tensor has them, a copy that does, and tensors with all kinds of strides.

An operator is a function of values, but some kernels read the storage of their arguments as if it were in one order.
What they ask for is in their rules, `autopar.rules.rule.Rule.strides`; `autopar.passes.kernels.insert_contiguous` puts
a conditional copy before them, which returns the tensor itself where that will do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.rules.rule import ALIGNED, ANY, LAST, MATRIX, PAIRS, ROW_MAJOR

aten = torch.ops.aten


def meets(value: torch.Tensor, need: str) -> bool:
    """Whether a tensor has the strides that a kernel asks for; the stride of a dim of size 1 means nothing to some."""
    # `view_as_complex` looks at strides of tensors without elements, too.
    if need == ANY or not (value.numel() or need == PAIRS):
        return True
    # Torch's own question, which ignores strides of dims of size 1.
    if need == ROW_MAJOR:
        return value.is_contiguous()
    if need == LAST:
        return value.ndim == 0 or value.stride(-1) == 1
    if need == PAIRS:
        # As `view_as_complex` checks: even strides and an even offset, in numbers.
        return value.stride(-1) == 1 and not any(n % 2 for n in (*value.stride()[:-1], value.storage_offset()))
    if need == MATRIX:
        return _is_matrix(value)
    raise ValueError(f"no strides are called {need!r}")


def _is_matrix(value: torch.Tensor) -> bool:
    """Whether the last two dims are rows or columns that are whole and start where a GPU loads from."""
    (rows, columns), (down, along) = value.shape[-2:], value.stride()[-2:]
    whole = (along == 1 and down >= columns) or (down == 1 and along >= rows)
    starts = (*value.stride()[:-2], max(down, along), value.storage_offset())
    aligned = not any(n * value.element_size() % ALIGNED for n in starts)
    # Of one whose rows are no such multiples a copy by columns may be better.
    return whole and (aligned or (value.is_contiguous() and rows * value.element_size() % ALIGNED > 0))


def meet(value: torch.Tensor, need: str) -> torch.Tensor:
    """The tensor, or a row-major copy of it where it has not the strides that a kernel asks for.

    A matrix whose rows would not begin where a GPU loads from is copied by columns, if these do.
    """
    if meets(value, need):
        return value
    turned = need == MATRIX and value.shape[-1] * value.element_size() % ALIGNED > 0
    if turned and not value.shape[-2] * value.element_size() % ALIGNED:
        return value.mT.clone(memory_format=torch.contiguous_format).mT
    return value.clone(memory_format=torch.contiguous_format)


# Must stay alive: torch removes the operator with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("with_strides(Tensor(a) value, str need) -> Tensor(a)")
_library.impl("with_strides", meet, "CompositeImplicitAutograd")

with_strides = torch.ops.autopar.with_strides.default


def copier(need: str) -> tuple[Any, tuple[str, ...]]:
    """The operator that gives a tensor the strides it needs, and its arguments after the tensor."""
    return (aten.contiguous.default, ()) if need == ROW_MAJOR else (with_strides, (need,))


def order_of(value: torch.Tensor) -> tuple[int, ...] | None:
    """The dims of a tensor from the outermost in memory to the innermost; None if others lie between its elements.

    >>> order_of(torch.ones(2, 3).t()), order_of(torch.ones(2, 3)[:, :2]), order_of(torch.ones(2, 1).expand(2, 3))
    ((1, 0), None, None)
    """
    if value.layout != torch.strided:
        return None
    strides = value.stride()
    order = tuple(sorted(range(value.ndim), key=lambda d: (-strides[d], d)))
    return order if value.permute(order).is_contiguous() else None


def in_order(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A tensor whose dims are in an order in memory, without gaps: the tensor itself if its own are."""
    if value.permute(*order).is_contiguous():
        return value
    return permuted(value, order)


def other_strides(value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of the same values with other strides, of every kind that a view can have.

    Permuted, transposed, channels last, stepped, a window of a longer tensor, and after an odd offset.
    """
    if not value.numel():
        return
    n = value.ndim
    orders = {
        "reversed": list(range(n))[::-1],
        "transposed": [*range(n - 2), n - 1, n - 2],
        "first dim last": [*range(1, n), 0],
        "channels last": [0, *range(2, n), 1],
    }
    for name, order in orders.items() if n > 1 else ():
        yield name, permuted(value, order)
    for dim in dict.fromkeys((0, n - 1)) if n else ():
        yield f"stepped along {dim}", stepped(value, dim)
        yield f"windowed along {dim}", windowed(value, dim)
    yield "after an odd offset", windowed(value.reshape(-1), 0).view(value.shape)


def permuted(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The same tensor with its dims in another order in memory."""
    order = list(order)
    back = [order.index(d) for d in range(value.ndim)]
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def stepped(value: torch.Tensor, dim: int) -> torch.Tensor:
    """The same tensor as every second element of a dim."""
    return _inside(value, [2 * n if d == dim else n for d, n in enumerate(value.shape)], dim, 0, 2)


def windowed(value: torch.Tensor, dim: int) -> torch.Tensor:
    """The same tensor as the inner part of a dim."""
    return _inside(value, [n + 3 if d == dim else n for d, n in enumerate(value.shape)], dim, 1, 1)


def _inside(value: torch.Tensor, shape: Sequence[int], dim: int, start: int, step: int) -> torch.Tensor:
    """A copy in a larger tensor, whose other elements are not numbers."""
    # Not-a-numbers around it: a kernel that reads beside its argument shows it in its result.
    floating = value.is_floating_point() or value.is_complex()
    room = value.new_full(shape, math.nan) if floating else value.new_zeros(shape)
    part = room.as_strided(
        value.shape,
        [s * step if d == dim else s for d, s in enumerate(room.stride())],
        start * room.stride(dim),
    )
    return part.copy_(value)


def random_strides(value: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """The same tensor in a random order of dims, as a random part of a larger one."""
    if not value.numel():
        return value
    order = list(range(value.ndim))
    draw.shuffle(order)
    found = permuted(value, order) if order else windowed(value.reshape(1), 0).view(())
    for d in range(found.ndim):
        kind = draw.randrange(4)
        if kind < 2:
            found = _within(found, d, kind)
    return found


def _within(value: torch.Tensor, dim: int, kind: int) -> torch.Tensor:
    """The same tensor as a part of a larger one along a dim, its order of dims kept."""
    strides = value.stride()
    # From the outermost dim in memory to the innermost.
    order = sorted(range(value.ndim), key=lambda d: (-strides[d], d))
    inner = value.permute(order)
    made = (stepped, windowed)[kind](inner, order.index(dim))
    return made.permute([order.index(d) for d in range(value.ndim)])
