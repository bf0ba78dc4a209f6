"""Sample calls of the operators of layers: normalization, attention, convolution, softmax, embedding, indexing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  registers its operators

from autopar.ir.ops import routing
from autopar.strategies.convolution.resampling import RESAMPLING
from tests.strategies import stand_ins
from tests.strategies.sample import Sample, boolean, call, integer, positive, x

aten = torch.ops.aten


def normalization() -> Iterator[Sample]:
    for weight, bias in ((None, None), (x(6), x(6)), (x(6), None)):
        yield call(aten.native_layer_norm.default, x(2, 4, 6), [6], weight, bias, 1e-5)
    mean, rstd, w, b = x(2, 4, 1), positive(2, 4, 1), x(6), x(6)
    for mask in ([True, True, True], [True, False, False], [False, True, True]):
        yield call(aten.native_layer_norm_backward.default, x(2, 4, 6), x(2, 4, 6), [6], mean, rstd, w, b, mask)
    yield call(aten._fused_rms_norm.default, x(2, 4, 6), [6], x(6), 1e-5)
    yield call(aten._fused_rms_norm.default, x(2, 4, 6), [4, 6], None, None)
    for mask in ([True, True], [True, False]):
        yield call(aten._fused_rms_norm_backward.default, x(2, 4, 6), x(2, 4, 6), [6], rstd, w, mask)
    yield call(aten.native_group_norm.default, x(2, 8, 3, 2), x(8), x(8), 2, 8, 6, 4, 1e-5)
    yield call(aten.native_group_norm.default, x(2, 8, 3), None, None, 2, 8, 3, 2, 1e-5)
    yield call(aten.native_group_norm.default, x(2, 8, 4, 4), x(8), None, 2, 8, 16, 2, 1e-5)
    yield call(aten.native_group_norm.default, x(2, 4, 2, 4, 1) + 9, x(4), x(4), 2, 4, 8, 1, 1e-5)
    yield call(aten.native_group_norm.default, x(2, 8), x(8), x(8), 2, 8, 1, 2, 1e-5)
    for groups, shape in ((4, (2, 4, 4, 2)), (1, (2, 4, 4)), (2, (2, 4))):
        of, area = (*shape[:2], math.prod(shape[2:]), groups), (x(2, groups), positive(2, groups))
        for weight, mask in ((x(4), [True, True, True]), (None, [True, False, False]), (x(4), [False, True, False])):
            yield call(aten.native_group_norm_backward.default, x(*shape), x(*shape), *area, weight, *of, mask)
    stats = (x(2, 4), positive(2, 4))
    for mask in ([True, True, True], [False, True, True]):
        yield call(aten.native_group_norm_backward.default, x(2, 8, 3), x(2, 8, 3), *stats, x(8), 2, 8, 3, 4, mask)


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
    yield call(
        aten._native_batch_norm_legit_functional.default,
        x(4, 4, 2, 6),
        *(x(4), None, x(4), positive(4)),
        True,
        0.1,
        1e-5,
    )
    yield call(aten._native_batch_norm_legit.no_stats, x(4, 4, 6), None, x(4), True, 0.1, 1e-5)
    yield call(aten._native_batch_norm_legit.no_stats, x(2, 4), x(4), x(4), True, 0.1, 1e-5)
    yield call(aten._native_batch_norm_legit_no_training.default, x(2, 4), x(4), x(4), x(4), positive(4), 0.1, 1e-5)


def attention() -> Iterator[Sample]:
    forward, backward = torch.ops.autopar.attention.default, torch.ops.autopar.attention_backward.default
    for heads, causal, bias, dropout in (
        (4, False, None, 0.0),
        (4, True, None, 0.0),
        (4, False, x(4, 6), 0.0),
        (4, False, x(2, 1, 4, 6), 0.0),
        (2, False, x(2, 4, 1, 6), 0.0),
        (2, False, None, 0.25),
        (4, True, None, 0.25),
        (4, False, x(1, 4, 4, 6), 0.25),
    ):
        keys = 4 if causal else 6
        q, k, v = x(2, 4, 4, 8), x(2, heads, keys, 8), x(2, heads, keys, 8)
        kept = boolean(2, 4, 4, keys) if dropout else None
        numbers = (dropout, causal, None)
        yield call(forward, q, k, v, bias, kept, *numbers)
        saved = forward(q, k, v, bias, kept, *numbers)
        for wanted in (False, True) if bias is not None else (False,):
            yield call(backward, x(2, 4, 4, 8), q, k, v, bias, kept, *saved, *numbers, wanted)
    # Values of another size than keys, which no kernel on a CPU takes, and groups of four.
    q, k, v = x(2, 8, 4, 8), x(2, 2, 6, 8), x(2, 2, 6, 4)
    yield call(forward, q, k, v, None, None, 0.0, False, 0.5)
    yield call(
        backward,
        x(2, 8, 4, 4),
        q,
        k,
        v,
        None,
        None,
        *forward(q, k, v, None, None, 0.0, False, 0.5),
        0.0,
        False,
        0.5,
        False,
    )


def attention_that_draws() -> Iterator[Sample]:
    forward = torch.ops.autopar.attention_drawing.default
    for bias in (None, x(4, 6)):
        tensors = (x(2, 4, 4, 8), x(2, 2, 6, 8), x(2, 2, 6, 8), bias)
        yield call(forward, *tensors, 0.5, False, None)
        saved = forward(*tensors, 0.5, False, None)
        backward = torch.ops.autopar.attention_drawing_backward.default
        for wanted in (False, True) if bias is not None else (False,):
            yield call(backward, x(2, 4, 4, 8), *tensors, *saved, 0.5, False, None, wanted)


def attention_of_cpus() -> Iterator[Sample]:
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


def pooling_of_rows() -> Iterator[Sample]:
    """Windows that overlap, that tile, and that leave rows out, along rows, and along what is one row."""
    for shape, kernel, stride, padding, dilation, ceil in (
        ((2, 2, 8, 6), [3, 3], [2, 2], [1, 1], [1, 1], False),
        ((1, 2, 1, 16), [1, 3], [1, 1], [0, 1], [1, 1], False),
        ((2, 8, 4), [3, 2], [], [1], [1, 1], True),
        ((2, 2, 8, 6), [4, 2], [2, 2], [1, 0], [1, 1], True),
        ((1, 2, 1, 8), [1, 2], [1, 2], [0, 0], [1, 1], False),
        ((1, 2, 8, 4), [1, 2], [2, 1], [0, 1], [1, 1], False),
        ((1, 1, 8, 4), [3, 3], [1, 1], [1, 1], [2, 1], False),
        ((1, 2, 8, 4, 4), [3, 2, 2], [1, 2, 1], [1, 0, 1], [1, 1, 1], False),
    ):
        n = len(kernel)
        ties = x(*shape).masked_fill(boolean(*shape), -torch.inf).abs().neg()
        # Of a window of infinities alone the kernel of three dims gives places outside of it where channels are last.
        for a in (x(*shape), ties.clamp(min=-2) if n == 3 else ties):
            pool, back = (getattr(aten, f"max_pool{n}d_with_indices{end}").default for end in ("", "_backward"))
            values, places = pool(a, kernel, stride, padding, dilation, ceil)
            yield call(pool, a, kernel, stride, padding, dilation, ceil)
            grad = torch.randn_like(values)
            yield call(back, grad, a, kernel, stride or kernel, padding, dilation, ceil, places)
        pool, back = (getattr(aten, f"avg_pool{n}d{end}").default for end in ("", "_backward"))
        for padded, divisor in ((True, None), (False, None), (False, 5)):
            numbers = padding, ceil, padded, divisor
            yield call(pool, x(*shape), kernel, stride, *numbers)
            grad = torch.randn_like(pool(x(*shape), kernel, stride, *numbers))
            yield call(back, grad, x(*shape), kernel, stride or kernel, *numbers)
    for shape, sizes in (((2, 2, 8, 5), [4, 2]), ((2, 1, 8), [1, 4]), ((1, 2, 4, 6, 2), [4, 2, 1])):
        pool, back = (getattr(aten, f"_adaptive_avg_pool{len(sizes)}d{end}").default for end in ("", "_backward"))
        yield call(pool, x(*shape), sizes)
        yield call(back, torch.randn_like(pool(x(*shape), sizes)), x(*shape))


def resampling() -> Iterator[Sample]:
    for n, names in RESAMPLING.items():
        for name in names:
            op, back = getattr(aten, name), getattr(aten, f"{name}_backward")
            corners = () if "nearest" in name else (False,)
            yield call(op.default, x(2, 4, *[3] * n), [6] * n, *corners)
            yield call(back.default, x(2, 4, *[6] * n), [6] * n, [2, 4, *[3] * n], *corners)
            if "nearest" in name:
                for shape, out, scales in (([4] * n, [8] * n, [2.0] * n), ([2, 4, 4][:n], [6, 4, 5][:n], [])):
                    yield call(op.default, x(2, 2, *shape), out, *scales)
                    yield call(back.default, x(2, 2, *out), out, [2, 2, *shape], *scales)
                yield call(op.default, x(2, 2, *[4] * n), [8] * n, *[2.2] * n)  # which is no whole number
            else:
                for shape, out in (
                    ([4] * n, [8] * n),
                    ([8, 4, 4][:n], [4, 12, 3][:n]),
                    ([6, 4, 4][:n], [2, 4, 16][:n]),
                ):
                    for scales in ((), tuple(b / a for a, b in zip(shape, out, strict=True))):
                        yield call(op.default, x(1, 2, *shape), out, False, *scales)
                        yield call(back.default, x(1, 2, *out), out, [1, 2, *shape], False, *scales)
                yield call(op.default, x(2, 2, *[4] * n), [8] * n, True)
                yield call(op.default, x(2, 2, *[4] * n), [8] * n, False, *[2.2] * n)


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
    for shape in ((4, 6), (2, 4, 8)):
        logits, target = 3 * x(*shape), integer(shape[-1], *shape[:-1], 1)
        yield call(torch.ops.autopar.cross_entropy.default, logits, target, None)
        total = logits.logsumexp(-1, keepdim=True)
        backward = torch.ops.autopar.cross_entropy_backward.default
        yield call(backward, x(*shape[:-1], 1), logits, target, total, None, torch.float64)
    spoken = (
        2 * x(12, 4, 6).log_softmax(-1),
        1 + integer(5, 4, 3),
        torch.tensor([12, 8, 12, 2]),
        torch.tensor([3, 2, 1, 3]),
    )
    yield call(torch.ops.autopar.ctc.default, *spoken, 0, True)
    yield call(torch.ops.autopar.ctc_backward.default, x(4), *spoken, 0, True)
    yield call(aten._safe_softmax.default, x(2, 4).masked_fill(boolean(2, 1), -torch.inf), 1)


def embedding() -> Iterator[Sample]:
    table = x(8, 4)
    for indices in (integer(8, 2, 4), integer(8, 4), integer(8)):
        yield call(aten.embedding.default, table, indices)
    bags = integer(8, 6), torch.tensor([0, 2, 2, 5])
    yield call(aten.embedding_renorm.default, table * 4, indices, 0.5, 2.0)
    for op in (aten._embedding_bag, aten._embedding_bag_forward_only):
        yield call(op.default, table, *bags, False, 2)
    yield call(aten._embedding_bag.default, table, *bags, False, 0, False, x(6))
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
    yield call(aten.gather.default, x(), 0, integer(1, 1))
    yield call(aten.gather.default, x(4), 0, integer(4))
    yield call(aten.scatter_add.default, x(4), 0, integer(4), x())
    yield call(aten.scatter.value, x(), 0, integer(1, 1), 2.5)
    yield call(aten.index_select.default, x(4, 2), 0, integer(4))
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


def random() -> Iterator[Sample]:
    draw = torch.ops.autopar.draw.default
    cpu = torch.device("cpu")
    for distribution, parameters, dtype in (
        ("bernoulli", [0.9], torch.bool),
        ("dropout", [0.1, 4], torch.bool),
        ("uniform", [-1.0, 2.0], torch.float64),
        ("normal", [1.0, 2.0], torch.float32),
        ("random", [2, 9], torch.int64),
        ("exponential", [2.0], torch.float64),
    ):
        yield call(draw, distribution, parameters, [16, 32], [1, 0], dtype=dtype, device=cpu)
    yield call(draw, "permutation", [], [64], [0], dtype=torch.int64, device=cpu)
    yield call(draw, "normal", [0, 1], [], [], dtype=torch.float64, device=cpu)
    yield call(torch.ops.autopar.accumulate.default, x(4, 2))
    yield call(torch.ops.autopar.accumulate.default, x(4, 2), "max")
    yield call(aten.multinomial.default, positive(16, 6), 4)
    yield call(aten.multinomial.default, positive(6), 64, True)
    yield call(aten.poisson.default, positive(16, 16) * 9)
    yield call(aten.rrelu_with_noise_functional.default, x(16, 16), x(16, 16), 0.1, 0.3, True)
    yield call(aten.rrelu_with_noise_backward.default, x(2, 4), x(2, 4), positive(2, 4), 0.1, 0.3, True, False)


def padding() -> Iterator[Sample]:
    for kind in ("reflection", "replication"):
        for n in (1, 2, 3):
            a, ends = x(2, 4, *[4] * n), [1, 2] * n
            yield call(getattr(aten, f"{kind}_pad{n}d").default, a, ends)
            yield call(getattr(aten, f"{kind}_pad{n}d_backward").default, x(2, 4, *[7] * n), a, ends)


def fourier() -> Iterator[Sample]:
    for shape, transformed in (((4, 2, 6), [2]), ((4, 6, 2), [1]), ((2, 4, 6), [1, 2])):
        a = x(*shape)
        yield call(aten._fft_r2c.default, a, transformed, 0, False)
        half = aten._fft_r2c.default(a, transformed, 0, True)
        yield call(aten._fft_r2c.default, a, transformed, 0, True)
        yield call(aten._fft_c2r.default, half, transformed, 2, shape[transformed[-1]])
        yield call(aten._fft_c2c.default, torch.complex(a, x(*shape)), transformed, 0, True)


def experts() -> Iterator[Sample]:
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)  # the second expert has no rows
    rows, weight, grad = x(8, 4), x(3, 4, 2), x(8, 2)
    transformers = torch.ops.transformers
    yield call(transformers.grouped_mm_fallback.default, rows, weight, ends)
    yield call(transformers.grouped_mm_fallback_backward.default, rows, weight, ends, grad)
    yield call(routing.multiply_by_expert, rows, weight, ends)
    yield call(routing.outer_by_expert, rows, grad, ends)
    # Of multiples of 16 bytes, once they are split, too.
    rows, weight, grad = x(8, 8), x(3, 8, 16), x(8, 16)
    yield call(aten._grouped_mm.default, rows, weight, ends)
    yield call(aten._grouped_mm.default, rows.T.contiguous(), grad, ends)
    yield call(aten._grouped_mm.default, x(3, 16, 8), rows.T.contiguous(), ends)
    yield call(aten._grouped_mm.default, x(2, 12, 8), x(2, 8, 16))
    sorted_experts, order = routing.sort_by_expert(torch.tensor([2, 0, 2, 1, 0, 2, 2, 0]), 2, 3)
    yield call(routing.sort_by_expert, integer(3, 8), 2, 3)
    yield call(routing.sort_by_expert, integer(3, 4), 1, 3)
    yield call(routing.route, x(4, 2, 6), order, 2)
    yield call(routing.route, x(8), order, 1)
    yield call(routing.collect, x(8, 4, 2), order, 2, 8)
    yield call(routing.collect, x(8), order, 1, 8)
    yield call(routing.group_ends, sorted_experts, 3)
    yield call(routing.add_by_expert, x(8, 4, 2), sorted_experts, 3)
    yield call(routing.add_by_expert, x(8), sorted_experts, 4)


FAMILIES = (
    *(padding, fourier, experts),
    *(
        normalization,
        batch_norm,
        attention,
        attention_that_draws,
        attention_of_cpus,
        attention_elsewhere,
        convolution,
        pooling,
        pooling_of_rows,
        resampling,
        softmax,
    ),
    *(embedding, gather_scatter, index, random),
)
