"""Steps of training that take turns, so that what else the machine does slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Step = Callable[[], float]
WARM = 2


def stepper(model: Any, batch: dict[str, Any], gradients_stay: bool = False) -> Step:
    """Forward and backward, which returns the loss.

    Args:
        model: returns its loss, or something that has it as ``loss``.
        batch: arguments of the model.
        gradients_stay: until the next step, which drops them first.
    """

    def drop() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    def step() -> float:
        if gradients_stay:
            drop()
        loss = model(**batch)
        loss = getattr(loss, "loss", loss)  # the rest of the output must not live on while gradients are computed
        loss.backward()
        if not gradients_stay:
            drop()
        return float(loss.detach())

    return step


def agreed_losses(steps: dict[str, Step]) -> dict[str, float]:
    """The loss of each, after a few steps that warm it.

    Raises:
        RuntimeError: the losses differ, so that times would not be of the same work.
    """
    losses = {name: [step() for _ in range(WARM)][-1] for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-3 * abs(max(losses.values())):
        raise RuntimeError(f"the losses differ: {losses}")
    return losses


def take_turns(steps: dict[str, Step], rounds: int, until_all: bool = True) -> dict[str, list[float]]:
    """Seconds of each in each round, from the moment when all processes are there; every round starts with another one.

    Args:
        steps: by name.
        rounds: how many.
        until_all: until every process is done, not only this one.
    """
    from torch.distributed import barrier

    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            barrier()
            start = time.perf_counter()
            steps[name]()
            if until_all:
                barrier()
            times[name].append(time.perf_counter() - start)
    return times
