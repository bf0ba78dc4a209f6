"""What a checkpoint holds of `ElasticWorkers`: the outer state as DTensors in the parameters' layouts, and counters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.module.low_communication.saved_state import ANCHOR, LEFT, MOMENTUM, in_shards, own_shard

if TYPE_CHECKING:
    from autopar.module.low_communication.elastic.workers import ElasticWorkers

logger = logging.getLogger("autopar")


def saved_state(workers: ElasticWorkers) -> dict[str, Any]:
    """Counters, and tensors by name: what the workers agreed on, the outer momentum, and what this one has left out.

    With what comes of a meeting that is under way: it waits for that.
    """
    workers._arrived()
    outer = workers._made()
    assert workers.settings is not None
    kinds = {ANCHOR: outer.anchor, MOMENTUM: outer.momentum}
    if workers.settings.feedback:
        kinds[LEFT] = outer.by_name(workers._left)
    tensors = {f"{kind}.{n}": in_shards(workers.model, n, t) for kind, own in kinds.items() for n, t in own.items()}
    return {
        "settings": str(workers.settings), "steps": workers.steps, "rounds": workers.rounds, "tensors": tensors,
        "worker": workers.worker, "members": [s.number for s in workers._members],
    }  # fmt: skip


def load_saved_state(workers: ElasticWorkers, state: Mapping[str, Any]) -> None:
    """Take over what `saved_state` gave, or a checkpoint of it.

    Raises:
        AutoparError: it is of other settings or parameters, or the worker has joined already.
    """
    if workers._meetings is not None:
        raise AutoparError("this worker has joined the others, whose state it has: load before join()")
    outer = workers._made()  # decides "auto"
    workers.require_settings(state)
    kinds = {ANCHOR: outer.anchor, MOMENTUM: outer.momentum}
    left = outer.by_name({})
    assert workers.settings is not None
    # That of another worker is added by that one.
    if workers.settings.feedback and state["worker"] == workers.worker:
        kinds[LEFT] = left
    given = state.get("tensors", {})
    for missing in (f"{k} of {n!r}" for k, own in kinds.items() for n in own if f"{k}.{n}" not in given):
        raise AutoparError(f"what is loaded has no {missing}: it is of another model")
    for kind, tensors in kinds.items():
        for name, tensor in tensors.items():
            tensor.copy_(own_shard(workers.model, name, state["tensors"][f"{kind}.{name}"]))
    workers.steps, workers.rounds = state["steps"], state["rounds"]
    workers._left = outer.by_fragment(left) if LEFT in kinds else {}
    workers._former = tuple(state["members"]) if workers.settings.feedback else ()
    if workers.worker in workers._former and LEFT not in kinds:
        logger.warning(
            "worker %s has loaded a checkpoint of worker %s: what its own few bits have left out (feedback=True) is "
            "lost; have each worker save, and load, a folder of its own", workers.worker, state["worker"],
        )  # fmt: skip
