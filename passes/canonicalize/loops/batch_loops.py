"""batch_loops: a loop over the matrices of one parameter is a batched product, which devices can split by expert.

Before, for each expert ``e`` of 4 (a loop over all experts, dense masks)::

    w = aten.select(up, 0, e); h = aten.mm(x, w); m = aten.select(mask, 1, e)
    t = aten.mul(h, aten.reshape(m, [32, 1])); y = aten.add(y, t)

After::

    h = aten.bmm(aten.expand(aten.reshape(x, [1, 32, 8]), [4, 32, 8]), up); m = aten.permute(mask, [1, 0])
    t = aten.mul(h, aten.reshape(m, [4, 32, 1])); y = aten.sum(t, [0])

A loop leaves no trace in a graph but its rounds: copies of the same operators that differ in an index alone, 0 in the
first one. They are found by their form: operators of equal targets and arguments, each of which is the same tensor in
all rounds, or what the round itself made by equal operators. What they make must be read by operators of rounds, by a
sum of all rounds' results or a row of these in order. A product of a matrix of a parameter must be among them.

Rounds that read what earlier ones made (layers, steps of a recurrence) are not alike, nor are those that draw numbers
or are checkpointed one by one: they stay as they are.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph, insert_call
from autopar.ir.program import Program
from autopar.passes.canonicalize.loops.rounds import (
    BY_FORM,
    COMPARISONS,
    DIM_AT,
    JOINED,
    SHAPE_AT,
    Found,
    Rounds,
    additions,
    dim_of,
    find_rounds,
    joined_by,
    loops_of,
    place_of,
    readable,
    sum_of,
    terms_of,
)

aten = torch.ops.aten


def batch_loops(program: Program) -> Program:
    """Make batched products of loops over matrices of a parameter; computes the same."""
    sliced = [n for n in program.graph.graph.nodes if n.target in (aten.select.int, aten.unbind.int)]
    parameters = _from_parameters(program) if sliced else set()
    counts = {n.args[0].meta["val"].shape[dim_of(n)] for n in sliced if n.args[0] in parameters}
    if not counts:
        return program
    graph = copy_graph(program.graph)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    renamed = dict(zip(program.placeholders, placeholders, strict=True))
    names = {renamed.get(n, n).name for n in parameters}
    for count in sorted(c for c in counts if c > 1):
        _batch(graph.graph, count, names)
    return program.with_graph(graph)


def _from_parameters(program: Program) -> set[fx.Node]:
    """Parameters, and what is computed from nothing but one of them."""
    found = program.inputs_of("parameter")
    for node, sources in program.sources.items():
        if len(sources) == 1 and sources[0][0] in found:
            found.add(node)
    return found


def _batch(graph: fx.Graph, count: int, parameters: set[str]) -> None:
    """Batch the loops of so many rounds."""
    found = find_rounds(graph, count)
    valid = readable(found, count)
    emitter = _Emitter(graph, count)
    for loop in loops_of(valid):
        if any(_multiplies_weight(r, parameters) for r in loop):
            _emit(emitter, loop, found)


def _multiplies_weight(rounds: Rounds, parameters: set[str]) -> bool:
    """Whether rounds multiply something by their own matrix of a parameter."""
    operands = [a for a in rounds.arguments if isinstance(a, Rounds)]
    return rounds.first.target is aten.mm.default and any(_is_weight(a, parameters) for a in operands)


def _is_weight(rounds: Rounds, parameters: set[str]) -> bool:
    while rounds.source is None:
        if len(rounds.arguments) != 1 or not isinstance(rounds.arguments[0], Rounds):
            return False
        (rounds,) = rounds.arguments
    return rounds.source.name in parameters


def _emit(emitter: _Emitter, loop: list[Rounds], found: Found) -> None:
    """Put batched operators in the place of a loop's."""
    own, count = {id(r) for r in loop}, emitter.count
    last = {id(r): max(r.members.values(), key=found.place.__getitem__) for r in loop}
    for rounds in sorted(loop, key=lambda r: found.place[last[id(r)]]):
        origin = last[id(rounds)]
        with emitter.graph.inserting_before(origin):
            rounds.batched = emitter.made(rounds, origin)
        if not emitter.fits(rounds):
            return
    # Nobody reads what was made so far: from here on all is replaced.
    for rounds in loop:
        if not rounds.is_seed and isinstance(rounds.first.meta["val"], torch.Tensor):
            others = {u for m in rounds.members.values() for u in m.users}
            placed = place_of(rounds, count) is not None
            others = {u for u in others if u not in found.of or id(found.of[u][0]) not in own or placed}
            if others:
                emitter.replace(rounds, others)


@dataclass
class _Emitter:
    """Makes batched operators.

    Attributes:
        graph: inserts where they are to be.
        count: of rounds.
        replaced: what took the place of sums and rows of results, which later loops may read.
    """

    graph: fx.Graph
    count: int
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def fits(self, rounds: Rounds) -> bool:
        """Whether what was made has the numbers of all rounds, in their dtype."""
        value, each = rounds.batched.meta["val"], rounds.first.meta["val"]  # type: ignore[union-attr]
        if not isinstance(each, torch.Tensor):
            return True
        if place_of(rounds, self.count) is not None:
            return bool(value.dtype == each.dtype and value.shape == each.shape)
        return bool(value.dtype == each.dtype and tuple(value.shape) == (self.count, *each.shape))

    def made(self, rounds: Rounds, origin: fx.Node) -> fx.Node:
        """One operator for those of all rounds; dim 0 of what it gives is the round."""
        if rounds.is_seed:
            return self._begun(rounds, origin)
        node, n = rounds.first, self.count
        args: Any = node.args
        each = node.meta["val"]
        same = [None if isinstance(a, Rounds) else self._now(a) for a in rounds.arguments]
        values = iter(a.batched if isinstance(a, Rounds) else self._repeated(s, node, origin)
                      for a, s in zip(rounds.arguments, same, strict=True))  # fmt: skip
        batched: Any = fx.node.map_arg(args, lambda _: next(values))
        target: Any = node.target
        if target is operator.getitem:
            return self._call(origin, target, *batched)
        if (placed := place_of(rounds, n)) is not None:
            return self._placed(batched[0], placed, origin)
        if target in (aten.mm.default, aten.bmm.default):
            return self._product(batched[0], batched[1], each.shape, origin)
        if target is aten.permute.default:
            return self._call(origin, target, batched[0], [0, *(d + 1 for d in args[1])])
        if target in SHAPE_AT or target in DIM_AT:
            batched = list(batched)
            if target in SHAPE_AT:
                shape = each.shape if target in (aten.reshape.default, aten.expand.default) else args[1]
                batched[1] = [n, *shape]
            if target is aten.expand.default:
                batched[0] = self._ranked(batched[0], each.ndim, origin)
            if target in DIM_AT:
                batched = self._with_later_dim(batched, target, node)
            return self._call(origin, target, *batched, **node.kwargs)
        ranked = fx.node.map_arg(batched, lambda a: a if a in same else self._ranked(a, each.ndim, origin))
        return self._call(origin, target, *ranked, **node.kwargs)

    def _now(self, node: fx.Node) -> fx.Node:
        """What took a node's place, if anything did."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def _begun(self, rounds: Rounds, origin: fx.Node) -> fx.Node:
        """All parts of a tensor, or comparisons with all numbers."""
        target: Any = rounds.first.target
        dim, n = rounds.dim, self.count
        assert rounds.source is not None
        source = self._now(rounds.source)
        value = source.meta["val"]
        if dim is None:
            numbers = self._call(origin, aten.arange.default, n, dtype=torch.int64, device=value.device)
            numbers = self._call(origin, aten.reshape.default, numbers, [n, *[1] * value.ndim])
            given = self._call(origin, aten.reshape.default, source, [1, *value.shape])
            return self._call(origin, COMPARISONS[target], given, numbers)
        each, shape = rounds.first.meta["val"], list(value.shape)
        size = each.shape[dim] if each.ndim == value.ndim else 0
        whole = n * max(size, 1)
        made = source
        if shape[dim] != whole:
            made = self._call(origin, aten.slice.Tensor, made, dim, 0, whole, 1)
        if size:
            made = self._call(origin, aten.reshape.default, made, [*shape[:dim], n, size, *shape[dim + 1 :]])
        return self._moved(made, dim, 0, origin)

    def _placed(self, value: Any, place: tuple[Any, ...], origin: fx.Node) -> fx.Node:
        """Gradients of all parts are that of the whole; for its sum alone, so that dim 0 is of one round."""
        shape, dim, size = place
        made = self._moved(value, 0, dim, origin)
        if size:
            made = self._call(origin, aten.reshape.default, made, list(shape))
        return made

    def _product(self, a: fx.Node, b: fx.Node, shape: torch.Size, origin: fx.Node) -> fx.Node:
        n = self.count
        if len(shape) == 2:
            return self._call(origin, aten.bmm.default, a, b)
        a, b = (self._call(origin, aten.reshape.default, m, [n * shape[0], *m.meta["val"].shape[2:]]) for m in (a, b))
        made = self._call(origin, aten.bmm.default, a, b)
        return self._call(origin, aten.reshape.default, made, [n, *shape])

    def _repeated(self, value: Any, node: fx.Node, origin: fx.Node) -> fx.Node:
        """A tensor that is the same in all rounds: once for each, but where it is broadcast."""
        pointwise = node.target not in BY_FORM or node.target is aten._to_copy.default
        if pointwise:
            return value  # type: ignore[no-any-return]
        shape = list(value.meta["val"].shape)
        made = self._call(origin, aten.reshape.default, value, [1, *shape])
        return self._call(origin, aten.expand.default, made, [self.count, *shape])

    def _ranked(self, value: fx.Node, ndim: int, origin: fx.Node) -> fx.Node:
        """With dims of one number behind the first, so that it broadcasts as a round's did."""
        n, *shape = value.meta["val"].shape
        if len(shape) == ndim:
            return value
        return self._call(origin, aten.reshape.default, value, [n, *[1] * (ndim - len(shape)), *shape])

    def _with_later_dim(self, args: list[Any], target: Any, node: fx.Node) -> list[Any]:
        at = DIM_AT[target]
        if len(args) <= at:
            args = [*args, *[0] * (at + 1 - len(args))] if target in (*JOINED, aten.split.Tensor) else args
        ndim = node.all_input_nodes[0].meta["val"].ndim
        dims = args[at] if len(args) > at else list(range(ndim))
        args = args if len(args) > at else [*args, dims]
        args[at] = dims + 1 if isinstance(dims, int) else [d + 1 for d in (dims or range(ndim))]
        return args

    def _moved(self, value: fx.Node, dim: int, to: int, origin: fx.Node) -> fx.Node:
        order = list(range(value.meta["val"].ndim))
        order.insert(to, order.pop(dim))
        if order == sorted(order):
            return value
        return self._call(origin, aten.permute.default, value, order)

    def _call(self, origin: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return insert_call(self.graph, origin, target, *args, **kwargs)

    def replace(self, rounds: Rounds, users: set[fx.Node]) -> None:
        """Let who adds up or joins the rounds' results take them from what was made."""
        made = rounds.batched
        assert made is not None
        if (joining := joined_by(rounds, users)) is not None:
            for user in joining:
                self._join(made, user)
            return
        root = sum_of(rounds, users)
        if root is None:  # what the rounds make they go on to make
            return
        members = set(rounds.members.values())
        value = root.meta["val"]
        below = additions(root)
        others = [t for t in terms_of(root) if t not in members and not _is_zero(t, root)]
        with self.graph.inserting_before(root):
            if place_of(rounds, self.count) is None:
                kwargs = {"dtype": value.dtype} if made.meta["val"].dtype != value.dtype else {}
                made = self._call(root, aten.sum.dim_IntList, made, [0], False, **kwargs)
            for term in others[1:]:
                others[0] = self._call(root, aten.add.Tensor, others[0], term)
        if others:
            root.args = (others[0], made)
        else:
            root.replace_all_uses_with(made)
            self.replaced[root] = made
            below.insert(0, root)
        # Terms of other rounds are in the new sum alone.
        for node in below:
            self.graph.erase_node(node)

    def _join(self, made: fx.Node, user: fx.Node) -> None:
        dim = int(user.args[1]) if len(user.args) > 1 else 0  # type: ignore[arg-type]
        with self.graph.inserting_before(user):
            joined = self._moved(made, 0, dim, user)
            if user.target is aten.cat.default:
                joined = self._call(user, aten.reshape.default, joined, list(user.meta["val"].shape))
        user.replace_all_uses_with(joined)
        self.replaced[user] = joined
        self.graph.erase_node(user)


def _is_zero(node: fx.Node, root: fx.Node) -> bool:
    """Whether a term of a sum adds nothing to it."""
    value, whole = node.meta["val"], root.meta["val"]
    args: Any = node.args
    return bool(node.target is aten.full.default and args[1] == 0 and value.shape == whole.shape)
