"""`Watch`: what each rank hears of the others beside their collectives: that one died, ended, or failed in a step.

Each rank has a connection to rank 0, which relays what one says to all. Nothing is said while all goes well: the kernel
closes the connection of a process that dies, and a thread that reads finds out at once. While a rank waits for one that
will not come, its thread ends the wait.
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
from typing import Any, TypeVar

T = TypeVar("T")

HELLO = 10.0
"""Seconds within which a rank has its connection, or does without."""

DIED, ENDED, FAILED = "died", "ended", "failed"

PATIENCE = {DIED: 0.5, ENDED: 1.0, FAILED: 5.0}
"""Seconds that a wait may go on after such news: what has been sent arrives, or this rank fails in the same way."""


@dataclass(frozen=True)
class News:
    """What has become of a rank.

    Attributes:
        kind: ``died``, ``ended`` (its process, by itself) or ``failed`` (in a step).
        text: its own words.
        key: of a failure, the same on ranks that fail in the same way.
        at: when it was heard, by `time.monotonic`.
    """

    kind: str
    text: str
    key: str
    at: float


@dataclass(frozen=True)
class Position:
    """Where this rank is.

    Attributes:
        what: the last thing it did, or does.
        since: by `time.monotonic`.
        inside: whether it is still at it.
        everyone: whether it needs every rank for that.
    """

    what: str
    since: float
    inside: bool
    everyone: bool = False

    def __str__(self) -> str:
        seconds = time.monotonic() - self.since
        return f"{'in' if self.inside else 'elsewhere, after'} {self.what}, for {seconds:.1f} s"


class Watch:
    """What this rank hears of the others.

    Attributes:
        news: of other ranks.
        own: what this rank failed at, which the others know.
        position: where this rank is, or was last.
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
            connection: to the relay; None: nothing is heard.
            relay: on rank 0.
        """
        self.rank, self.news, self.own = rank, dict[int, News](), list[str]()
        self.position = Position("the start", time.monotonic(), False)
        self._inside: dict[int, Position] = {}  # by thread: checkpoints may be saved in one of their own
        self._answers: dict[int, str] = {}
        self._changed = threading.Condition()
        self._connection, self._interrupt, self._relay = connection, interrupt, relay
        self._sending = threading.Lock()
        if connection is not None:
            threading.Thread(target=self._listen, name="autopar-watch", daemon=True).start()
            multiprocessing.util.Finalize(None, _weakly(self, Watch.close), exitpriority=100)
            os.register_at_fork(after_in_child=_weakly(self, Watch.forget))

    def close(self) -> None:
        """Say that this process ends by itself."""
        error = getattr(sys, "last_value", None)
        self._say({ENDED: "" if error is None else f"{type(error).__name__}: {error}"[:500]})
        if self._relay is not None:
            self._relay.said.wait(1.0)  # which ends with this process

    def forget(self) -> None:
        """In a forked process, which must not keep the connection open when its parent dies."""
        if self._connection is not None:
            os.close(self._connection.detach())
            self._connection = None

    def fail(self, key: str, text: str) -> None:
        """Say that this rank failed in the middle of a step, which the others may wait in."""
        self.own.append(key)
        self._say({FAILED: text[:2000], "key": key})

    def enter(self, position: Position) -> Position | None:
        """This thread may wait for others from now on; where it was before, to be given to `leave`."""
        before = self._inside.get(threading.get_ident())
        self._inside[threading.get_ident()] = self.position = position
        return before

    def leave(self, before: Position | None) -> None:
        """It no longer does, or goes on with what it was at."""
        own = self._inside.pop(threading.get_ident())
        if before is not None:
            self._inside[threading.get_ident()] = before
        self.position = before or Position(own.what, time.monotonic(), False)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is at something."""
        return threading.get_ident() in self._inside

    def gone(self) -> dict[int, News]:
        """Ranks that will make no further call."""
        return {rank: news for rank, news in dict(self.news).items() if news.kind != FAILED}

    def bad(self) -> dict[int, News]:
        """News of ranks that are gone, or have failed where this one has not."""
        return {r: news for r, news in dict(self.news).items() if news.kind != FAILED or news.key not in self.own}

    def hear(self, seconds: float) -> dict[int, News]:
        """Bad news; waits for them if there are none."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.bad()) or self._connection is None, seconds)
            return self.bad()

    def positions(self, others: int, seconds: float) -> dict[int, str]:
        """Where the others say that they are; a rank that does not answer is missing."""
        with self._changed:
            self._answers.clear()
            self._say({"where": True})
            self._changed.wait_for(
                lambda: len(self._answers) >= others - len(self.gone()) or self._connection is None, seconds
            )
            return dict(self._answers)

    def _say(self, message: dict[str, Any]) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            with self._sending:
                connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the listening thread finds out

    def _listen(self) -> None:
        rest, connection = b"", self._connection
        assert connection is not None
        while True:
            try:
                readable = select.select([connection], [], [], 0.2 if self.news else None)[0]
                got = connection.recv(65536) if readable else None
            except (OSError, ValueError):
                got = b""
            if got == b"":
                self._hear({"from": 0, DIED: ""})
                break
            rest += got or b""
            *lines, rest = rest.split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
            self._end_waits()
        while True:  # rank 0 is gone, and whatever is waited for will not come
            time.sleep(0.2)
            self._end_waits()

    def _hear(self, message: dict[str, Any]) -> None:
        rank = message["from"]
        if "where" in message:
            self._say({"at": str(self.position)})
            return
        with self._changed:
            if "at" in message:
                self._answers[rank] = message["at"]
            for kind in (DIED, ENDED, FAILED):
                before = self.news.get(rank)
                if kind in message and (before is None or before.kind == FAILED):
                    said = before.text if before is not None and not message[kind] else message[kind]
                    self.news[rank] = News(kind, said, message.get("key", ""), time.monotonic())
            self._changed.notify_all()

    def _end_waits(self) -> None:
        """End a wait that is in vain."""
        if any(self._in_vain(position) for position in list(self._inside.values())):
            self._interrupt()

    def _in_vain(self, position: Position) -> bool:
        for news in self.bad().values():
            if news.kind == ENDED and not position.everyone:
                continue  # it may have given all that is needed; where it has not, its connections tell
            if time.monotonic() - max(news.at, position.since) >= PATIENCE[news.kind]:
                return True
        return False


@dataclass(frozen=True)
class Address:
    """Where the relay listens; the word is known to the ranks only."""

    host: str
    port: int
    word: str


class Relay:
    """On rank 0: says to all others what one says, and whose connection is closed.

    Attributes:
        address: where the others find it.
        said: set when it has passed on that rank 0 ends.
    """

    def __init__(self, hosts: list[str]) -> None:
        """Listen, on this machine only if all ranks are on it.

        Raises:
            OSError: it cannot.
        """
        local = len(set(hosts)) == 1
        self._server = socket.create_server(("127.0.0.1" if local else "", 0), backlog=len(hosts))
        host = "127.0.0.1" if local else hosts[0]
        self.address = Address(host, self._server.getsockname()[1], secrets.token_hex(16))
        self.said = threading.Event()
        self._size = len(hosts)
        self._connections: dict[int, socket.socket] = {}
        self._rest: dict[int, bytes] = {}

    def start(self) -> socket.socket:
        """Take the connections of the others, and begin; the connection of rank 0 itself."""
        own, self._connections[0] = socket.socketpair()
        deadline = time.monotonic() + HELLO
        while len(self._connections) < self._size and time.monotonic() < deadline:
            self._server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = self._server.accept()
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                word, _, rank = _first_line(connection).partition(" ")
            except OSError:
                continue
            if secrets.compare_digest(word.encode(), self.address.word.encode()) and rank.isdigit():
                self._connections[int(rank)] = _kept_alive(connection)
            else:
                connection.close()
        self._server.close()
        self._rest = dict.fromkeys(self._connections, b"")
        os.register_at_fork(after_in_child=_weakly(self, Relay.leave))
        threading.Thread(target=self._relay, name="autopar-relay", daemon=True).start()
        return own

    def leave(self) -> None:
        """In a forked process, which must not keep connections open when its parent dies."""
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
                        self._tell({"from": key.data, DIED: ""})

    def _read(self, rank: int) -> bool:
        """Relay what a rank says; whether its connection is open."""
        try:
            got = self._connections[rank].recv(65536)
        except OSError:
            got = b""
        *lines, self._rest[rank] = (self._rest[rank] + got).split(b"\n")
        for line in lines:
            self._tell({"from": rank, **json.loads(line)})
        return bool(got)

    def _tell(self, message: dict[str, Any]) -> None:
        for rank, connection in list(self._connections.items()):
            if rank != message["from"]:
                try:
                    connection.sendall(json.dumps(message).encode() + b"\n")
                except OSError:
                    pass  # it is closed, which the next read tells
        if message["from"] == 0 and ENDED in message:
            self.said.set()


def connect(address: Address, rank: int) -> socket.socket | None:
    """The connection of another rank; None if the relay cannot be reached."""
    try:
        connection = socket.create_connection((address.host, address.port), timeout=HELLO)
        connection.sendall(f"{address.word} {rank}\n".encode())
    except OSError:
        return None
    return _kept_alive(connection)


def _first_line(connection: socket.socket) -> str:
    """What a rank says first, and nothing behind it."""
    found = b""
    while len(found) < 100 and (byte := connection.recv(1)) not in (b"", b"\n"):
        found += byte
    return found.decode(errors="replace")


def _kept_alive(connection: socket.socket) -> socket.socket:
    """Open for as long as both machines are."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _weakly(owner: T, method: Callable[[T], None]) -> Callable[[], None]:
    """A call of a method that does not keep its owner alive."""
    reference = weakref.ref(owner)

    def call() -> None:
        found = reference()
        if found is not None:
            method(found)

    return call
