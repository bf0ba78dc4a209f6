"""Delayed scaling: a tensor's scale comes from the largest entries that it had in earlier steps.

So nothing is to be known of the whole tensor before it is rounded: what is recorded of it in a step, its largest entry
over all devices, is needed in the next one (P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3.1,
and the recipe ``DelayedScaling`` of NVIDIA's Transformer Engine, which it follows: the scale is of the largest entry of
the history, and 1 while there is none).

Histories are buffers, see `autopar.ir.ops.float8.histories`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.float8.formats import FORMATS, LEAST, largest_of

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("float8_amax(Tensor x) -> Tensor")
_library.define("float8_delayed_scale(Tensor history, int row, str format) -> Tensor")


def _amax(x: Tensor) -> Tensor:
    # A maximum over devices may drop what is no number.
    return largest_of(x, [0, 1]).nan_to_num(nan=torch.inf, posinf=torch.inf)


def _delayed_scale(history: Tensor, row: int, format: str) -> Tensor:
    largest = history[row].amax().reshape(1, 1)
    return torch.where(largest > 0, largest.clamp_min(LEAST) / FORMATS[format].largest, torch.ones_like(largest))


for _name, _function in (("float8_amax", _amax), ("float8_delayed_scale", _delayed_scale)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")

amax = torch.ops.autopar.float8_amax.default
"""The largest absolute entry of a matrix, ``[1, 1]``: float32, of a float64 matrix float64; NaN counts as infinite."""

delayed_scale = torch.ops.autopar.float8_delayed_scale.default
"""The scale, ``[1, 1]``, of what one row of a history is of: that of its largest entry, 1 where that is zero.

Args:
    history: ``[3, steps]``.
    row: one of `autopar.ir.ops.float8.histories.ROWS`.
    format: of `autopar.ir.ops.float8.formats.FORMATS`.
"""
