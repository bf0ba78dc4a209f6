"""What trainers of other libraries have in common here: every rank loads the whole batch, as one device would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopar import checkpoint
from autopar.module.parallel_module import ParallelModule
from autopar.module.whole_outputs import gather_outputs_without_loss as gather_outputs_without_loss
from autopar.module.whole_outputs import whole as whole
from autopar.runtime.checkpoint import generators
from autopar.runtime.mesh import MeshContext


def parallel_inside(model: Any) -> ParallelModule | None:
    """The parallel module that a model is, or the one in it that has all of its parameters; None without.

    Libraries put modules of their own around a network (sentence-transformers' pooling), which change the batch.
    """
    if isinstance(model, ParallelModule) or not isinstance(model, nn.Module):
        return model if isinstance(model, ParallelModule) else None
    found = next((m for m in model.modules() if isinstance(m, ParallelModule)), None)
    if found is None or {id(p) for p in model.parameters()} - {id(p) for p in found.parameters()}:
        return None
    return found


def require_whole_batches(model: ParallelModule, library: str) -> None:
    """Check that a model takes whole batches, and let the ranks compare each of them.

    Loaders draw random numbers, for the order, masks and augmentations: if one rank's generator has drawn more than
    another's, batches differ in the middle of a run.

    Args:
        model: what `autopar.parallelize` returned.
        library: whose loader gives the batches.

    Raises:
        ValueError: it takes parts.
    """
    if model._autopar.options.inputs != "global":
        raise ValueError(
            f'the model takes each rank\'s own part of a batch (inputs="local"), and with {library} every rank loads '
            'the whole batch: leave inputs= of parallelize() out, or write inputs="global"'
        )
    model._autopar.compare_always = True


def take_random_numbers_of_rank_0(context: MeshContext, *, host: bool = True) -> None:
    """Bring generators of random numbers into rank 0's state; loaders draw on the ``host``. Every rank calls it."""
    own = generators.states()
    if host:
        own = {name: state for name, state in own.items() if name in ("torch-cpu", "python", "numpy")}
    generators.restore(context.decide(lambda: own, "the states of random generators"))


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer in a wrapper that has it as its attribute ``optimizer``."""
    while isinstance(inner := vars(optimizer).get("optimizer"), torch.optim.Optimizer):
        optimizer = inner
    found: torch.optim.Optimizer = optimizer
    return found


class WholeModel(nn.Module):
    """A parallel module in whose place a library reads and writes whole states."""

    def __init__(self, model: ParallelModule) -> None:
        super().__init__()
        self._of = (model,)  # in a tuple: no submodule

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole; every rank calls it."""
        return self._of[0].full_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """From whole tensors."""
        return self._of[0].load_state_dict(state_dict, strict)


class WholeOptimizer:
    """An optimizer of a parallel module in whose place a library reads and writes whole states."""

    def __init__(self, model: ParallelModule, optimizer: Any) -> None:
        self._model, self._optimizer = model, unwrapped(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Whole, on rank 0; every rank calls it."""
        return checkpoint.full_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From whole tensors."""
        checkpoint.load_full_optimizer_state_dict(self._model, self._optimizer, state)


@contextlib.contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Other values of attributes of an object, for a while."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
