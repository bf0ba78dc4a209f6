"""The part of a batch that one of several workers trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch


def split_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which tensors of a batch have samples along dim 0: those of as many rows as most have, as in the search."""
    rows = [t.shape[0] for t in tensors if t.ndim]
    samples = Counter(rows).most_common(1)[0][0] if rows else 0
    return [i for i, t in enumerate(tensors) if t.ndim and t.shape[0] == samples]


def rows_of_worker(tensors: Sequence[torch.Tensor], index: int, count: int) -> list[torch.Tensor]:
    """A batch with the rows of one worker in place of all; what has no samples stays whole.

    Args:
        tensors: of the whole batch.
        index: of the worker.
        count: how many workers there are.

    Raises:
        ValueError: the samples do not divide.

    >>> rows_of_worker([torch.arange(6), torch.tensor(1.0)], 1, 2)
    [tensor([3, 4, 5]), tensor(1.)]
    """
    own = list(tensors)
    for i in split_tensors(tensors) if count > 1 else ():
        samples = tensors[i].shape[0]
        if samples % count:
            raise ValueError(
                f"batch tensor {i} has {samples} samples, which do not divide among {count} workers (role 'local'); "
                f"take a batch of a multiple of {count} (drop_last=True for a loader)"
            )
        own[i] = tensors[i].narrow(0, index * (samples // count), samples // count)
    return own
