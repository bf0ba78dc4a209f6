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
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import copy_graph, inherit_origin, insert_call, is_backward, tensor_arguments
from autopar.ir.node_info import info, set_info
from autopar.ir.program import Program

aten = torch.ops.aten

_DIM_AT = {
    aten.select.int: 1, aten.slice.Tensor: 1, aten._softmax.default: 1, aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2, aten._log_softmax_backward_data.default: 2, aten.cumsum.default: 1,
    aten.sum.dim_IntList: 1, aten.amax.default: 1, aten.amin.default: 1, aten.slice_backward.default: 2,
    aten.select_backward.default: 2, aten.cat.default: 1, aten.stack.default: 1, aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}  # fmt: skip
"""Operators of which a dim, or a list of them, is an argument, and which."""

_SHAPE_AT = {
    aten.reshape.default: 1, aten.expand.default: 1, aten.slice_backward.default: 1, aten.select_backward.default: 1
}  # fmt: skip
"""Operators of which the shape of the result, or of most of it, is an argument."""

_BY_FORM = {*_DIM_AT, *_SHAPE_AT, aten.permute.default, aten.mm.default, aten.bmm.default, aten._to_copy.default}
_COMPARISONS = {aten.eq.Scalar: aten.eq.Tensor, aten.ne.Scalar: aten.ne.Tensor}
"""Of experts of tokens with the number of a round."""

_JOINED = (aten.cat.default, aten.stack.default)


@dataclass(eq=False)
class _Rounds:
    """What all rounds of a loop do alike.

    Attributes:
        members: the operator of each round.
        arguments: tensor arguments: what the rounds made before, or one node for all.
        source: of what a first operator takes a part.
        dim: along which; None for a comparison with the number of the round.
        batched: what takes their place.
    """

    members: dict[int, fx.Node] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    source: fx.Node | None = None
    dim: int | None = None
    batched: fx.Node | None = None

    @property
    def first(self) -> fx.Node:
        """Any operator: they are alike."""
        return next(iter(self.members.values()))

    @property
    def is_seed(self) -> bool:
        """Whether the rounds begin here."""
        return self.source is not None


def batch_loops(program: Program) -> Program:
    """Make batched products of loops over matrices of a parameter; computes the same."""
    sliced = [n for n in program.graph.graph.nodes if n.target in (aten.select.int, aten.unbind.int)]
    parameters = _from_parameters(program)
    counts = {n.args[0].meta["val"].shape[_dim(n)] for n in sliced if n.args[0] in parameters}
    if not counts:
        return program
    graph = copy_graph(program.graph)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    renamed = dict(zip(program.placeholders, placeholders, strict=True))
    for count in sorted(c for c in counts if c > 1):
        of = {renamed.get(n, n).name for n in parameters}
        _batch(graph.graph, count, of)
    return program.with_graph(graph)


def _from_parameters(program: Program) -> set[fx.Node]:
    """Parameters, and what is computed from nothing but one of them."""
    found = program.inputs_of("parameter")
    for node, sources in program.sources.items():
        if len(sources) == 1 and sources[0][0] in found:
            found.add(node)
    return found


def _dim(node: fx.Node) -> int:
    """The dim of which a ``select`` or ``unbind`` takes a part."""
    return int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]


def _batch(graph: fx.Graph, count: int, parameters: set[str]) -> None:
    """Batch the loops of so many rounds."""
    found = _find(graph, count)
    valid = _readable(found, count)
    emitter = _Emitter(graph, count)
    for loop in _loops(valid):
        if any(_multiplies_weight(r, parameters) for r in loop):
            _emit(emitter, loop, found)


@dataclass
class _Found:
    """What rounds a graph has.

    Attributes:
        rounds: operators that some round has, in the order of the first one's.
        of: what each operator belongs to, and the number of its round.
        place: of each node in the graph.
        same: of what no round makes, the first operator that makes the same.
    """

    rounds: list[_Rounds] = field(default_factory=list)
    of: dict[fx.Node, tuple[_Rounds, int]] = field(default_factory=dict)
    place: dict[fx.Node, int] = field(default_factory=dict)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)


def _find(graph: fx.Graph, count: int) -> _Found:
    """Operators by what they are in any round, also where some rounds have none like it."""
    found, known, equal = _Found(), dict[Any, _Rounds](), dict[Any, fx.Node]()
    for place, node in enumerate(graph.nodes):
        found.place[node] = place
        if node.op != "call_function":
            continue
        arguments = tuple(found.of.get(a, (found.same.get(a, a), None)) for a in tensor_arguments(node))
        lanes = {lane for _, lane in arguments if lane is not None}
        common: Any = (node.target, is_backward(node), info(node).region)
        if not lanes:
            part = _part(node, count)
            if part is None:
                # What each round makes anew, such as a cast of all tokens.
                # A sum may be made anew, without the terms of rounds.
                if _is_known(node) and not _is_addition(node):
                    values = tuple(value for value, _ in arguments)
                    found.same[node] = equal.setdefault((*common, values, _static(node, -1, count)), node)
                continue
            source, dim, size, lane = part
            source = found.same.get(source, source)
            key, made = (*common, source, dim, size), _Rounds({}, (source,), source, dim)
        elif len(lanes) == 1 and _is_known(node):
            (lane,) = lanes
            values = tuple(value for value, _ in arguments)
            key, made = (*common, values, _static(node, lane, count)), _Rounds({}, values)
        else:
            continue  # of several rounds, or in a form that has no batched one
        rounds = known.setdefault(key, made)
        if rounds is made:
            found.rounds.append(made)
        # Of equal operators in a round the second one is the first of others.
        if lane in rounds.members:
            again = 1
            while lane in rounds.members:
                rounds = known.setdefault((key, again), _Rounds({}, made.arguments, made.source, made.dim))
                again += 1
            if not rounds.members:
                found.rounds.append(rounds)
        rounds.members[lane] = node
        found.of[node] = rounds, lane
    return found


def _part(node: fx.Node, count: int) -> tuple[fx.Node, int | None, int, int] | None:
    """What a round begins with: source, dim, size of the part (0: without the dim), number of the round."""
    args: Any = node.args
    if node.target in _COMPARISONS and type(args[1]) is int and not node.kwargs:
        return (args[0], None, 0, args[1]) if 0 <= args[1] < count else None
    if node.target is operator.getitem:
        made, index = args
        if made.target is aten.unbind.int:
            source, dim, size = made.args[0], _dim(made), 0
        elif made.target is aten.split.Tensor:
            source, size, dim = made.args[0], made.args[1], made.args[2] if len(made.args) > 2 else 0
        else:
            return None
    elif node.target is aten.select.int:
        (source, dim, index), size = args, 0
    elif node.target is aten.slice.Tensor and args[4] == 1:
        source, dim, start, end, _ = args
        size = end - start
        index = start // size if size and start % size == 0 else -1
    else:
        return None
    index = index + source.meta["val"].shape[dim] if index < 0 and not size else index
    fits = 0 <= index < count and source.meta["val"].shape[dim] >= count * max(size, 1)
    return (source, dim, size, index) if fits else None


def _is_known(node: fx.Node) -> bool:
    """Whether an operator has a batched form."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return source.target in (aten.split.Tensor, aten.split_with_sizes.default)
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or node.target in _BY_FORM


def _static(node: fx.Node, lane: int, count: int) -> str:
    """Arguments that are no tensors, as text; the place of a part that is the round's own is "own"."""
    args: Any = node.args
    if (at := _own_place(node, lane, count)) is not None:
        return f"own {at}"
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda _: "%")
    return f"{args!r}{sorted(kwargs.items(), key=lambda item: item[0])!r}"


def _own_place(node: fx.Node, lane: int, count: int) -> tuple[Any, ...] | None:
    """Of a gradient of a round's part, the shape of the whole, the dim and the size; None if it is no such gradient."""
    args: Any = node.args
    if node.target is aten.select_backward.default:
        _, shape, dim, index = args
        return ((*shape,), dim, 0) if index == lane and shape[dim] == count else None
    if node.target is aten.slice_backward.default:
        _, shape, dim, start, end, step = args
        size = end - start
        whole = (start, step, shape[dim]) == (lane * size, 1, count * size)
        return ((*shape,), dim, size) if whole else None
    return None


def _readable(found: _Found, count: int) -> list[_Rounds]:
    """What all rounds do, and only what has a batched form reads."""
    valid = {id(r): r for r in found.rounds if set(r.members) == set(range(count))}
    users = defaultdict[int, list[_Rounds]](list)
    for rounds in valid.values():
        for argument in rounds.arguments:
            if isinstance(argument, _Rounds):
                users[id(argument)].append(rounds)
    pending = list(valid.values())
    while pending:
        rounds = pending.pop()
        if id(rounds) not in valid:
            continue
        made = [a for a in rounds.arguments if isinstance(a, _Rounds)]
        if all(id(a) in valid for a in made) and _are_read(rounds, found, valid, count):
            continue
        del valid[id(rounds)]
        pending += [*made, *users[id(rounds)]]
    return [r for r in found.rounds if id(r) in valid]


def _are_read(rounds: _Rounds, found: _Found, valid: dict[int, _Rounds], count: int) -> bool:
    """Whether who reads the rounds' results has a batched form."""
    if rounds.is_seed:  # what is there without the loop others may read, too
        return True
    if isinstance(rounds.first.meta["val"], torch.Tensor) is False:
        return all(u in found.of and id(found.of[u][0]) in valid for m in rounds.members.values() for u in m.users)
    placed = _place_of(rounds, count) is not None
    others = set[fx.Node]()
    for member in rounds.members.values():
        others |= {u for u in member.users if u not in found.of or id(found.of[u][0]) not in valid or placed}
    return not others or (not placed and _joining(rounds, others) is not None) or _sum_of(rounds, others) is not None


def _place_of(rounds: _Rounds, count: int) -> tuple[Any, ...] | None:
    if rounds.is_seed:
        return None
    return _own_place(rounds.members[1], 1, count)


def _joining(rounds: _Rounds, users: set[fx.Node]) -> list[fx.Node] | None:
    """The users, if each joins all rounds' results in order."""
    members = [rounds.members[i] for i in range(len(rounds.members))]
    fits = all(u.target in _JOINED and list(u.args[0]) == members for u in users)  # type: ignore[arg-type]
    return sorted(users, key=lambda u: u.name) if fits else None


def _sum_of(rounds: _Rounds, users: set[fx.Node]) -> fx.Node | None:
    """The lowest sum of all rounds' results, each of which nothing else reads but ``users``: additions below it."""
    members = set(rounds.members.values())
    if not all(_is_addition(u) for u in users):
        return None
    if any(sum(u in users for u in m.users) != 1 for m in members):
        return None
    root = next(u for u in rounds.first.users if u in users)
    while True:
        terms = _terms(root)
        if members <= set(terms):
            return root if all(terms.count(m) == 1 for m in members) else None
        above = list(root.users)
        if len(above) != 1 or not _is_addition(above[0]) or not _alike(above[0], root):
            return None
        (root,) = above


def _is_addition(node: fx.Node) -> bool:
    shapes = {a.meta["val"].shape for a in node.all_input_nodes}
    whole = node.target is aten.add.Tensor and not node.kwargs and len(tensor_arguments(node)) == 2
    return whole and shapes == {node.meta["val"].shape}


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return a.meta["val"].dtype == b.meta["val"].dtype and is_backward(a) == is_backward(b)


def _terms(root: fx.Node) -> list[fx.Node]:
    """What a sum adds up; sums that are read once, and by it, are none of it."""
    found, pending = list[fx.Node](), list(reversed(tensor_arguments(root)))
    while pending:
        node = pending.pop()
        if _is_addition(node) and len(node.users) == 1 and _alike(node, root):
            pending += reversed(tensor_arguments(node))
        else:
            found.append(node)
    return found


def _additions(root: fx.Node) -> list[fx.Node]:
    """The sums below one that are none of its terms, from the top."""
    found, pending = list[fx.Node](), tensor_arguments(root)
    while pending:
        node = pending.pop()
        if _is_addition(node) and len(node.users) == 1 and _alike(node, root):
            found.append(node)
            pending += tensor_arguments(node)
    return found


def _loops(valid: list[_Rounds]) -> Iterator[list[_Rounds]]:
    """Loops: what is connected by values that rounds make, with what they begin with, in the order of the graph."""
    root = {id(r): r for r in valid}

    def top(rounds: _Rounds) -> _Rounds:
        while root[id(rounds)] is not rounds:
            rounds = root[id(rounds)]
        return rounds

    for rounds in valid:
        for argument in rounds.arguments:
            if isinstance(argument, _Rounds) and not argument.is_seed:
                root[id(top(argument))] = top(rounds)
    loops = defaultdict[int, dict[int, _Rounds]](dict)
    for rounds in valid:
        if not rounds.is_seed:
            loop = loops[id(top(rounds))]
            for argument in rounds.arguments:
                if isinstance(argument, _Rounds) and argument.is_seed:
                    loop[id(argument)] = argument
            loop[id(rounds)] = rounds
    for loop in loops.values():
        yield list(loop.values())


def _multiplies_weight(rounds: _Rounds, parameters: set[str]) -> bool:
    """Whether rounds multiply something by their own matrix of a parameter."""
    operands = [a for a in rounds.arguments if isinstance(a, _Rounds)]
    return rounds.first.target is aten.mm.default and any(_is_weight(a, parameters) for a in operands)


def _is_weight(rounds: _Rounds, parameters: set[str]) -> bool:
    while rounds.source is None:
        if len(rounds.arguments) != 1 or not isinstance(rounds.arguments[0], _Rounds):
            return False
        (rounds,) = rounds.arguments
    return rounds.source.name in parameters


def _emit(emitter: _Emitter, loop: list[_Rounds], found: _Found) -> None:
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
            placed = _place_of(rounds, count) is not None
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

    def fits(self, rounds: _Rounds) -> bool:
        """Whether what was made has the numbers of all rounds, in their dtype."""
        value, each = rounds.batched.meta["val"], rounds.first.meta["val"]  # type: ignore[union-attr]
        if not isinstance(each, torch.Tensor):
            return True
        if _place_of(rounds, self.count) is not None:
            return bool(value.dtype == each.dtype and value.shape == each.shape)
        return bool(value.dtype == each.dtype and tuple(value.shape) == (self.count, *each.shape))

    def made(self, rounds: _Rounds, origin: fx.Node) -> fx.Node:
        """One operator for those of all rounds; dim 0 of what it gives is the round."""
        if rounds.is_seed:
            return self._begun(rounds, origin)
        node, n = rounds.first, self.count
        args: Any = node.args
        each = node.meta["val"]
        same = [None if isinstance(a, _Rounds) else self._now(a) for a in rounds.arguments]
        values = iter(a.batched if isinstance(a, _Rounds) else self._repeated(s, node, origin)
                      for a, s in zip(rounds.arguments, same, strict=True))  # fmt: skip
        batched: Any = fx.node.map_arg(args, lambda _: next(values))
        target: Any = node.target
        if target is operator.getitem:
            return self._known(origin, target, batched, {}, batched[0].meta["val"][batched[1]])
        if (placed := _place_of(rounds, n)) is not None:
            return self._placed(batched[0], placed, origin)
        if target in (aten.mm.default, aten.bmm.default):
            return self._product(batched[0], batched[1], each.shape, origin)
        if target is aten.permute.default:
            return self._call(origin, target, batched[0], [0, *(d + 1 for d in args[1])])
        if target in _SHAPE_AT or target in _DIM_AT:
            batched = list(batched)
            if target in _SHAPE_AT:
                shape = each.shape if target in (aten.reshape.default, aten.expand.default) else args[1]
                batched[1] = [n, *shape]
            if target is aten.expand.default:
                batched[0] = self._ranked(batched[0], each.ndim, origin)
            if target in _DIM_AT:
                batched = self._with_later_dim(batched, target, node)
            return self._call(origin, target, *batched, **node.kwargs)
        ranked = fx.node.map_arg(batched, lambda a: a if a in same else self._ranked(a, each.ndim, origin))
        return self._call(origin, target, *ranked, **node.kwargs)

    def _now(self, node: fx.Node) -> fx.Node:
        """What took a node's place, if anything did."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def _begun(self, rounds: _Rounds, origin: fx.Node) -> fx.Node:
        """All parts of a tensor, or comparisons with all numbers."""
        target: Any = rounds.first.target
        dim, n = rounds.dim, self.count
        assert rounds.source is not None
        source = self._now(rounds.source)
        value = source.meta["val"]
        if dim is None:
            with value.fake_mode:
                each = torch.arange(n, device=value.device)
            options = {"dtype": torch.int64, "device": value.device}
            numbers = self._known(origin, aten.arange.default, (n,), options, each)
            numbers = self._call(origin, aten.reshape.default, numbers, [n, *[1] * value.ndim])
            given = self._call(origin, aten.reshape.default, source, [1, *value.shape])
            return self._call(origin, _COMPARISONS[target], given, numbers)
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
        pointwise = node.target not in _BY_FORM or node.target is aten._to_copy.default
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
        at = _DIM_AT[target]
        if len(args) <= at:
            args = [*args, *[0] * (at + 1 - len(args))] if target in (*_JOINED, aten.split.Tensor) else args
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
        if not kwargs:
            return insert_call(self.graph, origin, target, *args)
        values: Any = fx.node.map_arg(args, lambda a: a.meta["val"])
        with origin.meta["val"].fake_mode, torch.no_grad():
            return self._known(origin, target, args, kwargs, target(*values, **kwargs))

    def _known(self, origin: fx.Node, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        inherit_origin(node, origin)
        set_info(node, replace(info(node), internal=False))
        node.meta["val"] = value
        return node

    def replace(self, rounds: _Rounds, users: set[fx.Node]) -> None:
        """Let who adds up or joins the rounds' results take them from what was made."""
        made = rounds.batched
        assert made is not None
        if (joining := _joining(rounds, users)) is not None:
            for user in joining:
                self._join(made, user)
            return
        root = _sum_of(rounds, users)
        if root is None:  # what the rounds make they go on to make
            return
        members = set(rounds.members.values())
        value = root.meta["val"]
        below = _additions(root)
        others = [t for t in _terms(root) if t not in members and not _is_zero(t, root)]
        with self.graph.inserting_before(root):
            if _place_of(rounds, self.count) is None:
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
