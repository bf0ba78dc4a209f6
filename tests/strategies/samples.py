"""Sample calls of every registered operator: small, in float64, with sizes that two devices divide."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autopar.ir.ops import float8
from autopar.strategies import pointwise
from tests.strategies import samples_layers, samples_sequences, samples_torch
from tests.strategies.sample import Sample, boolean, call, integer, positive, restart, x

aten = torch.ops.aten


def all_samples() -> list[Sample]:
    """Every sample, the same ones on every call."""
    restart()
    families = (pointwise_tables, pointwise_others, matmul, view, pieces, reduction, creation, *samples_layers.FAMILIES)
    families += (*samples_torch.FAMILIES, *samples_sequences.FAMILIES)
    return [sample for family in families for sample in family()]


UNARY = (
    *(
        "abs sign sgn reciprocal rsqrt sqrt exp exp2 expm1 log log1p log2 sin cos tan asin acos atan sinh cosh tanh erf"
    ).split(),
    *(
        "floor ceil round trunc sigmoid relu silu gelu leaky_relu elu softplus hardtanh hardsigmoid hardswish mish"
    ).split(),
    *("isnan isinf isfinite nan_to_num square ones_like empty_like zeros_like neg clone alias detach").split(),
)
BINARY = "maximum minimum atan2 floor_divide".split()
COMPARISON = "eq ne lt le gt ge remainder fmod".split()


def pointwise_tables() -> Iterator[Sample]:
    for name in UNARY:
        yield call(getattr(aten, name).default, positive(4, 2))
    yield call(aten.neg.default, x())
    yield call(aten.round.decimals, 10 * x(4, 2), decimals=1)
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
    for op in (aten.add, aten.sub, aten.mul, aten.div):
        yield call(op.Tensor, 2.0, positive(4, 2))
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
    yield call(aten.fill.Tensor, x(4, 2), x())
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
    for dims in ([0, 1], [0], [1]):
        yield call(float8.scale, x(4, 6), dims, "e5m2")
        yield call(float8.quantize, x(4, 6), positive(*(1 if d in dims else n for d, n in enumerate((4, 6)))), "e4m3")
    yield call(float8.amax, x(4, 6))
    yield call(float8.delayed_scale, positive(3, 4), 1, "e4m3")
    yield call(float8.quantize, x(4, 6), positive(1, 1), "e5m2", True)
    yield call(float8.block_scale, x(4, 128), "e5m2")
    yield call(float8.block_quantize, x(4, 128), integer(8, 4, 4).to(torch.uint8) + 124, "e4m3")
    bytes_of = [integer(96, n, 128).to(torch.uint8) for n in (4, 2)]
    exponents = [integer(8, n, 4).to(torch.uint8) + 124 for n in (4, 2)]
    yield call(float8.block_product, *bytes_of, *exponents, "e5m2", "e4m3", torch.float64)
    for rows, columns in ((4, 2), (1, 1)):
        # Bytes of finite numbers in either format.
        bytes_of = [integer(96, n, 6).to(torch.uint8) for n in (4, 2)]
        scales = [positive(n, 1) for n in (rows, columns)]
        yield call(float8.product, *bytes_of, *scales, "e5m2", "e4m3", torch.float64)


def view() -> Iterator[Sample]:
    yield call(aten.narrow.default, x(4, 8), 1, 0, 6)
    yield call(aten.narrow.default, x(6), 0, 2, 4)
    yield call(aten.pad.default, x(4, 6), [0, 2], "constant", 0.0)
    yield call(aten.pad.default, x(4, 6, 2), [0, 0, 1, 1], "constant", 1.0)
    yield call(aten.pad.default, x(2, 6), [1, 1], "reflect")
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
        yield call(aten.reshape.default, x(*before), list(after))
    yield call(aten.permute.default, x(2, 4, 6), [2, 0, 1])
    yield call(aten.expand.default, x(2, 1, 4), [6, 2, 4, 4])
    yield call(aten.expand.default, x(), [4])
    yield call(aten.unfold.default, x(2, 8, 2), 1, 4, 4)
    yield call(aten.unfold.default, x(2, 8), 1, 4, 2)
    yield call(aten.unfold_backward.default, x(2, 2, 2, 4), [2, 8, 2], 1, 4, 4)
    yield call(aten.unfold_backward.default, x(2, 3, 4), [2, 8], 1, 4, 2)
    yield call(aten.unfold_backward.default, x(1, 1, 3, 2), [1, 2, 3], 1, 2, 1)
    yield call(aten.unfold_backward.default, x(1, 3, 4), [2, 8], 1, 4, 2)
    yield call(aten.unfold_backward.default, x(1), [], 0, 1, 1)
    yield call(aten.view_as_real.default, torch.complex(x(4, 2), x(4, 2)))
    yield call(aten.view_as_complex.default, x(4, 2, 2))
    for index in (2, -1, 0):
        yield call(aten.select.int, x(2, 6, 4), 1, index)
        yield call(aten.select_backward.default, x(2, 4), [2, 6, 4], -2, index)
    yield call(aten.select.int, integer(9, 8), 0, 5)
    yield call(aten.unbind.int, x(2, 3, 4), 1)
    yield call(aten.stack.default, [x(2, 4), x(2, 4), x(2, 4)], 1)


def pieces() -> Iterator[Sample]:
    slices = [
        (0, 8, 1),
        (0, 4, 1),
        (4, 8, 1),
        (2, 8, 1),
        (1, 8, 1),
        (3, 3, 1),
        (0, 8, 2),
        (1, 8, 2),
        (1, 8, 4),
        (0, 6, 2),
    ]
    for start, end, step in slices:
        length = len(range(start, end, step))
        yield call(aten.slice.Tensor, x(2, 8, 2), 1, start, end, step)
        yield call(aten.slice_backward.default, x(2, length, 2), [2, 8, 2], 1, start, end, step)
        yield call(aten.slice_scatter.default, x(2, 8, 2), x(2, length, 2), -2, start, end, step)
    for start, end in ((0, 1), (15, 16), (14, 16), (7, 9), (4, 6)):
        yield call(aten.slice.Tensor, x(2, 16, 2), 1, start, end)
        yield call(aten.slice_backward.default, x(2, end - start, 2), [2, 16, 2], 1, start, end, 1)
    yield call(aten.slice.Tensor, x(32, 2), 0, 4, 8)
    yield call(aten.select_scatter.default, x(2, 6, 4), x(2, 4), 1, 2)
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
    for op in (aten.amax, aten.amin):
        yield call(op.default, x(2, 4, 6), [0, 2], True)
        yield call(op.default, x(2, 4, 6))
    for op in (aten.argmax, aten.argmin):
        yield call(op.default, x(2, 4, 6), 1, True)
        yield call(op.default, x(2, 4))
    with_nan = x(4, 2)
    with_nan[3, 1] = torch.nan
    # Equal ones on several devices, numbers that are none, and the least and largest that there are.
    tied = torch.tensor([[2, 1, 2, 0, 1, 2, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]])
    lines = (
        tied,
        tied.double(),
        tied.bool(),
        x(8, 2).masked_fill(x(8, 2) > 0.5, torch.nan).T,
        -torch.inf * tied.double().exp(),
    )
    for values in lines:
        for op, place in ((aten.max, aten.argmax), (aten.min, aten.argmin)):
            yield call(op.dim, values, 1)
            yield call(op.dim, values, -1, True)
            if values.dtype != torch.bool:
                yield call(place.default, values, 1)
    for values in (x(2, 4), integer(4, 2, 8), boolean(2, 4)):
        yield call(aten.prod.dim_int, values, 1)
        yield call(aten.prod.dim_int, values, 0, True)
    for op in (aten.amax, aten.amin, aten.max, aten.min):
        for values in (with_nan, integer(8, 4, 2), integer(8, 4, 2) - 2**63, integer(8, 4, 2).to(torch.uint8)):
            yield call(op.default, values)
        yield call(op.default, boolean(4, 2))
    for op in (aten.any, aten.all):
        yield call(op.default, boolean(2, 4))
        yield call(op.default, torch.ones(4, 2))
        yield call(op.default, torch.ones(4, 2, dtype=torch.uint8))
        yield call(op.dim, boolean(2, 4), 1)
        yield call(op.dims, boolean(2, 4, 2), [0, 2])
    for op in (aten.max, aten.min):
        yield call(op.default, x(2, 4))
        yield call(op.dim, x(2, 4), 1, True)
    for values in (x(2, 4), 800 * x(2, 4), torch.full((2, 4), -torch.inf), torch.full((2, 4), torch.inf)):
        yield call(aten.logsumexp.default, values, [1])
    yield call(aten.logsumexp.default, x(4, 4, 2), [0, 1], True)
    yield call(aten.logsumexp.default, integer(8, 2, 4), [1])
    yield call(aten.prod.default, x(2, 4))
    yield call(aten.prod.dim_int, x(2, 4), 1)
    for op in (aten.var, aten.std):
        yield call(op.correction, x(2, 4), [1], correction=1, keepdim=True)
        yield call(op.dim, x(2, 4), [1], False, True)
        yield call(op.correction, x(4, 4, 2) + 1e3, [0, 1], correction=0)
        yield call(op.correction, x(4, 4))
        yield call(op.correction, x(4, 4), correction=16)
        yield call(op.correction, x(4, 4).bfloat16(), [0])
        yield call(op.correction, torch.complex(x(4, 4), x(4, 4)), [0])
    for dims in ([1], [0, 1]):
        yield call(torch.ops.prims.var.default, x(2, 4), dims, 1)
    yield call(aten.var_mean.correction, x(2, 4), [1], correction=0)
    yield call(aten.linalg_vector_norm.default, x(2, 4), 2, [1], True)
    for order in (0, 1, 3.5, -2, torch.inf, -torch.inf):
        yield call(aten.linalg_vector_norm.default, x(2, 4), order)
    for values in (torch.zeros(4), torch.full((4,), torch.inf), 1e100 * x(4), torch.complex(x(4), x(4))):
        yield call(aten.linalg_vector_norm.default, values)
    yield call(aten.linalg_vector_norm.default, x(4).float(), dtype=torch.float64)
    yield call(aten.linalg_vector_norm.default, x())
    yield call(aten.norm.ScalarOpt_dim, x(2, 4), 2, [1])
    yield call(aten.norm.Scalar, x(2, 4), 2)
    yield call(aten.sort.default, x(2, 4), 0, True)
    yield call(aten.sort.stable, x(2, 4), stable=True, dim=0)
    yield call(aten.histc.default, x(4), 4)
    yield call(aten.histc.default, x(), 4)
    yield call(aten.histc.default, x(4, 6), 4, -1, 2)
    yield call(aten.topk.default, x(2, 4), 2)
    yield call(aten.topk.default, x(), 1)
    yield call(aten.topk.default, x(2, 8, 4), 3, 1, False, True)
    yield call(aten.topk.default, x(8, 2), 2, 0)
    yield call(aten.topk.default, torch.cat([x(2, 6), torch.full((2, 2), torch.nan)], 1), 4)


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
