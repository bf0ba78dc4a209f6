"""`Watch`: what each rank learns of the others outside of collectives: that one died, ended, or failed in a step.

Each rank has a connection to rank 0, which relays the messages of one to all others. No message is sent while all goes
well: the kernel closes the connection of a process that dies, and the thread that reads it notices at once. If a rank
then waits for one that is gone, its thread ends the wait.
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import secrets
import select
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

CONNECT_TIMEOUT = 10.0
"""Seconds within which a rank must have its connection; without one, errors say less."""

DIED, ENDED, FAILED, GOES_ON = "died", "ended", "failed", "goes on"

PATIENCE = {DIED: 0.5, ENDED: 1.0, FAILED: 5.0}
"""Seconds that a wait may go on after such an event: messages in flight arrive, or this rank fails in the same way."""


@dataclass(frozen=True)
class RankEvent:
    """Why a rank takes no further part, or may not.

    Attributes:
        kind: ``died``, ``ended`` (its process, by itself) or ``failed`` (in a step).
        text: its own message.
        key: of a failure, the same on ranks that fail in the same way.
        at: when this rank learned of it, by `time.monotonic`.
    """

    kind: str
    text: str
    key: str
    at: float


@dataclass(frozen=True)
class Activity:
    """What this rank is doing, or did last.

    Attributes:
        what: in words.
        since: when it began or ended, by `time.monotonic`.
        inside: whether it is still going on.
        everyone: whether it needs every rank.
    """

    what: str
    since: float
    inside: bool
    everyone: bool = False

    def __str__(self) -> str:
        seconds = time.monotonic() - self.since
        return f"{'in' if self.inside else 'elsewhere, after'} {self.what}, for {seconds:.1f} s"


class Watch:
    """What this rank knows of the others.

    Attributes:
        events: of other ranks.
        own_failures: what this rank failed at; the others have been told.
        activity: what this rank is doing, or did last.
    """

    def __init__(
        self,
        rank: int,
        interrupt: Callable[[], None],
        connection: socket.socket | None = None,
        relay: Relay | None = None,
    ) -> None:
        """Listen from now on.

        Args:
            rank: of this process.
            interrupt: ends the waits of this process.
            connection: to the relay; None: this rank learns nothing of the others.
            relay: on rank 0.
        """
        self.rank, self.events, self.own_failures = rank, dict[int, RankEvent](), list[str]()
        self.activity = Activity("the start", time.monotonic(), False)
        self._inside: dict[int, Activity] = {}  # by thread: checkpoints may be saved in one of their own
        self._answers: dict[int, str] = {}
        self._changed = threading.Condition()
        self._connection, self._interrupt, self._relay = connection, interrupt, relay
        # `_listen` answers questions from its thread while this one may report a failure: lines must not mix.
        self._sending = threading.Lock()
        if connection is not None:
            threading.Thread(target=self._listen, name="autopar-watch", daemon=True).start()
            # Unlike atexit's handlers, these run at the end of processes that multiprocessing forks, too.
            multiprocessing.util.Finalize(None, _weakly(self, Watch.close), exitpriority=100)
            os.register_at_fork(after_in_child=_weakly(self, Watch.close_in_fork))
            _tell_of_uncaught_errors(self)

    def close(self) -> None:
        """Tell the others that this process ends by itself."""
        # The interpreter sets last_value for an exception that nobody caught: the cause that the others want to know.
        error = getattr(sys, "last_value", None)
        self._send({ENDED: "" if error is None else f"{type(error).__name__}: {error}"[:500]})
        if self._relay is not None:
            self._relay.end_relayed.wait(1.0)  # the relay's thread ends with this process

    def close_in_fork(self) -> None:
        """Close the connection in a forked process: it would stay open when the parent dies."""
        if self._connection is not None:
            # The descriptor alone: shutdown() would end the connection of the parent, too.
            os.close(self._connection.detach())
            self._connection = None

    def fail(self, key: str, text: str) -> None:
        """Tell the others, which may wait for this rank, that it failed in the middle of a step."""
        self.own_failures.append(key)
        self._send({FAILED: text[:2000], "key": key})

    def go_on(self, key: str) -> None:
        """Take back what `fail` has told: whoever waits for this rank may do so."""
        self.own_failures.remove(key)
        self._send({GOES_ON: key})

    def enter(self, activity: Activity) -> Activity | None:
        """This thread may wait for others from now on. Returns what it did before, for `leave`."""
        outer = self._inside.get(threading.get_ident())
        self._inside[threading.get_ident()] = self.activity = activity
        return outer

    def leave(self, outer: Activity | None) -> None:
        """The activity has ended; the outer one, if any, goes on."""
        ended = self._inside.pop(threading.get_ident())
        if outer is not None:
            self._inside[threading.get_ident()] = outer
        self.activity = outer or Activity(ended.what, time.monotonic(), False)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is between `enter` and `leave`."""
        return threading.get_ident() in self._inside

    def gone(self) -> dict[int, RankEvent]:
        """Ranks that will make no further call."""
        # Copied: the listening thread adds events meanwhile.
        return {rank: event for rank, event in dict(self.events).items() if event.kind != FAILED}

    def bad_news(self) -> dict[int, RankEvent]:
        """Events of ranks that are gone, or have failed where this one has not."""
        events = dict(self.events)
        # An error of the model that all ranks raise leaves them in step: nobody waits for anybody.
        return {r: e for r, e in events.items() if e.kind != FAILED or e.key not in self.own_failures}

    def wait_for_bad_news(self, seconds: float) -> dict[int, RankEvent]:
        """`bad_news`; waits for some if there is none."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.bad_news()) or self._connection is None, seconds)
            return self.bad_news()

    def activities_of_others(self, others: int, seconds: float) -> dict[int, str]:
        """What the others say that they are doing, by rank; a rank that does not answer in time is missing."""
        with self._changed:
            self._answers.clear()
            self._send({"where": True})
            self._changed.wait_for(
                lambda: len(self._answers) >= others - len(self.gone()) or self._connection is None, seconds
            )
            return dict(self._answers)

    def _send(self, message: dict[str, Any]) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            with self._sending:
                # One JSON object a line: line breaks can separate messages, since JSON has none inside.
                connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the listening thread notices that the connection is closed

    def _listen(self) -> None:
        rest, connection = b"", self._connection
        assert connection is not None
        while True:
            try:
                # Blocks while all is well, so that the thread costs nothing; after an event it must look at the clock.
                readable = select.select([connection], [], [], 0.2 if self.events else None)[0]
                received = connection.recv(65536) if readable else None
            except (OSError, ValueError):
                received = b""
            if received == b"":
                self._handle({"from": 0, DIED: ""})
                break
            rest += received or b""
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self._handle(json.loads(line))
            self._end_hopeless_waits()
        while True:  # rank 0 is gone: no wait of this process will ever be answered
            time.sleep(0.2)
            self._end_hopeless_waits()

    def _handle(self, message: dict[str, Any]) -> None:
        rank = message["from"]
        if "where" in message:
            self._send({"at": str(self.activity)})
            return
        with self._changed:
            if "at" in message:
                self._answers[rank] = message["at"]
            known = self.events.get(rank)
            if known is not None and known.kind == FAILED and known.key == message.get(GOES_ON):
                del self.events[rank]
            for kind in (DIED, ENDED, FAILED):
                before = self.events.get(rank)
                # The first cause counts: a process that ends closes its connection, which would then look like a death.
                if kind in message and (before is None or before.kind == FAILED):
                    text = before.text if before is not None and not message[kind] else message[kind]
                    self.events[rank] = RankEvent(kind, text, message.get("key", ""), time.monotonic())
            self._changed.notify_all()

    def _end_hopeless_waits(self) -> None:
        if any(self._is_hopeless(activity) for activity in list(self._inside.values())):
            self._interrupt()

    def _is_hopeless(self, activity: Activity) -> bool:
        """Whether this rank waits, longer than patience allows, for one that will not answer."""
        for event in self.bad_news().values():
            if event.kind == ENDED and not activity.everyone:
                continue  # it may have sent all that is needed; if not, the collective's own connection breaks
            if time.monotonic() - max(event.at, activity.since) >= PATIENCE[event.kind]:
                return True
        return False


Address = tuple[str, int, str]
"""Host and port of the relay, and a secret that only the ranks know."""


class Relay:
    """On rank 0: sends the messages of each rank to all others, and tells them whose connection is closed.

    Attributes:
        address: where the others find it.
        end_relayed: set when all others have been told that rank 0 ends.
    """

    def __init__(self, hosts: list[str]) -> None:
        """Listen, on this machine only if all ranks are on it.

        Raises:
            OSError: it cannot.
        """
        local = len(set(hosts)) == 1
        self._server = socket.create_server(("127.0.0.1" if local else "", 0), backlog=len(hosts))
        host = "127.0.0.1" if local else hosts[0]
        self.address: Address = (host, self._server.getsockname()[1], secrets.token_hex(16))
        self.end_relayed = threading.Event()
        self._size = len(hosts)
        self._connections: dict[int, socket.socket] = {}
        self._rest: dict[int, bytes] = {}

    def start(self) -> socket.socket:
        """Accept the connections of the others and begin to relay. Returns the connection of rank 0 itself."""
        # Rank 0 has a connection like the others, so that its watch needs no code of its own.
        own, self._connections[0] = socket.socketpair()
        deadline = time.monotonic() + CONNECT_TIMEOUT
        while len(self._connections) < self._size and time.monotonic() < deadline:
            self._server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._server.accept()
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                secret, _, rank = _first_line(connection).partition(" ")
            except OSError:
                continue
            # The port is open to the network: whoever does not know the secret is no rank.
            if secrets.compare_digest(secret.encode(), self.address[2].encode()) and rank.isdigit():
                self._connections[int(rank)] = _kept_alive(connection)
            else:
                connection.close()
        self._server.close()
        self._rest = dict.fromkeys(self._connections, b"")
        os.register_at_fork(after_in_child=_weakly(self, Relay.close_in_fork))
        threading.Thread(target=self._relay, name="autopar-relay", daemon=True).start()
        return own

    def close_in_fork(self) -> None:
        """Close the connections in a forked process: they would stay open when the parent dies."""
        for connection in self._connections.values():
            connection.close()

    def _relay(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while self._connections:
                for key, _ in selector.select():
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                        self._connections.pop(key.data).close()
                        # Of a rank that said before that it ends, the others ignore this: see `Watch._handle`.
                        self._send_to_others({"from": key.data, DIED: ""})

    def _read(self, rank: int) -> bool:
        """Relay the messages of a rank; whether its connection is open."""
        try:
            received = self._connections[rank].recv(65536)
        except OSError:
            received = b""
        *lines, self._rest[rank] = (self._rest[rank] + received).split(b"\n")
        for line in lines:
            self._send_to_others({"from": rank, **json.loads(line)})
        return bool(received)

    def _send_to_others(self, message: dict[str, Any]) -> None:
        for rank, connection in list(self._connections.items()):
            if rank != message["from"]:
                try:
                    connection.sendall(json.dumps(message).encode() + b"\n")
                except OSError:
                    pass  # the next read notices that it is closed
        if message["from"] == 0 and ENDED in message:
            self.end_relayed.set()


def connect(address: Address, rank: int) -> socket.socket | None:
    """The connection of another rank; None if the relay cannot be reached."""
    host, port, secret = address
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
        connection.sendall(f"{secret} {rank}\n".encode())
    except OSError:
        return None
    return _kept_alive(connection)


def _first_line(connection: socket.socket) -> str:
    """The first line that a rank sends, read byte by byte: what follows is for `_read`."""
    line = b""
    while len(line) < 100 and (byte := connection.recv(1)) not in (b"", b"\n"):
        line += byte
    return line.decode(errors="replace")


def _kept_alive(connection: socket.socket) -> socket.socket:
    """A connection that breaks when the other machine is gone, after about 25 seconds."""
    connection.settimeout(None)
    # A machine that loses power closes nothing: only unanswered probes tell. 10 s idle, then 3 probes, 5 s apart.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


_told: weakref.WeakSet[Watch] = weakref.WeakSet()
"""Watches whose other ranks hear of an error that nobody catches."""


def _tell_of_uncaught_errors(watch: Watch) -> None:
    """Tell when the error comes: a process may live on after it for long, with a thread or in a debugger."""
    if getattr(sys.excepthook, "func", None) is not _uncaught:
        sys.excepthook = partial(_uncaught, sys.excepthook)
    _told.add(watch)


def _uncaught(shown: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for watch in list(_told):
        watch.fail(f"its script, {kind.__name__}", f"its script: {kind.__name__}: {error}")
    shown(kind, error, trace)


def _weakly(owner: T, method: Callable[[T], None]) -> Callable[[], None]:
    """A call of a method that does not keep its owner alive."""
    reference = weakref.ref(owner)

    def call() -> None:
        found = reference()
        if found is not None:
            method(found)

    return call
