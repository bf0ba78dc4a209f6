"""Workers that train apart, written down from the papers in plain PyTorch: one process, no autopar.

The outer optimizer is `torch.optim.SGD` itself, on parameters whose gradient is the mean difference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Recurrence:
    """One algorithm.

    Attributes:
        period: steps of a round.
        sends: for each fragment, by the beginning of its parameters' names, the step of a round (1 to period) at whose
            end it is sent.
        delay: steps until it is used.
        mix: share of the own parameters that stays.
        outer: arguments of the outer SGD.
        synchronous: steps at the beginning with averaged gradients.
    """

    period: int
    sends: Mapping[tuple[str, ...], int]
    delay: int = 0
    mix: float = 0.0
    outer: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.7, "momentum": 0.9, "nesterov": True})
    synchronous: int = 0


def run(
    model: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Callable[[int, int], Mapping[str, torch.Tensor]],
    workers: int,
    steps: int,
    algorithm: Recurrence,
    then: Mapping[int, int] | None = None,
    tokens: Callable[[int, int], int] | None = None,
) -> list[list[State]]:
    """Parameters of each worker after each step: ``[step][worker][name]``; ``batches(step, worker)`` counts from 0.

    ``tokens(step, worker)`` weights each mean by what workers have trained on since the last one of that parameter.
    ``then`` has other numbers of workers from some steps on: the last ones leave, or copies of the first ones join.
    """
    models = [copy.deepcopy(model) for _ in range(workers)]
    inner = [optimizer(m) for m in models]
    shared: dict[str, nn.Parameter] = {}
    outer: dict[str, torch.optim.Optimizer] = {}
    waiting: dict[str, tuple[int, torch.Tensor]] = {}
    history: list[list[State]] = []
    begun: dict[str, int] = {}
    for step in range(steps):
        if step in (then or {}):
            workers = (then or {})[step]
            # Both at once: the optimizer of a copy is of the copy's parameters.
            more = [
                copy.deepcopy((models[i % len(models)], inner[i % len(models)])) for i in range(len(models), workers)
            ]
            models = [*models[:workers], *(m for m, _ in more)]
            inner = [*inner[:workers], *(o for _, o in more)]
        named = [dict(m.named_parameters()) for m in models]
        for worker, m in enumerate(models):
            m.zero_grad()
            m(**batches(step, worker))["loss"].backward()
        if step < algorithm.synchronous:
            for name in named[0]:
                mean = sum(n[name].grad for n in named) / workers  # type: ignore[misc]
                for n in named:
                    n[name].grad = mean.clone()
        elif not shared:
            shared = {name: nn.Parameter(p.detach().clone()) for name, p in named[0].items()}
            outer = {name: torch.optim.SGD([p], **algorithm.outer) for name, p in shared.items()}
        for o in inner:
            o.step()
        apart = step - algorithm.synchronous + 1
        for name in shared:
            due = next(at for names, at in algorithm.sends.items() if name.startswith(names))
            if apart >= due and (apart - due) % algorithm.period == 0:
                differences = [shared[name].detach() - n[name].detach() for n in named]
                since = range(begun.get(name, 0), step + 1)
                weights = [sum(tokens(s, w) for s in since) if tokens else 1 for w in range(workers)]
                begun[name] = step + 1
                mean = sum(w * d for w, d in zip(weights, differences, strict=True)) / sum(weights)
                waiting[name] = (apart + algorithm.delay, mean)  # type: ignore[assignment]
            if name in waiting and waiting[name][0] == apart:
                shared[name].grad = waiting.pop(name)[1]
                outer[name].step()
                with torch.no_grad():
                    for n in named:
                        n[name].copy_(algorithm.mix * n[name] + (1 - algorithm.mix) * shared[name])
        history.append([{name: p.detach().clone() for name, p in n.items()} for n in named])
    return history


def largest_difference(own: Mapping[str, torch.Tensor], expected: Sequence[State] | State) -> float:
    """Between parameters by name."""
    assert not isinstance(expected, Sequence)
    assert own.keys() == expected.keys()
    return max(float((own[name].detach() - expected[name]).abs().max()) for name in expected)
