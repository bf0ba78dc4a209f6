"""Parameters that are added to a parallel model: adapters, say, that a trainer makes for its reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import RankError
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.optimizer_layouts import optimizers_of
from autopar.runtime.state.parameters import checksum, distributed, replaced
from autopar.runtime.state.stage_tensor import StageTensor


class AddedParameters:
    """Takes them onto the mesh, replicated; the first graph that reads them decides their layouts.

    Attributes:
        known: names of the others.
    """

    def __init__(self, model: nn.Module) -> None:
        self.known = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def take(self, model: nn.Module, parameters: Mapping[str, torch.Tensor], context: MeshContext) -> bool:
        """Take those that are new and plain, from optimizers, too; whether there are some. A collective call then.

        Args:
            model: whose.
            parameters: of the model, by name.
            context: this rank's mesh context.

        Raises:
            RankError: their values differ between ranks.
        """
        if context.mesh is None or context.workers is not None or _has_stages(parameters):
            return False
        new = {n: p for n, p in parameters.items()
               if n not in self.known and isinstance(p, nn.Parameter) and not isinstance(p, DTensor)
               and p.device.type == context.device.type}  # fmt: skip
        if not new:
            return False
        _require_same(new, context)
        optimizers = optimizers_of(new.values())
        replacement = {id(p): distributed(p, context) for p in new.values()}
        replaced(model, replacement)
        for optimizer in optimizers:
            _replace_in(optimizer, replacement)
        self.known |= {n for n, _ in model.named_parameters(remove_duplicate=False)}
        return True


def _replace_in(optimizer: torch.optim.Optimizer, replacement: Mapping[int, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [replacement.get(id(p), p) for p in group["params"]]
    for old in [p for p in optimizer.state if id(p) in replacement]:
        optimizer.state[replacement[id(old)]] = optimizer.state.pop(old)


def _has_stages(parameters: Mapping[str, torch.Tensor]) -> bool:
    return any(isinstance(p, StageTensor) for p in parameters.values())


def _require_same(new: Mapping[str, torch.Tensor], context: MeshContext) -> None:
    """Ranks must have added the same values.

    Raises:
        RankError: they have not.
    """
    every = context.gather(checksum(new), "the values of parameters that were added to the model")
    rank = next((r for r, found in enumerate(every) if found != every[0]), None)
    if rank is not None:
        raise RankError(
            f"parameters were added to the model after parallelize() ({next(iter(new))!r} is the first of {len(new)}), "
            f"and rank {rank} has other values, or other ones, than rank 0: add the same on every rank, after "
            "torch.manual_seed with the same seed"
        )
