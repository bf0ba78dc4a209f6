"""Checkpoints: state dicts that `torch.distributed.checkpoint` saves under one plan and loads under another.

Parameters split inside a fused dim are `_StridedShard`, which `torch.distributed.checkpoint` refuses to save and loads
wrongly. A `ParallelModule`'s own ``state_dict()`` therefore holds plain shards; the functions here do the same for the
optimizer::

    state = autopar.checkpoint.state_dict(model, optimizer)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder)

    state = autopar.checkpoint.state_dict(model, optimizer)  # after a new parallelize(), on any mesh
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    autopar.checkpoint.load_state_dict(model, optimizer, state)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.dtensor import in_layout, redistribute
from autopar.runtime.state.state_dict import savable


def state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What to save, or where to load into; every rank calls it.

    Args:
        model: its layouts must be decided: pass ``batch=`` to `autopar.parallelize`, or call it once.
        optimizer: of the model's parameters; its state is made (all zero) if it has none yet.

    Returns:
        ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "groups": {number: {...}}}}``.
    """
    with model._autopar.together("checkpoint.state_dict()"):
        return _state_dict(model, optimizer)


def _state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    found: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is None:
        return found
    names = _names(model, optimizer)
    # An optimizer's step is an error while gradients are deferred; this one uses none of them.
    with model._autopar.deferred.set_aside():
        _make_state(optimizer)
    # By name, where torch has numbers: another process may have its parameters in another order.
    state: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        known = model._autopar.types().get(names[parameter])
        state[names[parameter]] = {
            k: savable(v, known if v.shape == parameter.shape else None, model._autopar.context)
            if isinstance(v, DTensor)
            else v
            for k, v in values.items()
        }
    groups = {str(i): {k: v for k, v in g.items() if k != "params"} for i, g in enumerate(optimizer.param_groups)}
    found["optimizer"] = {"state": state, "groups": groups}
    return found


def load_state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """Take over what `torch.distributed.checkpoint.load` has read into the result of `state_dict`; every rank calls it.

    Raises:
        AutoparError: the state is of another model or optimizer.
    """
    with model._autopar.together("checkpoint.load_state_dict()"):
        _load_state_dict(model, optimizer, state)


def _load_state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    if optimizer is None:
        return
    names = _names(model, optimizer)
    with model._autopar.deferred.set_aside():
        _make_state(optimizer)
    # The saved state is in plain shards on every stage; this optimizer's is in the layouts of its parameters.
    saved = state["optimizer"]
    for parameter, values in optimizer.state.items():
        name = names[parameter]
        if name not in saved["state"]:
            raise AutoparError(
                f"the optimizer state has nothing for {name!r}; it belongs to another model or optimizer"
            )
        for key, value in saved["state"][name].items():
            if isinstance(value, DTensor):
                assert isinstance(parameter, DTensor)
                own, known = values.get(key), model._autopar.types().get(name)
                target = tuple(own.placements) if isinstance(own, DTensor) else tuple(parameter.placements)
                if known is not None and value.shape == parameter.shape:
                    values[key] = in_layout(value, known[0], known[1], model._autopar.context)
                else:
                    values[key] = redistribute(value, model._autopar.context, target)
            else:
                values[key] = value
    for i, group in enumerate(optimizer.param_groups):
        group.update({k: v for k, v in saved["groups"][str(i)].items() if k in group})


def _names(model: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """Original name of each of the optimizer's parameters."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise AutoparError(
                    "the optimizer holds a parameter that the model does not have; make it from the parameters of the "
                    "module that parallelize() returned"
                )
    return names


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer allocate its state by a step that changes nothing: zero gradients, zero learning rate."""
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    if optimizer.state or not parameters:
        return
    gradients = [p.grad for p in parameters]
    rates = [g["lr"] for g in optimizer.param_groups]
    with torch.no_grad():
        for p in parameters:
            p.grad = torch.zeros_like(p)
        # Learning rate zero, too: weight decay would change parameters even without gradients.
        for g in optimizer.param_groups:
            g["lr"] = torch.zeros_like(g["lr"]) if isinstance(g["lr"], torch.Tensor) else 0.0
        try:
            optimizer.step()
        finally:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            for g, rate in zip(optimizer.param_groups, rates, strict=True):
                g["lr"] = rate
        # The step has counted itself, which bias correction would notice.
        for values in optimizer.state.values():
            if isinstance(values.get("step"), torch.Tensor):
                values["step"].zero_()
