"""Optimizer state in the layout of its parameter, wherever it comes from.

State of its parameter's shape, such as a moment, is made in the parameter's layout by torch. But state that was made
before the first batch, for a checkpoint to be loaded into, is whole on every rank, as parameters were then; and
``optimizer.load_state_dict`` of a plain checkpoint leaves plain tensors. Both are brought into the layout of the
parameter: when layouts are decided, and before every step.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.runtime.state.storage import ParameterStorage, storage_of
from autopar.runtime.state.whole_steps import install_whole_steps

_SCALARS = ("step", "mu_product", "eta", "mu")
"""State of torch's optimizers that is a plain scalar, of whatever parameter."""

_installed: list[Any] = []


def install_hook() -> None:
    """Before every optimizer's step, count it, and bring the state of parameters on a mesh into their layouts."""
    # One global hook, since users may make an optimizer at any time; once, however many models there are.
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))
        install_whole_steps(lay_out_state)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    storage = next((s for p in parameters if (s := storage_of(p)) is not None), None)
    if storage is not None and storage.context.control is not None:
        # A rank that leaves a step out is noticed when all ranks next agree on something.
        storage.context.control.steps += 1
    lay_out_state(optimizer)


def lay_out_state(optimizer: Optimizer) -> None:
    """Bring state into the layout of its parameter; a collective call, unless it is in that layout already."""
    for parameter, state in list(optimizer.state.items()):
        storage = storage_of(parameter) if isinstance(parameter, torch.Tensor) and isinstance(state, dict) else None
        if storage is not None:
            _lay_out(parameter, state, storage)


def _lay_out(parameter: torch.Tensor, state: dict[str, Any], storage: ParameterStorage) -> None:
    for name, value in state.items():
        # A counter of a scalar parameter has the parameter's shape, and is none of its values: known by its name.
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and (value.ndim or name not in _SCALARS):
            with torch.no_grad():
                state[name] = storage.converted(value)


def lay_out_states_of(parameters: Collection[torch.Tensor]) -> None:
    """Bring the state of these parameters, in whichever optimizer, into their layouts."""
    for optimizer in optimizers_of(parameters):
        lay_out_state(optimizer)


def optimizers_of_model(model: nn.Module) -> list[Optimizer]:
    """All optimizers of this process that have a parameter of the model.

    An optimizer refers to its parameters. Where nobody but the model does, no object of the process is looked at, which
    takes a tenth of a second.
    """
    parameters = list(model.parameters())
    # Modules of TorchScript have no such dict: theirs count as referred to by others.
    tables = (m._parameters for m in model.modules())
    own = Counter(id(p) for table in tables if type(table) is dict for p in table.values())
    (alone,) = map(sys.getrefcount, [torch.empty(0)])  # in a list, as the parameters are
    if all(n <= alone + own[id(p)] for n, p in zip(map(sys.getrefcount, parameters), parameters, strict=True)):
        return []
    return optimizers_of(parameters)


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
    """All optimizers of this process that have one of the parameters."""
    own, objects = set(map(id, parameters)), gc.get_objects()
    kinds = {Optimizer}
    while more := {k for kind in kinds for k in type.__subclasses__(kind)} - kinds:
        kinds |= more
    # torch keeps no list of optimizers. A process holds some million objects: they are looked through without a Python
    # call for each, and by type(), since isinstance() asks them for their __class__, and proxies run code for that.
    found = compress(objects, map({id(k) for k in kinds}.__contains__, map(id, map(type, objects))))
    # One whose constructor has failed has no groups, and may be alive in a traceback.
    groups = [(o, getattr(o, "param_groups", ())) for o in found]
    return [o for o, each in groups if any(id(p) in own for group in each for p in group["params"])]
