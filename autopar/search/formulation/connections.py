"""Which variables are connected by moves of values, and the seconds of a labeling in each region of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.search.formulation.variables.context import BuildContext
from autopar.search.formulation.variables.tensors import is_loss
from autopar.search.formulation.variables.variable import (
    BEFORE_MICROBATCHES,
    IN_BACKWARD,
    Floats,
    Ints,
    Port,
    Variable,
)
from autopar.search.overlap.regions import BEFORE, BLOCKING_KINDS, CHUNKED
from autopar.search.overlap.step_time import FILLING, KERNELS, feature, no_features


@dataclass(frozen=True)
class Connection:
    """Values that go from one variable to another.

    Attributes:
        source: key of the producer.
        out: its port.
        target: key of the reader.
        into: its port.
        weight: how many edges of the program it stands for.
        moves: how often per step each of these moves is made if each microbatch makes it.
        value: class whose values are moved, and which of its outputs.
        reader: class of operators that read them, if that is known.
    """

    source: str
    out: Port
    target: str
    into: Port
    weight: int
    moves: int
    value: tuple[str, int]
    reader: str = ""

    def shares(self, context: BuildContext) -> bool:
        """Whether it is a value's move to its consumer layout, beside which readers may take it as it was made."""
        forced = self.target.removeprefix("consumer ") in context.restrictions.forced_consumer_layouts
        return self.target.startswith("consumer ") and not forced


def connections(context: BuildContext, keys: Collection[str]) -> Iterator[Connection]:
    """From values to their consumer layouts, and from there to the readers.

    Args:
        context: of the problem.
        keys: of its variables.
    """
    for (key, out), users in context.classes.uses.items():
        # A sum over microbatches is moved once per step, after the last of them.
        source, moves = _source(context, key), context.program.moves(context.classes.members[key][0])
        consumer, port, value = f"consumer {key} {out}", ("out", out), (key, out)
        if consumer in keys:
            yield Connection(source, port, consumer, ("in", 0), context.classes.count[key], moves, value)
            source, port = consumer, ("out", 0)
        for (target, into), weight in users.items():
            yield Connection(source, port, target, ("in", into), weight, moves, value, target)


def _source(context: BuildContext, key: str) -> str:
    """The variable that a class's values come from: a tangent has its result's layout."""
    if key.startswith("tangent "):
        name = key.split()[1]
        return key if is_loss(context, name) else f"result {name}"
    return key


def features_of(
    context: BuildContext, variables: Sequence[Variable], joined: Sequence[Connection], labels: Ints
) -> dict[str, Floats]:
    """Seconds in each region under a labeling; times the prices of any weights, they are its cost under these.

    Args:
        context: of a problem with weights.
        variables: of the problem, without states.
        joined: their connections.
        labels: one for each variable.
    """
    found: defaultdict[str, Floats] = defaultdict(lambda: no_features(len(context.sizes)))
    number = {v.key: i for i, v in enumerate(variables)}
    made = {c.target: int(variables[number[c.source]].ports[c.out][labels[number[c.source]]])
            for c in joined if c.shares(context)}  # fmt: skip
    for variable, label in zip(variables, labels, strict=True):
        if variable.seconds is not None:
            region, which = _of_kernels(context, variable)
            found[region][which] += variable.seconds[label]
    for c in joined:
        i, j = number[c.source], number[c.target]
        row, column = variables[i].ports[c.out][labels[i]], variables[j].ports[c.into][labels[j]]
        if made.get(c.source) == column:  # the reader takes it as it was made
            continue
        region, per_second = _of_moves(context, c, int(variables[j].reads[labels[j]]))
        table = context.tables.of(variables[i].types[c.out])
        apart = table.apart(np.array([row]), np.array([column]), context.chunks(*c.value))
        found[region] += per_second @ apart[:, 0, 0]
    return dict(found)


def spent(
    context: BuildContext, variables: Sequence[Variable], joined: Sequence[Connection], labels: Sequence[Ints]
) -> Iterator[tuple[int, int | None, str, Floats]]:
    """The same of each variable, and of each connection, for some labels of each variable.

    Args:
        context: of a problem with weights.
        variables: of the problem, without states.
        joined: their connections.
        labels: some of each variable.

    Yields:
        A variable, None, the region and ``[features, labels]``; and two connected variables, the region and
        ``[features, labels, labels of the second]``.
    """
    number = {v.key: i for i, v in enumerate(variables)}
    for i, variable in enumerate(variables):
        if variable.seconds is not None:
            region, which = _of_kernels(context, variable)
            found = np.zeros((len(no_features(len(context.sizes))), len(labels[i])))
            found[which] = variable.seconds[labels[i]]
            yield i, None, region, found
    for c in joined:
        i, j = number[c.source], number[c.target]
        row, column = variables[i].ports[c.out][labels[i]], variables[j].ports[c.into][labels[j]]
        # Without states a variable has one time at which it reads.
        region, per_second = _of_moves(context, c, int(variables[j].reads[0]))
        apart = context.tables.of(variables[i].types[c.out]).apart(row, column, context.chunks(*c.value))
        found = np.tensordot(per_second, apart, 1)
        found[:, variables[i].made[labels[i]][:, None] == column[None, :] + 1] = 0  # read as it was made
        # Members of a class that read each other have one label.
        yield (i, None, region, np.diagonal(found, axis1=1, axis2=2)) if i == j else (i, j, region, found)


def _of_kernels(context: BuildContext, variable: Variable) -> tuple[str, int]:
    """The region in which an operator runs, and the feature that its kernels are."""
    assert context.weights is not None
    regions, node = context.weights.step.regions, context.classes.members[variable.key][0]
    if variable.invariant:
        return BEFORE, KERNELS
    return regions.names[node], FILLING if node in regions.filling else KERNELS


def _of_moves(context: BuildContext, joined: Connection, when: int) -> tuple[str, Floats]:
    """The region of a connection's moves, and what a second of each part of them is of its features.

    Args:
        context: of a problem with weights.
        joined: the connection.
        when: its reader reads, see `Variable.reads`.

    Returns:
        The region, and ``[features, 2 + 3 axes]``, see `MoveSeconds.chunked_seconds`.
    """
    assert context.weights is not None
    regions, axes = context.weights.step.regions, len(context.sizes)
    node = context.classes.members[joined.value[0]][0]
    reader = context.classes.members.get(joined.reader, (None,))[0]
    region, kind = regions.of_move(
        (node, joined.value[1]), backward=when == IN_BACKWARD, hoisted=when == BEFORE_MICROBATCHES, reader=reader
    )
    found, messages = np.zeros((len(no_features(axes)), 2 + 3 * axes)), context.weights.messages(region, kind)
    found[KERNELS, 0], found[KERNELS, -1] = 1, kind in BLOCKING_KINDS
    for axis in range(axes):
        found[feature(kind, axis, axes), 1 + axis] = 1
        found[feature(CHUNKED, axis, axes), 1 + axes + axis] = 1
        found[feature(kind, axis, axes), 1 + 2 * axes + axis] = messages[axis]
    return region, found * (joined.weight * (1 if when == BEFORE_MICROBATCHES else joined.moves))
