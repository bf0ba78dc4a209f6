"""A batch that all workers pass (role ``"local"``): each trains on its own rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from autopar.ir.signature.worker_rows import rows_of_worker, split_tensors
from autopar.runtime.agreement.same_program import require_same_contents
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.parameters import contents


def own_part(tensors: list[torch.Tensor], context: MeshContext, inputs: str) -> list[torch.Tensor]:
    """The rows of this worker; everything where there are no workers, or where each passes its own.

    Raises:
        ValueError: the batch cannot be split.
    """
    workers = context.workers
    if workers is None or inputs == "local":
        return tensors
    if any(isinstance(t, DTensor) for t in tensors):
        raise ValueError(
            "a batch of DTensors cannot be split among workers: pass the whole batch as plain "
            'tensors, or inputs="local"'
        )
    return rows_of_worker(tensors, workers.index, workers.count)


def split_among(whole: Sequence[torch.Tensor], context: MeshContext, inputs: str) -> tuple[int, ...]:
    """Numbers of the batch tensors that are split among workers."""
    return () if context.workers is None or inputs == "local" else tuple(split_tensors(whole))


def compare_among_workers(whole: list[torch.Tensor], context: MeshContext, inputs: str) -> None:
    """Before the first call: workers that take their parts of one batch must be given the same.

    Raises:
        RankError: they are not, or one makes no first call.
    """
    if context.workers is not None and inputs == "global":
        require_same_contents(contents(whole), 0, context.everyone)
