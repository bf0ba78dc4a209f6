"""0/1 Adam: Adam whose variances are updated ever more seldom, with signs in between, and then exchanges seldom, too.

Steps are counted from 1, and T is ``freeze``. For a parameter x, with the gradient g of one worker, at step t::

    until T, in a step of the variance:   g = mean over the workers of g;   v = beta2 * v + (1 - beta2) * g^2
    until T, in the others:               g = what comes of exchanging g in signs
    until T:                              m = beta1 * m + (1 - beta1) * g;  x = x - r_t * m / d
    after T:                              m = beta1 * m + (1 - beta1) * g;  u = u + r_t * m;  x = a - u / d
    after T, in a step with an exchange:  U = what comes of exchanging u in signs;  m = U / (sum of r since the last)
                                          x = a = a - U / d;  u = 0

r is ``lr / (1 - beta1^t)`` and d ``sqrt(v / (1 - beta2^k)) + eps``, as in Adam, k being the updates that v has had; a
is x as all workers last had it. Signs are those of `autopar.module.low_communication.compressed.signs`, with errors of
their own until T and after it. Weight decay is Adam's, or AdamW's, of x and a.

Y. Lu, C. Li, M. Zhang, C. De Sa, Y. He, "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam",
2022, algorithm 1, of which DeepSpeed's optimizer exchanges gradients until T, as here, and not u.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.module.low_communication.compressed.collectives import Exchange, averaged
from autopar.module.low_communication.compressed.frozen_adam import (
    decay_of,
    denominator,
    groups_of,
    without_variance,
)
from autopar.module.low_communication.compressed.settings import DOUBLING, LONGEST, Compression
from autopar.module.low_communication.compressed.signs import Signs
from autopar.runtime.dtensor import to_local

VARIANCE, GRADIENT, ALONE, MOVED = "variance", "gradient", "alone", "moved"


@dataclass(frozen=True)
class Schedule:
    """What a step exchanges.

    Attributes:
        freeze: the last step that may update variances.
        doubling: updates after which the distance between two doubles.
        local: steps after ``freeze`` after which the distance between exchanges doubles; None: it is one.
        longest: of these distances.
    """

    freeze: int
    doubling: int
    local: int | None
    longest: int

    @classmethod
    def of(cls, settings: Compression) -> Schedule:
        """Of what the user says."""
        assert settings.freeze is not None
        return cls(settings.freeze, settings.doubling or DOUBLING, settings.local, settings.longest or LONGEST)

    def kind(self, step: int) -> str:
        """Of a step, counted from 1.

        >>> "".join(Schedule(8, 2, 3, 2).kind(step)[0] for step in range(1, 17))
        'vvgvgvggmmmammam'
        """
        if step > self.freeze:
            return MOVED if self._exchanges(step - self.freeze) else ALONE
        last, gap = 0, 1
        while step > last + self.doubling * gap:
            last += self.doubling * gap
            gap *= 2
        return GRADIENT if (step - last) % gap else VARIANCE

    def _exchanges(self, after: int) -> bool:
        if self.local is None:
            return True
        turn, place = divmod(after - 1, self.local)
        gap = min(self.longest, 2 ** min(turn, 40))
        return (place + 1) % gap == 0 or place + 1 == self.local


class ZeroOne(Signs):
    """Of one worker, or of one rank's shards of it.

    Attributes:
        schedule: what each step exchanges.
        anchors: a, by name; empty until the first step after ``freeze``.
        moved: u, by name.
        rates: the sums of r since the last exchange, by name.
        updates: k, by name.
        through: how tensors are exchanged in signs.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], settings: Compression, index: int, workers: int) -> None:
        """Begin without errors; arguments as of `Signs`."""
        super().__init__(tensors, index, workers)
        self.schedule = Schedule.of(settings)
        self.anchors: dict[str, torch.Tensor] = {}
        self.moved: dict[str, torch.Tensor] = {}
        self.rates: dict[str, float] = {}
        self.updates: dict[str, int] = {}
        self.through: Callable[[dict[str, torch.Tensor]], Exchange[dict[str, torch.Tensor]]] = self.exchange

    def step(
        self,
        number: int,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> Exchange[None]:
        """A step of the parameters that have gradients; the optimizer's state is Adam's.

        Args:
            number: of the step, from 1 on.
            parameters: by name.
            gradients: this rank's shards, in the dtype of the work.
            optimizer: of the parameters.
        """
        kind, groups = self.schedule.kind(number), groups_of(optimizer)
        found = {n: _with_decay(parameters[n], g, optimizer, groups) for n, g in gradients.items()}
        self._count(number, {n: p for n, p in parameters.items() if p.grad is not None}, optimizer, groups)
        self._set_still(parameters, optimizer, found)
        if kind == VARIANCE:
            found = yield from averaged(found)
        elif kind == GRADIENT:
            found = yield from self.through(found)
        for name, gradient in found.items():
            self._momentum(name, optimizer.state[parameters[name]], gradient, groups[id(parameters[name])], kind)
        if number > self.schedule.freeze:
            yield from self._after_freeze(kind == MOVED, parameters, found, optimizer)
            return
        for name, gradient in found.items():
            parameter = parameters[name]
            state, group = optimizer.state[parameter], groups[id(parameter)]
            own, rate = to_local(parameter), _rate(state, group)
            moved = to_local(state["exp_avg"]).to(gradient) / self._denominator(name, state, gradient, group)
            own.copy_(_decayed(own.to(gradient), optimizer, group) - rate * moved)

    def _count(
        self,
        number: int,
        parameters: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        groups: Mapping[int, Any],
    ) -> None:
        """What is counted is the same on all ranks of a worker, whichever shards they have."""
        for name, parameter in parameters.items():
            _begin(optimizer, parameter)
            if number > self.schedule.freeze:
                self._require_variance(name)
                rate = _rate(optimizer.state[parameter], groups[id(parameter)])
                self.rates[name] = self.rates.get(name, 0.0) + rate
            elif self.schedule.kind(number) == VARIANCE:
                self.updates[name] = self.updates.get(name, 0) + 1

    def exchange_moved(
        self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> Exchange[None]:
        """Exchange u, so that all workers have the same parameters."""
        groups = groups_of(optimizer)
        found = yield from self.through(dict(self.moved))
        for name, arrived in found.items():
            parameter = parameters[name]
            state, group = optimizer.state[parameter], groups[id(parameter)]
            self.anchors[name] -= arrived / self._denominator(name, state, arrived, group)
            # Without a step since the last exchange, or with learning rates of 0, momenta have nothing to say.
            if self.rates[name]:
                to_local(state["exp_avg"]).copy_(arrived / self.rates[name])
            to_local(parameter).copy_(self.anchors[name])
            self.moved[name] = torch.zeros_like(arrived)
        self.rates = dict.fromkeys(self.rates, 0.0)

    def _after_freeze(
        self,
        exchanges: bool,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> Exchange[None]:
        groups = groups_of(optimizer)
        for name, gradient in gradients.items():
            parameter = parameters[name]
            state, group = optimizer.state[parameter], groups[id(parameter)]
            if name not in self.anchors:
                self._freeze(name, to_local(parameter).to(gradient, copy=True))
            rate, momentum = _rate(state, group), to_local(state["exp_avg"]).to(gradient)
            self.moved[name] = self.moved[name] + rate * torch.where(self.still[name], 0.0, momentum)
            self.anchors[name] = _decayed(self.anchors[name], optimizer, group)
            moved = self.moved[name] / self._denominator(name, state, gradient, group)
            to_local(parameter).copy_(self.anchors[name] - moved)
        if exchanges:
            yield from self.exchange_moved(parameters, optimizer)

    def _freeze(self, name: str, value: torch.Tensor) -> None:
        """Variances stay from here on; errors so far are of gradients, and begin anew."""
        self.anchors[name], self.moved[name] = value, torch.zeros_like(value)
        self.errors[name].zero_()
        self.served[name].zero_()

    def _set_still(
        self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, names: Mapping[str, Any]
    ) -> None:
        for name in names:
            if name not in self.anchors or name not in self.still:
                self.still[name] = without_variance(optimizer.state[parameters[name]])

    def _momentum(
        self, name: str, state: dict[str, Any], gradient: torch.Tensor, group: Mapping[str, Any], kind: str
    ) -> None:
        beta1, beta2 = map(float, group["betas"])
        average = to_local(state["exp_avg"])
        average.copy_(torch.lerp(average.to(gradient), gradient, 1 - beta1))
        if kind == VARIANCE:
            square = to_local(state["exp_avg_sq"])
            square.copy_(square.to(gradient) * beta2 + (1 - beta2) * gradient.square())
        else:
            average.masked_fill_(self.still[name], 0.0)

    def _denominator(
        self, name: str, state: Mapping[str, Any], like: torch.Tensor, group: Mapping[str, Any]
    ) -> torch.Tensor:
        return denominator(state, like, float(group["betas"][1]), self.updates.get(name, 0), group)

    def _require_variance(self, name: str) -> None:
        if not self.updates.get(name):
            raise AutoparError(
                f"parameter {name!r} had no gradient while variances were updated, and has none that could be frozen: "
                "raise freeze=, or freeze the parameter"
            )


def _begin(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Adam's state of a parameter, and one step more."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.get_default_dtype())
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
    state["step"] += 1


def _rate(state: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    beta, step = float(group["betas"][0]), float(state["step"])
    return float(group["lr"]) / float(1 - beta**step)


def _with_decay(
    parameter: torch.Tensor, gradient: torch.Tensor, optimizer: torch.optim.Optimizer, groups: Mapping[int, Any]
) -> torch.Tensor:
    decay = decay_of(optimizer, groups[id(parameter)])[0]
    return gradient + decay * to_local(parameter).detach().to(gradient) if decay else gradient


def _decayed(value: torch.Tensor, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.Tensor:
    decay = decay_of(optimizer, group)[1]
    return value * (1 - float(group["lr"]) * decay) if decay else value
