"""`Control`: the ranks of a mesh agree on what they do next before they do it, and say so when one does not.

Before its first collective each call of a module, forward and backward, reduces one number over the ranks: a hash of
what the call is. Where all have the same that is all. Where they differ every rank gathers what the others are at, and
raises the same `RankError`. A rank that does not come has died, ended, failed or is elsewhere: see
`autopar.runtime.agreement.watch`.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar._torch_compat import interrupt_gloo, set_group_timeout
from autopar.errors import RankError
from autopar.runtime.agreement.points import Point, difference
from autopar.runtime.agreement.watch import DIED, ENDED, Position, Relay, Watch, connect

T = TypeVar("T")

_OF_COLLECTIVES = ("gloo", "Application timeout caused", "onnection closed", "onnection reset", "roken pipe", "NCCL")
"""Words in errors of collectives, of which Gloo's have no type of their own."""


class Control:
    """How this rank agrees with the others.

    Attributes:
        group: for control messages only.
        rank: of this process in the mesh.
        size: how many ranks there are.
        watch: what is heard of the others.
        groups: process groups whose waits end where a rank is gone.
        calls: how many each module has had, in the order in which they were made.
    """

    def __init__(self, whole: ProcessGroup, groups: Sequence[ProcessGroup], timeout: float) -> None:
        """Every rank of ``whole`` calls it.

        Raises:
            RankError: some rank does not answer.
        """
        self.rank, self.size, self.timeout = dist.get_rank(whole), dist.get_world_size(whole), timeout
        self.groups: list[ProcessGroup] = [*groups, whole]
        self.broken = ""
        self.calls: list[int] = []
        self.peers: list[tuple[str, int]] = []
        self.group = whole
        self.watch = Watch(self.rank, self.interrupt)
        with self.during("finding the other ranks"):
            self.peers = gather_objects((socket.gethostname(), os.getpid()), whole)
            ranks = dist.get_process_group_ranks(whole)
            self.group = dist.new_group(
                ranks, timeout=timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True
            )
            self.groups.append(self.group)
            if self.size == dist.get_world_size() and dist.group.WORLD is not None:
                self.groups.append(dist.group.WORLD)
            self.watch = self._watch()

    def __deepcopy__(self, memo: dict[int, Any]) -> Control:
        """Of a process there is one."""
        return self

    def _watch(self) -> Watch:
        """A watch that hears of the others; of nothing where rank 0 cannot be reached: then errors say less."""
        relay = None
        if self.rank == 0:
            try:
                relay = Relay([host for host, _ in self.peers])
            except OSError:
                pass
        address = gather_objects(None if relay is None else relay.address, self.group)[0]
        if address is None:
            return Watch(self.rank, self.interrupt)
        connection = relay.start() if relay is not None else connect(address, self.rank)
        return Watch(self.rank, self.interrupt, connection, relay)

    def meet(self, point: Point) -> None:
        """Wait until every rank is about to do the same.

        Raises:
            RankError: one is not, or does not come.
        """
        with self.during(point.what, everyone=True):
            numbers = torch.tensor([point.number, -point.number])
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
            highest, lowest = numbers.tolist()
            if highest == -lowest:
                return
            everyone = gather_objects((point, self.calls), self.group)
        # So that they are in step where all of them go on.
        self.calls = [max(counts) for counts in zip_longest(*(calls for _, calls in everyone), fillvalue=0)]
        raise RankError(difference([p for p, _ in everyone]))

    def gather(self, value: T, what: str) -> list[T]:
        """What every rank has to say about ``what``, in rank order.

        Raises:
            RankError: some rank does not answer, or is at something else.
        """
        self.meet(Point(what))
        with self.during(what, everyone=True):
            return gather_objects(value, self.group)

    @contextmanager
    def during(
        self,
        what: str,
        *,
        everyone: bool = False,
        in_step: bool = True,
        locate: Callable[[BaseException], str] = lambda _: "",
    ) -> Iterator[None]:
        """Within, this rank may wait for others.

        Args:
            what: it does.
            everyone: whether that needs every rank.
            in_step: whether this rank is out of step with the others if it alone fails at it.
            locate: says which collective an error comes from.

        Raises:
            RankError: in place of the error of a collective.
        """
        self._check(what)
        start = time.monotonic()
        watch, before = self.watch, self.watch.enter(Position(what, start, True, everyone))
        try:
            yield
        except RankError as e:
            self._stop(str(e))
            raise
        except Exception as e:
            of_others = self.broken or self.watch.gone() or is_of_collective(e)
            if not isinstance(e, RuntimeError | pickle.PickleError | EOFError) or not of_others:
                if in_step:
                    self.watch.fail(f"{what}, {type(e).__name__}", f"{what}: {type(e).__name__}: {e}")
                raise
            error = RankError(self._explanation(what + locate(e), e, time.monotonic() - start))
            self._stop(str(error))
            raise error from e
        finally:
            watch.leave(before)

    def failures(self) -> str:
        """What this rank has failed at, which must have happened to all: else they are out of step."""
        return "; ".join(self.watch.own) or "nothing"

    def interrupt(self) -> None:
        """End the waits of this process."""
        self.broken = self.broken or _INTERRUPTED
        for group in self.groups:
            interrupt_gloo(group)

    def _check(self, what: str) -> None:
        if self.watch.is_inside:
            return
        gone = self.watch.gone()
        if self.broken or any(news.kind == DIED for news in gone.values()):
            raise RankError(self._explanation(what, None, 0.0))

    def _stop(self, reason: str) -> None:
        """After a failed collective nothing of what is sent may be taken for something else."""
        first = not self.broken
        self.broken = self.broken or reason
        if first or self.broken == _INTERRUPTED:
            self.broken = reason
            self.watch.fail(reason, reason)

    def _explanation(self, what: str, error: Exception | None, waited: float) -> str:
        """Why a rank has no answer."""
        known = self.watch.hear(2.0 if error is not None else 0.0)
        lines = [self._said(rank, news.kind, news.text) for rank, news in sorted(known.items())]
        if not known and error is not None and self.size > 1:
            lines += self._positions()
        reason = "; ".join(lines) or self.broken
        failed = f" ({first_line(error)})" if error is not None else ""
        return (
            f"no answer from every rank about {what} within {self.timeout:g} s (it took {waited:.1f} s){failed}: "
            f"a rank died, raised an error of its own (see its log) or went elsewhere; raise timeout= if it is slow."
            f" What is known: {reason or 'nothing'}"
        )

    def _said(self, rank: int, kind: str, text: str) -> str:
        host, process = self.peers[rank] if self.peers else ("?", 0)
        if kind == DIED:
            return f"rank {rank} died (process {process} on {host}; killed, or crashed: look for the cause in its log)"
        if kind == ENDED:
            return f"the process of rank {rank} ({process} on {host}) has ended{': ' + text if text else ' by itself'}"
        return f"rank {rank} failed at {text}"

    def _positions(self) -> list[str]:
        answers = self.watch.positions(self.size - 1, 2.0)
        rows = [f"rank {self.rank} (this one) is {self.watch.position}"]
        for rank in range(self.size):
            if rank != self.rank:
                where = f"is {answers[rank]}" if rank in answers else "does not say where it is (stopped, or cut off)"
                rows.append(f"rank {rank} {where}")
        return rows


_INTERRUPTED = "a rank is gone"


def gather_objects(value: T, group: ProcessGroup) -> list[T]:
    """What every rank of a group gives."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def is_of_collective(error: BaseException) -> bool:
    """Whether an error is one of a collective that failed, or came with another message than was expected."""
    return isinstance(error, dist.DistError | pickle.PickleError | EOFError) or any(
        word in str(error) for word in _OF_COLLECTIVES
    )


def first_line(error: BaseException) -> str:
    """An error in a line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


_known: dict[tuple[int, ...], tuple[ProcessGroup, Control]] = {}


def control_of(whole: ProcessGroup, groups: Sequence[ProcessGroup], timeout: float) -> Control:
    """That of the ranks of a group, made once; every one of them calls it. ``groups`` are added to what it watches."""
    assert dist.group.WORLD is not None
    ranks = tuple(dist.get_process_group_ranks(whole))
    world, control = _known.get(ranks, (None, None))
    if control is None or world is not dist.group.WORLD:
        control = Control(whole, groups, timeout)
        _known[ranks] = dist.group.WORLD, control
    control.groups += [g for g in groups if all(g is not known for known in control.groups)]
    control.timeout = timeout
    set_group_timeout(timedelta(seconds=timeout), control.group)
    return control


@contextmanager
def during_any(what: str) -> Iterator[None]:
    """`Control.during` of a mesh in this process, where the caller knows of none: that of the most ranks."""
    alive = [c for world, c in _known.values() if dist.is_initialized() and world is dist.group.WORLD]
    if not alive:
        yield
        return
    with max(alive, key=lambda c: c.size).during(what, in_step=False):
        yield
