"""`offload_states`: optimizer state of some parameters lies on the host but for the optimizer's step.

Any optimizer of ``torch.optim`` that steps these parameters is meant, whenever it is made: torch tells of every step
before it begins and when it has ended. State that is as large as its parameter is brought to the device before, and
sent to the host behind it; counters stay where they are. ``state_dict`` and ``load_state_dict`` of the optimizer see
state on the device, as without all this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.ir.ops.host import bring, send
from autopar.runtime.state.stage_tensor import StageTensor, staged


class OffloadedStates:
    """State of some parameters, in whichever optimizer.

    Attributes:
        held: what lies on the host, by the parameter's identity and the state's name.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """Nothing lies on the host yet."""
        self.held: dict[tuple[int, str], torch.Tensor] = {}
        self._parameters = {id(p): p for p in parameters}
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def bring(self, optimizer: Optimizer, *_: Any) -> None:
        """Have the state of an optimizer on the device."""
        self._watch(optimizer)
        for key, state, name in self._states(optimizer):
            if self.held.get(key) is state[name]:
                state[name] = _local(self.held.pop(key), bring)

    def send(self, optimizer: Optimizer, *_: Any) -> None:
        """Have it on the host."""
        for key, state, name in self._states(optimizer):
            if self.held.get(key) is not state[name]:
                state[name] = self.held[key] = _local(state[name], send)

    def _states(self, optimizer: Optimizer) -> Iterator[tuple[tuple[int, str], dict[str, Any], str]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._parameters or parameter not in optimizer.state:
                    continue
                state = optimizer.state[parameter]
                for name, value in list(state.items()):
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim:
                        yield (id(parameter), name), state, name

    def _watch(self, optimizer: Optimizer) -> None:
        """What is saved is on the device, and goes to the host again; and so does what is loaded."""
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        optimizer.register_state_dict_pre_hook(_weakly(self, OffloadedStates.bring))
        optimizer.register_state_dict_post_hook(_weakly(self, OffloadedStates._keep_saved))
        optimizer.register_load_state_dict_post_hook(_weakly(self, OffloadedStates.send))

    def _keep_saved(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Have it on the host again, but for what has been saved, which shares the optimizer's own tables."""
        saved["state"] = {key: dict(state) for key, state in saved["state"].items()}
        self.send(optimizer)


def offload_states(parameters: Iterable[torch.Tensor]) -> OffloadedStates:
    """Keep the optimizer state of these parameters on the host, for as long as the result lives."""
    states = OffloadedStates(parameters)
    before = register_optimizer_step_pre_hook(_weakly(states, OffloadedStates.bring))
    after = register_optimizer_step_post_hook(_weakly(states, OffloadedStates.send))
    for handle in (before, after):
        weakref.finalize(states, handle.remove)
    return states


def _weakly(states: OffloadedStates, method: Callable[..., None]) -> Callable[..., None]:
    """A hook of an optimizer that does not keep the states alive."""
    reference = weakref.ref(states)

    def hook(optimizer: Optimizer, *arguments: Any) -> None:
        found = reference()
        if found is not None:
            method(found, optimizer, *arguments)

    return hook


def _local(tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor whose values, of a DTensor this rank's, are moved."""
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            return move(tensor)
        moved = DTensor(move(tensor._local_tensor), tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return staged(moved, tensor.home if isinstance(tensor, StageTensor) else None)
