"""The kernels of attention: flash, memory-efficient and cuDNN's as torch chooses them, and a formula for all else.

They differ in the form of what they save, which is one here: the result, and the logarithm of each query's sum of
exponentials as ``[batch, heads, queries]``. A kernel with dropout also returns the random state that it drew from, and
its backward takes that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from autopar._torch_compat import attention_kernel

aten = torch.ops.aten

CPU, FLASH, EFFICIENT, CUDNN, MATH = "flash on a CPU", "flash", "memory-efficient", "cuDNN", "formula"

Kernel = tuple[str, bool]
"""A kernel's name, and whether keys and values are repeated for it, as many as there are queries' heads."""

LARGE = -1e30
"""Numbers up to this hide a key, in whose score's place they are."""

NOTHING = -1e30
"""The logarithm of no exponentials: finite, so that differences of two of them are numbers."""

_chosen: dict[Any, Kernel] = {}


def register(library: Any, name: str, kernel: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Give an operator of ours its kernel, the same on CPUs and GPUs, and the function that tells the shapes it makes.

    Args:
        library: that defines it.
        name: of the operator.
        kernel: what it does.
        shapes: the same of tensors without values.
    """
    library.impl(name, kernel, "CPU")
    library.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"autopar::{name}", shapes, lib=library)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """In which kernels compute sums, and give logarithms of them."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def scale_of(query: Tensor, scale: float | None) -> float:
    """What scores are multiplied by."""
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _rows(tensor: Tensor, kv_heads: int) -> Tensor:
    """``[batch, heads, queries, n]`` with the queries of all heads that share a key: ``[batch, kv_heads, rows, n]``."""
    return tensor.reshape(tensor.shape[0], kv_heads, -1, tensor.shape[-1])


def _laid_out(tensor: Tensor) -> Tensor:
    """The same with heads next to their elements in memory, as kernels leave them."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _products(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    wide, heads = wide_dtype(query), key.shape[1]
    scores = _rows(query.to(wide) * scale_of(query, scale), heads) @ key.to(wide).transpose(2, 3)
    return scores.reshape(*query.shape[:3], key.shape[2])


def _with_bias(scores: Tensor, bias: Tensor | None, is_causal: bool, placed: bool) -> Tensor:
    if bias is not None:
        added = scores + bias
        scores = torch.where(bias <= LARGE, bias, added) if placed else added
    if is_causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _softmax(scores: Tensor, nothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Weights and the logarithm of each query's sum, also where all scores are a large number, in which that is lost.

    A query that sees no key gets zeros, as of torch's kernels, and ``nothing``.
    """
    largest = scores.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    unseeing = total == 0.0
    total = total.masked_fill(unseeing, 1.0)
    return weights / total, (largest + total.log()).masked_fill(unseeing, nothing).squeeze(-1)


def math(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, cap: float | None = None, placed: bool = False, shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by its formula, for whatever no kernel takes; it makes all scores.

    Args:
        query: see `autopar.ir.ops.attention.attention`, as for all others up to ``scale``.
        key: see there.
        value: see there.
        bias: see there.
        kept: see there.
        dropout_p: see there.
        is_causal: see there.
        scale: see there.
        cap: scores are ``cap * tanh(scores / cap)`` before the bias; None: as they are.
        placed: those of the bias stand in the places of scores, which have no gradients; they are not added to them.
        shift: a number of each query, of which the logarithm is that of exponentials of scores less it, so that it has
            all digits where large numbers hide all keys; that of a query that sees no key is then `NOTHING`.
    """
    scores = _products(query, key, scale)
    scores = _with_bias(scores if cap is None else cap * torch.tanh(scores / cap), bias, is_causal, placed)
    weights, total = _softmax(scores) if shift is None else _softmax(scores - shift, NOTHING)
    if kept is not None:
        weights = weights * kept / (1.0 - dropout_p)
    out = (_rows(weights, key.shape[1]) @ value.to(weights.dtype)).reshape(*query.shape[:3], value.shape[3])
    return out.to(query.dtype), total


def math_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, out: Tensor,
    logsumexp: Tensor, dropout_p: float, is_causal: bool, scale: float | None, bias_gradient: bool,
    cap: float | None = None, placed: bool = False, shift: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Its gradients from what a forward saved (T. Dao et al., "FlashAttention", 2022, appendix B.4)."""
    wide, heads = wide_dtype(query), key.shape[1]
    scores, capped = _products(query, key, scale), None
    if cap is not None:
        capped = torch.tanh(scores / cap)
        scores = cap * capped
    scores = _with_bias(scores, bias, is_causal, placed)
    scores = scores if shift is None else scores - shift
    weights = torch.exp(scores - logsumexp.unsqueeze(-1))
    if bias is not None and shift is None:
        # A logarithm has lost how many keys there are where all scores are a large number.
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1.0)
    rows = _rows(grad.to(wide), heads)
    of_weights = (rows @ value.to(wide).transpose(2, 3)).reshape(weights.shape)
    used = weights
    if kept is not None:
        used, of_weights = (t * kept / (1.0 - dropout_p) for t in (weights, of_weights))
    of_value = _rows(used, heads).transpose(2, 3) @ rows
    of_scores = weights * (of_weights - (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True))
    of_bias = of_scores.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and bias_gradient else None
    if placed and bias is not None:
        of_scores = of_scores.masked_fill(bias <= LARGE, 0.0)
    of_scores = of_scores if capped is None else of_scores * (1.0 - capped * capped)
    scaled = _rows(of_scores, heads) * scale_of(query, scale)
    of_query = (scaled @ key.to(wide)).reshape(query.shape)
    of_key = scaled.transpose(2, 3) @ _rows(query.to(wide), heads)
    pairs = ((of_query, query), (of_key, key), (of_value, value))
    return *(_laid_out(a.to(b.dtype)) for a, b in pairs), query.new_empty(0) if of_bias is None else of_bias


def choose(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool) -> Kernel:
    """The kernel that torch would take; for equal shapes always the same, so that a backward takes its forward's."""
    tensors = (query, key, value, *([] if bias is None else [bias]))
    call = (query.device, query.dtype, *(t.shape for t in tensors), bias is None, dropout_p > 0, is_causal)
    if call not in _chosen:
        shared = key.shape[1] != query.shape[1]
        name = _name(query, key, value, bias, dropout_p, is_causal, shared)
        repeats = shared and name == MATH and query.device.type != "cpu"
        if repeats:
            name = _name(query, _repeated(query, key), _repeated(query, value), bias, dropout_p, is_causal, False)
        _chosen[call] = name, repeats and name != MATH
    return _chosen[call]


def draws(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool
) -> bool:  # fmt: skip
    """Whether there is a kernel that draws its dropout itself."""
    on_gpu = query.device.type == "cuda"
    return on_gpu and choose(query, key, value, bias, dropout_p, is_causal)[0] in (FLASH, EFFICIENT, CUDNN)


def _name(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool, shared: bool
) -> str:
    found = attention_kernel(query, key, value, bias, dropout_p, is_causal, shared)
    if query.device.type == "cpu":
        return CPU if found == SDPBackend.FLASH_ATTENTION else MATH
    # Of these two only the memory-efficient one has a gradient of the bias.
    if found == SDPBackend.CUDNN_ATTENTION and bias is not None:
        return EFFICIENT
    return {SDPBackend.FLASH_ATTENTION: FLASH, SDPBackend.EFFICIENT_ATTENTION: EFFICIENT,
            SDPBackend.CUDNN_ATTENTION: CUDNN}.get(found, MATH)  # fmt: skip


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Attention by the kernel that torch would take: result, logarithms, and the random state of a GPU's dropout."""
    name, repeats = choose(query, key, value, bias, dropout_p, is_causal)
    if repeats:
        key, value = _repeated(query, key), _repeated(query, value)
    made: tuple[Any, ...] = FORWARD[name](query, key, value, bias, dropout_p, is_causal, scale_of(query, scale))
    return made


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, logsumexp: Tensor,
    seed: Tensor | None, offset: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    bias_gradient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients by the kernel of the forward; of query, key, value and bias."""
    name, repeats = choose(query, key, value, bias, dropout_p, is_causal)
    whole = (_repeated(query, t) for t in (key, value)) if repeats else (key, value)
    state = (query.new_zeros((), dtype=torch.int64) if t is None else t for t in (seed, offset))
    of_query, of_key, of_value, of_bias = BACKWARD[name](
        grad, query, *whole, bias, out, logsumexp, *state, dropout_p, is_causal, scale_of(query, scale), bias_gradient
    )
    if repeats:
        of_key, of_value = (
            t.reshape(*s.shape[:2], -1, *s.shape[2:]).sum(2) for t, s in ((of_key, key), (of_value, value))
        )
    if of_bias is None or bias is None:
        return of_query, of_key, of_value, query.new_empty(0)
    return of_query, of_key, of_value, of_bias.sum_to_size(bias.shape)


def _repeated(query: Tensor, tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _eights(tensor: Tensor) -> Tensor:
    """Heads of a multiple of eight elements, which flash attention asks for."""
    return pad(tensor, (0, -tensor.shape[-1] % 8))


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, causal: bool, scale: float) -> Any:
    kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
    return kernel(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, p: float, causal: bool, scale: float, bias_gradient: bool,
) -> Any:  # fmt: skip
    if bias_gradient:  # which this kernel has not
        return math_backward(grad, q, k, v, bias, None, out, lse, 0.0, causal, scale, True)
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return *kernel(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale), None


def _math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, causal: bool, scale: float) -> Any:
    return math(q, k, v, bias, None, 0.0, causal, scale)


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, p: float, causal: bool, scale: float, bias_gradient: bool,
) -> Any:  # fmt: skip
    found = math_backward(grad, q, k, v, bias, None, out, lse, 0.0, causal, scale, bias_gradient)
    return *found[:3], found[3] if bias_gradient else None


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, causal: bool, scale: float) -> Any:
    found = aten._scaled_dot_product_flash_attention.default(*map(_eights, (q, k, v)), p, causal, False, scale=scale)
    return found[0][..., : v.shape[3]], found[1], found[6], found[7]


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, p: float, causal: bool, scale: float, bias_gradient: bool,
) -> Any:  # fmt: skip
    found = aten._scaled_dot_product_flash_attention_backward.default(
        *map(_eights, (grad, q, k, v, out)), lse.contiguous(), None, None, q.shape[2], k.shape[2], p, causal, seed,
        offset, scale=scale,
    )  # fmt: skip
    return *(t[..., : of.shape[3]] for t, of in zip(found, (q, k, v), strict=True)), None


def _whole_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A bias that is broadcast, its rows starting where GPUs load from."""
    if bias is None:
        return None
    if bias.shape[-1] % 8 or bias.stride(-1) != 1 or any(n % 8 for n in bias.stride()[:-1]):
        bias = pad(bias, (0, -bias.shape[-1] % 8))[..., : bias.shape[-1]]
    return bias.expand(*q.shape[:3], k.shape[2])


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, causal: bool, scale: float) -> Any:
    found = aten._scaled_dot_product_efficient_attention.default(
        q, k, v, _whole_bias(bias, q, k), True, p, causal, scale=scale
    )
    return found[0], found[1][..., : q.shape[2]], found[2], found[3]  # its logarithms are padded


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, p: float, causal: bool, scale: float, bias_gradient: bool,
) -> Any:  # fmt: skip
    padded = pad(lse, (0, -lse.shape[-1] % 32)).contiguous()
    wanted = [True, True, True, bias_gradient]
    return aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, _whole_bias(bias, q, k), out, padded, seed, offset, p, wanted, causal, scale=scale
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, causal: bool, scale: float) -> Any:
    found = aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, _whole_bias(bias, q, k), True, p, causal, False, scale=scale
    )
    return found[0], found[1].squeeze(-1), found[6], found[7]


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, p: float, causal: bool, scale: float, bias_gradient: bool,
) -> Any:  # fmt: skip
    found = aten._scaled_dot_product_cudnn_attention_backward.default(
        grad, q, k, v, out, lse.unsqueeze(-1).contiguous(), seed, offset, _whole_bias(bias, q, k), None, None,
        q.shape[2], k.shape[2], p, causal, scale=scale,
    )  # fmt: skip
    return *found, None


FORWARD: dict[str, Callable[..., Any]] = {
    CPU: _cpu, FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn, MATH: _math,
}  # fmt: skip
BACKWARD: dict[str, Callable[..., Any]] = {
    CPU: _cpu_backward, FLASH: _flash_backward, EFFICIENT: _efficient_backward, CUDNN: _cudnn_backward,
    MATH: _math_backward,
}  # fmt: skip
