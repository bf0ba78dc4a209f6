"""Attention in graphs: one operator, whatever device, dtype, mask or dropout; its kernel is chosen as it runs.

``torch.ops.autopar.attention`` is what capture makes of every `scaled_dot_product_attention`, and canonicalization of
the operators that torch has for single devices. Which elements dropout keeps is an argument, a draw of the graph like
any other: so the operator is a function of its arguments, and blocks of it may be computed anywhere.

Before::

    out = scaled_dot_product_attention(q, k, v, dropout_p=0.1)

After::

    kept = autopar.draw("dropout", [0.1, 4], [batch, heads, queries, keys], [0, 1, 2, 3], dtype=bool)
    out, logsumexp = autopar.attention(q, k, v, None, kept, 0.1, False, None)

On GPUs `autopar.passes.rng.draw_in_attention` puts ``attention_drawing`` in the place of both: kernels that draw.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.ops import attention_kernels as kernels
from autopar.ir.ops.random import draw, dropout_draw, generator_state, replayed

aten = torch.ops.aten

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? bias"
_NUMBERS = "float dropout_p, bool is_causal, float? scale"
_library.define(f"attention({_TENSORS}, Tensor? kept, {_NUMBERS}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor grad, {_TENSORS}, Tensor? kept, Tensor out, Tensor logsumexp, {_NUMBERS}, "
    "bool bias_gradient) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"attention_drawing({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_library.define(
    f"attention_drawing_backward(Tensor grad, {_TENSORS}, Tensor out, Tensor logsumexp, Tensor seed, Tensor offset, "
    f"{_NUMBERS}, bool bias_gradient) -> (Tensor, Tensor, Tensor, Tensor)"
)

attention = torch.ops.autopar.attention.default
"""Scaled dot-product attention.

Args:
    query: ``[batch, heads, queries, head]``.
    key: ``[batch, kv_heads, keys, head]``; each serves ``heads / kv_heads`` consecutive heads of the queries.
    value: ``[batch, kv_heads, keys, value_head]``.
    bias: is added to the scores; broadcasts to ``[batch, heads, queries, keys]``; of two dims or four.
    kept: the elements that dropout keeps, bool ``[batch, heads, queries, keys]``; None: all.
    dropout_p: share of the elements that dropout drops.
    is_causal: query ``i`` sees keys up to ``i``.
    scale: of the scores; None: ``head ** -0.5``.

Returns:
    The result, ``[batch, heads, queries, value_head]``, and the logarithm of each query's sum of exponentials.
"""

attention_backward = torch.ops.autopar.attention_backward.default
"""Gradients of query, key, value and bias; that of the bias is empty where it is not asked for."""

attention_drawing = torch.ops.autopar.attention_drawing.default
"""Attention whose kernel draws what dropout keeps; it also gives the random state that its backward draws from."""

attention_drawing_backward = torch.ops.autopar.attention_drawing_backward.default
"""Its gradients."""


KEPT = {attention: 4, attention_backward: 5}
"""Operators that take what dropout keeps, and the number of that argument."""


def is_kept_only(node: fx.Node) -> bool:
    """Whether a node is what dropout keeps, drawn for attention and nothing else."""
    if node.target is not draw or not node.users:
        return False
    return all(u.target in KEPT and u.args[KEPT[u.target]] is node for u in node.users)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None,
    dropout_p: float, is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if kept is not None:
        return kernels.math(query, key, value, bias, kept, dropout_p, is_causal, scale)
    return kernels.forward(query, key, value, bias, 0.0, is_causal, scale)[:2]


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None,
    out: Tensor, logsumexp: Tensor, dropout_p: float, is_causal: bool, scale: float | None, bias_gradient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors = (grad, query, key, value, bias)
    if kept is not None:
        return kernels.math_backward(*tensors, kept, out, logsumexp, dropout_p, is_causal, scale, bias_gradient)
    return kernels.backward(*tensors, out, logsumexp, None, None, 0.0, is_causal, scale, bias_gradient)


def _attention_drawing(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if kernels.draws(query, key, value, bias, dropout_p, is_causal):
        return kernels.forward(query, key, value, bias, dropout_p, is_causal, scale)
    state = generator_state(query)
    kept = _kept(query, key, dropout_p)
    return *_attention(query, key, value, bias, kept, dropout_p, is_causal, scale), state, state.new_empty(0)


def _attention_drawing_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, out: Tensor, logsumexp: Tensor,
    seed: Tensor, offset: Tensor, dropout_p: float, is_causal: bool, scale: float | None, bias_gradient: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors, rest = (grad, query, key, value, bias), (dropout_p, is_causal, scale, bias_gradient)
    if kernels.draws(*tensors[1:], dropout_p, is_causal):
        return kernels.backward(*tensors, out, logsumexp, seed, offset, *rest)
    args, kwargs = _draw_arguments(query, key, dropout_p)
    # A copy: a generator reads the storage of its state from the start.
    kept = replayed(draw, seed.clone(memory_format=torch.contiguous_format), *args, **kwargs)
    return _attention_backward(*tensors, kept, out, logsumexp, *rest)


def _draw_arguments(query: Tensor, key: Tensor, dropout_p: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shape = [*query.shape[:3], key.shape[2]]
    return dropout_draw(dropout_p, kernels.wide_dtype(query), shape), {"dtype": torch.bool, "device": query.device}


def _kept(query: Tensor, key: Tensor, dropout_p: float) -> Tensor:
    args, kwargs = _draw_arguments(query, key, dropout_p)
    found: Tensor = draw(*args, **kwargs)
    return found


KERNELS = {attention: _attention, attention_backward: _attention_backward}
"""What the operators do, in operators of torch: a compiler that takes those need not know ours."""


CPU_KERNELS = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Torch's own on a CPU, forward and backward; without dropout, which they could draw."""


def kernel_call(node: fx.Node, device: torch.device) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The one operator of torch that computes a node on a CPU, with its arguments; None: there are several, or none."""
    arguments: Any = node.args
    grad, saved, bias_gradient = (), (), False
    if node.target is attention_backward and device.type == "cpu":
        grad, arguments, saved, bias_gradient = arguments[:1], arguments[1:], arguments[6:8], arguments[11]
    elif node.target is not attention or device.type != "cpu":
        return None
    query, key, value, bias, kept = arguments[:5]
    is_causal, scale = arguments[8:10] if grad else arguments[6:8]
    # Graphs have tensors of the meta device, of which torch would choose no kernel.
    values: list[Any] = [t if t is None else t.meta["val"] for t in (query, key, value, bias)]
    shown: list[Any] = [t if t is None else torch.empty(t.shape, dtype=t.dtype, device=device) for t in values]
    # Torch's kernel has no gradient of the bias; of a tuple that a stage graph returns, another may take that of ours.
    backward = node.target is attention_backward
    three = not backward or all(u.target is operator.getitem and u.args[1] in (0, 1, 2) for u in node.users)
    if kept is not None or bias_gradient or not three:
        return None
    if kernels.choose(shown[0], shown[1], shown[2], shown[3], 0.0, is_causal) != (kernels.CPU, False):
        return None
    tensors, named = (*grad, query, key, value, *saved), {"attn_mask": bias, "scale": kernels.scale_of(shown[0], scale)}
    return CPU_KERNELS[bool(grad)], (*tensors, 0.0, is_causal), named


def scaled_dot_product(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """Attention as a model calls it: with dropout, what it keeps is drawn first, in the order in which torch draws."""
    kept = _kept(query, key, dropout_p) if dropout_p else None
    out: Tensor = attention(query, key, value, bias, kept, dropout_p, is_causal, scale)[0]
    # Where torch computes the formula, its result is row-major.
    return out.contiguous() if bias is not None and bias.requires_grad else out


def _fake(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, kept: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    batch, heads, queries = query.shape[:3]
    wide = kernels.wide_dtype(query)
    # Strides as on a CPU: whoever draws numbers in the order of the result draws as eager PyTorch there.
    if kept is not None or value.shape[3] != query.shape[3] or query.stride(3) != 1:
        out = query.new_empty((batch, heads, queries, value.shape[3]))
        return out, query.new_empty((batch, heads, queries), dtype=wide)
    return torch.empty_like(query), query.new_empty((batch, queries, heads), dtype=wide).transpose(1, 2)


def _fake_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    gradients = [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in (query, key, value)]
    return *gradients, torch.empty_like(bias) if bias is not None and rest[-1] else query.new_empty(0)


def _fake_drawing(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    state = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)  # as of flash attention
    return *_fake(query, key, value, bias, None), *state


def save_for_backward(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, Tensor]) -> None:
    """Of an operator of five tensors and numbers, whose results are attention's and the logarithm."""
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.numbers = inputs[5:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (1 + len(ctx.numbers))
    if grad is None:
        return (None,) * 4 + nothing
    *tensors, out, logsumexp = ctx.saved_tensors
    wanted = tensors[3] is not None and ctx.needs_input_grad[3]
    found = attention_backward(grad, *tensors, out, logsumexp, *ctx.numbers, wanted)
    return *found[:3], found[3] if wanted else None, *nothing


def _setup_backward(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.numbers = inputs[8:]


def _differentiated_twice(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of gradients, of the formula: what the backward takes from the forward is a function of the rest."""
    *numbers, bias_gradient = ctx.numbers
    given = [None if t is None else t.detach() for t in ctx.saved_tensors]
    with torch.enable_grad():
        grad, query, key, value, bias, kept = (
            t.requires_grad_() if t is not None and t.is_floating_point() else t for t in given
        )
        inputs = [t for t in (query, key, value, *([bias] if bias_gradient else [])) if t is not None]
        assert grad is not None and query is not None and key is not None and value is not None
        out = kernels.math(query, key, value, bias, kept, *numbers)[0]
        first = torch.autograd.grad(out, inputs, grad, create_graph=True)
        of = [t for t in (grad, query, key, value, bias) if t is not None]
        found = iter(torch.autograd.grad(first, of, grads[: len(first)], allow_unused=True))
    second = [next(found) if t is not None else None for t in (grad, query, key, value, bias)]
    return *second, *(None,) * (3 + len(ctx.numbers))


for _name, _kernel, _shapes in (
    ("attention", _attention, _fake),
    ("attention_backward", _attention_backward, _fake_backward),
    ("attention_drawing", _attention_drawing, _fake_drawing),
    ("attention_drawing_backward", _attention_drawing_backward, _fake_backward),
):
    kernels.register(_library, _name, _kernel, _shapes)
torch.library.register_autograd("autopar::attention", _differentiated, setup_context=save_for_backward, lib=_library)
torch.library.register_autograd(
    "autopar::attention_backward", _differentiated_twice, setup_context=_setup_backward, lib=_library
)
