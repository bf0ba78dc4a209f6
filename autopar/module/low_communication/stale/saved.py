"""What a checkpoint holds of `StaleGradients`: each worker's own part of the parameters, and its state.

What a worker computes from are the parameters in its own folder; owners get them back from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.module.low_communication.stale.owner import Owner, taken

if TYPE_CHECKING:
    from autopar.module.low_communication.stale.gradients import StaleGradients

OWNED, STEP = "owned", "step"

_STATE = {"momentum": ("momentum_buffer",), "betas": ("exp_avg", "exp_avg_sq"), "amsgrad": ("max_exp_avg_sq",)}
"""Tensors of an optimizer's state, by the option that has them."""


def state_keys(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the tensors of an optimizer's state that have the shape of the parameter."""
    return [k for option, keys in _STATE.items() if any(g.get(option) for g in optimizer.param_groups) for k in keys]


def saved_state(stale: StaleGradients) -> dict[str, Any]:
    """Counters, and tensors by name; every rank calls it, at the same number of steps of its own or not."""
    owner = stale._made()
    stale.settle(f"saving {stale.what}")
    states = [_state(owner, v) for v in owner.values]
    tensors = {OWNED: _padded(owner, [v.detach() for v in owner.values])}
    for key in state_keys(stale.optimizer):
        values = zip(owner.values, states, strict=True)
        tensors[f"state.{key}"] = _padded(owner, [s.get(key, torch.zeros_like(v)) for v, s in values])
    return {
        "settings": stale._settings(), "steps": stale.steps, "version": owner.version, "clocks": list(owner.clocks),
        "read": list(owner.read), "begun": [bool(s) for s in states],
        "counts": [float(s.get(STEP, 0.0)) for s in states], "tensors": tensors,
    }  # fmt: skip


def _state(owner: Owner, value: torch.Tensor) -> dict[str, Any]:
    return {} if owner.optimizer is None else dict(owner.optimizer.state.get(value, {}))


def _padded(owner: Owner, values: list[torch.Tensor]) -> torch.Tensor:
    """Of one dim, with a zero at the end: a worker that owns nothing has a tensor, too."""
    like = values[0] if values else torch.zeros(0)
    return torch.cat([*(v.detach().reshape(-1) for v in values), like.new_zeros(1)])


def load_saved_state(stale: StaleGradients, state: Mapping[str, Any]) -> None:
    """Take over what `saved_state` gave, or a checkpoint of it; every rank calls it, when parameters are loaded.

    Raises:
        AutoparError: it is of other settings or another model.
    """
    stale.require_settings(state)
    stale.settle(f"loading {stale.what}")
    owner, tensors = stale._made(), state.get("tensors", {})
    sizes = [s.size for s in owner.segments]
    if len(state["begun"]) != len(sizes) or OWNED not in tensors or tensors[OWNED].numel() != sum(sizes) + 1:
        raise AutoparError("what is loaded has parts of other parameters: it is of another model")
    keys = state_keys(stale.optimizer)
    parts = {name: _parts(flat, sizes) for name, flat in tensors.items()}
    with torch.no_grad():
        for i, value in enumerate(owner.values):
            value.copy_(parts[OWNED][i])
            if owner.optimizer is None or not state["begun"][i]:
                continue
            own: dict[str, Any] = {key: parts[f"state.{key}"][i].clone() for key in keys}
            if "exp_avg" in own:
                own[STEP] = torch.tensor(state["counts"][i])
            owner.optimizer.state[value] = own
    stale.steps, owner.version = state["steps"], state["version"]
    owner.clocks, owner.read = list(state["clocks"]), list(state["read"])
    stale.require_same("loading", values=False)
    stale.connect()
    _tell_owners(stale, owner)


def _parts(flat: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(torch.split(flat[: sum(sizes)], sizes)) if sizes else []


def _tell_owners(stale: StaleGradients, owner: Owner) -> None:
    """Each owner gets what every worker computes from, of its part."""
    mail, tensors, workers = stale._mail, stale._tensors(), stale._workers
    assert mail is not None
    what = f"the parameters that {stale.what} are computed from"
    workers.everyone.meet(what)
    with workers.everyone.during(what):
        for number, segments in enumerate(stale._segments):
            own = taken(tensors, segments, stale._dtype)
            if not own.numel():
                continue
            every = [torch.empty_like(own) for _ in range(workers.count)] if number == workers.index else None
            dist.gather(own, every, group=mail.group, group_dst=number)
            for worker, values in enumerate(every or []):
                owner.had_read(worker, values)
    workers.everyone.meet(f"the end of {what}")
