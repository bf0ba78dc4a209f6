"""Checkpoints of workers that train apart: a folder each, and the last that all of them have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopar.errors import AutoparError
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.checkpoint import folders

WORKER = "worker-"
"""Begins the name of a worker's folder."""


def worker_folder(folder: Path, model: ParallelModule) -> Path:
    """Where a model's checkpoints are: in the folder, or in that of its worker."""
    workers = model._autopar.context.workers
    return folder if workers is None else _part(folder, workers.index)


def common_checkpoint(folder: Path, model: ParallelModule, saved_by: Callable[[Path], int | None]) -> Path:
    """This worker's part of the last checkpoint that every worker which saved has; all ranks of all workers call it.

    With another number of workers those beyond the ones that saved take another's part, in turn: they begin as copies.

    Args:
        folder: of all workers.
        model: of this one.
        saved_by: how many workers have saved the checkpoint in a folder; None if it does not say.

    Raises:
        AutoparError: there is none, or the part that this worker is to begin from is not to be seen from here.
    """
    session = model._autopar
    workers, everyone = session.context.workers, session.context.everyone
    assert workers is not None
    if (folder / folders.MANIFEST).is_file():
        raise AutoparError(
            f"{folder} is one checkpoint, and workers have a folder each: give the folder that "
            "autopar.checkpoint.save() was given"
        )
    seen = {number: folders.whole(path) for number, path in _parts(folder).items()}
    holders: dict[str, set[int]] = {}
    for of_rank in everyone.gather(seen, "finding a checkpoint of all workers"):
        for number, names in of_rank.items():
            for name in names:
                holders.setdefault(name, set()).add(number)

    def choose() -> tuple[str, int]:
        # The oldest is the first, and the last need not be the one of the most steps: a run may have gone back.
        for name in reversed(seen.get(0, [])):
            count = saved_by(_part(folder, 0) / name) or workers.count
            if holders[name] >= set(range(count)):
                return name, count
        why = (
            f"worker 0 has {len(seen.get(0, []))}, of which others lack their part"
            if seen.get(0)
            else "rank 0 found none"
        )
        raise AutoparError(
            f"there is no checkpoint in {folder} that all workers have ({why}): give the folder that "
            "autopar.checkpoint.save() was given"
        )

    # Rank 0 is of the first worker, whose folder there always is.
    name, count = everyone.decide(choose, "the last checkpoint of all workers")
    own = _part(folder, workers.index % count)

    def require() -> None:
        if name not in seen.get(workers.index % count, []):
            raise AutoparError(
                f"worker {workers.index} begins from {own / name}, which is not to be seen from here: put it on a file "
                "system that this worker sees, or load on as many workers as saved"
            )

    everyone.together(require, "finding the part of each worker")
    return own / name


def _part(folder: Path, worker: int) -> Path:
    return folder / f"{WORKER}{worker}"


def _parts(folder: Path) -> dict[int, Path]:
    """The folders of workers that there are, by number."""
    found = [p for p in folder.glob(f"{WORKER}*") if p.name.removeprefix(WORKER).isdecimal()]
    return {int(p.name.removeprefix(WORKER)): p for p in found}
