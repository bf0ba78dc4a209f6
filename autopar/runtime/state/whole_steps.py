"""Steps of optimizers that need whole parameters, such as LBFGS: made on whole tensors, on every rank.

Adafactor writes into means of rows and columns, Kron compiles what it does, LBFGS puts all parameters into one vector,
Rprop writes where masks say: torch's DTensors cannot run these on parameters that are split. So while such an optimizer
steps, its groups have whole plain parameters in place of those on the mesh, with whole gradients and state. Every rank
makes the same step and keeps its part of it. A closure, which calls the model, finds the parameters of the mesh.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import AutoparError
from autopar.runtime.dtensor import full_tensor, to_local
from autopar.runtime.state.storage import ParameterStorage, storage_of

logger = logging.getLogger(__name__)

NEED_WHOLE = {
    "Adafactor": "writes into means of rows and columns",
    "Kron": "multiplies their dims by matrices, in functions that it compiles",
    "LBFGS": "puts all parameters into one vector",
    "Rprop": "writes into them where masks say",
}
"""Optimizers, torch's and those that are called alike, that torch's DTensors cannot run, and what they do."""

COMPILED = frozenset({"Kron"})
"""Those that no DTensor can go through, one that every device has in whole neither."""

Step = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of ``optimizer.step``, the optimizer first."""

_swapped: weakref.WeakKeyDictionary[Optimizer, _WholeParameters] = weakref.WeakKeyDictionary()
_said: set[type] = set()


def install_whole_steps(lay_out_state: Callable[[Optimizer], None]) -> None:
    """Let such optimizers step on whole parameters, for this process; once.

    Args:
        lay_out_state: bring an optimizer's state into the layouts of its parameters.
    """

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        after(optimizer)  # of a step that has failed
        whole = _whole_parameters(optimizer)
        if whole is None:
            return None
        whole.lay_out_state = lay_out_state
        whole.enter()
        _swapped[optimizer] = whole

        def outside(closure: Any) -> Any:
            return _outside(closure, whole) if callable(closure) else closure

        return (args[0], *map(outside, args[1:])), {k: outside(v) for k, v in kwargs.items()}

    def after(optimizer: Optimizer, *_: Any) -> None:
        whole = _swapped.pop(optimizer, None)
        if whole is not None and whole.is_entered:
            whole.leave()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _whole_parameters(optimizer: Optimizer) -> _WholeParameters | None:
    """Whole parameters for an optimizer that needs them; None: it does not, or its parameters are whole."""
    name = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in NEED_WHOLE), None)
    if name is None:
        return None
    found = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    if not found or (
        name not in COMPILED and all(p.is_replicate() for parameter in found for p in parameter.placements)
    ):
        return None
    for parameter in found:
        _require_gathers(optimizer, parameter, name)
    if type(optimizer) not in _said:
        _said.add(type(optimizer))
        logger.warning(
            "optimizer %s %s: during a step each device has whole parameters, gradients and state, in no budget",
            type(optimizer).__name__,
            NEED_WHOLE[name],
        )
    return _WholeParameters(optimizer, [(p, _storage(p)) for p in found])


def _storage(parameter: torch.Tensor) -> ParameterStorage:
    storage = storage_of(parameter)
    assert storage is not None
    return storage


def _require_gathers(optimizer: Optimizer, parameter: DTensor, name: str) -> None:
    """Raise if a parameter cannot be made whole for a step.

    Raises:
        AutoparError: names optimizer, reason and remedy.
    """
    storage, values = storage_of(parameter), optimizer.state.get(parameter, {}).values()
    reason = ""
    if storage is None:
        reason = "is a DTensor of other code than autopar's"
    elif any(isinstance(v, DTensor) and to_local(v).device != to_local(parameter).device for v in values):
        reason = "has its state in host memory"
    if reason:
        raise AutoparError(
            f"optimizer {type(optimizer).__name__} {NEED_WHOLE[name]}, so that it needs them whole, and the one of "
            f"shape {list(parameter.shape)} {reason}. Keep parameters whole by Search(recipe='ddp'), or take an "
            "optimizer that computes element by element, such as AdamW"
        )


@contextmanager
def on_the_mesh(optimizer: Optimizer) -> Iterator[None]:
    """Within, a hook of the optimizer's step finds the parameters of the mesh, and what it changes of them counts."""
    whole = _swapped.get(optimizer)
    if whole is None or not whole.is_entered:
        yield
        return
    whole.leave()
    yield
    whole.enter()


def _outside(closure: Callable[..., Any], whole: _WholeParameters) -> Callable[..., Any]:
    """The closure, called while the optimizer has the parameters of the mesh."""

    def called(*args: Any, **kwargs: Any) -> Any:
        whole.leave()
        loss = closure(*args, **kwargs)
        whole.enter()
        return full_tensor(loss) if isinstance(loss, DTensor) else loss

    return called


class _WholeParameters:
    """Whole parameters that an optimizer has in place of those on the mesh, while it is entered."""

    def __init__(self, optimizer: Optimizer, parameters: list[tuple[DTensor, ParameterStorage]]) -> None:
        self.optimizer = optimizer
        self.is_entered = False
        self.lay_out_state: Callable[[Optimizer], None] = lambda _: None
        self._parameters = parameters
        # The same objects at each entry: LBFGS, say, has its state under one of them for a whole step.
        self._whole = [nn.Parameter(full_tensor(p).clone(), p.requires_grad) for p, _ in parameters]

    def enter(self) -> None:
        """Put whole parameters into the groups, with what the mesh has of values, gradients and state: collective."""
        with torch.no_grad():
            for (parameter, _), whole in zip(self._parameters, self._whole, strict=True):
                whole.copy_(full_tensor(parameter))
                whole.grad = None if parameter.grad is None else full_tensor(parameter.grad).clone()
                state = self.optimizer.state.get(parameter, {})
                for name, value in state.items():
                    state[name] = full_tensor(value).clone() if isinstance(value, DTensor) else value
        self._put({id(p): w for (p, _), w in zip(self._parameters, self._whole, strict=True)})
        self.is_entered = True

    def leave(self) -> None:
        """Put the parameters of the mesh back, each rank with its part of the whole ones; state in their layouts."""
        with torch.no_grad():
            for (parameter, storage), whole in zip(self._parameters, self._whole, strict=True):
                to_local(parameter).copy_(to_local(storage.converted(whole.detach())))
        self._put({id(w): p for (p, _), w in zip(self._parameters, self._whole, strict=True)})
        self.is_entered = False
        self.lay_out_state(self.optimizer)

    def _put(self, other: dict[int, Any]) -> None:
        for group in self.optimizer.param_groups:
            # In place: LBFGS holds the list.
            group["params"][:] = [other.get(id(p), p) for p in group["params"]]
        state = self.optimizer.state
        for parameter in [p for p in state if id(p) in other]:
            state[other[id(parameter)]] = state.pop(parameter)
