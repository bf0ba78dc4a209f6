"""Checkpoints of workers that train apart: a folder each, and the last that all of them have."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import AutoparError
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.checkpoint import folders


def worker_folder(folder: Path, model: ParallelModule) -> Path:
    """Where a model's checkpoints are: in the folder, or in that of its worker."""
    workers = model._autopar.context.workers
    return folder if workers is None else folder / f"worker-{workers.index}"


def common_checkpoint(folder: Path, model: ParallelModule) -> Path:
    """This worker's part of the last checkpoint that every worker has; every rank of all workers calls it.

    Raises:
        AutoparError: there is none.
    """
    own, session = worker_folder(folder, model), model._autopar
    if (folder / folders.MANIFEST).is_file():
        raise AutoparError(
            f"{folder} is one checkpoint, and workers have a folder each: give the folder that "
            "autopar.checkpoint.save() was given"
        )
    every_rank = session.context.everyone.gather(folders.whole(own), "finding a checkpoint of all workers")
    # The oldest is the first, and the last need not be the one of the most steps: a run may have gone back.
    common = [name for name in every_rank[0] if all(name in names for names in every_rank)]
    if not common:
        lacking = next((rank for rank, names in enumerate(every_rank) if not names), None)
        why = "they have others each" if lacking is None else f"rank {lacking} found none"
        raise AutoparError(
            f"there is no checkpoint in {folder} that all workers have ({why}): load on as many workers as saved, and "
            "give the folder that autopar.checkpoint.save() was given"
        )
    return own / common[-1]
