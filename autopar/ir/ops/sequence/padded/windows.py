"""Windows of a dim that is padded first, as many as its elements over the step, and their gradients.

``F.pad(x, ...).unfold(dim, size, step)`` makes a tensor of another length on the way, which cannot be split as the
sequence is. Here both are one operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.sequence.halo import pads

aten = torch.ops.aten

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "padded_windows(Tensor x, int dim, int size, int step, int low, int high, Scalar fill) -> Tensor",
)
_library.define(
    "padded_windows_backward(Tensor grad, int[] sizes, int dim, int size, int step, int low, int high) -> Tensor"
)


def _padded_windows(x: Tensor, dim: int, size: int, step: int, low: int, high: int, fill: Any) -> Tensor:
    wide: Tensor = aten.constant_pad_nd.default(x, pads(x.ndim, dim, low, high), fill)
    return wide.unfold(dim, size, step)


def _padded_windows_backward(
    grad: Tensor, sizes: list[int], dim: int, size: int, step: int, low: int, high: int
) -> Tensor:
    wide = [n + (low + high) * (d == dim) for d, n in enumerate(sizes)]
    made: Tensor = aten.unfold_backward.default(grad, wide, dim, size, step)
    return made.narrow(dim, low, sizes[dim]).contiguous()


_library.impl("padded_windows", _padded_windows, "CompositeExplicitAutograd")
_library.impl("padded_windows_backward", _padded_windows_backward, "CompositeExplicitAutograd")

padded_windows = torch.ops.autopar.padded_windows.default
"""Windows, in a new last dim, of ``x`` with ``low`` equal numbers before one of its dims and ``high`` behind it."""

padded_windows_backward = torch.ops.autopar.padded_windows_backward.default
"""Its gradient; ``sizes`` are those of ``x``."""
