"""Messages of asynchronous SGD: a thread for each other worker takes what it sends, while this one computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.runtime.agreement.control import first_line, is_of_collective

PUSH, REPLY = 1, 2
"""Tags: a gradient to an owner, and the owner's values back."""

FOREVER = timedelta(days=365)
"""A thread waits until a message comes or the connection ends: workers may compute for as long as they like."""

NUMBER = 8
"""Bytes of a number of a message's head."""

Arrived = Callable[[int, torch.Tensor], list[int]]
"""Takes the sender and its message; the workers that a reply goes to."""


def message(head: Sequence[float], values: torch.Tensor) -> torch.Tensor:
    """Some numbers in float64, and values, as bytes."""
    return torch.cat([torch.tensor(head, dtype=torch.float64).view(torch.uint8), values.view(torch.uint8)])


def parts(received: torch.Tensor, head: int, dtype: torch.dtype) -> tuple[list[float], torch.Tensor]:
    """The ``head`` numbers and the values of a message."""
    numbers, values = received.tensor_split([NUMBER * head])
    return numbers.view(torch.float64).tolist(), values.view(dtype)


@dataclass
class Mail:
    """Of one rank: takes gradients for the part that it owns, and sends its own.

    Attributes:
        group: of Gloo, of the ranks at one place in each worker.
        index: of this worker.
        arrived: is called with each gradient that comes, this worker's own too, by one thread at a time.
        reply: what goes to workers that are released; None: this rank owns nothing.
        fail: is told, in a thread, why this rank takes no more gradients.
        push_bytes: of a gradient that goes to each worker.
        reply_bytes: of what comes from each worker, 0 if it owns nothing.
        sent: bytes that this rank has sent, or is about to.
    """

    group: ProcessGroup
    index: int
    arrived: Arrived
    reply: Callable[[], torch.Tensor] | None
    fail: Callable[[str], None]
    push_bytes: Sequence[int]
    reply_bytes: Sequence[int]
    sent: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _released: threading.Condition = field(default_factory=threading.Condition)
    _own: torch.Tensor | None = None
    _failed: BaseException | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def others(self) -> list[int]:
        """The other workers."""
        return [i for i in range(dist.get_world_size(self.group)) if i != self.index]

    def start(self) -> None:
        """Take what comes from now on."""
        for other in self.others:
            # Of a process that ends without `stop`, they end with it.
            thread = threading.Thread(
                target=self._serve, args=(other,), name=f"gradients of worker {other}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _serve(self, other: int) -> None:
        try:
            while True:
                received = torch.empty(self.push_bytes[self.index], dtype=torch.uint8)
                work: Any = dist.irecv(received, group=self.group, group_src=other, tag=PUSH)
                work.wait(FOREVER)
                if float(received[:NUMBER].view(torch.float64)) < 0:  # the last one
                    return
                self._take(other, received)
        except Exception as e:
            with self._released:
                self._failed = e
                self._released.notify_all()
            if not is_of_collective(e):  # of a rank that is gone the others know
                self.fail(f"taking a gradient of worker {other}: {type(e).__name__}: {first_line(e)}")

    def _take(self, sender: int, received: torch.Tensor) -> None:
        """Give a gradient to the owner, and its values to who is released."""
        with self._turn:
            released = self.arrived(sender, received)
            values = self.reply() if released and self.reply is not None else None
            # Before it is sent: who counts when all have their values counts all.
            self.sent += 0 if values is None else values.numel() * len([w for w in released if w != self.index])
        with self._released:
            self._released.notify_all()
        if values is None:
            return
        works: list[Any] = []
        for worker in released:
            if worker == self.index:
                with self._released:
                    self._own = values
                    self._released.notify_all()
            else:
                works.append(dist.isend(values, group=self.group, group_dst=worker, tag=REPLY))
        for work in works:
            work.wait(FOREVER)

    def exchange(self, pushes: Sequence[torch.Tensor], timeout: float) -> dict[int, torch.Tensor]:
        """Send a gradient to all, and wait for the values of all owners.

        Args:
            pushes: for each worker, this one included.
            timeout: seconds.

        Returns:
            What came from each owner.

        Raises:
            RuntimeError: an owner did not answer in time, this rank's own among them, or a connection has ended.
        """
        deadline = time.monotonic() + timeout
        owners = [i for i, size in enumerate(self.reply_bytes) if size]
        found = {o: torch.empty(self.reply_bytes[o], dtype=torch.uint8) for o in owners if o != self.index}
        # Posted before anything is sent: an owner's thread does not wait for this one.
        replies: list[Any] = [dist.irecv(t, group=self.group, group_src=o, tag=REPLY) for o, t in found.items()]
        self._send(pushes, timeout)
        self._take(self.index, pushes[self.index])
        if self.index in owners:
            found[self.index] = self._wait_for_own(deadline)
        for work in replies:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        return found

    def _send(self, pushes: Sequence[torch.Tensor], timeout: float) -> None:
        works: list[Any] = []
        with self._turn:
            self.sent += sum(pushes[other].numel() for other in self.others)
        for other in self.others:
            works.append(dist.isend(pushes[other], group=self.group, group_dst=other, tag=PUSH))
        for work in works:
            work.wait(timedelta(seconds=timeout))

    def _wait_for_own(self, deadline: float) -> torch.Tensor:
        with self._released:
            self._released.wait_for(lambda: self._own is not None or self._failed, deadline - time.monotonic())
            own, self._own = self._own, None
        if own is None:
            raise dist.DistError("the part of this rank was not released in time") from self._failed
        return own

    def wait_until(self, settled: Callable[[], bool], timeout: float) -> None:
        """Wait until what has arrived is enough.

        Raises:
            RuntimeError: it is not in time, or a connection has ended.
        """
        with self._released:
            if not self._released.wait_for(lambda: settled() or self._failed is not None, timeout) or not settled():
                raise dist.DistError("a gradient that was sent has not arrived") from self._failed

    def stop(self, timeout: float) -> None:
        """Take nothing more; every rank calls it, when no gradient is on the way.

        Raises:
            RuntimeError: another rank does not.
        """
        last = [message([-1.0], torch.zeros(size - NUMBER, dtype=torch.uint8)) for size in self.push_bytes]
        self._send(last, timeout)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.001, deadline - time.monotonic()))
            if thread.is_alive():
                raise dist.DistError(f"the last message to the thread for {thread.name} did not come in time")
        self._threads = []
