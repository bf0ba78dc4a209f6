"""What a checkpoint holds of `LocalSteps`: the outer state as DTensors in the parameters' layouts, and counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.module.low_communication.exchange import InFlight
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.dtensor import in_layout, local_like, redistribute, to_local
from autopar.runtime.state.stage_tensor import StageTensor, with_owner
from autopar.runtime.state.state_dict import savable

if TYPE_CHECKING:
    from autopar.module.low_communication.local_steps import LocalSteps

ANCHOR, MOMENTUM, MEAN, LEFT = "anchor", "momentum", "mean", "left"


def saved_state(steps: LocalSteps) -> dict[str, Any]:
    """Counters, and tensors by name: what the workers agreed on, the outer momentum, means that are in flight.

    Every rank calls it: it waits for what is in flight, which is used when its turn comes.
    """
    outer = steps._made()
    with steps._workers.everyone.during("the outer exchanges in flight"):
        means = {f: flight.wait() for f, flight in steps._in_flight.items()}
    steps._in_flight = {f: _arrived(f, mean) for f, mean in means.items()}
    found = {ANCHOR: outer.anchor, MOMENTUM: outer.momentum}
    if steps.settings is not None and steps.settings.delay:
        # Always all of them: what is loaded into must have the same names.
        found[MEAN] = outer.by_name(means)
    if steps.settings is not None and steps.settings.feedback:
        found[LEFT] = outer.by_name(steps._left)
    tensors = {f"{kind}.{n}": in_shards(steps.model, n, t) for kind, own in found.items() for n, t in own.items()}
    return {
        "settings": str(steps.settings), "steps": steps.steps, "exchanges": steps.exchanges,
        "in_flight": sorted(means), "tensors": tensors, "tokens": steps._tokens.total,
        "tokens_sent": sorted(steps._tokens.sent.items()), "worker": steps._workers.index,
    }  # fmt: skip


def _arrived(fragment: int, mean: torch.Tensor) -> InFlight:
    return InFlight(fragment, lambda: mean)


def in_shards(model: ParallelModule, name: str, local: torch.Tensor) -> torch.Tensor:
    """A tensor of a rank's shard in the parameter's layout, in shards that checkpoints can hold."""
    parameter: torch.Tensor = model.get_parameter(name)
    if not isinstance(parameter, DTensor):
        return local.clone()
    session = model._autopar
    tensor = local_like(local.to(parameter.device, copy=True), parameter)
    tensor = with_owner(tensor, parameter.owner_stage if isinstance(parameter, StageTensor) else None)
    return savable(tensor, session.types().get(name), session.context)


def load_saved_state(steps: LocalSteps, state: Mapping[str, Any]) -> None:
    """Take over what `saved_state` gave, or a checkpoint of it; every rank calls it.

    Raises:
        AutoparError: it is of other settings or parameters.
    """
    steps._made()  # decides "auto"
    steps.require_settings(state)
    # A new one: what is there stays what it is if this fails.
    outer = steps._new_state()
    kinds = {ANCHOR: outer.anchor, MOMENTUM: outer.momentum}
    means = {name: torch.zeros_like(t) for name, t in outer.anchor.items()}
    left = {name: torch.zeros_like(t) for name, t in outer.anchor.items()}
    if state["in_flight"]:
        kinds[MEAN] = means
    assert steps.settings is not None
    # Of a copy of another worker, that one adds them.
    if steps.settings.feedback and state["worker"] == steps._workers.index:
        kinds[LEFT] = left
    for kind, tensors in kinds.items():
        for name, tensor in tensors.items():
            if f"{kind}.{name}" not in state.get("tensors", {}):
                raise AutoparError(f"what is loaded has no {kind} of {name!r}: it is of another model")
            tensor.copy_(own_shard(steps.model, name, state["tensors"][f"{kind}.{name}"]))
    steps._outer = outer
    steps.steps, steps.exchanges = state["steps"], state["exchanges"]
    steps._tokens.total, steps._tokens.sent = state.get("tokens", 0), dict(map(tuple, state.get("tokens_sent", ())))
    steps._in_flight = {}
    flat = outer.by_fragment(means)
    for fragment in state["in_flight"]:
        steps._in_flight[fragment] = _arrived(fragment, flat[fragment])
    if steps.settings.feedback:
        steps._left = outer.by_fragment(left)
    steps._require_same(outer)


def own_shard(model: ParallelModule, name: str, value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a saved tensor.

    Raises:
        AutoparError: it has another shape than the parameter.
    """
    parameter: torch.Tensor = model.get_parameter(name)
    session = model._autopar
    is_whole = isinstance(value, DTensor) or not isinstance(parameter, DTensor)
    expected = parameter.shape if is_whole else to_local(parameter).shape
    if value.shape != expected:
        raise AutoparError(
            f"what is loaded of {name!r} is of {tuple(value.shape)}, and here it is {tuple(expected)}: it is of "
            "another model, or of other devices; load what these saved, or a checkpoint, which moves to other layouts"
        )
    if not isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    known = session.types().get(name)
    if known is not None:
        return to_local(in_layout(value, known[0], known[1], session.context))
    return to_local(redistribute(value, session.context, tuple(parameter.placements)))
