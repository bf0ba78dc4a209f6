"""A manager of replica groups that are all in one process, or on the ranks of a pool: what torchft is for elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from autopar.integrations.replicas.cards import card_of
from autopar.integrations.replicas.gradients import flatten
from autopar.integrations.replicas.groups import ReplicaGroups
from autopar.module.parallel_module import ParallelModule

SECONDS = {"timeout": 30.0, "quorum": 30.0}


class FakeManager:
    """Does what it is told.

    Attributes:
        reduce: replaces a flat tensor by its sum over groups.
        participants: how many groups there are.
        peer: what a peer gives in the next meeting, and its step; None: this group is not behind.
        failures: errors of the next meetings, exchanges or votes, by the name of the method.
    """

    def __init__(self, receive: Callable[[Any], None]) -> None:
        self.receive, self.numbers, self.participants = receive, {"step": 0, "batches_committed": 0}, 1
        self.reduce: Callable[[torch.Tensor], Any] = lambda flat: None
        self.peer: tuple[Any, int] | None = None
        self.failures: dict[str, list[Exception]] = {}
        self.error: Any = None
        self.flats: list[torch.Tensor] = []

    def fail(self, what: str) -> None:
        if self.failures.get(what):
            self.error = self.error or self.failures[what].pop(0)

    def start_quorum(self) -> None:
        self.error = None
        self.fail("start_quorum")
        if self.peer is not None and self.error is None:
            state, self.numbers["step"] = self.peer
            self.receive(state)
            self.peer = None

    def allreduce(self, tensor: torch.Tensor) -> Any:
        self.fail("allreduce")
        if self.error is None:
            self.flats.append(tensor)
            self.reduce(tensor)
            tensor /= self.participants
        return SimpleNamespace(wait=lambda: True)

    def should_commit(self) -> bool:
        self.fail("should_commit")
        self.numbers["step"] += self.error is None
        return self.error is None

    def report_error(self, e: Exception) -> None:
        self.error = e

    def errored(self) -> Any:
        return self.error

    def num_participants(self) -> int:
        return self.participants

    def current_step(self) -> int:
        return self.numbers["step"]

    def state_dict(self) -> dict[str, int]:
        return dict(self.numbers)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.numbers = dict(state_dict)

    def shutdown(self, wait: bool = True) -> None: ...


def grouped(
    model: ParallelModule, optimizer: torch.optim.Optimizer, group: int, count: int, **stateful: Any
) -> tuple[ReplicaGroups, FakeManager]:
    """A group with a manager that does what it is told."""
    made: list[FakeManager] = []

    def connect(receive: Any, give: Any, card: Any) -> Any:
        made.append(FakeManager(receive))
        return made[0], SimpleNamespace(members=tuple(range(count)), refused="", abort=lambda: None)

    run = ReplicaGroups(model, optimizer, stateful, card_of(model, optimizer, group), count, connect, SECONDS)
    made[0].participants = count
    return run, made[0]


def average_together(runs: list[tuple[ReplicaGroups, FakeManager]]) -> None:
    """Average the gradients of groups of one process."""
    flats = [[f.values for f in flatten(dict(run._model.named_parameters()))] for run, _ in runs]
    for number, (run, manager) in enumerate(runs):
        manager.flats = []
        others = [f for i, f in enumerate(flats) if i != number]

        def add(flat: torch.Tensor, manager: FakeManager = manager, others: Any = others) -> None:
            for of_group in others:
                flat += of_group[len(manager.flats) - 1]

        manager.reduce = add
        run.average_gradients()
