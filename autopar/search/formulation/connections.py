"""Which variables are connected by moves of values, and the seconds of a labeling in each region of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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
    assert context.weights is not None
    regions, axes = context.weights.step.regions, len(context.sizes)
    found: defaultdict[str, Floats] = defaultdict(lambda: no_features(axes))
    number = {v.key: i for i, v in enumerate(variables)}
    made = {c.target: int(variables[number[c.source]].ports[c.out][labels[number[c.source]]])
            for c in joined if c.shares(context)}  # fmt: skip
    for variable, label in zip(variables, labels, strict=True):
        if variable.seconds is not None:
            node = context.classes.members[variable.key][0]
            which = FILLING if node in regions.filling and not variable.invariant else KERNELS
            found[BEFORE if variable.invariant else regions.names[node]][which] += variable.seconds[label]
    for c in joined:
        i, j = number[c.source], number[c.target]
        when = int(variables[j].reads[labels[j]])
        table = context.tables.of(variables[i].types[c.out])
        row, column = variables[i].ports[c.out][labels[i]], variables[j].ports[c.into][labels[j]]
        if made.get(c.source) == column:  # the reader takes it as it was made
            continue
        times = c.weight * (1 if when == BEFORE_MICROBATCHES else c.moves)
        node = context.classes.members[c.value[0]][0]
        reader = context.classes.members.get(c.reader, (None,))[0]
        region, kind = regions.of_move(
            (node, c.value[1]), backward=when == IN_BACKWARD, hoisted=when == BEFORE_MICROBATCHES, reader=reader
        )
        parts = times * table.apart(context.chunks(*c.value))[:, row, column]
        sent, hidden, messages = parts[1:-1].reshape(3, axes)
        found[region][KERNELS] += parts[0] + parts[-1] * (kind in BLOCKING_KINDS)
        found[region][feature(kind, 0, axes) : feature(kind, axes, axes)] += (
            sent + regions.share(region, kind) * messages
        )
        found[region][feature(CHUNKED, 0, axes) : feature(CHUNKED, axes, axes)] += hidden
    return dict(found)
