"""What trainers of other libraries have in common here: every rank loads the whole batch, as one device would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar import checkpoint
from autopar.module.parallel_module import ParallelModule
from autopar.runtime.checkpoint import generators
from autopar.runtime.mesh import MeshContext


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


def whole(value: Any) -> Any:
    """The same nested lists, tuples and mappings with whole plain tensors; a collective call if there are DTensors.

    Gradients flow through those that require one.
    """
    if isinstance(value, DTensor):
        with torch.set_grad_enabled(torch.is_grad_enabled() and value.requires_grad):
            return value.full_tensor()
    if isinstance(value, Mapping):
        if not any(_has_dtensor(v) for v in value.values()):
            return value
        return _like(value, {k: whole(v) for k, v in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(whole, value))
    if isinstance(value, list | tuple):
        return type(value)(map(whole, value))
    return value


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_dtensor, value.values()))
    return isinstance(value, DTensor) or (isinstance(value, list | tuple) and any(map(_has_dtensor, value)))


def _like(old: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    # Outputs of transformers are dictionaries with attributes, which their constructors take by name.
    return new if type(old) is dict else type(old)(**new)


def gather_outputs_without_loss(model: ParallelModule) -> None:
    """Let outputs be whole plain tensors, with their gradients, where there is no loss among them.

    So a loss that is computed outside of the model, from logits and labels, is what it is on one device. Where the
    model returns its loss, other outputs stay on the ranks: logits may be larger than the model.
    """
    if _gather not in model._forward_hooks.values():
        model.register_forward_hook(_gather)


def _gather(module: nn.Module, args: Any, output: Any) -> Any:
    return output if _has_loss(output) else whole(output)


def _has_loss(output: Any) -> bool:
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else [output]
    )
    return any(isinstance(v, torch.Tensor) and v.ndim == 0 for v in values)


def take_random_numbers_of_rank_0(context: MeshContext) -> None:
    """Bring the host's generators of random numbers into rank 0's state, for loaders; every rank calls it."""
    own = {name: state for name, state in generators.states().items() if name in ("torch-cpu", "python", "numpy")}
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
