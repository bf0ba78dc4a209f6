"""`offload_states`: optimizer state of some parameters is in host memory, except during the optimizer's step.

This holds for any optimizer of ``torch.optim`` that steps these parameters, whenever it is made: torch has global hooks
before and after every step. State of its parameter's shape is copied to the device before the step and to the host
after it; counters stay where they are. ``state_dict`` and ``load_state_dict`` of the optimizer see state on the device,
as without offload.
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
from autopar.runtime.state.stage_tensor import StageTensor, with_owner


class OffloadedStates:
    """State of some parameters, in whichever optimizer.

    Attributes:
        on_host: the tensors in host memory, by the parameter's identity and the state's name.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """Nothing is in host memory yet."""
        self.on_host: dict[tuple[int, str], torch.Tensor] = {}
        # The parameters themselves, too: an id is unique only for as long as its object lives.
        self._parameters = {id(p): p for p in parameters}
        self._hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def bring(self, optimizer: Optimizer, *_: Any) -> None:
        """Copy the state of an optimizer to the device."""
        self._add_hooks(optimizer)
        for key, state, name in self._states(optimizer):
            # By identity: whatever the user has put in its place is where the user wants it.
            if self.on_host.get(key) is state[name]:
                state[name] = _local(self.on_host.pop(key), bring)

    def send(self, optimizer: Optimizer, *_: Any) -> None:
        """Copy it to the host."""
        for key, state, name in self._states(optimizer):
            if self.on_host.get(key) is not state[name]:
                state[name] = self.on_host[key] = _local(state[name], send)

    def _states(self, optimizer: Optimizer) -> Iterator[tuple[tuple[int, str], dict[str, Any], str]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._parameters or parameter not in optimizer.state:
                    continue
                state = optimizer.state[parameter]
                for name, value in list(state.items()):
                    # Counters and other scalars are too small to matter.
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim:
                        yield (id(parameter), name), state, name

    def _add_hooks(self, optimizer: Optimizer) -> None:
        """Bring state to the device for ``state_dict``, and send it back after that and after ``load_state_dict``."""
        if optimizer in self._hooked:
            return
        self._hooked.add(optimizer)
        optimizer.register_state_dict_pre_hook(_weakly(self, OffloadedStates.bring))
        optimizer.register_state_dict_post_hook(_weakly(self, OffloadedStates._send_after_saving))
        optimizer.register_load_state_dict_post_hook(_weakly(self, OffloadedStates.send))

    def _send_after_saving(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        """Send state to the host, but leave what has been saved on the device."""
        # A state dict shares the optimizer's own tables: `send` would replace the tensors in both.
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
    """A tensor whose values (of a DTensor, this rank's) are moved to other memory."""
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            return move(tensor)
        # The operator on a DTensor would go through DTensor's dispatch, which knows no rule for it.
        moved = DTensor(move(tensor._local_tensor), tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return with_owner(moved, tensor.owner_stage if isinstance(tensor, StageTensor) else None)
