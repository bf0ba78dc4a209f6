"""Sample calls of operators along a sequence: scans, shifts, and convolutions that read beyond a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.strategies.sample import Sample, boolean, call, integer, positive, x

aten, ours = torch.ops.aten, torch.ops.autopar


def scans() -> Iterator[Sample]:
    for op in (aten.cumsum.default, ours.reverse_cumsum.default):
        yield call(op, x(2, 8), -1)
        yield call(op, x(4, 3, 2), 0)
        yield call(op, integer(9, 8), 0)
        yield call(op, boolean(8, 2), 0)
        yield call(op, x(8).bfloat16(), 0)
        yield call(op, integer(9, 8), 0, dtype=torch.float64)
        yield call(op, integer(9, 8), 0, dtype=torch.int32)
        yield call(op, torch.complex(x(4), x(4)), 0)
        yield call(op, x(), 0)
    for op in (aten.cumprod.default, aten.logcumsumexp.default):
        yield call(op, x(2, 8), 1)
        yield call(op, x(4).half(), 0)
    yield call(aten.cumprod.default, integer(3, 4), -1)
    yield call(aten.logcumsumexp.default, torch.full((4,), -torch.inf), 0)
    yield call(aten.logcumsumexp.default, torch.tensor([-torch.inf, 1.0, torch.inf, 0.0]), 0)
    yield call(aten.cumsum.default, torch.tensor([1.0, 2.0, torch.inf, 4.0, torch.nan, 1.0, 1.0, 1.0]), 0)


def recurrences() -> Iterator[Sample]:
    for back in (False, True):
        yield call(ours.linear_scan.default, x(2, 8, 3), x(2, 8, 3), 1, back)
        yield call(ours.linear_scan.default, x(9).float(), x(9).float(), -1, back)
    yield call(ours.linear_scan.default, torch.zeros(4, 2).double(), x(4, 2), 0)
    yield call(ours.linear_scan.default, torch.complex(x(4), x(4)), torch.complex(x(4), x(4)), 0)


def masked_attention() -> Iterator[Sample]:
    """Windows, documents, both, a bias, and keys of another sequence; head sizes of values, groups of queries."""
    forward, backward = ours.attention_masked.default, ours.attention_masked_backward.default
    same, document = '[["aten.eq.Tensor", "%0", "%1"]]', torch.tensor([[0] * 3 + [1] * 5, [0] * 6 + [1] * 2])
    ids = [document[:, None, :, None], document[:, None, None, :]]
    for heads, leaves, formula, added, before, after in (
        (2, [], "", False, 1, 0),
        (4, [], "", False, 2, 1),
        (1, ids, same, False, 8, 0),
        (2, ids, same, False, 2, 0),
        (2, [x(1, 4, 1, 1), x(1, 1, 1, 8)], '[["aten.mul.Tensor", "%0", "%1"]]', True, 8, 0),
    ):
        wide = 6 if heads == 4 else 4
        q, k, v = x(2, 4, 8, 4), x(2, heads, 8, 4), x(2, heads, 8, wide)
        mask = (formula, added, before, after, 0, 0, 8, 0.7)
        saved = forward(q, k, v, leaves, *mask)
        yield call(forward, q, k, v, leaves, *mask)
        yield call(backward, x(2, 4, 8, wide), q, k, v, leaves, *saved, *mask)
    yield from biases_of_tables()
    yield from rows_of_attention()
    q, k = x(2, 2, 4, 4), x(2, 2, 8, 4)
    yield call(forward, q, k, k, [boolean(2, 1, 1, 8)], '[["aten.alias.default", "%0"]]', False, 8, 8, 0, 0, 8, None)


def biases_of_tables() -> Iterator[Sample]:
    """What is learned by distance: of each head, and of all; with a cap, and some rows at a time."""
    forward, backward = ours.attention_masked.default, ours.attention_masked_backward.default
    formula = '[["aten.sub.Tensor", "%0", "%1"], ["aten.add.Tensor", "%3", 7], ["autopar.look_up.default", "%2", "%4"]]'
    places = [torch.arange(8).view(1, 1, 8, 1), torch.arange(8).view(1, 1, 1, 8)]
    q, k, v = x(2, 4, 8, 4), x(2, 2, 8, 4), x(2, 2, 8, 4)
    for heads, after, cap, hides in ((4, 0, None, "infinity"), (4, 8, 0.5, "infinity"), (1, 0, 0.5, "rows")):
        mask = (formula, True, 8, after, 0, 0, 8, 0.7, x(15, heads), cap, hides)
        saved = forward(q, k, v, places, *mask)
        yield call(forward, q, k, v, places, *mask)
        for learned in (False, True):
            yield call(backward, x(2, 4, 8, 4), q, k, v, places, *saved, *mask, learned)


def rows_of_attention() -> Iterator[Sample]:
    """Attention of some rows at a time: a cap, dropout, a bias, and rows that a large number hides."""
    forward, backward = ours.attention_rows.default, ours.attention_rows_backward.default
    q, k, v, bias = x(2, 4, 4, 4), x(2, 2, 8, 4), x(2, 2, 8, 6), x(1, 4, 4, 8)
    bias[0, 0, 1], bias[0, 1, 2] = torch.finfo(bias.dtype).min, -torch.inf
    for given, kept, cap in ((bias, None, None), (None, boolean(2, 4, 4, 8), 0.5), (bias[:, :1], None, 0.5)):
        numbers = (0.3 if kept is not None else 0.0, None, cap, given is bias)
        saved = forward(q, k, v, given, kept, *numbers)
        yield call(forward, q, k, v, given, kept, *numbers)
        yield call(backward, x(2, 4, 4, 6), q, k, v, given, kept, *saved, *numbers, given is not None)
        yield from _block_of_attention(q, k, v, given, kept, x(2, 4, 4, 1), *numbers)


def _block_of_attention(*args: Any) -> Iterator[Sample]:
    forward, backward = ours.attention_block.default, ours.attention_block_backward.default
    tensors, numbers = args[:6], args[6:]
    yield call(forward, *args)
    yield call(backward, x(2, 4, 4, 6), *tensors, *forward(*args), *numbers, args[3] is not None)


def shifts() -> Iterator[Sample]:
    yield call(aten.flip.default, x(2, 4), [1])
    yield call(aten.flip.default, x(2, 4, 8), [0, -1])
    yield call(aten.flip.default, torch.complex(x(4), x(4)), [0])
    for shift in (1, -1, 3, 4, 5, 8, -9):
        yield call(aten.roll.default, x(2, 8), [shift], [-1])
    yield call(aten.roll.default, x(2, 4), [1])
    yield call(aten.roll.default, x(4, 8, 2), [1, -2], [0, 1])
    yield call(aten.roll.default, x(4, 2), [1, 2], [0, 0])
    yield call(aten.roll.default, x(4, 8), [4, 1], [0, 1])
    for pad in ([1, -1], [-1, 1], [-2, 2], [2, -2], [0, 0, 1, -1], [0, 0, -3, 3], [-8, 8]):
        yield call(aten.constant_pad_nd.default, x(2, 8, 8), pad)
    yield call(aten.constant_pad_nd.default, integer(9, 2, 8), [-1, 1], -100)
    yield call(aten.constant_pad_nd.default, integer(9, 8), [1, -1], -100.0)
    yield call(aten.constant_pad_nd.default, boolean(8), [1, -1], True)


def windows() -> Iterator[Sample]:
    """Windows of padded dims, and patches of images: with rows before, behind, of both, and none."""
    for shape, dim, size, step, low, high in (
        ((2, 8, 3), 1, 4, 1, 3, 0),
        ((2, 8), 1, 3, 1, 1, 1),
        ((8, 2), 0, 6, 2, 2, 2),
        ((2, 12), 1, 4, 2, 0, 3),
        ((16,), 0, 8, 4, 5, 0),
    ):
        numbers = dim, size, step, low, high
        for fill in (0, 1.5):
            yield call(ours.padded_windows.default, x(*shape), *numbers, fill)
        grad = torch.randn_like(ours.padded_windows.default(x(*shape), *numbers, 0))
        yield call(ours.padded_windows_backward.default, grad, list(shape), *numbers)
    yield call(ours.padded_windows.default, torch.complex(x(8), x(8)), 0, 2, 1, 1, 0, 0)
    yield call(ours.padded_windows_backward.default, torch.complex(x(8, 2), x(8, 2)), [8], 0, 2, 1, 1, 0)
    for shape, kernel, dilation, padding, stride in (
        ((2, 3, 8, 4), [3, 3], [1, 1], [1, 1], [1, 1]),
        ((2, 2, 8, 6), [4, 3], [1, 1], [1, 0], [2, 1]),
        ((2, 8, 8), [3, 2], [2, 1], [2, 0], [1, 2]),
        ((1, 2, 8, 8), [2, 2], [1, 1], [0, 0], [2, 2]),
        ((1, 2, 8, 8), [1, 3], [1, 1], [0, 1], [1, 1]),
        ((1, 2, 8, 4), [3, 3], [1, 1], [0, 1], [1, 1]),  # of another length
    ):
        numbers = kernel, dilation, padding, stride
        yield call(aten.im2col.default, x(*shape), *numbers)
        columns = torch.randn_like(aten.im2col.default(x(*shape), *numbers))
        yield call(aten.col2im.default, columns, list(shape[-2:]), *numbers)


def convolutions() -> Iterator[Sample]:
    def both(a: torch.Tensor, w: torch.Tensor, bias: bool, *rest: Any) -> Iterator[Sample]:
        mine = isinstance(rest[-1], str)
        forward = ours.padded_convolution.default if mine else aten.convolution.default
        backward = ours.padded_convolution_backward.default if mine else aten.convolution_backward.default
        given = x(w.shape[0]) if bias else None
        yield call(forward, a, w, given, *rest)
        grad = torch.randn_like(forward(a, w, given, *rest))
        for mask in ([True, True, bias], [False, True, bias], [True, False, False]):
            yield call(backward, grad, a, w, [w.shape[0]] if bias else None, *rest, mask)

    for stride, low, high, step in (
        (1, 2, 0, 1),
        (1, 4, 0, 2),
        (1, 0, 2, 1),
        (1, 3, -1, 1),
        (1, -1, 3, 1),
        (2, 0, 1, 1),
    ):
        numbers = [stride], [low], [high], [step]
        yield from both(x(2, 4, 16), x(4, 1, 3), True, *numbers, 4, "constant")
    yield from both(x(2, 2, 8, 6), x(4, 2, 3, 3), False, [1, 1], [2, 0], [0, 1], [1, 1], 1, "constant")
    yield from both(x(1, 2, 6, 8), x(2, 1, 1, 3), False, [1, 1], [0, 2], [0, 0], [1, 1], 2, "constant")
    yield from both(x(2, 2, 8), x(2, 2, 3), True, [1], [1], [0], [1], 1, "constant")  # of another length
    for mode in ("reflect", "replicate"):
        yield from both(x(2, 4, 16), x(4, 1, 5), True, [1], [2], [2], [1], 4, mode)
        yield from both(x(2, 2, 8), x(2, 2, 3), False, [1], [2], [0], [1], 1, mode)
        yield from both(x(2, 2, 8), x(2, 2, 3), True, [2], [1], [1], [1], 1, mode)
        yield from both(x(1, 2, 8, 4), x(2, 2, 3, 3), True, [1, 1], [1, 1], [1, 1], [1, 1], 1, mode)
        yield from both(x(1, 2, 8, 4), x(2, 2, 1, 3), False, [1, 1], [0, 2], [0, 0], [1, 1], 1, mode)
        yield from both(x(1, 2, 8, 4), x(2, 2, 3, 1), False, [1, 1], [1, 0], [1, 0], [1, 1], 1, mode)
    plain = False, [0], 1
    yield from both(x(2, 2, 8), x(2, 2, 5), True, [1], [2], [1], *plain)
    yield from both(x(2, 2, 8), x(2, 2, 4), False, [2], [1], [1], *plain)
    yield from both(x(2, 2, 8), x(2, 2, 1), False, [2], [0], [1], *plain)
    yield from both(x(2, 2, 8), x(2, 2, 7), False, [1], [3], [1], *plain)
    yield from both(x(2, 2, 4, 8), x(2, 2, 1, 3), True, [1, 1], [0, 1], [1, 1], False, [0, 0], 1)
    yield from both(positive(1, 2, 4, 4, 4), x(2, 2, 3, 3, 3), False, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    yield from both(x(2, 2, 8, 8), x(4, 1, 3, 3), True, [2, 2], [1, 1], [1, 1], False, [0, 0], 2)
    for kernel, stride, padding, dilation, more in (
        (4, 2, 1, 1, 0),
        (3, 1, 1, 1, 0),
        (3, 2, 1, 1, 1),
        (3, 1, 2, 2, 0),
        (1, 2, 0, 1, 1),
        (2, 4, 0, 1, 2),
        (8, 4, 2, 1, 0),
        (4, 2, 0, 1, 0),  # of another length
    ):
        numbers = [stride], [padding], [dilation], True, [more]
        yield from both(x(2, 2, 8), x(2, 2, kernel), kernel != 3, *numbers, 1)
    yield from both(x(2, 4, 8, 3), x(4, 2, 4, 2), True, [2, 2], [1, 0], [1, 1], True, [0, 0], 2)
    yield from both(x(1, 2, 4, 8), x(2, 2, 3, 4), False, [1, 2], [0, 1], [1, 1], True, [0, 0], 1)


FAMILIES = (scans, recurrences, masked_attention, shifts, windows, convolutions)
