"""State dicts of a model and its optimizer, in shards for torch's own checkpoints, or as on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.checkpoint.arguments import OF_PARALLEL, PARALLEL
from autopar.costs.arguments import a, require
from autopar.errors import AutoparError
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.dtensor import full_tensor, in_layout, redistribute
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.state_dict import savable
from autopar.runtime.state.storage import storage_of


def state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What to save, or where to load into; every rank calls it.

    Args:
        model: its layouts must be decided: pass ``batch=`` to `autopar.parallelize`, or call it once.
        optimizer: of the model's parameters; its state is made (all zero) if it has none yet.

    Returns:
        ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "groups": {number: {...}}}}``.
    """
    require(model=(model, PARALLEL), optimizer=(optimizer, OF_PARALLEL))
    with model._autopar.together("checkpoint.state_dict()"):
        return tensors_of(model, optimizer)


def tensors_of(model: ParallelModule, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """`state_dict`, within a call that all ranks are in."""
    found: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is None:
        return found
    names = names_of(model, optimizer)
    # An optimizer's step is an error while gradients are deferred; this one uses none of them.
    with model._autopar.deferred.set_aside():
        make_state(optimizer)
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
        ValueError: an argument is wrong.
    """
    require(
        model=(model, PARALLEL), optimizer=(optimizer, OF_PARALLEL),
        state=(state, a(Mapping, "what state_dict() of this module gives")),
    )  # fmt: skip
    with model._autopar.together("checkpoint.load_state_dict()"):
        take_over(model, optimizer, state)


def take_over(model: ParallelModule, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """`load_state_dict`, within a call that all ranks are in."""
    model.load_state_dict(state["model"])
    if optimizer is None:
        return
    names = names_of(model, optimizer)
    with model._autopar.deferred.set_aside():
        make_state(optimizer)
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


def full_optimizer_state_dict(model: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` is on one device, for one plain file; every rank calls it.

    Rank 0 gets the values, on the host, which must have room for all of them; elsewhere ``"state"`` is empty. Where
    that is too much, `save` writes each rank's part.

    Raises:
        AutoparError: ``optimizer`` has a parameter that the model has not.
    """
    session, names = model._autopar, names_of(model, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = optimizer.state_dict()
    if session.context.mesh is None:
        return found
    whole: dict[Any, dict[str, Any]] = {}
    with session.together("full_optimizer_state_dict()"):
        for number, values in found["state"].items():
            parameter = parameters[number]
            known = session.types().get(names[parameter])
            full = {k: _full(v, known if _shape(v) == parameter.shape else None, session.context)
                    for k, v in values.items()}  # fmt: skip
            if session.context.rank == 0:
                whole[number] = full
    return {**found, "state": whole}


def load_full_optimizer_state_dict(
    model: ParallelModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Take over what ``optimizer.state_dict()`` was on one device; every rank calls it and keeps its part.

    Args:
        model: its layouts need not be decided yet.
        optimizer: with its parameters in the same order.
        state: plain tensors, the same on every rank.

    Raises:
        ValueError: torch's, where parameter groups differ.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    taken = dict(state["state"])
    with model._autopar.context.during("load_full_optimizer_state_dict()", in_step=False):
        # Before torch moves them to the device, which need not have room for whole ones.
        for number, parameter in zip(numbers, parameters, strict=False):  # torch says where their counts differ
            storage = storage_of(parameter)
            if storage is not None and number in taken:
                taken[number] = {
                    k: storage.converted(v) if _shape(v) == parameter.shape and parameter.ndim else v
                    for k, v in taken[number].items()
                }
        optimizer.load_state_dict({**state, "state": taken})


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _full(value: Any, known: Any, context: MeshContext) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return full_tensor(savable(value, known, context) if isinstance(value, DTensor) else value).cpu().clone()


def names_of(model: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
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


def make_state(optimizer: torch.optim.Optimizer) -> None:
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
