"""Windows of a tensor (``torch.Tensor.unfold``) that may be written to.

Where a window is written to, a trace has zeros for what no window covers. As views of other kinds most windows with
gaps are right; the others are refused in `autopar.capture.functions.refused`.
"""

from __future__ import annotations

import torch


def unfold(tensor: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    """``torch.Tensor.unfold``, as views that lose nothing of the tensor where they are written to."""
    length = tensor.shape[dimension] if tensor.ndim else 0
    if not 0 < size <= min(step, length):  # windows that overlap are not written to
        return tensor.unfold(dimension, size, step)
    d, count = dimension % tensor.ndim, (length - size) // step + 1
    if count == 1 or size == step:
        return tensor.narrow(d, 0, count * size).unfold(d, size, size)
    if size == 1:
        return tensor[(slice(None),) * d + (slice(None, None, step),)].unsqueeze(-1)
    if count * step > length:
        return tensor.unfold(dimension, size, step)
    whole = tensor.narrow(d, 0, count * step)
    steps: torch.Tensor = torch.unflatten(whole, d, (count, step))
    return steps.narrow(d + 1, 0, size).movedim(d + 1, -1)
