"""Windows of a sequence that is split: what lies beyond a device's rows comes from its neighbors.

Device ``r`` of ``parts`` has rows ``r size`` to ``(r + 1) size`` of a dim. A convolution's outputs there read some rows
before and after, its halo; a shift is a window as long as before, a few rows away. Only these rows are sent.

Functions here are called with local tensors, or with their proxies in a graph; ``context`` is that of a
`autopar.rules.rule.Lowering`.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.ops.sequence.own_rows import filled, filled_but

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
        pieces.append(_at_end(context, came, False, fill))
    first, last = max(-low, 0), size - max(-high, 0)
    if first < last:
        pieces.append(x if (first, last) == (0, size) else aten.slice.Tensor(x, dim, first, last))
    if high > 0:
        came = context.shift(aten.slice.Tensor(x, dim, 0, high), back=True)
        pieces.append(_at_end(context, came, True, fill))
    return pieces[0] if len(pieces) == 1 else aten.cat.default(pieces, dim)


def add_window(context: Any, grad: Any, ndim: int, dim: int, size: int, low: int, high: int) -> Any:
    """The gradient of a `window` that is filled with zeros: each device's rows get what others computed for them.

    Args:
        context: of the lowering.
        grad: of the window, ``low + size + high`` rows.
        ndim: how many dims there are.
        dim: along which these are.
        size: how many rows the device has.
        low: as of the window.
        high: as of the window.
    """
    check(size, low, high)
    whole = low + size + high
    start, end = max(low, 0), low + size + min(high, 0)
    own = grad if (start, end) == (0, whole) else aten.slice.Tensor(grad, dim, start, end)
    if low < 0 or high < 0:  # rows that the window leaves out have no part in it
        own = aten.constant_pad_nd.default(own, pads(ndim, dim, max(-low, 0), max(-high, 0)))
    if low > 0:
        came = context.shift(aten.slice.Tensor(grad, dim, 0, low), back=True)
        own = _add_rows(own, _at_end(context, came, True, 0.0), dim, size - low, size)
    if high > 0:
        came = context.shift(aten.slice.Tensor(grad, dim, whole - high, whole))
        own = _add_rows(own, _at_end(context, came, False, 0.0), dim, 0, high)
    return own


def inside(context: Any, x: Any, size: int, low: int, high: int) -> Any:
    """Which rows of a `window` are rows of the whole: ones, and zeros before the first and behind the last.

    Args:
        context: of the lowering.
        x: a tensor, for its dtype and device.
        size: how many rows the device has.
        low: as of the window.
        high: as of the window.
    """
    pieces = [aten.new_full.default(x, [size + min(low, 0) + min(high, 0)], 1)]
    if low > 0:
        pieces.insert(0, _at_end(context, aten.new_full.default(x, [low], 1), False, 0.0))
    if high > 0:
        pieces.append(_at_end(context, aten.new_full.default(x, [high], 1), True, 0.0))
    return pieces[0] if len(pieces) == 1 else aten.cat.default(pieces, 0)


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


def pads(ndim: int, dim: int, before: Any, after: Any) -> list[Any]:
    """What `constant_pad_nd` adds to one dim, as it wants it: last dim first."""
    return [0, 0] * (ndim - 1 - dim) + [before, after]


def before(context: Any, total: Any, reduce: Any, neutral: float, back: bool = False) -> Any:
    """What the devices before this one have together (or those after it), the same shape as each one's ``total``.

    Args:
        context: of the lowering.
        total: of this device's rows.
        reduce: joins the first dim of ``[devices, ...]``.
        neutral: changes nothing in it.
        back: of the devices after this one.
    """
    every, index = context.all_gather(total), context.axis_index()
    first, end = (index + 1, context.parts) if back else (0, index)
    return reduce(filled_but(every, first, end, neutral))


def _at_end(context: Any, came: Any, last: bool, fill: Any) -> Any:
    """What came, but on the last device (or the first), to which it came from the other end: the filling."""
    if fill is None:
        return came
    index = context.axis_index()
    return filled(came, index >= context.parts - 1 if last else index < 1, fill)


def _add_rows(own: Any, came: Any, dim: int, start: int, end: int) -> Any:
    total = aten.add.Tensor(aten.slice.Tensor(own, dim, start, end), came)
    return aten.slice_scatter.default(own, total, dim, start, end)
