"""Connectionist temporal classification (Graves et al., 2006) of samples that are padded, each with its own lengths.

Torch's operator sizes what it saves by the longest target, a value that no graph knows. This one gives the losses
alone, and its backward pass computes again what torch's saves. Samples are apart, so both are split along these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.attention_kernels import register

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor lengths, Tensor target_lengths, int blank, bool zero_infinity"
_library.define(f"ctc({_ARGUMENTS}) -> Tensor")
_library.define(f"ctc_backward(Tensor grad, {_ARGUMENTS}) -> Tensor")

ctc = torch.ops.autopar.ctc.default
"""The loss of each sample.

Args:
    log_probs: logarithms of probabilities, ``[time, samples, classes]``.
    targets: ``[samples, n]``, of each sample ``target_lengths`` that count.
    lengths: of each sample, in time.
    target_lengths: of each sample.
    blank: the class of no target.
    zero_infinity: gradients of infinite losses are 0; the losses stay infinite.

Returns:
    ``[samples]``, in the dtype of ``log_probs``.
"""

ctc_backward = torch.ops.autopar.ctc_backward.default
"""The gradient of ``log_probs``, given that of the losses."""


def _ctc(
    log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    made = torch.ops.aten._ctc_loss.Tensor(log_probs, targets, lengths, target_lengths, blank, zero_infinity)
    losses: Tensor = made[0]
    return losses.contiguous()


def _ctc_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, blank: int,
    zero_infinity: bool,
) -> Tensor:  # fmt: skip
    arguments = log_probs, targets, lengths, target_lengths
    losses, alpha = torch.ops.aten._ctc_loss.Tensor(*arguments, blank, zero_infinity)
    made: Tensor = torch.ops.aten._ctc_loss_backward.Tensor(grad, *arguments, losses, alpha, blank, zero_infinity)
    return made.contiguous()


register(_library, "ctc", _ctc, lambda log_probs, *_: log_probs.new_empty(log_probs.shape[1:2]))
register(_library, "ctc_backward", _ctc_backward, lambda grad, log_probs, *_: log_probs.new_empty(log_probs.shape))


def _saved(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.numbers = inputs[4:]


def _differentiated(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ctc_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers), None, None, None, None, None


torch.library.register_autograd("autopar::ctc", _differentiated, setup_context=_saved, lib=_library)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`: the same losses and gradients.

    Args:
        log_probs: ``[time, samples, classes]``, or of one sample ``[time, classes]``.
        targets: ``[samples, n]``, or all of all samples behind each other, ``[n]``; of more, those behind do not count.
        input_lengths: of each sample: numbers, or a tensor.
        target_lengths: likewise.
        blank: the class of no target.
        reduction: ``"none"``, ``"mean"`` (of the losses by their targets' lengths) or ``"sum"``.
        zero_infinity: infinite losses are 0.

    Raises:
        ValueError: another reduction, or lengths of another number of samples, as torch's.
    """
    if reduction not in ("none", "mean", "sum", 0, 1, 2):
        raise ValueError(f"ctc_loss: reduction={reduction!r}: expected 'none', 'mean' or 'sum'")
    single = log_probs.ndim == 2
    if single:
        log_probs = log_probs.unsqueeze(1)
    device = log_probs.device
    lengths, counts = (torch.as_tensor(n, device=device).reshape(-1).long() for n in (input_lengths, target_lengths))
    if len(lengths) != log_probs.shape[1] or len(counts) != log_probs.shape[1]:
        raise ValueError(
            f"ctc_loss: input_lengths and target_lengths have {len(lengths)} and {len(counts)} entries: expected one "
            f"for each of {log_probs.shape[1]} samples"
        )
    if targets.ndim == 1:
        # No sample has more targets than there are.
        at = (counts.cumsum(0) - counts).unsqueeze(1) + torch.arange(targets.shape[0], device=targets.device)
        targets = targets[at.clamp_max(targets.shape[0] - 1)]
    losses: Tensor = ctc(log_probs.contiguous(), targets.contiguous(), lengths, counts, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction in ("mean", 1):
        return (losses / counts.clamp_min(1)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    return losses.squeeze(0) if single else losses


def torchs_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.ctc_loss`, which gives the loss of each sample unless it is told otherwise."""
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)


def in_front(tensor: Tensor, mask: Tensor) -> Tensor:
    """What a mask selects, as targets of `ctc_loss` behind each other; zeros behind make it as long as all are."""
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    values, chosen = tensor.expand(shape).reshape(-1), mask.expand(shape).reshape(-1)
    at = torch.where(chosen, chosen.cumsum(0) - 1, len(values))
    found: Tensor = values.new_zeros(len(values) + 1).scatter(0, at, values)
    return found[:-1]
