"""Gradients that are still adding up when a step of a run ends: those of a loop that accumulates over several steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.module.parallel_module import ParallelModule
from autopar.runtime.dtensor import to_local
from autopar.runtime.state.state_dict import savable

GRADIENT = "gradient."
"""Before the names of gradients in a saved state, those of their parameters."""

_USED = "autopar_used"
"""An attribute of a gradient: its version when an optimizer's step had used it."""


class Accumulated:
    """Gradients that no step of the optimizer has used since they were computed, or added to."""

    def __init__(self, model: ParallelModule, optimizer: torch.optim.Optimizer | None) -> None:
        """Note from now on which gradients the optimizer's steps use."""
        self._model = model
        if optimizer is not None:
            optimizer.register_step_post_hook(_use)

    def collect(self, what: str) -> dict[str, torch.Tensor]:
        """Those that there are, to be saved; every rank calls it. What `no_sync` has deferred is reduced before.

        Raises:
            RankError: ranks have those of different parameters.
        """
        session = self._model._autopar
        if session.deferred.any:
            self._model.reduce_gradients()
        found = {n: p.grad for n, p in self._model.named_parameters() if p.grad is not None and not _is_used(p.grad)}
        described = f"{len(found)} parameters, {sorted(found)}"[:1000] if found else "none"
        session.context.meet(what, (("which gradients no optimizer's step has used", described),))
        with session.context.during(what):
            return {
                n: savable(g, session.types().get(n), session.context) if isinstance(g, DTensor) else g
                for n, g in found.items()
            }


def empty_gradients(model: ParallelModule, kinds: dict[str, list[Any]]) -> dict[str, torch.Tensor]:
    """What saved gradients are read into, by parameter; every rank calls it.

    Args:
        model: whose parameters they are of.
        kinds: dtype and sizes of all that was saved, by name.
    """
    session = model._autopar
    saved = {n.removeprefix(GRADIENT): getattr(torch, kind[0]) for n, kind in kinds.items() if n.startswith(GRADIENT)}
    with torch.no_grad():
        like = {
            n: savable(p, session.types().get(n), session.context) if isinstance(p, DTensor) else p
            for n, p in model.named_parameters()
            if n in saved
        }
        return {n: torch.empty_like(p, dtype=saved[n]) for n, p in like.items()}


def take_gradients(model: ParallelModule, values: dict[str, torch.Tensor]) -> None:
    """Put saved gradients where backward passes add to them, in the layouts of parameters; every rank calls it."""
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.grad = values[name]


def _use(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                setattr(parameter.grad, _USED, to_local(parameter.grad)._version)


def _is_used(gradient: torch.Tensor) -> bool:
    return getattr(gradient, _USED, None) == to_local(gradient)._version
