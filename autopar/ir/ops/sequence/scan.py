"""Running sums from the end, which the gradient of a running sum is.

Torch spells it as two reversals with a running sum between them. Split along the sequence, a reversal sends all that
a device has to the one opposite; a running sum from the end needs a number a row of the others only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("reverse_cumsum(Tensor x, int dim, *, ScalarType? dtype=None) -> Tensor")


def _reverse_cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    found: Tensor = aten.flip.default(aten.cumsum.default(aten.flip.default(x, [dim]), dim, dtype=dtype), [dim])
    return found


_library.impl("reverse_cumsum", _reverse_cumsum, "CompositeExplicitAutograd")

reverse_cumsum = torch.ops.autopar.reverse_cumsum.default
"""``y[i] = x[i] + x[i + 1] + ...`` along a dim."""
