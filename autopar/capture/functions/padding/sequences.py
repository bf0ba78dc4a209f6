"""`pack_padded_sequence` in a trace: sequences stay padded, and recurrent layers keep a sequence's state at its end.

How many steps there are of all sequences, and which rows of packed data are whose, depends on the lengths. A graph has
all positions of all sequences, and takes the state from before the step where a sequence is over. What is computed of
padding reaches nothing: neither states, nor outputs, nor gradients. With lengths as one device has them, outputs and
states are those of packed sequences, in the order of the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn

from autopar._torch_compat import is_traced
from autopar.capture.origins import user_frame
from autopar.errors import CaptureError

Check = Callable[[Tensor, str, str], None]
"""Checks values after a step, given a condition of samples, a function, and what it was given if the check fails."""

_STATES = {"LSTM": 2, "GRU": 1, "RNN_TANH": 1, "RNN_RELU": 1}
_PACK, _PAD = "torch.nn.utils.rnn.pack_padded_sequence", "torch.nn.utils.rnn.pad_packed_sequence"


class PaddedSequence(rnn.PackedSequence):
    """Stands for a packed sequence of a batch whose lengths are not known.

    Attributes:
        rows: ``[batch, time, ...]``, zeros behind each sequence.
        lengths: ``[batch]``.
        checks: that no condition of samples holds, and that one does for some sample.
    """

    rows: Tensor
    lengths: Tensor
    checks: tuple[Check, Check]

    def __new__(cls, rows: Tensor, lengths: Tensor, checks: tuple[Check, Check]) -> PaddedSequence:
        """Without data: nobody may read what `PackedSequence` has."""
        own = tuple.__new__(cls, (None,) * 4)
        own.rows, own.lengths, own.checks = rows, lengths, checks
        return own

    def __init__(self, *_: Any) -> None:
        """All is done."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Refuse to read it.

        Raises:
            CaptureError: always.
        """
        file, line = user_frame()
        raise CaptureError(
            "the model, or a forward hook on a layer, reads or returns the data of a packed sequence at "
            f"{file}:{line}: how many rows it has depends on the lengths of the batch, and a graph has it padded; do "
            "that to the padded sequences, before pack_padded_sequence or behind pad_packed_sequence"
        )

    __getitem__ = __iter__ = to = _refuse
    data = batch_sizes = sorted_indices = unsorted_indices = is_cuda = property(_refuse)

    @property
    def valid(self) -> Tensor:
        """Where sequences are not over: ``[batch, time]``."""
        return _valid(self.rows, self.lengths)

    def replace(self, rows: Tensor) -> PaddedSequence:
        """Other numbers for each step."""
        return PaddedSequence(rows, self.lengths, self.checks)


@contextlib.contextmanager
def padded_sequences(none: Check, some: Check) -> Iterator[None]:
    """While it lasts, sequences of traced lengths are not packed.

    Args:
        none: checks that a condition holds for no sample.
        some: checks that it holds for one.
    """
    # The functions' code, not their names: models import them by name.
    codes = {f: f.__code__ for f in (rnn.pack_padded_sequence, rnn.pad_packed_sequence)}
    kinds: tuple[Any, ...] = (nn.LSTM, nn.GRU, nn.RNN)
    forwards = {kind: kind.forward for kind in kinds}
    _entered.append((_copy(rnn.pack_padded_sequence), _copy(rnn.pad_packed_sequence), (none, some)))
    rnn.pack_padded_sequence.__code__, rnn.pad_packed_sequence.__code__ = _pack.__code__, _pad.__code__
    for kind in kinds:
        kind.forward = _forward_of(forwards[kind])
    try:
        yield
    finally:
        _entered.pop()
        for function, code in codes.items():
            function.__code__ = code
        for kind, forward in forwards.items():
            kind.forward = forward


_entered: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Check, Check]]] = []
"""Torch's own functions, and the checks, while sequences are not packed."""


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with its code as it is now."""
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


def _pack(input, lengths, batch_first=False, enforce_sorted=True):  # type: ignore[no-untyped-def]
    # Runs with the names of torch's module.
    from autopar.capture.functions.padding.sequences import packed

    return packed(input, lengths, batch_first, enforce_sorted)


def _pad(sequence, batch_first=False, padding_value=0.0, total_length=None):  # type: ignore[no-untyped-def]
    from autopar.capture.functions.padding.sequences import unpacked

    return unpacked(sequence, batch_first, padding_value, total_length)


def packed(input: Tensor, lengths: Any, batch_first: bool, enforce_sorted: bool) -> Any:
    """``pack_padded_sequence`` of sequences ``[batch, time, ...]``, or ``[time, batch, ...]`` without ``batch_first``.

    Raises:
        RuntimeError: there are not as many lengths as sequences.
    """
    pack, _, checks = _entered[-1]
    if not is_traced(input):
        return pack(input, lengths, batch_first, enforce_sorted)
    rows = input if batch_first else input.transpose(0, 1)
    lengths = torch.as_tensor(lengths).to(torch.int64)
    if lengths.shape != rows.shape[:1]:
        raise RuntimeError(
            f"Expected `len(lengths)` to be equal to batch_size, but got {lengths.numel()} (batch_size={len(rows)})"
        )
    checks[0](lengths <= 0, _PACK, "lengths that are not positive")
    checks[0](lengths > rows.shape[1], _PACK, f"lengths above the {rows.shape[1]} steps that there are")
    # Whatever is in the padding, be it NaN.
    rows = torch.where(_like(_valid(rows, lengths), rows), rows, 0)
    return PaddedSequence(rows, lengths, checks)


def unpacked(sequence: Any, batch_first: bool, padding_value: float, total_length: int | None) -> Any:
    """``pad_packed_sequence``: what `packed` gave, and the lengths on a CPU.

    Raises:
        ValueError: the total length is less than that of the padded sequences.
    """
    _, pad, _ = _entered[-1]
    if not isinstance(sequence, PaddedSequence):
        return pad(sequence, batch_first, padding_value, total_length)
    rows, steps = sequence.rows, sequence.rows.shape[1]
    if total_length is None:
        fewer = (
            f"no sequence of all {steps} steps, so that it gives fewer: cut the batch to its longest sequence, or pass "
        )
        sequence.checks[1](sequence.lengths == steps, _PAD, f"{fewer}total_length={steps}")
    elif total_length < steps:
        sequence.checks[0](sequence.lengths > total_length, _PAD, f"sequences longer than total_length={total_length}")
        rows = rows[:, :total_length]
    valid = _like(_valid(rows, sequence.lengths), rows)
    rows = torch.where(valid, rows, padding_value)
    if total_length is not None and total_length > steps:
        rows = functional.pad(rows, (0, 0) * (rows.ndim - 2) + (0, total_length - steps), value=padding_value)
    return rows if batch_first else rows.transpose(0, 1), sequence.lengths.cpu()


def _valid(rows: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(rows.shape[1], device=rows.device) < lengths.to(rows.device).unsqueeze(1)


def _like(valid: Tensor, rows: Tensor) -> Tensor:
    """``[batch, time]`` with the other dims of size 1."""
    return valid.reshape(*valid.shape, *(1,) * (rows.ndim - 2))


def _forward_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A recurrent layer's forward; what is not padded goes to torch's."""

    def call(module: Any, input: Any, hx: Any = None) -> Any:
        if not isinstance(input, PaddedSequence):
            return forward(module, input, hx)
        return _recurrent(module, input, hx)

    return call


def _recurrent(module: Any, sequence: PaddedSequence, hx: Any) -> Any:
    """All layers and directions; states are ``[layers * directions, batch, size]``."""
    rows, valid, ways = sequence.rows, sequence.valid, 2 if module.bidirectional else 1
    given = None if hx is None else hx if module.mode == "LSTM" else (hx,)
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        outputs = []
        for way in range(ways):
            names = module._all_weights[layer * ways + way]
            weights = {name.split("_l")[0]: getattr(module, name) for name in names}
            start = _start(module, rows, weights) if given is None else tuple(s[layer * ways + way] for s in given)
            output, end = _direction(module.mode, rows, valid, weights, start, backwards=way == 1)
            outputs.append(output)
            ends.append(end)
        rows = torch.cat(outputs, -1) if ways == 2 else outputs[0]
        if module.dropout and layer < module.num_layers - 1:
            rows = functional.dropout(rows, module.dropout, module.training)
    states = tuple(torch.stack(own) for own in zip(*ends, strict=True))
    return sequence.replace(rows), states if module.mode == "LSTM" else states[0]


def _start(module: Any, rows: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
    sizes = (weights["weight_hh"].shape[1], module.hidden_size)[: _STATES[module.mode]]
    return tuple(rows.new_zeros(rows.shape[0], n) for n in sizes)


def _direction(
    mode: str,
    rows: Tensor,
    valid: Tensor,
    weights: dict[str, Tensor],
    states: Sequence[Tensor],
    *,
    backwards: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction: its output, zeros in the padding, and the states at the sequences' ends.

    Backwards, a sequence begins with its last step: until then its state is the first one.
    """
    own = functional.linear(rows, weights["weight_ih"], weights.get("bias_ih"))
    outputs: list[Tensor] = []
    steps = range(rows.shape[1])
    for t in reversed(steps) if backwards else steps:
        new = _step(mode, own[:, t], states, weights)
        going = valid[:, t].unsqueeze(1)
        states = tuple(torch.where(going, n, s) for n, s in zip(new, states, strict=True))
        outputs.append(torch.where(going, new[0], 0))
    return torch.stack(outputs[::-1] if backwards else outputs, 1), tuple(states)


def _step(mode: str, own: Tensor, states: Sequence[Tensor], weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The states after a step, by torch's formulas (``aten/src/ATen/native/RNN.cpp``)."""
    hidden = states[0]
    recurrent = functional.linear(hidden, weights["weight_hh"], weights.get("bias_hh"))
    if mode == "LSTM":
        enter, forget, cell, leave = (own + recurrent).chunk(4, 1)
        kept = forget.sigmoid() * states[1] + enter.sigmoid() * cell.tanh()
        hidden = leave.sigmoid() * kept.tanh()
        return (hidden if "weight_hr" not in weights else functional.linear(hidden, weights["weight_hr"])), kept
    if mode == "GRU":
        (reset, update, new), (of_reset, of_update, of_new) = own.chunk(3, 1), recurrent.chunk(3, 1)
        new = (new + (reset + of_reset).sigmoid() * of_new).tanh()
        return ((hidden - new) * (update + of_update).sigmoid() + new,)
    total = own + recurrent
    return (total.tanh() if mode == "RNN_TANH" else total.relu(),)
