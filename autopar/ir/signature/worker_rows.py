"""The part of a batch that one of several workers trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch


def split_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which tensors of a batch have samples along dim 0: those of as many rows as most have, the first among them.

    Raises:
        ValueError: most tensors have other rows than the first one.
    """
    rows = [t.shape[0] for t in tensors if t.ndim]
    if not rows:
        return []
    # Of two counts that are as frequent the first one counts.
    samples = Counter(rows).most_common(1)[0][0]
    if samples != rows[0]:
        # A search may take either for the samples, and what is computed stays the same. Here it would not.
        raise ValueError(
            f"the first tensor of the batch has {rows[0]} rows and most have {samples}: which are samples, to be split "
            "among workers? Pass a tensor of samples first, or each worker its own part with "
            'inputs="local"'
        )
    return [i for i, t in enumerate(tensors) if t.ndim and t.shape[0] == samples]


def rows_of_worker(tensors: Sequence[torch.Tensor], index: int, count: int) -> list[torch.Tensor]:
    """A batch with the rows of one worker in place of all; what has no samples stays whole.

    Args:
        tensors: of the whole batch.
        index: of the worker.
        count: how many workers there are.

    Raises:
        ValueError: the samples do not divide, or it is not clear which they are.

    >>> rows_of_worker([torch.arange(6), torch.tensor(1.0)], 1, 2)
    [tensor([3, 4, 5]), tensor(1.)]
    """
    own = list(tensors)
    for i in split_tensors(tensors):
        samples = tensors[i].shape[0]
        if samples % count:
            raise ValueError(
                f"batch tensor {i} has {samples} samples, which do not divide among {count} workers; "
                f"take a batch of a multiple of {count} (drop_last=True for a loader)"
            )
        own[i] = tensors[i].narrow(0, index * (samples // count), samples // count)
    return own
