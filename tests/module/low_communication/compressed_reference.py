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
        self.moves = np.ones(shape, bool)

    def cut(self, tensor: Array) -> list[Array]:
        flat = tensor.ravel()
        return [flat[i * self.length : (i + 1) * self.length] for i in range(len(self.errors))]

    def stay(self, variance: Array) -> None:
        """Numbers whose signs would be worth more than a thousand learning rates have no part in any of this."""
        self.moves = np.sqrt(variance) > np.sqrt(variance.max()) / 1000

    def signs(self, piece: Array, moves: Array) -> Array:
        if not moves.any():
            return np.zeros_like(piece)
        return np.where(moves, np.where(piece >= 0, 1.0, -1.0) * np.abs(piece[moves]).mean(), 0.0)

    def __call__(self, momenta: list[Array]) -> Array:
        arrived, moves = [], self.cut(self.moves)
        for i, momentum in enumerate(momenta):
            own = np.where(self.moves, momentum, 0.0) + self.errors[i]
            arrived.append([self.signs(*both) for both in zip(self.cut(own), moves, strict=True)])
            self.errors[i] = own - np.concatenate(arrived[-1]).reshape(own.shape)
        answers = []
        for i in range(len(momenta)):
            y = sum(sent[i] for sent in arrived) / len(momenta) + self.served[i]
            answers.append(self.signs(y, moves[i]))
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
                        if frozen is not None:
                            known[name, i].stay(shards(name, own.state[parameter]["exp_avg_sq"].numpy())[i])
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


def zero_one(
    model: nn.Module,
    batches: Callable[[int, int], Mapping[str, torch.Tensor]],
    workers: int,
    steps: int,
    given: Mapping[str, Any],
    lr: Callable[[int], float],
    decay: float = 0.0,
    decoupled: float = 0.0,
    shards: Shards = one,
) -> list[list[State]]:
    """0/1 Adam: parameters of each worker after each step, ``[step][worker]``.

    Args:
        model: with the values at the start.
        batches: of a step and a worker, both counted from 0.
        workers: how many.
        steps: to make.
        given: ``freeze``, and ``doubling``, ``local``, ``longest``, which must be said.
        lr: of a step.
        decay: Adam's weight decay.
        decoupled: AdamW's.
        shards: of a parameter.
    """
    models = [copy.deepcopy(model) for _ in range(workers)]
    named = [dict(m.named_parameters()) for m in models]
    freeze, first, second, eps = given["freeze"], 0.9, 0.999, 1e-8
    updates, at = set(), 1
    for k in range(1, steps + 1):  # the paper's: the distance to the next is 2^floor(k / doubling)
        updates.add(at)
        at += 2 ** (k // given["doubling"])
    shapes = {n: p.shape for n, p in named[0].items()}
    m = [{n: np.zeros(s) for n, s in shapes.items()} for _ in range(workers)]
    u = [{n: np.zeros(s) for n, s in shapes.items()} for _ in range(workers)]
    v = {n: np.zeros(s) for n, s in shapes.items()}
    signs: dict[tuple[str, int], OneBit] = {}

    def exchanged(n: str, of_all: list[Array]) -> Array:
        result = np.zeros_like(of_all[0])
        for i, part in enumerate(zip(*(shards(n, own) for own in of_all), strict=True)):
            if part[0].size:
                own = signs.setdefault((n, i), OneBit(n, part[0].shape, workers))
                shards(n, result)[i][...] = own(list(part))
        return result

    x = {n: p.detach().numpy().copy() for n, p in named[0].items()}
    count, rates, history = 0, 0.0, []
    for t in range(1, steps + 1):
        g: list[dict[str, Array]] = []
        for w, own in enumerate(models):
            own.zero_grad()
            own(**batches(t - 1, w))["loss"].backward()
            g.append({n: p.grad.numpy() + decay * p.detach().numpy() for n, p in named[w].items()})  # type: ignore[union-attr]
        if t == freeze + 1:
            signs.clear()
        rate = lr(t - 1) / (1 - first**t)
        count += t <= freeze and t in updates
        for n in shapes:
            if t <= freeze:
                of_all = [own[n] for own in g]
                mean = sum(of_all) / workers if t in updates else exchanged(n, of_all)
                v[n] = second * v[n] + (1 - second) * mean**2 if t in updates else v[n]
                for w in range(workers):
                    m[w][n] = first * m[w][n] + (1 - first) * mean
                x[n] = x[n] * (1 - lr(t - 1) * decoupled) - rate * m[0][n] / denominator(v[n], second, count, eps)
                continue
            x[n] = x[n] * (1 - lr(t - 1) * decoupled)
            for w in range(workers):
                m[w][n] = first * m[w][n] + (1 - first) * g[w][n]
                u[w][n] = u[w][n] + rate * m[w][n]
        rates += rate if t > freeze else 0.0
        if t > freeze and t - freeze in exchanges_of(given, steps):
            for n in shapes:
                arrived = exchanged(n, [own[n] for own in u])
                x[n] = x[n] - arrived / denominator(v[n], second, count, eps)
                for w in range(workers):
                    m[w][n], u[w][n] = arrived / rates, np.zeros_like(arrived)
            rates = 0.0
        for w in range(workers):
            for n, p in named[w].items():
                moved = u[w][n] / denominator(v[n], second, count, eps)
                p.data.copy_(torch.from_numpy(x[n] - moved))
        history.append([{n: p.detach().clone() for n, p in own.items()} for own in named])
    return history


def denominator(v: Array, beta: float, count: int, eps: float) -> Array:
    return np.sqrt(v / (1 - beta**count)) + eps


def exchanges_of(given: Mapping[str, Any], steps: int) -> set[int]:
    """Steps after the freeze, from 1 on, that end with an exchange: windows of ``local`` steps end with one."""
    found: set[int] = set()
    for window in range(steps):
        gap = min(given["longest"], 2**window)
        found |= {window * given["local"] + i for i in {*range(gap, given["local"] + 1, gap), given["local"]}}
    return found
