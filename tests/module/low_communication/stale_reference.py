"""Asynchronous SGD with bounded staleness, written down from the papers: a replay of the recorded order of arrivals.

Parameters are one vector, cut into neighboring parts, each with its own order. What a worker computed its k-th gradient
from follows from the log: of each part the version that it had read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

Log = Sequence[tuple[int, int]]
Vector = np.ndarray[Any, np.dtype[np.float64]]


def vector(model: nn.Module) -> Vector:
    return np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()])


def bounds(total: int, parts: int) -> list[tuple[int, int]]:
    return [(i * total // parts, (i + 1) * total // parts) for i in range(parts)]


class Sgd:
    """With momentum and weight decay."""

    def __init__(self, size: int, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.momentum, self.decay, self.buffer = momentum, weight_decay, np.zeros(size)

    def step(self, x: Vector, g: Vector, lr: float) -> Vector:
        self.buffer = self.momentum * self.buffer + g + self.decay * x
        return x - lr * self.buffer


class AdamW:
    """With decoupled weight decay, as Loshchilov and Hutter have it."""

    def __init__(self, size: int, weight_decay: float = 0.01) -> None:
        self.decay, self.t, self.m, self.v = weight_decay, 0, np.zeros(size), np.zeros(size)

    def step(self, x: Vector, g: Vector, lr: float) -> Vector:
        self.t += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return x - lr * self.decay * x - lr * m / (np.sqrt(v) + 1e-8)


def replay(
    model: nn.Module,
    batch: Callable[[int, int], Mapping[str, torch.Tensor]],
    lr: Callable[[int], float],
    logs: Sequence[Log],
    kind: Callable[[int], Any],
    compensation: float,
) -> list[list[Vector]]:
    """All versions of each part: ``[part][version]``.

    Args:
        model: with the values at the start; it is changed.
        batch: of a worker's step, both counted from 0.
        lr: of a worker's step.
        logs: for each part ``(worker, version read)`` in the order of arrivals.
        kind: an optimizer of so many numbers.
        compensation: the factor of delay compensation.
    """
    start = vector(model)
    cuts = bounds(len(start), len(logs))
    values = [[start[low:high]] for low, high in cuts]
    optimizers = [kind(high - low) for low, high in cuts]
    reads = [
        {w: [version for worker, version in log if worker == w] for w in {worker for worker, _ in log}} for log in logs
    ]
    gradients: dict[tuple[int, int], Vector] = {}
    taken: list[dict[int, int]] = [{} for _ in logs]
    pending = [list(log) for log in logs]
    while any(pending):
        moved = False
        for part, log in enumerate(pending):
            while log:
                worker, read = log[0]
                step = taken[part].get(worker, 0)
                versions = [own[worker][step] if len(own.get(worker, ())) > step else None for own in reads]
                known = all(v is not None and v < len(values[p]) for p, v in enumerate(versions))
                if (worker, step) not in gradients and not known:
                    break
                if (worker, step) not in gradients:
                    at = np.concatenate([values[p][v] for p, v in enumerate(versions)])  # type: ignore[index]
                    gradients[worker, step] = gradient(model, at, batch(worker, step))
                g = gradients[worker, step][slice(*cuts[part])]
                now = values[part][-1]
                g = g + compensation * g * g * (now - values[part][read])
                values[part].append(optimizers[part].step(now, g, lr(step)))
                taken[part][worker] = step + 1
                log.pop(0)
                moved = True
        assert moved, "a gradient was computed from values that nobody had yet"
    return values


def gradient(model: nn.Module, at: Vector, batch: Mapping[str, torch.Tensor]) -> Vector:
    torch.nn.utils.vector_to_parameters(torch.from_numpy(at).clone(), model.parameters())
    model.zero_grad()
    model(**batch)["loss"].backward()
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])  # type: ignore[union-attr]


def require_bounded(log: Log, workers: int, staleness: int) -> None:
    """Each worker goes on from the first version at which it is at most ``staleness`` steps ahead of the slowest."""
    for worker in range(workers):
        own = [(i, read) for i, (who, read) in enumerate(log) if who == worker]
        assert not own or own[0][1] == 0
        for done, ((before, _), (_, read)) in enumerate(pairwise(own), start=1):
            behind = [
                done - min([who for who, _ in log[:version]].count(w) for w in range(workers)) > staleness
                for version in range(before + 1, read + 1)
            ]
            assert not behind[-1] and all(behind[:-1]), (worker, done)
