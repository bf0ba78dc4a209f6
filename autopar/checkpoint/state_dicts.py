"""State dicts of a model and its optimizer, in shards for torch's own checkpoints, or as on one device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar._torch_compat import without_step_hooks
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
        optimizer: of the model's parameters. If it has no state yet, here is one, of zeros: it goes on without.

    Returns:
        ``{"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "groups": {number: {...}}}}``.
    """
    require(model=(model, PARALLEL), optimizer=(optimizer, OF_PARALLEL))
    with model._autopar.together("checkpoint.state_dict()"):
        made = make_state(model, optimizer) if optimizer is not None and not optimizer.state else []
        try:
            return tensors_of(model, optimizer)
        finally:
            forget_state(optimizer, made)


def tensors_of(model: ParallelModule, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """`state_dict` of the state that there is, within a call that all ranks are in.

    Raises:
        AutoparError: the optimizer has a parameter that the model has not, or a state that is of no parameter.
    """
    found: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is None:
        return found
    names = names_of(model, optimizer)
    _require_by_parameter(optimizer, names)
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


def _require_by_parameter(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
    """Refuse state that is not each parameter's own.

    Raises:
        AutoparError: there is some.
    """
    kind = type(optimizer).__name__
    # Of the class: a scheduler puts a function of its own in the place of the method.
    given = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    if any(p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD for p in given):
        raise AutoparError(
            f"{kind} cannot be saved or loaded: its step() takes a closure, and makes a state of all parameters "
            "together; leave optimizer= out, so that it begins anew after loading"
        )
    keys: Iterable[object] = optimizer.state
    foreign = next((key for key in keys if not isinstance(key, torch.Tensor) or key not in names), None)
    if foreign is not None:
        what = repr(foreign) if isinstance(foreign, str) else f"a {type(foreign).__name__}"
        raise AutoparError(
            f"{kind} has a state of {what}, which is no parameter of its groups, and cannot be saved by name: leave "
            "optimizer= out, so that it begins anew after loading"
        )


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
        if optimizer is not None and not optimizer.state:
            make_state(model, optimizer)
        take_over(model, optimizer, state)


def take_over(model: ParallelModule, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """`load_state_dict` into the state that there is, within a call that all ranks are in."""
    model.load_state_dict(state["model"])
    if optimizer is None:
        return
    names = names_of(model, optimizer)
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


def make_state(model: ParallelModule, optimizer: torch.optim.Optimizer, *, frozen: bool = False) -> list[torch.Tensor]:
    """Let the optimizer allocate the state that it lacks, by a step that changes no parameter; those that now have one.

    What is in it is for others to replace, or for `forget_state`: zeros mostly, and not what the first step makes.

    Args:
        model: whose parameters it has.
        optimizer: whose state it is.
        frozen: of parameters that are not trained, too, which may have been before.
    """
    _require_by_parameter(optimizer, names_of(model, optimizer))
    every = [p for g in optimizer.param_groups for p in g["params"]]
    made = [p for p in every if (frozen or p.requires_grad) and p not in optimizer.state]
    if not made:
        return []
    gradients = [p.grad for p in every]
    # Weight decay would be in momenta, and change parameters, even without gradients.
    none = ("lr", "weight_decay")
    options = [{k: g[k] for k in none if k in g} for g in optimizer.param_groups]
    # An optimizer's step is an error while gradients are deferred; this one uses none of them. A script's hooks, which
    # count steps or average weights, are not for it.
    with torch.no_grad(), model._autopar.deferred.set_aside(), without_step_hooks(optimizer):
        for p in every:
            p.grad = None
        for p in made:
            p.grad = torch.zeros_like(p)
        for g in optimizer.param_groups:
            g.update({k: torch.zeros_like(g[k]) if isinstance(g[k], torch.Tensor) else 0.0 for k in none if k in g})
        try:
            optimizer.step()
        finally:
            for p, gradient in zip(every, gradients, strict=True):
                p.grad = gradient
            for g, own in zip(optimizer.param_groups, options, strict=True):
                g.update(own)
        # The step has counted itself, which bias correction would notice.
        for p in made:
            if isinstance(step := optimizer.state.get(p, {}).get("step"), torch.Tensor):
                step.zero_()
    return made


def forget_state(optimizer: torch.optim.Optimizer | None, made: Iterable[torch.Tensor]) -> None:
    """Take back what `make_state` has made."""
    for parameter in made:
        assert optimizer is not None
        optimizer.state.pop(parameter, None)
