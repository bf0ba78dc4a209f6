"""What follows the steps of one optimizer of a parallel model: hooks around them, and the parameters that it trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from autopar.costs.arguments import a, require
from autopar.errors import AutoparError
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.dtensor import to_local
from autopar.runtime.state.whole_steps import on_the_mesh

TAKES_SCALE = "_step_supports_amp_scaling"
"""An attribute of optimizers whose step `torch.amp.GradScaler` calls in any case, as of torch's fused ones."""

_attached: WeakSet[torch.optim.Optimizer] = WeakSet()
_followed: WeakSet[ParallelModule] = WeakSet()
"""Optimizers, and models, of which one of these follows the steps."""


class OptimizerSteps(ABC):
    """What is done around the steps of an optimizer.

    Attributes:
        what: is done, in words for messages.
        saved: what its state has, beside settings and tensors.
        bytes_sent: by this rank since this was made, as a ring sends them.
    """

    what: ClassVar[str]
    saved: ClassVar[tuple[str, ...]]

    def __init__(self, model: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
        """Check that the two can be followed.

        Raises:
            ValueError: an argument is wrong.
        """
        require(
            model=(model, a(ParallelModule, "what parallelize() returned")),
            optimizer=(optimizer, a(torch.optim.Optimizer, "a torch.optim.Optimizer of the model's parameters")),
        )
        self.model, self.optimizer = model, optimizer
        self.bytes_sent = 0
        self._hooks: list[Any] = []
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._takes_scale = bool(getattr(optimizer, TAKES_SCALE, False))

    def _require_free(self) -> None:
        """Refuse an optimizer whose steps are followed already.

        Raises:
            ValueError: they are.
        """
        if self.optimizer in _attached:
            raise ValueError(f"the optimizer has {type(self).__name__} already, or its like; detach() those first")

    def _attach(self, before: Callable[[bool], None], after: Callable[[], None]) -> None:
        """Have functions called around the optimizer's steps.

        Args:
            before: a step; it is told whether this has a closure.
            after: it.

        Raises:
            ValueError: those of another optimizer of the model are followed.
        """
        if self.model in _followed:
            raise ValueError(
                f"the model has {type(self).__name__} already, or its like, of another optimizer, and two would each "
                "exchange what the other has: detach() those first, and give one optimizer all that is trained"
            )

        def is_aside() -> bool:  # a step that only allocates state
            return self.model._autopar.deferred.is_aside

        def first(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            if is_aside():
                return
            with self._telling(), on_the_mesh(self.optimizer):
                self._take_scale()
                before(any(callable(x) for x in (*args, *kwargs.values()) if x is not optimizer))
                self._leave_out()

        def last(*_: Any) -> None:
            if is_aside():
                return
            for parameter, gradient in self._aside:
                parameter.grad = gradient
            self._aside = []
            with self._telling(), on_the_mesh(self.optimizer):
                after()

        self._hooks = [
            self.optimizer.register_step_pre_hook(first),
            self.optimizer.register_step_post_hook(last),
        ]
        _attached.add(self.optimizer)
        _followed.add(self.model)
        # GradScaler would not call the step of a worker whose gradients are infinite, for which others wait.
        setattr(self.optimizer, TAKES_SCALE, True)

    def _telling(self) -> AbstractContextManager[None]:
        """Within, others that wait for this rank hear of an error of its own."""
        return nullcontext()

    def detach(self) -> None:
        """The optimizer's steps are no longer followed by exchanges; what is in flight is dropped."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks and not self._takes_scale:
            delattr(self.optimizer, TAKES_SCALE)
        self._hooks = []
        _attached.discard(self.optimizer)
        _followed.discard(self.model)

    def _take_scale(self) -> None:
        """Divide gradients by their scale, which `torch.amp.GradScaler` leaves to the step."""
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is None:
            return
        for parameter in self._parameters().values():
            if parameter.grad is not None:
                to_local(parameter.grad).div_(scale)
        self.optimizer.grad_scale = None  # type: ignore[attr-defined]

    def _leave_out(self) -> None:
        """Have the step find no gradient where a scaled one is infinite; a fused optimizer looks for that itself."""
        found = getattr(self.optimizer, "found_inf", None)
        if found is None or self._takes_scale:
            return
        self.optimizer.found_inf = None  # type: ignore[attr-defined]
        if not found:
            return
        for parameter in self._parameters().values():
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def _parameters(self) -> dict[str, torch.Tensor]:
        """What is trained, by name, in the model's order.

        Raises:
            ValueError: the optimizer lacks some, or has others, or nothing is trained.
        """
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("all parameters of the model are frozen: there is nothing to exchange; unfreeze some")
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

    def _require_known(self, known: Iterable[str], now: Iterable[str]) -> None:
        """Refuse parameters that were not trained when this began, or that are no longer.

        Args:
            known: names of those that were.
            now: names of those that are.

        Raises:
            AutoparError: names one.
        """
        before, after = set(known), set(now)
        for name in sorted(before ^ after):
            change = "is no longer trained" if name in before else "was not trained when these began"
            raise AutoparError(
                f"{self.what}: {name!r} {change}: freeze and unfreeze before the first step; or call synchronize() and "
                f"detach() before that, and make new {type(self).__name__} after it"
            )

    def _require_layouts(self) -> None:
        """Refuse to begin before parameters are where they will be.

        Raises:
            AutoparError: the model has not been called.
        """
        if self.model._autopar.first is None:
            raise AutoparError("layouts are not decided yet: call the model once, or pass batch= to parallelize()")
        self.model._autopar.require_values()

    def require_settings(self, saved: Mapping[str, Any]) -> None:
        """Refuse what was saved under others, before any of it is read.

        Raises:
            AutoparError: names both.
        """
        require(state=(saved, a(Mapping, "what state_dict() gave")))
        own, other = str(self._settings()), saved.get("settings", "none")
        if own != other:
            raise AutoparError(f"these {self.what} have {own}, and what is loaded has {other}; make them with the same")
        lacking = [key for key in self.saved if key not in saved]
        if lacking:
            raise AutoparError(
                f"what is loaded has no {lacking[0]!r}, and is no state of {self.what}; load what "
                f"{type(self).__name__} gave or saved, or make new ones after loading the parameters"
            )

    @abstractmethod
    def _settings(self) -> Any: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What to save; every rank calls it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as `state_dict` has it; every rank calls it, and layouts must be decided."""
