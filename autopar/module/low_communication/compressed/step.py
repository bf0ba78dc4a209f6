"""What one worker does around each step of its optimizer; an `Exchange`, which many workers run together."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from autopar.errors import AutoparError
from autopar.module.low_communication.compressed.collectives import Exchange, averaged
from autopar.module.low_communication.compressed.frozen_adam import (
    decay_of,
    groups_of,
    momenta,
    require_plain_adam,
    update,
    without_variance,
)
from autopar.module.low_communication.compressed.largest import Largest
from autopar.module.low_communication.compressed.low_rank import LowRank
from autopar.module.low_communication.compressed.settings import ONEBIT, POWERSGD, TOPK, ZEROONE, Compression
from autopar.module.low_communication.compressed.signs import Signs
from autopar.module.low_communication.compressed.zero_one import ALONE, VARIANCE, ZeroOne
from autopar.runtime.dtensor import to_local

ERROR, SERVED = "error", "served"


class WorkerStep:
    """Of one worker, or of one rank's shards of it.

    Attributes:
        settings: how gradients are compressed.
        steps: how many have been made.
        trained: names of the parameters.
        dtype: of all that is exchanged: float32, or float64 where a parameter is.
        frozen: of ``onebit``: the step of each parameter, by name, whose variance stays.
        squares: of the last exchange: the sums of the squares of what was to be sent, and of what was left.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], settings: Compression, index: int, workers: int) -> None:
        """Begin without errors.

        Args:
            tensors: of parameters, or this rank's shards of them, by name.
            settings: the same on all workers.
            index: of this worker.
            workers: how many there are.
        """
        self.settings, self.steps, self.frozen = settings, 0, dict[str, int]()
        self.trained = frozenset(tensors)
        wide = any(t.dtype == torch.float64 for t in tensors.values())
        self.dtype = torch.float64 if wide else torch.float32
        self.squares = torch.zeros(()), torch.zeros(())
        like = {n: t.detach().to(self.dtype) for n, t in tensors.items() if t.numel()}
        self.method: LowRank | Largest | Signs | ZeroOne
        if settings.method == POWERSGD:
            assert settings.rank is not None
            self.method = LowRank(like, settings.rank, settings.seed)
        elif settings.method == TOPK:
            assert settings.share is not None
            self.method = Largest(like, settings.share)
        elif settings.method == ZEROONE:
            self.method = ZeroOne(like, settings, index, workers)
            self.method.through = self._compressed
        else:
            self.method = Signs(like, index, workers)
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def is_plain(self) -> bool:
        """Whether the next step averages gradients as they are."""
        return self.steps < self.settings.plain_steps

    @property
    def exchanges(self) -> str | None:
        """The method by which the next step exchanges, ``""`` for whole numbers; None: it does not."""
        if isinstance(self.method, ZeroOne):
            kind = self.method.schedule.kind(self.steps + 1)
            return {VARIANCE: "", ALONE: None}.get(kind, ONEBIT)
        return "" if self.is_plain else self.settings.method

    @property
    def error(self) -> float:
        """Of the last exchange: the norm of what was left for the next one, as a share of what was to be sent."""
        meant, left = map(float, self.squares)
        return math.sqrt(left / meant) if meant else 0.0

    def before(
        self,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> Exchange[None]:
        """Before the optimizer's step: exchange, and put what comes of it in place of the gradients.

        With ``onebit``, once variances are frozen, and with ``zeroone`` always, parameters make their step here, and
        the optimizer sees no gradient.

        Args:
            parameters: of the optimizer, by name.
            gradients: this rank's shards, by name, without empty ones; they are overwritten.
            optimizer: of the parameters.
        """
        wanted = {n: g.to(self.dtype) for n, g in gradients.items()}
        if isinstance(self.method, ZeroOne):
            require_plain_adam(optimizer, ZEROONE)
            yield from self.method.step(self.steps + 1, parameters, wanted, optimizer)
            self._hide(parameters)
            return
        if self.settings.method == ONEBIT and not self.is_plain:
            yield from self._frozen_step(parameters, wanted, optimizer)
            self._hide(parameters)
            return
        found = yield from (averaged(wanted) if self.is_plain else self._compressed(wanted))
        for name, mean in found.items():
            gradients[name].copy_(mean)

    def after(self) -> None:
        """After the optimizer's step."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        self.steps += 1

    def _hide(self, parameters: Mapping[str, torch.Tensor]) -> None:
        # Adam makes no step where there is no gradient.
        for parameter in parameters.values():
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def agreed(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """What all workers have in common: these shards of parameters, or what they were at the last exchange."""
        return self.method.anchors if isinstance(self.method, ZeroOne) and self.method.anchors else tensors

    def _compressed(self, tensors: dict[str, torch.Tensor]) -> Exchange[dict[str, torch.Tensor]]:
        errors = self.method.errors
        meant = _square([t + errors[n] if n in errors else t for n, t in tensors.items()])
        found = yield from self.method.exchange(tensors)
        self.squares = (meant, _square([errors[n] for n in tensors if n in errors]))
        return found

    def _frozen_step(
        self,
        parameters: Mapping[str, torch.Tensor],
        gradients: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> Exchange[None]:
        require_plain_adam(optimizer)
        own, groups = momenta(parameters, gradients, optimizer), groups_of(optimizer)
        assert isinstance(self.method, Signs)
        for name in own.keys() - self.method.still.keys():
            self.method.still[name] = without_variance(optimizer.state[parameters[name]])
        found = yield from self._compressed(own)
        for name, parameter in parameters.items():
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            frozen = self.frozen.setdefault(name, int(state["step"]))
            group = groups[id(parameter)]
            update(parameter, found.get(name), state, group, frozen, decay_of(optimizer, group)[1])


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Of the norm of all together."""
    sums = [t.square().sum(dtype=torch.float64) for t in tensors]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def require_compressible(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters whose gradients cannot be compressed.

    Raises:
        AutoparError: one is no real floating tensor, or has too narrow a range for scales and errors.
    """
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise AutoparError(
                f"parameter {name!r} is {parameter.dtype}: only real floating gradients are compressed; freeze it"
            )
        if to_local(parameter).dtype == torch.float16:
            raise AutoparError(
                f"parameter {name!r} is float16, and scaled gradients would leave scaled errors behind: compress "
                "gradients in bfloat16 or float32 (precision= with float32 parameters)"
            )


def first_infinite(gradients: Mapping[str, torch.Tensor]) -> str:
    """The name of a gradient that is not finite; empty if all are."""
    if not gradients:
        return ""
    # Once for all: each question to a device waits for it.
    fine = torch.stack([g.sum(dtype=torch.float64) for g in gradients.values()]).isfinite().tolist()
    return next((name for name, is_fine in zip(gradients, fine, strict=True) if not is_fine), "")


def require_finite(notes: list[str], what: str) -> None:
    """Refuse a step whose gradients would stay in the errors for ever.

    Raises:
        AutoparError: names the rank and the parameter.
    """
    for rank, name in enumerate(notes):
        if name:
            raise AutoparError(
                f"the gradient of {name!r} on rank {rank} is not finite in {what}: compressed, it would stay in the "
                "errors that are fed back; find what made it so, clip before the step, or load a checkpoint"
            )
