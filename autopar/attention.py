"""Attention as a model means it: masks that are known, and heads that are repeated, become arguments of the operator.

Frameworks build causal masks and repeat the heads of keys and values by hand; Hugging Face's do so whenever they are
exported, whatever they do otherwise. An attention kernel that is told needs no memory for either, and skips half of
the work.

Before::

    mask = arange(s)[:, None] >= arange(s); k2 = k[:, :, None].expand(b, h, 4, s, d).reshape(b, 4 * h, s, d)
    scaled_dot_product_attention(q, k2, v2, mask)

After::

    scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, OpOverload
from autopar.program import map_nodes

aten = torch.ops.aten

LARGEST = 2**28
"""Elements of a mask that is computed to be looked at: a causal one of 16,384 tokens."""

SMALL = 2**25
"""Elements of a tensor that is searched for dims along which it does not change."""

_ELEMENTWISE = (
    aten.to.dtype, aten.to.dtype_layout, aten.clone.default, aten.contiguous.default, aten.alias.default,
    aten.detach.default, aten.__and__.Tensor, aten.__or__.Tensor,
)  # fmt: skip
"""Elementwise operators that torch does not mark as such."""

_COPIES = (aten.clone.default, aten.contiguous.default, aten.alias.default)
_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def simplify_attention(module: fx.GraphModule) -> None:
    """Rewrite every `scaled_dot_product_attention` of an exported module that allows it, in place.

    A mask goes if nothing but constants makes it and computing it shows that it hides nothing, or what a causal mask
    hides. Repeated heads of keys and values go if there is no mask then, as in Hugging Face's models outside export.
    """
    for inner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        known = _Known(inner)
        for node in inner.graph.nodes:
            if node.target is aten.scaled_dot_product_attention.default:
                _drop_mask(node, known)
                _drop_repetition(node)
        inner.recompile()


def _drop_mask(node: fx.Node, known: _Known) -> None:
    query, key, value, mask, dropout, causal = _arguments(node)
    if not isinstance(mask, fx.Node) or causal:
        return
    hides = known.hides(mask, query.meta["val"].shape[-2], key.meta["val"].shape[-2])
    if hides is not None:
        node.args = (query, key, value, None, dropout, hides == "later")
        node.kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}


def hidden(mask: torch.Tensor, queries: int, keys: int) -> str | None:
    """``"none"`` or ``"later"``, the keys that an attention mask hides from each query; None if it is others."""
    mask = _narrowed(mask).expand(*mask.shape[:-2], queries, keys)
    mask = _cut(mask, [1 if _is_same(mask, d) else mask.shape[d] for d in range(-mask.ndim, 0)])
    if mask.shape[:-2].numel() != 1:
        return None
    mask = mask.expand(*mask.shape[:-2], queries, keys).reshape(queries, keys)
    shown = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (shown | (mask <= _least(mask.dtype))).all():
        return None
    if shown.all():
        return "none"
    later = queries == keys and torch.equal(shown, torch.ones(queries, keys, dtype=torch.bool).tril_())
    return "later" if later else None


def _least(dtype: torch.dtype) -> float:
    """What models add to scores for minus infinity: no score makes up for it."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


def _drop_repetition(node: fx.Node) -> None:
    query, key, value, mask, dropout, _ = _arguments(node)
    if mask is not None or dropout or node.kwargs.get("enable_gqa"):
        return
    shapes = [n.meta["val"].shape for n in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes) or shapes[1] != shapes[2]:
        return
    keys, values = _unrepeated(key), _unrepeated(value)
    if keys is None or values is None:
        return
    with node.graph.inserting_before(node):
        apart = [_heads_first(*found) for found in (keys, values)]
    if apart[0].meta["val"].shape == apart[1].meta["val"].shape:
        node.args = (query, *apart, *node.args[3:])
        node.kwargs = {**{k: v for k, v in node.kwargs.items() if k not in ("key", "value")}, "enable_gqa": True}


def _unrepeated(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """A tensor whose heads ``node`` repeats, and whether its tokens come before its heads; None if it repeats none."""
    node = _through(node)
    turned = node.target is aten.transpose.int and sorted(d % 4 for d in node.args[1:]) == [1, 2]  # type: ignore[operator]
    heads = 2 if turned else 1
    whole = _through(node.all_input_nodes[0]) if turned else node
    if whole.target is aten.repeat_interleave.self_int and whole.args[2:] == (heads,):
        return whole.all_input_nodes[0], turned
    expanded = _through(whole.all_input_nodes[0]) if whole.target in _RESHAPES else whole
    inserted = expanded.all_input_nodes[0] if expanded.target is aten.expand.default else expanded
    if inserted.target is not aten.unsqueeze.default or inserted.args[1] not in (heads + 1, heads - 4):
        return None
    source = inserted.all_input_nodes[0]
    shape = list(source.meta["val"].shape)
    times = whole.meta["val"].shape[heads] // shape[heads]
    merged = [*shape[:heads], shape[heads] * times, *shape[heads + 1 :]]
    apart = [*shape[: heads + 1], times, *shape[heads + 1 :]]
    if list(expanded.meta["val"].shape) != apart or list(whole.meta["val"].shape) != merged:
        return None
    return source, turned


def _through(node: fx.Node) -> fx.Node:
    """What a node is a copy of."""
    while node.target in _COPIES:
        node = node.all_input_nodes[0]
    return node


def _heads_first(source: fx.Node, turned: bool) -> fx.Node:
    """A tensor with heads before tokens."""
    if not turned:
        return source
    node = source.graph.call_function(aten.transpose.int, (source, 1, 2))
    node.meta = {**source.meta, "val": source.meta["val"].transpose(1, 2)}
    return node


def _arguments(node: fx.Node) -> list[Any]:
    """Query, key, value, mask, dropout and whether it is causal."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return [given.get(name, default) for name, default in zip(names, (None, None, None, None, 0.0, False), strict=True)]


class _Known:
    """Values of a graph's nodes that no input has a part in.

    Dims along which a tensor does not change are not computed along, so that a mask of all rows of a batch costs that
    of one.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._values: dict[fx.Node, torch.Tensor | None] = {}
        self._hides: dict[tuple[fx.Node, int, int], str | None] = {}
        self._written = _written(module)

    def hides(self, mask: fx.Node, queries: int, keys: int) -> str | None:
        """What a mask is known to hide, see `hidden`."""
        if (mask, queries, keys) not in self._hides:
            value = self.value(mask)
            self._hides[mask, queries, keys] = None if value is None else hidden(value, queries, keys)
        return self._hides[mask, queries, keys]

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """A node's value; None if it depends on an input, on chance or on memory, or if it is too large."""
        waiting = [node]  # a stack: graphs are deeper than Python's calls may be
        while waiting:
            current = waiting[-1]
            missing = [a for a in current.all_input_nodes if a not in self._values]
            if missing and self._is_function(current):
                waiting += missing
                continue
            waiting.pop()
            if current not in self._values:
                self._values[current] = self._computed(current)
        return self._values[node]

    def _is_function(self, node: fx.Node) -> bool:
        """Whether equal arguments give equal results, which nothing changes later."""
        target = node.target
        if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        chance = torch.Tag.nondeterministic_seeded in target.tags or "empty" in str(target)
        return not chance and not target._schema.is_mutable and node not in self._written

    def _computed(self, node: fx.Node) -> torch.Tensor | None:
        if node.op == "get_attr":
            found = _attribute(self._module, node)
            constant = isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor | torch.nn.Parameter)
            constant = constant and node not in self._written
            return _narrowed(found) if constant and found.device.type == "cpu" else None
        if not self._is_function(node) or any(self._values[a] is None for a in node.all_input_nodes):
            return None
        args, kwargs = map_nodes((node.args, node.kwargs), self._values.__getitem__)
        kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        shape = node.meta["val"].shape
        target: Any = node.target
        elementwise = torch.Tag.pointwise in target.tags or target in _ELEMENTWISE
        computed = list(shape)
        if elementwise:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            computed = [1 if all(_is_same(t, d - len(shape)) for t in tensors) else n for d, n in enumerate(shape)]
            args = [_cut(a, computed) if isinstance(a, torch.Tensor) else a for a in args]
        if not target.is_view and math.prod(computed) > LARGEST:
            return None
        try:
            with torch.no_grad():
                result: torch.Tensor = target(*args, **kwargs)
        except RuntimeError:  # not on a CPU, or not in this dtype
            return None
        return _narrowed(result.expand(shape) if elementwise else result)


def _written(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose memory an operator of the graph may write to: exported graphs have operators in place."""
    waiting = [a for n in module.graph.nodes if _writes(n, module) for a in n.all_input_nodes]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes if _may_share(node) else []
    return found


def _writes(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a node changes an argument; a graph that it runs may."""
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    inner = [m for a in node.all_input_nodes if a.op == "get_attr" for m in [_attribute(module, a)]]
    return any(_writes(n, m) for m in inner if isinstance(m, fx.GraphModule) for n in m.graph.nodes)


def _may_share(node: fx.Node) -> bool:
    """Whether a result of a node may lie in the memory of an argument."""
    if not isinstance(node.target, OpOverload):
        return True
    return any(r.alias_info is not None for r in node.target._schema.returns)


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    return reduce(getattr, str(node.target).split("."), module)


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
        first = value.narrow(d, 0, min(n, 1))
        same = n > 1 and (value.stride(d) == 0 or (value.numel() <= SMALL and bool((value == first).all())))
        value = first if same else value
    return (value if value.shape == shape else value.clone()).expand(shape)  # a clone: nothing holds the rest
