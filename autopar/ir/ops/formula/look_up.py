"""Numbers of each head that are looked up for each query and key: biases that are learned by distance.

Before (T5: ``buckets`` are of positions)::

    bias = embedding(buckets, table).permute(2, 0, 1)

After::

    bias = autopar.look_up(table, buckets)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("look_up(Tensor table, Tensor rows) -> Tensor")

look_up = torch.ops.autopar.look_up.default
"""Rows ``[batch, 1, queries, keys]`` of a table ``[rows, heads]``, as ``[batch, heads, queries, keys]``."""


def _look_up(table: Tensor, rows: Tensor) -> Tensor:
    return functional.embedding(rows.squeeze(1), table).movedim(-1, 1)


_library.impl("look_up", _look_up, "CompositeImplicitAutograd")
