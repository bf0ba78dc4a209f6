"""Windows of a sequence that is split: what lies beyond a device's rows comes from its neighbors.

Device ``r`` of ``parts`` has rows ``r size`` to ``(r + 1) size`` of a dim. A convolution's outputs there read some rows
before and after, its halo; a shift is a window as long as before, a few rows away. Only these rows are sent.

Functions here are called with local tensors, or with their proxies in a graph; ``context`` is that of a
`autopar.rules.rule.Lowering`.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def window(context: Any, x: Any, dim: int, size: int, low: int, high: int, fill: Any) -> Any:
    """A device's rows, ``low`` more at the front and ``high`` more at the end; negative numbers: so many less.

    Args:
        context: of the lowering.
        x: this device's rows.
        dim: along which they are.
        size: how many they are.
        low: rows of the device before, from its last one on.
        high: rows of the device after.
        fill: what stands before the first row of the whole and behind the last; None: the other end's rows.

    Raises:
        ValueError: more rows than a neighbor has.
    """
    check(size, low, high)
    pieces = []
    if low > 0:
        came = context.shift(aten.slice.Tensor(x, dim, size - low, size))
        pieces.append(_at_end(context, came, 0, fill))
    first, last = max(-low, 0), size - max(-high, 0)
    if first < last:
        pieces.append(x if (first, last) == (0, size) else aten.slice.Tensor(x, dim, first, last))
    if high > 0:
        came = context.shift(aten.slice.Tensor(x, dim, 0, high), back=True)
        pieces.append(_at_end(context, came, context.parts - 1, fill))
    return pieces[0] if len(pieces) == 1 else aten.cat.default(pieces, dim)


def add_window(context: Any, grad: Any, dim: int, size: int, low: int, high: int, ndim: int) -> Any:
    """The gradient of a `window` that is filled with zeros: each device's rows get what others computed for them.

    Args:
        context: of the lowering.
        grad: of the window, ``low + size + high`` rows.
        dim: along which these are.
        size: how many rows the device has.
        low: as of the window.
        high: as of the window.
        ndim: how many dims there are.
    """
    check(size, low, high)
    whole = low + size + high
    start, end = max(low, 0), low + size + min(high, 0)
    own = grad if (start, end) == (0, whole) else aten.slice.Tensor(grad, dim, start, end)
    if low < 0 or high < 0:  # rows that the window leaves out have no part in it
        own = aten.constant_pad_nd.default(own, pads(ndim, dim, max(-low, 0), max(-high, 0)))
    if low > 0:
        came = context.shift(aten.slice.Tensor(grad, dim, 0, low), back=True)
        own = _add_rows(own, _at_end(context, came, context.parts - 1, 0.0), dim, size - low, size)
    if high > 0:
        came = context.shift(aten.slice.Tensor(grad, dim, whole - high, whole))
        own = _add_rows(own, _at_end(context, came, 0, 0.0), dim, 0, high)
    return own


def reach(low: int, high: int) -> int:
    """How many rows a device must have at least for a window."""
    return max(low, high, max(-low, 0) + max(-high, 0) + 1)


def check(size: int, low: int, high: int) -> None:
    """Refuse windows that reach beyond the neighbors.

    Raises:
        ValueError: more rows than a neighbor has.
    """
    if size < reach(low, high):
        raise ValueError(f"a device has {size} rows, and a window of {low} before them and {high} behind needs more")


def pads(ndim: int, dim: int, before: int, after: int) -> list[int]:
    """What `constant_pad_nd` adds to one dim, as it wants it: last dim first."""
    return [0, 0] * (ndim - 1 - dim) + [before, after]


def before(context: Any, total: Any, ndim: int, reduce: Any, neutral: Any, back: bool = False) -> Any:
    """What the devices before this one have together (or those after it), the same shape as each one's ``total``.

    Args:
        context: of the lowering.
        total: of this device's rows.
        ndim: how many dims it has.
        reduce: joins the first dim of ``[parts, ...]``.
        neutral: changes nothing in it.
        back: of the devices after this one.
    """
    every = context.all_gather(total)
    ones = aten.new_ones.default(total, [context.parts], dtype=torch.int64)
    numbers = aten.sub.Tensor(aten.cumsum.default(ones, 0), 1)
    index = context.axis_index()
    left_out = aten.le.Scalar(numbers, index) if back else aten.ge.Scalar(numbers, index)
    # A mask for each device's number, of as many dims as what is gathered: broadcast over all but the first.
    mask = aten.reshape.default(left_out, [context.parts, *[1] * ndim])
    return reduce(aten.masked_fill.Scalar(every, mask, neutral))


def _at_end(context: Any, came: Any, at: int, fill: Any) -> Any:
    """What came, but on the device at one end, to which it came from the other: the filling."""
    if fill is None:
        return came
    index = aten.new_full.default(came, [1], context.axis_index(), dtype=torch.int64)
    return aten.masked_fill.Scalar(came, aten.eq.Scalar(index, at), fill)


def _add_rows(own: Any, came: Any, dim: int, start: int, end: int) -> Any:
    total = aten.add.Tensor(aten.slice.Tensor(own, dim, start, end), came)
    return aten.slice_scatter.default(own, total, dim, start, end)
