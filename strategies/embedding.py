"""Embedding tables, split along the vocabulary, the hidden dim, or the tokens."""

from typing import Any

import torch

from autopar.rules.rule import ANY, ROW_MAJOR, Lowering, Padding, Rule, Spec, letters, rule

aten = torch.ops.aten


def _local(context: Any, indices: Any) -> tuple[Any, Any]:
    """Row numbers within this device's block of the vocabulary, and which are outside it."""
    size = context.local_size("v")
    local = aten.sub.Tensor(indices, context.axis_index() * size)
    return local, aten.logical_or.default(aten.lt.Scalar(local, 0), aten.ge.Scalar(local, size))


def _build_embedding(context: Any, weight: Any, indices: Any, padding_idx: int = -1, *_: Any) -> Any:
    local, outside = _local(context, indices)
    # Row 0 is there on every device; what other devices' tokens read of it is zeroed.
    rows = aten.embedding.default(weight, aten.masked_fill.Scalar(local, outside, 0))
    return aten.masked_fill.Scalar(rows, aten.unsqueeze.default(outside, -1), 0)


@rule(aten.embedding.default)
def embedding(
    weight: Spec, indices: Spec, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Rule:
    """Rows of a table; with the vocabulary split, each device gives the rows it has and zeros elsewhere."""
    tokens = letters(indices.ndim)
    return Rule(
        f"vh,{tokens or '.'}->{tokens}h",
        reduce="v",
        linear=((0,),),
        lower={"v": Lowering(_build_embedding)},
        padded={"v": Padding()},  # no token names a row there
    )


@rule(aten.embedding_renorm.default)
def embedding_renorm(weight: Spec, indices: Spec, max_norm: float, norm_type: float) -> Rule:
    """Rows that tokens name are scaled down where they are longer: all tokens and whole rows decide."""
    tokens = letters(indices.ndim)
    return Rule(f"vh,{tokens or '.'}->vh", blocked=f"vh{tokens}", padded=None)


def _build_backward(
    context: Any, grad: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    local, outside = _local(context, indices)
    # In global numbers: the local row of this number is another one.
    if padding_idx >= 0:
        outside = aten.logical_or.default(outside, aten.eq.Scalar(indices, padding_idx))
    # Rows of other devices go to one row too many, which is cut off.
    size = context.local_size("v")
    spill = aten.masked_fill.Scalar(local, outside, size)
    rows = aten.embedding_dense_backward.default(grad, spill, size + 1, -1, scale_grad_by_freq)
    return aten.slice.Tensor(rows, 0, 0, size)


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    grad: Spec, indices: Spec, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Rule:
    """Sum of the gradients of each row's uses."""
    tokens = letters(indices.ndim)
    return Rule(
        f"{tokens}h,{tokens or '.'}->vh",
        reduce="" if scale_grad_by_freq else tokens,
        blocked=tokens if scale_grad_by_freq else "",  # it counts the uses of a row over the whole batch
        linear=((0,),),
        scaled={2: "v"},
        lower={"v": Lowering(_build_backward)},
        padded={"v": Padding(output=0.0)},
    )


@rule(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    weight: Spec, indices: Spec, offsets: Spec, scale_grad_by_freq: bool = False, mode: int = 0, *args: Any
) -> Rule:
    """Largest elements of rows, by bag (sums and means are decomposed). Columns are free; rows and bags are whole."""
    weights = sum(isinstance(a, Spec) for a in args)
    outputs = f"1h,1,1,{'1h' if mode == 2 else '1'}"
    return Rule(f"1h,1,1{',1' * weights}->{outputs}", keep="h", strides=(ANY, *[ROW_MAJOR] * (2 + weights)))
