"""Matrix products (``addmm`` and ``baddbmm`` are decomposed before rules are asked)."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from autopar.ir.ops import float8, routing
from autopar.rules.rule import ALIGNED, MATRIX, ROW_MAJOR, Lowering, Padding, Rule, Spec, letters, rule

aten = torch.ops.aten

# Bilinear: Partial in one operand passes, in both it does not.
EITHER = ((0,), (1,))


@rule(aten.mm.default)
def mm(a: Spec, b: Spec) -> Rule:
    """Matrix times matrix."""
    (m, k), n = a.shape, b.shape[1]
    return Rule("mk,kn->mn", reduce="k", linear=EITHER, flops=2.0 * m * k * n)


@rule(aten.bmm.default)
def bmm(a: Spec, b: Spec) -> Rule:
    """One matrix product for each element of a batch."""
    (batch, m, k), n = a.shape, b.shape[2]
    return Rule("bmk,bkn->bmn", reduce="k", linear=EITHER, flops=2.0 * batch * m * k * n)


@rule(aten.mv.default)
def mv(a: Spec, b: Spec) -> Rule:
    """Matrix times vector."""
    return Rule("mk,k->m", reduce="k", linear=EITHER, flops=2.0 * a.shape[0] * a.shape[1])


@rule(aten.dot.default)
def dot(a: Spec, b: Spec) -> Rule:
    """Inner product."""
    return Rule("k,k->.", reduce="k", linear=EITHER, flops=2.0 * a.shape[0])


@rule(aten.addr.default)
def addr(x: Spec, a: Spec, b: Spec, *, beta: float = 1, alpha: float = 1) -> Rule:
    """Outer product, added to a matrix."""
    # The addend broadcasts: it has the outer product's dims, or ones, or fewer.
    shape = (a.shape[0], b.shape[0])[2 - x.ndim :]
    whole = "".join(c if n == m else "1" for c, n, m in zip("mn"[2 - x.ndim :], x.shape, shape, strict=True))
    return Rule(f"{whole or '.'},m,n->mn", linear=((0, 1), (0, 2)))


@rule(aten.vdot.default)
def vdot(a: Spec, b: Spec) -> Rule:
    """Inner product, the first vector conjugated."""
    return Rule("k,k->.", reduce="k", linear=EITHER, flops=2.0 * a.shape[0])


# Distances of all pairs of rows: one vector, in which no order of pairs is a dim. Not discovered: on parts of its
# arguments the kernel reads past their ends.
rule(aten._pdist_forward.default)(lambda x, p=2.0: Rule("nm->k", blocked="nmk", strides=ROW_MAJOR))


@rule(aten._pdist_backward.default)
def pdist_backward(grad: Spec, x: Spec, p: float, distances: Spec) -> Rule:
    """Columns are apart, given the distances."""
    return Rule("k,nm,k->nm", blocked="nk", linear=((0,),), strides=ROW_MAJOR)


@rule(aten._cdist_forward.default)
def cdist(a: Spec, b: Spec, p: float, mode: int | None) -> Rule:
    """Distances between all rows of two matrices, for each element of a batch."""
    first, second, whole = _batches(a, b)
    # A root over the sum of powers: parts of rows do not add up.
    return Rule(f"{first}pm,{second}rm->{whole}pr", blocked="m")


@rule(aten._cdist_backward.default)
def cdist_backward(grad: Spec, a: Spec, b: Spec, p: float, distances: Spec) -> Rule:
    """Its gradient of the first matrix, for each element of the batch: a sum over rows of the second."""
    first, second, whole = _batches(a, b)
    pairs = f"{whole}pr"
    return Rule(f"{pairs},{first}pm,{second}rm,{pairs}->{whole}pm", reduce="r", blocked="m", linear=((0,),))


def _batches(a: Spec, b: Spec) -> tuple[str, str, str]:
    """The dims in front of two matrices, which broadcast, and those of the result."""
    count = max(a.ndim, b.ndim) - 2
    names = letters(count, 26)  # upper case; the equations have lower case
    padded = [(1,) * (count + 2 - t.ndim) + tuple(t.shape[:-2]) for t in (a, b)]
    first, second = (["1" if n == 1 else c for c, n in zip(names, sizes, strict=True)] for sizes in padded)
    whole = "".join(d if c == "1" else c for c, d in zip(first, second, strict=True))
    return "".join(first[count + 2 - a.ndim :]), "".join(second[count + 2 - b.ndim :]), whole


@rule(routing.sort_by_expert)
def sort_by_expert(experts: Spec, k: int, count: int) -> Rule:
    """Pairs in the order of their experts; a device that has some of the tokens has an order of these."""
    pairs = "a" if k == 1 else "(ab)"
    return Rule(f"{pairs}->{pairs},{pairs}", blocked="b", routed="a", sizes={"b": k})


@rule(routing.route)
def route(tokens: Spec, order: Spec, k: int) -> Rule:
    """Rows of tokens."""
    rest = letters(tokens.ndim - 1, 2)
    pairs = "a" if k == 1 else "(ab)"
    return Rule(
        f"a{rest},{pairs}->{pairs}{rest}", linear=((0,),), blocked="b", routed="a", sizes={"b": k}, positions=(1,)
    )


@rule(routing.collect)
def collect(rows: Spec, order: Spec, k: int, count: int) -> Rule:
    """Tokens of rows; a device that has some of the rows only has terms of all tokens."""
    rest = letters(rows.ndim - 1, 2)
    pairs = "a" if k == 1 else "(ab)"
    # Rows are put in the order of tokens, and added up from there.
    between = 2.0 * math.prod(rows.shape) * rows.dtype.itemsize if k > 1 and rows.dtype is not None else 0.0
    return Rule(
        f"{pairs}{rest},{pairs}->a{rest}", linear=((0,),), blocked="b", routed="a", sizes={"b": k}, scaled={3: "a"},
        between=between, positions=(1,),
    )  # fmt: skip


@rule(routing.group_ends)
def group_ends(experts: Spec, count: int) -> Rule:
    """Ends of the rows of each expert: those of the whole are the sums of all devices'."""
    return Rule("m->e", reduce="m", blocked="e", routed="m", sizes={"e": count})


@rule(routing.add_by_expert)
def add_by_expert(rows: Spec, experts: Spec, count: int) -> Rule:
    """Sums of the rows of each expert."""
    rest = letters(rows.ndim - 1, 2)
    return Rule(f"a{rest},a->b{rest}", reduce="a", blocked="b", linear=((0,),), sizes={"b": count})


@rule(routing.multiply_by_expert)
def multiply_by_expert(rows: Spec, weight: Spec, ends: Spec) -> Rule:
    """Rows times the matrix of their expert."""
    (s, k), n = rows.shape, weight.shape[2]
    flops = 2.0 * s * k * n
    return Rule("sk,ekn,e->sn", reduce="k", blocked="e", linear=((0,), (1,)), flops=flops, counts={"s": (2,)})


@rule(routing.outer_by_expert)
def outer_by_expert(left: Spec, right: Spec, ends: Spec) -> Rule:
    """Sums of outer products of the rows of each expert."""
    (s, m), n = left.shape, right.shape[1]
    flops = 2.0 * s * m * n
    return Rule("sm,sn,e->emn", reduce="s", blocked="e", linear=((0,), (1,)), flops=flops, counts={"s": (2,)})


@rule("transformers.grouped_mm_fallback.default")
def grouped_mm(rows: Spec, weight: Spec, ends: Spec) -> Rule:
    """``rows[start:end] @ weight[expert]`` for each expert."""
    (s, k), n = rows.shape, weight.shape[2]
    flops = 2.0 * s * k * n
    return Rule("sk,ekn,e->sn", reduce="k", blocked="e", linear=((0,), (1,)), flops=flops, counts={"s": (2,)})


@rule("transformers.grouped_mm_fallback_backward.default")
def grouped_mm_backward(rows: Spec, weight: Spec, ends: Spec, grad: Spec) -> Rule:
    """Gradients of rows and weight; only the first is a sum over the weight's columns."""
    (s, k), n = rows.shape, weight.shape[2]
    # Rows are sorted by expert, and ``ends`` says where those of each end: cut where each device sorts its own.
    equation = "sk,ekn,e,sn->sk,ekn"
    return Rule(equation, reduce="ns", blocked="e", linear=((3,),), flops=4.0 * s * k * n, counts={"s": (2,)})


@rule(aten._grouped_mm.default)
def torch_grouped_mm(
    rows: Spec, weight: Spec, ends: Spec | None = None, bias: Spec | None = None, out_dtype: Any = None
) -> Rule:
    """The same in torch: also a product for each expert (3D rows), and gradients of weights (rows 2D on both sides)."""
    row, column = ("esk" if rows.ndim == 3 else "sk"), ("ekn" if weight.ndim == 3 else "kn")
    # With one ragged operand the experts are parts of a dim of the result; else they are a dim of its own.
    result = "sn" if (rows.ndim, weight.ndim) in ((2, 3), (3, 2)) else "esn"
    # The ragged dim: rows of 2D x 3D, columns of 3D x 2D, and of 2D x 2D the dim that is summed over.
    ragged = {(2, 3): "s", (3, 2): "n", (2, 2): "k"}.get((rows.ndim, weight.ndim), "") if ends else ""
    inputs = ",".join([row, column, *["e"] * (ends is not None)])
    flops = 2.0 * rows.shape[-2] * rows.shape[-1] * weight.shape[-1]
    # Rows, or columns, begin at multiples of so many bytes: which of both are whole is a matter of strides.
    aligned = ALIGNED // getattr(rows.dtype, "itemsize", 4)
    return Rule(
        f"{inputs}->{result}", reduce="k", blocked="e" if ends else "", linear=((0,), (1,)), flops=flops,
        strides=(MATRIX, MATRIX, *[ROW_MAJOR] * (ends is not None)), counts={ragged: (2,)} if ragged else {},
        multiples={c: aligned for c in "skn" if c != ragged},
    )  # fmt: skip


SCALED = Lowering(
    lambda context, x, dims, format: context.all_reduce(float8.scale(x, dims, format), "max"), anywhere=True
)
"""The scale of a whole tensor is the largest of its parts'."""


@rule(float8.scale)
def float8_scale(x: Spec, dims: Sequence[int], format: str) -> Rule:
    """Scales along some dims: a maximum over the devices that share such a dim."""
    among = "".join("mk"[d] for d in dims)
    kept = "".join("1" if c in among else c for c in "mk")
    # Zeros change no maximum.
    padded = dict.fromkeys(among, Padding((0.0,)))
    return Rule(f"mk->{kept}", keep=among, lower=dict.fromkeys(among, SCALED), padded=padded)


LARGEST = Lowering(lambda context, x: context.all_reduce(float8.amax(x), "max", joined=True), anywhere=True)
"""The largest entry of a whole tensor is the largest of its parts'."""


@rule(float8.amax)
def float8_amax(x: Spec) -> Rule:
    """The largest entry: a maximum over the devices that share the tensor, see `autopar.passes.join_maxima`."""
    return Rule("mk->11", keep="mk", lower=dict.fromkeys("mk", LARGEST), padded=dict.fromkeys("mk", Padding((0.0,))))


@rule(float8.delayed_scale)
def float8_delayed_scale(history: Spec, row: int, format: str) -> Rule:
    """A scale of earlier steps; histories are on every device."""
    return Rule("rs->11", blocked="rs")


@rule(float8.quantize)
def float8_quantize(x: Spec, scale: Spec, format: str, delayed: bool = False) -> Rule:
    """Values over their scale, rounded."""
    shared = "".join(c if n != 1 else "1" for c, n in zip("mk", scale.shape, strict=True))
    # A zero is the byte zero, whatever its scale is; but a scale in the padding may be no number.
    return Rule(f"mk,{shared}->mk", padded={c: Padding((0.0,), 0.0) for c in "mk" if c not in shared})


@rule(float8.product)
def float8_product(
    a: Spec, b: Spec, scale_a: Spec, scale_b: Spec, format_a: str, format_b: str, dtype: torch.dtype
) -> Rule:
    """Matrix times transposed matrix, of float8 values."""
    (m, k), n = a.shape, b.shape[0]
    rows, columns = ("1" if s.shape[0] == 1 else c for s, c in ((scale_a, "m"), (scale_b, "n")))
    padded = {"k": Padding((0.0, 0.0)), "m": Padding((0.0,), 0.0), "n": Padding((None, 0.0), 0.0)}
    return Rule(
        f"mk,nk,{rows}1,{columns}1->mn", reduce="k", flops=2.0 * m * k * n, rate="float8",
        padded={c: content for c, content in padded.items() if c not in (rows, columns)},
        # Both operands with what is summed over in the last dim.
        strides=(ROW_MAJOR, ROW_MAJOR),
    )  # fmt: skip


BLOCKS = {"b": float8.BLOCK}
"""Numbers that share a scale stay together; whole blocks ``k`` may be apart."""


@rule(float8.block_scale)
def mxfp8_scale(x: Spec, format: str) -> Rule:
    """A scale of each block."""
    return Rule("m(kb)->mk", blocked="b", sizes=BLOCKS)


@rule(float8.block_quantize)
def mxfp8_quantize(x: Spec, scale: Spec, format: str) -> Rule:
    """Values over the scale of their block, rounded."""
    return Rule("m(kb),mk->m(kb)", blocked="b", sizes=BLOCKS)


@rule(float8.block_product)
def mxfp8_product(
    a: Spec, b: Spec, scale_a: Spec, scale_b: Spec, format_a: str, format_b: str, dtype: torch.dtype
) -> Rule:
    """Matrix times transposed matrix, of values with the scales of their blocks."""
    (m, k), n = a.shape, b.shape[0]
    return Rule(
        "m(kb),n(kb),mk,nk->mn", reduce="kb", blocked="b", flops=2.0 * m * k * n, rate="mxfp8", sizes=BLOCKS,
        strides=(ROW_MAJOR, ROW_MAJOR),
    )  # fmt: skip
