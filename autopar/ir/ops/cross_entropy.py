"""Cross-entropy of rows of logits without their softmax in memory: of each row its logit of the target, and one sum.

``log_softmax(x)[target]`` is ``x[target] - logsumexp(x)``, and its gradient in ``x`` is ``grad * (one_hot(target) -
exp(x - logsumexp(x)))``. Both are functions of the logits and a number a row, so nothing else of the logits' size is
saved: the forward reads the logits once, the backward reads them once and writes their gradient. That is the least.

Rows are computed some at a time, in blocks that stay in a device's cache: logits of 16 bits are widened there only, and
exponentials are never in memory as a whole. On a GPU a row is computed by one kernel, see
`autopar.ir.ops.cross_entropy_triton`; without triton, by those blocks.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.ir.ops.attention_kernels import wide_dtype

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("cross_entropy(Tensor logits, Tensor target, int? start) -> (Tensor, Tensor)")
_library.define(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor logsumexp, int? start, ScalarType dtype) "
    "-> Tensor"
)

cross_entropy = torch.ops.autopar.cross_entropy.default
"""The target's logit and the logarithm of the sum of exponentials of each row.

Args:
    logits: ``[..., classes]``.
    target: ``[..., 1]``, number of a class.
    start: the number of the first of these classes, where there are others on other devices; a target that is none of
        these has logit 0 then. None: these are all, and a target that is none of them is an error.

Returns:
    Both ``[..., 1]``, in float32 for logits of 16 bits. Their difference is the logarithm of the softmax there.
"""

cross_entropy_backward = torch.ops.autopar.cross_entropy_backward.default
"""The gradient of the logits, given that of the logarithm of the softmax at the targets, ``[..., 1]``."""

BLOCK_BYTES = {"cpu": 2**20, "cuda": 32 * 2**20}
"""Of a block of rows, in the dtype that it is computed in: what the second level of a device's cache holds, at most."""


def _rows_at_once(logits: Tensor) -> int:
    """How many rows of ``[rows, classes]`` make a block."""
    row = max(1, logits.shape[1] * wide_dtype(logits).itemsize)
    return max(1, BLOCK_BYTES.get(logits.device.type, BLOCK_BYTES["cuda"]) // row)


def _joined(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _local(target: Tensor, start: int | None, classes: int) -> tuple[Tensor, Tensor | None]:
    """Numbers among these classes, and which are of none of them."""
    if start is None:
        return target, None
    local = target - start
    outside = (local < 0) | (local >= classes)
    return local.masked_fill(outside, 0), outside


def _cross_entropy(logits: Tensor, target: Tensor, start: int | None) -> tuple[Tensor, Tensor]:
    x, wide = logits.reshape(-1, logits.shape[-1]), wide_dtype(logits)
    local, outside = _local(target.reshape(-1, 1), start, x.shape[1])
    try:
        picked = x.gather(1, local).to(wide)
    except RuntimeError as e:
        # As torch's own: on a GPU neither raises here.
        wrong = [t for t in local.flatten().tolist() if not 0 <= t < x.shape[1]]
        raise (IndexError(f"Target {wrong[0]} is out of bounds.") if wrong else e) from None
    if outside is not None:
        picked = picked.masked_fill(outside, 0.0)
    total = _total(x, wide, start is None)
    return picked.reshape(target.shape), total.reshape(target.shape)


def _total(x: Tensor, wide: torch.dtype, is_whole: bool) -> Tensor:
    if is_fused(x):
        from autopar.ir.ops.cross_entropy_triton import logsumexp

        return logsumexp(x if x.stride(1) == 1 else x.contiguous(), wide, is_whole)
    return _joined([_logsumexp(block.to(wide), is_whole) for block in torch.split(x, _rows_at_once(x))])


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_fused(x: Tensor) -> bool:
    """Whether one kernel computes a row: on a GPU, unless a compiler looks on, which takes operators of torch."""
    return x.is_cuda and type(x) is Tensor and _has_triton()


def _logsumexp(x: Tensor, is_whole: bool) -> Tensor:
    largest = x.amax(1, keepdim=True)
    # Of classes that all are minus infinity (such as padding) the sum is zero; other devices may have more.
    shift = largest if is_whole else largest.masked_fill(largest == -torch.inf, 0.0)
    return (x - shift).exp_().sum(1, keepdim=True).log_().add_(shift)


def _cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, start: int | None, dtype: torch.dtype
) -> Tensor:
    x, wide = logits.reshape(-1, logits.shape[-1]), wide_dtype(logits)
    local, outside = _local(target.reshape(-1, 1), start, x.shape[1])
    given, total = grad.reshape(-1, 1).to(wide), logsumexp.reshape(-1, 1)
    at_target = given if outside is None else given.masked_fill(outside, 0.0)
    if is_fused(x):
        from autopar.ir.ops.cross_entropy_triton import gradient

        rows_of = x if x.stride(1) == 1 else x.contiguous()
        return gradient(rows_of, total, given, local, at_target, dtype).reshape(logits.shape)
    rows = _rows_at_once(x)
    if len(x) <= rows and x.is_contiguous():  # the result is row-major
        return _gradient(x.to(wide), total, given, local, at_target).to(dtype).reshape(logits.shape)
    # Block by block into one tensor: a list of them, joined, would take twice the memory.
    found = x.new_empty(x.shape, dtype=dtype)
    for at in (slice(start, start + rows) for start in range(0, len(x), rows)):
        found[at] = _gradient(x[at].to(wide), total[at], given[at], local[at], at_target[at])
    return found.reshape(logits.shape)


def _gradient(x: Tensor, total: Tensor, given: Tensor, local: Tensor, at_target: Tensor) -> Tensor:
    return (x - total).exp_().mul_(given.neg()).scatter_add_(1, local, at_target)


def _fake(logits: Tensor, target: Tensor, start: int | None) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(logits)
    return logits.new_empty(target.shape, dtype=wide), logits.new_empty(target.shape, dtype=wide)


def _fake_backward(
    grad: Tensor, logits: Tensor, target: Tensor, logsumexp: Tensor, start: int | None, dtype: torch.dtype
) -> Tensor:
    return logits.new_empty(logits.shape, dtype=dtype)


for _name, _kernel, _shapes in (
    ("cross_entropy", _cross_entropy, _fake),
    ("cross_entropy_backward", _cross_entropy_backward, _fake_backward),
):
    _library.impl(_name, _kernel, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"autopar::{_name}", _shapes, lib=_library)

KERNELS = {cross_entropy: _cross_entropy, cross_entropy_backward: _cross_entropy_backward}
"""What the operators do, in operators of torch."""
