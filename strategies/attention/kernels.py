"""Attention of single devices: torch's kernels, where a graph has one that stays.

What these draw themselves cannot be split.
"""

from typing import Any

import torch

from autopar.rules.rule import ANY, LAST, ROW_MAJOR, Lowering, Rule, Spec, rule
from autopar.strategies.attention.letters import (
    BHKD,
    BHKE,
    BHQD,
    BHQE,
    HEADS_LAST,
    blocked,
    count_flops,
    head_sizes,
    hide_later_keys,
    mask_letters,
    plain_letters,
)

aten = torch.ops.aten


def _masking(kernel: Any) -> Lowering:
    """A causal kernel on some of the queries: it must be told which keys these do not see, and skips none of them."""

    def build(context: Any, *args: Any, scale: float | None = None) -> Any:
        *tensors, dropout_p, _ = args
        return kernel(*tensors, dropout_p, False, attn_mask=hide_later_keys(context, tensors[0]), scale=scale)

    return Lowering(build)


def _forward(
    query: Spec, key: Spec, value: Spec, extra: list[str], outputs: str, dropout_p: float, causal: bool,
    tied: bool = False, masked: Any = None, strides: tuple[str, ...] = HEADS_LAST,
) -> Rule:  # fmt: skip
    """A forward kernel; ``tied``: its queries cannot be split; ``masked``: the kernel that takes any mask."""
    # Only a kernel that takes a mask can be told which queries a device has.
    told = causal and masked is not None
    return Rule(
        f"{','.join([BHQD, BHKD, BHKE, *extra])}->{outputs}",
        blocked=blocked(dropout_p, tied or (causal and not told)),
        # Outputs without these letters are random states, the same on every device.
        keep="bhgq",
        random=dropout_p > 0,
        lower={"q": _masking(masked)} if told else {},
        sizes=head_sizes(query, key),
        flops=count_flops(query, key, value, 2.0, causal),
        strides=strides,
    )


def _backward(
    query: Spec, key: Spec, value: Spec, inputs: list[str], outputs: str, dropout_p: float, causal: bool,
    tied: bool = False, scaled: Any = (), masked: Any = None, strides: tuple[str, ...] = (),
) -> Rule:  # fmt: skip
    """Its backward kernel."""
    told = causal and masked is not None
    return Rule(
        f"{','.join(inputs)}->{outputs}",
        blocked=blocked(dropout_p, tied or (causal and not told)),
        reduce="bhgq",
        # Linear in the gradient of the output, all that was saved being fixed.
        linear=((0,),) if dropout_p == 0 else (),
        scaled=dict(scaled),
        lower={"q": _masking(masked)} if told else {},
        sizes=head_sizes(query, key),
        flops=count_flops(query, key, value, 5.0, causal),
        strides=strides,
    )


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def cpu(
    query: Spec, key: Spec, value: Spec, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Spec | None = None, scale: float | None = None,
) -> Rule:  # fmt: skip
    """Attention on a CPU."""
    extra = [] if attn_mask is None else [mask_letters(attn_mask)]
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    return _forward(query, key, value, extra, f"{BHQE},b(hg)q", dropout_p, is_causal, masked=kernel)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def cpu_backward(
    grad: Spec, query: Spec, key: Spec, value: Spec, out: Spec, logsumexp: Spec, dropout_p: float, is_causal: bool, *,
    attn_mask: Spec | None = None, scale: float | None = None,
) -> Rule:  # fmt: skip
    """Its gradients of query, key and value."""
    extra = [] if attn_mask is None else [mask_letters(attn_mask)]
    inputs = [BHQE, BHQD, BHKD, BHKE, BHQE, "b(hg)q", *extra]
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return _backward(
        query, key, value, inputs, f"{BHQD},{BHKD},{BHKE}", dropout_p, is_causal, masked=kernel,
        strides=(ANY, *HEADS_LAST, LAST),
    )  # fmt: skip


@rule(aten._scaled_dot_product_flash_attention.default)
def flash(
    query: Spec, key: Spec, value: Spec, dropout_p: float = 0.0, is_causal: bool = False, *_: Any, **__: Any
) -> Rule:
    """Flash attention on a GPU."""
    outputs = f"{BHQE},b(hg)q,_,_,_,_,1,.,1"
    return _forward(query, key, value, [], outputs, dropout_p, is_causal)


@rule(aten._scaled_dot_product_flash_attention_backward.default)
def flash_backward(grad: Spec, query: Spec, key: Spec, value: Spec, *args: Any, **_: Any) -> Rule:
    """Its gradients; ``args``: out, logsumexp, cum_seq (2), max_q, max_k, dropout, causal, seed, offset."""
    # Cumulative lengths are None outside of nested tensors; seed and offset are small tensors.
    plain = [text for t in (*args[2:4], *args[8:10]) for text in plain_letters(t)]
    inputs = [BHQE, BHQD, BHKD, BHKE, BHQE, "b(hg)q", *plain]
    strides = (LAST, *HEADS_LAST, LAST, ROW_MAJOR)
    outputs = f"{BHQD},{BHKD},{BHKE}"
    return _backward(query, key, value, inputs, outputs, args[6], args[7], scaled={8: "q"}, strides=strides)


@rule(aten._scaled_dot_product_efficient_attention.default)
def efficient(
    query: Spec,
    key: Spec,
    value: Spec,
    attn_bias: Spec | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Rule:
    """Memory-efficient attention on a GPU; its logsumexp is padded, so queries are not split."""
    extra = [] if attn_bias is None else [mask_letters(attn_bias)]
    strides = (*HEADS_LAST, LAST)
    return _forward(query, key, value, extra, f"{BHQE},b(hg)1,.,.", dropout_p, is_causal, tied=True, strides=strides)


@rule(aten._scaled_dot_product_efficient_attention_backward.default)
def efficient_backward(
    grad: Spec, query: Spec, key: Spec, value: Spec, attn_bias: Spec | None, *args: Any, **_: Any
) -> Rule:
    """Its gradients; ``args``: out, logsumexp, seed, offset, dropout, gradient mask, causal."""
    bias = [] if attn_bias is None else [mask_letters(attn_bias)]
    plain = [text for t in args[2:4] for text in plain_letters(t)]
    inputs = [BHQE, BHQD, BHKD, BHKE, *bias, BHQE, "b(hg)1", *plain]
    outputs = [BHQD, BHKD, BHKE, *(bias or ["_"])]
    # The gradient mask says which of the four gradients there are.
    masked = ",".join(text if wanted else "_" for text, wanted in zip(outputs, args[5], strict=True))
    strides = (LAST, *HEADS_LAST, *[LAST] * len(bias), LAST, ROW_MAJOR)
    return _backward(query, key, value, inputs, masked, args[4], any(args[6:7]), tied=True, strides=strides)


@rule(aten._scaled_dot_product_cudnn_attention.default)
def cudnn(
    query: Spec,
    key: Spec,
    value: Spec,
    attn_bias: Spec | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    **__: Any,
) -> Rule:
    """CuDNN's attention."""
    extra = [] if attn_bias is None else [mask_letters(attn_bias)]
    outputs, strides = f"{BHQE},b(hg)q1,_,_,_,_,.,.,_", (*HEADS_LAST, LAST)
    return _forward(query, key, value, extra, outputs, dropout_p, is_causal, strides=strides)


@rule(aten._scaled_dot_product_cudnn_attention_backward.default)
def cudnn_backward(grad: Spec, query: Spec, key: Spec, value: Spec, *args: Any, **_: Any) -> Rule:
    """Its gradients; ``args``: out, logsumexp, seed, offset, bias, cum_seq (2), max_q, max_k, dropout, causal."""
    bias = [mask_letters(args[4])] if isinstance(args[4], Spec) else []
    plain = [text for t in args[2:4] for text in plain_letters(t)]
    cumulative = [text for t in args[5:7] for text in plain_letters(t)]
    inputs = [BHQE, BHQD, BHKD, BHKE, BHQE, "b(hg)q1", *plain, *bias, *cumulative]
    outputs, strides = (
        f"{BHQD},{BHKD},{BHKE}",
        (LAST, *HEADS_LAST, LAST, ROW_MAJOR, *[ANY] * len(plain), *[LAST] * len(bias)),
    )
    return _backward(query, key, value, inputs, outputs, args[9], args[10], scaled={11: "q"}, strides=strides)
