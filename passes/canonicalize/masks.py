"""masks_by_function: attention gets what makes its mask, not the mask.

Before (``at`` and ``of`` are the positions of queries and keys, ``ids`` the documents of tokens)::

    mask = aten.bitwise_and(aten.ge(at, of), aten.eq(aten.unsqueeze(ids, 2), aten.unsqueeze(ids, 1)))
    bias = aten.where(mask, 0.0, -inf); out, logsumexp = autopar.attention(q, k, v, bias, None, 0.0, False, None)

After::

    out, logsumexp = autopar.attention_masked(
        q, k, v, [ids_of_queries, ids_of_keys], '[["aten.eq.Tensor", "%0", "%1"]]', False, 8192, 0, 0, 0, 8192, None
    )

A mask is walked back, operator by operator, as long as each element depends on the same elements of what makes it. What
is left are *leaves*, tensors of queries or of keys; what compares positions alone is a window, and no formula. A mask
that is nothing else becomes a window, or causal, or goes, however long the sequence: no mask is computed to be looked
at. Masks that others read too are still made for them; one with a gradient, or with a part of queries times keys that
no formula makes, stays.
"""

from __future__ import annotations

import json
import math
import operator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, OpOverload
from autopar.ir.graph import computed, copy_graph, inherit_origin, insert_call, map_nodes
from autopar.ir.node_info import info, set_info
from autopar.ir.ops.attention import attention, attention_backward
from autopar.ir.ops.sequence.masked_attention import attention_masked, attention_masked_backward
from autopar.ir.program import Program

aten = torch.ops.aten

_SAME = (
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.expand.default,
    aten.lift_fresh_copy.default, aten._to_copy.default, aten.to.dtype,
)  # fmt: skip
"""Operators that give the same elements, broadcast, or in another dtype."""

_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default)
_ANDS = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.__and__.Tensor)
_ORS = (aten.bitwise_or.Tensor, aten.logical_or.default, aten.__or__.Tensor)
_NOTS = (aten.bitwise_not.default, aten.logical_not.default)
_FILLED = {aten.zeros.default: 0, aten.ones.default: 1, aten.full.default: None}
_COMPARED = {
    getattr(getattr(aten, name), kind): name for name in ("le", "lt", "ge", "gt", "eq") for kind in ("Tensor", "Scalar")
}

QUERIES, KEYS = "queries", "keys"
"""Leaves that are positions."""

_LARGEST = 2**22
"""Elements of a leaf that is computed to be looked at."""

_MOST = 64
"""Calls of a formula, beyond which a mask is rather made once."""


def masks_by_function(program: Program) -> Program:
    """Give attention the functions of its masks; computes the same."""
    found = [n for n in program.graph.graph.nodes if _bias(n) is not None]
    if not found:
        return program
    graph = copy_graph(program.graph)
    known = _Constants(graph)
    nodes = [n for n in graph.graph.nodes if _bias(n) is not None]
    differentiated = {_bias(n) for n in nodes if n.target is attention_backward and n.args[-1]}
    made: dict[tuple[_Root, tuple[int, ...]], _Mask | None] = {}
    for node in nodes:
        bias = _bias(node)
        if bias is None or bias in differentiated or _has_more(node):
            continue
        queries, keys = (_value(a).shape for a in node.args[0 if node.target is attention else 1 :][:2])
        root, shape = _root(bias, known), (*queries[:3], keys[2])
        if root.shown is None and 1 in _value(bias).shape[-2:]:
            continue  # what is added is no tensor of queries times keys
        # Equal masks of all layers are made in each of them from the same one.
        key = root.of_all_layers, shape
        if key not in made:
            made[key] = _mask(graph.graph, known, root, shape)
        mask = made[key]
        if mask is not None:
            _rewrite(graph.graph, node, mask, shape)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return replace(program, graph=graph)


def _bias(node: fx.Node) -> fx.Node | None:
    """What is added to the scores of an attention operator."""
    if node.target not in (attention, attention_backward):
        return None
    found: Any = node.args[3 if node.target is attention else 4]
    return found if isinstance(found, fx.Node) else None


def _has_more(node: fx.Node) -> bool:
    """Whether attention has dropout, or a causal mask beside its bias."""
    kept, causal = (4, 6) if node.target is attention else (5, 9)
    return node.args[kept] is not None or bool(node.args[causal])


@dataclass(frozen=True)
class _Root:
    """A mask: where its values come from, what is added to the scores, and what says which of these there are.

    Attributes:
        node: of which the mask is a function that is known.
        bias: what is added.
        shown: which scores there are.
        added: what is added to these.
        inverted: ``shown`` says which there are not.
        exact: minus infinity is added to these, not a number in its place.
    """

    node: fx.Node
    bias: fx.Node
    shown: fx.Node | None
    added: fx.Node | None
    inverted: bool = False
    exact: bool = True

    @property
    def of_all_layers(self) -> _Root:
        """The same of another bias that is made of the same mask."""
        return replace(self, bias=self.node)


def _root(bias: fx.Node, known: _Constants) -> _Root:
    """What a mask's values say, and where from."""
    # Leading dims, copies and other floating dtypes change nothing of that.
    while bias.target in (*_SAME, *_VIEWS) and _value(bias).is_floating_point():
        (source, *_) = bias.all_input_nodes
        before, after = (_without_leading_ones(_value(n)) for n in (source, bias))
        if before != after or not _value(source).is_floating_point():
            break
        bias = source
    args: Any = bias.args
    if bias.target is aten.where.self:
        hides = [_hides(known.number(a), bias) for a in args[1:]]
        if hides[0] != hides[1]:
            other, least = (args[1], args[2]) if hides[1] else (args[2], args[1])
            added = None if known.number(other) == 0 else other
            exact = known.number(least) == -math.inf
            return _Root(args[0] if added is None and exact else bias, bias, args[0], added, hides[0], exact)
    if bias.target is aten.masked_fill.Scalar and _hides(args[2], bias):
        added = None if known.number(args[0]) == 0 else args[0]
        return _Root(bias, bias, args[1], added, True, args[2] == -math.inf)
    return _Root(bias, bias, None, bias)


def _hides(number: Any, bias: fx.Node) -> bool:
    """Whether a number that is added to scores is what models take for minus infinity."""
    least = max(torch.finfo(_value(bias).dtype).min, torch.finfo(torch.float32).min)
    return isinstance(number, int | float) and number <= least


def _without_leading_ones(value: torch.Tensor) -> list[int]:
    shape = list(value.shape)
    while shape and shape[0] == 1:
        shape.pop(0)
    return shape


@dataclass(frozen=True)
class _Window:
    """Which keys are seen: those whose position less the query's is from ``low`` up to ``high``; None: any."""

    low: int | None = None
    high: int | None = None

    def within(self, other: _Window) -> _Window:
        """What both show."""
        lows, highs = ([n for n in ends if n is not None] for ends in ((self.low, other.low), (self.high, other.high)))
        return _Window(max(lows, default=None), min(highs, default=None))

    def around(self, other: _Window) -> _Window:
        """At least what either shows."""
        pairs = (self.low, other.low), (self.high, other.high)
        low, high = (
            None if None in pair else ends(n for n in pair if n is not None)
            for pair, ends in zip(pairs, (min, max), strict=True)
        )  # fmt: skip
        return _Window(low, high)

    def outside(self) -> _Window | None:
        """What it hides, if that is one window."""
        if self.low is None and self.high is not None:
            return _Window(low=self.high + 1)
        return _Window(high=self.low - 1) if self.high is None and self.low is not None else None


@dataclass(frozen=True)
class _Mask:
    """A mask's function: the leaves as nodes of the graph, and see `attention_masked`."""

    leaves: tuple[fx.Node, ...]
    formula: str
    added: bool
    window: _Window


class _Opaque(Exception):  # noqa: N818
    """A part of a mask that is of queries times keys, and no formula."""


Views = tuple[int, ...]
"""Where dims of size 1 are put in, one after the other: how many dims are to the right of each."""


def _mask(graph: fx.Graph, known: _Constants, root: _Root, shape: tuple[int, ...]) -> _Mask | None:
    """The function of a mask; None if it has none."""
    if min(shape[2:]) == 1:
        return None
    walk = _Walk(known, shape)
    try:
        window, shown = _Window(), None
        if root.shown is not None:
            walk.find_runs(root.shown, ())
            window, shown = walk.hidden(root.shown, ()) if root.inverted else walk.seen(root.shown, ())
        added = root.added is not None
        # A query that sees nothing sees everything where a number is in the place of minus infinity.
        sees_itself = shape[2] == shape[3] and (window.low or 0) <= 0 <= (window.high or 0)
        if not root.exact and (shown is not None or not sees_itself):
            window, shown, added = _Window(), walk.formula(root.bias, ()), True
        elif root.added is not None:
            # Both in one: what is added is minus infinity where nothing is seen.
            shown = walk.formula(root.added if shown is None else root.bias, ())
    except _Opaque:
        return None
    if len(walk.calls) > _MOST:
        return None
    return _Mask(*walk.placed(graph, root.node, shown), added, window)


class _Walk:
    """From a mask back to what makes it."""

    def __init__(self, known: _Constants, shape: tuple[int, ...]) -> None:
        self.known, self.shape = known, shape
        self.leaves: dict[tuple[Any, Views], str] = {}
        self.calls: list[tuple[str, list[Any]]] = []
        self.runs: set[fx.Node] = set()
        self._refs: dict[tuple[fx.Node, Views], str] = {}

    def seen(self, node: fx.Node, views: Views) -> tuple[_Window, str | None]:
        """What a mask of booleans shows: within a window, what a formula shows; None: all."""
        args: Any = node.args
        if _value(node).dtype != torch.bool:
            raise _Opaque
        if self.known.number(node):
            return _Window(), None
        if node.target in _ANDS:
            (a, f), (b, g) = (self.seen(x, views) for x in args)
            return a.within(b), f if g is None else g if f is None else self._call("aten.logical_and.default", f, g)
        inner = self._inside(node, views)
        if inner is not None and _value(inner[0]).dtype == torch.bool == _value(node).dtype:
            return self.seen(*inner)
        if node.target in _NOTS:
            return self.hidden(args[0], views)
        if node.target in (aten.tril.default, aten.triu.default) and self._is_square(node, views):
            diagonal = args[1] if len(args) > 1 else 0
            half = _Window(high=diagonal) if node.target is aten.tril.default else _Window(low=diagonal)
            window, shown = self.seen(args[0], views)
            return window.within(half), shown
        compared = self._compared(node, views) if node.target in _COMPARED else None
        if compared is not None:
            return compared, None
        return self._around(node, views), self.formula(node, views)

    def _around(self, node: fx.Node, views: Views) -> _Window:
        """A window outside of which a mask of booleans shows nothing."""
        args: Any = node.args
        if node.target in (*_ANDS, *_ORS):
            a, b = (self._around(x, views) for x in args)
            return a.within(b) if node.target in _ANDS else a.around(b)
        inner = self._inside(node, views)
        if inner is not None:
            return self._around(*inner)
        compared = self._compared(node, views) if node.target in _COMPARED else None
        return _Window() if compared is None else compared

    def hidden(self, node: fx.Node, views: Views) -> tuple[_Window, str | None]:
        """The same of what a mask of booleans hides."""
        if _value(node).dtype != torch.bool:
            raise _Opaque
        if node.target in _NOTS:
            return self.seen(node.args[0], views)  # type: ignore[arg-type]
        inner = self._inside(node, views)
        if inner is not None and _value(inner[0]).dtype == torch.bool:
            return self.hidden(*inner)
        if node.target in _ORS:
            (a, f), (b, g) = (self.hidden(x, views) for x in node.args)  # type: ignore[arg-type]
            return a.within(b), f if g is None else g if f is None else self._call("aten.logical_and.default", f, g)
        window, shown = self.seen(node, views)
        if shown is None and (other := window.outside()) is not None:
            return other, None
        return _Window(), self._call("aten.logical_not.default", self.formula(node, views))

    def formula(self, node: Any, views: Views) -> str:
        """The name of a node's value, of whose formula all calls are made."""
        if (node, views) not in self._refs:
            self._refs[node, views] = self._formula(node, views)
        return self._refs[node, views]

    def _formula(self, node: fx.Node, views: Views) -> str:
        shape = self._shape(node, views)
        if 1 in shape[2:]:
            return self._leaf(node, views)
        inner = self._inside(node, views)
        if inner is not None:
            dtype = _value(node).dtype
            found = self.formula(*inner)
            same = dtype == _value(inner[0]).dtype
            return found if same else self._call("aten._to_copy.default", found, {"dtype": str(dtype)[6:]})
        if node.target in _FILLED:
            return self._leaf(node, views)
        if node.target in (aten.tril.default, aten.triu.default) and self._is_square(node, views):
            diagonal = node.args[1] if len(node.args) > 1 else 0
            away = self._call("aten.sub.Tensor", self._leaf(KEYS, ()), self._leaf(QUERIES, ()))
            compared = "aten.le.Scalar" if node.target is aten.tril.default else "aten.ge.Scalar"
            near = self._call(compared, away, diagonal)
            if _value(node).dtype == torch.bool:
                return self._call("aten.logical_and.default", near, self.formula(node.args[0], views))
            hides = self._call("aten.logical_not.default", near)
            return self._call("aten.masked_fill.Scalar", self.formula(node.args[0], views), hides, 0)
        target: Any = node.target
        elementwise = isinstance(target, OpOverload) and (
            torch.Tag.pointwise in target.tags or target in (*_ANDS, *_ORS)
        )
        # Options beside numbers, such as a device, are none that a formula can have.
        plain = elementwise and not node.kwargs and all(isinstance(a, fx.Node | int | float) for a in node.args)
        if not plain or torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
            raise _Opaque
        args = [self.formula(a, views) if isinstance(a, fx.Node) else a for a in node.args]
        if any(isinstance(a, float) and not math.isfinite(a) for a in args):
            raise _Opaque
        return self._call(str(target), *args)

    def _leaf(self, node: Any, views: Views) -> str:
        return self.leaves.setdefault((node, views), f"leaf{len(self.leaves)}")

    def _call(self, *call: Any) -> str:
        name = f"call{len(self.calls)}"
        self.calls.append((name, list(call)))
        return name

    def _shape(self, node: fx.Node, views: Views) -> list[int]:
        """Of a node as part of the mask, four dims."""
        shape = list(_value(node).shape)
        for right in views:
            if right < len(shape):
                shape.insert(len(shape) - right, 1)
        extra = len(shape) - 4
        if any(n != 1 for n in shape[: max(extra, 0)]):
            raise _Opaque
        shape = [1] * -extra + shape[max(extra, 0) :]
        if any(n not in (1, m) for n, m in zip(shape, self.shape, strict=True)):
            raise _Opaque
        return shape

    def _inside(self, node: fx.Node, views: Views) -> tuple[fx.Node, Views] | None:
        """What a node has the elements of, and the dims that are put in; None: it has its own."""
        args: Any = node.args
        if not args or not isinstance(args[0], fx.Node):
            return None
        if _value(node).device != _value(args[0]).device:
            return None
        if node.target in _SAME or (node.target is aten.slice.Tensor and _value(node).shape == _value(args[0]).shape):
            return args[0], views
        if node.target not in _VIEWS:
            return None
        before, after, added = list(_value(args[0]).shape), list(_value(node).shape), []
        while before and before[0] == 1 and len(before) > len(after):
            before.pop(0)
        for right, n in enumerate(reversed(after)):
            if before and before[-1] == n:
                before.pop()
            elif n == 1:
                added.append(right)
            else:
                return None
        return (args[0], (*added, *views)) if not before else None

    def _is_square(self, node: fx.Node, views: Views) -> bool:
        """Whether a triangle is one of positions."""
        return self._shape(node, views)[2:] == list(self.shape[2:]) and not any(right < 2 for right in views)

    def _compared(self, node: fx.Node, views: Views) -> _Window | None:
        """The window that a comparison of positions shows; None if it compares something else."""
        name, (left, right) = _COMPARED[node.target], node.args
        one, other = self._linear(left, views), self._linear(right, views)
        if other is None:
            return None
        if one is not None:
            away = one.plus(other, -1)
            return None if away is None else away.window(name)
        # abs(key - query) <= n
        if name not in ("le", "lt") or not isinstance(left, fx.Node) or left.target is not aten.abs.default:
            return None
        inner = self._linear(left.args[0], views)
        if inner is None or (other.query, other.key) != (0, 0):
            return None
        ends = [_Linear(0, 0, 0).plus(inner, sign) for sign in (1, -1)]
        below, above = (e.plus(other, -1).window(name) for e in ends)  # type: ignore[union-attr]
        return None if below is None or above is None else below.within(above)

    def _linear(self, node: Any, views: Views) -> _Linear | None:
        """A node as a function of positions; None: it is something else."""
        if not isinstance(node, fx.Node):
            return _Linear(0, 0, node) if isinstance(node, int) and not isinstance(node, bool) else None
        try:
            shape = self._shape(node, views)
        except _Opaque:
            return None
        if 1 in shape[2:] and (known := self._progression(node, shape)) is not None:
            return known
        inner = self._inside(node, views)
        if 1 in shape[2:] and (base := self._of_all_tokens(node, views)) in self.runs:
            return _Linear(int(shape[2] > 1), int(shape[3] > 1), 0, base)
        if inner is not None:
            return None if _value(node).dtype.is_floating_point else self._linear(*inner)
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs and len(node.args) == 2:
            left, right = (self._linear(a, views) for a in node.args)
            if left is not None and right is not None:
                return left.plus(right, 1 if node.target is aten.add.Tensor else -1)
        return None

    def _progression(self, node: fx.Node, shape: list[int]) -> _Linear | None:
        value = self.known.rows(node)
        if value is None or value.dtype.is_floating_point or value.dtype == torch.bool:
            return None
        value = value.reshape(-1, shape[2] * shape[3]).long()
        first, step = int(value[0, 0]), int(value[0, 1] - value[0, 0]) if value.shape[1] > 1 else 0
        numbers = first + step * torch.arange(value.shape[1], device="cpu")
        if not torch.equal(value, numbers.expand_as(value)):
            return None
        return _Linear(step, 0, first) if shape[2] > 1 else _Linear(0, step, first)

    def _of_all_tokens(self, node: Any, views: Views) -> fx.Node | None:
        """The tensor ``[batch, tokens]`` that a leaf has all elements of, of queries or keys; None: there is none."""
        if not isinstance(node, fx.Node):
            return None
        batch, heads, *_ = self._shape(node, views)
        while (inner := self._inside(node, views)) is not None:
            node, views = inner
        args: Any = node.args
        source: fx.Node = args[0] if node.target is aten.index.Tensor else node
        places: Any = args[1] if node.target is aten.index.Tensor else []
        rows = _value(source).shape[0] if _value(source).ndim == 2 else 0
        if heads != 1 or batch != rows:
            return None
        if places:
            # Rows by the batch, and all tokens of each.
            of_batch = None not in places and len(places) == 2 and _value(places[0]).shape[-2:].numel() == 1
            whole = of_batch and all(self._counts(p, n) for p, n in zip(places, _value(source).shape, strict=True))
            return source if whole else None
        return source

    def _counts(self, node: fx.Node, size: int) -> bool:
        """Whether indices are 0, 1, ..., each once."""
        value = self.known.value(node)
        return value is not None and torch.equal(value.reshape(-1).long(), torch.arange(size, device="cpu"))

    def find_runs(self, node: fx.Node, views: Views) -> None:
        """Note of which tensors of positions a mask keeps runs apart, as transformers does in packed batches.

        Within a run, where each position is the one before plus one, positions compare as those in the whole do.
        """
        if node.target in _ANDS:
            for part in node.args:
                self.find_runs(part, views)  # type: ignore[arg-type]
        elif (inner := self._inside(node, views)) is not None:
            self.find_runs(*inner)
        elif node.target is aten.eq.Tensor:
            ids = {self._of_all_tokens(a, views) for a in node.args}
            positions = _positions_of_runs(ids.pop()) if len(ids) == 1 else None
            if positions is not None:
                self.runs.add(positions)

    def placed(self, graph: fx.Graph, origin: fx.Node, value: str | None) -> tuple[tuple[fx.Node, ...], str]:
        """The leaves that a value needs, as nodes behind ``origin``, and its formula."""
        if value is None:
            return (), ""
        if value in self.leaves.values():
            value = self._call("aten.alias.default", value)
        calls, wanted, pending = dict(self.calls), set[str](), [value]
        while pending:
            name = pending.pop()
            wanted.add(name)
            pending += [a for a in calls.get(name, ()) if isinstance(a, str) and a not in wanted]
        number, nodes, made = dict[str, str](), list[fx.Node](), list[list[Any]]()
        with graph.inserting_before(origin.next):
            for (leaf, views), name in self.leaves.items():
                if name in wanted:
                    number[name] = f"%{len(number)}"
                    nodes.append(self._place(graph, origin, leaf, views))
        for name, call in self.calls:
            if name in wanted:
                made.append([call[0], *(number.get(a, a) if isinstance(a, str) else a for a in call[1:])])
                number[name] = f"%{len(number)}"
        return tuple(nodes), json.dumps(made)

    def _place(self, graph: fx.Graph, origin: fx.Node, leaf: Any, views: Views) -> fx.Node:
        """A leaf as a tensor of four dims."""
        known = _value(leaf if isinstance(leaf, fx.Node) else origin)
        node: fx.Node = leaf
        if isinstance(leaf, str):
            views, size = ((0,), self.shape[2]) if leaf == QUERIES else ((), self.shape[3])
            node = _made(graph, origin, aten.arange.start_step, 0, size, 1, device=known.device)
        elif leaf.target in _FILLED and 1 not in self._shape(leaf, views)[2:]:
            number = self.known.number(leaf)
            views = ()
            node = _made(graph, origin, aten.full.default, [1] * 4, number, dtype=known.dtype, device=known.device)
        for right in views:
            if right < _value(node).ndim:
                node = insert_call(graph, origin, aten.unsqueeze.default, node, _value(node).ndim - right)
        while _value(node).ndim != 4:
            name = aten.unsqueeze.default if _value(node).ndim < 4 else aten.squeeze.dim
            node = insert_call(graph, origin, name, node, 0)
        return node


@dataclass(frozen=True)
class _Linear:
    """``query`` times the query's position, ``key`` times the key's, and a number; positions in runs of ``base``."""

    query: int
    key: int
    number: int
    base: fx.Node | None = None

    def plus(self, other: _Linear, factor: int) -> _Linear | None:
        """The sum with a multiple of another one; None: they count different positions."""
        bases = {x.base for x in (self, other) if (x.query, x.key) != (0, 0)}
        if len(bases) > 1:
            return None
        query, key, number = ((getattr(self, n) + factor * getattr(other, n)) for n in ("query", "key", "number"))
        return _Linear(query, key, number, *bases)

    def window(self, name: str) -> _Window | None:
        """The window that comparing it with 0 shows; None if that is none."""
        if self.query == self.key == 0:
            return _Window() if getattr(operator, name)(self.number, 0) else None
        if self.query != -self.key:
            return None
        key, number = self.key, self.number
        if key < 0:  # the same of positive multiples
            name = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}[name]
            key, number = -key, -number
        down, up = -number // key, -(number // key)
        if name == "eq":
            return _Window(down, up) if down == up else None
        if name in ("le", "lt"):
            return _Window(high=down if name == "le" else up - 1)
        return _Window(low=up if name == "ge" else down + 1)


def _positions_of_runs(ids: fx.Node | None) -> fx.Node | None:
    """Of ``cumsum(diff(positions, prepend=positions[:, :1] - 1) != 1)`` the positions; None: it is something else."""

    def argument(node: Any, target: Any, *rest: Any) -> Any:
        found = isinstance(node, fx.Node) and node.target is target
        return node.args[0] if found and tuple(node.args[1 : 1 + len(rest)]) == rest else None

    last = None if ids is None else ids.args[1:]
    changes = argument(ids, aten.cumsum.default) if last in ((1,), (-1,)) else None
    steps = argument(changes, aten.ne.Scalar, 1)
    if steps is None or steps.target is not aten.sub.Tensor:
        return None
    after, before = steps.args
    longer = argument(after, aten.slice.Tensor)
    if longer is None or longer is not argument(before, aten.slice.Tensor) or longer.target is not aten.cat.default:
        return None
    size = _value(longer).shape[1]
    if [_slice(n) for n in (after, before)] != [(1, 1, size), (1, 0, size - 1)] or len(longer.args[0]) != 2:
        return None
    first, positions = longer.args[0]
    source = argument(argument(first, aten.sub.Tensor, 1), aten.slice.Tensor)
    whole = source is positions and _slice(first.args[0]) == (1, 0, 1) and longer.args[1:] in ((1,), (-1,))
    return positions if whole else None


def _slice(node: fx.Node) -> tuple[int, int, int] | None:
    """The dim of a slice, its first element, and that behind its last one."""
    args: Any = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])
    value, dim = _value(args[0]), args[1] % _value(args[0]).ndim
    size = value.shape[dim]
    start, end = ((n + size if n < 0 else min(n, size)) for n in (args[2] or 0, size if args[3] is None else args[3]))
    return (dim, start, end) if args[4] == 1 else None


class _Constants:
    """Values of nodes that no input has a part in, where they are small."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph, self._known = graph, set[fx.Node]()
        self._values: dict[fx.Node, torch.Tensor | None] = {}
        self._alike: dict[fx.Node, bool] = {}
        for node in graph.graph.nodes:
            if node.op == "get_attr" or (_is_function(node) and self._known.issuperset(node.all_input_nodes)):
                self._known.add(node)

    def number(self, node: Any) -> Any:
        """The number that all elements are; None: there is none, or nobody knows."""
        if not isinstance(node, fx.Node):
            return node
        if node.target in _FILLED:
            filled = node.args[1] if node.target is aten.full.default else _FILLED[node.target]
            return None if isinstance(filled, fx.Node) else filled
        if node.target is aten.expand.default:
            return self.number(node.args[0])
        value = self.rows(node)
        if value is None or not value.numel() or bool((value != value.reshape(-1)[0]).any()):
            return None
        return value.reshape(-1)[0].item()

    def rows(self, node: fx.Node) -> torch.Tensor | None:
        """A node's value; where all samples of a batch have the same, that of the first."""
        value = self.value(node)
        return value[:1] if value is not None and self._are_alike(node) else value

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """A node's value; None if it depends on an input, on chance or on memory, or if it is too large."""
        if node not in self._known:
            return None
        size = _value(node).numel()
        if size > _LARGEST and (not self._are_alike(node) or size > _LARGEST * len(_value(node))):
            return None
        if node not in self._values:
            self._values[node] = self._computed(node)
        return self._values[node]

    def _computed(self, node: fx.Node) -> torch.Tensor | None:
        if node.op == "get_attr":
            found = getattr(self._graph, str(node.target))
            return found.cpu() if isinstance(found, torch.Tensor) and not isinstance(found, FakeTensor) else None
        if any(self.value(a) is None for a in node.all_input_nodes):
            return None
        # Of a batch of equal samples one is computed, however large it is.
        once = self._are_alike(node)
        args, kwargs = map_nodes((node.args, node.kwargs), self.rows if once else self.value)
        kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
        target: Any = node.target
        shape = list(_value(node).shape)
        if once and target in (*_FILLED, *_VIEWS, aten.expand.default) and target is not aten.unsqueeze.default:
            at = 0 if target in _FILLED else 1
            args = (*args[:at], [1, *shape[1:]], *args[at + 1 :])
        elif once and target is aten.index.Tensor:
            args = (args[0], [torch.zeros_like(args[1][0][:1]), *args[1][1:]])
        try:
            with torch.no_grad():
                result: torch.Tensor = target(*args, **kwargs)
        except RuntimeError:  # not on a CPU, or not in this dtype
            return None
        return result.expand(shape) if once else result

    def _are_alike(self, node: fx.Node) -> bool:
        """Whether a tensor with several elements along its first dim has the same in all of them, by how it is made."""
        if node not in self._alike:
            value = node.meta.get("val")
            several = isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) > 1
            self._alike[node] = several and node in self._known and self._made_alike(node)
        return self._alike[node]

    def _made_alike(self, node: fx.Node) -> bool:
        args: Any = node.args
        target: Any = node.target
        if target in _FILLED:
            return True

        def alike(source: Any, ndim: int = _value(node).ndim) -> bool:
            """Whether an argument that is broadcast has no more than one row, or equal ones."""
            if not isinstance(source, fx.Node):
                return True
            return _value(source).ndim < ndim or len(_value(source)) == 1 or self._are_alike(source)

        if target is aten.expand.default or target in _SAME or torch.Tag.pointwise in getattr(target, "tags", ()):
            return all(alike(n) for n in node.all_input_nodes)
        ndim = _value(node).ndim
        if target in (aten.cat.default, aten.cumsum.default, aten.slice.Tensor, aten.unsqueeze.default):
            dim = args[1] if len(args) > 1 else 0
            return dim % ndim != 0 and all(map(self._are_alike, node.all_input_nodes))
        if target in _VIEWS:
            return len(_value(args[0])) == len(_value(node)) and self._are_alike(args[0])
        # Rows by their number, and the same elements of each.
        if target is aten.index.Tensor and len(args[1]) > 1 and None not in args[1] and self._are_alike(args[0]):
            return _value(args[1][0]).ndim == ndim and all(map(alike, args[1][1:]))
        return False


def _is_function(node: fx.Node) -> bool:
    """Whether equal arguments give equal results, which nothing changes later."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    chance = torch.Tag.nondeterministic_seeded in target.tags or "empty" in str(target)
    return not chance and not target._schema.is_mutable and not str(target).startswith("autopar.draw")


def _made(graph: fx.Graph, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node that makes a tensor of nothing."""
    node = graph.call_function(target, args, kwargs)
    inherit_origin(node, origin)
    set_info(node, replace(info(node), internal=False))
    shown = _value(origin)
    with shown.fake_mode if isinstance(shown, FakeTensor) else nullcontext():
        node.meta["val"] = target(*args, **kwargs)
    return node


def _rewrite(graph: fx.Graph, node: fx.Node, mask: _Mask, shape: tuple[int, ...]) -> None:
    """Give an attention operator, or its backward, the function of its mask."""
    forward, (queries, keys) = node.target is attention, shape[2:]
    tensors, rest = (node.args[:3], node.args[5:]) if forward else (node.args[:4], node.args[6:])
    far = max(queries, keys)
    before = far if mask.window.low is None else min(-mask.window.low, far)
    after = far if mask.window.high is None else min(mask.window.high, far)
    is_all = before >= queries - 1 and after >= keys - 1
    is_causal = queries == keys and before >= queries - 1 and after == 0
    if not mask.formula and (is_all or is_causal):
        node.update_arg(3 if forward else 4, None)
        node.update_arg(6 if forward else 9, is_causal and not is_all)
        return
    numbers = (mask.formula, mask.added, before, after, 0, 0, keys)
    if forward:
        node.target, node.args = attention_masked, (*tensors, list(mask.leaves), *numbers, rest[2])
    else:
        out, log, _, _, scale, _ = rest
        node.target = attention_masked_backward
        node.args = (*tensors, list(mask.leaves), out, log, *numbers, scale)
    node.meta["val"] = computed(node)
    for user in list(node.users):
        index: Any = user.args[1]
        if index < len(node.meta["val"]):
            user.meta["val"] = node.meta["val"][index]
        elif not user.users:  # of the bias, which nobody asks for
            graph.erase_node(user)


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value
