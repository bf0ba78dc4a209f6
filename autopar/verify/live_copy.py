"""`LiveCopy`: a copy of a model to which each call of a program does what a call of the model would do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.capture.state.slots import Slots, differences, state_tensors
from autopar.capture.state.writes import apply
from autopar.ir.program import Program, State
from autopar.verify.eager import Key, copied
from autopar.verify.python_state import is_same, state_of


class LiveCopy:
    """Takes over what calls of a program write to buffers, parameters and attributes."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None, program: Program, later: State | None = None
    ) -> None:
        """Copy the model.

        Args:
            model: stays as it is.
            dtype: of the copy and of what the program makes.
            program: that runs.
            later: what calls after the first do to the model, where they have the same graph and write other constants
                (a counter that is read, for example); default: what the first does.
        """
        self._model = copied(model, dtype)
        self._program, self._state, self._later = program, program.state, later or program.state

    def call(self, found: Mapping[Key, torch.Tensor]) -> tuple[dict[str, Any], nn.Module | None]:
        """What a call has written to attributes, frozen; and the model, if its next call may have another graph.

        Args:
            found: whole tensors that the call made, by kind and name.
        """
        # The second call writes other constants than the first: a counter that is read is one more.
        state, known = self._state, state_of(self._model)
        self._state = self._later
        slots = Slots(self._model)
        before, shared = slots.signature(state.constants), slots.shared()
        with torch.no_grad():
            self._copy_tensors(found)
            count = sum(kind == "result" for kind, _ in found)
            apply(self._model, state.writes, [found.get(("result", str(i))) for i in range(count)])
        after = state_of(self._model)
        written = {n: v for n, v in after.items() if n not in known or not is_same(known[n], v)}
        # As the session decides: with other Python state, the next call may need a graph of its own.
        changed = differences(before, slots.signature(state.constants), state.counted) or slots.shared() != shared
        return written, self._model if changed else None

    def _copy_tensors(self, found: Mapping[Key, torch.Tensor]) -> None:
        """Write the new values of buffers and parameters in place, as calls do; or assign, if the model does."""
        parameters, buffers = dict(self._model.named_parameters()), state_tensors(self._model)
        for (kind, name), value in found.items():
            if kind == "buffer" and name in self._program.state.assigned:
                path, _, attribute = name.rpartition(".")
                self._model.get_submodule(path)._buffers[attribute] = value.clone()
            elif kind in ("buffer", "parameter"):
                (buffers if kind == "buffer" else parameters)[name].copy_(value)
