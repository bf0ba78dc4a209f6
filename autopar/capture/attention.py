"""Attention as a model means it: one operator, with masks that are known and heads that are repeated as its arguments.

Torch takes another operator on each device, and its parts where there is dropout or a mask that needs a gradient; here
it is `autopar.ir.ops.attention` always. Frameworks build causal masks and repeat the heads of keys and values by hand;
Hugging Face's do so whenever they are exported, whatever they do otherwise. An attention kernel that is told needs no
memory for either, and skips half of the work.

Before::

    mask = arange(s)[:, None] >= arange(s); k2 = k[:, :, None].expand(b, h, 4, s, d).reshape(b, 4 * h, s, d)
    scaled_dot_product_attention(q, k2, v2, mask)

After::

    autopar.attention(q, k, v, None, None, 0.0, True, None)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from autopar._torch_compat import (
    FakeTensor,
    OpOverload,
    is_transformed,
    traced_graph,
    traced_node,
    traced_root,
    without_modes,
)
from autopar.capture.functions.attention_formula import Formulas
from autopar.capture.intercepts import refuse_foreign_tensors
from autopar.ir.graph import map_nodes
from autopar.ir.ops.attention import scaled_dot_product

aten = torch.ops.aten

LARGEST = 2**28
"""Elements of a mask that is computed to be looked at: a causal one of 16,384 tokens.

Of longer ones, and of all that depend on the batch, `autopar.passes.canonicalize.masks` finds the function.
"""

SMALL = 2**25
"""Elements of a tensor that is searched for dims along which it does not change."""

_ELEMENTWISE = (
    aten.to.dtype, aten.to.dtype_layout, aten.clone.default, aten.contiguous.default, aten.alias.default,
    aten.detach.default, aten.__and__.Tensor, aten.__or__.Tensor,
)  # fmt: skip
"""Elementwise operators that torch does not mark as such."""

_REPEATING: tuple[Any, ...] = (torch.Tensor.__getitem__, torch.Tensor.unsqueeze, torch.unsqueeze)
_REPEATING += (torch.Tensor.repeat_interleave, torch.repeat_interleave)
"""Functions that repeating heads by hand begins with; their argument is what is repeated."""

_COPIES = (aten.clone.default, aten.contiguous.default, aten.alias.default)
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


class Attention(TorchFunctionMode):
    """Makes our operator of calls of `scaled_dot_product_attention`, while a model is traced.

    A mask goes if nothing but constants makes it and computing it shows that it hides nothing, or what a causal mask
    hides. Repeated heads of keys and values go. What the operator does not take, such as tensors of five dims, stays.
    """

    def __init__(self, name_of: Callable[[torch.Tensor], str], learned: Callable[[], Iterable[torch.Tensor]]) -> None:
        """``name_of``: where the model keeps a tensor that is none of the trace's, or nothing; its parameters."""
        super().__init__()
        self._name_of = name_of
        self._known = _Known()
        self._formulas = Formulas(self._value, learned)
        self._tensors: dict[fx.Node, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, attention with what its arguments are known to be."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._called(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            # A function of Python: torch switches the mode off within.
            with patch.object(functional, "scaled_dot_product_attention", self._called):
                return func(*args, **kwargs)
        if func in _REPEATING and args and (node := traced_node(args[0])) is not None:
            self._tensors[node] = args[0]
        found = self._formulas.dropout(func, args, kwargs)
        if found is None and not kwargs:
            found = self._of_formula(func, args)
        written = None if found is not None else self._formulas.written(func, args)
        result = func(*args, **kwargs) if found is None else found
        self._formulas.note(func, args, kwargs, result, written)
        return result

    def _of_formula(self, func: Any, args: Sequence[Any]) -> torch.Tensor | None:
        """Attention in the place of the last product of its formula; None: this is another product."""
        formula = self._formulas.formula(func, args)
        if formula is None:
            return None
        query, key, value, bias, found = formula.query, formula.key, formula.value, formula.bias, None
        if formula.is_plain and formula.kept is None:
            found = self._attention(query, key, value, bias, scale=formula.scale, enable_gqa=True)
        elif _is_taken(query, key, value, bias, 0.0, False, True):
            key, value = self._unrepeated(query, key, value) or (key, value)
            query, key, value = (_as_autocast(t) for t in (query, key, value))
            found = formula.attention(query, key, value, None if bias is None else _bias(_as_autocast(bias), query))
        # The last product is row-major.
        return None if found is None else found.reshape(*args[0].shape[:-1], args[1].shape[-1]).contiguous()

    def _called(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        refuse_foreign_tensors(args, torch.is_grad_enabled(), self._name_of)
        found = self._attention(*args, **kwargs)
        return scaled_dot_product_attention(*args, **kwargs) if found is None else found

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        """Our operator on the same arguments; None if it does not take them."""
        if not _is_taken(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
            return None
        if traced_graph() is not None and attn_mask is not None:
            hides = self._hides(attn_mask, query.shape[-2], key.shape[-2])
            if hides is not None:
                attn_mask, is_causal = None, hides == "later"
        if traced_graph() is not None and query.ndim == 4:
            key, value = self._unrepeated(query, key, value) or (key, value)
        tensors = [_as_autocast(t) for t in (query, key, value)]
        bias = None if attn_mask is None else _bias(_as_autocast(attn_mask), tensors[0])
        # Of three dims: those of the one head.
        heads = [t.unsqueeze(1) if query.ndim == 3 else t for t in tensors]
        number = None if scale is None else float(scale)
        out = scaled_dot_product(heads[0], heads[1], heads[2], bias, float(dropout_p), is_causal, number)
        # Torch computes the formula then, whose result is row-major.
        return out.squeeze(1).contiguous() if query.ndim == 3 else out

    def _value(self, node: fx.Node) -> torch.Tensor | None:
        with without_modes():
            return self._known.value(node)

    def _hides(self, mask: torch.Tensor, queries: int, keys: int) -> str | None:
        node = traced_node(mask)
        if node is None:
            return None
        # Real tensors: under the tracer's modes the mask would be computed as part of the graph.
        with without_modes():
            return self._known.hides(node, queries, keys)

    def _unrepeated(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if any(t.ndim != 4 for t in (query, key, value)) or key.shape[1] != value.shape[1]:
            return None
        found = []
        for tensor in (key, value):
            node = traced_node(tensor)
            source = None if node is None else _unrepeated(node)
            # Only a tensor that was seen can be an argument again: a node alone has none.
            if source is None or source[0] not in self._tensors:
                return None
            whole = self._tensors[source[0]]
            found.append(whole.transpose(1, 2) if source[1] else whole)
        return (found[0], found[1]) if found[0].shape == found[1].shape else None


def _is_taken(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    shared: bool,
) -> bool:
    """Whether our operator takes what torch's is called with; what is an error in torch is left to it."""
    tensors = (query, key, value)
    if not all(isinstance(t, torch.Tensor) and t.is_floating_point() and t.ndim == query.ndim for t in tensors):
        return False
    # Torch's operators know what `torch.func` does to them.
    if any(is_transformed(t) for t in (*tensors, mask) if t is not None):
        return False
    # Sizes are compared, not hashed: what a mask selects has a symbol.
    alike = all((t.dtype, t.device, t.shape[0]) == (query.dtype, query.device, query.shape[0]) for t in tensors)
    if query.ndim not in (3, 4) or not alike or not all(t.numel() for t in tensors) or not 0 <= dropout_p < 1:
        return False
    fits = key.shape[:-1] == value.shape[:-1] and query.shape[-1] == key.shape[-1]
    if query.ndim == 4:
        a, b = query.shape[1], key.shape[1]
        fits = fits and (a % b == 0 if shared else a == b)
    return fits and (mask is None or (not is_causal and _fits(mask, query, key)))


def _fits(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    scores = (*query.shape[:-1], key.shape[-2])
    if mask.ndim > len(scores) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return False
    return all(n in (1, m) for n, m in zip(mask.shape[::-1], scores[::-1], strict=False))


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype in which attention computes under autocast."""
    kind = tensor.device.type
    plain = not tensor.is_floating_point() or tensor.dtype == torch.float64
    return tensor if plain or not torch.is_autocast_enabled(kind) else tensor.to(torch.get_autocast_dtype(kind))


def _bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A mask of torch's as what is added to scores, of two dims or four."""
    if query.ndim == 3 and mask.ndim == 3:
        mask = mask.unsqueeze(1)
    mask = mask.reshape((1,) * ((2, 1, 0, 1, 0)[mask.ndim]) + tuple(mask.shape))
    if mask.dtype != torch.bool:
        return mask
    seen, hidden_ = (torch.full((), n, dtype=query.dtype, device=query.device) for n in (0.0, -math.inf))
    return torch.where(mask, seen, hidden_)


def hidden(mask: torch.Tensor, queries: int, keys: int) -> str | None:
    """``"none"`` or ``"later"``, the keys that an attention mask hides from each query; None if it is others."""
    # One head and one sample are enough, if all have the same mask.
    mask = _narrowed(mask).expand(*mask.shape[:-2], queries, keys)
    mask = _cut(mask, [1 if _is_same(mask, d) else mask.shape[d] for d in range(-mask.ndim, 0)])
    if mask.shape[:-2].numel() != 1:
        return None
    mask = mask.expand(*mask.shape[:-2], queries, keys).reshape(queries, keys)
    shown = _shown(mask)
    if shown is None:
        return None
    if shown.all():
        return "none"
    # Only square ones: kernels align a causal mask of other shapes differently.
    return "later" if queries == keys and torch.equal(shown, torch.ones_like(shown).tril_()) else None


def _shown(mask: torch.Tensor) -> torch.Tensor | None:
    """Which keys a mask shows; None if it does more than to show or hide them."""
    # A boolean mask says what is seen; a floating one is added to the scores.
    shown = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (shown | (mask <= _least(mask.dtype))).all():
        return None
    return shown


def _least(dtype: torch.dtype) -> float:
    """What models add to scores for minus infinity: no score makes up for it."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


def _unrepeated(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """A tensor whose heads ``node`` repeats, and whether its tokens come before its heads; None if it repeats none."""
    node = _through(node)
    transposed = node.target is aten.transpose.int and sorted(d % 4 for d in node.args[1:]) == [1, 2]  # type: ignore[operator]
    heads = 2 if transposed else 1
    whole = _through(node.all_input_nodes[0]) if transposed else node
    if whole.target is aten.repeat_interleave.self_int and whole.args[2:] == (heads,):
        return whole.all_input_nodes[0], transposed
    expanded = _through(whole.all_input_nodes[0]) if whole.target in _RESHAPES else whole
    inserted = expanded.all_input_nodes[0] if expanded.target is aten.expand.default else expanded
    if inserted.target is not aten.unsqueeze.default or inserted.args[1] not in (heads + 1, heads - 4):
        return None
    source = inserted.all_input_nodes[0]
    shape = list(source.meta["val"].shape)
    # Each head must be repeated in place (h0 h0 h1 h1), as enable_gqa pairs them, not the heads as a whole.
    times = whole.meta["val"].shape[heads] // shape[heads]
    merged = [*shape[:heads], shape[heads] * times, *shape[heads + 1 :]]
    apart = [*shape[: heads + 1], times, *shape[heads + 1 :]]
    if list(expanded.meta["val"].shape) != apart or list(whole.meta["val"].shape) != merged:
        return None
    return source, transposed


def _through(node: fx.Node) -> fx.Node:
    """What a node is a copy of, or all of."""
    while node.target in _COPIES or (node.target is aten.slice.Tensor and _is_whole(node)):
        node = node.all_input_nodes[0]
    return node


def _is_whole(node: fx.Node) -> bool:
    return bool(node.meta["val"].shape == node.all_input_nodes[0].meta["val"].shape)


class _Known:
    """Values of a graph's nodes that no input has a part in.

    Dims along which a tensor does not change are not computed along, so that a mask of all rows of a batch costs that
    of one.
    """

    def __init__(self) -> None:
        self._values: dict[fx.Node, torch.Tensor | None] = {}
        self._hides: dict[tuple[fx.Node, int, int], str | None] = {}

    def hides(self, mask: fx.Node, queries: int, keys: int) -> str | None:
        """What a mask is known to hide, see `hidden`."""
        if (mask, queries, keys) not in self._hides:
            value = self.value(mask)
            self._hides[mask, queries, keys] = None if value is None else hidden(value, queries, keys)
        return self._hides[mask, queries, keys]

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """A node's value; None if it depends on an input, on chance or on memory, or if it is too large."""
        pending = [node]  # a stack: graphs are deeper than Python's calls may be
        while pending:
            current = pending[-1]
            # A node that is no function of its arguments is None whatever they are: they need not be computed.
            missing = [a for a in current.all_input_nodes if a not in self._values]
            if missing and self._is_function(current):
                pending += missing
                continue
            pending.pop()
            if current not in self._values:
                self._values[current] = self._computed(current)
        return self._values[node]

    def _is_function(self, node: fx.Node) -> bool:
        """Whether equal arguments give equal results, which nothing changes later."""
        target = node.target
        if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        # Memory that is not initialized counts as chance.
        chance = torch.Tag.nondeterministic_seeded in target.tags or "empty" in str(target)
        return not chance and not target._schema.is_mutable

    def _computed(self, node: fx.Node) -> torch.Tensor | None:
        if node.op == "get_attr":
            root = traced_root()
            if root is None:  # constants have no place yet: the mask is one that a model writes to
                return None
            found = reduce(getattr, str(node.target).split("."), root)
            constant = isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor | torch.nn.Parameter)
            return _narrowed(found) if constant and found.device.type == "cpu" else None
        if not self._is_function(node) or any(self._values[a] is None for a in node.all_input_nodes):
            return None
        args, kwargs = map_nodes((node.args, node.kwargs), self._values.__getitem__)
        shape = node.meta["val"].shape
        target: Any = node.target
        elementwise = torch.Tag.pointwise in target.tags or target in _ELEMENTWISE
        computed = list(shape)
        if elementwise:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            computed = [1 if all(_is_same(t, d - len(shape)) for t in tensors) else n for d, n in enumerate(shape)]
            args = [_cut(a, computed) if isinstance(a, torch.Tensor) else a for a in args]
        # A view of a large tensor takes no memory.
        if not target.is_view and math.prod(computed) > LARGEST:
            return None
        result = _on_cpu(target, args, kwargs)
        return None if result is None else _narrowed(result.expand(shape) if elementwise else result)


def _on_cpu(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """What an operator gives on a CPU; None if it runs on none, or not in this dtype."""
    kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
    try:
        with torch.no_grad():
            result: torch.Tensor = target(*args, **kwargs)
    except RuntimeError:
        return None
    return result


def _is_same(value: torch.Tensor, d: int) -> bool:
    """Whether a tensor, broadcast, is known not to change along its dim ``d``, counted from the last, which is -1."""
    return -d > value.ndim or value.shape[d] == 1 or value.stride(d) == 0


def _cut(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The first of a tensor's elements along the dims of a shape that have one."""
    for d in range(-value.ndim, 0):
        value = value.narrow(d, 0, 1) if shape[d] == 1 else value
    return value


def _narrowed(value: torch.Tensor) -> torch.Tensor:
    """The same values, one of each dim along which they do not change, if that is quickly seen, broadcast."""
    shape = value.shape
    for d, n in enumerate(shape):
        # The stride first, which costs nothing; comparing elements is for small tensors.
        first = value.narrow(d, 0, min(n, 1))
        same = n > 1 and (value.stride(d) == 0 or (value.numel() <= SMALL and bool((value == first).all())))
        value = first if same else value
    return (value if value.shape == shape else value.clone()).expand(shape)  # a clone: nothing holds the rest
