"""What workers that exchange around an optimizer's steps have in common: one optimizer, hooks, and agreement."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from autopar.errors import AutoparError, RankError
from autopar.module.low_communication.optimizer_steps import OptimizerSteps
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.dtensor import to_local
from autopar.runtime.mesh import Workers

PASSES = "backward passes before"
"""Of which workers whose gradients are exchanged in each step have made as many."""

_ALIKE = (
    "make them with the same arguments, start workers from the same weights or checkpoint, and have each compute the "
    "same gradients"
)
_LEFT_OUT = (
    "gradients of different batches would be added up: call optimizer.step() on every rank, or on none, and backward() "
    "as often on each, whatever one finds in its loss or its gradients"
)


class WorkerExchange(OptimizerSteps):
    """Exchanges among the workers of a mesh axis, around the steps of an optimizer.

    Attributes:
        role: of the axis.
    """

    role: ClassVar[str]

    def __init__(self, model: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
        """Check that the two can be followed.

        Raises:
            ValueError: an argument is wrong, the mesh has no workers of the role, or the optimizer is taken.
        """
        super().__init__(model, optimizer)
        workers, role = model._autopar.context.workers, self.role
        if workers is None:
            raise ValueError(
                "the mesh has no axis of workers: give one the role, "
                f'parallelize(..., search=Search(roles={{AXIS: "{role}"}}, inexact=("{role}",)))'
            )
        if workers.role != role:
            raise ValueError(
                f"axis {workers.axis!r} has the role {workers.role!r}, and {type(self).__name__} is for {role!r}: give "
                f'it this one, Search(roles={{"{workers.axis}": "{role}"}}, inexact=("{role}",))'
            )
        self._require_free()
        self._workers: Workers = workers
        self._passes_before = model._autopar.deferred.passes

    def _telling(self) -> AbstractContextManager[None]:
        return self._workers.everyone.telling(f"{self.what} of {self.model._autopar.name}")

    def _leaves_out(self, notes: Sequence[str]) -> bool:
        """Whether the optimizer's step changes nothing, on all workers: a scaled gradient is not finite on one."""
        found = getattr(self.optimizer, "found_inf", None)
        if found is None or not any(notes):
            return False
        self.optimizer.found_inf = torch.ones_like(found)  # type: ignore[attr-defined]
        return True

    def _require_gradients(self, has_closure: bool) -> None:
        """Refuse a step that computes its gradients itself.

        Raises:
            AutoparError: it has a closure.
        """
        if has_closure:
            raise AutoparError(
                f"{self.what}: optimizer.step(closure) computes gradients within the step, and they are exchanged "
                "before it: call backward() first, and step() without a closure"
            )

    def _require_same_at_a_place(self, own: Sequence[tuple[str, str]], what: str, note: str = "") -> list[str]:
        """Check that the ranks at one place in each worker have the same; every rank of all workers calls it.

        Args:
            own: names and values of what must be the same.
            what: is about to be done.
            note: what this rank says besides.

        Returns:
            The notes of all ranks.

        Raises:
            RankError: two do not.
        """
        first: dict[Any, tuple[int, Any]] = {}
        given = self.model._autopar.context.coordinates, tuple(own), note
        every_rank = self._workers.everyone.gather(given, f"{what} of {self.what}")
        for rank, (place, rest, _) in enumerate(every_rank):
            other, expected = first.setdefault(place, (rank, rest))
            for (name, has), (_, known) in zip(rest, expected, strict=True):
                if has != known:
                    raise RankError(
                        f"{name} of {self.what} differ: rank {rank} has {has}, rank {other} has {known}; "
                        + (_LEFT_OUT if name.startswith(PASSES) else _ALIKE)
                    )
        return [said for *_, said in every_rank]

    def _gradients(
        self,
        what: str,
        note: Callable[[Mapping[str, torch.Tensor]], str] = lambda _: "",
        same: tuple[tuple[str, str], ...] = (),
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """This rank's shards of gradients, which the ranks at its place have, too; without empty ones.

        Args:
            what: is about to be done.
            note: what is said of them to the others.
            same: what else must be.

        Returns:
            The shards by name, and the notes of all ranks.

        Raises:
            RankError: others train other parameters, or have gradients of others, or of another batch.
        """
        parameters = self._parameters()
        lacking = [n for n, p in parameters.items() if p.grad is None]
        have = _all_but(lacking) if len(lacking) < len(parameters) else "none: backward() has not been called"
        own = {n: to_local(p.grad) for n, p in parameters.items() if p.grad is not None}
        own = {n: g for n, g in own.items() if g.numel()}
        # Not a detail of the meeting: ranks of different stages have gradients of different parameters.
        have_same = (f"which parameters have gradients in {what}", have)
        # A worker that leaves a step out makes no call that others wait for: its next batch would meet their last one.
        passes = (f"{PASSES} {what}", str(self.model._autopar.deferred.passes - self._passes_before))
        frozen = [n for n, p in self.model.named_parameters() if not p.requires_grad]
        trained = (f"which parameters are trained in {what}", _all_but(frozen))
        return own, self._require_same_at_a_place((trained, have_same, passes, *same), what, note(own))


def _all_but(lacking: Sequence[str]) -> str:
    """Which parameters are trained, or have gradients, in few words, that are others for others."""
    if not lacking:
        return "all"
    digest = hashlib.sha256(repr(lacking).encode()).hexdigest()[:6]
    return f"all but {lacking[0]!r}" + (f" and {len(lacking) - 1} more ({digest})" if lacking[1:] else "")
