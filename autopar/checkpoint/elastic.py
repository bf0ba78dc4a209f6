"""`elastic`: a training run that goes on when its processes are started anew, on fewer devices or on more."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.checkpoint import run
from autopar.checkpoint.arguments import OF_PARALLEL, PARALLEL
from autopar.checkpoint.gradients import Accumulated
from autopar.checkpoint.plans_ahead import plan_other_worlds
from autopar.checkpoint.run import Saving, collected, group_of_model, require_stateful, take_back
from autopar.costs.arguments import PATH, optional, require, whole
from autopar.errors import AutoparError
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.checkpoint import folders, generators
from autopar.runtime.checkpoint.exchange import exchange
from autopar.runtime.checkpoint.manifest import Manifest
from autopar.runtime.checkpoint.snapshot_files import (
    Box,
    Moment,
    Snapshot,
    box_of,
    lacking,
    require_room,
    snapshots_in,
    write_snapshot,
)
from autopar.runtime.checkpoint.snapshot_neighbors import neighbors, send_files
from autopar.runtime.launch.environment import HELD, SNAPSHOTS, is_told
from autopar.runtime.launch.snapshot_folder import memory_root, remove_abandoned

FIRST, OWN = "random.first.", "random.own."
"""What names of states of random generators begin with: of the first rank, and of the one whose file it is."""

START, MEMORY, CHECKPOINT = "start", "memory", "checkpoint"

logger = logging.getLogger("autopar")


def elastic(
    model: ParallelModule,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    folder: str | Path | None = None,
    save_every: int = 1000,
    keep: int = 2,
    every: int = 1,
    copies: int = 0,
    ahead: int = 1,
    **stateful: Any,
) -> Elastic:
    """Bring model and optimizer to where the run was when a process of it was lost, and keep them recoverable.

    Every rank calls it, before its first step, under ``autopar run --elastic`` or ``--restarts``::

        run = autopar.elastic(model, optimizer, folder="checkpoints", scheduler=scheduler)
        for step in run.steps(10_000):
            ...

    After each step the state of each rank is written to the node's memory. Where processes have been started anew, on
    any number of devices, the last step of which all parts are still there is taken up, else the last checkpoint.

    Args:
        model: what `autopar.parallelize` returned; its layouts must be decided: pass it ``batch=``.
        optimizer: of the model's parameters.
        folder: of checkpoints, on a file system that all ranks see. Without one, a run of which parts are lost ends.
        save_every: steps between checkpoints.
        keep: how many of them stay.
        every: steps between snapshots in memory: so many may be lost.
        copies: of each rank's snapshot on other nodes, for state that no two ranks have. Each takes as much memory,
            and is sent after each step.
        ahead: for how many sizes of the world below and above this one a plan is made after the first step.
        stateful: further objects with ``state_dict()`` and ``load_state_dict()``, by name: learning-rate scheduler,
            sampler. Rank 0's are taken, since they are the same on all.

    Raises:
        AutoparError: parts of the state are lost, and there is no checkpoint; or the state is of another model.
        ValueError: an argument is wrong, or nothing would keep the state.
        RankError: a rank is gone, or at something else.
    """
    require(
        model=(model, PARALLEL), optimizer=(optimizer, OF_PARALLEL), folder=(folder, optional(PATH)),
        save_every=(save_every, whole(1)), keep=(keep, whole(1)), every=(every, whole(1)), copies=(copies, whole(0)),
        ahead=(ahead, whole(0)),
    )  # fmt: skip
    require_stateful(stateful)
    where = os.environ.get(SNAPSHOTS)
    session = model._autopar
    if session.first is None:
        raise ValueError("elastic() needs layouts that are decided: pass batch= to parallelize()")
    if session.context.workers is not None:
        raise ValueError(
            f"workers of the role {session.context.workers.role!r} cannot come and go within a run: save with "
            "autopar.checkpoint; with the role 'local' another number of workers loads that. "
            "autopar.ElasticWorkers do, each a run of its own"
        )
    if where is None and folder is None and session.context.mesh is not None:
        raise ValueError(
            "nothing would keep the state of this run: start it with autopar run --elastic or --restarts, or give "
            "folder= for checkpoints"
        )
    memory = None if where is None else _Memory(Path(where), model, copies)
    on_disk = None if folder is None else Path(folder)
    found = Elastic(model, optimizer, stateful, memory, on_disk, save_every, keep, every, ahead)
    found._recover()
    return found


class Elastic:
    """A run that is recovered, and its steps.

    Attributes:
        step: how many have been done.
        source: where the state is from: ``"start"``, ``"memory"`` or ``"checkpoint"``.
        seconds: that recovering has taken.
        same_random_numbers: whether each rank's random generators go on as if nothing had happened.
    """

    def __init__(
        self,
        model: ParallelModule,
        optimizer: torch.optim.Optimizer | None,
        stateful: Mapping[str, Any],
        memory: _Memory | None,
        folder: Path | None,
        save_every: int,
        keep: int,
        every: int,
        ahead: int,
    ) -> None:
        """Of `elastic`, which see."""
        self.step, self.source, self.seconds, self.same_random_numbers = 0, START, 0.0, True
        self._model, self._optimizer, self._stateful = model, optimizer, stateful
        self._memory, self._folder = memory, folder
        self._save_every, self._keep, self._every, self._ahead = save_every, keep, every, ahead
        self._saving: Saving | None = None
        self._accumulated = Accumulated(model, optimizer)

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps that are left of ``total``; the loop's body does each of them.

        What the body has done counts as a step when it comes to its end, and the state is kept then.
        """
        require(total=(total, whole(0)))
        while self.step < total:
            yield self.step
            self.step += 1
            if self._memory is not None and (self.step % self._every == 0 or self.step == total):
                self._memory.keep(self._optimizer, self._stateful, self._accumulated, self.step)
            if self._folder is not None and self.step % self._save_every == 0:
                self._save()
            if self._ahead:
                plan_other_worlds(self._model, self._ahead, self._memory.folder if self._memory else None)
                self._ahead = 0
        self._wait()

    def rows(self, total: int) -> slice:
        """Which rows of a global batch this rank passes, where `autopar.parallelize` was given ``inputs="local"``.

        Raises:
            ValueError: so many rows cannot be divided evenly.
        """
        require(total=(total, whole(1)))
        parts = self._model.data_world_size
        if total % parts:
            raise ValueError(
                f"total={total}: so many rows cannot be divided evenly over the {parts} parts of the batch in this "
                f'world; give a multiple of {parts}, or whole batches, with inputs="global" of parallelize()'
            )
        first = self._model.data_rank * (total // parts)
        return slice(first, first + total // parts)

    def _save(self) -> None:
        assert self._folder is not None
        self._saving = run.begin_saving(
            self._folder, self._model, self._optimizer, self._stateful, self._accumulated.collect("checkpoint.save()"),
            step=self.step, keep=self._keep, wait=False,
        )  # fmt: skip

    def _wait(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def _recover(self) -> None:
        begun, context = time.monotonic(), self._model._autopar.context
        in_memory = None if self._memory is None else self._memory.find()
        saved = context.decide(self._saved, "finding a checkpoint") if self._folder is not None else None
        if in_memory is not None and (saved is None or saved[1] <= in_memory.step):
            assert self._memory is not None
            self.same_random_numbers = self._memory.restore(in_memory, self._optimizer, self._stateful)
            self.step, self.source = in_memory.step, MEMORY
        elif saved is not None:
            found = run.load(saved[0], self._model, self._optimizer, **self._stateful)
            self.step, self.source, self.same_random_numbers = found.step, CHECKPOINT, found.same_random_numbers
        elif self._memory is not None and self._memory.lost:
            raise AutoparError(
                f"{self._memory.lost}, and there is no checkpoint to go back to: give elastic() a folder= of "
                "checkpoints, or copies=1, which survives a lost node; give autopar run another --name to begin anew"
            )
        if self._folder is not None and self.source == START:
            self._save()
            self._wait()  # from the first snapshot on there is something to go back to
        if self._memory is not None:
            self._memory.keep(self._optimizer, self._stateful, self._accumulated, self.step)
            self._memory.forget_others()
        self.seconds = time.monotonic() - begun
        if is_told() and context.rank == 0:
            sys.stderr.write(f"autopar: {self._described()}\n")

    def _saved(self) -> tuple[Path, int] | None:
        assert self._folder is not None
        try:
            found = folders.find(self._folder)
        except FileNotFoundError:
            return None
        return found, Manifest.of(run.read_manifest(found), found / folders.MANIFEST).step

    def _described(self) -> str:
        context = self._model._autopar.context
        world = math.prod(context.sizes)
        lost = self._memory.lost if self._memory is not None and self.source == CHECKPOINT else ""
        return (
            f"{world} process{'es' if world > 1 else ''}, step {self.step} from {self.source}, {self.seconds:.1f} s"
            + (f" ({lost})" if lost else "")
        )


@dataclass(frozen=True)
class _Held:
    """What the ranks have of one moment.

    Attributes:
        moment: of all parts.
        known: what else there is than tensors.
        own: this rank's files.
        boxes: of each rank, which parts of each tensor.
    """

    moment: Moment
    known: Manifest
    own: tuple[Snapshot, ...]
    boxes: list[dict[str, list[Box]]]

    @property
    def step(self) -> int:
        return self.moment.step


class _Memory:
    """Snapshots in the memory of the nodes: this rank's, and those of others that it keeps for them.

    Of each rank there are the last two. A snapshot is begun when all ranks have done the step, and so have finished the
    one before: whenever processes are killed, what all of them have is one step, the last or the one before it.

    Attributes:
        folder: of this node.
        lost: what is missing of the last step that there was; empty: nothing is known to be.
    """

    def __init__(self, folder: Path, model: ParallelModule, copies: int) -> None:
        self.folder, self.lost = folder, ""
        self._model, self._context = model, model._autopar.context
        self._leads = os.environ.get("LOCAL_RANK", "0") == "0"
        if self._leads:
            remove_abandoned(memory_root())
        self._files = snapshots_in(folder) if self._leads else []
        nodes = self._context.gather(f"{socket.gethostname()} {folder}", "the nodes of the run")
        # The others look when what was half written is gone.
        self._files = self._files if self._leads else snapshots_in(folder)
        self._send, self._receive = neighbors(nodes, self._context.rank, copies)
        started = self._context.gather(
            max((s.moment.start for s in self._files), default=0), "how often the ranks have met"
        )
        self._start = max(started) + 1
        self._written: list[list[Path]] = [[], []]
        self._name = self._context.decide(lambda: secrets.token_hex(4), "the name of a meeting")

    def find(self) -> _Held | None:
        """The last step of which all parts are there; None: there is none, and `lost` says why."""
        facts = [(s.moment, s.boxes) for s in self._own_files()]
        every_rank = self._context.gather(facts, "what there is in memory")
        for moment in sorted({m for of_rank in every_rank for m, _ in of_rank}, reverse=True):
            held = [[boxes for m, boxes in of_rank if m == moment] for of_rank in every_rank]
            own = tuple(s for s in self._own_files() if s.moment == moment)
            # Of those that have it the first tells the others.
            tells = self._context.rank == next(rank for rank, parts in enumerate(held) if parts)
            texts = self._context.gather(own[0].about["manifest"] if tells else None, "the state in memory")
            known = Manifest.of(next(t for t in texts if t is not None), self.folder / f"step {moment.step}")
            shapes = {n: shape for n, (_, *shape) in known.tensors.items()}
            missing = lacking(shapes, (boxes for parts in held for boxes in parts))
            if not missing:
                return _Held(moment, known, own, [_together(parts) for parts in held])
            more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            self.lost = self.lost or f"parts of {missing[0]!r}{more} of step {moment.step} are lost with a node"
        has_had = self._context.gather(os.environ.get(HELD) == "1", "whether the run has had a state")
        if any(has_had) and not self.lost:
            self.lost = "all nodes that had the state of this run are lost"
        return None

    def _own_files(self) -> list[Snapshot]:
        """Those that this rank reads: of the processes of a node one, or each would send the same."""
        local, rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
        return [s for s in self._files if s.rank % local == rank]

    def restore(self, found: _Held, optimizer: torch.optim.Optimizer | None, stateful: Mapping[str, Any]) -> bool:
        """Take up a step; whether random generators go on as they were."""

        def read(tensors: dict[str, torch.Tensor]) -> None:
            boxes = {name: box_of(tensor) for name, tensor in tensors.items()}
            needed = self._context.gather(boxes, "which parts of the state are needed")
            local = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in tensors.items()}
            with torch.no_grad():
                exchange(self._context, group_of_model(self._model), local, needed, found.boxes, self._part(found))

        take_back(self._model, optimizer, stateful, found.known, read, "elastic()")
        return self._restore_generators(found)

    @staticmethod
    def _part(found: _Held) -> Any:
        def part(name: str, box: Box) -> torch.Tensor:
            return next(s.tensor(name) for s in found.own if s.boxes[name] == box)

        return part

    def _restore_generators(self, found: _Held) -> bool:
        own = {s.rank: _states(s, OWN) for s in found.own}
        first = next(((_states(s, FIRST), s.about["alike"], s.about["world"]) for s in found.own), None)
        rank = self._context.rank
        facts = self._context.gather((own, first), "states of random generators")
        known = {rank: states for of_rank, _ in facts for rank, states in of_rank.items()}
        of_first, alike, world = next(told for _, told in facts if told is not None)
        known[0] = of_first
        # A generator that is in one state on all ranks, as after manual_seed, is so on all ranks that there are now;
        # of another one each rank has its own.
        generators.restore({**known.get(rank, {}), **{name: of_first[name] for name in alike}})
        complete = world == math.prod(self._context.sizes) and known.keys() == set(range(world))
        return complete or len(alike) == len(of_first)

    def keep(
        self,
        optimizer: torch.optim.Optimizer | None,
        stateful: Mapping[str, Any],
        accumulated: Accumulated,
        step: int,
    ) -> None:
        """Write the state after a step, in place of that of the one before the last; every rank calls it."""
        context = self._context
        gradients = accumulated.collect("elastic()")
        tensors, describe = collected(self._model, optimizer, step, None, stateful, "elastic()", gradients)
        random = generators.states()
        alike = generators.alike(random, context)
        # Behind these all ranks have done the step, and written what was to be written before it.
        manifest, first = context.decide(lambda: (describe(list(random), alike), random), "a snapshot of the state")
        parts = {name: (box_of(t), t.to_local() if isinstance(t, DTensor) else t) for name, t in tensors.items()}
        for prefix, states in ((OWN, random), (FIRST, first)):
            parts |= {f"{prefix}{n}": (box_of(state), state) for n, state in states.items()}
        about = {"manifest": manifest, "alike": alike, "world": math.prod(context.sizes)}
        for path in self._written.pop(0):
            path.unlink(missing_ok=True)
        written = write_snapshot(self.folder, Moment(step, self._start, self._name), context.rank, about, parts)
        copies = send_files(context, group_of_model(self._model), written, self._send, self._receive, self.folder)
        self._written.append([written, *copies])

    def forget_others(self) -> None:
        """Delete what was there before, when all ranks have written what is in its place."""
        self._context.gather(None, "the first snapshot")
        for snapshot in self._files if self._leads else ():
            snapshot.file.unlink(missing_ok=True)
        self._files = []

        def check() -> None:
            if self._leads:
                require_room(self.folder)

        self._context.together(check, "room for snapshots")


def _together(parts: list[dict[str, Box]]) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for boxes in parts:
        for name, box in boxes.items():
            if not name.startswith((FIRST, OWN)):
                found.setdefault(name, []).append(box)
    return found


def _states(snapshot: Snapshot, prefix: str) -> dict[str, torch.Tensor]:
    """States of random generators, by name."""
    return {n.removeprefix(prefix): snapshot.tensor(n).clone() for n in snapshot.boxes if n.startswith(prefix)}
