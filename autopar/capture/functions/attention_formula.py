"""Attention that a model computes by its formula: products, a softmax, products again.

Whoever has no kernel for what he adds to the scores writes the formula: transformers' ``eager`` attention, with the
sinks of gpt-oss, the biases by distance of BLOOM and MPT, or the cap of Gemma 2. Nothing but a softmax of scores is in
it, so it is found at the last product, by the calls that led there, and captured as attention is.

Before::

    scores = torch.cat([q @ k.mT * scale + bias, sinks], -1)
    out = softmax(scores - scores.amax(-1, keepdim=True), -1)[..., :-1] @ v

After::

    out = attention_with_sinks(q, k, v, bias, sinks, scale)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch_compat import traced_graph, traced_node
from autopar.capture.functions.calls import Call, Calls, OtherError, Written, is_last, name_of
from autopar.capture.functions.dropped_weights import CASTS as _CASTS
from autopar.capture.functions.dropped_weights import Kept, dropped
from autopar.capture.functions.hidden_rows import HIDDEN, Part, may_hide_rows, places
from autopar.ir.ops.attention import attention
from autopar.ir.ops.formula.attention_rows import attention_rows
from autopar.ir.ops.random import draw, dropout_draw
from autopar.ir.ops.sequence.attention_sinks import attention_with_sinks

_VIEWS = frozenset(("view", "reshape", "unflatten", "flatten", "unsqueeze", "squeeze"))
_PRODUCTS = frozenset(("matmul", "bmm"))
_STEPS = _CASTS | _VIEWS | _PRODUCTS
_STEPS |= frozenset(
    (
        "mul", "multiply", "div", "true_divide", "divide", "add", "sub", "subtract", "masked_fill", "where", "baddbmm",
        "max", "amax", "cat", "concat", "softmax", "getitem", "dropout", "transpose", "swapaxes", "swapdims", "mT",
        "tanh",
    )
)  # fmt: skip
"""Names of functions that the formula consists of."""


@dataclass(frozen=True)
class Formula:
    """What attention is called with.

    Attributes:
        query: ``[batch, heads, queries, head]``.
        key: ``[batch, kv_heads, keys, head]``.
        value: ``[batch, kv_heads, keys, value_head]``.
        bias: is added to the scores, of four dims.
        sinks: ``[batch, heads, queries]``.
        scale: of the scores.
        cap: scores are ``cap * tanh(scores / cap)`` before the bias.
        kept: of the weights, what dropout keeps, of the shape of the scores.
        dropout_p: share of the elements that dropout drops.
        hides_rows: large numbers may hide all keys of a query.
        placed: they are in the places of scores, not added to them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    scale: float
    cap: float | None
    kept: Tensor | None
    dropout_p: float
    hides_rows: bool
    placed: bool

    def attention(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """The result, of tensors as the operators take them."""
        if self.sinks is not None:
            return attention_with_sinks(query, key, value, bias, self.sinks, self.scale)
        rest: tuple[Any, ...] = (bias, self.kept, self.dropout_p)
        if self.is_plain:
            found: Tensor = attention(query, key, value, *rest, False, self.scale)[0]
        else:
            found = attention_rows(query, key, value, *rest, self.scale, self.cap, self.placed)[0]
        return found

    @property
    def is_plain(self) -> bool:
        """Whether kernels compute its weights."""
        return self.sinks is None and self.cap is None and not self.hides_rows


@dataclass(frozen=True)
class _Scores:
    """Scores as they are so far: ``scale * left @ right``, and what is added to that.

    Attributes:
        left: queries.
        right: keys, transposed.
        shape: of the scores.
        scale: of the product.
        added: makes the bias, of the shape that it broadcasts to.
        parts: what it is made of.
        sinks: the last column, which is of no key.
        cap: the product is ``cap * tanh(product / cap)``.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size
    scale: float = 1.0
    added: Callable[[], Tensor] | None = None
    parts: tuple[Part, ...] = ()
    sinks: Tensor | None = None
    cap: float | None = None


@dataclass
class _Weights:
    """What is between the softmax and the last product: whether its last column goes, and dropout."""

    dropped: bool = False
    kept: Tensor | None = None
    dropout_p: float = 0.0


class Formulas:
    """Attention by its formula, found while a model is traced."""

    def __init__(self, known: Callable[[fx.Node], Tensor | None], learned: Callable[[], Iterable[Tensor]]) -> None:
        """``known``: the value of a node that depends on no input; ``learned``: the model's parameters."""
        self._known, self._learned = known, learned
        self._calls = Calls(_STEPS)
        self.note, self.written = self._calls.note, self._calls.written
        self._kept: dict[fx.Node, tuple[Tensor, float]] = {}

    def dropout(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Dropout of a softmax's weights, whose draw is a tensor of its own; None: it is another function."""
        given = dropped(self._calls, func, args, kwargs)
        if given is None:
            return None
        kept: Tensor = draw(*dropout_draw(given.p, given.weights.dtype, list(given.weights.shape)), **given.options)
        found: Tensor = Kept.apply(given.weights, kept, 1.0 / (1.0 - given.p))  # type: ignore[no-untyped-call]
        node = traced_node(found)
        if node is not None:
            self._kept[node] = kept, given.p
        return found

    def formula(self, func: Any, args: Sequence[Any]) -> Formula | None:
        """What attention is called with, whose last product this is; None: it is another product."""
        if name_of(func) not in _PRODUCTS or len(args) < 2 or not all(isinstance(t, Tensor) for t in args[:2]):
            return None
        weights, values = args[:2]
        if traced_graph() is None or weights.ndim not in (3, 4) or not weights.is_floating_point():
            return None
        try:
            return self._attention(weights, values)
        except OtherError:
            return None

    def _attention(self, weights: Tensor, values: Tensor) -> Formula:
        given, between = self._softmax(weights)
        scores = self._scores(given, given.shape)
        if (scores.sinks is None) == between.dropped:
            raise OtherError
        if scores.sinks is not None and (scores.cap is not None or between.kept is not None):
            raise OtherError  # sinks are merged behind a kernel
        *rest, queries, keys = given.shape
        lead = (*rest, 1) if len(rest) == 1 else tuple(rest)
        keys -= int(between.dropped)
        if len(lead) != 2 or (queries, keys) != tuple(weights.shape[-2:]):
            raise OtherError
        key = self._transposed(scores.right)
        q, k, v = (_of_heads(t, lead) for t in (scores.left, key, values))
        if q.shape[:2] != lead:
            raise OtherError
        whole = torch.Size((*lead, queries, keys))
        # With a sink there is always something that a query sees.
        hides = scores.sinks is None and may_hide_rows(scores.parts, self._known, self._learned, queries, keys)
        placed = places(scores.parts, self._known, self._learned) if hides else False
        if placed is None:
            raise OtherError  # gradients of some rows would be of either kind
        bias = None if scores.added is None else _bias(scores.added(), scores.shape, whole)
        if bias is not None and bias.dtype != q.dtype:
            raise OtherError  # a kernel would compute in the dtype of queries
        sinks = None if scores.sinks is None else scores.sinks.reshape(*lead, queries)
        kept = None if between.kept is None else between.kept.reshape(whole)
        return Formula(q, k, v, bias, sinks, scores.scale, scores.cap, kept, between.dropout_p, hides, placed)

    def _softmax(self, weights: Tensor) -> tuple[Tensor, _Weights]:
        """What the softmax is of, and what is made of it up to the last product."""
        found = _Weights()
        while (call := self._calls.of(weights)).name != "softmax":
            (source, *rest) = call.args
            if call.name == "getitem" and not found.dropped and rest == [(..., slice(None, -1, None))]:
                found.dropped = True
            elif call.name == "dropout":
                if call.argument("p", 1, 0.5) and call.argument("training", 2, True):
                    node = traced_node(weights)
                    if node not in self._kept or found.kept is not None:
                        raise OtherError  # what is kept is drawn already
                    found.kept, found.dropout_p = self._kept[node]
            elif call.name not in _CASTS and not (call.name in _VIEWS and source.shape[-2:] == weights.shape[-2:]):
                raise OtherError
            weights = source
        (source, *rest) = call.args
        if not is_last(call.kwargs.get("dim", rest[0] if rest else None), source) or _is_narrower(weights, source):
            raise OtherError
        return source, found

    def _scores(self, tensor: Tensor, shape: torch.Size) -> _Scores:
        """Scores as a function of queries and keys; ``shape`` is that of all that is added to them."""
        call = self._calls.of(tensor)
        (first, *rest) = call.args
        if call.name in _PRODUCTS and isinstance(rest[0], Tensor):
            return _Scores(first, rest[0], tensor.shape)
        if call.name == "baddbmm":
            return _baddbmm(call, tensor)
        if call.name in _CASTS and not _is_narrower(tensor, first):
            return self._scores(first, shape)
        if call.name in _VIEWS and first.shape[-2:] == tensor.shape[-2:]:
            found = self._scores(first, first.shape)
            added = found.added
            return replace(found, shape=tensor.shape, added=added and (lambda: _viewed(added(), first, tensor)))
        if call.name in ("mul", "multiply", "div", "true_divide", "divide"):
            return self._scaled(call, tensor)
        if call.name == "tanh":
            found = self._scores(first, shape)
            if found.cap is not None or found.added is not None or found.sinks is not None:
                raise OtherError
            return replace(found, cap=1.0)
        if call.name in ("sub", "subtract") and not call.kwargs and self._is_maximum(rest[0], first):
            return self._scores(first, shape)  # a softmax is the same
        if call.name == "add" and not call.kwargs:
            return self._added(first, rest[0], tensor)
        if call.name in ("masked_fill", "where"):
            return self._hidden(call, tensor)
        if call.name in ("cat", "concat"):
            return self._with_sinks(call, tensor)
        raise OtherError

    def _scaled(self, call: Call, tensor: Tensor) -> _Scores:
        left, right = call.args[:2]
        if isinstance(left, int | float) and call.name in ("mul", "multiply"):
            left, right = right, left
        number = isinstance(right, int | float) and not isinstance(right, bool)
        if call.kwargs or not number or not math.isfinite(right) or not right:
            raise OtherError
        factor = float(right) if call.name in ("mul", "multiply") else 1.0 / right
        found = self._scores(left, tensor.shape)
        if found.sinks is not None:
            raise OtherError
        added, cap = found.added, None if found.cap is None else found.cap * factor
        # A multiple of capped scores: that of the cap, and of what it is a cap of.
        return replace(found, scale=found.scale * factor, cap=cap, added=added and (lambda: added() * factor))

    def _added(self, left: Any, right: Any, tensor: Tensor) -> _Scores:
        """A sum, one of whose terms is scores."""
        for scores, bias in ((left, right), (right, left)):
            fits = isinstance(scores, Tensor | Written) and scores.shape == tensor.shape
            if not isinstance(bias, Tensor) or not fits:
                continue
            try:
                found = self._scores(scores, tensor.shape)
            except OtherError:
                continue
            if found.sinks is not None:
                raise OtherError
            return replace(found, added=partial(_sum, found.added, bias), parts=(*found.parts, Part(bias)))
        raise OtherError

    def _hidden(self, call: Call, tensor: Tensor) -> _Scores:
        """Scores in whose place a number is where a mask says so."""
        if len(call.args) != 3:
            raise OtherError
        if call.name == "masked_fill":
            (scores, mask, number), inverted = call.args, False
        else:
            mask, scores, number = call.args
            inverted = isinstance(scores, Tensor)
            scores, number = (scores, number) if inverted else (number, scores)
        fits = isinstance(scores, Tensor | Written) and scores.shape == tensor.shape
        if not fits or not isinstance(number, int | float) or number > HIDDEN:
            raise OtherError
        found = self._scores(scores, tensor.shape)
        if found.sinks is not None:
            raise OtherError
        before = found.added

        def added() -> Tensor:
            hides = ~mask if inverted else mask
            # Of numbers, not of scores: what makes a mask is read from the graph.
            least, zero = (torch.full((), n, dtype=tensor.dtype, device=tensor.device) for n in (number, 0.0))
            return torch.where(hides, least, zero if before is None else before())

        return replace(found, added=added, parts=(*found.parts, Part(mask, float(number), inverted)))

    def _with_sinks(self, call: Call, tensor: Tensor) -> _Scores:
        (parts, *rest) = call.args
        if not is_last(call.kwargs.get("dim", rest[0] if rest else 0), tensor):
            raise OtherError
        if len(parts) != 2 or parts[1].shape[-1] != 1:
            raise OtherError
        found = self._scores(parts[0], parts[0].shape)
        if found.sinks is not None:
            raise OtherError
        return replace(found, sinks=parts[1].squeeze(-1))

    def _is_maximum(self, tensor: Any, of: Tensor) -> bool:
        """Whether a tensor is the largest score of each query."""
        call, apart = self._calls.of(tensor), False
        if call.name == "unsqueeze":
            apart = is_last(call.argument("dim", 1), of)
            call = self._calls.of(call.args[0])
        (source, *rest) = call.args
        d, kept = (call.kwargs.get(n, (*rest, None, None)[i]) for i, n in enumerate(("dim", "keepdim")))
        same = isinstance(source, Tensor) and isinstance(of, Tensor) and traced_node(source) is traced_node(of)
        return call.name in ("max", "amax") and same and is_last(d, of) and bool(kept) != apart

    def _transposed(self, tensor: Tensor) -> Tensor:
        """Keys of transposed ones: those that were transposed, if they still are what they were."""
        try:
            call = self._calls.of(tensor)
        except OtherError:
            return tensor.transpose(-1, -2)
        (source, *dims) = call.args
        swaps = call.name in ("transpose", "swapaxes", "swapdims") and not call.kwargs
        is_last = call.name == "mT" or (
            swaps and sorted(d % tensor.ndim for d in dims) == [tensor.ndim - 2, tensor.ndim - 1]
        )
        return source if is_last else tensor.transpose(-1, -2)


def _sum(before: Callable[[], Tensor] | None, bias: Tensor) -> Tensor:
    return bias if before is None else before() + bias


def _is_narrower(made: Tensor, source: Tensor) -> bool:
    """Whether scores were rounded, which a kernel would not do."""
    if not made.is_floating_point() or not source.is_floating_point():
        return True
    return torch.finfo(made.dtype).eps > torch.finfo(source.dtype).eps


def _baddbmm(call: Call, tensor: Tensor) -> _Scores:
    tensors = call.args
    beta, alpha = (call.kwargs.get(n, 1) for n in ("beta", "alpha"))
    if len(tensors) != 3 or not all(isinstance(t, Tensor) for t in tensors) or not alpha:
        raise OtherError
    added, left, right = tensors
    # With beta 0 nothing is added, not even what is not finite.
    bias: Callable[[], Tensor] | None = None if not beta else (lambda: added * beta)
    return _Scores(left, right, tensor.shape, float(alpha), bias, (Part(added),) if beta else ())


def _of_heads(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A tensor of queries, keys or values as one of four dims."""
    shape, rest = tuple(tensor.shape[:-2]), tuple(tensor.shape[-2:])
    if shape == lead or (len(shape) == 2 and shape == (lead[0], 1)):
        return tensor
    if not shape or math.prod(shape) != math.prod(lead):
        raise OtherError
    return tensor.reshape(*lead, *rest)


def _viewed(bias: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """What is added to scores of which others are a view."""
    return bias.expand(*before.shape[:-2], *bias.shape[-2:]).reshape(*after.shape[:-2], *bias.shape[-2:])


def _bias(bias: Tensor, scores: torch.Size, whole: torch.Size) -> Tensor:
    """What is added to scores, of four dims; ``scores`` and ``whole``: shapes of the scores that the model has."""
    if bias.ndim > len(scores):
        raise OtherError
    bias = bias.reshape((1,) * (len(scores) - bias.ndim) + tuple(bias.shape))
    if len(scores) == 3:
        bias = bias.unsqueeze(1)
    if any(n not in (1, m) for n, m in zip(bias.shape, whole, strict=True)):
        raise OtherError
    return bias
