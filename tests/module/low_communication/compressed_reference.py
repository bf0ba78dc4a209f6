"""Compressed gradients, written down from the papers in numpy and plain PyTorch: one process, no autopar.

Every method is stated for one tensor of each worker; a sharded parameter is as many tensors as there are shards.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

State = dict[str, torch.Tensor]
Array = np.ndarray
Shards = Callable[[str, Array], list[Array]]
"""Views of a parameter's shards."""


def one(name: str, tensor: Array) -> list[Array]:
    return [tensor]


class PowerSgd:
    """Of one tensor: a projection on the span of M Q."""

    def __init__(self, name: str, shape: tuple[int, ...], workers: int, rank: int) -> None:
        rows, columns = shape[0], math.prod(shape[1:])
        self.whole = len(shape) < 2 or rank * (rows + columns) >= rows * columns
        seed = int.from_bytes(hashlib.sha256(f"0 {name}".encode()).digest()[:7], "big")
        self.q = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).numpy()
        self.errors = [np.zeros((rows, columns)) for _ in range(workers)]

    def __call__(self, gradients: list[Array]) -> Array:
        mean = sum(gradients) / len(gradients)
        if self.whole:
            return mean
        own = [g.reshape(e.shape) + e for g, e in zip(gradients, self.errors, strict=True)]
        basis = gram_schmidt(sum(own) @ self.q / len(own))
        self.q = sum(own).T @ basis / len(own)
        self.errors = [m - basis @ (basis.T @ m) for m in own]
        return (basis @ self.q.T).reshape(mean.shape)


def gram_schmidt(matrix: Array) -> Array:
    found: list[Array] = []
    for column in matrix.T:
        for _ in range(2):  # twice is enough
            for other in found:
                column = column - (other @ column) * other
        found.append(column / np.sqrt(column @ column))
    return np.stack(found, 1)


class TopK:
    """Of one tensor."""

    def __init__(self, name: str, shape: tuple[int, ...], workers: int, share: float) -> None:
        self.count = math.ceil(share * math.prod(shape))
        self.errors = [np.zeros(shape) for _ in range(workers)]

    def __call__(self, gradients: list[Array]) -> Array:
        total = np.zeros_like(gradients[0])
        for i, gradient in enumerate(gradients):
            own = gradient + self.errors[i]
            least = np.sort(np.abs(own).ravel())[-self.count]
            sent = np.where(np.abs(own) >= least, own, 0.0)
            assert np.count_nonzero(sent) <= self.count
            self.errors[i] = own - sent
            total += sent
        return total / len(gradients)


class OneBit:
    """Of one tensor: momenta of all workers to what all have."""

    def __init__(self, name: str, shape: tuple[int, ...], workers: int) -> None:
        self.length = -(-math.prod(shape) // workers)
        self.errors = [np.zeros(shape) for _ in range(workers)]
        self.served = [np.zeros(len(p)) for p in self.cut(self.errors[0])]

    def cut(self, tensor: Array) -> list[Array]:
        flat = tensor.ravel()
        return [flat[i * self.length : (i + 1) * self.length] for i in range(len(self.errors))]

    def signs(self, piece: Array) -> Array:
        return np.where(piece >= 0, 1.0, -1.0) * np.abs(piece).mean() if len(piece) else piece

    def __call__(self, momenta: list[Array]) -> Array:
        arrived = []
        for i, momentum in enumerate(momenta):
            own = momentum + self.errors[i]
            arrived.append([self.signs(piece) for piece in self.cut(own)])
            self.errors[i] = own - np.concatenate(arrived[-1]).reshape(own.shape)
        answers = []
        for i in range(len(momenta)):
            y = sum(sent[i] for sent in arrived) / len(momenta) + self.served[i]
            answers.append(self.signs(y))
            self.served[i] = y - answers[i]
        return np.concatenate(answers).reshape(momenta[0].shape)


METHODS: dict[str, Callable[..., Any]] = {"powersgd": PowerSgd, "topk": TopK, "onebit": OneBit}


def run(
    model: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Callable[[int, int], Mapping[str, torch.Tensor]],
    workers: int,
    steps: int,
    given: Mapping[str, Any],
    shards: Shards = one,
    hook: Callable[[nn.Module], Any] = lambda _: None,
    further: Callable[[int, int], Mapping[str, torch.Tensor]] | None = None,
) -> list[State]:
    """Parameters after each step, the same on all workers.

    ``hook`` is called before the optimizer's step; ``further`` gives a second batch, whose gradient is added.
    """
    model = copy.deepcopy(model)
    own = optimizer(model)
    options = {k: v for k, v in given.items() if k in ("rank", "share")}
    plain = given.get("freeze", given.get("start", 0))
    named = dict(model.named_parameters())
    known: dict[tuple[str, int], Any] = {}
    frozen = OwnAdam(own) if given["method"] == "onebit" else None
    history: list[State] = []
    for step in range(steps):
        gradients: list[dict[str, Array]] = []
        for worker in range(workers):
            model.zero_grad()
            model(**batches(step, worker))["loss"].backward()
            if further is not None:
                model(**further(step, worker))["loss"].backward()
            gradients.append({n: p.grad.numpy().copy() for n, p in named.items()})  # type: ignore[union-attr]
        if frozen is not None and step >= plain:
            gradients = [frozen.momenta(named, of_worker) for of_worker in gradients]
        for name, parameter in named.items():
            of_all = [of_worker[name] for of_worker in gradients]
            result = sum(of_all) / workers
            if step >= plain:
                parts = zip(*(shards(name, g) for g in of_all), strict=True)
                for i, (part, into) in enumerate(zip(parts, shards(name, result), strict=True)):
                    if not into.size:
                        continue
                    if (name, i) not in known:
                        known[name, i] = METHODS[given["method"]](name, into.shape, workers, **options)
                    into[...] = known[name, i](list(part))
            parameter.grad = torch.from_numpy(result)
        if frozen is not None and step >= plain:
            frozen.step(named, step + 1, plain)
        else:
            hook(model)
            own.step()
        history.append({n: p.detach().clone() for n, p in named.items()})
    return history


class OwnAdam:
    """Adam with variances that stay, from the state that `torch.optim.Adam` has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def momenta(self, named: Mapping[str, nn.Parameter], gradients: Mapping[str, Array]) -> dict[str, Array]:
        group = self.optimizer.param_groups[0]
        beta, found = group["betas"][0], {}
        for name, gradient in gradients.items():
            whole = gradient + group["weight_decay"] * named[name].detach().numpy()
            before = self.optimizer.state[named[name]]["exp_avg"].numpy()
            found[name] = beta * before + (1 - beta) * whole
        return found

    def step(self, named: Mapping[str, nn.Parameter], step: int, frozen: int) -> None:
        group = self.optimizer.param_groups[0]
        first, second = group["betas"]
        for parameter in named.values():
            state, momentum = self.optimizer.state[parameter], parameter.grad
            assert momentum is not None
            state["exp_avg"] = momentum
            variance = state["exp_avg_sq"] / (1 - second**frozen)
            moved = momentum / (1 - first**step) / (variance.sqrt() + group["eps"])
            with torch.no_grad():
                parameter.sub_(group["lr"] * moved)
