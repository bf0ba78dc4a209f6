"""`Control`: the ranks of a mesh agree on their next call before they make it, and say so when one does not.

Before its first collective each call of a module, forward and backward, reduces one number over the ranks: a hash that
describes the call. If all ranks have the same number, they go on. If not, every rank gathers the descriptions of all
and raises the same `RankError`. A rank that does not take part has died, ended, failed or is at something else: see
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

from autopar._torch_compat import interrupt_gloo, number_of_groups, set_group_timeout
from autopar.errors import RankError
from autopar.runtime.agreement.points import Details, difference, hash_of
from autopar.runtime.agreement.watch import DIED, ENDED, Activity, Relay, Watch, connect

T = TypeVar("T")

_COLLECTIVE_ERRORS = ("gloo", "Application timeout caused", "onnection closed", "onnection reset", "roken pipe", "NCCL")
"""Words in errors of collectives, of which Gloo's have no type of their own."""


class Control:
    """How this rank agrees with the others.

    Attributes:
        group: for control messages only.
        rank: of this process in the mesh.
        size: how many ranks there are.
        watch: what this rank knows of the others.
        groups: process groups whose waits are ended when a rank is gone.
        broken: why no further collective may run; empty while all is well.
        calls: how many calls each module has had, modules in the order in which they were made.
        steps: how many steps optimizers of parameters on the mesh have begun.
        peers: host and process id of each rank.
    """

    def __init__(self, all_ranks: ProcessGroup, groups: Sequence[ProcessGroup], timeout: float) -> None:
        """Every rank of ``all_ranks`` calls it.

        Raises:
            RankError: some rank does not answer.
        """
        self.rank, self.size, self.timeout = dist.get_rank(all_ranks), dist.get_world_size(all_ranks), timeout
        self.groups: list[ProcessGroup] = [*groups, all_ranks]
        self.broken = ""
        self.calls: list[int] = []
        self.steps = 0
        self.peers: list[tuple[str, int]] = []
        self._told_apart = ""
        self.group = all_ranks
        # `during` needs a watch: until the ranks know of each other, one without a connection.
        self.watch = Watch(self.rank, self.interrupt)
        with self.during("finding the other ranks"):
            self.peers = gather_objects((socket.gethostname(), os.getpid()), all_ranks)
            # Gloo on any device: control messages must not queue behind kernels on a CUDA stream, and a wait on the
            # host can be ended.
            self.group = _new_group(dist.get_process_group_ranks(all_ranks), all_ranks, timeout, "gloo")
            self.groups.append(self.group)
            if self.size == dist.get_world_size() and dist.group.WORLD is not None:
                self.groups.append(dist.group.WORLD)
            self.watch = self._connected_watch()

    def __deepcopy__(self, memo: dict[int, Any]) -> Control:
        """The same object: process groups belong to the process, and a copied model goes on using them."""
        return self

    def new_group(self, ranks: Sequence[int], what: str, backend: str | None = "gloo") -> ProcessGroup:
        """A further group of some of the ranks, whose waits end when a rank is gone; every rank calls it.

        Args:
            ranks: of the world, this one among them.
            what: it is for, for messages.
            backend: of its collectives; None: that of the world.

        Raises:
            RankError: some rank does not answer.
        """
        with self.during(f"making the process group of {what}"):
            group = _new_group(ranks, self.group, self.timeout, backend)
        self.groups.append(group)
        return group

    def _connected_watch(self) -> Watch:
        """A watch connected to the others; without a connection if rank 0 cannot be reached: errors then say less."""
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

    def meet(self, what: str, details: Details = ()) -> None:
        """Wait until every rank is about to make the same call.

        Raises:
            RankError: one is not, or does not take part.
        """
        with self.during(what, everyone=True):
            # One reduction gives both extremes: the largest of x and the largest of -x.
            number = hash_of(what, details)
            numbers = torch.tensor([number, -number])
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.group)
            highest, lowest = numbers.tolist()
            if highest == -lowest:
                return
            every_rank = gather_objects((what, details, self.calls), self.group)
        # Ranks may catch the error and go on: their counters must agree, or every later call would differ, too.
        self.calls = [max(counts) for counts in zip_longest(*(calls for *_, calls in every_rank), fillvalue=0)]
        raise RankError(difference([(name, details) for name, details, _ in every_rank]))

    def gather(self, value: T, what: str) -> list[T]:
        """What every rank has to say about ``what``, in rank order.

        Raises:
            RankError: some rank does not answer, or is at something else.
        """
        self.meet(what)
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
            what: what it does, for messages.
            everyone: whether that needs every rank.
            in_step: whether this rank is out of step with the others if it alone fails at it.
            locate: says which collective an error comes from.

        Raises:
            RankError: in place of the error of a collective.
        """
        self._check(what)
        start = time.monotonic()
        # Kept in a local: `__init__` replaces the watch inside of its own `during`.
        watch, outer = self.watch, self.watch.enter(Activity(what, start, True, everyone))
        try:
            yield
        except RankError as e:
            self._stop(str(e))
            raise
        except Exception as e:
            caused_by_others = self.broken or self.watch.gone() or is_of_collective(e)
            if not isinstance(e, RuntimeError | pickle.PickleError | EOFError) or not caused_by_others:
                # This rank's own error, which it raises as it is. The others hear of it: they may wait for this rank.
                if in_step:
                    self._tell(what, e)
                raise
            error = RankError(self._explanation(what + locate(e), e, time.monotonic() - start))
            self._stop(str(error))
            raise error from e
        finally:
            watch.leave(outer)

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Within, an error of this rank's own is heard of by the others, which go on to wait for this rank."""
        told = len(self.watch.own_failures)
        try:
            yield
        except RankError:  # of an agreement: the others have it, too
            raise
        except Exception as e:
            if len(self.watch.own_failures) == told:  # else by what is within
                self._tell(what, e)
            raise

    @contextmanager
    def telling_apart(self, what: str) -> Iterator[None]:
        """Within, an error is heard of by others, which do not take part in it, but wait for this rank later.

        This rank may go on after it, with another batch, say: the next one of these takes back what was told.
        """
        if self._told_apart:
            self.watch.go_on(self._told_apart)
            self._told_apart = ""
        try:
            yield
        except Exception as e:
            self._told_apart = self._tell(what, e)
            raise

    def _tell(self, what: str, error: Exception) -> str:
        key = f"{what}, {type(error).__name__}"
        self.watch.fail(key, f"{what}: {type(error).__name__}: {error}")
        return key

    def failures(self) -> str:
        """What this rank has failed at. It must be the same on all ranks: else they are out of step."""
        return "; ".join(self.watch.own_failures) or "nothing"

    def interrupt(self) -> None:
        """End the waits of this process."""
        self.broken = self.broken or _INTERRUPTED
        for group in self.groups:
            interrupt_gloo(group)

    def break_off(self, reason: str) -> None:
        """Of a thread that others need and that has failed: the others hear of it, and this rank waits no more."""
        self._stop(reason)
        self.interrupt()

    def _check(self, what: str) -> None:
        # Within another `during`: the outer one has checked, and its body reports what fails.
        if self.watch.is_inside:
            return
        gone = self.watch.gone()
        # A rank that ended by itself does not count: it may have sent all that this rank still receives.
        if self.broken or any(event.kind == DIED for event in gone.values()):
            raise RankError(self._explanation(what, None, 0.0))

    def _stop(self, reason: str) -> None:
        """Refuse further collectives: after a failed one, a message in flight could be received as another's."""
        first = not self.broken
        self.broken = self.broken or reason
        if first or self.broken == _INTERRUPTED:
            self.broken = reason
            self.watch.fail(reason, reason)

    def _explanation(self, what: str, error: Exception | None, waited: float) -> str:
        """Why a rank has no answer."""
        # A connection that breaks is noticed here a little before the relay tells which rank is gone.
        known = self.watch.wait_for_bad_news(2.0 if error is not None else 0.0)
        lines = [self._sentence(rank, event.kind, event.text) for rank, event in sorted(known.items())]
        if not known and error is not None and self.size > 1:
            lines += self._positions()
        reason = "; ".join(lines) or self.broken
        failed = f" ({first_line(error)})" if error is not None else ""
        return (
            f"no answer from every rank about {what} within {self.timeout:g} s (it took {waited:.1f} s){failed}: "
            f"a rank died, raised an error of its own (see its log) or went elsewhere; raise timeout= if it is slow."
            f" What is known: {reason or 'nothing'}"
        )

    def _sentence(self, rank: int, kind: str, text: str) -> str:
        host, process = self.peers[rank] if self.peers else ("?", 0)
        if kind == DIED:
            return f"rank {rank} died (process {process} on {host}; killed, or crashed: look for the cause in its log)"
        if kind == ENDED:
            return f"the process of rank {rank} ({process} on {host}) has ended{': ' + text if text else ' by itself'}"
        return f"rank {rank} failed at {text}"

    def _positions(self) -> list[str]:
        answers = self.watch.activities_of_others(self.size - 1, 2.0)
        rows = [f"rank {self.rank} (this one) is {self.watch.activity}"]
        for rank in range(self.size):
            if rank != self.rank:
                where = f"is {answers[rank]}" if rank in answers else "does not say where it is (stopped, or cut off)"
                rows.append(f"rank {rank} {where}")
        return rows


_INTERRUPTED = "a rank is gone"


def gather_objects(value: T, group: ProcessGroup) -> list[T]:
    """The value of every rank of a group, in rank order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _new_group(ranks: Sequence[int], among: ProcessGroup, timeout: float, backend: str | None) -> ProcessGroup:
    """A group that is made by its ranks alone; every rank of ``among`` makes one, of that or of others.

    Torch names such a group by its ranks and by how many groups its process has. Processes that were on other meshes
    before have others, and would wait for each other under different names: those with fewer make some up first.
    """
    made = gather_objects(number_of_groups(), among)
    for _ in range(max(made) - made[dist.get_rank(among)]):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    group: ProcessGroup = dist.new_group(
        list(ranks), timeout=timedelta(seconds=timeout), backend=backend, use_local_synchronization=True
    )
    return group


def is_of_collective(error: BaseException) -> bool:
    """Whether an error is one of a collective that failed, or came with another message than was expected."""
    return isinstance(error, dist.DistError | pickle.PickleError | EOFError) or any(
        word in str(error) for word in _COLLECTIVE_ERRORS
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


_known: dict[tuple[int, ...], tuple[ProcessGroup, Control]] = {}
"""The world and the control of each set of ranks."""


def control_of(all_ranks: ProcessGroup, groups: Sequence[ProcessGroup], timeout: float) -> Control:
    """The control of a group's ranks, made once; every one of them calls it. It watches ``groups``, too."""
    assert dist.group.WORLD is not None
    ranks = tuple(dist.get_process_group_ranks(all_ranks))
    world, control = _known.get(ranks, (None, None))
    # After destroy_process_group() and a new init, the same rank numbers are other processes, or other connections.
    if control is None or world is not dist.group.WORLD:
        control = Control(all_ranks, groups, timeout)
        _known[ranks] = dist.group.WORLD, control
    control.groups += [g for g in groups if all(g is not known for known in control.groups)]
    control.timeout = timeout
    set_group_timeout(timedelta(seconds=timeout), control.group)
    return control


@contextmanager
def during_any(what: str) -> Iterator[None]:
    """`Control.during` for a caller that knows no mesh: of the mesh in this process that has the most ranks."""
    alive = [c for world, c in _known.values() if dist.is_initialized() and world is dist.group.WORLD]
    if not alive:
        yield
        return
    with max(alive, key=lambda c: c.size).during(what, in_step=False):
        yield
