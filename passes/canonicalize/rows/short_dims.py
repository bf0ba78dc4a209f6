"""pad_short_dims: a dim that a slice has made a little shorter has the length that it had, and rows that nothing reads.

Before::

    last = aten.slice(x, 1, 0, 15); next = aten.slice(x, 1, 1, 16)                       # x [2, 16, 8]
    y = aten.sum(aten.tanh(aten.mm(aten.reshape(aten.sub(next, last), [30, 8]), w)), [0])

After::

    next = aten.constant_pad_nd(x, [0, 0, -1, 1], 0); outside = aten.arange(16) >= 15    # in both samples
    y = aten.sum(aten.masked_fill(aten.tanh(aten.mm(aten.reshape(aten.sub(next, x), [32, 8]), w)), outside, 0), [0])

A dim of 15 rows is another factor than that of 16, which no split of the sequence reaches; a shift is a few rows of a
neighbor. How operators stay right with padding rows is said by their rules, as for `pad_dims`, whose copy of a program
this is. A factor stays as it is where some operator does not, or where the longer one divides no better: batches of
T + 1 tokens, of which a model takes T, are split after that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.ir.graph import inherit_origin, producer, tensor_arguments
from autopar.ir.layout import Factor, TensorType
from autopar.ir.module_outputs import pass_on
from autopar.ir.ops.attention import attention, attention_backward
from autopar.ir.ops.sequence.halo import pads
from autopar.ir.ops.sequence.masked_attention import attention_masked, attention_masked_backward
from autopar.ir.ops.sequence.padded.windows import padded_windows, padded_windows_backward
from autopar.ir.program import Program
from autopar.sharding.dims import Dims, analyze
from autopar.sharding.padded_copy import Fills, PaddedCopy, Place, behind

aten = torch.ops.aten

FEW = 8
"""One row of so many may be in vain, at most."""

_VIEWS = (aten.reshape.default, aten.permute.default)

_JOINS = (aten.cat.default, aten.slice_scatter.default)
"""What puts rows back into a dim of the old length, which `lengthen_rows` makes of shifts."""


def pad_short_dims(program: Program) -> Program:
    """Keep rows that a slice leaves out, where these are few and every operator stays right; computes the same."""
    if not any(_shortens(n) for n in program.graph.graph.nodes):
        return program
    dims, excluded = analyze(program), set[int]()
    while sizes := _longer(program, dims, excluded):
        copy = _Copy(program, dims, sizes)
        wrong = copy.wrong()
        if not wrong:
            return copy.run()
        excluded |= wrong
    return program


def _shortens(node: fx.Node) -> tuple[int, int, int] | None:
    """Of what leaves rows out of a dim, or makes a window of each few: the dim, and its length before and after."""
    args: Any = node.args
    if node.target is aten.slice.Tensor and args[4] == 1:
        dim = args[1]
    elif node.target is aten.unfold.default and args[3] == 1 and node.meta["val"].ndim > 1:
        dim = args[1]
    else:
        return None
    source, made = args[0].meta["val"], node.meta["val"]
    before, after = int(source.shape[dim]), int(made.shape[dim])
    few = 0 < FEW * (before - after) <= before
    # What divides no better would take an axis from those that split the dim as it is.
    return (dim % source.ndim, before, after) if few and _twos(before) > _twos(after) else None


def _twos(n: int) -> int:
    """How often a size can be halved."""
    return (n & -n).bit_length()


def _longer(program: Program, dims: Dims, excluded: set[int]) -> dict[int, int]:
    """The size that factors get, by their `id`."""
    found: dict[int, int] = {}
    for node in dims.operators:
        short = _shortens(node)
        if short is None:
            continue
        dim, before, _ = short
        before = _padded_size(dims.types[program.sources[node][0]].dims[dim], found)
        first, *rest = dims.types[node, 0].dims[dim]
        # Rows that pieces of the dim have in common with the slice stay as they are.
        size, left = divmod(before, math.prod(f.size for f in rest))
        if not left and size > first.size and id(first) not in excluded:
            found[id(first)] = max(found.get(id(first), 0), size)
    return found


def _padded_size(dim: Sequence[Factor], sizes: Mapping[int, int]) -> int:
    return math.prod(sizes.get(id(f), f.size) for f in dim)


class _Move(NamedTuple):
    """Rows of a dim moved up by ``by``, between rows of another number; of those that come, None: nothing is read."""

    dim: int
    by: int
    fill: Any


def _move(node: fx.Node) -> _Move | None:
    args: Any = node.args
    if node.target is aten.slice.Tensor and args[4] == 1:
        return _Move(args[1], -args[2], None)
    if node.target is aten.slice_backward.default and args[5] == 1:
        return _Move(args[2], args[3], 0)
    if node.target is aten.constant_pad_nd.default:
        moved = [i for i in range(len(args[1]) // 2) if any(args[1][2 * i : 2 * i + 2])]
        if len(moved) == 1:
            return _Move(node.meta["val"].ndim - 1 - moved[0], args[1][2 * moved[0]], args[2] if len(args) > 2 else 0)
    return None


class _Copy(PaddedCopy):
    """A copy with longer factors, none of which is at its boundary."""

    def wrong(self) -> set[int]:
        """Factors that some operator needs as they are, by their `id`."""
        found = set[int]()
        for node, spec in zip(self.program.placeholders, self.program.inputs, strict=True):
            if spec.kind in ("parameter", "buffer"):
                found |= {id(f) for dim in self.dims.types[node, 0].dims for f in dim if id(f) in self.sizes}
        for node in self.dims.operators:
            found |= self._wrong(node)
        return found

    def _wrong(self, node: fx.Node) -> set[int]:
        """Of its arguments' factors: results that are not longer are made so."""
        operator = self.dims.operators[node]
        types = [self.dims.types[s] for s in self.program.sources[node]]
        if not any(id(f) in self.sizes for t in types for dim in t.dims for f in dim):
            return set()
        letters, apart = self.padded_letters(node, operator), self._apart(node)
        found = set[int]()
        for type_, groups in zip(types, operator.rule.inputs, strict=True):
            for d, (dim, group) in enumerate(zip(type_.dims, groups, strict=True)):
                own = {id(f) for f in dim if id(f) in self.sizes}
                if own and d != apart and (self.place(dim) is None or not any(c in letters for c in group)):
                    found |= own
        return found

    def _apart(self, node: fx.Node) -> int | None:
        """The dim of an argument that is done apart, or without its padding."""
        args: Any = node.args
        if node.target in _JOINS:
            dim = args[1] if node.target is aten.cat.default and len(args) > 1 else 0
            return (args[2] if node.target is aten.slice_scatter.default else dim) % node.meta["val"].ndim  # type: ignore[no-any-return]
        if self._sees_all(node):
            return 2
        if node.target is aten.select.int:
            return args[1] % args[0].meta["val"].ndim  # type: ignore[no-any-return]
        if (move := _move(node)) is not None and self._moves(node, move) is not None:
            return move.dim
        return args[2] if node.target is aten.unfold_backward.default and self._windows(node) else None

    def entering(self, kind: str, type_: TensorType) -> Fills:
        """Arguments are as they were."""
        return {}

    def leaving(self, value: fx.Node, has_tangent: bool) -> Fills:
        """So are results."""
        return {}

    def first(self, user: fx.Node, made: fx.Node, d: int, size: int) -> fx.Node:
        """So many elements, in canonical form."""
        return self.call(user, aten.slice.Tensor, made, d, 0, size, 1)

    def more(self, user: fx.Node, made: fx.Node, ends: Mapping[int, int]) -> fx.Node:
        """Zeros behind, in canonical form."""
        return self.call(user, aten.constant_pad_nd.default, made, behind(made.meta["val"].ndim, ends), 0)

    def with_padding(self, value: fx.Node, wanted: Fills, user: fx.Node) -> fx.Node:
        """A value; what is filled in is filled into what it is a view of, which others read, too."""
        key = (value, tuple(sorted(wanted.items(), key=lambda item: item[0])))
        if not wanted and key not in self.forms and self.padding.get((value, 0)) and self._is_view(value):
            # As it was: a result is to be in the memory in which it was.
            own: Any = value.args
            before_it = self.with_padding(own[0], {}, user)
            made = self._instead(value, value.target, (before_it, *own[1:]))
            if user is not value:
                inherit_origin(made, user)
            self.forms[key], self.holds[value, made] = made, {}
        native = self.padding.get((value, 0), {}) if value.target in _VIEWS else {}
        if key in self.forms or not native or wanted.keys() != native.keys():
            return super().with_padding(value, wanted, user)
        if all(fill is None or native[d] == fill for d, fill in wanted.items()):
            return super().with_padding(value, wanted, user)
        source: Any = value.args[0]
        dims, inner = self.dims.types[value, 0].dims, self.dims.type_of(source)
        before: Fills = {}
        for d in wanted:
            (own,) = (f for f in dims[d] if id(f) in self.sizes)
            at = [i for i, dim in enumerate(inner.dims) if any(f is own for f in dim)]
            if len(at) != 1 or at[0] in before:
                return super().with_padding(value, wanted, user)
            before[at[0]] = wanted[d]
        if before.keys() != self.padding.get(producer(source), {}).keys():
            return super().with_padding(value, wanted, user)
        args = (self.with_padding(source, before, user), *self.made[value].args[1:])
        made = self._instead(self.made[value], value.target, args)
        inherit_origin(made, user)
        self.holds[value, made] = wanted
        self.forms[key] = made
        return made

    def _is_view(self, value: fx.Node) -> bool:
        return value.target in _VIEWS or (value.target is aten.slice.Tensor and _move(value) is not None)

    def operator(self, node: fx.Node) -> None:
        """What moves rows moves them between longer dims; all else is as rules say."""
        move = _move(node)
        whole = None if move is None else self._moves(node, move)
        if move is not None and whole is not None:
            self._moved(node, move, *whole)
        elif node.target is aten.select.int and node.args[1] in self.padding[self.program.sources[node][0]]:
            self._selected(node)
        elif node.target in (aten.unfold.default, aten.unfold_backward.default) and self._windows(node):
            self._windowed(node)
        elif self._sees_all(node):
            self._attended(node)
        else:
            super().operator(node)

    def _single(self, type_: TensorType, d: int) -> Place | None:
        """Where a dim has its padding, if at all: at its end; None if it has several."""
        place, n = self.place(type_.dims[d]), type_.shape[d]
        if place is None and not any(id(f) in self.sizes for f in type_.dims[d]):
            return Place(1, n, n)
        return place if place is not None and place.blocks == 1 else None

    def _moves(self, node: fx.Node, move: _Move) -> tuple[Place, Place] | None:
        """The moved dim before and after; None if neither has padding, or one has several."""
        before = self._single(self.dims.types[self.program.sources[node][0]], move.dim)
        after = self._single(self.dims.types[node, 0], move.dim)
        if before is None or after is None or (before.size == before.longer and after.size == after.longer):
            return None
        return before, after

    def _moved(self, node: fx.Node, move: _Move, before: Place, after: Place) -> None:
        """Rows in another place, and as many as the longer dim has."""
        (source,), ndim = tensor_arguments(node), node.meta["val"].ndim
        native = self.padding[self.program.sources[node][0]]
        wanted: Fills = dict.fromkeys(native)
        # Padding rows that come where the operator has its filling.
        in_vain = before.size < before.longer and before.size + move.by < min(before.longer + move.by, after.size)
        if move.fill is not None and in_vain:
            wanted[move.dim] = move.fill
        made = self.with_padding(source, wanted, node)
        held, fill = self.holds[source, made], 0 if move.fill is None else move.fill
        rest = after.longer - before.longer - move.by
        if move.by or rest:
            target: Any = aten.constant_pad_nd.default
            args: tuple[Any, ...] = (made, pads(ndim, move.dim, move.by, rest), fill)
            if max(move.by, rest) <= 0:
                target, args = aten.slice.Tensor, (made, move.dim, -move.by, after.longer - move.by, 1)
            made = self._instead(node, target, args)
        else:
            pass_on(node, made)
        self.made[node] = made
        holds: Fills = {d: h if h == 0.0 and fill == 0 else None for d, h in held.items() if d != move.dim}
        if after.size < after.longer:
            empty = before.size + move.by <= after.size  # all that is behind comes from behind
            full = before.size == before.longer or held.get(move.dim) == 0.0
            holds[move.dim] = 0.0 if empty and full and fill == 0 else None
        self.padding[node, 0] = holds

    def _selected(self, node: fx.Node) -> None:
        """One row of a longer dim, counted from its front."""
        args: Any = node.args
        made = self.with_padding(args[0], dict(self.padding[self.program.sources[node][0]]), node)
        size = args[0].meta["val"].shape[args[1]]
        self.made[node] = self._instead(node, node.target, (made, args[1], args[2] % size))
        others = {d: h for d, h in self.holds[args[0], made].items() if d != args[1]}
        self.padding[node, 0] = {d - (d > args[1]): h for d, h in others.items()}

    def _sees_all(self, node: fx.Node) -> bool:
        """Whether it is an attention to all keys, of which there are longer ones: only a mask can hide these."""
        args: Any = node.args
        at = 1 if node.target is attention_backward else 0
        if node.target not in (attention, attention_backward) or args[at + 3 : at + 5] != (None, None):
            return False
        keys = self._single(self.dims.type_of(args[at + 1]), 2)
        return not args[-3 if at else -2] and keys is not None and keys.size < keys.longer

    def _attended(self, node: fx.Node) -> None:
        """Attention under a mask that has a window of all keys and no others."""
        args: Any = node.args
        backward = node.target is attention_backward
        values, longer = [], []
        for i, a in enumerate(tensor_arguments(node)):
            own = self._single(self.dims.type_of(a), 2)
            longer.append(own is not None and own.size < own.longer)
            fill = 0.0 if backward or i else None
            values.append(self.with_padding(a, {2: fill} if longer[-1] else {}, node))
        keys = self.dims.type_of(args[2 if backward else 1]).shape[2]
        window = ("", False, keys, keys, 0, 0, keys, args[-2 if backward else -1])
        if backward:
            rows = [longer[1], True, True, False]
            call = (*values[:4], [], *values[4:], *window)
            self.made[node] = self._instead(node, attention_masked_backward, call)
        else:
            rows = [longer[0]] * 2
            self.made[node] = self._instead(node, attention_masked, (*values, [], *window))
        fill = 0.0 if backward else None
        self.padding |= {(node, i): {2: fill} if n else {} for i, n in enumerate(rows)}

    def _windows(self, node: fx.Node) -> bool:
        """Whether there is a window for each row of a longer dim, none of which is beyond a neighbor."""
        args: Any = node.args
        dim, size, step = args[-3:]
        source, made = self.dims.types[self.program.sources[node][0]], self.dims.types[node, 0]
        if step != 1 or not source.dims or not made.dims:
            return False
        rows, windows = (source, made) if node.target is aten.unfold.default else (made, source)
        if windows.shape[: len(rows.dims)] != (*rows.shape[:dim], rows.shape[dim] - size + 1, *rows.shape[dim + 1 :]):
            return False
        each, several = self._single(windows, dim), self._single(rows, dim)
        if each is None or several is None or each.size == each.longer:
            return False
        return each.longer == several.longer and 2 * (size - 1) <= several.longer

    def _windowed(self, node: fx.Node) -> None:
        args: Any = node.args
        dim, size, step = args[-3:]
        wanted: Fills = dict.fromkeys(self.padding[self.program.sources[node][0]])
        if node.target is aten.unfold.default:
            made = self.with_padding(args[0], wanted, node)
            self.made[node] = self._instead(node, padded_windows, (made, dim, size, step, 0, size - 1, 0))
            self.padding[node, 0] = dict.fromkeys([*wanted, dim])
            return
        made = self.with_padding(args[0], wanted | {dim: 0.0}, node)
        type_ = self.dims.types[node, 0]
        self.padding[node, 0] = {
            d: 0.0 if d == dim else None for d in range(len(type_.dims)) if d in wanted and self.place(type_.dims[d])
        }
        sizes = self.shape(node, 0)
        self.made[node] = self._instead(node, padded_windows_backward, (made, sizes, dim, size, step, 0, size - 1))

    def _instead(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        """Another call for a node."""
        made = self.graph.create_node("call_function", target, args, {}, node.name, node.type)
        made.meta = dict(node.meta)
        made.meta["val"] = self.compute(made)
        return made
