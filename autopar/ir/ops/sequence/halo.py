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

BEYOND = CIRCULAR, REPLICATE, REFLECT = "circular", "replicate", "reflect"
"""What stands beyond the ends of the whole, beside numbers: as `torch.nn.functional.pad` calls it."""


def window(context: Any, x: Any, dim: int, size: int, low: int, high: int, fill: Any) -> Any:
    """A device's rows, ``low`` more at the front and ``high`` more at the end; negative numbers: so many less.

    Args:
        context: of the lowering.
        x: this device's rows.
        dim: along which they are.
        size: how many they are.
        low: rows of the device before, from its last one on.
        high: rows of the device after.
        fill: what stands before the first row of the whole and behind the last: a number, or one of `BEYOND`.

    Raises:
        ValueError: more rows than a neighbor has.
    """
    check(size, low, high, fill)
    pieces = []
    if low > 0:
        came = context.shift(aten.slice.Tensor(x, dim, size - low, size))
        pieces.append(_at_end(context, came, False, _beyond(x, dim, size, low, False, fill)))
    first, last = max(-low, 0), size - max(-high, 0)
    if first < last:
        pieces.append(x if (first, last) == (0, size) else aten.slice.Tensor(x, dim, first, last))
    if high > 0:
        came = context.shift(aten.slice.Tensor(x, dim, 0, high), back=True)
        pieces.append(_at_end(context, came, True, _beyond(x, dim, size, high, True, fill)))
    return pieces[0] if len(pieces) == 1 else aten.cat.default(pieces, dim)


def add_window(context: Any, grad: Any, ndim: int, dim: int, size: int, low: int, high: int, fill: Any = 0.0) -> Any:
    """The gradient of a `window`: each device's rows get what others computed for them.

    Args:
        context: of the lowering.
        grad: of the window, ``low + size + high`` rows.
        ndim: how many dims there are.
        dim: along which these are.
        size: how many rows the device has.
        low: as of the window.
        high: as of the window.
        fill: as of the window: what rows at the ends stand for gets their gradients; a number: nothing does.
    """
    check(size, low, high, fill)
    whole = low + size + high
    start, end = max(low, 0), low + size + min(high, 0)
    own = grad if (start, end) == (0, whole) else aten.slice.Tensor(grad, dim, start, end)
    if low < 0 or high < 0:  # rows that the window leaves out have no part in it
        own = aten.constant_pad_nd.default(own, pads(ndim, dim, max(-low, 0), max(-high, 0)))
    if low > 0:
        came = context.shift(aten.slice.Tensor(grad, dim, 0, low), back=True)
        own = _add_rows(own, _at_end(context, came, True, fill if fill == CIRCULAR else 0.0), dim, size - low, size)
        own = _add_beyond(context, own, grad, dim, size, low, low, False, fill)
    if high > 0:
        came = context.shift(aten.slice.Tensor(grad, dim, whole - high, whole))
        own = _add_rows(own, _at_end(context, came, False, fill if fill == CIRCULAR else 0.0), dim, 0, high)
        own = _add_beyond(context, own, grad, dim, size, low, high, True, fill)
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


def reach(low: int, high: int, fill: Any = 0.0) -> int:
    """How many rows a device must have at least for a window."""
    return max(low, high, max(-low, 0) + max(-high, 0) + 1) + int(fill == REFLECT)


def check(size: int, low: int, high: int, fill: Any = 0.0) -> None:
    """Refuse windows that reach beyond the neighbors.

    Raises:
        ValueError: more rows than a neighbor has.
    """
    if size < reach(low, high, fill):
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


def _at_end(context: Any, came: Any, last: bool, beyond: Any) -> Any:
    """What came, but on the last device (or the first), to which it came from the other end: what is beyond it."""
    if isinstance(beyond, str):
        return came
    if isinstance(beyond, float | int | bool):
        return filled(came, _is_end(context, last), beyond)
    own = filled(beyond, _is_inside(context, last), 0)
    return aten.add.Tensor(filled(came, _is_end(context, last), 0), own)


def _is_end(context: Any, last: bool) -> Any:
    index = context.axis_index()
    return index >= context.parts - 1 if last else index < 1


def _is_inside(context: Any, last: bool) -> Any:
    index = context.axis_index()
    return index < context.parts - 1 if last else index >= 1


def _beyond(x: Any, dim: int, size: int, count: int, last: bool, fill: Any) -> Any:
    """Rows beyond an end of the whole, of the rows of the device that is there; or their filling, which is not."""
    if fill == REPLICATE:
        edge = aten.slice.Tensor(x, dim, size - 1, size) if last else aten.slice.Tensor(x, dim, 0, 1)
        return edge if count == 1 else aten.cat.default([edge] * count, dim)
    if fill == REFLECT:
        first = size - 1 - count if last else 1
        return aten.flip.default(aten.slice.Tensor(x, dim, first, first + count), [dim])
    return fill


def _add_beyond(
    context: Any, own: Any, grad: Any, dim: int, size: int, low: int, count: int, last: bool, fill: Any
) -> Any:
    """The gradient of rows beyond an end of the whole goes to the rows that they are."""
    if fill not in (REPLICATE, REFLECT):
        return own
    start = low + size if last else 0
    beyond = filled(aten.slice.Tensor(grad, dim, start, start + count), _is_inside(context, last), 0)
    if fill == REPLICATE:
        at = size - 1 if last else 0
        return _add_rows(own, aten.sum.dim_IntList(beyond, [dim], True), dim, at, at + 1)
    at = size - 1 - count if last else 1
    return _add_rows(own, aten.flip.default(beyond, [dim]), dim, at, at + count)


def _add_rows(own: Any, came: Any, dim: int, start: int, end: int) -> Any:
    total = aten.add.Tensor(aten.slice.Tensor(own, dim, start, end), came)
    return aten.slice_scatter.default(own, total, dim, start, end)
