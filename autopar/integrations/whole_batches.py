"""What trainers of other libraries have in common here: every rank loads the whole batch, as one device would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

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

    @property
    def parallel(self) -> ParallelModule:
        """The parallel module."""
        return self._of[0]

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


class WholeState:
    """What a script has beside its models, such as averages of parameters, with a whole state to read and write."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def state_dict(self) -> Any:
        """Whole plain tensors; every rank calls it."""
        return whole(self._of.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """From whole tensors, each of which is put where the object has one on the mesh; every rank calls it."""
        # Modules take whole tensors; an object of another kind may keep what it is given.
        self._of.load_state_dict(state if isinstance(self._of, nn.Module) else _placed(state, self._of.state_dict()))


def _placed(state: Any, own: Any) -> Any:
    """The same nested lists, tuples and mappings; a plain tensor in the layout of the one that ``own`` has there."""
    if isinstance(own, DTensor) and isinstance(state, torch.Tensor):
        if isinstance(state, DTensor) or state.shape != own.shape:
            return state
        with torch.no_grad():
            placed = own.detach().to(state.dtype, copy=True)
            plain, mesh = state.to(placed.device), own.device_mesh
            placed.copy_(DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False))
        return placed
    if isinstance(own, Mapping) and isinstance(state, dict):
        return {k: _placed(v, own.get(k)) for k, v in state.items()}
    if isinstance(own, list | tuple) and type(state) in (list, tuple) and len(own) == len(state):
        return type(state)(map(_placed, state, own))
    return state


@contextlib.contextmanager
def attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Other values of attributes of an object, for a while."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)
