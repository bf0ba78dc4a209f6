"""Scaled dot-product attention: our operators.

Batch and heads are free. So are queries, where the kernel takes any mask: a causal one must know which queries a device
has. The gradients of keys and values are sums over them. Keys are tied together by the softmax. With dropout it is as
free, since what is kept is an argument.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.ir.ops import attention as ours
from autopar.ir.ops import balanced_attention as in_blocks
from autopar.ir.ops.formula import attention_block as in_blocks_of_keys
from autopar.ir.ops.formula import attention_rows as by_rows
from autopar.ir.ops.sequence import masked_attention as masked
from autopar.ir.ops.sequence import masked_parts as in_parts
from autopar.ir.ops.sequence import ring_attention as in_a_ring
from autopar.ir.ops.sequence import ring_beside_rows as beside_rows
from autopar.rules.rule import ANY, LAST, Lowering, Padding, Rule, Spec, rule
from autopar.strategies.attention.letters import (
    BHKD,
    BHKE,
    BHQD,
    BHQE,
    BHQK,
    HEADS_LAST,
    blocked,
    count_flops,
    head_sizes,
    hide_later_keys,
    mask_letters,
    plain_letters,
)

FORWARD_PASSES, BACKWARD_PASSES = 11, 24
"""How often attention by its formula reads or writes a tensor of its scores' size, see `attention_kernels.math`."""

WORTH_BLOCKS = 3e11
"""Operations that a device must save by not computing what a causal mask hides, about 100 launches on an H100."""


def _balances(context: Any, query: Any, _: Any, value: Any) -> bool:
    """Whether queries are as many as keys, in two blocks a device along one axis, and worth the launches."""
    if context.parts == 1 or context.axis_count != 1 or context.local_size("q") % 2:
        return False
    (b, heads, queries, d), (_, _, keys, e) = in_blocks.shape_of(query), in_blocks.shape_of(value)
    saved = b * heads * queries * keys * (d + e)
    return bool(context.global_size("q") == context.global_size("k") and saved >= WORTH_BLOCKS)


def _forward_in_blocks(context: Any, args: Any) -> Any:
    query, key, value, *_, scale = args
    return in_blocks.attend(context.swap_blocks, context.axis_index(), context.parts, query, key, value, scale)


def _backward_in_blocks(context: Any, args: Any) -> Any:
    grad, query, key, value, _, _, out, logsumexp, _, _, scale, _ = args
    tensors = (grad, query, key, value, out, logsumexp)
    return (*in_blocks.gradients(context.swap_blocks, context.axis_index(), context.parts, *tensors, scale), None)


def _masked(kernel: Any, bias: int, causal: int, balanced: Any) -> Lowering:
    """Our causal operator on some of the queries: in blocks that balance, see `autopar.ir.ops.balanced_attention`.

    With dropout, and where there are no such blocks, a bias tells which keys a query does not see, and none is skipped.
    ``bias`` and ``causal`` are positions of arguments, ``balanced(context, args)`` emits the blocks.
    """

    def build(context: Any, *args: Any) -> Any:
        if args[bias + 1] is None and _balances(context, *args[bias - 3 : bias]):
            return balanced(context, args)
        mask = hide_later_keys(context, args[0])
        return kernel(*({bias: mask, causal: False}.get(i, a) for i, a in enumerate(args)))

    return Lowering(build)


def no_ring(queries: int, keys: int, bias: Any, kept: Any, causal: bool) -> str | None:
    """Why keys and values of a call cannot go round in a ring, whatever the mesh; None if they can."""
    if causal and queries != keys and bias is None and kept is None:
        return f"its mask is causal, of {queries} queries and {keys} keys"
    return None


def _ring(
    query: Spec, key: Spec, bias: Spec | None, kept: Spec | None, causal: bool, build: Any, beside: Any
) -> dict[str, Lowering]:  # fmt: skip
    """Queries, keys and values split together; under a causal mask in two blocks a device, but ``beside`` other rows.

    Of a device with one key no shape says whether a bias has keys.
    """
    if no_ring(query.shape[2], key.shape[2], bias, kept, causal) is not None:
        return {}
    if bias is not None or kept is not None:
        return {"qk": Lowering(beside, axes=1, least=2, first=True)}
    return {"qk": Lowering(build, multiple=2 if causal else 1, axes=1)}


def _forward_beside_rows(context: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    return beside_rows.attend(context, query, key, value, beside_rows.Rows(*rest))


def _backward_beside_rows(context: Any, *args: Any) -> Any:
    grad, query, key, value, bias, kept, out, logsumexp, *numbers, wanted = args
    rows = beside_rows.Rows(bias, kept, *numbers)
    return beside_rows.gradients(context, grad, query, key, value, out, logsumexp, rows, wanted)


def _forward_of_rows(context: Any, *args: Any) -> Any:
    query, key, value, bias, kept, dropout_p, scale, cap, placed = args
    rows = beside_rows.Rows(bias, kept, dropout_p, False, scale, cap, placed, shifted=True)
    return beside_rows.attend(context, query, key, value, rows)


def _backward_of_rows(context: Any, *args: Any) -> Any:
    grad, query, key, value, bias, kept, out, logsumexp, dropout_p, scale, cap, placed, wanted = args
    rows = beside_rows.Rows(bias, kept, dropout_p, False, scale, cap, placed, shifted=True)
    return beside_rows.gradients(context, grad, query, key, value, out, logsumexp, rows, wanted)


def _forward_in_a_ring(context: Any, *args: Any) -> Any:
    query, key, value, _, _, _, causal, scale = args
    return in_a_ring.attend(context, query, key, value, causal, scale)


def _backward_in_a_ring(context: Any, *args: Any) -> Any:
    grad, query, key, value, _, _, out, logsumexp, _, causal, scale, _ = args
    return (*in_a_ring.gradients(context, grad, query, key, value, out, logsumexp, causal, scale), None)


_PADDED = {"q": Padding((None,) * 3), "k": Padding((None, 0.0, 0.0))}
"""Queries do not see each other; keys behind the last one are hidden, but what they are is multiplied by zero."""

_PADDED_BACKWARD = {
    "q": Padding((0.0, 0.0, None, None, 0.0, 0.0), 0.0),
    "k": Padding((None, None, 0.0, 0.0, None, None), 0.0),
}
"""A query whose gradient is zero has no part in any."""


def _behind(padded: Mapping[str, Padding], query: Spec, key: Spec) -> dict[str, Padding]:
    """What is behind the end under a causal mask: a query behind the last key would see keys that are not there."""
    return {c: p for c, p in padded.items() if c == "q" or query.shape[2] <= key.shape[2]}


def _beyond(
    padded: Mapping[str, Padding], key: Spec, leaves: int, at: int, mask: tuple[Any, ...]
) -> dict[str, Padding]:  # fmt: skip
    """What is behind the end under a mask's function, which has no keys beyond its positions; leaves come ``at``."""
    _, _, _, _, first_query, first_key, positions, *_ = mask
    if first_query or first_key or positions != key.shape[2] or mask[10:11] in ((masked.ROWS,), (masked.PLACES,)):
        return {}
    zeros = (0.0,) * leaves
    return {c: replace(p, inputs=(*p.inputs[:at], *zeros, *p.inputs[at:])) for c, p in padded.items()}


def _formula(query: Spec, key: Spec, kept: Spec | None, passes: int) -> float:
    """Bytes that the formula writes and reads in so many passes over all scores; kernels make none."""
    if kept is None:
        return 0.0
    wide = max(getattr(query.dtype, "itemsize", 4), 4)
    return float(passes * wide * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2])


def _pairs(kept: Spec | None) -> list[str]:
    """Letters of what dropout keeps."""
    return [] if kept is None else [BHQK]


@rule(ours.attention)
def attention(
    query: Spec,
    key: Spec,
    value: Spec,
    bias: Spec | None,
    kept: Spec | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Rule:
    """Attention, with dropout or without."""
    told = bias is None and is_causal
    extra = [*([] if bias is None else [mask_letters(bias)]), *_pairs(kept)]
    return Rule(
        f"{','.join([BHQD, BHKD, BHKE, *extra])}->{BHQE},b(hg)q",
        blocked=blocked(0.0, is_causal and not told),
        lower={
            **({"q": _masked(ours.attention, 3, 6, _forward_in_blocks)} if told else {}),
            **_ring(query, key, bias, kept, is_causal, _forward_in_a_ring, _forward_beside_rows),
        },
        sizes=head_sizes(query, key),
        padded=_behind(_PADDED, query, key) if told and kept is None else {},
        flops=count_flops(query, key, value, 2.0, is_causal),
        between=_formula(query, key, kept, FORWARD_PASSES),
        # The formula, which is what takes an argument of what is kept, reads any strides.
        strides=HEADS_LAST if kept is None else ANY,
    )


@rule(ours.attention_backward)
def attention_backward(
    grad: Spec,
    query: Spec,
    key: Spec,
    value: Spec,
    bias: Spec | None,
    kept: Spec | None,
    out: Spec,
    logsumexp: Spec,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    bias_gradient: bool,
) -> Rule:
    """Its gradients; of the bias, if it has one and it is wanted, the sum over what it is the same for."""
    told = bias is None and is_causal
    masks = [] if bias is None else [mask_letters(bias)]
    inputs = [BHQE, BHQD, BHKD, BHKE, *masks, *_pairs(kept), BHQE, "b(hg)q"]
    made = masks[0] if masks and bias_gradient else "_"
    return Rule(
        f"{','.join(inputs)}->{BHQD},{BHKD},{BHKE},{made}",
        blocked=blocked(0.0, is_causal and not told),
        reduce="bhgq",
        # Linear in the gradient of the output, all that was saved being fixed.
        linear=((0,),),
        lower={
            **({"q": _masked(ours.attention_backward, 4, 9, _backward_in_blocks)} if told else {}),
            **_ring(query, key, bias, kept, is_causal, _backward_in_a_ring, _backward_beside_rows),
        },
        sizes=head_sizes(query, key),
        padded=_behind(_PADDED_BACKWARD, query, key) if told and kept is None else {},
        flops=count_flops(query, key, value, 5.0, is_causal),
        between=_formula(query, key, kept, BACKWARD_PASSES),
        strides=(LAST, *HEADS_LAST, *[ANY] * len(masks), LAST) if kept is None else ANY,
    )


def _by_function(
    query: Spec, key: Spec, value: Spec, leaves: Sequence[Spec], mask: tuple[Any, ...], products: float,
    lower: tuple[Any, Any],
) -> dict[str, Any]:  # fmt: skip
    """What forward and backward under a mask's function have in common; ``lower``: of queries, and with keys."""
    formula, added, before, after, _, _, positions, *_ = mask
    # Arguments that are left out have their defaults.
    more: tuple[Any, ...] = (*mask[8:], *(None, None, masked.NUMBERS)[len(mask) - 8 :])
    table, _, hides = more
    (b, h, q, d), k, e = query.shape, key.shape[2], value.shape[3]
    by_formula = _is_by_formula(mask)
    scores = masked.pairs(q, k, before, after, positions, b * h if by_formula else 1)
    # Of a mask's rows each call of the formula writes a number and reads one or two.
    rows = max((math.prod(t.shape[:2]) for t in leaves), default=1)
    calls = 3 + formula.count("[") + (0 if table is None else 2 * table.shape[1])
    split = in_parts.is_windowed(before, after, q, k)
    # Of a device with one key no shape says which leaves have keys.
    ring = {"qk": Lowering(lower[1], axes=1, least=2)} if in_parts.is_joined(added, hides) else {}
    read = 8.0 * calls * rows * scores if formula or split else 0.0
    wide = max(getattr(query.dtype, "itemsize", 4), 4)
    passes = (FORWARD_PASSES if products < 5.0 else BACKWARD_PASSES) if by_formula else 0
    return {
        "blocked": blocked(0.0, False),
        "lower": {**({"q": Lowering(lower[0])} if split else {}), **ring},
        "sizes": head_sizes(query, key),
        "flops": products * b * h * scores * (d + e),
        "between": read + passes * wide * b * h * scores,
    }


def _is_by_formula(mask: tuple[Any, ...]) -> bool:
    """Whether no kernel computes attention, since scores are capped or rows may be hidden: the formula does."""
    return any(cap is not None for cap in mask[9:10]) or any(h in (masked.ROWS, masked.PLACES) for h in mask[10:11])


def _tables(mask: tuple[Any, ...]) -> list[str]:
    """Letters of the table that a mask's formula looks up."""
    return ["1(hg)" if t.shape[1] > 1 else "11" for t in mask[8:9] if t is not None]


def _shift(rest: tuple[Any, ...]) -> list[str]:
    """Letters of what scores are less, of some of the keys."""
    return [mask_letters(t) for t in rest if isinstance(t, Spec)]


@rule(masked.attention_masked)
def attention_masked(query: Spec, key: Spec, value: Spec, leaves: Sequence[Spec], *mask: Any) -> Rule:
    """Attention under a mask that is given by its function."""
    lower = (in_parts.of_some_queries, in_parts.attend)
    inputs = [BHQD, BHKD, BHKE, *map(mask_letters, leaves), *_tables(mask), *_shift(mask[11:])]
    return Rule(
        f"{','.join(inputs)}->{BHQE},b(hg)q",
        strides=ANY if _is_by_formula(mask) else HEADS_LAST,
        padded=_beyond(_PADDED, key, len(leaves), 3, mask),
        **_by_function(query, key, value, leaves, mask[:11], 2.0, lower),
    )


@rule(masked.attention_masked_backward)
def attention_masked_backward(
    grad: Spec, query: Spec, key: Spec, value: Spec, leaves: Sequence[Spec], out: Spec, logsumexp: Spec, *mask: Any
) -> Rule:
    """Its gradients; of the table, if it has one and it is wanted, the sum over what it is the same for."""
    lower, tables = (in_parts.gradients_of_some_queries, in_parts.gradients), _tables(mask)
    inputs = [BHQE, BHQD, BHKD, BHKE, *map(mask_letters, leaves), BHQE, "b(hg)q", *tables, *_shift(mask[12:])]
    made = tables[0] if tables and mask[11:12] == (True,) else "_"
    return Rule(
        f"{','.join(inputs)}->{BHQD},{BHKD},{BHKE},{made}",
        reduce="bhgq",
        linear=((0,),),
        strides=ANY if _is_by_formula(mask) else (LAST, *HEADS_LAST, *[ANY] * len(leaves), LAST),
        padded=_beyond(_PADDED_BACKWARD, key, len(leaves), 4, mask),
        **_by_function(query, key, value, leaves, mask[:11], 5.0, lower),
    )


@rule(by_rows.attention_rows)
def attention_rows(query: Spec, key: Spec, value: Spec, bias: Spec | None, kept: Spec | None, *_: Any) -> Rule:
    """Attention by its formula, some rows at a time."""
    found = attention(query, key, value, bias, kept, 0.0, False, None)
    ring = {"qk": Lowering(_forward_of_rows, axes=1, least=2, first=True)}
    return replace(found, lower=ring, between=_formula(query, key, query, FORWARD_PASSES), strides=ANY)


@rule(by_rows.attention_rows_backward)
def attention_rows_backward(
    grad: Spec, query: Spec, key: Spec, value: Spec, bias: Spec | None, kept: Spec | None, out: Spec, logsumexp: Spec,
    *rest: Any,
) -> Rule:  # fmt: skip
    """Its gradients; of the bias, if it has one and it is wanted, the sum over what it is the same for."""
    tensors = (grad, query, key, value, bias, kept, out, logsumexp)
    found = attention_backward(*tensors, 0.0, False, None, rest[-1])
    ring = {"qk": Lowering(_backward_of_rows, axes=1, least=2, first=True)}
    return replace(found, lower=ring, between=_formula(query, key, query, BACKWARD_PASSES), strides=ANY)


@rule(in_blocks_of_keys.attention_block)
def attention_block(
    query: Spec, key: Spec, value: Spec, bias: Spec | None, kept: Spec | None, shift: Spec, *_: Any
) -> Rule:  # fmt: skip
    """Attention to some keys, which lowerings emit."""
    tensors = [BHQD, BHKD, BHKE, *([] if bias is None else [mask_letters(bias)]), *_pairs(kept), mask_letters(shift)]
    return Rule(
        f"{','.join(tensors)}->{BHQE},b(hg)q",
        blocked=blocked(0.0, False),
        sizes=head_sizes(query, key),
        flops=count_flops(query, key, value, 2.0, False),
        between=_formula(query, key, query, FORWARD_PASSES),
        strides=ANY,
    )


@rule(in_blocks_of_keys.attention_block_backward)
def attention_block_backward(
    grad: Spec, query: Spec, key: Spec, value: Spec, bias: Spec | None, kept: Spec | None, shift: Spec, *rest: Any
) -> Rule:  # fmt: skip
    """Its gradients."""
    masks = [] if bias is None else [mask_letters(bias)]
    inputs = [BHQE, BHQD, BHKD, BHKE, *masks, *_pairs(kept), mask_letters(shift), BHQE, "b(hg)q"]
    return Rule(
        f"{','.join(inputs)}->{BHQD},{BHKD},{BHKE},{masks[0] if masks and rest[-1] else '_'}",
        blocked=blocked(0.0, False),
        reduce="bhgq",
        linear=((0,),),
        sizes=head_sizes(query, key),
        flops=count_flops(query, key, value, 5.0, False),
        between=_formula(query, key, query, BACKWARD_PASSES),
        strides=ANY,
    )


@rule(ours.attention_drawing)
def attention_drawing(query: Spec, key: Spec, value: Spec, bias: Spec | None, *rest: Any) -> Rule:
    """Attention that draws what dropout keeps: a pass makes it of blocks, which cannot be cut further."""
    extra = [] if bias is None else [mask_letters(bias)]
    equation, sizes = f"{','.join([BHQD, BHKD, BHKE, *extra])}->{BHQE},b(hg)q,_,_", head_sizes(query, key)
    flops = count_flops(query, key, value, 2.0, rest[1])
    return Rule(equation, blocked="bhgqkde", random=True, sizes=sizes, flops=flops, strides=HEADS_LAST)


@rule(ours.attention_drawing_backward)
def attention_drawing_backward(
    grad: Spec, query: Spec, key: Spec, value: Spec, bias: Spec | None, out: Spec, logsumexp: Spec, seed: Spec,
    offset: Spec, *rest: Any,
) -> Rule:  # fmt: skip
    """Its gradients."""
    masks = [] if bias is None else [mask_letters(bias)]
    state = [text for t in (seed, offset) for text in plain_letters(t)]
    inputs, made = [BHQE, BHQD, BHKD, BHKE, *masks, BHQE, "b(hg)q", *state], masks[0] if masks and rest[-1] else "_"
    equation, sizes = f"{','.join(inputs)}->{BHQD},{BHKD},{BHKE},{made}", head_sizes(query, key)
    strides = (LAST, *HEADS_LAST, *[ANY] * len(masks), LAST)
    flops = count_flops(query, key, value, 5.0, rest[1])
    return Rule(equation, blocked="bhgqkde", sizes=sizes, flops=flops, strides=strides)
