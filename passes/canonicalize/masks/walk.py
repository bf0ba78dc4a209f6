"""From an attention mask back to what makes it."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch_compat import FakeTensor, OpOverload
from autopar.ir.graph import inherit_origin, insert_call
from autopar.ir.node_info import info, set_info
from autopar.passes.canonicalize.masks.constants import FILLED, LIKE, SAME, VIEWS, Constants, value_of
from autopar.passes.canonicalize.masks.lookups import Lookup, lookup_of
from autopar.passes.canonicalize.masks.positions import Linear, Window, positions_of_runs

aten = torch.ops.aten

_ANDS = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.__and__.Tensor)
_ORS = (aten.bitwise_or.Tensor, aten.logical_or.default, aten.__or__.Tensor)
_NOTS = (aten.bitwise_not.default, aten.logical_not.default)
_COMPARED = {
    getattr(getattr(aten, name), kind): name for name in ("le", "lt", "ge", "gt", "eq") for kind in ("Tensor", "Scalar")
}

QUERIES, KEYS = "queries", "keys"
"""Leaves that are positions."""

TABLE = "table"
"""All tables that a formula looks up, one below the other."""

_MODERATE = 1e5
"""Numbers up to this are added to scores without a loss of what these are."""


class Opaque(Exception):  # noqa: N818
    """A part of a mask that is of queries times keys, and no formula."""


Views = tuple[int, ...]
"""Where dims of size 1 are put in, one after the other: how many dims are to the right of each."""


class Walk:
    """From a mask back to what makes it."""

    def __init__(self, known: Constants, shape: tuple[int, ...]) -> None:
        self.known, self.shape = known, shape
        self.leaves: dict[tuple[Any, Views], str] = {}
        self.calls: list[tuple[str, list[Any]]] = []
        self.runs: set[fx.Node] = set()
        self.lookups: list[Lookup] = []
        # Whether nothing that is added is a large number, but for minus infinity.
        self.is_moderate = True
        self._refs: dict[tuple[fx.Node, Views], str] = {}

    def seen(self, node: fx.Node, views: Views) -> tuple[Window, str | None]:
        """What a mask of booleans shows: within a window, what a formula shows; None: all."""
        args: Any = node.args
        if value_of(node).dtype != torch.bool:
            raise Opaque
        if self.known.number(node):
            return Window(), None
        if node.target in _ANDS:
            (a, f), (b, g) = (self.seen(x, views) for x in args)
            return a.within(b), f if g is None else g if f is None else self._call("aten.logical_and.default", f, g)
        inner = self._inside(node, views)
        if inner is not None and value_of(inner[0]).dtype == torch.bool == value_of(node).dtype:
            return self.seen(*inner)
        if node.target in _NOTS:
            return self.hidden(args[0], views)
        if node.target in (aten.tril.default, aten.triu.default) and self._is_square(node, views):
            diagonal = args[1] if len(args) > 1 else 0
            half = Window(high=diagonal) if node.target is aten.tril.default else Window(low=diagonal)
            window, shown = self.seen(args[0], views)
            return window.within(half), shown
        compared = self._compared(node, views) if node.target in _COMPARED else None
        if compared is not None:
            return compared, None
        return self._around(node, views), self.formula(node, views)

    def _around(self, node: fx.Node, views: Views) -> Window:
        """A window outside of which a mask of booleans shows nothing."""
        args: Any = node.args
        if node.target in (*_ANDS, *_ORS):
            a, b = (self._around(x, views) for x in args)
            return a.within(b) if node.target in _ANDS else a.around(b)
        inner = self._inside(node, views)
        if inner is not None:
            return self._around(*inner)
        compared = self._compared(node, views) if node.target in _COMPARED else None
        return Window() if compared is None else compared

    def hidden(self, node: fx.Node, views: Views) -> tuple[Window, str | None]:
        """The same of what a mask of booleans hides."""
        if value_of(node).dtype != torch.bool:
            raise Opaque
        if node.target in _NOTS:
            return self.seen(node.args[0], views)  # type: ignore[arg-type]
        inner = self._inside(node, views)
        if inner is not None and value_of(inner[0]).dtype == torch.bool:
            return self.hidden(*inner)
        if node.target in _ORS:
            (a, f), (b, g) = (self.hidden(x, views) for x in node.args)  # type: ignore[arg-type]
            return a.within(b), f if g is None else g if f is None else self._call("aten.logical_and.default", f, g)
        window, shown = self.seen(node, views)
        if shown is None and (other := window.outside()) is not None:
            return other, None
        return Window(), self._call("aten.logical_not.default", self.formula(node, views))

    def formula(self, node: Any, views: Views) -> str:
        """The name of a node's value, of whose formula all calls are made."""
        if (node, views) not in self._refs:
            self._refs[node, views] = self._formula(node, views)
        return self._refs[node, views]

    def _formula(self, node: fx.Node, views: Views) -> str:
        shape = self._shape(node, views)
        if 1 in shape[2:]:
            self._note_size(node, shape)
            return self._leaf(node, views)
        looked_up = self._looked_up(node, views)
        if looked_up is not None:
            return looked_up
        inner = self._inside(node, views)
        if inner is not None:
            dtype = value_of(node).dtype
            found = self.formula(*inner)
            same = dtype == value_of(inner[0]).dtype
            return found if same else self._call("aten._to_copy.default", found, {"dtype": str(dtype)[6:]})
        if node.target in FILLED or node.target in LIKE:
            self._note_size(node, shape)
            return self._leaf(node, views)
        if node.target in (aten.tril.default, aten.triu.default) and self._is_square(node, views):
            diagonal = node.args[1] if len(node.args) > 1 else 0
            away = self._call("aten.sub.Tensor", self._leaf(KEYS, ()), self._leaf(QUERIES, ()))
            compared = "aten.le.Scalar" if node.target is aten.tril.default else "aten.ge.Scalar"
            near = self._call(compared, away, diagonal)
            if value_of(node).dtype == torch.bool:
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
            raise Opaque
        args = [self.formula(a, views) if isinstance(a, fx.Node) else a for a in node.args]
        if any(isinstance(a, float) and not math.isfinite(a) for a in args):
            raise Opaque
        if value_of(node).is_floating_point():  # others are positions and the like
            self.is_moderate &= all(abs(a) <= _MODERATE for a in args if isinstance(a, int | float))
        return self._call(str(target), *args)

    def _note_size(self, leaf: fx.Node, shape: list[int]) -> None:
        """Note whether a leaf may be a large number: what the batch gives of each token may."""
        if not value_of(leaf).is_floating_point():
            return
        value = self.known.rows(leaf)
        number = self.known.number(leaf) if value is None else None
        if value is not None:
            value = value[value != -math.inf]
            self.is_moderate &= bool((value.abs() <= _MODERATE).all())
        elif number is not None:
            self.is_moderate &= abs(number) <= _MODERATE or number == -math.inf
        else:
            self.is_moderate &= shape[2:] == [1, 1]

    def _looked_up(self, node: fx.Node, views: Views) -> str | None:
        """A number of each head that a table has for a query and a key; None: it is something else."""
        found = lookup_of(node, self.known)
        if found is None or any(right <= 2 for right in views):
            return None
        (count, heads), others = found.shape, self.lookups
        dtype = value_of(found.table).dtype
        if heads not in (1, self.shape[1]) or any(
            x.shape[1] != heads or value_of(x.table).dtype != dtype for x in others
        ):
            return None
        place = self.formula(found.rows, () if found.turned else (2, *views))
        if found.wraps:
            place = self._call("aten.remainder.Scalar", place, count)
        tables = {(x.table, x.turned): x for x in others}
        before = tables.get((found.table, found.turned))
        offset = sum(x.shape[0] for x in tables.values()) if before is None else before.offset
        if offset:
            place = self._call("aten.add.Tensor", place, offset)
        if not any(x.table is found.table and x.rows is found.rows for x in others):
            others.append(replace(found, offset=offset))
        return self._call("autopar.look_up.default", TABLE, place)

    def _leaf(self, node: Any, views: Views) -> str:
        return self.leaves.setdefault((node, views), f"leaf{len(self.leaves)}")

    def _call(self, *call: Any) -> str:
        name = f"call{len(self.calls)}"
        self.calls.append((name, list(call)))
        return name

    def _shape(self, node: fx.Node, views: Views) -> list[int]:
        """Of a node as part of the mask, four dims."""
        shape = list(value_of(node).shape)
        for right in views:
            if right < len(shape):
                shape.insert(len(shape) - right, 1)
        extra = len(shape) - 4
        if any(n != 1 for n in shape[: max(extra, 0)]):
            raise Opaque
        shape = [1] * -extra + shape[max(extra, 0) :]
        if any(n not in (1, m) for n, m in zip(shape, self.shape, strict=True)):
            raise Opaque
        return shape

    def _inside(self, node: fx.Node, views: Views) -> tuple[fx.Node, Views] | None:
        """What a node has the elements of, and the dims that are put in; None: it has its own."""
        args: Any = node.args
        if not args or not isinstance(args[0], fx.Node):
            return None
        # Of several results, as of `cummax`, one is an element of none of them.
        values = value_of(node), value_of(args[0])
        if not all(isinstance(v, torch.Tensor) for v in values) or values[0].device != values[1].device:
            return None
        if node.target in SAME or (
            node.target is aten.slice.Tensor and value_of(node).shape == value_of(args[0]).shape
        ):
            return args[0], views
        if node.target not in VIEWS:
            return None
        before, after, added = list(value_of(args[0]).shape), list(value_of(node).shape), []
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

    def _compared(self, node: fx.Node, views: Views) -> Window | None:
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
        ends = [Linear(0, 0, 0).plus(inner, sign) for sign in (1, -1)]
        below, above = (e.plus(other, -1).window(name) for e in ends)  # type: ignore[union-attr]
        return None if below is None or above is None else below.within(above)

    def _linear(self, node: Any, views: Views) -> Linear | None:
        """A node as a function of positions; None: it is something else."""
        if not isinstance(node, fx.Node):
            return Linear(0, 0, node) if isinstance(node, int) and not isinstance(node, bool) else None
        try:
            shape = self._shape(node, views)
        except Opaque:
            return None
        if 1 in shape[2:] and (known := self._progression(node, shape)) is not None:
            return known
        inner = self._inside(node, views)
        if 1 in shape[2:] and (base := self._of_all_tokens(node, views)) in self.runs:
            return Linear(int(shape[2] > 1), int(shape[3] > 1), 0, base)
        if inner is not None:
            return None if value_of(node).dtype.is_floating_point else self._linear(*inner)
        if node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs and len(node.args) == 2:
            left, right = (self._linear(a, views) for a in node.args)
            if left is not None and right is not None:
                return left.plus(right, 1 if node.target is aten.add.Tensor else -1)
        return None

    def _progression(self, node: fx.Node, shape: list[int]) -> Linear | None:
        value = self.known.rows(node)
        if value is None or value.dtype.is_floating_point or value.dtype == torch.bool:
            return None
        value = value.reshape(-1, shape[2] * shape[3]).long()
        first, step = int(value[0, 0]), int(value[0, 1] - value[0, 0]) if value.shape[1] > 1 else 0
        numbers = first + step * torch.arange(value.shape[1], device="cpu")
        if not torch.equal(value, numbers.expand_as(value)):
            return None
        return Linear(step, 0, first) if shape[2] > 1 else Linear(0, step, first)

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
        rows = value_of(source).shape[0] if value_of(source).ndim == 2 else 0
        if heads != 1 or batch != rows:
            return None
        if places:
            # Rows by the batch, and all tokens of each.
            of_batch = None not in places and len(places) == 2 and value_of(places[0]).shape[-2:].numel() == 1
            whole = of_batch and all(self._counts(p, n) for p, n in zip(places, value_of(source).shape, strict=True))
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
            positions = positions_of_runs(ids.pop()) if len(ids) == 1 else None
            if positions is not None:
                self.runs.add(positions)

    def placed(
        self, graph: fx.Graph, origin: fx.Node, value: str | None
    ) -> tuple[tuple[fx.Node, ...], str, fx.Node | None]:
        """The leaves that a value needs, as nodes behind ``origin``, its formula, and the tables that this looks up."""
        if value is None:
            return (), "", None
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
            table = self._placed_tables(graph, origin) if TABLE in wanted else None
            if table is not None:
                number[TABLE] = f"%{len(number)}"
        for name, call in self.calls:
            if name in wanted:
                made.append([call[0], *(number.get(a, a) if isinstance(a, str) else a for a in call[1:])])
                number[name] = f"%{len(number)}"
        return tuple(nodes), json.dumps(made), table

    def _placed_tables(self, graph: fx.Graph, origin: fx.Node) -> fx.Node:
        """The tables as one tensor."""
        parts = [
            insert_call(graph, origin, aten.permute.default, table, [1, 0]) if turned else table
            for table, turned in dict.fromkeys((x.table, x.turned) for x in self.lookups)
        ]
        return parts[0] if len(parts) == 1 else insert_call(graph, origin, aten.cat.default, parts, 0)

    def _place(self, graph: fx.Graph, origin: fx.Node, leaf: Any, views: Views) -> fx.Node:
        """A leaf as a tensor of four dims."""
        known = value_of(leaf if isinstance(leaf, fx.Node) else origin)
        node: fx.Node = leaf
        if isinstance(leaf, str):
            views, size = ((0,), self.shape[2]) if leaf == QUERIES else ((), self.shape[3])
            node = _made(graph, origin, aten.arange.start_step, 0, size, 1, device=known.device)
        elif (leaf.target in FILLED or leaf.target in LIKE) and 1 not in self._shape(leaf, views)[2:]:
            number = self.known.number(leaf)
            views = ()
            node = _made(graph, origin, aten.full.default, [1] * 4, number, dtype=known.dtype, device=known.device)
        for right in views:
            if right < value_of(node).ndim:
                node = insert_call(graph, origin, aten.unsqueeze.default, node, value_of(node).ndim - right)
        while value_of(node).ndim != 4:
            name = aten.unsqueeze.default if value_of(node).ndim < 4 else aten.squeeze.dim
            node = insert_call(graph, origin, name, node, 0)
        return node


def _made(graph: fx.Graph, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node that makes a tensor of nothing."""
    node = graph.call_function(target, args, kwargs)
    inherit_origin(node, origin)
    set_info(node, replace(info(node), internal=False))
    shown = value_of(origin)
    with shown.fake_mode if isinstance(shown, FakeTensor) else nullcontext():
        node.meta["val"] = target(*args, **kwargs)
    return node
