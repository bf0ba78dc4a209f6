"""What a checkpoint holds of `CompressedGradients`: errors in the parameters' layouts, factors, counters.

Errors of one worker are its own, and are saved in its folder. Errors of servers are of a piece on each worker: all
pieces are saved with each. Factors of ``powersgd`` are of a shard, and mean nothing in another layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import AutoparError
from autopar.module.low_communication.compressed.collectives import (
    GATHER,
    Exchange,
    Request,
    joined,
    over_group,
    parted,
)
from autopar.module.low_communication.compressed.low_rank import LowRank
from autopar.module.low_communication.compressed.signs import Signs, pieces, whole
from autopar.module.low_communication.compressed.zero_one import ZeroOne
from autopar.module.low_communication.saved_state import in_shards, own_shard
from autopar.runtime.dtensor import to_local
from autopar.runtime.state.stage_tensor import StageTensor

if TYPE_CHECKING:
    from autopar.module.low_communication.compressed.gradients import CompressedGradients

ERROR, SERVED, FACTORS, ANCHOR, MOVED = "error", "served", "factors", "anchor", "moved"


def saved_state(compressed: CompressedGradients) -> dict[str, Any]:
    """Counters and tensors by name; every rank of all workers calls it."""
    step, model = compressed._made(), compressed.model
    tensors: dict[str, torch.Tensor] = {}
    given = {ERROR: step.method.errors}
    if isinstance(step.method, Signs):
        with compressed._workers.everyone.during("gathering the errors of servers"):
            given[SERVED], _ = over_group(_served(compressed, step.method), compressed._workers.group)
    if isinstance(step.method, ZeroOne):
        given |= {ANCHOR: step.method.anchors, MOVED: step.method.moved}
    for kind, own in given.items():
        # Of all, empty or not: ranks of a worker save the same names.
        for name, parameter in compressed._tensors().items():
            local = own[name] if name in own else torch.zeros_like(parameter, dtype=step.dtype)
            tensors[f"{kind}.{name}"] = in_shards(model, name, local)
    if isinstance(step.method, LowRank):
        tensors[FACTORS] = _stacked(compressed, step.method)
    return {
        "settings": str(compressed.settings), "steps": step.steps, "frozen": dict(step.frozen),
        "layouts": layouts(compressed), "workers": compressed._workers.count, "tensors": tensors,
        **_counted(step.method),
    }  # fmt: skip


def _counted(method: Any) -> dict[str, Any]:
    """Of ``zeroone``; of all parameters, since a rank does not see those of other stages."""
    return {"updates": dict(method.updates), "rates": dict(method.rates)} if isinstance(method, ZeroOne) else {}


def _served(compressed: CompressedGradients, method: Signs) -> Exchange[dict[str, torch.Tensor]]:
    """Errors of all servers, in the shapes of this rank's shards."""
    if not method.served:
        return {}
    rows = yield Request(GATHER, joined([*method.served.values()]))
    parts = torch.split(rows, [t.numel() for t in method.served.values()], 1)
    return {n: whole(p, method.errors[n].shape) for n, p in zip(method.served, parts, strict=True)}


def _stacked(compressed: CompressedGradients, method: LowRank) -> torch.Tensor:
    """The factors of each rank of the worker as a row, padded to one length."""
    context, step = compressed.model._autopar.context, compressed._made()
    own = joined([*method.factors.values(), torch.zeros(1, dtype=step.dtype, device=context.device)])
    most = max(context.gather(own.numel(), "the factors of compressed gradients"))
    row = torch.nn.functional.pad(own, (0, most - own.numel()))[None]
    if context.mesh is None:
        return row
    return DTensor.from_local(row, context.mesh, [Shard(0)] * context.mesh.ndim, run_check=False)


def layouts(compressed: CompressedGradients) -> str:
    """Where parameters are within a worker, for those whose state is of a shard: the same text on all of its ranks."""
    if compressed.settings.rank is None:
        return ""
    found = []
    for name, parameter in compressed._parameters().items():
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        stage = parameter.owner_stage if isinstance(parameter, StageTensor) else None
        found.append((name, [str(p) for p in placements], stage))
    axes = compressed.model._autopar.context.axes
    return f"{dict(axes)}: {', '.join(f'{n} {p}' + (f' of stage {s}' if s is not None else '') for n, p, s in found)}"


def require_layouts(compressed: CompressedGradients, saved: Mapping[str, Any]) -> None:
    """Refuse factors of other shards.

    Raises:
        AutoparError: names both.
    """
    own, other = layouts(compressed), saved.get("layouts", "")
    if own != other:
        raise AutoparError(
            f"factors of method='powersgd' are of a device's shards, which are here {own}, and in what is loaded "
            f"{other}: use the plan it was saved with, or load without these and make new CompressedGradients"
        )


def load_saved_state(compressed: CompressedGradients, state: Mapping[str, Any]) -> None:
    """Take over what `saved_state` gave, or a checkpoint of it; every rank of all workers calls it.

    Raises:
        AutoparError: it is of other settings, parameters or, with ``powersgd``, layouts.
    """
    compressed.require_settings(state)
    step, tensors = compressed._new_state(), state.get("tensors", {})
    index, workers = compressed._workers.index, compressed._workers.count
    for name in compressed._parameters():
        for kind in (ERROR, SERVED) if isinstance(step.method, Signs) else (ERROR,):
            if f"{kind}.{name}" not in tensors:
                raise AutoparError(f"what is loaded has no {kind} of {name!r}: it is of another model")
            local = own_shard(compressed.model, name, tensors[f"{kind}.{name}"])
            if name not in step.method.errors:
                continue
            if kind == ERROR:
                step.method.errors[name].copy_(local)
            elif isinstance(step.method, Signs):
                step.method.served[name].copy_(pieces(local, workers)[index])
    if isinstance(step.method, ZeroOne):
        _load_zero_one(compressed, step.method, state)
    if isinstance(step.method, LowRank):
        flat, shapes = to_local(tensors[FACTORS])[0], {n: f.shape for n, f in step.method.factors.items()}
        known = flat[: sum(shape.numel() for shape in shapes.values())].clone()
        step.method.factors = parted(known, shapes)
    step.steps, step.frozen = state["steps"], dict(state["frozen"])
    compressed._step = step
    compressed.require_same_parameters("loading")


def _load_zero_one(compressed: CompressedGradients, method: ZeroOne, state: Mapping[str, Any]) -> None:
    method.updates, method.rates = dict(state["updates"]), dict(state["rates"])
    # In the model's order: a set's is another one in each process, and so would be what is exchanged.
    for name in [n for n in method.errors if n in method.rates]:
        for kind, own in ((ANCHOR, method.anchors), (MOVED, method.moved)):
            saved = own_shard(compressed.model, name, state["tensors"][f"{kind}.{name}"])
            own[name] = saved.to(method.errors[name], copy=True)
