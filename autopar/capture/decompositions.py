"""Operators that are traced as their parts: simpler to split, or the same whatever device the plan is made on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar._torch_compat import get_decompositions
from autopar.errors import CaptureError

aten = torch.ops.aten

# Composite operators that are simpler to split as their parts: losses, cross-entropy with ignored labels, biases.
_DECOMPOSED = [aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward]
_DECOMPOSED += [aten.nll_loss2d_backward, aten.std_mean, aten.var_mean, aten.addcmul, aten.addcdiv]
_DECOMPOSED += [
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
]
_DECOMPOSED += [aten.huber_loss_backward, aten.binary_cross_entropy_with_logits, aten.xlogy]
_DECOMPOSED += [aten.log_sigmoid_forward, aten.log_sigmoid_backward]
_DECOMPOSED += [aten.soft_margin_loss, aten.soft_margin_loss_backward, aten._weight_norm_interface]
_DECOMPOSED += [aten.dist, aten.trace, aten.block_diag, aten.take, aten.zero]
_DECOMPOSED += [aten.split_with_sizes_copy, aten.unfold_copy, aten.unbind_copy, aten.unsafe_split]
_DECOMPOSED += [aten._unsafe_masked_index, aten._unsafe_masked_index_put_accumulate, aten._batch_norm_no_update]
_DECOMPOSED += [aten._fused_rms_norm, aten._fused_rms_norm_backward]
_DECOMPOSED += [aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward, aten.miopen_batch_norm_backward]
_DECOMPOSED += [aten._batch_norm_with_update, aten._batch_norm_with_update_functional, aten.batch_norm_backward]


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients in ``g * v / |v|``, the norm over all dims but ``dim``; torch decomposes the forward only."""
    along = (grad * v).sum([d for d in range(v.ndim) if d != dim], keepdim=True) / norms
    # Salimans and Kingma, "Weight Normalization", 2016 (arXiv 1602.07868), equation 3.
    return g / norms * (grad - v * (along / norms)), along


def _with_addend(product: Any) -> Callable[..., torch.Tensor]:
    """``beta * addend + alpha * product(a, b)`` in the dtype of the tensors; torch's own computes in float32."""

    def decomposed(addend: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        result = product(a, b) if alpha == 1 else product(a, b) * alpha
        if beta == 0:  # what the addend holds does not matter then, not even NaN
            return result
        return result + (addend if beta == 1 else addend * beta)

    return decomposed


def _put(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    flat = aten.index_put(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return flat.reshape(x.shape)  # type: ignore[no-any-return]


SUM, MEAN, LARGEST = 0, 1, 2
"""Modes of ``embedding_bag``."""


def _bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """Rows of the table, added up by bag: the gradient of an embedding is such a sum.

    The operator's own saved tensors exist or do not, as its fast paths go; these always do: the bag of each row, and
    the number of rows in each bag. Maxima stay with the operator.
    """
    if mode == LARGEST or sparse:
        return NotImplemented
    bags = offsets.shape[0] - include_last_offset
    # Which bag each row is in: a running count of the bags that have begun; empty bags begin where the next one does.
    begins = aten.index_add(offsets.new_zeros(indices.shape[0] + 1), 0, offsets[:bags], aten.ones_like(offsets[:bags]))
    bag_of = begins.cumsum(0)[:-1] - 1
    counted = (indices != padding_idx).to(weight.dtype)
    rows = aten.embedding(weight, indices) * (counted * _weights(per_sample_weights)).unsqueeze(-1)
    # The gradient of an embedding adds up rows by number, and its rule knows how to split that.
    output = aten.embedding_dense_backward(rows, bag_of, bags, -1, False)
    sizes = aten.embedding_dense_backward(counted.unsqueeze(-1), bag_of, bags, -1, False).squeeze(-1)
    if mode == MEAN:
        output = output / sizes.clamp_min(1).unsqueeze(-1)
    return output, bag_of, sizes, sizes


def _weights(per_sample_weights: torch.Tensor | None) -> Any:
    return 1 if per_sample_weights is None else per_sample_weights


def _bag_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_of: torch.Tensor,
    sizes: torch.Tensor,
    largest: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """The gradient of the table from what the forward saved; ``largest``: rows of the maxima."""
    if sparse:
        return NotImplemented
    if mode == LARGEST:
        # An empty bag has no largest row: what the kernel left there names none.
        some = (sizes > 0).unsqueeze(-1)
        return aten.scatter_add(grad.new_zeros(num_weights, grad.shape[1]), 0, largest * some, grad * some)
    if mode == MEAN:
        grad = grad / sizes.clamp_min(1).unsqueeze(-1)
    rows = aten.embedding(grad, bag_of)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return aten.embedding_dense_backward(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


def _bag_weights_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_of: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> torch.Tensor:
    products = (aten.embedding(grad, bag_of) * aten.embedding(weight, indices)).sum(-1)
    return products * (indices != padding_idx)  # type: ignore[no-any-return]


def _by_storage(like: torch.Tensor, fill: Callable[[list[int], list[int]], torch.Tensor]) -> torch.Tensor:
    """What fills a tensor in the order of its elements in memory: ``fill(shape, order)`` does, of a row-major one."""
    order = sorted(range(like.ndim), key=like.stride().__getitem__, reverse=True)  # stable
    made = fill([like.shape[d] for d in order], order)
    return made.permute(sorted(range(like.ndim), key=order.__getitem__))


def _bernoulli(x: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """``x.bernoulli_(p)``, which draws in the order of storage; the functional operator's result is row-major.

    `Intercepts` sees to it that a model's own ``torch.bernoulli(x, p)`` comes here with a row-major ``x``.
    """
    # What has elements in common is not written to: under vmap this is of a new tensor, which is row-major.
    shared = any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride(), strict=True))
    if shared or list(x.stride()) == sorted(x.stride(), reverse=True):
        return NotImplemented
    return _by_storage(x, lambda _, order: aten.bernoulli.p(x.permute(order), p, generator=generator))


def _bernoulli_of_each(x: torch.Tensor, p: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    """``x.bernoulli_(p)`` with a tensor of chances."""
    chances = p.expand(x.shape)
    drawn = _by_storage(x, lambda _, order: aten.bernoulli.default(chances.permute(order), generator=generator))
    return drawn.to(x.dtype)


def _random_from(x: torch.Tensor, low: int, high: int | None, *, generator: Any = None) -> Any:
    """``x.random_(low, high)``; the name of its operator, ``from``, is no attribute that generated code can read."""
    if high is None:
        raise CaptureError("random_(from, None) draws up to the largest number of the dtype; give `to`, too")
    options: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    if generator is not None:
        return _by_storage(
            x, lambda shape, _: aten.randint.low_generator(low, high, shape, generator=generator, **options)
        )
    return _by_storage(x, lambda shape, _: aten.randint.low(low, high, shape, **options))


def _det(a: torch.Tensor) -> Any:
    """The determinant of real matrices that are not row-major; its kernel factorizes row-major ones transposed.

    The gradient's formula asks the strides of the trace which of both it did. Here factors are of the matrix itself.
    """
    if a.is_complex() or a.is_contiguous():
        return NotImplemented
    factors, pivots, _ = aten.linalg_lu_factor_ex(a)
    return factors.diagonal(0, -2, -1).prod(-1) * _sign(pivots, a.dtype), factors, pivots


def _slogdet(a: torch.Tensor) -> Any:
    """Sign and logarithm of the determinant, as `_det`."""
    if a.is_complex() or a.is_contiguous():
        return NotImplemented
    factors, pivots, _ = aten.linalg_lu_factor_ex(a)
    diagonal = factors.diagonal(0, -2, -1)
    return diagonal.sgn().prod(-1) * _sign(pivots, a.dtype), diagonal.abs().log().sum(-1), factors, pivots


def _sign(pivots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of the permutation that LAPACK's pivots, which count from 1, are."""
    rows = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return 1 - 2 * ((pivots != rows).sum(-1) % 2).to(dtype)


_OWN_DECOMPOSITIONS = {
    aten._linalg_det.default: _det,
    aten._linalg_slogdet.default: _slogdet,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli_of_each,
    getattr(aten.random, "from"): _random_from,
    aten.addmm.default: _with_addend(aten.mm),
    aten.baddbmm.default: _with_addend(aten.bmm),
    aten.addmv.default: _with_addend(aten.mv),
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.put.default: _put,
    aten._embedding_bag.default: _bag,
    aten._embedding_bag_forward_only.default: _bag,
    aten._embedding_bag_backward.default: _bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: _bag_weights_backward,
}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The operators that are traced as their parts, with what they become."""
    # Ours last: they replace torch's of the same operator.
    table: Any = get_decompositions(_DECOMPOSED)
    return {**table, **_OWN_DECOMPOSITIONS}
