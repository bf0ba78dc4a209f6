"""What workers that exchange around an optimizer's steps have in common: one optimizer, hooks, and agreement."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from autopar.costs.arguments import a, require
from autopar.errors import AutoparError, RankError
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.dtensor import to_local
from autopar.runtime.mesh import Workers

_attached: WeakSet[torch.optim.Optimizer] = WeakSet()


class WorkerExchange(ABC):
    """Exchanges among the workers of a mesh axis, around the steps of an optimizer.

    Attributes:
        role: of the axis.
        what: is exchanged, in words for messages.
        bytes_sent: by this rank since this was made, as a ring sends them.
    """

    role: ClassVar[str]
    what: ClassVar[str]

    def __init__(self, model: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
        """Check that the two can be followed.

        Raises:
            ValueError: an argument is wrong, the mesh has no workers of the role, or the optimizer is taken.
        """
        require(
            model=(model, a(ParallelModule, "what parallelize() returned")),
            optimizer=(optimizer, a(torch.optim.Optimizer, "a torch.optim.Optimizer of the model's parameters")),
        )
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
        if optimizer in _attached:
            raise ValueError(f"the optimizer has {type(self).__name__} already, or its like; detach() those first")
        self.model, self.optimizer = model, optimizer
        self.bytes_sent = 0
        self._workers: Workers = workers
        self._hooks: list[Any] = []

    def _attach(self, before: Callable[[bool], None], after: Callable[[], None]) -> None:
        """Have functions called around the optimizer's steps.

        Args:
            before: a step; it is told whether this has a closure.
            after: it.
        """

        def is_aside() -> bool:  # a step that only allocates state
            return self.model._autopar.deferred.is_aside

        def first(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if not is_aside():
                self._take_scale()
                before(any(callable(x) for x in (*args, *kwargs.values()) if x is not optimizer))

        def last(*_: Any) -> None:
            if not is_aside():
                after()

        self._hooks = [
            self.optimizer.register_step_pre_hook(first),
            self.optimizer.register_step_post_hook(last),
        ]
        _attached.add(self.optimizer)

    def detach(self) -> None:
        """The optimizer's steps are no longer followed by exchanges; what is in flight is dropped."""
        for hook in self._hooks:
            hook.remove()
        _attached.discard(self.optimizer)

    def _take_scale(self) -> None:
        """Divide gradients by their scale, which `torch.amp.GradScaler` leaves to the step of a fused optimizer."""
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is None:
            return
        for parameter in self._parameters().values():
            if parameter.grad is not None:
                to_local(parameter.grad).div_(scale)
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]

    def _leaves_out(self, notes: Sequence[str]) -> bool:
        """Whether a fused optimizer's step changes nothing, on all workers: a scaled gradient is not finite on one.

        Of other optimizers GradScaler does not call the step.
        """
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

    def _parameters(self) -> dict[str, torch.Tensor]:
        """What is trained, by name, in the model's order.

        Raises:
            ValueError: the optimizer lacks some, or has others.
        """
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        missing = [name for name, p in trained.items() if id(p) not in held]
        if missing:
            raise ValueError(
                f"the optimizer does not have {missing[0]!r}, which is trained: workers would keep different ones; "
                f"give {type(self).__name__} an optimizer of all trained parameters"
            )
        if held - {id(p) for p in self.model.parameters()}:
            raise ValueError(
                "the optimizer has a parameter that is none of the model's, and would differ among workers: give "
                f"{type(self).__name__} an optimizer of the model's parameters alone"
            )
        return dict(trained)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """This rank's shards of what is trained, by name; raises as `_parameters`."""
        return {name: to_local(p).detach() for name, p in self._parameters().items()}

    def _require_layouts(self) -> None:
        """Refuse to begin before parameters are where they will be.

        Raises:
            AutoparError: the model has not been called.
        """
        if self.model._autopar.first is None:
            raise AutoparError("layouts are not decided yet: call the model once, or pass batch= to parallelize()")
        self.model._autopar.require_values()

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
                        f"{name} of {self.what} differ: rank {rank} has {has}, rank {other} has {known}; make them "
                        "with the same arguments, and start workers from the same weights or checkpoint"
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
            RankError: others have gradients of other parameters.
        """
        parameters = self._parameters()
        have = hashlib.sha256(repr([p.grad is not None for p in parameters.values()]).encode()).hexdigest()[:6]
        own = {n: to_local(p.grad) for n, p in parameters.items() if p.grad is not None}
        own = {n: g for n, g in own.items() if g.numel()}
        # Not a detail of the meeting: ranks of different stages have gradients of different parameters.
        have_same = (f"which parameters have gradients in {what}", have)
        return own, self._require_same_at_a_place((have_same, *same), what, note(own))

    def require_settings(self, saved: Mapping[str, Any]) -> None:
        """Refuse what was saved under others, before any of it is read.

        Raises:
            AutoparError: names both.
        """
        own, other = str(self._settings()), saved.get("settings", "none")
        if own != other:
            raise AutoparError(f"these {self.what} have {own}, and what is loaded has {other}; make them with the same")

    @abstractmethod
    def _settings(self) -> Any: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What to save; every rank calls it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as `state_dict` has it; every rank calls it, and layouts must be decided."""
