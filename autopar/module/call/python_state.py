"""The model's buffers and attributes around a call: whole before it, and written as its forward writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from autopar.capture.state.hooks import replay
from autopar.capture.state.writes import apply
from autopar.module.whole_outputs import whole

if TYPE_CHECKING:
    from autopar.module.session import Session
    from autopar.specialize import Specialization


def make_state_whole(session: Session) -> None:
    """Make buffers and attributes that were computed from parameters whole plain tensors, as others are."""
    memo = session.slots.inventory(compare=False).memo
    if session.context.mesh is None or "whole state" in memo:
        return
    found = {n: t for n, t in session.slots.state_tensors().items() if isinstance(t, DTensor)}
    for name, tensor in found.items():
        path, _, attribute = name.rpartition(".")
        module = session.original.get_submodule(path)
        table = module._buffers if attribute in module._buffers else vars(module)
        table[attribute] = whole_with_history(tensor)
    memo = session.slots.inventory().memo if found else memo
    memo["whole state"] = True


def write_state(session: Session, found: Specialization, results: list[Any], assigned: dict[str, torch.Tensor]) -> None:
    """Do to the original's attributes what its forward did while it was traced."""
    state = found.program.state
    for name, value in assigned.items():
        path, _, attribute = name.rpartition(".")
        session.original.get_submodule(path)._buffers[attribute] = value
    gathered = _WholeResults(results)
    # Before any write: a check raises where the model itself would have raised.
    for check in state.checks:
        check(gathered)
    apply(session.original, state.writes, gathered)
    replay(session.original, state.observed, gathered)


def whole_with_history(tensor: torch.Tensor) -> torch.Tensor:
    """A whole tensor that requires a gradient if it did: the capture refuses one that the graph would not give."""
    with torch.enable_grad():
        found: torch.Tensor = whole(tensor)
        return found


class _WholeResults:
    """Results as the model's attributes get them: whole tensors, gathered when they are asked for."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def __getitem__(self, index: int) -> Any:
        result = self._results[index]
        return result.full_tensor() if isinstance(result, DTensor) else result
