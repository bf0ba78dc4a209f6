"""Convolutions padded differently at both ends, as causal ones are, or with what they read, and their gradients.

Torch has one number for both ends. Models pad the sequence first, or pad both ends and cut the result; either makes a
tensor of another length, which cannot be split as the sequence is. Here both are one operator, as long as its argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.sequence.halo import REFLECT, REPLICATE

aten = torch.ops.aten

_NUMBERS = "int[] stride, int[] low, int[] high, int[] dilation, int groups, str mode"

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"padded_convolution(Tensor x, Tensor weight, Tensor? bias, {_NUMBERS}) -> Tensor")
_library.define(
    f"padded_convolution_backward(Tensor grad, Tensor x, Tensor weight, int[]? bias_sizes, {_NUMBERS}, "
    "bool[] output_mask) -> (Tensor, Tensor, Tensor)"
)


ZEROS = "constant"
"""The mode of padding with zeros; others are those of `PADS`."""


def _each(name: str) -> tuple[Any, ...]:
    return tuple(getattr(aten, name.format(n)).default for n in (1, 2, 3))


_NAMES = {REFLECT: "reflection_pad{}d", REPLICATE: "replication_pad{}d"}
PADS = {mode: _each(name) for mode, name in _NAMES.items()}
"""By mode the operators that pad one, two and three dims with what they have, at their ends."""

PAD_GRADIENTS = {mode: _each(f"{name}_backward") for mode, name in _NAMES.items()}
"""Their gradients."""


def pads_of(low: Sequence[int], high: Sequence[int]) -> list[int]:
    """The padding of all dims as `constant_pad_nd` wants it: last dim first."""
    return [n for pair in zip(reversed(low), reversed(high), strict=True) for n in pair]


def padding_of_both(stride: Sequence[int], low: Sequence[int], high: Sequence[int], mode: str) -> list[int] | None:
    """Padding, the same at both ends, of whose outputs the wanted ones are some in a row; None: there is none.

    A few more outputs take less time than a copy of the argument.
    """
    if mode != ZEROS:
        return None
    both = [max(a, b) for a, b in zip(low, high, strict=True)]
    fits = all((m - a) % s == 0 for m, a, s in zip(both, low, stride, strict=True))
    return both if fits and min(*low, *high) >= 0 else None


def _places(
    x: Tensor, weight: Tensor, stride: list[int], low: list[int], high: list[int], dilation: list[int], both: list[int]
) -> list[tuple[int, int, int]]:
    """Of each spatial dim the first wanted output, how many are, and how many there are with padding at both ends."""
    found = []
    for d, (s, a, b, step, m) in enumerate(zip(stride, low, high, dilation, both, strict=True)):
        room = x.shape[2 + d] - step * (weight.shape[2 + d] - 1) - 1
        found.append(((m - a) // s, (room + a + b) // s + 1, (room + 2 * m) // s + 1))
    return found


def _pad(x: Tensor, low: list[int], high: list[int], mode: str) -> Tensor:
    ends = pads_of(low, high)
    found: Tensor = aten.constant_pad_nd.default(x, ends) if mode == ZEROS else PADS[mode][len(low) - 1](x, ends)
    return found


def _unpad(grad: Tensor, x: Tensor, low: list[int], high: list[int], mode: str) -> Tensor:
    """The gradient of what is padded."""
    ends = pads_of(low, high)
    if mode == ZEROS:
        found: Tensor = aten.constant_pad_nd.default(grad, [-n for n in ends])
    else:
        found = PAD_GRADIENTS[mode][len(low) - 1](grad, x, ends)
    return found


def _padded_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    stride: list[int], low: list[int], high: list[int], dilation: list[int], groups: int, mode: str,
) -> Tensor:  # fmt: skip
    both = padding_of_both(stride, low, high, mode)
    if both is None:
        x = _pad(x, low, high, mode)
    rest = [dilation, False, [0] * len(low), groups]
    found: Tensor = aten.convolution.default(x, weight, bias, stride, both or [0] * len(low), *rest)
    for d, (first, count, _) in enumerate(_places(x, weight, stride, low, high, dilation, both) if both else ()):
        found = found.narrow(2 + d, first, count)
    return found


def _padded_convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None,
    stride: list[int], low: list[int], high: list[int], dilation: list[int], groups: int, mode: str,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    rest = [dilation, False, [0] * len(low), groups, output_mask]
    both = padding_of_both(stride, low, high, mode)
    if both is not None:
        places = _places(x, weight, stride, low, high, dilation, both)
        behind = [every - first - count for first, count, every in places]
        grad = aten.constant_pad_nd.default(grad, pads_of([first for first, _, _ in places], behind))
        of: tuple[Tensor | None, Tensor | None, Tensor | None]
        of = aten.convolution_backward.default(grad, x, weight, bias_sizes, stride, both, *rest)
        return of
    wide = _pad(x, low, high, mode)
    found = aten.convolution_backward.default(grad, wide, weight, bias_sizes, stride, [0] * len(low), *rest)
    of_x = None if found[0] is None else _unpad(found[0], x, low, high, mode)
    return of_x, found[1], found[2]


_library.impl("padded_convolution", _padded_convolution, "CompositeExplicitAutograd")
_library.impl("padded_convolution_backward", _padded_convolution_backward, "CompositeExplicitAutograd")

padded_convolution = torch.ops.autopar.padded_convolution.default
"""A convolution with ``low`` zeros before each spatial dim and ``high`` behind it; negative: so many rows less.

``mode``: what stands there instead, of all dims, one of `PADS`; none may be negative.
"""

padded_convolution_backward = torch.ops.autopar.padded_convolution_backward.default
"""Its gradients of ``x``, ``weight`` and bias, those that ``output_mask`` asks for."""
