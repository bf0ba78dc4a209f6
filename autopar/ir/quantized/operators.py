"""Operators of rewritten graphs: numbers into the bytes that stand for them before a collective, and back after it.

Numbers of any floating dtype are rounded to float32 first. Of ``bits = 0`` the bytes are those of the numbers
themselves, in float64: `autopar.verify` compares a graph with the plain model as if its messages were sent exactly. Of
``bits`` below 0 they are float32 numbers that are rounded as so many bits would, from the definition: one in few bits
is compared with that graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from autopar.costs.outer_exchange import quantized_bytes
from autopar.ir.quantized.blocks import dequantize, quantize, sum_of
from autopar.ir.quantized.rounded import rounded

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("to_blocks(Tensor values, int parts, int bits) -> Tensor")
_library.define("from_blocks(Tensor payloads, int count, int bits, ScalarType dtype) -> Tensor")
_library.define("sum_from_blocks(Tensor payloads, int count, int bits, ScalarType dtype) -> Tensor")


_SENT_AS = {False: torch.float64, True: torch.float32}
"""Dtypes of numbers that are sent whole, and rounded."""


def _to_blocks(values: Tensor, parts: int, bits: int) -> Tensor:
    rows = values.reshape(parts, -1)
    if bits < 0:
        return rounded(rows, -bits).contiguous().view(torch.uint8)
    return quantize(rows.float(), bits) if bits else rows.double().contiguous().view(torch.uint8)


def _from_blocks(payloads: Tensor, count: int, bits: int, dtype: torch.dtype) -> Tensor:
    numbers = dequantize(payloads, count, bits) if bits > 0 else payloads.view(_SENT_AS[bits < 0])
    return numbers.to(dtype).reshape(-1)


def _sum_from_blocks(payloads: Tensor, count: int, bits: int, dtype: torch.dtype) -> Tensor:
    if bits > 0:
        return sum_of(payloads.unbind(), count, bits).to(dtype)
    numbers = payloads.view(_SENT_AS[bits < 0])
    # One after another, in the dtype: the order of few bits is part of their recurrence.
    return functools.reduce(torch.add, numbers.unbind()).to(dtype)


def _size(count: int, bits: int) -> int:
    return quantized_bytes(count, bits) if bits > 0 else _SENT_AS[bits < 0].itemsize * count


for _name, _function in (
    ("to_blocks", _to_blocks), ("from_blocks", _from_blocks), ("sum_from_blocks", _sum_from_blocks),
):  # fmt: skip
    _library.impl(_name, _function, "CompositeExplicitAutograd")
_library.impl(
    "to_blocks",
    lambda values, parts, bits: values.new_empty((parts, _size(values.numel() // parts, bits)), dtype=torch.uint8),
    "Meta",
)
_library.impl(
    "from_blocks",
    lambda payloads, count, bits, dtype: payloads.new_empty(len(payloads) * count, dtype=dtype),
    "Meta",
)
_library.impl("sum_from_blocks", lambda payloads, count, bits, dtype: payloads.new_empty(count, dtype=dtype), "Meta")

to_blocks = torch.ops.autopar.to_blocks.default
"""Bytes for each of ``parts`` equal runs of the numbers, row-major, uint8 ``[parts, bytes]``."""

from_blocks = torch.ops.autopar.from_blocks.default
"""The numbers that rows of bytes stand for, ``count`` each, one after the other, ``[rows * count]``."""

sum_from_blocks = torch.ops.autopar.sum_from_blocks.default
"""The sum over the rows of the numbers that they stand for, ``[count]``."""

QUANTIZERS = (to_blocks, from_blocks, sum_from_blocks)
