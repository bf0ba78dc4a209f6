"""Functions by their formulas: what torch traces in their place is wrong, looks at values, or is of one device.

Found by comparing the graphs of torch's own sample calls with eager mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributions import constraints
from torch.nn import functional

from autopar._torch_compat import is_transformed
from autopar.capture.functions.windows import unfold
from autopar.ir.ops.sequence.ctc import ctc_loss, torchs_ctc_loss

Refuse = Callable[[torch.Tensor, str, str], None]
"""Checks that nothing of a tensor is true, given it, the function and its name of such values."""


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """RMS norm as torch computes it on a CPU (``rms_norm_composite``)."""
    half = input.dtype in (torch.float16, torch.bfloat16)
    wide = input.to(torch.float32 if half else input.dtype)
    dims = list(range(-1, -1 - len(normalized_shape), -1))
    mean = wide.pow(2).mean(dims, keepdim=True)
    scaled = wide * mean.add(torch.finfo(wide.dtype).eps if eps is None else eps).rsqrt()
    return (scaled if weight is None else scaled * weight).type_as(input)


def multilabel_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Multi-label margin loss; what torch traces counts the classes behind the first -1, too."""
    if size_average is not None or reduce is not None:
        reduction = _reduction(size_average, reduce)
    classes = input.shape[-1] if input.ndim else 1
    rows, named = input.reshape(-1, classes), target.reshape(-1, classes)
    order = torch.arange(classes, device=target.device)
    given = order < torch.where(named == -1, order, classes).amin(-1, keepdim=True)
    is_target = (order == torch.where(given, named, -1).unsqueeze(-1)).any(-2)
    own = rows.gather(-1, torch.where(given, named, 0))
    # A rectifier, whose gradient at 0 is 0, as the kernel's.
    margins = torch.relu(1 - own.unsqueeze(-1) + rows.unsqueeze(-2))
    counted = given.unsqueeze(-1) & ~is_target.unsqueeze(-2)
    losses = torch.where(counted, margins, 0).sum((-2, -1)) / classes
    if reduction == "none":
        return losses.reshape(input.shape[:-1])
    return losses.mean() if reduction == "mean" else losses.sum()


@contextmanager
def checked_matrices() -> Iterator[None]:
    """While it lasts, definite matrices are checked at once: torch looks first whether they are symmetric."""
    kinds: list[Any] = [type(constraints.positive_definite), type(constraints.positive_semidefinite)]
    symmetric: Any = constraints.symmetric
    before = [kind.check for kind in kinds]
    kinds[0].check = lambda _, value: symmetric.check(value) & torch.linalg.cholesky_ex(value).info.eq(0)
    kinds[1].check = lambda _, value: symmetric.check(value) & torch.linalg.eigvalsh(value).ge(0).all(-1)
    try:
        yield
    finally:
        for kind, check in zip(kinds, before, strict=True):
            kind.check = check


def _reduction(size_average: bool | None, reduce: bool | None) -> str:
    """What the arguments of old mean: both are true unless they are given."""
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Covariance of rows, ``aten::cov``; torch looks at the number that it divides by."""
    rows = input.reshape(1, -1) if input.ndim < 2 else input
    given = [w for w in (fweights, aweights) if w is not None]
    weights = given[0] * given[1] if len(given) == 2 else given[0] if given else None
    total: Any = rows.shape[1] if weights is None else weights.sum()
    centered = rows - (rows if weights is None else rows * weights).sum(1, keepdim=True) / total
    divisor = total - correction
    if weights is not None and aweights is not None and correction:
        divisor = total - correction * (weights * aweights).sum() / total
    product = centered @ (centered if weights is None else centered * weights).mH
    found: torch.Tensor = product / (max(divisor, 0) if weights is None else divisor.clamp_min(0))
    return found.squeeze()


def corrcoef(input: torch.Tensor) -> torch.Tensor:
    """Correlation of rows, ``aten::corrcoef``."""
    covariance = cov(input)
    if covariance.ndim == 0:
        return covariance / covariance
    diagonal = covariance.diagonal()
    deviations = (diagonal.real if diagonal.is_complex() else diagonal).sqrt()
    found = covariance / deviations.view(-1, 1) / deviations.view(1, -1)
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)


def gaussian_nll_loss(
    refuse: Refuse,
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Gaussian negative log-likelihood as in torch, which looks at the variances: here they are checked after the step.

    Args:
        refuse: what checks that nothing of a tensor is true, given it, the function and its name of such values.
        input: means.
        target: samples.
        var: variances; a dim of size 1, or none, for the last one of ``input``.
        full: with its constant.
        eps: the least variance.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.
    """
    if isinstance(var, torch.Tensor):
        refuse(var < 0, "torch.nn.functional.gaussian_nll_loss", "negative variances")
        spread = var.unsqueeze(-1) if var.shape == input.shape[:-1] else var
    else:
        spread = torch.full_like(input, var)
    different = [(n, m) for n, m in zip(input.shape, spread.shape, strict=False) if n != m]
    if input.ndim != spread.ndim or sum(m for _, m in different) > 1:
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    # The gradient goes past the bound, as in torch.
    bounded = spread.clone()
    with torch.no_grad():
        bounded.clamp_(min=eps)
    loss = 0.5 * (torch.log(bounded) + (input - target) ** 2 / bounded)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _of_row_major(function: Callable[..., Any]) -> Callable[..., Any]:
    """A determinant of row-major matrices, as its rule has them: others have gradients of another formula."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items() if k != "out"}
        return function(*(a.contiguous() for a in args), **{**kwargs, **named})

    return call


DETERMINANTS = tuple(
    getattr(space, name)
    for space in (torch, torch.Tensor, torch.linalg)
    for name in ("det", "slogdet", "logdet")
    if hasattr(space, name)
)


def fill_diagonal_(tensor: torch.Tensor, fill_value: float, wrap: bool = False) -> torch.Tensor:
    """``torch.Tensor.fill_diagonal_``, which takes a view by strides: of a view that cannot be traced."""
    if tensor.ndim != 2 or (wrap and tensor.shape[0] > tensor.shape[1]):
        return tensor.fill_diagonal_(fill_value, wrap)
    tensor.diagonal().fill_(fill_value)
    return tensor


def polygamma_(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """``torch.Tensor.polygamma_``, which a trace takes for an operator of the user's."""
    return tensor.copy_(torch.polygamma(n, tensor.clone()))


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Sums and means of bags of one size, ``input [bag, row]``, of which each device may have some.

    The kernel has all rows in one dim and finds bags by where they begin: other bags stay with it.
    """
    of_one_size = input.ndim == 2 and input.numel() and offsets is None and not input.is_floating_point()
    weighs = per_sample_weights is None or (mode == "sum" and per_sample_weights.shape == input.shape)
    rows = len(weight)
    padding = rows + padding_idx if padding_idx is not None and padding_idx < 0 else padding_idx
    known = mode in ("sum", "mean") and (padding is None or 0 <= padding < rows)
    if not (of_one_size and weighs and known) or max_norm is not None or sparse:
        return functional.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    found = functional.embedding(input, weight, padding, scale_grad_by_freq=scale_grad_by_freq)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    if padding is None:
        return found.sum(1) if mode == "sum" else found.mean(1)
    left_out = (input == padding).unsqueeze(-1)
    total = found.masked_fill(left_out, 0).sum(1)
    return total if mode == "sum" else total / (~left_out).sum(1).clamp_min(1)


def bincount(
    refuse: Refuse,
    input: torch.Tensor,
    weights: torch.Tensor | None = None,
    minlength: int = 0,
) -> torch.Tensor:
    """How often each number comes up, ``aten::bincount``; its length depends on the largest unless ``minlength`` is.

    Args:
        refuse: as of `gaussian_nll_loss`.
        input: whole numbers, [number].
        weights: of each number; default: 1.
        minlength: how many counts there are; with 0 torch looks at the values.
    """
    if minlength <= 0:
        found: torch.Tensor = torch.ops.aten.bincount.default(input, weights, minlength)
        return found
    outside = (input < 0) | (input >= minlength)
    refuse(outside, "torch.bincount", f"numbers outside of 0 to {minlength - 1}, its minlength less one,")
    kept = torch.int64 if weights is None else weights.dtype if weights.dtype == torch.float32 else torch.float64
    counted = torch.ones_like(input, dtype=kept) if weights is None else weights.detach().to(kept)
    bins = torch.zeros(minlength, dtype=kept, device=input.device)
    return bins.index_add(0, torch.where(outside, 0, input).long(), counted.masked_fill(outside, 0))


def _masked_scatter(refuse: Refuse, tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``aten::masked_scatter``, see `_chosen`."""
    found = None
    if not is_transformed(mask):
        found = _chosen(refuse, tensor, mask, source, "torch.masked_scatter", exact=False)
    return tensor.masked_scatter(mask, source) if found is None else found


def _masked_scatter_(refuse: Refuse, tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The same, in place."""
    found = None
    if not is_transformed(mask) and _shape(tensor, mask) == tensor.shape:
        found = _chosen(refuse, tensor, mask, source, "torch.masked_scatter", exact=False)
    return tensor.masked_scatter_(mask, source) if found is None else tensor.copy_(found)


def _assigned(refuse: Refuse, tensor: torch.Tensor, index: Any, values: Any) -> None:
    """``tensor[mask] = values``; torch counts the places to trace the gradient of values."""
    parts: Any = index if isinstance(index, tuple) else (index,)
    while len(parts) > 1 and (parts[-1] is Ellipsis or (isinstance(parts[-1], slice) and parts[-1] == slice(None))):
        parts = parts[:-1]
    found = _by_mask(refuse, tensor, parts, values)
    if found is None:
        torch.Tensor.__setitem__(tensor, index, values)
    else:
        tensor.copy_(found)


def _by_mask(refuse: Refuse, tensor: torch.Tensor, parts: Sequence[Any], values: Any) -> torch.Tensor | None:
    """A tensor with values in the places of a mask; None: that is something else."""
    mask = parts[0] if len(parts) == 1 else None
    if not isinstance(mask, torch.Tensor) or is_transformed(mask) or is_transformed(tensor):
        return None
    if mask.dtype != torch.bool or not mask.ndim or mask.shape != tensor.shape[: mask.ndim]:
        return None
    rest = tensor.shape[mask.ndim :]
    shown = mask.reshape(mask.shape + (1,) * len(rest))
    if isinstance(values, int) or (isinstance(values, float) and tensor.is_floating_point()):
        return tensor.masked_fill(shown, values)
    if not isinstance(values, torch.Tensor) or is_transformed(values) or values.dtype != tensor.dtype:
        return None
    if _is_selected(values) or _is_selected(tensor):
        return None  # what a mask selects of another tensor: torch's own, see `autopar.capture.selected`
    rows = values.ndim - len(rest)
    own = values.shape[max(rows, 0) :]
    if rows > 1 or any(n not in (1, m) for n, m in zip(own, rest[len(rest) - len(own) :], strict=True)):
        return None
    if rows < 1 or values.shape[0] == 1:
        return torch.where(shown, values[0] if rows == 1 else values, tensor)
    source = values.expand(values.shape[:1] + rest)
    return _chosen(refuse, tensor, shown, source, "tensor[mask] = values", exact=True)


def _chosen(
    refuse: Refuse, tensor: torch.Tensor, mask: torch.Tensor, source: torch.Tensor, said: str, exact: bool
) -> torch.Tensor | None:
    """A tensor with the elements of another one, in order, in the places of a mask.

    Running counts of the mask say which element comes next, and each place reads it there; the operator itself needs
    all of the mask at once. Where a mask is the same along the last dims, as of tokens, rows are read.

    Args:
        refuse: as of `gaussian_nll_loss`.
        tensor: what is there elsewhere.
        mask: true where elements are put; it and the tensor broadcast.
        source: the elements.
        said: which function it is, for the error.
        exact: whether all elements must be put; else some may be left.

    Returns:
        None where torch's own operator is traced.
    """
    if _is_selected(source) or _is_selected(tensor):
        return None
    shape = _shape(tensor, mask)
    wide, ndim = mask.expand(shape), len(shape)
    while ndim > 1 and (shape[ndim - 1] == 1 or wide.stride(ndim - 1) == 0):
        ndim -= 1
    width = math.prod(shape[ndim:])
    count = source.numel() // width if width else 0
    if mask.dtype != torch.bool or tensor.dtype != source.dtype or tensor.is_complex() or not (count and ndim):
        return None
    rows = source.reshape(-1)[: count * width].reshape(count, width)
    there = wide
    for _ in shape[ndim:]:
        there = there.select(-1, 0)
    order = _counted(there)
    lost = there & (order > count)
    wrong = (there.sum() != count, "another number of") if exact else (lost, "more")
    refuse(wrong[0], said, f"{count} rows for {wrong[1]} places")
    at = (order - 1).clamp(0, count - 1)
    read = functional.embedding(at, rows) if rows.is_floating_point() else rows[at]
    return torch.where(wide, read.reshape(shape), tensor).contiguous()


def _is_selected(tensor: torch.Tensor) -> bool:
    """Whether a mask says how many rows it has."""
    return any(isinstance(n, torch.SymInt) for n in tensor.shape)


def _shape(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Size:
    shapes: Any = (tensor.shape, mask.shape)
    found: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    return found


def _counted(mask: torch.Tensor) -> torch.Tensor:
    """Running counts, or sums, in the order of elements; dim by dim, so that each may be split."""
    within = mask.cumsum(-1)
    if mask.ndim == 1:
        return within
    each = mask.sum(-1)
    return within + (_counted(each) - each).unsqueeze(-1)


CHECKED: dict[Any, Callable[..., Any]] = {
    functional.gaussian_nll_loss: gaussian_nll_loss,
    torch.bincount: bincount,
    torch.Tensor.bincount: bincount,
    torch.masked_scatter: _masked_scatter,
    torch.Tensor.masked_scatter: _masked_scatter,
    torch.Tensor.masked_scatter_: _masked_scatter_,
    torch.Tensor.__setitem__: _assigned,
}
"""The same of those whose values are checked after the step."""


BY_FORMULA: dict[Any, Callable[..., Any]] = {
    functional.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    functional.multilabel_margin_loss: multilabel_margin_loss,
    functional.embedding_bag: embedding_bag,
    functional.ctc_loss: ctc_loss,
    torch.ctc_loss: torchs_ctc_loss,
    torch.cov: cov,
    torch.Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    torch.Tensor.corrcoef: corrcoef,
    torch.Tensor.fill_diagonal_: fill_diagonal_,
    torch.Tensor.polygamma_: polygamma_,
    torch.Tensor.unfold: unfold,
    # Traced as copies: what is written to a part would not show in the tensor.
    torch.unsafe_chunk: torch.chunk,
    torch.Tensor.unsafe_chunk: torch.chunk,
    torch.unsafe_split: torch.split,
    torch.Tensor.unsafe_split: torch.split,
    torch.unsafe_split_with_sizes: torch.split,
    torch.Tensor.unsafe_split_with_sizes: torch.split,
    **{function: _of_row_major(function) for function in DETERMINANTS},
}
"""By function: what is traced in its place."""
