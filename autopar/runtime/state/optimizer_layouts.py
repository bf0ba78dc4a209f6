"""Optimizer state that lies as its parameter does, wherever it comes from.

State that is as large as its parameter, such as a moment, is made in the parameter's layout by torch. But what a
checkpoint is loaded into before the first batch was made when parameters were whole on every rank; and
``optimizer.load_state_dict`` of a plain checkpoint leaves plain tensors. Both are brought into the layout of the
parameter: when layouts are decided, and in front of every step.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.runtime.state.storage import Stored, stored_as

_SCALARS = ("step", "mu_product", "eta", "mu")
"""State of torch's optimizers that is a plain scalar, of whatever parameter."""

_installed: list[Any] = []


def install_hook() -> None:
    """In front of every optimizer's step, have the state of parameters on a mesh lie as they do."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(lambda optimizer, *_: lay_out_state(optimizer)))


def lay_out_state(optimizer: Optimizer) -> None:
    """Bring state into the layout of its parameter; nothing is moved that lies so already."""
    for parameter, state in list(optimizer.state.items()):
        stored = stored_as(parameter) if isinstance(parameter, torch.Tensor) and isinstance(state, dict) else None
        if stored is not None:
            _lay_out(parameter, state, stored)


def _lay_out(parameter: torch.Tensor, state: dict[str, Any], stored: Stored) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and (value.ndim or name not in _SCALARS):
            with torch.no_grad():
                state[name] = stored.part(value)


def lay_out_states_of(parameters: Collection[torch.Tensor]) -> None:
    """Bring the state of these parameters, in whichever optimizer, into their layouts."""
    own = set(map(id, parameters))
    for found in [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]:
        if any(id(p) in own for group in found.param_groups for p in group["params"]):
            lay_out_state(found)
