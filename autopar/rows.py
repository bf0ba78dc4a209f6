"""Which rows of a batch a microbatch has.

The rows are cut into ``blocks``, one after the other, as many as the devices cut the batch into, and each block into
microbatches: so a device's rows of a microbatch are among its rows of the batch, and nothing has to be moved. Of a
tensor that the devices cut into fewer blocks, each has several of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from autopar.layout import Layout, factor_parts


def parts_along(dim: int, layout: Layout, sizes: Sequence[int]) -> int:
    """Into how many blocks devices cut the rows, which are the first factor of a dim."""
    return factor_parts(layout, sizes).get((dim, 0), 1)


def common_blocks(found: Iterable[tuple[int, Layout]], sizes: Sequence[int]) -> int:
    """As many blocks as every tensor's can be made of; each is given as its dim of rows and its layout."""
    return math.lcm(*(parts_along(dim, layout, sizes) for dim, layout in found))


def take(tensor: torch.Tensor, dim: int, blocks: int, count: int, index: int) -> torch.Tensor:
    """The rows of microbatch ``index`` of ``count``, contiguous; ``tensor`` has ``blocks`` blocks."""
    shape = tensor.shape
    cut = tensor.reshape(*shape[:dim], blocks, count, -1, *shape[dim + 1 :]).select(dim + 1, index)
    return cut.flatten(dim, dim + 1).contiguous()


def join(parts: Sequence[torch.Tensor], dim: int, blocks: int) -> torch.Tensor:
    """Inverse of `take`: the rows of all microbatches."""
    cut = [p.reshape(*p.shape[:dim], blocks, -1, *p.shape[dim + 1 :]) for p in parts]
    return torch.stack(cut, dim + 1).flatten(dim, dim + 2)
