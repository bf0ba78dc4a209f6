"""What differs between the devices of a split beside their tensors: which of the rows that came count on this one.

Their shapes are the same on every device, as a rewritten graph's are; slices whose bounds depend on the device's number
would make others, and what passes know of one device's would be wrong on another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("filled(Tensor x, bool here, Scalar fill) -> Tensor")
_library.define("filled_but(Tensor x, int start, int end, Scalar fill) -> Tensor")


def _filled(x: Tensor, here: bool, fill: float) -> Tensor:
    # Not the argument itself: an operator's result may be overwritten.
    return torch.full_like(x, fill) if here else x.clone()


def _filled_but(x: Tensor, start: int, end: int, fill: float) -> Tensor:
    made = torch.full_like(x, fill)
    made[start:end] = x[start:end]
    return made


_library.impl("filled", _filled, "CompositeExplicitAutograd")
_library.impl("filled_but", _filled_but, "CompositeExplicitAutograd")

filled = torch.ops.autopar.filled.default
"""A tensor, or one that is ``fill`` everywhere, on a device that is ``here``."""

filled_but = torch.ops.autopar.filled_but.default
"""A tensor that is ``fill`` in all rows but those from ``start`` up to ``end``."""
