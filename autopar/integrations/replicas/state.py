"""What a rank of a group has: for a newcomer's rank at the same place, or to go back to where a step began."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from autopar.checkpoint.state_dicts import make_state, names_of
from autopar.errors import AutoparError
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.checkpoint import generators
from autopar.runtime.dtensor import to_local


def beginning(model: ParallelModule, stateful: Mapping[str, Any]) -> dict[str, Any]:
    """What a forward pass or the script changes before the optimizer's step: a copy."""
    return {
        "buffers": {n: to_local(b).detach().clone() for n, b in model.named_buffers()},
        "random": generators.states(),
        "random_calls": model._autopar.random_calls,
        "stateful": {name: copy.deepcopy(given.state_dict()) for name, given in stateful.items()},
    }


def go_back(model: ParallelModule, stateful: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Bring it back to `beginning`."""
    _copy_into(dict(model.named_buffers()), state["buffers"], "buffer")
    generators.restore(state["random"])
    model._autopar.random_calls = state["random_calls"]
    for name, given in stateful.items():
        given.load_state_dict(copy.deepcopy(state["stateful"][name]))


def own_state(model: ParallelModule, optimizer: torch.optim.Optimizer, stateful: Mapping[str, Any]) -> dict[str, Any]:
    """All that a newcomer's rank at this place takes: this rank's shards, as plain tensors; without communication.

    Parameters and the optimizer's state are not copied: nothing changes them before the step is committed.
    """
    names = names_of(model, optimizer)
    state = {names[p]: {k: _plain(v) for k, v in values.items()} for p, values in optimizer.state.items()}
    groups = [{k: _plain(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return {
        **beginning(model, stateful),
        "parameters": {n: to_local(p).detach() for n, p in model.named_parameters()},
        "trained": {n: p.requires_grad for n, p in model.named_parameters()},
        "optimizer": state,
        "groups": groups,
    }


def take_state(
    model: ParallelModule, optimizer: torch.optim.Optimizer, stateful: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Take over what `own_state` gave at the same place in another group; every rank of the group calls it.

    Raises:
        AutoparError: it is of another model or optimizer; names the first difference.
    """
    if state["stateful"].keys() != stateful.keys():
        raise AutoparError(
            f"the other group gives states of {sorted(state['stateful'])}, and this one has {sorted(stateful)}: pass "
            "the same objects by the same names in every group"
        )
    named = dict(model.named_parameters())
    _copy_into(named, state["parameters"], "parameter")
    # A newcomer has not come by the step at which the others have frozen a layer, or begun to train it.
    for name, trained in state["trained"].items():
        named[name].requires_grad_(trained)
    _take_optimizer(model, optimizer, state)
    go_back(model, stateful, state)


def _take_optimizer(model: ParallelModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    own, other = (len(groups) for groups in (optimizer.param_groups, state["groups"]))
    if own != other:
        raise AutoparError(
            f"the optimizer has {own} groups of parameters, and that of the other group {other}: make the same "
            "optimizer in every group, with those that were added since"
        )
    names, saved = names_of(model, optimizer), state["optimizer"]
    has = {names[p]: set(values) for p, values in optimizer.state.items()}
    if has != {name: set(values) for name, values in saved.items()}:
        optimizer.state.clear()
        if saved:
            make_state(model, optimizer, frozen=True)
    # A parameter that has had no gradient yet has no state.
    for parameter in [p for p in optimizer.state if names[p] not in saved]:
        del optimizer.state[parameter]
    by_name = {names[p]: values for p, values in optimizer.state.items()}
    for name, values in saved.items():
        if set(by_name.get(name, ())) != set(values):
            raise AutoparError(
                f"{type(optimizer).__name__} keeps {sorted(by_name.get(name, ()))} for {name!r}, and that of the other "
                f"group {sorted(values)}: make the same optimizer in every group"
            )
        _take_values(by_name[name], values, f"optimizer state of {name!r}")
    for group, options in zip(optimizer.param_groups, state["groups"], strict=True):
        _take_values(group, options, "parameter group")


def _take_values(own: dict[str, Any], other: Mapping[str, Any], what: str) -> None:
    for key, value in other.items():
        if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor):
            _copy_into({key: own[key]}, {key: value}, what)
        else:
            own[key] = value


def _copy_into(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], what: str) -> None:
    """Take values, when all of them fit."""
    locals_ = {n: to_local(t) for n, t in own.items()}
    for name in sorted(locals_.keys() | other.keys()):
        mine = tuple(locals_[name].shape) if name in locals_ else "none"
        theirs = tuple(other[name].shape) if name in other else "none"
        if mine != theirs:
            raise AutoparError(f"{what} {name!r}: this rank has {mine}, and its peer in the other group {theirs}")
    with torch.no_grad():
        for name, local in locals_.items():
            local.copy_(other[name])


def _plain(value: Any) -> Any:
    return to_local(value).detach() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
