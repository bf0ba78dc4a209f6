"""Workers in one process that send gradients when they are told to: what `autopar.StaleGradients` computes on many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.module.low_communication.emulate import trained_alike
from autopar.module.low_communication.outer import require_exchangeable
from autopar.module.low_communication.stale.owner import LR, Owner, cut, put, require_elementwise, taken
from autopar.module.low_communication.stale.settings import Staleness


class EmulatedStale:
    """Models of one process as workers of asynchronous SGD, in any order of arrivals.

    Attributes:
        settings: how stale gradients may be.
        owners: of the parts of the parameters.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], **settings: Any
    ) -> None:
        """Begin at the parameters that the models have, which must be the same.

        Args:
            models: one for each worker.
            optimizers: one for each, of the same kind and options; owners make their steps.
            settings: as of `Staleness`.

        Raises:
            ValueError: a setting is wrong, there is one worker, or the models differ.
        """
        self.settings, workers = Staleness(**settings), len(models)
        count = self.settings.owners_of(workers)
        self._parameters = trained_alike(models, optimizers)
        first, self._optimizers = self._parameters[0], optimizers
        require_exchangeable(first, None)
        for optimizer in optimizers:
            require_elementwise(optimizer)
        self._dtype = wide(first)
        groups = groups_of(first, optimizers[0])
        self.owners = [
            Owner(s, taken(first, s, self._dtype), optimizers[0], self.settings, workers, record=True)
            for s in cut({n: p.numel() for n, p in first.items()}, groups, count)
        ]
        self._sent: dict[tuple[int, int], tuple[torch.Tensor, list[bool], list[float]]] = {}
        self._missing: list[set[int]] = [set() for _ in models]

    def is_ready(self, worker: int) -> bool:
        """Whether a worker has all parameters for its next step, and is not waiting for another."""
        return not self._missing[worker]

    def on_the_way(self) -> list[tuple[int, int]]:
        """Gradients that have been sent and not delivered: workers and owners."""
        return list(self._sent)

    def send(self, worker: int) -> None:
        """Send the gradients that a worker's parameters have to all owners.

        Raises:
            AutoparError: the worker waits for parameters.
        """
        if self._missing[worker]:
            owners = ", ".join(map(str, sorted(self._missing[worker])))
            raise AutoparError(f"worker {worker} waits for the parameters of owners {owners}: deliver other gradients")
        for number, owner in enumerate(self.owners):
            self._sent[worker, number] = self._message(worker, owner)
            self._missing[worker].add(number)

    def _message(self, worker: int, owner: Owner) -> tuple[torch.Tensor, list[bool], list[float]]:
        gradients, given = gradients_of(self._parameters[worker])
        lrs = [float(group[LR]) for group in self._optimizers[worker].param_groups]
        return taken(gradients, owner.segments, self._dtype), [given[s.name] for s in owner.segments], lrs

    def deliver(self, worker: int, owner: int) -> None:
        """Let what a worker has sent arrive at an owner; who may go on gets the owner's values."""
        own = self.owners[owner]
        for released in own.push(worker, *self._sent.pop((worker, owner))):
            with torch.no_grad():
                put(self._parameters[released], own.segments, own.flat)
            self._missing[released].discard(owner)

    def step(self, worker: int) -> None:
        """Send a worker's gradients, and let them arrive at all owners."""
        self.send(worker)
        for owner in range(len(self.owners)):
            self.deliver(worker, owner)


def wide(tensors: Any) -> torch.dtype:
    """The dtype in which owners keep and update numbers: float32, or float64 where a parameter is."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32


def groups_of(parameters: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The number of the optimizer's group that has each parameter, by name."""
    numbers = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: numbers[id(p)] for name, p in parameters.items()}


def gradients_of(parameters: Any) -> tuple[dict[str, torch.Tensor], dict[str, bool]]:
    """Gradients by name, zeros where there are none, and where there are."""
    given = {name: p.grad is not None for name, p in parameters.items()}
    return {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in parameters.items()}, given
