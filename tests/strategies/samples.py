"""Sample calls of every registered operator: small, in float64, with sizes that two devices divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from autopar.strategies import pointwise

from tests.strategies import stand_ins

aten = torch.ops.aten

@dataclass(frozen=True)
class Sample:
    """One call."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        def text(a: Any) -> str:
            if isinstance(a, torch.Tensor):
                return "x".join(map(str, a.shape)) or "scalar"
            return f"[{' '.join(map(text, a))}]" if isinstance(a, (list, tuple)) else str(a)

        named = [f"{k}={text(v)}" for k, v in self.kwargs.items()]
        return f"{str(self.target).removeprefix('aten.')}({','.join([*map(text, self.args), *named])})"


def call(target: Any, *args: Any, **kwargs: Any) -> Sample:
    """A sample, written like the call itself."""
    return Sample(target, args, kwargs)


_generator = torch.Generator()


def x(*shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=_generator)


def positive(*shape: int) -> torch.Tensor:
    """Random numbers in [0.1, 0.9]."""
    return torch.rand(shape, dtype=torch.float64, generator=_generator) * 0.8 + 0.1


def integer(high: int, *shape: int) -> torch.Tensor:
    """Random integers in [0, high)."""
    return torch.randint(high, shape, generator=_generator)


def boolean(*shape: int) -> torch.Tensor:
    """Random booleans."""
    return integer(2, *shape).bool()


def all_samples() -> list[Sample]:
    """Every sample, the same ones on every call."""
    _generator.manual_seed(0)
    families = (
        *(pointwise_tables, pointwise_others, matmul, view, pieces, reduction, creation, normalization),
        *(batch_norm, attention, attention_elsewhere, convolution, pooling, softmax),
        *(embedding, gather_scatter, index),
    )
    return [sample for family in families for sample in family()]


UNARY = (
    *("abs sign reciprocal rsqrt sqrt exp exp2 expm1 log log1p log2 sin cos tan asin acos atan sinh cosh tanh erf").split(),
    *("floor ceil round trunc sigmoid relu silu gelu leaky_relu elu softplus hardtanh hardsigmoid hardswish mish").split(),
    *("isnan isinf isfinite nan_to_num square ones_like empty_like zeros_like neg clone alias detach").split(),
)
BINARY = "maximum minimum atan2 floor_divide".split()
COMPARISON = "eq ne lt le gt ge remainder fmod".split()


def pointwise_tables() -> Iterator[Sample]:
    for name in UNARY:
        yield call(getattr(aten, name).default, positive(4, 2))
    yield call(aten.neg.default, x())
    for name in BINARY:
        yield call(getattr(aten, name).default, positive(4, 2), positive(2))
    for name in COMPARISON:
        yield call(getattr(aten, name).Tensor, positive(4, 2), positive(4, 1))
        yield call(getattr(aten, name).Scalar, positive(4, 2), 0.5)
    for op in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor):
        yield call(op.Tensor, integer(8, 4, 2), integer(8, 2))
        yield call(op.Scalar, integer(8, 4, 2), 3)
    for op in (aten.logical_and, aten.logical_or, aten.logical_xor):
        yield call(op.default, boolean(4, 2), boolean(2))
    for op in (aten.logical_not, aten.bitwise_not):
        yield call(op.default, boolean(4, 2))
    for op in pointwise.LINEAR_IN_FIRST:
        if "backward" not in str(op) or op in (aten.leaky_relu_backward.default, aten.elu_backward.default):
            continue
        extra = {"threshold": (0.5,), "hardtanh": (-1.0, 1.0), "softplus": (1.0, 20.0), "dropout": (2.0,)}
        more = next((v for k, v in extra.items() if k in str(op)), ())
        second = boolean(4, 2) if "dropout" in str(op) else positive(4, 2)
        yield call(op, x(4, 2), second, *more)
    yield call(aten.gelu_backward.default, x(4, 2), x(4, 2), approximate="tanh")
    yield call(aten.leaky_relu_backward.default, x(4, 2), x(4, 2), 0.1, False)
    yield call(aten.elu_backward.default, x(4, 2), 1.0, 1.0, 1.0, False, x(4, 2))


def pointwise_others() -> Iterator[Sample]:
    for op in (aten.add, aten.sub, aten.rsub):
        yield call(op.Tensor, x(4, 2), x(4, 2), alpha=3)
        yield call(op.Tensor, x(2, 4, 2), x(4, 1))
        yield call(op.Scalar, x(4, 2), 2.0)
        yield call(op.Scalar, x(4, 2), 0)
    yield call(aten.add.Tensor, integer(9, 4), integer(9, 4))
    yield call(aten.add.Tensor, x(4), 1.5)
    yield call(aten.add.Tensor, x(), x(4))
    yield call(aten.add.Tensor, boolean(4), boolean(4))
    yield call(aten.mul.Tensor, x(4, 2), x(2))
    yield call(aten.mul.Tensor, x(4, 2), boolean(4, 2))
    yield call(aten.mul.Tensor, x(4, 2), 2.0)
    yield call(aten.mul.Scalar, x(4, 2), 2.0)
    yield call(aten.div.Tensor, x(4, 2), positive(4, 1))
    yield call(aten.div.Tensor, integer(9, 4), integer(9, 4) + 1)
    yield call(aten.div.Scalar, x(4, 2), 2.0)
    for mode in (None, "floor", "trunc"):
        yield call(aten.div.Tensor_mode, x(4, 2), positive(2), rounding_mode=mode)
        yield call(aten.div.Scalar_mode, x(4, 2), 0.3, rounding_mode=mode)
    yield call(aten.floor_divide.Scalar, x(4, 2), 0.3)
    yield call(aten.pow.Tensor_Tensor, positive(4, 2), x(2))
    yield call(aten.pow.Tensor_Scalar, x(4, 2), 2)
    yield call(aten.pow.Scalar, 2.0, x(4, 2))
    yield call(aten.clamp.default, x(4, 2), -0.5, None)
    yield call(aten.clamp.Tensor, x(4, 2), x(2), None)
    yield call(aten.clamp_min.default, x(4, 2), 0.0)
    yield call(aten.clamp_max.default, x(4, 2), 0.0)
    yield call(aten.full_like.default, x(4, 2), 3.0)
    yield call(aten.fill.Scalar, x(4, 2), 3.0)
    yield call(aten.where.self, boolean(4, 1), x(4, 2), x())
    yield call(aten.where.self, boolean(4, 2), boolean(4, 2), boolean(4, 2))
    yield call(aten.masked_fill.Scalar, x(4, 2), boolean(2), 0)
    yield call(aten.masked_fill.Scalar, x(4, 2), boolean(4, 1), -1e9)
    yield call(aten.masked_fill.Tensor, x(4, 2), boolean(4, 2), x())
    yield call(aten.lerp.Scalar, x(4, 2), x(4, 2), 0.3)
    yield call(aten.lerp.Tensor, x(4, 2), x(2), x(4, 1))
    yield call(aten.addcmul.default, x(4, 2), x(2), x(4, 1), value=0.5)
    yield call(aten.addcdiv.default, x(4, 2), x(2), positive(4, 1), value=0.5)
    yield call(aten.copy.default, x(4, 2), x(2))
    yield call(aten._to_copy.default, x(4, 2), dtype=torch.float64)
    yield call(aten._to_copy.default, x(4, 2), dtype=torch.int64)
    yield call(aten._to_copy.default, boolean(4, 2), dtype=torch.float64)


def matmul() -> Iterator[Sample]:
    yield call(aten.mm.default, x(4, 6), x(6, 2))
    yield call(aten.bmm.default, x(2, 4, 6), x(2, 6, 2))
    yield call(aten.mv.default, x(4, 6), x(6))
    yield call(aten.dot.default, x(4), x(4))


def view() -> Iterator[Sample]:
    shapes = [
        ((4, 6), (24,)),
        ((24,), (4, 6)),
        ((4, 6), (8, 3)),
        ((2, 6, 4), (2, 4, 6)),
        ((2, 30, 2), (2, 6, 10)),
        ((320,), (32, 10)),
        ((32, 10), (5, 64)),
        ((4, 1, 2), (4, 2, 1, 1)),
        ((1,), ()),
        ((2, 3, 4), (2, 4, 3)),
    ]
    for before, after in shapes:
        yield call(aten.view.default, x(*before), list(after))
    yield call(aten.permute.default, x(2, 4, 6), [2, 0, 1])
    yield call(aten.expand.default, x(2, 1, 4), [6, 2, 4, 4])
    yield call(aten.expand.default, x(), [4])
    yield call(aten.flip.default, x(2, 4), [1])
    yield call(aten.roll.default, x(2, 4), [1], [-1])
    yield call(aten.roll.default, x(2, 4), [1])
    yield call(aten.unfold.default, x(2, 8, 2), 1, 4, 4)
    yield call(aten.unfold.default, x(2, 8), 1, 4, 2)
    yield call(aten.view_as_real.default, torch.complex(x(4, 2), x(4, 2)))
    yield call(aten.view_as_complex.default, x(4, 2, 2))
    yield call(aten.select.int, x(2, 6, 4), 1, 2)
    yield call(aten.select_backward.default, x(2, 4), [2, 6, 4], 1, 2)
    yield call(aten.unbind.int, x(2, 3, 4), 1)
    yield call(aten.stack.default, [x(2, 4), x(2, 4), x(2, 4)], 1)


def pieces() -> Iterator[Sample]:
    slices = [(0, 8, 1), (0, 4, 1), (4, 8, 1), (2, 8, 1), (1, 8, 1), (3, 3, 1), (0, 8, 2), (1, 8, 2), (1, 8, 4), (0, 6, 2)]
    for start, end, step in slices:
        length = len(range(start, end, step))
        yield call(aten.slice.Tensor, x(2, 8, 2), 1, start, end, step)
        yield call(aten.slice_backward.default, x(2, length, 2), [2, 8, 2], 1, start, end, step)
    yield call(aten.split.Tensor, x(2, 12), 4, 1)
    yield call(aten.split.Tensor, x(2, 10), 4, 1)
    yield call(aten.split_with_sizes.default, x(12, 2), [8, 2, 2], 0)
    yield call(aten.split_with_sizes.default, x(12, 2), [7, 5], 0)
    yield call(aten.cat.default, [x(2, 4), x(2, 4), x(2, 8)], -1)
    yield call(aten.cat.default, [x(3, 2), x(4, 2)])
    for pad in ([0, 0], [4, 0], [-4, 0], [2, 2], [1, 0], [0, 0, 8, 4], [1, 1, 2, 2]):
        yield call(aten.constant_pad_nd.default, x(2, 4, 8), pad)
    yield call(aten.constant_pad_nd.default, x(2, 4), [4, 4], 1.0)


def reduction() -> Iterator[Sample]:
    for dims, keepdim in (([1], False), ([0, 2], True), ([], False), (None, False)):
        yield call(aten.sum.dim_IntList, x(2, 4, 6), dims, keepdim)
    yield call(aten.sum.dim_IntList, boolean(4, 2), [0])
    yield call(aten.sum.dim_IntList, x(), [])
    yield call(aten.mean.dim, x(2, 4, 6), [0, 1], True)
    yield call(aten.mean.dim, x(2, 4), None)
    for op in (aten.amax, aten.amin):
        yield call(op.default, x(2, 4, 6), [0, 2], True)
        yield call(op.default, x(2, 4, 6))
    for op in (aten.argmax, aten.argmin):
        yield call(op.default, x(2, 4, 6), 1, True)
        yield call(op.default, x(2, 4))
    for op in (aten.any, aten.all):
        yield call(op.default, boolean(2, 4))
        yield call(op.dim, boolean(2, 4), 1)
        yield call(op.dims, boolean(2, 4, 2), [0, 2])
    for op in (aten.max, aten.min):
        yield call(op.default, x(2, 4))
        yield call(op.dim, x(2, 4), 1, True)
    yield call(aten.logsumexp.default, x(2, 4), [1])
    yield call(aten.prod.default, x(2, 4))
    yield call(aten.prod.dim_int, x(2, 4), 1)
    for op in (aten.var, aten.std):
        yield call(op.correction, x(2, 4), [1], correction=1, keepdim=True)
        yield call(op.dim, x(2, 4), [1], False, True)
    yield call(aten.var_mean.correction, x(2, 4), [1], correction=0)
    yield call(aten.linalg_vector_norm.default, x(2, 4), 2, [1], True)
    yield call(aten.norm.ScalarOpt_dim, x(2, 4), 2, [1])
    yield call(aten.norm.Scalar, x(2, 4), 2)
    yield call(aten.cumsum.default, x(2, 4), -1)
    yield call(aten.cumprod.default, x(2, 4), 1)
    yield call(aten.logcumsumexp.default, x(2, 4), 1)
    yield call(aten.sort.default, x(2, 4), 0, True)
    yield call(aten.sort.stable, x(2, 4), stable=True, dim=0)
    yield call(aten.topk.default, x(2, 4), 2)


def creation() -> Iterator[Sample]:
    yield call(aten.full.default, [2, 4], 3.0)
    yield call(aten.full.default, [], 3.0)
    for op in (aten.zeros.default, aten.ones.default, aten.empty.memory_format):
        yield call(op, [2, 4], dtype=torch.float64)
    yield call(aten.scalar_tensor.default, 2.0)
    yield call(aten.arange.default, 4)
    yield call(aten.arange.start, 2, 6)
    yield call(aten.arange.start_step, 0, 8, 2)
    yield call(aten.eye.default, 4)
    yield call(aten.eye.m, 4, 2)
    for op in (aten.new_zeros, aten.new_ones, aten.new_empty):
        yield call(op.default, x(2, 4), [4, 2])
    yield call(aten.new_full.default, x(2, 4), [2, 4], 3.0)
    yield call(aten.new_full.default, x(2, 4), [], 3.0)
    yield call(aten.triu.default, x(2, 4, 4), 1)
    yield call(aten.tril.default, boolean(4, 4))


def normalization() -> Iterator[Sample]:
    for weight, bias in ((None, None), (x(6), x(6)), (x(6), None)):
        yield call(aten.native_layer_norm.default, x(2, 4, 6), [6], weight, bias, 1e-5)
    mean, rstd, w, b = x(2, 4, 1), positive(2, 4, 1), x(6), x(6)
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        yield call(
            aten.native_layer_norm_backward.default, x(2, 4, 6), x(2, 4, 6), [6], mean, rstd, w, b, mask
        )
    yield call(aten._fused_rms_norm.default, x(2, 4, 6), [6], x(6), 1e-5)
    yield call(aten._fused_rms_norm.default, x(2, 4, 6), [4, 6], None, None)
    for mask in ([True, True], [True, False]):
        yield call(aten._fused_rms_norm_backward.default, x(2, 4, 6), x(2, 4, 6), [6], rstd, w, mask)
    yield call(aten.native_group_norm.default, x(2, 8, 3, 2), x(8), x(8), 2, 8, 6, 4, 1e-5)
    yield call(aten.native_group_norm.default, x(2, 8, 3), None, None, 2, 8, 3, 2, 1e-5)
    stats = (x(2, 4), positive(2, 4))
    for mask in ([True, True, True], [False, True, True]):
        yield call(
            aten.native_group_norm_backward.default, x(2, 8, 3), x(2, 8, 3), *stats, x(8), 2, 8, 3, 4, mask
        )


def batch_norm() -> Iterator[Sample]:
    for training in (True, False):
        for affine in ((x(4), x(4)), (None, None)):
            stats = (x(4), positive(4))
            yield call(aten.native_batch_norm.default, x(2, 4, 3), *affine, *stats, training, 0.1, 1e-5)
            yield call(
                aten._native_batch_norm_legit_functional.default, x(2, 4, 6), *affine, *stats, training, 0.1, 1e-5
            )
        saved = (x(4), positive(4)) if training else (x(0), x(0))
        for mask in ([True, True, True], [True, False, False]):
            yield call(
                aten.native_batch_norm_backward.default,
                *(x(2, 4, 6), x(2, 4, 6), x(4), x(4), positive(4), *saved, training, 1e-5, mask),
            )
    yield call(aten._native_batch_norm_legit.no_stats, x(2, 4), x(4), x(4), True, 0.1, 1e-5)
    yield call(aten._native_batch_norm_legit_no_training.default, x(2, 4), x(4), x(4), x(4), positive(4), 0.1, 1e-5)


def attention() -> Iterator[Sample]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for heads, causal, mask in (
        (4, False, None),
        (4, True, None),
        (4, False, x(4, 6)),
        (4, False, x(2, 1, 4, 6)),
        (4, False, x(2, 4, 1, 6)),
    ):
        keys = 4 if causal else 6
        q, k, v = x(2, 4, 4, 8), x(2, heads, keys, 8), x(2, heads, keys, 8)
        named = {} if mask is None else {"attn_mask": mask}
        yield call(forward, q, k, v, 0.0, causal, **named)
        out, lse = forward(q, k, v, 0.0, causal, **named)
        yield call(backward, x(2, 4, 4, 8), q, k, v, out, lse, 0.0, causal, **named, scale=None)
    q, k, v = x(2, 8, 4, 8), x(2, 2, 6, 8), x(2, 2, 6, 8)
    yield call(forward, q, k, v)
    yield call(backward, x(2, 8, 4, 8), q, k, v, *forward(q, k, v), 0.0, False)
    yield call(forward, q, k, v, 0.5)


def attention_elsewhere() -> Iterator[Sample]:
    q, k, v, grad, bias = x(2, 4, 4, 8), x(2, 4, 6, 8), x(2, 4, 6, 8), x(2, 4, 4, 8), x(2, 1, 4, 6)
    for causal in (False, True):
        yield call(aten._scaled_dot_product_flash_attention.default, q, k, v, 0.0, causal)
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = stand_ins.flash(q, k, v, 0.0, causal)
        saved = (out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)
        yield call(aten._scaled_dot_product_flash_attention_backward.default, grad, q, k, v, *saved)
    for b, masks in ((None, [[True, True, True, False]]), (bias, [[True] * 4, [True, True, True, False]])):
        yield call(aten._scaled_dot_product_efficient_attention.default, q, k, v, b, True)
        saved = stand_ins.efficient(q, k, v, b, True)
        for mask in masks:
            op = aten._scaled_dot_product_efficient_attention_backward.default
            yield call(op, grad, q, k, v, b, *saved, 0.0, mask)
        yield call(aten._scaled_dot_product_cudnn_attention.default, q, k, v, b, True)
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = stand_ins.cudnn(q, k, v, b, True)
        saved = (out, lse, seed, offset, b, cum_q, cum_k, max_q, max_k, 0.0, False)
        yield call(aten._scaled_dot_product_cudnn_attention_backward.default, grad, q, k, v, *saved)


def convolution() -> Iterator[Sample]:
    def both(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> Iterator[Sample]:
        yield call(aten.convolution.default, a, w, bias, *rest)
        grad = torch.randn_like(aten.convolution.default(a, w, bias, *rest))
        out = grad.shape[1]
        for mask in ([True, True, bias is not None], [False, True, bias is not None]):
            sizes = None if bias is None else [out]
            yield call(aten.convolution_backward.default, grad, a, w, sizes, *rest, mask)

    one, zero = [1, 1], [0, 0]
    yield from both(x(2, 4, 5, 5), x(6, 4, 3, 3), None, one, one, one, False, zero, 1)
    yield from both(x(2, 4, 6, 6), x(6, 4, 3, 3), x(6), [2, 2], one, one, False, zero, 1)
    yield from both(x(2, 8, 5, 5), x(12, 2, 3, 3), x(12), one, zero, [2, 2], False, zero, 4)
    yield from both(x(2, 4, 5, 5), x(4, 1, 3, 3), None, one, one, one, False, zero, 4)
    yield from both(x(2, 4, 8, 6), x(6, 4, 2, 3), x(6), [2, 3], zero, one, False, zero, 1)
    yield from both(x(2, 4, 4, 2), x(6, 4, 1, 1), None, one, zero, one, False, zero, 1)
    yield from both(x(2, 4, 6), x(8, 2, 3), x(8), [1], [1], [1], False, [0], 2)
    yield from both(x(2, 4, 5, 5), x(4, 6, 3, 3), None, [2, 2], one, one, True, one, 1)
    yield from both(x(2, 4, 4, 4), x(4, 3, 2, 2), x(6), [2, 2], zero, one, True, zero, 2)


def pooling() -> Iterator[Sample]:
    for n, shape in ((2, (4, 4)), (3, (4, 4, 4))):
        two, one, zero = [2] * n, [1] * n, [0] * n
        a, g = x(2, 4, *shape), x(2, 4, *([2] * n))
        pool = getattr(aten, f"max_pool{n}d_with_indices")
        back = getattr(aten, f"max_pool{n}d_with_indices_backward")
        yield call(pool.default, a, two, two, zero)
        _, places = pool.default(a, two, two, zero)
        yield call(back.default, g, a, two, two, zero, one, False, places)
        yield call(getattr(aten, f"avg_pool{n}d").default, a, two, two)
        yield call(getattr(aten, f"avg_pool{n}d_backward").default, g, a, two, two, zero, False, True, None)
        yield call(getattr(aten, f"_adaptive_avg_pool{n}d").default, a, two)
        yield call(getattr(aten, f"_adaptive_avg_pool{n}d_backward").default, g, a)
    for name in ("nearest", "bilinear", "bicubic"):
        op, back = getattr(aten, f"upsample_{name}2d"), getattr(aten, f"upsample_{name}2d_backward")
        corners = () if name == "nearest" else (False,)
        yield call(op.default, x(2, 4, 3, 3), [6, 6], *corners)
        yield call(op.vec, x(2, 4, 3, 3), None, *corners, [2.0, 2.0])
        yield call(back.default, x(2, 4, 6, 6), [6, 6], [2, 4, 3, 3], *corners)


def softmax() -> Iterator[Sample]:
    for forward, backward in (
        (aten._softmax, aten._softmax_backward_data),
        (aten._log_softmax, aten._log_softmax_backward_data),
    ):
        for dim in (1, 2):
            a = x(2, 4, 6)
            yield call(forward.default, a, dim, False)
            yield call(backward.default, x(2, 4, 6), forward.default(a, dim, False), dim, torch.float64)
        yield call(forward.default, x(), 0, False)
    yield call(aten._safe_softmax.default, x(2, 4).masked_fill(boolean(2, 1), -torch.inf), 1)


def embedding() -> Iterator[Sample]:
    table = x(8, 4)
    for indices in (integer(8, 2, 4), integer(8, 4), integer(8)):
        yield call(aten.embedding.default, table, indices)
    yield call(aten.embedding.default, table, integer(8, 2, 4), 1)
    for padding in (-1, 1, 5):
        yield call(aten.embedding_dense_backward.default, x(2, 4, 6), integer(8, 2, 4), 8, padding, False)
    yield call(aten.embedding_dense_backward.default, x(8, 6), integer(4, 8), 4, 1, True)


def gather_scatter() -> Iterator[Sample]:
    for dim, shape in ((2, (2, 4, 2)), (1, (2, 6, 8)), (1, (2, 1, 8)), (0, (4, 2, 8))):
        size = (2, 4, 8)[dim]
        places = integer(size, *shape)
        yield call(aten.gather.default, x(2, 4, 8), dim, places)
        yield call(aten.scatter_add.default, x(2, 4, 8), dim, places, x(*shape))
    yield call(aten.gather.default, boolean(2, 8), 1, integer(8, 2, 2))
    yield call(aten.gather.default, x(), 0, integer(1))
    once = torch.tensor([[7, 0], [3, 2]])  # each place once, or writing is ambiguous
    for value in (0, 2.5):
        yield call(aten.scatter.value, x(2, 8), 1, once, value)
    yield call(aten.scatter.src, x(2, 8), -1, once, x(2, 4))
    yield call(aten.scatter.src, x(8, 4), 0, once, x(2, 2))


def index() -> Iterator[Sample]:
    far = integer(4, 6) - 4
    for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        yield call(op, x(4, 2, 6), [integer(4, 2, 2)])
    yield call(aten.index.Tensor, x(2, 4, 6), [None, far])
    yield call(aten.index.Tensor, boolean(2, 4), [None, integer(4, 2)])
    yield call(aten.index.Tensor, x(2, 4, 6, 2), [None, integer(4, 2, 1), integer(6, 4)])
    yield call(aten.index.Tensor, x(2, 4, 6, 2), [integer(2, 4), None, integer(6, 4)])
    yield call(aten.index.Tensor, x(2, 4, 6), [None, boolean(4, 6)])
    yield call(aten.index_select.default, x(2, 8, 4), 1, integer(8, 6))
    yield call(aten.index_add.default, x(2, 8, 4), 1, integer(8, 6), x(2, 6, 4), alpha=2)
    once = torch.tensor([6, 1, 3, 0])
    yield call(aten.index_copy.default, x(2, 8, 4), 1, once, x(2, 4, 4))
    for op in (aten.index_put.default, aten._unsafe_index_put.default):
        yield call(op, x(2, 8, 4), [None, integer(8, 2, 6)], x(2, 2, 6, 4), True)
    yield call(aten.index_put.default, x(8, 4), [once], x(4, 4))
    yield call(aten.index_put.default, x(8, 4), [once - 8], x(4))
    yield call(aten.index_put.default, x(8, 4, 2), [integer(8, 4), integer(4, 4)], x(4, 2), True)
    yield call(aten.index_put.default, x(4, 2), [boolean(4, 2)], x())
