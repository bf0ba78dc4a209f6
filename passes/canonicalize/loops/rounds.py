"""Rounds of loops over parts of tensors: operators that are alike but for the part that each begins with."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import is_backward, tensor_arguments
from autopar.ir.node_info import info

aten = torch.ops.aten

DIM_AT = {
    aten.select.int: 1, aten.slice.Tensor: 1, aten._softmax.default: 1, aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2, aten._log_softmax_backward_data.default: 2, aten.cumsum.default: 1,
    aten.sum.dim_IntList: 1, aten.amax.default: 1, aten.amin.default: 1, aten.slice_backward.default: 2,
    aten.select_backward.default: 2, aten.cat.default: 1, aten.stack.default: 1, aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}  # fmt: skip
"""Operators of which a dim, or a list of them, is an argument, and which."""

SHAPE_AT = {
    aten.reshape.default: 1, aten.expand.default: 1, aten.slice_backward.default: 1, aten.select_backward.default: 1
}  # fmt: skip
"""Operators of which the shape of the result, or of most of it, is an argument."""

BY_FORM = {*DIM_AT, *SHAPE_AT, aten.permute.default, aten.mm.default, aten.bmm.default, aten._to_copy.default}
COMPARISONS = {aten.eq.Scalar: aten.eq.Tensor, aten.ne.Scalar: aten.ne.Tensor}
"""Of experts of tokens with the number of a round."""

JOINED = (aten.cat.default, aten.stack.default)


@dataclass(eq=False)
class Rounds:
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


def dim_of(node: fx.Node) -> int:
    """The dim of which a ``select`` or ``unbind`` takes a part."""
    return int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]


@dataclass
class Found:
    """What rounds a graph has.

    Attributes:
        rounds: operators that some round has, in the order of the first one's.
        of: what each operator belongs to, and the number of its round.
        place: of each node in the graph.
        same: of what no round makes, the first operator that makes the same.
    """

    rounds: list[Rounds] = field(default_factory=list)
    of: dict[fx.Node, tuple[Rounds, int]] = field(default_factory=dict)
    place: dict[fx.Node, int] = field(default_factory=dict)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)


def find_rounds(graph: fx.Graph, count: int) -> Found:
    """Operators by what they are in any round, also where some rounds have none like it."""
    found, known, equal = Found(), dict[Any, Rounds](), dict[Any, fx.Node]()
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
            key, made = (*common, source, dim, size), Rounds({}, (source,), source, dim)
        elif len(lanes) == 1 and _is_known(node):
            (lane,) = lanes
            values = tuple(value for value, _ in arguments)
            key, made = (*common, values, _static(node, lane, count)), Rounds({}, values)
        else:
            continue  # of several rounds, or in a form that has no batched one
        rounds = known.setdefault(key, made)
        if rounds is made:
            found.rounds.append(made)
        # Of equal operators in a round the second one is the first of others.
        if lane in rounds.members:
            again = 1
            while lane in rounds.members:
                rounds = known.setdefault((key, again), Rounds({}, made.arguments, made.source, made.dim))
                again += 1
            if not rounds.members:
                found.rounds.append(rounds)
        rounds.members[lane] = node
        found.of[node] = rounds, lane
    return found


def _part(node: fx.Node, count: int) -> tuple[fx.Node, int | None, int, int] | None:
    """What a round begins with: source, dim, size of the part (0: without the dim), number of the round."""
    args: Any = node.args
    if node.target in COMPARISONS and type(args[1]) is int and not node.kwargs:
        return (args[0], None, 0, args[1]) if 0 <= args[1] < count else None
    if node.target is operator.getitem:
        made, index = args
        if made.target is aten.unbind.int:
            source, dim, size = made.args[0], dim_of(made), 0
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
    return torch.Tag.pointwise in tags or node.target in BY_FORM


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


def readable(found: Found, count: int) -> list[Rounds]:
    """What all rounds do, and only what has a batched form reads."""
    valid = {id(r): r for r in found.rounds if set(r.members) == set(range(count))}
    users = defaultdict[int, list[Rounds]](list)
    for rounds in valid.values():
        for argument in rounds.arguments:
            if isinstance(argument, Rounds):
                users[id(argument)].append(rounds)
    pending = list(valid.values())
    while pending:
        rounds = pending.pop()
        if id(rounds) not in valid:
            continue
        made = [a for a in rounds.arguments if isinstance(a, Rounds)]
        if all(id(a) in valid for a in made) and _are_read(rounds, found, valid, count):
            continue
        del valid[id(rounds)]
        pending += [*made, *users[id(rounds)]]
    return [r for r in found.rounds if id(r) in valid]


def _are_read(rounds: Rounds, found: Found, valid: dict[int, Rounds], count: int) -> bool:
    """Whether who reads the rounds' results has a batched form."""
    if rounds.is_seed:  # what is there without the loop others may read, too
        return True
    if isinstance(rounds.first.meta["val"], torch.Tensor) is False:
        return all(u in found.of and id(found.of[u][0]) in valid for m in rounds.members.values() for u in m.users)
    placed = place_of(rounds, count) is not None
    others = set[fx.Node]()
    for member in rounds.members.values():
        others |= {u for u in member.users if u not in found.of or id(found.of[u][0]) not in valid or placed}
    return not others or (not placed and joined_by(rounds, others) is not None) or sum_of(rounds, others) is not None


def place_of(rounds: Rounds, count: int) -> tuple[Any, ...] | None:
    """Of gradients of the rounds' own parts, the shape of the whole, the dim and the size; None if they are none."""
    if rounds.is_seed:
        return None
    return _own_place(rounds.members[1], 1, count)


def joined_by(rounds: Rounds, users: set[fx.Node]) -> list[fx.Node] | None:
    """The users, if each joins all rounds' results in order."""
    members = [rounds.members[i] for i in range(len(rounds.members))]
    fits = all(u.target in JOINED and list(u.args[0]) == members for u in users)  # type: ignore[arg-type]
    return sorted(users, key=lambda u: u.name) if fits else None


def sum_of(rounds: Rounds, users: set[fx.Node]) -> fx.Node | None:
    """The lowest sum of all rounds' results, each of which nothing else reads but ``users``: additions below it."""
    members = set(rounds.members.values())
    if not all(_is_addition(u) for u in users):
        return None
    if any(sum(u in users for u in m.users) != 1 for m in members):
        return None
    root = next(u for u in rounds.first.users if u in users)
    while True:
        terms = terms_of(root)
        if members <= set(terms):
            return root if all(terms.count(m) == 1 for m in members) else None
        above = list(root.users)
        if len(above) != 1 or not _is_addition(above[0]) or not _alike(above[0], root):
            return None
        (root,) = above


def _is_addition(node: fx.Node) -> bool:
    # First what it is: what others read may be several tensors.
    if node.target is not aten.add.Tensor or node.kwargs or len(tensor_arguments(node)) != 2:
        return False
    return {a.meta["val"].shape for a in node.all_input_nodes} == {node.meta["val"].shape}


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return a.meta["val"].dtype == b.meta["val"].dtype and is_backward(a) == is_backward(b)


def terms_of(root: fx.Node) -> list[fx.Node]:
    """What a sum adds up; sums that are read once, and by it, are none of it."""
    found, pending = list[fx.Node](), list(reversed(tensor_arguments(root)))
    while pending:
        node = pending.pop()
        if _is_addition(node) and len(node.users) == 1 and _alike(node, root):
            pending += reversed(tensor_arguments(node))
        else:
            found.append(node)
    return found


def additions(root: fx.Node) -> list[fx.Node]:
    """The sums below one that are none of its terms, from the top."""
    found, pending = list[fx.Node](), tensor_arguments(root)
    while pending:
        node = pending.pop()
        if _is_addition(node) and len(node.users) == 1 and _alike(node, root):
            found.append(node)
            pending += tensor_arguments(node)
    return found


def loops_of(valid: list[Rounds]) -> Iterator[list[Rounds]]:
    """Loops: what is connected by values that rounds make, with what they begin with, in the order of the graph."""
    root = {id(r): r for r in valid}

    def top(rounds: Rounds) -> Rounds:
        while root[id(rounds)] is not rounds:
            rounds = root[id(rounds)]
        return rounds

    for rounds in valid:
        for argument in rounds.arguments:
            if isinstance(argument, Rounds) and not argument.is_seed:
                root[id(top(argument))] = top(rounds)
    loops = defaultdict[int, dict[int, Rounds]](dict)
    for rounds in valid:
        if not rounds.is_seed:
            loop = loops[id(top(rounds))]
            for argument in rounds.arguments:
                if isinstance(argument, Rounds) and argument.is_seed:
                    loop[id(argument)] = argument
            loop[id(rounds)] = rounds
    for loop in loops.values():
        yield list(loop.values())
