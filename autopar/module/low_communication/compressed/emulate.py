"""Workers in one process, in lock step: what `autopar.CompressedGradients` computes on many, without any group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.module.low_communication.compressed.collectives import in_lock_step
from autopar.module.low_communication.compressed.frozen_adam import require_plain_adam
from autopar.module.low_communication.compressed.low_rank import require_low_rank
from autopar.module.low_communication.compressed.settings import ONEBIT, ZEROONE, Compression
from autopar.module.low_communication.compressed.step import (
    WorkerStep,
    first_infinite,
    require_compressible,
    require_finite,
)
from autopar.module.low_communication.emulate import trained_alike


class EmulatedCompression:
    """Models of one process as workers that exchange compressed gradients.

    Attributes:
        settings: how gradients are compressed.
        workers: the state of each.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], **settings: Any
    ) -> None:
        """Begin at the parameters that the models have, which must be the same.

        Args:
            models: one for each worker.
            optimizers: one for each, of the same kind.
            settings: as of `Compression`.

        Raises:
            ValueError: a setting is wrong, there is one worker, or the models differ.
        """
        self.settings = Compression(**settings)
        require_several(len(models))
        self._parameters = trained_alike(models, optimizers)
        require_compressible(self._parameters[0])
        if self.settings.rank is not None:
            require_low_rank(self._parameters[0], self.settings.rank)
        for optimizer in optimizers:
            if self.settings.method in (ONEBIT, ZEROONE):
                require_plain_adam(optimizer, self.settings.method)
        self._optimizers = optimizers
        count = len(models)
        self.workers = [WorkerStep(own, self.settings, i, count) for i, own in enumerate(self._parameters)]

    def step(self) -> None:
        """Exchange what the backward passes have left, and let each optimizer make its step."""
        gradients = [{n: p.grad for n, p in own.items() if p.grad is not None} for own in self._parameters]
        for i, own in enumerate(gradients):
            if own.keys() != gradients[0].keys():
                raise ValueError(f"worker {i} has gradients of other parameters than worker 0: give all a batch")
        require_finite([first_infinite(own) for own in gradients], f"step {self.workers[0].steps + 1}")
        given = zip(self.workers, self._parameters, gradients, self._optimizers, strict=True)
        with torch.no_grad():
            in_lock_step([worker.before(own, grads, optimizer) for worker, own, grads, optimizer in given])
        for worker, optimizer in zip(self.workers, self._optimizers, strict=True):
            optimizer.step()
            worker.after()


def require_several(workers: int) -> None:
    """Refuse to exchange with nobody.

    Raises:
        ValueError: there is one worker.
    """
    if workers < 2:
        raise ValueError(
            "there is one worker, which has nobody to exchange gradients with: give the axis of role 'compressed' at "
            "least two devices, or leave the role out"
        )
