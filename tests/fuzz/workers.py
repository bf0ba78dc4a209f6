"""Processes that judge cases: each takes many, one that hangs or dies is replaced, and its case is a crash."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tests.fuzz.case import Case, draw, from_json
from tests.fuzz.judge import Outcome, judge, settle

TIMEOUT, COMPILING = 60.0, 600.0
"""Seconds that one case may take, and one that inductor compiles."""

LIFE = 400
"""Cases that one process judges."""


def serve(pipe: Connection, mode: str) -> None:
    """Judge what comes through a pipe."""
    sys.stdout = sys.stderr = open(os.devnull, "w")
    judge(draw(0, mode), mode)
    settle()
    pipe.send("ready")
    for number in range(LIFE):
        try:
            case = from_json(pipe.recv())
        except EOFError:
            return
        try:
            outcome = judge(case, mode)
        except Exception as e:  # of the judge's own
            outcome = Outcome("crash", f"judge: {type(e).__name__}", str(e))
        if number % 8 == 0:
            gc.collect()
        pipe.send(outcome.as_dict())


@dataclass
class Worker:
    """One process and the case that it judges."""

    mode: str
    case: Case | None = None
    deadline: float = 0.0
    left: int = 0
    process: Any = None
    pipe: Any = None

    def give(self, case: Case) -> None:
        if self.left == 0:
            self.restart()
        self.case, self.deadline, self.left = case, time.monotonic() + self.timeout, self.left - 1
        self.pipe.send(case.as_json())

    @property
    def timeout(self) -> float:
        return COMPILING if self.mode == "compiled" else TIMEOUT

    def restart(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.mode), daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(600) or self.pipe.recv() != "ready":
            raise RuntimeError("a worker did not start")
        self.left = LIFE

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def take(self) -> Outcome | None:
        """The outcome of its case, None while it runs."""
        if self.pipe.poll():
            try:
                return Outcome(**self.pipe.recv())
            except (EOFError, ConnectionError):
                self.process.join()
                self.left, code = 0, self.process.exitcode
                return Outcome("crash", f"the process died ({code})", f"exit code {code}")
        if time.monotonic() > self.deadline:
            self.left = 0
            return Outcome("crash", "no answer in time", f"more than {self.timeout} s")
        return None


@dataclass
class Pool:
    """Workers that take cases as they become free."""

    mode: str
    count: int = 2
    workers: list[Worker] = field(default_factory=list)

    def __enter__(self) -> Pool:
        self.workers = [Worker(self.mode) for _ in range(self.count)]
        return self

    def __exit__(self, *rest: object) -> None:
        for worker in self.workers:
            worker.close()

    def run(self, cases: Iterator[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Outcomes in the order in which they come."""
        busy: list[Worker] = []
        for worker in self.workers:
            busy += self._next(worker, cases)
        while busy:
            multiprocessing.connection.wait([w.pipe for w in busy], 1.0)
            for worker in list(busy):
                outcome = worker.take()
                if outcome is None:
                    continue
                assert worker.case is not None
                busy.remove(worker)
                yield worker.case, outcome
                busy += self._next(worker, cases)

    @staticmethod
    def _next(worker: Worker, cases: Iterator[Case]) -> list[Worker]:
        case = next(cases, None)
        if case is None:
            return []
        worker.give(case)
        return [worker]
