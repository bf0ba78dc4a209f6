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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import AutoparError
from autopar.runtime.state.storage import ParameterStorage, storage_of

_SCALARS = ("step", "mu_product", "eta", "mu")
"""State of torch's optimizers that is a plain scalar, of whatever parameter."""

_NEED_WHOLE = {
    "Adafactor": "it writes into means of rows and columns that are not yet summed over the devices",
    "LBFGS": "it puts all parameters into one vector",
    "Rprop": "it writes into them where masks say",
}
"""Optimizers, torch's and those that are called alike, that fail in the middle of a step on tensors that are split."""

_installed: list[Any] = []


def install_hook() -> None:
    """Before every optimizer's step, bring the state of parameters on a mesh into their layouts.

    An optimizer that cannot step on tensors that are split is an `AutoparError` then, before it changes anything.
    """
    # One global hook, since users may make an optimizer at any time; once, however many models there are.
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(lambda optimizer, *_: _prepare(optimizer)))


def _prepare(optimizer: Optimizer) -> None:
    _refuse_split(optimizer)
    lay_out_state(optimizer)


def _refuse_split(optimizer: Optimizer) -> None:
    """Raise for an optimizer of whole tensors, if one of its parameters is split.

    Raises:
        AutoparError: names optimizer, reason and remedy.
    """
    name = next((kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in _NEED_WHOLE), None)
    if name is None:
        return
    for group in optimizer.param_groups:
        split = next((p for p in group["params"] if isinstance(p, DTensor) and not _is_whole(p)), None)
        if split is not None:
            raise AutoparError(
                f"optimizer {type(optimizer).__name__} cannot step on parameters that are split, such as the one "
                f"of shape {list(split.shape)} that lies as {split.placements}: {_NEED_WHOLE[name]}. Keep "
                "parameters whole by Search(recipe='ddp'), or take an optimizer that computes element by element, such "
                "as AdamW"
            )


def _is_whole(parameter: DTensor) -> bool:
    return all(p.is_replicate() for p in parameter.placements)


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
    return [o for o in found if any(id(p) in own for group in o.param_groups for p in group["params"])]
